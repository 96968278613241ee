//! API cache for Kubernetes objects: one list and watch of the cloud's API serves any number of clients, over several levels.
//!
//! A gateway, the leader edge of a node pool and each other member of the pool hold the same [`WatchCache`]. For each
//! [`GroupVersionResource`] it has a [`Store`] with all objects and a buffer of the latest events. [`reflect`] fills a store
//! by list and watch from a [`ListWatch`], which is the cloud's API, a gateway or another member.
//! [`WatchCache::handle_request`] serves the same list and watch to the clients of this level. Versions are the cloud's own
//! at each level, so a client can resume at one level from its version at another.
//!
//! This crate opens no socket and does not know its clients: the embedding code does both.

mod discovery;
pub mod disk;
mod encode;
mod event_buffer;
mod list;
mod list_options;
pub mod manifests;
mod negotiate;
mod object;
mod protobuf;
mod reflector;
mod resource;
mod selector;
mod server;
mod status;
mod store;
mod watch;

pub use object::{Object, ObjectError};
pub use reflector::{ListWatch, ReflectorError, SourceResponse, reflect};
pub use resource::{GroupVersionResource, ResourceError};
pub use selector::LabelSelector;
pub use server::{AccessScope, CacheLimits, ResponseBody, WatchCache};
pub use store::{Snapshot, Status, Store};
