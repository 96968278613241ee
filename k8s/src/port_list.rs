//! Controller of the node ports that a `ConfigMap` lists: the gateway serves them, and a Service of its own has them.
//!
//! 1. `parse` reads the list. An entry that cannot be parsed or served is left out (`partial`), with an event on the
//!    `ConfigMap` that gives the reason. The entry is tried again when the list changes, and at intervals. The served ports
//!    are stored on the disk. A gateway that starts while the API does not respond serves those.
//! 2. The gateway applies the list as it applies a changed configuration: listeners first, then the message to edges.
//! 3. The Service gets a port for each by a server-side apply of these ports alone. Fields of other managers stay, and ports
//!    that another manager removes are added again.
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
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum pauses between attempts: while the API does not respond, and while it refuses.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));
/// Name under which the served ports are stored in the data directory.
const LAST_PORTS_KEY: &str = "listed-ports";
/// Maximum length of an event's note, in bytes.
const MAX_NOTE_BYTES: usize = 1000;

/// Controller that synchronizes the ports of a gateway with a `ConfigMap`.
pub(crate) struct PortListController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the list, and of the listeners that serve the ports.
    pub settings: config::PortList,
    /// Channel by which the gateway's configuration receives the ports; `None` until they are known.
    pub ports_sender: watch::Sender<Option<NodePorts>>,
    /// Sender of the reload request that applies them.
    pub reload_sender: ReloadSender,
    /// Metrics of the controller.
    pub metrics: Arc<Metrics>,
    /// Readiness, which reports a missing list and the entries that are left out.
    pub readiness: Readiness,
    /// Name of this gateway in events.
    pub gateway: String,
    /// Data directory, in which the served ports are stored.
    pub store: Store,
}

impl PortListController {
    /// Returns the name of the list in messages.
    fn list_name(&self) -> String {
        let config::PortList {
            namespace, name, ..
        } = &self.settings;
        format!("the list of ports {namespace}/{name} (kubernetes.ports)")
    }

    /// Runs the controller. Never returns.
    pub(crate) async fn run(self) -> Infallible {
        let (client, namespace) = (self.client.clone(), &self.settings.namespace);
        let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
        let maps = watch_object(maps, &self.settings.name).default_backoff();
        let mut maps = pin!(maps.map_err(|error| watch_error_message(&error)));
        let services = Api::<Service>::namespaced(client, namespace);
        let mut service = match &self.settings.service {
            Some(name) => watch_object(services, name).default_backoff().boxed(),
            None => stream::pending().boxed(),
        }
        .map_err(|error| watch_error_message(&error));
        let mut reconciler = Reconciler::new(&self);
        reconciler.restore_last_ports().await;
        let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
        loop {
            let retry_at = if reconciler.reconcile().await {
                backoff.reset();
                None
            } else {
                Some(Instant::now() + backoff.refused(None, rand::random()))
            };
            tokio::select! {
                Some(map) = maps.next() => reconciler.handle_list_update(map),
                Some(service) = service.next() => reconciler.handle_service_update(service),
                Some(()) = OptionFuture::from(retry_at.map(sleep_until)) => {}
            }
        }
    }
}

/// Outcome of the application of a list.
struct AppliedList {
    /// Whether the served ports have changed.
    changed: bool,
    /// Reasons for which entries cannot be parsed.
    parse_errors: Vec<String>,
    /// Reasons for which ports are not served. They may be served at the next attempt.
    rejections: Vec<String>,
}

/// Pending work of the controller.
struct Reconciler<'a> {
    controller: &'a PortListController,
    /// Last event on the list, and its recorder. If a recorder publishes the same event again, the event is only counted,
    /// whatever its note is.
    last_event: Option<(String, Recorder)>,
    config_map: Option<ConfigMap>,
    /// Block on readiness while there is no list.
    readiness_block: Option<ReadinessBlock>,
    /// Block that reports the entries that are left out.
    readiness_fault: Option<ReadinessBlock>,
    /// Whether the list must still be applied. `service_pending` states whether the Service must still be written.
    list_pending: bool,
    service_pending: bool,
    /// Version of the Service that is correct.
    written_version: Option<String>,
    watch_log: LogThrottle,
    apply_log: LogThrottle,
    write_log: LogThrottle,
}

impl<'a> Reconciler<'a> {
    fn new(controller: &'a PortListController) -> Self {
        let message = format!("{} has not been loaded yet", controller.list_name());
        Self {
            controller,
            last_event: None,
            config_map: None,
            readiness_block: Some(controller.readiness.hold(message)),
            readiness_fault: None,
            list_pending: false,
            service_pending: false,
            written_version: None,
            watch_log: LogThrottle::new("watching the list of ports"),
            apply_log: LogThrottle::new("applying the list of ports"),
            write_log: LogThrottle::new("writing the ports of the Service"),
        }
    }

    /// Handles a new version of the list.
    fn handle_list_update(&mut self, map: Result<Option<ConfigMap>, String>) {
        match map {
            Ok(map) => {
                self.watch_log.log_recovery();
                self.config_map = map;
                self.list_pending = true;
            }
            Err(why) => {
                if let Some(block) = &self.readiness_block {
                    block.set_reason(format!(
                        "{} has not been loaded yet: {why}",
                        self.controller.list_name()
                    ));
                }
                self.watch_log.log_failure(&why);
            }
        }
    }

    /// Handles a new version of the Service.
    fn handle_service_update(&mut self, service: Result<Option<Service>, String>) {
        match service {
            Ok(service) => {
                self.watch_log.log_recovery();
                let version = service.and_then(|service| service.resource_version());
                // Before the list is loaded, nothing is removed.
                self.service_pending |=
                    self.written_version.is_some() && version != self.written_version;
            }
            Err(why) => self.watch_log.log_failure(&why),
        }
    }

    /// Does the pending work. Returns `false` if it must be tried again.
    async fn reconcile(&mut self) -> bool {
        if self.list_pending {
            let faults = match self.apply_list().await {
                Ok(AppliedList {
                    changed,
                    parse_errors: unreadable,
                    rejections: refused,
                }) => {
                    self.list_pending = !refused.is_empty();
                    self.service_pending |= changed || self.written_version.is_none();
                    [unreadable, refused].concat()
                }
                Err(why) => vec![why],
            };
            self.readiness_block = None;
            self.report_faults(&faults);
            if faults.is_empty() {
                self.apply_log.log_recovery();
            } else {
                let why = faults.join("; ");
                self.apply_log.log_failure(&why);
                self.publish_event(why).await;
            }
        }
        if self.service_pending {
            match self.write_service().await {
                Ok(()) => {
                    self.service_pending = false;
                    self.write_log.log_recovery();
                }
                Err(why) if self.write_log.log_failure_once(&why) => self.publish_event(why).await,
                Err(_) => {}
            }
        }
        !self.list_pending && !self.service_pending
    }

    /// Counts the entries that are left out, and reports them at `/readyz`.
    fn report_faults(&mut self, faults: &[String]) {
        self.controller
            .metrics
            .set_ports_refused(!faults.is_empty());
        let list = self.controller.list_name();
        let text = || format!("{list}: some ports are not served: {}", faults.join("; "));
        self.readiness_fault =
            (!faults.is_empty()).then(|| self.controller.readiness.report_fault(text()));
    }

    /// Serves the ports from before a restart, until the list is read from the cluster's API.
    async fn restore_last_ports(&mut self) {
        let last = self.controller.store.read_runtime(LAST_PORTS_KEY);
        let last = last.unwrap_or_else(|error| {
            tracing::warn!(%error, "the list of ports that were served before the start cannot be read");
            None
        });
        let Some(last) = last.and_then(|text| serde_json::from_str(&text).ok()) else {
            return;
        };
        match self.apply(&last).await {
            Ok((_, rejections)) => {
                self.readiness_block = None;
                self.report_faults(&rejections);
                if !rejections.is_empty() {
                    let why = rejections.join("; ");
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

    /// Has the gateway serve the listed ports, as far as possible.
    async fn apply_list(&self) -> Result<AppliedList, String> {
        let data = self.config_map.as_ref().and_then(|map| map.data.as_ref());
        let (desired, parse_errors) = data
            .map(parse::parse_ports)
            .transpose()?
            .unwrap_or_default();
        if self.controller.ports_sender.borrow().as_ref() == Some(&desired) {
            return Ok(AppliedList {
                changed: false,
                parse_errors,
                rejections: Vec::new(),
            });
        }
        let (changed, rejections) = self.apply(&desired).await?;
        self.save_ports();
        Ok(AppliedList {
            changed,
            parse_errors,
            rejections,
        })
    }

    /// Has the gateway serve these ports, as far as possible. Returns whether that is a change, and the reasons for which
    /// some ports are not served.
    async fn apply(&self, desired: &NodePorts) -> Result<(bool, Vec<String>), String> {
        let previous = self.controller.ports_sender.borrow().clone();
        let attempt = async |ports: NodePorts| {
            let replaced = self
                .controller
                .ports_sender
                .send_replace(Some(ports.clone()));
            match self.controller.reload_sender.request_reload().await {
                Some(Ok(done)) => {
                    tracing::info!(http = ?ports.http, https = ?ports.https, done, "serving these ports of the cluster's list");
                    Ok(())
                }
                outcome => {
                    self.controller.ports_sender.send_replace(replaced);
                    let shutting_down = || "the gateway is shutting down".to_owned();
                    Err(outcome.and_then(Result::err).unwrap_or_else(shutting_down))
                }
            }
        };
        let served = previous.clone().unwrap_or_default();
        let (applied, rejections) = partial::apply(&served, desired, attempt).await?;
        Ok((previous.as_ref() != Some(&applied), rejections))
    }

    /// Stores the served ports on the disk.
    fn save_ports(&self) {
        let text =
            serde_json::to_string(&*self.controller.ports_sender.borrow()).unwrap_or_default();
        if let Err(error) = self.controller.store.write_runtime(LAST_PORTS_KEY, &text) {
            tracing::warn!(%error, "the list of served ports cannot be saved for the next start");
        }
    }

    /// Writes a port of the Service for each listed port.
    async fn write_service(&mut self) -> Result<(), String> {
        let settings = &self.controller.settings;
        let Some(name) = &settings.service else {
            return Ok(());
        };
        let listed = self
            .controller
            .ports_sender
            .borrow()
            .clone()
            .unwrap_or_default();
        let served: Vec<u16> = listed.served().collect();
        let ports: Vec<_> = served
            .iter()
            .map(|port| json!({ "name": format!("causeway-{port}"), "port": port, "targetPort": port, "protocol": "TCP" }))
            .collect();
        let manifest = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": settings.namespace },
            "spec": { "ports": ports },
        });
        let api = Api::<Service>::namespaced(self.controller.client.clone(), &settings.namespace);
        // The field manager is the list. So all gateways with one list write as the same manager, and no list removes the
        // ports of another.
        let (parameters, patch) = (
            PatchParams::apply(field_manager(&settings.name)),
            Patch::Apply(&manifest),
        );
        let written = timeout(REQUEST_TIMEOUT, api.patch(name, &parameters, &patch)).await;
        let written = written.map_err(|_| "the cluster's API did not answer in time".to_owned())?;
        let written = written.map_err(|error| error_message(&error))?;
        self.written_version = written.resource_version();
        tracing::debug!(service = name, ports = ?served, "the Service now has these ports");
        Ok(())
    }

    /// Publishes an event on the `ConfigMap`, for the author of the list.
    async fn publish_event(&mut self, mut note: String) {
        let Some(object_ref) = self.config_map.as_ref().map(|map| map.object_ref(&())) else {
            return;
        };
        let end = (0..=MAX_NOTE_BYTES)
            .rev()
            .find(|end| note.is_char_boundary(*end));
        note.truncate(end.unwrap_or_default());
        let new_event = || {
            let reporter = Reporter {
                controller: "causeway-gateway".to_owned(),
                instance: Some(self.controller.gateway.clone()),
            };
            let recorder = Recorder::new(self.controller.client.clone(), reporter);
            (note.clone(), recorder)
        };
        let unchanged = self.last_event.take().filter(|(last, _)| *last == note);
        let (_, recorder) = self.last_event.insert(unchanged.unwrap_or_else(new_event));
        let event = Event {
            type_: EventType::Warning,
            reason: "PortsRefused".to_owned(),
            note: Some(note),
            action: "Serving".to_owned(),
            secondary: None,
        };
        match timeout(REQUEST_TIMEOUT, recorder.publish(&event, &object_ref)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(why = error_message(&error), "an event could not be written");
            }
            Err(_) => tracing::debug!("an event could not be written in time"),
        }
    }
}
/// Returns the field manager of a list; the API accepts 128 characters.
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

    /// Returns the controller of a cluster whose API does not respond, because there is none.
    fn ports(store: &Store, reloads: ReloadSender) -> PortListController {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        PortListController {
            client: Client::try_from(config).unwrap(),
            settings: config::PortList::default(),
            ports_sender: watch::Sender::new(None),
            reload_sender: reloads,
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
        let (reloads, mut asked) = causeway_config::reload_channel();
        let ports = ports(&store, reloads);
        let mut keeper = Reconciler::new(&ports);
        keeper.restore_last_ports().await;
        let held = || ports.readiness.hold_reason().unwrap_or_default();
        assert!(held().contains("kube-system/causeway-ports"), "{}", held());
        keeper.handle_list_update(Err("forbidden".into()));
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
            keeper.handle_list_update(Ok(Some(ConfigMap {
                data: Some(data.into()),
                ..ConfigMap::default()
            })));
            tokio::join!(keeper.reconcile(), async {
                asked.recv().await.respond(Ok("done".into()));
            });
            assert_eq!(held(), "");
            let faults = ports.readiness.faults().join("");
            assert!(faults.contains(fault), "{faults}");
            assert_eq!(faults.is_empty(), fault.is_empty(), "{faults}");
        }

        let again = self::ports(&store, ports.reload_sender.clone());
        let mut keeper = Reconciler::new(&again);
        tokio::join!(keeper.restore_last_ports(), async {
            asked.recv().await.respond(Ok("done".into()));
        });
        assert_eq!(
            again.readiness.hold_reason(),
            None,
            "the list is on the disk"
        );
    }

    #[tokio::test]
    async fn a_starting_gateway_serves_stored_ports_until_the_api_answers() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        let (reloads, mut asked) = causeway_config::reload_channel();
        let ports = |refused: bool| {
            let reloads = (!refused).then(|| reloads.clone());
            ports(&store, reloads.unwrap_or_default())
        };
        let served = NodePorts {
            http: [9051, 9100].into(),
            ..NodePorts::default()
        };
        let first = ports(false);
        first.ports_sender.send_replace(Some(served.clone()));
        Reconciler::new(&first).save_ports();

        let second = ports(false);
        let mut keeper = Reconciler::new(&second);
        tokio::join!(keeper.restore_last_ports(), async {
            asked.recv().await.respond(Ok("done".into()));
        });
        assert_eq!(*second.ports_sender.borrow(), Some(served));

        let third = ports(true);
        Reconciler::new(&third).restore_last_ports().await;
        assert_eq!(*third.ports_sender.borrow(), None);
    }
}
