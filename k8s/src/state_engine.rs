//! Engine that stores the shared state of gateways in Secrets of a cluster.
//!
//! There are [`SHARDS`] Secrets of entries: `NAME`, `NAME-1` to `NAME-15`. `shard` defines which entry is in which Secret. A
//! Secret has its entries in one data key. A write names the version of the Secret that was read, so that a write of another
//! gateway in between is detected. Each gateway watches all Secrets (`cache`).
//!
//! The CA is in one more Secret, which the operator makes (`causeway k8s ca-secret`) before the first gateway starts. That
//! Secret is complete by itself: a gateway whose state is not loaded reads the CA there, and a fault of it stops no other entry.
//! If it is empty, the first gateway with a CA fills it.
//!
//! The manifests make the Secrets of entries without content, and never remove content when they are applied again. `content`
//! fills empty Secrets, and moves the state of the earlier format. The state is complete if each Secret exists and has entries:
//! - A missing Secret is an error, and not the removal of its entries.
//! - A Secret without entries was deleted and made again, or replaced by the manifest. A gateway that has loaded the state
//!   before writes the entries back. Without such a gateway it is an error, unless all Secrets are empty.

mod cache;
mod content;
mod shard;
#[cfg(test)]
mod tests;

use crate::client::error_message;
use cache::{Cache, Observed};
use causeway_certs::{Entries, EntryChange};
use causeway_gateway::shared_state::{EngineError, StateEngine, results_of_keys};
use causeway_rt::task::TaskGroup;
use futures_util::future::{BoxFuture, FutureExt, join, join_all, try_join_all};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, api::PostParams};
use shard::{CA_SECRET, PREPARED_KEY, SHARDS, SecretNames, ShardObject, shard_index};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    future::Future,
    sync::Arc,
    time::Duration,
};
use tokio::time::{sleep, timeout};
use tracing::info_span;

/// Time limit of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of attempts to write while other gateways write.
const MAX_ATTEMPTS: usize = 5;
/// Maximum pause after a write of another gateway.
const MAX_CONFLICT_PAUSE: Duration = Duration::from_millis(100);
/// Generation of a response that does not replace a later version.
const NOT_A_READ: u64 = u64::MAX;

/// Engine that stores the shared state in Secrets.
pub struct SecretEngine {
    api: Api<Secret>,
    namespace: String,
    names: SecretNames,
    cache: Arc<Cache>,
    _watches: TaskGroup,
}

/// Outcome of a write of one Secret.
enum Written {
    Done,
    /// The Secret has changed since it was read.
    Conflict,
}

impl SecretEngine {
    /// Returns an engine for the Secrets `name` to `name-15` and the Secret `ca` with the CA, and starts its watches. It must be
    /// called on a runtime. The watches end when the engine is dropped.
    pub fn new(client: Client, namespace: &str, name: &str, ca: &str) -> Self {
        let api = Api::<Secret>::namespaced(client, namespace);
        let cache = Arc::<Cache>::default();
        let names = SecretNames {
            state: name.to_owned(),
            ca: ca.to_owned(),
        };
        let watches = TaskGroup::default();
        watches.spawn(
            info_span!("shared state"),
            cache.clone().watch(api.clone(), names.clone()),
        );
        Self {
            api,
            namespace: namespace.to_owned(),
            names,
            cache,
            _watches: watches,
        }
    }

    /// Returns the Secret with this number, as messages name it.
    fn secret_name(&self, index: usize) -> String {
        format!("Secret {}/{}", self.namespace, self.names.name(index))
    }

    fn error(&self, index: usize, why: impl fmt::Display) -> EngineError {
        EngineError(format!("{}: {why}", self.secret_name(index)))
    }

    fn missing_error(&self, index: usize) -> EngineError {
        if index == CA_SECRET {
            let (namespace, name) = (&self.namespace, &self.names.ca);
            let why = format!(
                "it does not exist; make it with `causeway k8s ca-secret --namespace {namespace} --name {name}`, or if a gateway has the CA, make an empty one, which that gateway fills: kubectl -n {namespace} create secret generic {name}"
            );
            return self.error(index, why);
        }
        self.error(
            index,
            "it does not exist; apply the manifest with all 16 Secrets (deploy/base/state.yaml or examples/state/rbac.yaml)",
        )
    }

    /// Sends a request about a Secret. Returns `None` if the Secret does not exist.
    async fn request(
        &self,
        index: usize,
        request: impl Future<Output = kube::Result<Secret>>,
    ) -> Result<Option<Arc<ShardObject>>, RequestError> {
        match timeout(REQUEST_TIMEOUT, request).await {
            Err(_) => {
                let why = "the cluster's API did not answer in time";
                Err(RequestError::Failed(self.error(index, why)))
            }
            Ok(Ok(secret)) => Ok(Some(Arc::new(ShardObject::parse(index, secret)))),
            Ok(Err(kube::Error::Api(status))) if status.is_not_found() => Ok(None),
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() => {
                Err(RequestError::Conflict)
            }
            Ok(Err(kube::Error::Api(status))) if status.is_forbidden() => {
                let why = format!(
                    "{}; a gateway needs the verbs get, list, watch and update for it (deploy/base/state.yaml or examples/state/rbac.yaml)",
                    status.message
                );
                Err(RequestError::Failed(self.error(index, why)))
            }
            Ok(Err(error)) => Err(RequestError::Failed(
                self.error(index, error_message(&error)),
            )),
        }
    }

    /// Reads a Secret from the API.
    async fn read(&self, index: usize) -> Result<Option<Arc<ShardObject>>, EngineError> {
        let generation = self.cache.generation(index);
        let name = self.names.name(index);
        let object = self.request(index, self.api.get(&name)).await;
        let object = object.map_err(|error| match error {
            RequestError::Failed(error) => error,
            RequestError::Conflict => self.error(index, "the cluster's API reports a conflict"),
        })?;
        self.cache.record_read(index, generation, object.clone());
        Ok(object)
    }

    /// Reads a Secret from the API.
    ///
    /// # Errors
    /// Also if the Secret does not exist or has no entries.
    async fn read_entries(&self, index: usize) -> Result<Arc<ShardObject>, EngineError> {
        let object = self.read(index).await?;
        let object = object.ok_or_else(|| self.missing_error(index))?;
        self.check_entries(index, &object)?;
        Ok(object)
    }

    /// Fails if the state has not been loaded. Until then the Secrets of entries may be incomplete.
    fn require_loaded(&self, index: usize) -> Result<(), EngineError> {
        if index == CA_SECRET || self.cache.loaded().is_some() {
            return Ok(());
        }
        Err(self.error(0, "the shared state has not been loaded yet"))
    }

    /// Returns the entries of a Secret.
    fn check_entries<'a>(
        &self,
        index: usize,
        object: &'a ShardObject,
    ) -> Result<&'a Entries, EngineError> {
        match &object.entries {
            Some(Ok(entries)) => Ok(entries),
            Some(Err(why)) => Err(self.error(index, why)),
            None => Err(self.error(index, "it has no entries")),
        }
    }

    /// Writes a Secret, if it is still this version.
    async fn replace(
        &self,
        index: usize,
        object: &ShardObject,
        entries: &Entries,
        data_keys: &[(&str, Option<&str>)],
    ) -> Result<Written, EngineError> {
        let secret = object.with(entries, data_keys);
        let secret = secret.map_err(|why| self.error(index, why))?;
        let name = self.names.name(index);
        let parameters = PostParams::default();
        let written = self.api.replace(&name, &parameters, &secret);
        match self.request(index, written).await {
            Ok(Some(object)) => {
                self.cache.record_read(index, NOT_A_READ, Some(object));
                Ok(Written::Done)
            }
            Ok(None) => Err(self.missing_error(index)),
            Err(RequestError::Conflict) => Ok(Written::Conflict),
            Err(RequestError::Failed(error)) => Err(error),
        }
    }

    /// Applies changes of the entries of one Secret. Returns the keys of those whose expected value is not current.
    async fn write_shard(
        &self,
        index: usize,
        changes: Vec<EntryChange>,
    ) -> Result<Vec<String>, EngineError> {
        let mut cached = self.cache.current(index);
        for _ in 0..MAX_ATTEMPTS {
            let is_cached = cached.is_some();
            let object = match cached.take() {
                Some(object) => object,
                None => self.read_entries(index).await?,
            };
            let current = self.check_entries(index, &object)?;
            let (next, conflicts) = apply_changes(current, &changes);
            // The cache may be behind the API, so that another value is current by now.
            if is_cached && !conflicts.is_empty() {
                continue;
            }
            if next == *current {
                return Ok(conflicts);
            }
            let data_keys = [(PREPARED_KEY, None)];
            match self.replace(index, &object, &next, &data_keys).await? {
                Written::Done => return Ok(conflicts),
                Written::Conflict => pause().await,
            }
        }
        Err(self.error(index, "other gateways change it too often"))
    }

    /// Returns the entries if the cache has the complete state.
    fn cached_entries(&self) -> Option<Entries> {
        let shards = self.cache.all().into_iter().take(SHARDS);
        let objects = shards.map(|observed| match observed {
            Observed::Present(object) => Some(object),
            Observed::Unknown | Observed::Missing => None,
        });
        let objects = objects.collect::<Option<Vec<_>>>()?;
        match self.assess(&objects) {
            Ok(content::Assessment::Complete(entries)) => Some(entries),
            _ => None,
        }
    }

    /// Reads all Secrets of entries, the first one last.
    async fn read_all(&self) -> Result<Vec<Arc<ShardObject>>, EngineError> {
        let require =
            |index: usize, object: Option<_>| object.ok_or_else(|| self.missing_error(index));
        let others = (1..SHARDS).map(async |index| require(index, self.read(index).await?));
        let others = try_join_all(others).await?;
        let mut objects = vec![require(0, self.read(0).await?)?];
        objects.extend(others);
        Ok(objects)
    }

    /// Loads the Secret with the CA, from the cache if possible.
    async fn load_ca(&self) -> Result<Arc<ShardObject>, EngineError> {
        match self.cache.current(CA_SECRET) {
            Some(object) => Ok(object),
            None => self.read_entries(CA_SECRET).await,
        }
    }

    /// Loads the Secrets of entries, from the cache if possible.
    async fn load_shards(&self) -> Result<Entries, EngineError> {
        // Until the first load, the watches may show the Secrets at different stages of the first fill.
        if self.cache.loaded().is_some() {
            let stale = self.cache.stale_shards().into_iter();
            let stale = stale.filter(|index| *index != CA_SECRET);
            try_join_all(stale.map(|index| self.read(index))).await?;
            if let Some(entries) = self.cached_entries() {
                return Ok(entries);
            }
        }
        for _ in 0..MAX_ATTEMPTS {
            let objects = self.read_all().await?;
            match self.assess(&objects)? {
                content::Assessment::Complete(entries) => return Ok(entries),
                content::Assessment::Emptied(emptied) => {
                    self.write_back(&objects, &emptied).await?;
                }
                content::Assessment::Empty => self.initialize(&objects).await?,
            }
            pause().await;
        }
        Err(self.error(0, "other gateways change the Secrets too often"))
    }
}

/// Reason for which a request had no effect.
enum RequestError {
    /// The Secret has changed since it was read.
    Conflict,
    Failed(EngineError),
}

/// Waits for a random time, so that gateways that write at once do not do so again.
async fn pause() {
    sleep(MAX_CONFLICT_PAUSE.mul_f64(rand::random())).await;
}

/// Returns the entries after the changes, and the keys of the changes whose expected value is not current.
fn apply_changes(current: &Entries, changes: &[EntryChange]) -> (Entries, Vec<String>) {
    let mut next = current.clone();
    let mut conflicts = Vec::new();
    for change in changes {
        if next.get(&change.key) != change.expected.as_ref() {
            conflicts.push(change.key.clone());
            continue;
        }
        match &change.value {
            Some(value) => drop(next.insert(change.key.clone(), value.clone())),
            None => drop(next.remove(&change.key)),
        }
    }
    (next, conflicts)
}

impl StateEngine for SecretEngine {
    /// A CA that cannot be read is left out.
    fn load(&self) -> BoxFuture<'_, Result<Entries, EngineError>> {
        async move {
            self.cache.begin_load();
            let (entries, ca) = join(self.load_shards(), self.load_ca()).await;
            let mut entries = entries?;
            if let Some(ca) = ca.ok().as_ref().and_then(|ca| ca.parsed_entries()) {
                entries.extend(Entries::clone(ca));
            }
            Ok(entries)
        }
        .boxed()
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        async move {
            let index = shard_index(key);
            self.require_loaded(index)?;
            let object = self.read_entries(index).await?;
            Ok(self.check_entries(index, &object)?.get(key).cloned())
        }
        .boxed()
    }

    /// Reads each Secret once, also for many entries.
    fn get_each(
        &self,
        keys: Vec<String>,
    ) -> BoxFuture<'_, Vec<Result<Option<String>, EngineError>>> {
        async move {
            let indexes: BTreeSet<_> = keys.iter().map(|key| shard_index(key)).collect();
            let reads = indexes.into_iter().map(async |index| {
                let object = match self.require_loaded(index) {
                    Ok(()) => self.read_entries(index).await,
                    Err(error) => Err(error),
                };
                (index, object)
            });
            let objects: BTreeMap<_, _> = join_all(reads).await.into_iter().collect();
            let value = |key: &String| {
                let index = shard_index(key);
                match objects.get(&index) {
                    Some(Ok(object)) => Ok(self.check_entries(index, object)?.get(key).cloned()),
                    Some(Err(error)) => Err(error.clone()),
                    None => Ok(None),
                }
            };
            keys.iter().map(value).collect()
        }
        .boxed()
    }

    fn write_each(
        &self,
        changes: Vec<EntryChange>,
    ) -> BoxFuture<'_, Vec<Result<bool, EngineError>>> {
        let indexes: Vec<_> = changes
            .iter()
            .map(|change| shard_index(&change.key))
            .collect();
        let mut shards = BTreeMap::<usize, Vec<EntryChange>>::new();
        for (index, change) in indexes.iter().zip(changes) {
            shards.entry(*index).or_default().push(change);
        }
        async move {
            // An error of one Secret does not hold up the others.
            let writes = shards.into_iter().map(async |(index, changes)| {
                let keys = changes.iter().map(|change| change.key.clone()).collect();
                let written = match self.require_loaded(index) {
                    Ok(()) => self.write_shard(index, changes).await,
                    Err(error) => Err(error),
                };
                (index, results_of_keys(keys, &written).into_iter())
            });
            let mut results: BTreeMap<_, _> = join_all(writes).await.into_iter().collect();
            // Each Secret has its results in the order of its changes.
            let next = |index: usize| results.get_mut(&index)?.next();
            indexes.into_iter().filter_map(next).collect()
        }
        .boxed()
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        self.cache.changed().boxed()
    }
}

impl fmt::Debug for SecretEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretEngine")
            .field("namespace", &self.namespace)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

/// Writes the name of the engine for messages.
impl fmt::Display for SecretEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = SHARDS - 1;
        let Self { namespace, .. } = self;
        let SecretNames { state, ca } = &self.names;
        write!(
            f,
            "Secrets {namespace}/{state}, {state}-1 to {state}-{last} and {ca}"
        )
    }
}
