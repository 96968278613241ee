//! `causeway gateway`: runs a gateway with a configuration until a signal.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, fs};

use anyhow::{Context, anyhow, bail};
use causeway_certs::Store;
use causeway_gateway::config::{DiscoveredEndpoints, NodePorts, ReloadSender};
use causeway_gateway::shared_state::StateEngine;
use causeway_gateway::state::{Policy, PolicyWriter};
use causeway_gateway::{Bound, Config, Gateway, Reloader, RunEnd};
use causeway_watch_cache::{WatchCache, manifests::Manifests};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::kubernetes::{self, ClusterSenders, KubernetesControllers};
use super::{manifests, policy, rlimit, state};
use crate::operator::config_loader::{self, ConfigSources};
use crate::operator::config_reload::{self, FileHashes, ReloadTriggers};
use crate::operator::systemd::SystemdNotifier;
use crate::signal::Signals;

/// Binds all listeners, serves until SIGTERM or SIGINT or until another process takes over, then drains. Reads `sources` again at
/// each trigger of a reload. With `take_over`, takes over from the process that runs on the same data directory. With `await_stop`,
/// waits for a signal after another process has taken over.
pub(crate) async fn run(
    config: Config,
    sources: ConfigSources,
    (take_over, await_stop): (bool, bool),
) -> anyhow::Result<()> {
    let config = config.with_certificate_paths();
    let (mut file_hashes, mut signals) = (FileHashes::default(), Signals::listen()?);
    file_hashes.record(watched_files(&config, &sources));
    let stop = signals.stop.clone();
    let (notify, drain) = (SystemdNotifier::from_environment(), config.timeouts.drain);
    let policy_state = PolicyState::read(&config)?;
    tracing::info!("{policy_state}");
    let policy = PolicyWriter::new(policy_state.policy);
    // Stopped before anything was started.
    let Some((cluster, state_engine)) = load_inputs(&config, (&mut signals, &notify)).await? else {
        return Ok(());
    };
    let (reload_sender, reload_requests) = causeway_config::reload_channel();
    let triggers = ReloadTriggers {
        hangup: signals.hangup.take(),
        requests: reload_requests,
        file_hashes,
    };
    let (manifests_dir, kubernetes) = (manifests_dir(&config), config.kubernetes.clone());
    let gateway = Gateway::new(limit_connections(config))
        .policy(policy.reader())
        .reloads(reload_sender.clone())
        .state_engine(state_engine)
        .take_over(take_over);
    let gateway = cluster.attach_to(gateway);
    let bound = bind_and_load_manifests(gateway, manifests_dir.as_deref(), &notify)?;
    let (senders, inputs) = ClusterInputs::channel(reload_sender);
    let controllers_stop = stop.child_token();
    let cluster = cluster.into_task(&bound, senders, controllers_stop.clone());
    let cluster = Box::pin(stop_at_handover(
        cluster,
        bound.handed_over(),
        controllers_stop,
    ));
    let store = bound.store().clone();
    let current_rules = policy.reader().rules();
    policy::warn_of_labels(current_rules.as_deref(), kubernetes.as_ref(), &store);
    let running_gateway = RunningGateway {
        sources,
        reloader: bound.reloader(),
        policy,
        cache: bound.watch_cache(),
        inputs,
        policy_text: Mutex::new(policy_state.text),
        store,
    };
    let on_reload = Arc::new(move |file_hashes: &mut FileHashes| {
        running_gateway.reload_and_record(file_hashes)
    });
    let (pulse, grace) = (bound.watchdog(), (stop.clone(), drain));
    let serving = notify.run_gateway(pulse, grace, bound.run(stop));
    let serving = Box::pin(config_reload::run_with_reload(serving, triggers, on_reload));
    let serving = Box::pin(kubernetes::run_alongside(serving, cluster));
    let result = signals.run(serving).await;
    finish(result, &mut signals, await_stop).await
}

/// Runs the controllers, and stops them when another process has taken over, whose controllers continue.
async fn stop_at_handover<T>(
    controllers: impl Future<Output = T>,
    handed_over: CancellationToken,
    stop: CancellationToken,
) -> T {
    let stopping = async {
        handed_over.cancelled().await;
        stop.cancel();
    };
    tokio::join!(controllers, stopping).0
}

/// Waits for a signal after another process has taken over, if `await_stop`.
async fn finish(
    result: Option<RunEnd>,
    signals: &mut Signals,
    await_stop: bool,
) -> anyhow::Result<()> {
    match result {
        None => bail!("stopped at once by a second signal; open streams were cut"),
        Some(RunEnd::NotHandedOver) => {
            bail!("the running gateway did not hand over its sockets in time, and continues")
        }
        Some(RunEnd::HandedOver) if await_stop => {
            tracing::info!("waiting for SIGTERM, because another process has taken over");
            let stop = signals.stop.clone();
            signals.run(stop.cancelled()).await;
        }
        Some(_) => {}
    }
    Ok(())
}

/// Binds the gateway, and loads the manifests if there are any. Reports a failure to the service manager.
fn bind_and_load_manifests(
    gateway: Gateway,
    manifests_dir: Option<&Path>,
    notify: &SystemdNotifier,
) -> anyhow::Result<Bound> {
    let bound = gateway
        .bind()
        .inspect_err(|error| notify.notify_status(&error.to_string()))?;
    load_manifests(manifests_dir, bound.watch_cache().as_ref())
        .inspect_err(|error| notify.notify_status(&format!("{error:#}")))?;
    Ok(bound)
}

/// Loads the manifests into the API cache of edges, if there are any.
fn load_manifests(dir: Option<&Path>, cache: Option<&Arc<WatchCache>>) -> anyhow::Result<()> {
    if let Some(objects) = read_manifests(dir, cache)? {
        tracing::info!(
            objects = objects.count(),
            "edges can read the objects of the manifests"
        );
        objects.load();
    }
    Ok(())
}

/// Returns the cluster and the engine of the shared state, once they have what a gateway needs for its start. Returns nothing if
/// the gateway must stop meanwhile.
async fn load_inputs(
    config: &Config,
    (signals, notify): (&mut Signals, &SystemdNotifier),
) -> anyhow::Result<Option<(KubernetesControllers, Option<Arc<dyn StateEngine>>)>> {
    let report = |error: &anyhow::Error| notify.notify_status(&error.to_string());
    let cluster = KubernetesControllers::from_config(config).await;
    let cluster = cluster.inspect_err(report)?;
    match wait_for_cluster(&cluster, config, (signals, notify)).await {
        Some(ready) => ready?,
        None => return Ok(None),
    }
    let engine = state::engine(config).await.inspect_err(report)?;
    match wait_for_state(engine.as_deref(), config, (signals, notify)).await {
        Some(ready) => ready?,
        None => return Ok(None),
    }
    Ok(Some((cluster, engine)))
}

/// Waits for the inputs without which a gateway cannot start. Returns nothing if the gateway must stop meanwhile.
async fn wait_for_cluster(
    cluster: &KubernetesControllers,
    config: &Config,
    (signals, notify): (&mut Signals, &SystemdNotifier),
) -> Option<anyhow::Result<()>> {
    let stop = signals.stop.clone();
    let report = |why: &str| notify.notify_not_started(why);
    let waiting = stop.run_until_cancelled(Box::pin(cluster.wait_for_certificate(config, &report)));
    let waiting_status = "not serving yet: the API server of the cluster has not answered yet";
    signals
        .run(notify.run_startup(waiting, waiting_status))
        .await?
}

/// Waits for the CA of the shared state, if the data directory has none. Returns nothing if the gateway must stop meanwhile.
async fn wait_for_state(
    engine: Option<&dyn StateEngine>,
    config: &Config,
    (signals, notify): (&mut Signals, &SystemdNotifier),
) -> Option<anyhow::Result<()>> {
    let Some(engine) = engine else {
        return Some(Ok(()));
    };
    let stop = signals.stop.clone();
    let report = |why: &str| notify.notify_not_started(why);
    let waiting = stop.run_until_cancelled(Box::pin(state::import_ca(engine, config, &report)));
    let waiting_status = "not serving yet: the engine of the shared state has not answered yet";
    signals
        .run(notify.run_startup(waiting, waiting_status))
        .await?
}

/// A running gateway.
struct RunningGateway {
    sources: ConfigSources,
    reloader: Reloader,
    policy: PolicyWriter,
    /// Watch cache that edges read.
    cache: Option<Arc<WatchCache>>,
    inputs: ClusterInputs,
    /// Data directory with the joined nodes.
    store: Store,
    /// Text of the rules in force.
    policy_text: Mutex<Option<String>>,
}

/// Inputs received from the cluster so far.
struct ClusterInputs {
    /// Ports that the cluster lists. Until they are known, edges keep the ports that they know.
    listed: watch::Receiver<Option<NodePorts>>,
    /// Endpoints at which edges reach this gateway, and their number.
    endpoints: watch::Receiver<DiscoveredEndpoints>,
}

impl ClusterInputs {
    /// Returns the inputs, and the senders that set them and request a reload.
    fn channel(reload_sender: ReloadSender) -> (ClusterSenders, Self) {
        let (ports_sender, ports_receiver) = watch::channel(None);
        let (endpoints_sender, endpoints_receiver) = watch::channel(DiscoveredEndpoints::default());
        let senders = ClusterSenders {
            ports: ports_sender,
            advertised: endpoints_sender,
            reload_sender,
        };
        (
            senders,
            Self {
                listed: ports_receiver,
                endpoints: endpoints_receiver,
            },
        )
    }
}

impl RunningGateway {
    /// Reloads, and records the error if the configuration is rejected.
    fn reload_and_record(&self, file_hashes: &mut FileHashes) -> anyhow::Result<String> {
        let result = self.reload(file_hashes);
        result.inspect_err(|_| self.reloader.record_refused())
    }

    /// Reads and builds everything before any of it takes effect.
    fn reload(&self, file_hashes: &mut FileHashes) -> anyhow::Result<String> {
        file_hashes.record(self.sources.file.clone());
        let config: Config = config_loader::reload(&self.sources)?;
        let config = config.with_certificate_paths();
        file_hashes.record(watched_files(&config, &self.sources));
        let policy_state = PolicyState::read(&config)?;
        if let Some(rules) = &policy_state.policy {
            policy::check_followed_pods(rules, self.reloader.follows_pods())?;
        }
        let config = with_listed_ports(config, self.inputs.listed.borrow().as_ref())?;
        let config = config.with_endpoints(&self.inputs.endpoints.borrow());
        let kubernetes = config.kubernetes.clone();
        let objects = read_manifests(manifests_dir(&config).as_deref(), self.cache.as_ref())?;
        let prepared = self.reloader.prepare(&limit_connections(config))?;
        if let Some(objects) = objects {
            objects.load();
        }
        let mut text = self
            .policy_text
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *text == policy_state.text {
            return Ok(prepared.apply().to_string());
        }
        let description = policy_state.to_string();
        if policy_state.policy.is_none() {
            tracing::warn!("{description}");
        }
        policy::warn_of_labels(
            policy_state.policy.as_ref(),
            kubernetes.as_ref(),
            &self.store,
        );
        *text = policy_state.text;
        let changed = prepared.apply_with(Some(|| self.policy.replace(policy_state.policy)));
        Ok(format!("{description}; {changed}"))
    }
}

/// Returns the directory of manifests, if edges read objects from manifests.
fn manifests_dir(config: &Config) -> Option<PathBuf> {
    config.api_cache.as_ref()?.manifests.clone()
}

/// Returns the objects that edges read, if they come from manifests.
fn read_manifests(
    dir: Option<&Path>,
    cache: Option<&Arc<WatchCache>>,
) -> anyhow::Result<Option<Manifests>> {
    let source = dir.zip(cache);
    source
        .map(|(dir, cache)| manifests::read_manifests(dir, cache.clone()))
        .transpose()
}

/// Returns the configuration with the ports that the cluster lists.
fn with_listed_ports(config: Config, listed: Option<&NodePorts>) -> anyhow::Result<Config> {
    let Some(listed) = listed else {
        return Ok(config);
    };
    config.with_listed_ports(listed).map_err(|faults| {
        let faults_text: Vec<_> = faults.iter().map(ToString::to_string).collect();
        anyhow!(
            "not valid with the ports that the cluster lists: {}",
            faults_text.join("; ")
        )
    })
}

/// State of the access policy.
struct PolicyState {
    file: Option<PathBuf>,
    /// Text of the policy file.
    text: Option<String>,
    policy: Option<Policy>,
}

impl PolicyState {
    fn read(config: &Config) -> anyhow::Result<Self> {
        let file = config.policy.0.clone();
        let Some(path) = &file else {
            return Ok(Self {
                file,
                text: None,
                policy: None,
            });
        };
        let policy = policy::read(path)?;
        policy::check_pods(&policy, config.kubernetes.as_ref())?;
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Ok(Self {
            text: Some(text),
            policy: Some(policy),
            file,
        })
    }
}

impl fmt::Display for PolicyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.policy, &self.file) {
            (Some(policy), Some(file)) => {
                let (rules, plural) = (policy.len(), if policy.len() == 1 { "" } else { "s" });
                write!(f, "policy: {rules} rule{plural} from {}", file.display())
            }
            _ => f.write_str(
                "no policy: every client that a listener admits may do everything on every node",
            ),
        }
    }
}

/// Returns the files whose changes cause a reload.
fn watched_files(config: &Config, sources: &ConfigSources) -> Vec<PathBuf> {
    let manifests = manifests_dir(config).map(|dir| manifests::manifest_files(&dir));
    let manifests = manifests.into_iter().flatten();
    let config_files = sources.file.iter().cloned().chain(config.files());
    config_files.chain(manifests).collect()
}

/// Reads the files that the configuration names, and checks them as far as that is possible without the data directory.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    if let Some(path) = &config.policy.0 {
        policy::check_pods(&policy::read(path)?, config.kubernetes.as_ref())?;
    }
    causeway_gateway::check(config)?;
    if let Some((api_cache, dir)) = config.api_cache.as_ref().zip(manifests_dir(config)) {
        manifests::read_manifests(
            &dir,
            WatchCache::new(&api_cache.resources(), &api_cache.limits()),
        )?;
    }
    Ok(())
}

/// Raises the limit of open files as far as the system permits, and limits client connections to the number that fits. A
/// gateway without free file descriptors could not accept a tunnel again.
fn limit_connections(mut config: Config) -> Config {
    config.limits.connections = rlimit::limit_connections(config.limits.connections);
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn to_check_a_configuration_is_to_read_its_policy_too() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy.yaml");
        let config = Config {
            policy: file.clone().into(),
            ..Config::default()
        };
        assert!(
            check(&config)
                .unwrap_err()
                .to_string()
                .contains("policy.yaml")
        );
        std::fs::write(&file, "rules: [{ then: allow, who: {} }]").unwrap();
        assert!(
            check(&config)
                .unwrap_err()
                .to_string()
                .contains("set users, groups")
        );
        std::fs::write(&file, "rules: []").unwrap();
        check(&config).unwrap();
    }
}
