//! Kubernetes objects, kept and served on: one list and watch of the cloud's API feeds any number of readers, level by level.
//!
//! A gateway, the edge that leads a pool and each of its neighbours hold the same [`Pool`]: of each [`Resource`] a [`Store`]
//! with all objects and a window of what happened to them last. [`follow`] fills a store by list and watch from a [`Source`],
//! which is the cloud's API, a gateway or a neighbour; [`Pool::answer`] serves the very same list and watch to whoever is
//! behind. Versions are the cloud's own at each level, so a reader goes on at one level from where it was at another.
//!
//! Nothing here opens a socket or knows who asks: that is for those who embed it.

mod accept;
mod cache;
mod discovery;
mod encode;
mod failure;
mod follow;
mod list;
pub mod manifests;
mod object;
mod protobuf;
mod query;
mod resource;
pub mod saved;
mod selector;
mod serve;
mod store;
mod watch;
mod window;

pub use follow::{Answer, Ended, Source, follow};
pub use object::{Object, ObjectError};
pub use resource::{Resource, ResourceError};
pub use serve::{Body, Grant, Limits, Pool};
pub use store::{Snapshot, Status, Store};
