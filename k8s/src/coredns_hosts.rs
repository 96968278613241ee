//! Controller of a `ConfigMap` with the names of all nodes, as a hosts file for `CoreDNS`' plugin of that name.
//!
//! 1. Only the gateway that holds the Lease writes, and only once the cluster's nodes are known.
//! 2. The content follows from the table of nodes alone (`render`). Only differences are written. The changes within a second
//!    are written together. A further file is written before the others lose its names, and removed after they have them.
//! 3. Changes by other writers are reverted (`configmaps`), and the log names the writer.
//!
//! Never ends the process: after a lost Lease the controller waits for it, and it retries after any error.

mod configmaps;
mod render;

use crate::{
    leader_election::LeaderElector,
    log_throttle::LogThrottle,
    ownership::{WriteError, is_owned, last_foreign_writer},
};
use causeway_gateway::{config, metrics::Metrics, state::NodesWriter};
use causeway_rt::backoff::Backoff;
use configmaps::{ConfigMaps, ResourceVersion};
use futures_util::{
    StreamExt,
    future::OptionFuture,
    stream::{BoxStream, SelectAll},
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Client, ResourceExt};
use render::{MAX_FILE_BYTES, RenderOptions};
use std::{collections::BTreeMap, convert::Infallible, net::IpAddr, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

/// Time to wait for further changes after the first one.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Maximum pauses between attempts: while the API does not respond, and while the API refuses.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));

/// Controller that synchronizes the hosts file with the table of nodes.
pub(crate) struct HostsController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the file and its location.
    pub settings: config::CoreDnsHosts,
    /// Addresses for the name of an edge's node.
    pub addresses: Vec<IpAddr>,
    /// The table of nodes.
    pub nodes: NodesWriter,
    /// Metrics of the controller.
    pub metrics: Arc<Metrics>,
    /// Name of this gateway among the candidates for the Lease. A random part is appended.
    pub gateway: String,
}

impl HostsController {
    /// Runs the controller. Returns soon after `stop`, once the Lease is released.
    pub(crate) async fn run(self, stop: CancellationToken) {
        if stop
            .run_until_cancelled(self.wait_for_nodes())
            .await
            .is_none()
        {
            return;
        }
        let mut elector = LeaderElector::new(
            self.client.clone(),
            "the hosts file",
            (&self.settings.namespace, self.settings.lease()),
            format!("{}_{:016x}", self.gateway, rand::random::<u64>()),
            self.settings.lease_duration,
        );
        loop {
            let acquired = stop.run_until_cancelled(elector.acquire()).await;
            let lost_reason = match acquired {
                Some(()) => {
                    tracing::info!(
                        lease = self.settings.lease(),
                        "this gateway now writes the hosts file"
                    );
                    self.metrics.set_hosts_leading(true);
                    let reconciliation = Reconciler::new(&self).run();
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => None,
                        why = elector.renew_until_lost() => Some(why),
                        never = reconciliation => match never {},
                    }
                }
                None => None,
            };
            self.metrics.set_hosts_leading(false);
            match lost_reason {
                Some(why) => tracing::warn!(
                    why,
                    "the lease of the hosts file is lost; this gateway is on standby"
                ),
                None => return elector.release().await,
            }
        }
    }

    /// Waits until the cluster's nodes are known.
    async fn wait_for_nodes(&self) {
        let (nodes, mut changes) = (self.nodes.reader(), self.nodes.subscribe());
        while nodes.locations().is_none() && changes.changed().await.is_ok() {}
    }
}

/// Last known state of a file in the cluster.
#[derive(Default)]
struct HostsFile {
    config_map: Option<ConfigMap>,
    /// Whether the object may have changed meanwhile.
    is_stale: bool,
    /// Version that this gateway has written, or has found to be correct.
    written_version: Option<String>,
}

impl HostsFile {
    fn version(&self) -> Option<String> {
        self.config_map.as_ref()?.resource_version()
    }
}

/// Reconciler that writes while the Lease is held.
struct Reconciler<'a> {
    controller: &'a HostsController,
    config_maps: ConfigMaps,
    options: RenderOptions,
    node_changes: watch::Receiver<()>,
    files: BTreeMap<usize, HostsFile>,
    versions: SelectAll<BoxStream<'static, (usize, ResourceVersion)>>,
    watch_log: LogThrottle,
}

impl<'a> Reconciler<'a> {
    fn new(controller: &'a HostsController) -> Self {
        let settings = &controller.settings;
        let name_and_key = (settings.name(), settings.key());
        Self {
            controller,
            config_maps: ConfigMaps::new(
                controller.client.clone(),
                &settings.namespace,
                name_and_key,
            ),
            options: RenderOptions::new(settings, controller.addresses.clone(), MAX_FILE_BYTES),
            node_changes: controller.nodes.subscribe(),
            files: BTreeMap::new(),
            versions: SelectAll::new(),
            watch_log: LogThrottle::new("watching the hosts file"),
        }
    }

    async fn run(mut self) -> Infallible {
        let mut failure_log = LogThrottle::new("writing the hosts file");
        let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
        loop {
            let pause = match self.reconcile().await {
                Ok(()) => {
                    backoff.reset();
                    failure_log.log_recovery();
                    None
                }
                Err(failure) => {
                    self.controller.metrics.count_hosts_write(false);
                    if failure.is_conflict() {
                        tracing::debug!(why = %failure, "another process also writes the hosts file");
                    } else {
                        failure_log.log_failure(&failure.to_string());
                    }
                    self.files
                        .values_mut()
                        .for_each(|file| file.is_stale = true);
                    Some(if failure.is_transient() || failure.is_not_found() {
                        backoff.silent(rand::random())
                    } else {
                        backoff.refused(None, rand::random())
                    })
                }
            };
            self.wait_for_trigger(pause).await;
        }
    }

    /// Waits for a trigger. During the pause after an error, changes of nodes are no trigger.
    async fn wait_for_trigger(&mut self, pause: Option<Duration>) {
        let retry_at = pause.map(|pause| Instant::now() + pause);
        loop {
            tokio::select! {
                // Never an error: this function owns the writing side.
                _ = self.node_changes.changed(), if retry_at.is_none() => break,
                Some((number, version)) = self.versions.next() => match version {
                    Ok(version) => {
                        self.watch_log.log_recovery();
                        let file = self.files.entry(number).or_default();
                        if file.version() != version {
                            file.is_stale = true;
                            break;
                        }
                    }
                    Err(why) => self.watch_log.log_failure(&why),
                },
                Some(()) = OptionFuture::from(retry_at.map(sleep_until)) => return,
            }
        }
        sleep(DEBOUNCE).await;
    }

    /// Brings all files to their desired content.
    async fn reconcile(&mut self) -> Result<(), WriteError> {
        self.node_changes.mark_unchanged();
        let Some(locations) = self.controller.nodes.reader().locations() else {
            return Ok(());
        };
        self.refresh_stale_files().await?;
        let is_owned_file = |file: &HostsFile| file.config_map.as_ref().is_some_and(is_owned);
        let owned_files = self.files.iter().filter(|(_, file)| is_owned_file(file));
        let owned_count = owned_files.map(|(number, _)| number + 1).max();
        let contents = self
            .options
            .render_files(&locations, owned_count.unwrap_or_default());
        if self.versions.len() != contents.len() {
            let streams = (0..contents.len()).map(|number| self.config_maps.watch_versions(number));
            self.versions = streams.collect();
        }
        for (number, text) in contents.iter().enumerate().rev() {
            self.write_file(number, text).await?;
        }
        self.remove_files(contents.len()).await
    }

    /// Reads the unknown files: from the first on, until one does not exist.
    async fn refresh_stale_files(&mut self) -> Result<(), WriteError> {
        let last = self.files.keys().next_back().copied().unwrap_or_default();
        for number in 0.. {
            let file = self.files.entry(number).or_insert_with(|| HostsFile {
                is_stale: true,
                ..HostsFile::default()
            });
            if file.is_stale {
                file.config_map = self.config_maps.read(number).await?;
                file.is_stale = false;
            }
            if number >= last && file.config_map.is_none() {
                break;
            }
        }
        Ok(())
    }

    async fn write_file(&mut self, number: usize, text: &str) -> Result<(), WriteError> {
        let file = self.files.entry(number).or_default();
        let previous = file.config_map.as_ref();
        if let Some(map) = previous {
            if !is_owned(map) {
                return Err(self.config_maps.foreign_error(map));
            }
            if self.config_maps.has_content(map, text) {
                file.written_version = file.version();
                return Ok(());
            }
        }
        let written = self.config_maps.write(number, previous, text).await?;
        self.controller.metrics.count_hosts_write(true);
        let name = self.config_maps.name(number);
        if file.written_version.is_some() && file.written_version != file.version() {
            let by = previous.and_then(last_foreign_writer).unwrap_or("unknown");
            let change = if previous.is_some() {
                "changed"
            } else {
                "deleted"
            };
            tracing::warn!(
                configmap = name,
                by,
                "the hosts file was {change} by another process and has been restored"
            );
        } else {
            tracing::debug!(
                configmap = name,
                bytes = text.len(),
                "the hosts file was written"
            );
        }
        file.written_version = written.resource_version();
        file.config_map = Some(written);
        Ok(())
    }

    /// Removes our files from this number on, the last one first. A gap would hide the files behind it.
    async fn remove_files(&mut self, from: usize) -> Result<(), WriteError> {
        for (_, file) in self.files.range_mut(from..).rev() {
            let Some(map) = file.config_map.as_ref().filter(|map| is_owned(map)) else {
                continue;
            };
            self.config_maps.remove(map).await?;
            self.controller.metrics.count_hosts_write(true);
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
