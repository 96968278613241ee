//! `causeway gateway`: a gateway of a configuration, until a signal.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, fs};

use anyhow::{Context, anyhow, bail};
use causeway_certs::Store;
use causeway_gateway::config::{DiscoveredEndpoints, NodePorts, ReloadSender};
use causeway_gateway::state::{Policy, PolicyWriter};
use causeway_gateway::{Config, Gateway, Reloader};
use causeway_watch_cache::{WatchCache, manifests::Manifests};
use tokio::sync::watch;

use super::kubernetes::{self, ClusterSenders, KubernetesControllers};
use super::{admin_client, manifests, policy, rlimit};
use crate::config_loader::{self, ConfigSources};
use crate::reload::{self, FileHashes, ReloadTriggers};
use crate::signal::Signals;
use crate::systemd::SystemdNotifier;

/// Binds everything, serves until SIGTERM or SIGINT, then drains. Reads `sources` anew whenever there is a reason.
pub(crate) async fn run(config: Config, sources: ConfigSources) -> anyhow::Result<()> {
    let config = config.completed();
    let (mut noted, mut signals) = (FileHashes::default(), Signals::listen()?);
    noted.files(files(&config, &sources));
    let stop = signals.stop.clone();
    let (notify, drain) = (SystemdNotifier::from_environment(), config.timeouts.drain);
    let rules = PolicyState::read(&config)?;
    tracing::info!("{rules}");
    let policy = PolicyWriter::new(rules.policy);
    let cluster = KubernetesControllers::read(&config)
        .await
        .inspect_err(|error| notify.status(&error.to_string()))?;
    match begun(&cluster, &config, (&mut signals, &notify)).await {
        Some(begun) => begun?,
        // Stopped before anything was started.
        None => return Ok(()),
    }
    let (reloads, asked) = causeway_config::reloads();
    let reasons = ReloadTriggers {
        hangup: signals.hangup.take(),
        asked,
        files: noted,
    };
    let (dir, kubernetes) = (directory(&config), config.kubernetes.clone());
    let gateway = Gateway::new(within_files(config))
        .policy(policy.reader())
        .reloads(reloads.clone());
    let bound = cluster
        .attach_to(gateway)
        .bind()
        .inspect_err(|error| notify.status(&error.to_string()))?;
    let pool = bound.pool();
    hold(dir.as_deref(), pool.as_ref())
        .inspect_err(|error| notify.status(&format!("{error:#}")))?;
    let (listing, heard) = ClusterInputs::by(reloads);
    let cluster = cluster.follow(&bound, listing, stop.clone());
    let store = bound.store().clone();
    let rules_now = policy.reader().rules();
    policy::warn_of_labels(rules_now.as_deref(), kubernetes.as_ref(), &store);
    store.write_runtime(admin_client::NAME, &bound.addresses().admin.to_string())?;
    let live = RunningGateway {
        sources,
        reloader: bound.reloader(),
        policy,
        pool,
        heard,
        text: Mutex::new(rules.text),
        store: store.clone(),
    };
    let again = Arc::new(move |noted: &mut FileHashes| live.again(noted));
    let (pulse, grace) = (bound.pulse(), (stop.clone(), drain));
    let live = notify.gateway(pulse, grace, bound.run(stop));
    let live = Box::pin(reload::run_with_reload(live, reasons, again));
    let live = Box::pin(kubernetes::beside(live, cluster));
    let ended = signals.run(live).await;
    admin_client::forget(&store)?;
    if ended.is_none() {
        bail!("stopped at once by a second signal; open streams were cut");
    }
    Ok(())
}

/// Has edges read what the manifests say, if there are any.
fn hold(dir: Option<&Path>, pool: Option<&Arc<WatchCache>>) -> anyhow::Result<()> {
    if let Some(objects) = objects(dir, pool)? {
        tracing::info!(
            objects = objects.count(),
            "edges can read the objects of the manifests"
        );
        objects.hold();
    }
    Ok(())
}

/// Waits for the inputs without which a gateway cannot start. Returns nothing if the gateway is asked to stop meanwhile.
async fn begun(
    cluster: &KubernetesControllers,
    config: &Config,
    (signals, notify): (&mut Signals, &SystemdNotifier),
) -> Option<anyhow::Result<()>> {
    let stop = signals.stop.clone();
    let tell = |why: &str| notify.not_begun(why);
    let begin = stop.run_until_cancelled(Box::pin(cluster.begin(config, &tell)));
    let silence = "not serving yet: the API server of the cluster has not answered yet";
    signals.run(notify.beginning(begin, silence)).await?
}

/// A gateway that runs.
struct RunningGateway {
    sources: ConfigSources,
    reloader: Reloader,
    policy: PolicyWriter,
    /// Watch cache that edges read.
    pool: Option<Arc<WatchCache>>,
    heard: ClusterInputs,
    /// The nodes that have joined.
    store: Store,
    /// The text of the rules that are in force.
    text: Mutex<Option<String>>,
}

/// Inputs received from the cluster so far.
struct ClusterInputs {
    /// The ports that it lists; until they are known edges keep those that they know.
    listed: watch::Receiver<Option<NodePorts>>,
    /// Endpoints at which edges reach this gateway, and how many there are.
    found: watch::Receiver<DiscoveredEndpoints>,
}

impl ClusterInputs {
    /// With what says it, and asks for it to be taken up.
    fn by(reloads: ReloadSender) -> (ClusterSenders, Self) {
        let (ports, listed) = watch::channel(None);
        let (advertised, found) = watch::channel(DiscoveredEndpoints::default());
        let listing = ClusterSenders {
            ports,
            advertised,
            reloads,
        };
        (listing, Self { listed, found })
    }
}

impl RunningGateway {
    /// Reads everything anew, and notes where that is refused.
    fn again(&self, noted: &mut FileHashes) -> anyhow::Result<String> {
        let done = self.reload(noted);
        done.inspect_err(|_| self.reloader.refused())
    }

    /// Everything is read and built before anything is put into force.
    fn reload(&self, noted: &mut FileHashes) -> anyhow::Result<String> {
        noted.files(self.sources.file.clone());
        let config: Config = config_loader::reload(&self.sources)?;
        let config = config.completed();
        noted.files(files(&config, &self.sources));
        let rules = PolicyState::read(&config)?;
        let config = listing(config, self.heard.listed.borrow().as_ref())?;
        let config = config.advertising(&self.heard.found.borrow());
        let kubernetes = config.kubernetes.clone();
        let objects = objects(directory(&config).as_deref(), self.pool.as_ref())?;
        let prepared = self.reloader.prepare(&within_files(config))?;
        if let Some(objects) = objects {
            objects.hold();
        }
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        if *text == rules.text {
            return Ok(prepared.apply().to_string());
        }
        let said = rules.to_string();
        if rules.policy.is_none() {
            tracing::warn!("{said}");
        }
        policy::warn_of_labels(rules.policy.as_ref(), kubernetes.as_ref(), &self.store);
        *text = rules.text;
        let changed = prepared.apply_with(Some(|| self.policy.replace(rules.policy)));
        Ok(format!("{said}; {changed}"))
    }
}

/// The directory of manifests, if edges read those.
fn directory(config: &Config) -> Option<PathBuf> {
    config.api_cache.as_ref()?.manifests.clone()
}

/// Returns the objects that edges read, if they come from manifests.
fn objects(
    dir: Option<&Path>,
    pool: Option<&Arc<WatchCache>>,
) -> anyhow::Result<Option<Manifests>> {
    let from = dir.zip(pool);
    from.map(|(dir, pool)| manifests::read(dir, pool.clone()))
        .transpose()
}

/// A configuration with the ports that the cluster lists.
fn listing(config: Config, listed: Option<&NodePorts>) -> anyhow::Result<Config> {
    let Some(listed) = listed else {
        return Ok(config);
    };
    config.listing(listed).map_err(|faults| {
        let said: Vec<_> = faults.iter().map(ToString::to_string).collect();
        anyhow!(
            "not valid with the ports that the cluster lists: {}",
            said.join("; ")
        )
    })
}

/// State of the access policy.
struct PolicyState {
    file: Option<PathBuf>,
    /// As it was written.
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
                let (rules, many) = (policy.len(), if policy.len() == 1 { "" } else { "s" });
                write!(f, "policy: {rules} rule{many} from {}", file.display())
            }
            _ => f.write_str(
                "no policy: every client that a listener admits may do everything on every node",
            ),
        }
    }
}

/// All files that count.
fn files(config: &Config, sources: &ConfigSources) -> Vec<PathBuf> {
    let manifests = directory(config).map(|dir| manifests::files(&dir));
    let manifests = manifests.into_iter().flatten();
    let own = sources.file.iter().cloned().chain(config.files());
    own.chain(manifests).collect()
}

/// Reads what the configuration names, as far as that can be judged without the data directory.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    config.policy.0.as_deref().map(policy::read).transpose()?;
    causeway_gateway::check(config)?;
    if let Some((api_cache, dir)) = config.api_cache.as_ref().zip(directory(config)) {
        manifests::read(
            &dir,
            WatchCache::new(&api_cache.resources(), &api_cache.limits()),
        )?;
    }
    Ok(())
}

/// Raises the limit of open files as far as the system allows, and limits client connections to the number that fits: a
/// gateway that is out of files could not accept a tunnel again.
fn within_files(mut config: Config) -> Config {
    config.limits.connections = rlimit::allow(config.limits.connections);
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
