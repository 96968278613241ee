//! The engine that stores the shared state.

use causeway_certs::{Entries, EntryChange};
use futures_util::future::BoxFuture;
use std::fmt::{Debug, Display};

/// Reason why an engine did not answer, as a sentence for the log that names the engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EngineError(pub String);

/// Engine for durable state that several gateways share. Each request has a time limit. All methods may be called at the same
/// time, and their futures may be dropped.
pub trait StateEngine: Debug + Display + Send + Sync {
    /// Returns all entries, those of later versions included. The result may be older than that of `get`, but includes every
    /// write that was completed by this value.
    fn load(&self) -> BoxFuture<'_, Result<Entries, EngineError>>;

    /// Returns the current value of an entry. The result includes every change that was completed before the call.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<String>, EngineError>>;

    /// Applies each change whose expected value is current, each one atomically. Returns the keys of the other changes.
    ///
    /// # Errors
    /// If the engine does not answer or refuses. Some of the changes may have been applied then.
    fn write(&self, changes: Vec<EntryChange>) -> BoxFuture<'_, Result<Vec<String>, EngineError>>;

    /// Whether the engine stores the CA. It does not if the CA of gateways is stored elsewhere.
    fn stores_ca(&self) -> bool {
        true
    }

    /// Returns the revision of the entries of the last `load` or of a later write of this value, if the engine counts revisions. It
    /// only decreases if the engine was restored from a backup.
    fn revision(&self) -> Option<u64> {
        None
    }

    /// Waits until an entry may have changed since the last `load` began, or until the watch failed.
    fn changed(&self) -> BoxFuture<'_, ()>;
}
