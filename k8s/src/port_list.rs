//! Controller of the node ports that a `ConfigMap` lists: the gateway serves them, and a Service of its own has them.
//!
//! 1. `parse` reads the list. An entry that cannot be parsed or served is left out (`partial`), with an event on the `ConfigMap`
//!    that gives the reason. The entry is tried again when the list changes, and now and then. The served ports are stored on the
//!    disk: a gateway that starts while the API is away serves those.
//! 2. The gateway applies the list as it applies a changed configuration: listeners first, then the message to edges.
//! 3. The Service gets a port for each by a server-side apply of these ports alone: fields of other managers stay, and ports that
//!    another manager removes come back.
//!
//! The gateway is not ready before it has a list, from the API or from the disk. An entry that is left out does not affect
//! readiness: `/readyz` and `causeway status` name it.
//!
//! Never ends the process.

mod parse;
mod partial;

use crate::{
    client::{error_message, watch_error_message},
    log_throttle::LogThrottle,
};
use causeway_certs::Store;
use causeway_gateway::{
    config::{self, NodePorts, ReloadSender},
    control::drain::{Readiness, ReadinessBlock},
    metrics::Metrics,
};
use causeway_rt::backoff::Backoff;
use futures_util::{StreamExt, TryStreamExt, future::OptionFuture, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{
        WatchStreamExt,
        events::{Event, EventType, Recorder, Reporter},
        watcher::watch_object,
    },
};
use serde_json::json;
use std::{convert::Infallible, pin::pin, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

/// Time limit of one request.
const BOUND: Duration = Duration::from_secs(10);
/// Longest pauses between tries.
const PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));
/// Name under which the served ports are stored in the data directory.
const LAST: &str = "listed-ports";
/// Maximum length of an event's note, in bytes.
const NOTE: usize = 1000;

/// Controller that keeps the ports of a gateway in step with a `ConfigMap`.
pub struct PortListController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the list, and of the listeners that serve the ports.
    pub rules: config::PortList,
    /// Channel by which the gateway's configuration receives the ports; `None` as long as they are not known.
    pub listed: watch::Sender<Option<NodePorts>>,
    /// Sender of the reload request that applies them.
    pub reloads: ReloadSender,
    /// Metrics of the controller.
    pub metrics: Arc<Metrics>,
    /// Reports that there is no list yet, and the entries that are left out.
    pub readiness: Readiness,
    /// Name of this gateway in events.
    pub gateway: String,
    /// The data directory, in which the served ports are stored.
    pub store: Store,
}

impl PortListController {
    /// The list, as it is named in messages.
    fn list(&self) -> String {
        let config::PortList {
            namespace, name, ..
        } = &self.rules;
        format!("the list of ports {namespace}/{name} (kubernetes.ports)")
    }

    /// Runs the controller. Never returns.
    pub async fn run(self) -> Infallible {
        let (client, namespace) = (self.client.clone(), &self.rules.namespace);
        let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
        let maps = watch_object(maps, &self.rules.name).default_backoff();
        let mut maps = pin!(maps.map_err(|error| watch_error_message(&error)));
        let services = Api::<Service>::namespaced(client, namespace);
        let mut service = match &self.rules.service {
            Some(name) => watch_object(services, name).default_backoff().boxed(),
            None => stream::pending().boxed(),
        }
        .map_err(|error| watch_error_message(&error));
        let mut keeper = Reconciler::new(&self);
        keeper.serve_last().await;
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        loop {
            let again = if keeper.settle().await {
                backoff.reset();
                None
            } else {
                Some(Instant::now() + backoff.refused(None, rand::random()))
            };
            tokio::select! {
                Some(map) = maps.next() => keeper.heard(map),
                Some(service) = service.next() => keeper.stirred(service),
                Some(()) = OptionFuture::from(again.map(sleep_until)) => {}
            }
        }
    }
}

/// Outcome of the application of a list.
struct AppliedList {
    /// Whether other ports are served than before.
    changed: bool,
    /// Reasons why entries cannot be parsed.
    unreadable: Vec<String>,
    /// Reasons why ports are not served. They may be served at the next try.
    refused: Vec<String>,
}

/// Pending work of the controller.
struct Reconciler<'a> {
    ports: &'a PortListController,
    /// Last event on the list, and its recorder: a recorder that publishes the same event again counts it, whatever its note is.
    told: Option<(String, Recorder)>,
    map: Option<ConfigMap>,
    /// Block on readiness as long as there is no list.
    hold: Option<ReadinessBlock>,
    /// Block that reports the entries that are left out.
    fault: Option<ReadinessBlock>,
    /// Whether the list still has to be applied, as far as is known; `service`: whether the Service still has to be written.
    list: bool,
    service: bool,
    /// Version of the Service that is right.
    right: Option<String>,
    watching: LogThrottle,
    refused: LogThrottle,
    writing: LogThrottle,
}

impl<'a> Reconciler<'a> {
    fn new(ports: &'a PortListController) -> Self {
        let hold = format!("{} has not been loaded yet", ports.list());
        Self {
            ports,
            told: None,
            map: None,
            hold: Some(ports.readiness.hold(hold)),
            fault: None,
            list: false,
            service: false,
            right: None,
            watching: LogThrottle::new("watching the list of ports"),
            refused: LogThrottle::new("applying the list of ports"),
            writing: LogThrottle::new("writing the ports of the Service"),
        }
    }

    /// The list may be another.
    fn heard(&mut self, map: Result<Option<ConfigMap>, String>) {
        match map {
            Ok(map) => {
                self.watching.over();
                self.map = map;
                self.list = true;
            }
            Err(why) => {
                if let Some(hold) = &self.hold {
                    hold.says(format!(
                        "{} has not been loaded yet: {why}",
                        self.ports.list()
                    ));
                }
                self.watching.say(&why);
            }
        }
    }

    /// The Service is another.
    fn stirred(&mut self, service: Result<Option<Service>, String>) {
        match service {
            Ok(service) => {
                self.watching.over();
                let version = service.and_then(|service| service.resource_version());
                // Before the list is loaded, nothing is removed.
                self.service |= self.right.is_some() && version != self.right;
            }
            Err(why) => self.watching.say(&why),
        }
    }

    /// Does the pending work. Returns `false` if it has to be tried again.
    async fn settle(&mut self) -> bool {
        if self.list {
            let faults = match self.take_up().await {
                Ok(AppliedList {
                    changed,
                    unreadable,
                    refused,
                }) => {
                    self.list = !refused.is_empty();
                    self.service |= changed || self.right.is_none();
                    [unreadable, refused].concat()
                }
                Err(why) => vec![why],
            };
            self.hold = None;
            self.report(&faults);
            if faults.is_empty() {
                self.refused.over();
            } else {
                let why = faults.join("; ");
                self.refused.say(&why);
                self.tell(why).await;
            }
        }
        if self.service {
            match self.write().await {
                Ok(()) => {
                    self.service = false;
                    self.writing.over();
                }
                Err(why) if self.writing.says(&why) => self.tell(why).await,
                Err(_) => {}
            }
        }
        !self.list && !self.service
    }

    /// Counts the entries that are left out, and has `/readyz` name them.
    fn report(&mut self, faults: &[String]) {
        self.ports.metrics.ports_refused(!faults.is_empty());
        let list = self.ports.list();
        let text = || format!("{list}: some ports are not served: {}", faults.join("; "));
        self.fault = (!faults.is_empty()).then(|| self.ports.readiness.fault(text()));
    }

    /// Serves the ports that were served before a restart, until the cluster's API has the list.
    async fn serve_last(&mut self) {
        let last = self.ports.store.read_runtime(LAST);
        let last = last.unwrap_or_else(|error| {
            tracing::warn!(%error, "the list of ports that were served before the start cannot be read");
            None
        });
        let Some(last) = last.and_then(|text| serde_json::from_str(&text).ok()) else {
            return;
        };
        match self.apply(&last).await {
            Ok((_, refused)) => {
                self.hold = None;
                self.report(&refused);
                if !refused.is_empty() {
                    let why = refused.join("; ");
                    tracing::warn!(
                        why,
                        "some ports that were served before the start are not served"
                    );
                }
            }
            Err(why) => tracing::warn!(
                why,
                "the ports that were served before the start are not served"
            ),
        }
    }

    /// Has the gateway serve the listed ports, as far as it can.
    async fn take_up(&self) -> Result<AppliedList, String> {
        let data = self.map.as_ref().and_then(|map| map.data.as_ref());
        let (next, unreadable) = data.map(parse::read).transpose()?.unwrap_or_default();
        if self.ports.listed.borrow().as_ref() == Some(&next) {
            return Ok(AppliedList {
                changed: false,
                unreadable,
                refused: Vec::new(),
            });
        }
        let (changed, refused) = self.apply(&next).await?;
        self.keep();
        Ok(AppliedList {
            changed,
            unreadable,
            refused,
        })
    }

    /// Has the gateway serve these ports, as far as it can. Returns whether that is a change, and why some are not served.
    async fn apply(&self, next: &NodePorts) -> Result<(bool, Vec<String>), String> {
        let before = self.ports.listed.borrow().clone();
        let attempt = async |ports: NodePorts| {
            let last = self.ports.listed.send_replace(Some(ports.clone()));
            match self.ports.reloads.ask().await {
                Some(Ok(done)) => {
                    tracing::info!(http = ?ports.http, https = ?ports.https, done, "serving these ports of the cluster's list");
                    Ok(())
                }
                refused => {
                    self.ports.listed.send_replace(last);
                    let nobody = || "the gateway is shutting down".to_owned();
                    Err(refused.and_then(Result::err).unwrap_or_else(nobody))
                }
            }
        };
        let served = before.clone().unwrap_or_default();
        let (now, refused) = partial::apply(&served, next, attempt).await?;
        Ok((before.as_ref() != Some(&now), refused))
    }

    /// Stores the served ports on the disk.
    fn keep(&self) {
        let text = serde_json::to_string(&*self.ports.listed.borrow()).unwrap_or_default();
        if let Err(error) = self.ports.store.write_runtime(LAST, &text) {
            tracing::warn!(%error, "the list of served ports cannot be saved for the next start");
        }
    }

    /// Writes a port of the Service for each listed port.
    async fn write(&mut self) -> Result<(), String> {
        let rules = &self.ports.rules;
        let Some(name) = &rules.service else {
            return Ok(());
        };
        let listed = self.ports.listed.borrow().clone().unwrap_or_default();
        let served: Vec<u16> = listed.served().collect();
        let ports: Vec<_> = served
            .iter()
            .map(|port| json!({ "name": format!("causeway-{port}"), "port": port, "targetPort": port, "protocol": "TCP" }))
            .collect();
        let apply = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": rules.namespace },
            "spec": { "ports": ports },
        });
        let api = Api::<Service>::namespaced(self.ports.client.clone(), &rules.namespace);
        // By whom the API notes that these ports are listed: all of one list are that list's, whichever gateway wrote, and
        // of two lists none takes away what the other has put there.
        let (parameters, patch) = (
            PatchParams::apply(field_manager(&rules.name)),
            Patch::Apply(&apply),
        );
        let written = timeout(BOUND, api.patch(name, &parameters, &patch)).await;
        let written = written.map_err(|_| "the cluster's API did not answer in time".to_owned())?;
        let written = written.map_err(|error| error_message(&error))?;
        self.right = written.resource_version();
        tracing::debug!(service = name, ports = ?served, "the Service now has these ports");
        Ok(())
    }

    /// Publishes an event on the `ConfigMap`, for the author of the list.
    async fn tell(&mut self, mut note: String) {
        let Some(about) = self.map.as_ref().map(|map| map.object_ref(&())) else {
            return;
        };
        let end = (0..=NOTE).rev().find(|end| note.is_char_boundary(*end));
        note.truncate(end.unwrap_or_default());
        let new = || {
            let reporter = Reporter {
                controller: "causeway-gateway".to_owned(),
                instance: Some(self.ports.gateway.clone()),
            };
            let recorder = Recorder::new(self.ports.client.clone(), reporter);
            (note.clone(), recorder)
        };
        let same = self.told.take().filter(|(told, _)| *told == note);
        let (_, recorder) = self.told.insert(same.unwrap_or_else(new));
        let event = Event {
            type_: EventType::Warning,
            reason: "PortsRefused".to_owned(),
            note: Some(note),
            action: "Serving".to_owned(),
            secondary: None,
        };
        match timeout(BOUND, recorder.publish(&event, &about)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(why = error_message(&error), "an event could not be written");
            }
            Err(_) => tracing::debug!("an event could not be written in time"),
        }
    }
}
/// Returns the field manager; the API accepts 128 characters.
fn field_manager(list: &str) -> &str {
    let end = list
        .char_indices()
        .nth(128)
        .map_or(list.len(), |(at, _)| at);
    list.get(..end).unwrap_or(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::OpenMode;

    /// Returns the controller of a cluster whose API does not respond: there is none.
    fn ports(store: &Store, reloads: ReloadSender) -> PortListController {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        PortListController {
            client: Client::try_from(config).unwrap(),
            rules: config::PortList::default(),
            listed: watch::Sender::new(None),
            reloads,
            metrics: Metrics::new(),
            readiness: Readiness::default(),
            gateway: "gw".into(),
            store: store.clone(),
        }
    }

    #[tokio::test]
    async fn a_gateway_is_ready_with_a_list_and_reports_skipped_entries() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        let (reloads, mut asked) = causeway_config::reloads();
        let ports = ports(&store, reloads);
        let mut keeper = Reconciler::new(&ports);
        keeper.serve_last().await;
        let held = || ports.readiness.held().unwrap_or_default();
        assert!(held().contains("kube-system/causeway-ports"), "{}", held());
        keeper.heard(Err("forbidden".into()));
        assert!(
            held().ends_with("not been loaded yet: forbidden"),
            "{}",
            held()
        );

        for (listed, fault) in [
            ("9051, ninety", "\"ninety\" is not a valid port"),
            ("9052", ""),
        ] {
            let data = [("http-proxy-ports".to_owned(), listed.to_owned())];
            keeper.heard(Ok(Some(ConfigMap {
                data: Some(data.into()),
                ..ConfigMap::default()
            })));
            tokio::join!(keeper.settle(), async {
                asked.next().await.answer(Ok("done".into()));
            });
            assert_eq!(held(), "");
            let faults = ports.readiness.faults().join("");
            assert!(faults.contains(fault), "{faults}");
            assert_eq!(faults.is_empty(), fault.is_empty(), "{faults}");
        }

        let again = self::ports(&store, ports.reloads.clone());
        let mut keeper = Reconciler::new(&again);
        tokio::join!(keeper.serve_last(), async {
            asked.next().await.answer(Ok("done".into()));
        });
        assert_eq!(again.readiness.held(), None, "the list is on the disk");
    }

    #[tokio::test]
    async fn a_starting_gateway_serves_stored_ports_until_the_api_answers() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        let (reloads, mut asked) = causeway_config::reloads();
        let ports = |refused: bool| {
            let reloads = (!refused).then(|| reloads.clone());
            ports(&store, reloads.unwrap_or_default())
        };
        let served = NodePorts {
            http: [9051, 9100].into(),
            ..NodePorts::default()
        };
        let first = ports(false);
        first.listed.send_replace(Some(served.clone()));
        Reconciler::new(&first).keep();

        let second = ports(false);
        let mut keeper = Reconciler::new(&second);
        tokio::join!(keeper.serve_last(), async {
            asked.next().await.answer(Ok("done".into()));
        });
        assert_eq!(*second.listed.borrow(), Some(served));

        let third = ports(true);
        Reconciler::new(&third).serve_last().await;
        assert_eq!(*third.listed.borrow(), None);
    }
}
