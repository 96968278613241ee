//! Kubernetes objects, kept and served on: one list and watch of the cloud's API feeds any number of readers, level by level.
//!
//! A gateway, the edge that leads a pool and each of its neighbours hold the same [`WatchCache`]: of each [`GroupVersionResource`] a [`Store`]
//! with all objects and a window of what happened to them last. [`reflect`] fills a store by list and watch from a [`ListWatch`],
//! which is the cloud's API, a gateway or a neighbour; [`WatchCache::answer`] serves the very same list and watch to whoever is
//! behind. Versions are the cloud's own at each level, so a reader goes on at one level from where it was at another.
//!
//! Nothing here opens a socket or knows who asks: that is for those who embed it.

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
mod response_cache;
mod selector;
mod server;
mod status;
mod store;
mod watch;

pub use object::{Object, ObjectError};
pub use reflector::{ListWatch, ReflectorError, SourceResponse, reflect};
pub use resource::{GroupVersionResource, ResourceError};
pub use server::{AccessScope, CacheLimits, ResponseBody, WatchCache};
pub use store::{Snapshot, Status, Store};
