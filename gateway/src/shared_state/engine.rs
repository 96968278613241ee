//! The engine that stores the shared state.

use causeway_certs::{Entries, EntryChange};
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use std::{
    fmt::{Debug, Display},
    future::Future,
};

/// Number of requests that are sent to an engine at once. A batch of joins has as many nodes, so each of its steps takes one round
/// trip.
pub(crate) const CONCURRENT_REQUESTS: usize = 128;

/// Reason why an engine did not answer, as a sentence for the log that names the engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EngineError(pub String);

/// Engine for durable state that several gateways share. Each request has a time limit. All methods may be called at the same
/// time, and their futures may be dropped.
pub trait StateEngine: Debug + Display + Send + Sync {
    /// Returns all entries, those of later versions included. The result may be older than that of `get`, but includes every
    /// write that was completed by this value. An engine that stores the CA apart from the other entries leaves out a CA that it
    /// cannot read; `get` and a write of the CA return the reason.
    fn load(&self) -> BoxFuture<'_, Result<Entries, EngineError>>;

    /// Returns the current value of an entry. The result includes every change that was completed before the call.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<String>, EngineError>>;

    /// Returns the current values of entries like [`StateEngine::get`].
    fn get_each(
        &self,
        keys: Vec<String>,
    ) -> BoxFuture<'_, Vec<Result<Option<String>, EngineError>>> {
        async move {
            let reads: Vec<_> = keys.iter().map(|key| self.get(key)).collect();
            send_all(reads).await
        }
        .boxed()
    }

    /// Applies each change whose expected value is current, each one atomically. Returns for each whether its expected value was
    /// current. A change with an error may have been applied.
    fn write_each(
        &self,
        changes: Vec<EntryChange>,
    ) -> BoxFuture<'_, Vec<Result<bool, EngineError>>>;

    /// Applies changes like [`StateEngine::write_each`]. Returns the keys of those whose expected value is not current.
    ///
    /// # Errors
    /// If the engine does not answer or refuses. Some of the changes may have been applied then.
    fn write(&self, changes: Vec<EntryChange>) -> BoxFuture<'_, Result<Vec<String>, EngineError>> {
        let keys: Vec<_> = changes.iter().map(|change| change.key.clone()).collect();
        let written = self.write_each(changes);
        async move {
            let mut conflicts = Vec::new();
            for (key, is_current) in keys.into_iter().zip(written.await) {
                if !is_current? {
                    conflicts.push(key);
                }
            }
            Ok(conflicts)
        }
        .boxed()
    }

    /// Returns the revision of the entries of the last `load` or of a later write of this value, if the engine counts revisions. It
    /// only decreases if the engine was restored from a backup.
    fn revision(&self) -> Option<u64> {
        None
    }

    /// Waits until an entry may have changed since the last `load` began, or until the watch failed.
    fn changed(&self) -> BoxFuture<'_, ()>;
}

/// Sends requests to an engine, several at once. If all requests that are sent at once fail, the engine is away: the others fail
/// without being sent, so that a caller does not wait for the time limit of each.
pub(crate) async fn send_all<T, F>(
    requests: impl IntoIterator<Item = F>,
) -> Vec<Result<T, EngineError>>
where
    F: Future<Output = Result<T, EngineError>>,
{
    let mut requests = requests.into_iter();
    let mut results = Vec::new();
    loop {
        let group = join_all(requests.by_ref().take(CONCURRENT_REQUESTS)).await;
        let failure = match group.last() {
            None => return results,
            Some(last) if group.iter().all(Result::is_err) => last.as_ref().err().cloned(),
            Some(_) => None,
        };
        results.extend(group);
        if let Some(error) = failure {
            results.extend(requests.map(|_| Err(error.clone())));
            return results;
        }
    }
}

/// Returns the result of each change of these entries, if all of them were written at once with these conflicts.
pub fn results_of_keys(
    keys: Vec<String>,
    conflicts: &Result<Vec<String>, EngineError>,
) -> Vec<Result<bool, EngineError>> {
    let result = |key| match conflicts {
        Ok(conflicts) => Ok(!conflicts.contains(&key)),
        Err(error) => Err(error.clone()),
    };
    keys.into_iter().map(result).collect()
}
