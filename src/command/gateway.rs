//! `causeway gateway`: a gateway of a configuration, until a signal.

use anyhow::bail;
use causeway_gateway::{Config, Gateway};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::{admin, policy};
use crate::notify::Notify;
use crate::signal::Signals;

/// Files kept for what is no caller's connection: tunnels, listeners, the data directory.
const RESERVE: usize = 256;

/// Binds everything, serves until SIGTERM or SIGINT, then drains.
pub(crate) async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let (notify, drain) = (Notify::from_environment(), config.timeouts.drain);
    let policy = config.policy.0.as_deref().map(policy::load).transpose()?;
    match &config.policy.0 {
        Some(file) => tracing::info!(file = %file.display(), "the policy decides who may do what"),
        None => {
            tracing::info!("no policy: whoever a front lets in may do everything on every node");
        }
    }
    let mut gateway = Gateway::new(within_files(config));
    if let Some(policy) = &policy {
        gateway = gateway.policy(policy.reader());
    }
    let bound = gateway
        .bind()
        .inspect_err(|error| notify.status(&error.to_string()))?;
    let store = bound.store().clone();
    store.write_runtime(admin::NAME, &bound.addresses().admin.to_string())?;
    let (pulse, asked) = (bound.pulse(), (stop.clone(), drain));
    let running = Box::pin(bound.run(stop));
    let ended = signals
        .run(Box::pin(notify.gateway(pulse, asked, running)))
        .await;
    store.remove_runtime(admin::NAME)?;
    if ended.is_none() {
        bail!("ended at once by a second signal; what was open is cut");
    }
    Ok(())
}

/// Reads what the configuration names, as far as that can be judged without the data directory.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    config.policy.0.as_deref().map(policy::load).transpose()?;
    Ok(())
}

/// Takes as many files as the system gives, and lets callers have no more connections than fit: a gateway that is
/// out of files could take no tunnel back.
fn within_files(mut config: Config) -> Config {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return config;
    };
    let files = if setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        hard
    } else {
        soft
    };
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    // Half where there are few, so that something is left for both.
    let most = files.saturating_sub(RESERVE).max(files / 2).max(1);
    if config.limits.connections > most {
        tracing::warn!(
            files,
            connections = most,
            "fewer connections than limits.connections: the limit of open files does not allow more"
        );
        config.limits.connections = most;
    }
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
                .contains("names nobody")
        );
        std::fs::write(&file, "rules: []").unwrap();
        check(&config).unwrap();
    }
}
