//! The engine by which gateways share their durable state, and `causeway state migrate`, which copies the state from one engine
//! to another.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use causeway_certs::{
    Entries, EntryChange, EntryKey, OpenMode, RevocationEntry, SharedCa, Store, normalize_entry,
};
use causeway_gateway::Config;
use causeway_gateway::shared_state::{DataDirEngine, EtcdEngine, StateEngine};
use causeway_rt::log_throttle::FailureThrottle;
use tokio::time::sleep;

use super::kubernetes;
use crate::cli::operator::{State, StateMigrate};
use crate::operator::config_loader::{self, ConfigSources};
use crate::output::{errln, outln};

/// Interval of attempts while the engine does not answer at the start.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Returns the engine that a configuration names, if any.
///
/// # Errors
/// If a file that it needs cannot be used.
pub(super) async fn engine(config: &Config) -> anyhow::Result<Option<Arc<dyn StateEngine>>> {
    if let Some(etcd) = config
        .state
        .as_ref()
        .and_then(|state| state.etcd.as_deref())
    {
        let engine = EtcdEngine::new(etcd)?;
        return Ok(Some(Arc::new(engine)));
    }
    kubernetes::state_engine(config).await
}

/// Imports the CA of the engine into a data directory that has none, without which a gateway cannot start. Waits until the engine
/// returns it or has none.
///
/// # Errors
/// If the CA in the engine cannot be used.
pub(super) async fn import_ca(
    engine: &dyn StateEngine,
    config: &Config,
    report: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<()> {
    if config.tunnel.identity.is_some() {
        return Ok(());
    }
    let has_ca = || {
        let store = Store::open(&config.data_dir, OpenMode::Existing).ok();
        store.is_some_and(|store| matches!(store.ca(), Ok(Some(_))))
    };
    if has_ca() {
        return Ok(());
    }
    let key = EntryKey::Ca.to_string();
    let mut throttle = FailureThrottle::default();
    let entry = loop {
        match engine.get(&key).await {
            Ok(entry) => break entry,
            Err(error) => {
                let why = format!("the CA cannot be loaded: {error}");
                if throttle.should_log(&why) {
                    tracing::warn!("{why}; trying again");
                }
                report(&why);
                sleep(RETRY_INTERVAL).await;
            }
        }
    };
    // Another start may succeed, so this is no error of the configuration.
    let Some(text) = entry else {
        let data_dir = config.data_dir.display();
        bail!(
            "there is no CA in {data_dir} or in {engine}: start this gateway once the gateway with the CA is ready, or create a CA with `causeway ca init --data-dir {data_dir}`"
        );
    };
    let invalid = |why| anyhow::anyhow!("{engine}: the entry `ca` cannot be parsed: {why}");
    let shared = SharedCa::from_entry(&text).map_err(invalid)?;
    Store::open(&config.data_dir, OpenMode::Create)?.import_shared(&shared)?;
    tracing::info!("the CA was loaded from {engine}");
    Ok(())
}

/// Runs the command.
pub(crate) async fn run(command: State) -> anyhow::Result<()> {
    match command {
        State::Migrate(args) => migrate(&args).await,
    }
}

async fn migrate(args: &StateMigrate) -> anyhow::Result<()> {
    let (from, from_place) = open(&args.from, OpenMode::Existing).await?;
    let (to, to_place) = open(&args.to, OpenMode::Create).await?;
    for (engine, place) in [(&from, &from_place), (&to, &to_place)] {
        if place.has_own_ca {
            // `load` may leave out a CA that it cannot read.
            engine.get(&EntryKey::Ca.to_string()).await?;
        }
    }
    let entries = known_entries(&*from).await?;
    if entries.is_empty() {
        bail!(
            "{from} has no state; is {} the configuration of the gateway?",
            args.from.display()
        );
    }
    let existing = known_entries(&*to).await?;
    if let Some(key) = existing
        .keys()
        .find(|key| !is_same(key, &entries, &existing))
    {
        bail!(
            "{to} has another state already ({key}, for example), and is left unchanged; use {}",
            to_place.empty_one
        );
    }
    let new = entries
        .iter()
        .filter(|(key, _)| !existing.contains_key(*key));
    let changes = new.map(|(key, value)| EntryChange {
        key: key.clone(),
        expected: None,
        value: Some(value.clone()),
    });
    let conflicts = to.write(changes.collect()).await?;
    let copied = known_entries(&*to).await?;
    let is_lost = |key: &String| !is_same(key, &entries, &copied);
    if !conflicts.is_empty() || entries.keys().any(is_lost) {
        bail!("{to} was changed at the same time; end its gateways and run the command again");
    }
    outln!("copied {} from {from} to {to}", count(&entries))?;
    errln!(
        "next: start all gateways with the configuration {}",
        args.to.display()
    );
    Ok(())
}

/// Returns the entries that this version knows. A gateway writes the others: the id of the content is that of one engine, so that
/// a gateway with a copy of another engine recognises the move.
async fn known_entries(engine: &dyn StateEngine) -> anyhow::Result<Entries> {
    let mut entries = engine.load().await?;
    entries.retain(|key, _| EntryKey::parse(key).is_some());
    Ok(entries)
}

/// Whether both sides have the same value of an entry. The engines may have written it in two ways.
fn is_same(key: &str, one: &Entries, other: &Entries) -> bool {
    let value = |entries: &Entries| {
        let text = entries.get(key)?;
        // A value that this version cannot read is compared as it is.
        Some(normalize_entry(key, text).unwrap_or_else(|_| text.clone()))
    };
    value(one) == value(other)
}

/// Place of the state that a configuration names.
struct Place {
    /// Place to use instead, if this one has another state.
    empty_one: &'static str,
    /// Whether the gateways have a CA of their own.
    has_own_ca: bool,
    /// Claim of the data directory, which no other process may use until this value is dropped.
    _claim: Option<causeway_certs::DirLock>,
}

/// Returns the engine of a configuration, or its data directory, which no gateway may use meanwhile.
async fn open(file: &Path, mode: OpenMode) -> anyhow::Result<(Arc<dyn StateEngine>, Place)> {
    let sources = ConfigSources {
        file: Some(file.to_owned()),
        environment: Vec::new(),
        flags: Vec::new(),
        fallbacks: &[],
    };
    let config: Config = config_loader::reload(&sources)?;
    let has_own_ca = config.tunnel.identity.is_none();
    if let Some(engine) = engine(&config).await? {
        let place = Place {
            empty_one: "an empty one, such as another prefix",
            has_own_ca,
            _claim: None,
        };
        return Ok((engine, place));
    }
    let path = &config.data_dir;
    let store = Store::open(path, mode).with_context(|| format!("{}: data_dir", file.display()))?;
    let claim = store.claim().context("end the gateway first")?;
    let place = Place {
        empty_one: "an empty data directory (`data_dir`)",
        has_own_ca,
        _claim: Some(claim),
    };
    Ok((Arc::new(DataDirEngine::new(store, path)), place))
}

/// Describes how many entries of each kind there are.
fn count(entries: &Entries) -> String {
    let of_kind = |kind: &str| entries.keys().filter(|key| key.starts_with(kind)).count();
    let is_in_force = |(key, text): &(&String, &String)| {
        let entry = serde_json::from_str::<RevocationEntry>(text);
        key.starts_with("revoked/") && entry.is_ok_and(|entry| entry.is_in_force())
    };
    format!(
        "{} nodes, {} revocations, {} join tokens, {} pinned keys and {}",
        of_kind("node/"),
        entries.iter().filter(is_in_force).count(),
        of_kind("token/"),
        of_kind("pin/"),
        if entries.contains_key(&EntryKey::Ca.to_string()) {
            "the CA"
        } else {
            "no CA"
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::{Ca, NodeName, NodeRecord};
    use std::fs;

    #[tokio::test]
    async fn a_destination_with_another_state_is_named_by_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| {
            let (data, file) = (
                folder.path().join(name),
                folder.path().join(format!("{name}.yaml")),
            );
            fs::write(&file, format!("data_dir: {}\n", data.display())).unwrap();
            (Store::open(&data, OpenMode::Create).unwrap(), file)
        };
        let node = NodeName::parse("edge-1").unwrap();
        let ((source, from), (target, to)) = (of("one"), of("two"));
        source
            .save_ca(&Ca::create(&"td".parse().unwrap()).unwrap())
            .unwrap();
        source.nodes().put(NodeRecord::name_only(&node, 5)).unwrap();
        target.nodes().put(NodeRecord::name_only(&node, 6)).unwrap();
        let migrate = async || {
            super::migrate(&StateMigrate {
                from: from.clone(),
                to: to.clone(),
            })
            .await
        };
        let refused = migrate().await.unwrap_err().to_string();
        assert!(
            refused.contains("two has another state already (node/edge-1, for example)"),
            "{refused}"
        );
        assert!(refused.contains("use an empty data directory"), "{refused}");
        target.nodes().remove(&node).unwrap();
        let refused = migrate().await.unwrap_err().to_string();
        assert!(refused.contains("revoked/edge-1"), "{refused}");
        fs::remove_dir_all(folder.path().join("two")).unwrap();
        migrate().await.unwrap();
        migrate().await.unwrap();
    }
}
