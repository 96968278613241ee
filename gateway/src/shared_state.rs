//! Durable state that several gateways share: nodes, revocations, join tokens, pinned keys of upstreams, and the CA.
//!
//! An engine stores it: etcd, or Secrets of a Kubernetes cluster. The data directory has a copy, from which the gateway
//! works while the engine is away. A change on either side is detected by comparison with the last state that was equal on
//! both, and is applied on the other side. So a command that changes the data directory of any gateway changes the state of
//! all.
//!
//! Two decisions must be the same at all gateways, and are made in the engine by compare-and-swap before they take effect:
//! the use of a join token, and the first pinned key of an upstream (`decisions`). Without the engine both are refused.

mod absent_nodes;
mod data_dir;
mod decisions;
mod engine;
mod etcd;
mod merge;

pub use data_dir::DataDirEngine;
pub use decisions::RedeemError;
pub(crate) use engine::CONCURRENT_REQUESTS;
pub use engine::{EngineError, StateEngine, results_of_keys};
pub use etcd::EtcdEngine;

use absent_nodes::AbsentNodes;
use causeway_certs::{
    Entries, EntryChange, EntryKey, ImportOutcome, SharedCa, Store, StoreError, entry_text,
};
use merge::Digests;
use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fmt::Display,
    sync::{Arc, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Mutex, Notify, watch},
    task::spawn_blocking,
    time::sleep,
};

/// Interval at which the modification times of the files in the data directory are read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of attempts to write while other gateways write.
const MAX_ATTEMPTS: usize = 5;
/// Maximum number of nodes that one log message names.
const MAX_LOGGED_NODES: usize = 10;
/// Modification times of the files with entries.
type FileTimes = [Option<SystemTime>; 6];
/// Key of the entry with the version of the entries. An engine without it is new, or has lost its entries.
const VERSION_KEY: &str = "version";
/// Version of the entries.
const VERSION: &str = "1";
/// Key of the entry with the random id of the content of an engine. A backup has the id of its content.
const CONTENT_ID_KEY: &str = "content-id";
/// Name of the last common state in the data directory.
const LAST_STATE_FILE: &str = "shared-state";

/// State that this gateway shares with others. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SharedState(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    engine: Arc<dyn StateEngine>,
    store: Store,
    /// Whether the CA is shared. It is not if an external CA issues the certificates of edges.
    shares_ca: bool,
    /// Last common state, once it has been read. Locked during a synchronization.
    last: Mutex<Option<LastState>>,
    /// Modification times of the files before they were last compared with the engine.
    compared: std::sync::Mutex<Option<FileTimes>>,
    /// Changes of the data directory that the tables of the gateway do not have yet.
    unapplied: std::sync::Mutex<Applied>,
    /// Faults of the engine's entries that the last synchronization has skipped.
    skipped: std::sync::Mutex<Vec<String>>,
    absent_nodes: AbsentNodes,
    /// Requests a synchronization.
    requested: Notify,
    synchronized: watch::Sender<bool>,
}

/// Last state that was equal in the data directory and in the engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct LastState {
    /// Revision of the engine at that time.
    revision: Option<u64>,
    /// Id of the engine's content.
    #[serde(default)]
    content_id: Option<String>,
    digests: Digests,
}

/// Reason why the state could not be synchronized.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// The engine does not answer or refuses.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The data directory cannot be read or written, or an entry of the engine cannot be parsed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The CA in the engine cannot be used.
    #[error("{0}")]
    Ca(String),
    /// Other gateways have changed the same entries at each attempt.
    #[error("other gateways change the shared state too often")]
    Contention,
    /// The gateway ends.
    #[error("the gateway is shutting down")]
    Stopped(#[from] tokio::task::JoinError),
}

/// Changes of the data directory by synchronizations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Nodes, revocations or pinned keys have changed.
    pub nodes: bool,
    /// The CA has changed.
    pub ca: bool,
}

impl SharedState {
    /// Returns the state that the data directory shares through `engine`.
    pub fn new(engine: Arc<dyn StateEngine>, store: Store, shares_ca: bool) -> Self {
        Self(Arc::new(Inner {
            engine,
            store,
            shares_ca,
            last: Mutex::default(),
            compared: std::sync::Mutex::default(),
            unapplied: std::sync::Mutex::default(),
            skipped: std::sync::Mutex::default(),
            absent_nodes: AbsentNodes::default(),
            requested: Notify::new(),
            synchronized: watch::Sender::new(false),
        }))
    }

    /// Returns the engine.
    pub fn engine(&self) -> &dyn StateEngine {
        &*self.0.engine
    }

    /// Ends [`SharedState::wait_synchronized`], for a gateway that works with its copy.
    pub fn continue_with_copy(&self) {
        self.0.synchronized.send_replace(true);
    }

    /// Waits until the state was synchronized once, or the gateway continues with its copy.
    pub async fn wait_synchronized(&self) {
        let mut synchronized = self.0.synchronized.subscribe();
        // The sender lives as long as this value.
        let _ = synchronized.wait_for(|done| *done).await;
    }

    /// Whether this data directory has a copy of an earlier synchronization.
    pub async fn has_copy(&self) -> bool {
        let last = self.on_disk(load_last).await;
        last.is_ok_and(|last| last.is_some())
    }

    /// Requests a synchronization soon.
    pub fn request(&self) {
        self.0.requested.notify_one();
    }

    /// Waits for a request, for a change in the engine, or for a change of the data directory by a command.
    pub async fn changed(&self) {
        tokio::select! {
            () = self.0.engine.changed() => {}
            () = self.0.requested.notified() => {}
            () = self.data_dir_changed() => {}
        }
    }

    /// Waits until a file in the data directory has changed since it was last compared. Commands do not notify the gateway of
    /// each change.
    async fn data_dir_changed(&self) {
        loop {
            let modified = self.on_disk(|store| Ok(store.entry_changes())).await.ok();
            if modified != *self.compared() {
                return;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    fn compared(&self) -> MutexGuard<'_, Option<FileTimes>> {
        let compared = self.0.compared.lock();
        compared.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the changes of the data directory that the tables do not have yet, even if a synchronization failed later or its
    /// future was dropped. Those that cannot be applied have to be given back.
    pub fn unapplied(&self) -> MutexGuard<'_, Applied> {
        let unapplied = self.0.unapplied.lock();
        unapplied.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the faults of entries of the engine that this version cannot read. They are left unchanged.
    pub fn skipped(&self) -> Vec<String> {
        let skipped = self.0.skipped.lock();
        skipped.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Synchronizes at once, while the task that waits for changes does so.
    ///
    /// # Errors
    /// Those of [`SharedState::synchronize`].
    pub async fn synchronize_now(&self) -> Result<(), SyncError> {
        // The waiting task releases the engine's watch.
        self.request();
        self.synchronize().await
    }

    /// Makes the data directory and the engine equal.
    ///
    /// # Errors
    /// If one of them cannot be read or written. Changes that were applied before stay, and the next call continues.
    pub async fn synchronize(&self) -> Result<(), SyncError> {
        let mut last = self.0.last.lock().await;
        let mut common = match &*last {
            Some(common) => common.clone(),
            None => self.on_disk(load_last).await?.unwrap_or_default(),
        };
        let result = self.synchronize_from(&mut common).await;
        *last = Some(common);
        if result.is_ok() {
            self.0.synchronized.send_replace(true);
        }
        result
    }

    async fn synchronize_from(&self, common: &mut LastState) -> Result<(), SyncError> {
        for _ in 0..MAX_ATTEMPTS {
            let remote = self.0.engine.load().await?;
            let is_new = !remote.contains_key(VERSION_KEY);
            let new_id = (!remote.contains_key(CONTENT_ID_KEY)).then(new_content_id);
            let content_id = remote.get(CONTENT_ID_KEY).or(new_id.as_ref()).cloned();
            self.check_content(common, &remote);
            // A change that comes while the files are read leads to the next synchronization.
            let modified = self.on_disk(|store| Ok(store.entry_changes())).await?;
            *self.compared() = Some(modified);
            let ca = remote.get(&EntryKey::Ca.to_string()).cloned();
            let is_known = common.content_id.is_some() && content_id == common.content_id;
            let (ca_conflict, ca_fault) = self.synchronize_ca(ca, is_known).await?;
            let (last, shared) = (common.digests.clone(), self.clone());
            let (merged, mut to_engine) = self
                .on_disk(move |store| shared.apply_remote(store, &last, &remote))
                .await?;
            to_engine.extend(is_new.then(|| first_entry(VERSION_KEY, VERSION)));
            to_engine.extend(new_id.map(|id| first_entry(CONTENT_ID_KEY, &id)));
            let conflicts = self.0.engine.write(to_engine).await?;
            let Some(digests) = merged.filter(|_| conflicts.is_empty() && !ca_conflict) else {
                continue;
            };
            if digests != common.digests {
                self.0.absent_nodes.clear();
            }
            if digests != common.digests || content_id != common.content_id {
                *common = LastState {
                    // With the writes of this gateway.
                    revision: self.0.engine.revision(),
                    content_id,
                    digests,
                };
                let saved = common.clone();
                self.on_disk(move |store| save_last(store, &saved)).await?;
            }
            return ca_fault.map_or(Ok(()), Err);
        }
        Err(SyncError::Contention)
    }

    /// Forgets the last common state if it is not that of this content of the engine, because entries that the engine lacks were
    /// not removed then.
    fn check_content(&self, common: &mut LastState, remote: &Entries) {
        let content_id = remote.get(CONTENT_ID_KEY);
        // Earlier versions have stored no id.
        let is_other = content_id != common.content_id.as_ref();
        let is_emptied = !remote.contains_key(VERSION_KEY);
        let is_restored = self.0.engine.revision() < common.revision;
        let reason = match common {
            LastState { digests, .. } if digests.is_empty() => return,
            _ if is_emptied => "it was emptied, or is another engine or prefix than before",
            _ if is_other => "it is another engine or prefix than before, or was filled again",
            _ if is_restored => "it was restored from a backup",
            _ => return,
        };
        tracing::warn!(
            engine = %self.0.engine,
            reason,
            "the shared state does not continue the one that this gateway has a copy of; what it lacks is stored again"
        );
        *common = LastState::default();
    }

    /// Applies changes of other gateways to the data directory. Returns the common state, unless the directory was changed
    /// meanwhile, and the changes that the engine lacks.
    fn apply_remote(
        &self,
        store: &Store,
        last: &Digests,
        remote: &Entries,
    ) -> Result<(Option<Digests>, Vec<EntryChange>), StoreError> {
        // A missing file does not mean that no node is revoked. A revocation in force is in the record of its node.
        let had = |kind: &str| last.keys().any(|key| key.starts_with(kind));
        let is_end_alone = |key: &String| match EntryKey::parse(key) {
            Some(EntryKey::Revoked(node)) => !last.contains_key(&EntryKey::Node(node).to_string()),
            _ => false,
        };
        if had("node/") {
            store.nodes().require()?;
        }
        if last.keys().any(is_end_alone) {
            store.nodes().require_ended()?;
        }
        if had("pin/") {
            store.pins().require()?;
        }
        let mut local = store.entries()?;
        let plan = merge::plan(last, &local, remote, UnixTime::now().as_secs());
        if last.is_empty() {
            self.report_united_nodes(&merge::united_nodes(&plan, &local, remote));
        }
        let mut conflicts = Vec::new();
        if !plan.local.is_empty() {
            conflicts = store.change_entries(&plan.local)?;
            self.unapplied().nodes = true;
        }
        for change in plan.local {
            local.remove(&change.key);
            local.extend(change.value.map(|value| (change.key, value)));
        }
        let mut common = merge::digests(&local);
        for key in plan.skipped.keys() {
            common.remove(key);
            common.extend(last.get(key).map(|digest| (key.clone(), *digest)));
        }
        let skipped = self.0.skipped.lock();
        *skipped.unwrap_or_else(PoisonError::into_inner) =
            plan.skipped.into_values().flatten().collect();
        Ok((conflicts.is_empty().then_some(common), plan.remote))
    }

    /// Logs the nodes that only one side had before a first merge. One that was removed there has come back.
    fn report_united_nodes(&self, nodes: &[&str]) {
        if nodes.is_empty() {
            return;
        }
        let names: Vec<_> = nodes.iter().take(MAX_LOGGED_NODES).collect();
        tracing::warn!(
            engine = %self.0.engine,
            count = nodes.len(),
            nodes = ?names,
            "only the data directory or only the shared state had these nodes; now all gateways admit them, so remove those that were removed before"
        );
    }

    /// Imports the CA of the engine if it is newer, else stores the CA of the data directory there. Returns whether another
    /// gateway has changed the CA meanwhile, and a fault that concerns only the CA. `is_known` says that the data directory has a
    /// copy of this content of the engine.
    ///
    /// # Errors
    /// Also if the engine has the state of another CA.
    async fn synchronize_ca(
        &self,
        remote: Option<String>,
        is_known: bool,
    ) -> Result<(bool, Option<SyncError>), SyncError> {
        if !self.0.shares_ca {
            return Ok((false, None));
        }
        let imported = remote.clone();
        let shared = self.clone();
        let import = move |store: &Store| {
            let (local, outcome) = import_ca(store, imported.as_deref(), is_known)?;
            if matches!(outcome, Ok(Some(ImportOutcome::Imported))) {
                shared.unapplied().ca = true;
            }
            Ok((local, outcome))
        };
        let (local, outcome) = self.on_disk(import).await?;
        let engine = &self.0.engine;
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(CaFault::Unreadable(why)) => {
                let fault = SyncError::Ca(format!("{engine}: {why}"));
                return Ok((false, Some(fault)));
            }
            Err(CaFault::Foreign(why)) => return Err(SyncError::Ca(format!("{engine}: {why}"))),
        };
        let is_behind = match outcome {
            Some(ImportOutcome::Imported | ImportOutcome::AlreadyImported) => false,
            Some(ImportOutcome::Behind) | None => true,
            Some(ImportOutcome::Diverged) => {
                let fault = SyncError::Ca(format!(
                    "the CA in {engine} and the CA in the data directory each have a change that the other lacks: a rotation was begun at two gateways at once; keep one of them (`causeway ca backup`, `causeway ca restore`)"
                ));
                return Ok((false, Some(fault)));
            }
        };
        if !is_behind || local.is_none() {
            return Ok((false, None));
        }
        let change = EntryChange {
            key: EntryKey::Ca.to_string(),
            expected: remote,
            value: local,
        };
        match self.0.engine.write(vec![change]).await {
            Ok(conflicts) => Ok((!conflicts.is_empty(), None)),
            // The engine may store the CA apart from the other entries.
            Err(error) => Ok((false, Some(SyncError::Ca(error.to_string())))),
        }
    }

    /// Runs a disk operation on a thread that may block.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, SyncError> {
        let store = self.0.store.clone();
        Ok(spawn_blocking(move || work(&store)).await??)
    }
}

/// Returns the change that makes an entry which every engine has.
fn first_entry(key: &str, value: &str) -> EntryChange {
    EntryChange {
        key: key.to_owned(),
        expected: None,
        value: Some(value.to_owned()),
    }
}

fn new_content_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn parse_entry<T: DeserializeOwned>(key: &str, text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| StoreError::Entry {
        key: key.to_owned(),
        why: error.to_string(),
    })
}

/// Reason why the CA of the engine was not imported.
enum CaFault {
    /// This version cannot read it.
    Unreadable(String),
    /// It has no root in common with the CA of the data directory, so the other entries may belong to another system.
    Foreign(String),
}

/// Imports the CA of the engine, if it has one. Returns the CA that the data directory had before, and the outcome.
#[expect(clippy::type_complexity, reason = "used once")]
fn import_ca(
    store: &Store,
    remote: Option<&str>,
    is_known: bool,
) -> Result<(Option<String>, Result<Option<ImportOutcome>, CaFault>), StoreError> {
    let local = store.ca()?.map(|_| store.shared()).transpose()?;
    let local = local.map(|ca| ca.to_entry()).transpose();
    let local = local.map_err(|error| StoreError::Entry {
        key: EntryKey::Ca.to_string(),
        why: error.to_string(),
    })?;
    let Some(text) = remote.filter(|text| local.as_deref() != Some(*text)) else {
        let is_equal = remote.map(|_| ImportOutcome::AlreadyImported);
        return Ok((local, Ok(is_equal)));
    };
    let shared = match SharedCa::from_entry(text) {
        Ok(shared) => shared,
        Err(why) => {
            let why = format!("the entry `ca` cannot be parsed: {why}");
            return Ok((local, Err(CaFault::Unreadable(why))));
        }
    };
    match store.import_shared(&shared) {
        Ok(outcome) => Ok((local, Ok(Some(outcome)))),
        Err(StoreError::Exists { path }) => {
            let own = store.ca()?;
            let is_same_domain =
                own.is_some_and(|own| own.trust_domain() == shared.ca().trust_domain());
            let why = foreign_ca_message(&path.display(), is_known, is_same_domain);
            Ok((local, Err(CaFault::Foreign(why))))
        }
        Err(error) => Err(error),
    }
}

/// Returns the message for a CA in the engine that has no root in common with the one at `path`.
fn foreign_ca_message(path: &impl Display, is_known: bool, is_same_domain: bool) -> String {
    let reload = "end this gateway, move `ca.json` and `ca.pem` of its data directory away, and start it again: it then loads the CA of the other gateways";
    if is_known {
        return format!(
            "it has another CA than {path}, because the CA was rotated completely while this gateway was off; {reload}"
        );
    }
    let other = "use another prefix or Secret, or another data directory";
    if is_same_domain {
        return format!(
            "it has another CA than {path}, with the same trust domain. If it is the state of another system: {other}. If the CA was rotated completely while this gateway was off: {reload}"
        );
    }
    format!("it has another CA than {path}, with another trust domain; {other}")
}

/// Reads the last common state. Without it, all entries of both sides count as new, and none is lost.
fn load_last(store: &Store) -> Result<Option<LastState>, StoreError> {
    let text = store.read_runtime(LAST_STATE_FILE)?;
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

fn save_last(store: &Store, state: &LastState) -> Result<(), StoreError> {
    store.write_runtime(LAST_STATE_FILE, &entry_text(state))
}

#[cfg(test)]
pub(crate) mod tests;
