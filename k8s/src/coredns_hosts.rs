//! Controller of a `ConfigMap` with the names of all nodes, as a hosts file for `CoreDNS`' plugin of that name.
//!
//! 1. Only the gateway that holds the lease writes, and only once the cluster has named its nodes.
//! 2. The content follows from the table of nodes alone (`render`). Only differences are written, and changes of a second
//!    together. A further file is written before the others lose its names, and removed after they have them.
//! 3. Changes by other writers are reverted (`configmaps`), and the log names the writer.
//!
//! Never ends the process: after a lost lease the controller waits for it, and it retries after any failure.

mod configmaps;
mod render;

use crate::{
    leader_election::LeaderElector,
    log_throttle::LogThrottle,
    ownership::{foreign_managers, is_ours},
};
use causeway_gateway::{config, metrics::Metrics, state::NodesWriter};
use causeway_rt::backoff::Backoff;
use configmaps::{ConfigMaps, ResourceVersion, WriteError};
use futures_util::{
    StreamExt,
    future::OptionFuture,
    stream::{BoxStream, SelectAll},
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Client, ResourceExt};
use render::{LIMIT, RenderOptions};
use std::{collections::BTreeMap, convert::Infallible, net::IpAddr, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

/// Time to wait for further changes after the first one.
const GATHER: Duration = Duration::from_secs(1);
/// Longest pauses between tries: while the API does not respond, and while the API refuses.
const PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));

/// Controller that keeps the hosts file in step with the table of nodes.
pub struct HostsController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the file and its place.
    pub rules: config::CoreDnsHosts,
    /// Addresses for the name of an edge's node.
    pub addresses: Vec<IpAddr>,
    /// The table of nodes.
    pub nodes: NodesWriter,
    /// Metrics of the controller.
    pub metrics: Arc<Metrics>,
    /// Name of this gateway among the candidates for the lease; a random part is added.
    pub gateway: String,
}

impl HostsController {
    /// Runs the controller. Returns soon after `stop`, when the lease is released.
    pub async fn run(self, stop: CancellationToken) {
        if stop.run_until_cancelled(self.known()).await.is_none() {
            return;
        }
        let mut lease = LeaderElector::new(
            self.client.clone(),
            (&self.rules.namespace, self.rules.lease()),
            format!("{}_{:016x}", self.gateway, rand::random::<u64>()),
            self.rules.lease_duration,
        );
        loop {
            let acquired = stop.run_until_cancelled(lease.acquire()).await;
            let lost = match acquired {
                Some(()) => {
                    tracing::info!(
                        lease = self.rules.lease(),
                        "this gateway now writes the hosts file"
                    );
                    self.metrics.hosts_leading(true);
                    let writing = Reconciler::new(&self).run();
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => None,
                        why = lease.keep() => Some(why),
                        never = writing => match never {},
                    }
                }
                None => None,
            };
            self.metrics.hosts_leading(false);
            match lost {
                Some(why) => tracing::warn!(
                    why,
                    "the lease of the hosts file is lost; this gateway is on standby"
                ),
                None => return lease.release().await,
            }
        }
    }

    /// Waits until the cluster has named its nodes.
    async fn known(&self) {
        let (nodes, mut changes) = (self.nodes.reader(), self.nodes.changes());
        while nodes.places().is_none() && changes.changed().await.is_ok() {}
    }
}

/// A file as it is in the cluster, as far as is known.
#[derive(Default)]
struct HostsFile {
    map: Option<ConfigMap>,
    /// Whether the object may have changed meanwhile.
    stale: bool,
    /// Version that this gateway wrote itself, or found to be right.
    right: Option<String>,
}

impl HostsFile {
    fn version(&self) -> Option<String> {
        self.map.as_ref()?.resource_version()
    }
}

/// Reconciler that writes while the lease is held.
struct Reconciler<'a> {
    hosts: &'a HostsController,
    maps: ConfigMaps,
    style: RenderOptions,
    changes: watch::Receiver<()>,
    files: BTreeMap<usize, HostsFile>,
    watched: SelectAll<BoxStream<'static, (usize, ResourceVersion)>>,
    watching: LogThrottle,
}

impl<'a> Reconciler<'a> {
    fn new(hosts: &'a HostsController) -> Self {
        let rules = &hosts.rules;
        let named = (rules.name(), rules.key());
        Self {
            hosts,
            maps: ConfigMaps::new(hosts.client.clone(), &rules.namespace, named),
            style: RenderOptions::new(rules, hosts.addresses.clone(), LIMIT),
            changes: hosts.nodes.changes(),
            files: BTreeMap::new(),
            watched: SelectAll::new(),
            watching: LogThrottle::new("watching the hosts file"),
        }
    }

    async fn run(mut self) -> Infallible {
        let mut trouble = LogThrottle::new("writing the hosts file");
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        loop {
            let pause = match self.settle().await {
                Ok(()) => {
                    backoff.reset();
                    trouble.over();
                    None
                }
                Err(failure) => {
                    self.hosts.metrics.hosts_written(false);
                    if failure.is_conflict() {
                        tracing::debug!(why = %failure, "another process also writes the hosts file");
                    } else {
                        trouble.say(&failure.to_string());
                    }
                    self.files.values_mut().for_each(|file| file.stale = true);
                    Some(if failure.passes() {
                        backoff.silent(rand::random())
                    } else {
                        backoff.refused(None, rand::random())
                    })
                }
            };
            self.reason(pause).await;
        }
    }

    /// Waits for a reason to reconcile. During the pause after a failure, changes of nodes are no reason.
    async fn reason(&mut self, pause: Option<Duration>) {
        let again = pause.map(|pause| Instant::now() + pause);
        loop {
            tokio::select! {
                // Never an error: this function owns the writing side.
                _ = self.changes.changed(), if again.is_none() => break,
                Some((number, version)) = self.watched.next() => match version {
                    Ok(version) => {
                        self.watching.over();
                        let file = self.files.entry(number).or_default();
                        if file.version() != version {
                            file.stale = true;
                            break;
                        }
                    }
                    Err(why) => self.watching.say(&why),
                },
                Some(()) = OptionFuture::from(again.map(sleep_until)) => return,
            }
        }
        sleep(GATHER).await;
    }

    /// Makes all files what they are to be.
    async fn settle(&mut self) -> Result<(), WriteError> {
        self.changes.mark_unchanged();
        let Some(places) = self.hosts.nodes.reader().places() else {
            return Ok(());
        };
        self.look().await?;
        let ours = |file: &HostsFile| file.map.as_ref().is_some_and(is_ours);
        let present = self.files.iter().filter(|(_, file)| ours(file));
        let present = present.map(|(number, _)| number + 1).max();
        let wanted = self.style.files(&places, present.unwrap_or_default());
        if self.watched.len() != wanted.len() {
            let each = (0..wanted.len()).map(|number| self.maps.versions(number));
            self.watched = each.collect();
        }
        for (number, text) in wanted.iter().enumerate().rev() {
            self.put(number, text).await?;
        }
        self.remove(wanted.len()).await
    }

    /// Reads the unknown files: from the first on, until one does not exist.
    async fn look(&mut self) -> Result<(), WriteError> {
        let last = self.files.keys().next_back().copied().unwrap_or_default();
        for number in 0.. {
            let file = self.files.entry(number).or_insert_with(|| HostsFile {
                stale: true,
                ..HostsFile::default()
            });
            if file.stale {
                file.map = self.maps.read(number).await?;
                file.stale = false;
            }
            if number >= last && file.map.is_none() {
                break;
            }
        }
        Ok(())
    }

    async fn put(&mut self, number: usize, text: &str) -> Result<(), WriteError> {
        let file = self.files.entry(number).or_default();
        let before = file.map.as_ref();
        if let Some(map) = before {
            if !is_ours(map) {
                return Err(self.maps.foreign(map));
            }
            if self.maps.holds(map, text) {
                file.right = file.version();
                return Ok(());
            }
        }
        let written = self.maps.write(number, before, text).await?;
        self.hosts.metrics.hosts_written(true);
        let name = self.maps.name(number);
        if file.right.is_some() && file.right != file.version() {
            let by = before.and_then(foreign_managers).unwrap_or("unknown");
            let what = if before.is_some() {
                "changed"
            } else {
                "deleted"
            };
            tracing::warn!(
                configmap = name,
                by,
                "the hosts file was {what} by another process and has been restored"
            );
        } else {
            tracing::debug!(
                configmap = name,
                bytes = text.len(),
                "the hosts file was written"
            );
        }
        file.right = written.resource_version();
        file.map = Some(written);
        Ok(())
    }

    /// Removes our files from this number on, the last one first: a gap would hide the files behind it.
    async fn remove(&mut self, from: usize) -> Result<(), WriteError> {
        for (_, file) in self.files.range_mut(from..).rev() {
            let Some(map) = file.map.as_ref().filter(|map| is_ours(map)) else {
                continue;
            };
            self.maps.remove(map).await?;
            self.hosts.metrics.hosts_written(true);
            let name = map.name_any();
            tracing::info!(
                configmap = name,
                "a hosts file that is no longer needed was removed"
            );
            *file = HostsFile::default();
        }
        Ok(())
    }
}
