//! etcd as the engine of the state that several gateways share.
//!
//! The engine uses the JSON gateway of etcd (`POST /v3/kv/range` and so on), which is a part of each member since etcd 3.4.
//! The crate `etcd-client` speaks gRPC instead. It needs `protoc` at build time, and it adds a second HTTP/2 stack.
//!
//! The JSON gateway has two limits. etcd does not take the common name of a client certificate as the user, so a user
//! authenticates by password; mutual TLS works beside it. A message of the gateway has at most 4 MiB, so large ranges are
//! read in pages.
//!
//! - `messages` has the JSON of requests and responses.
//! - `connector` connects with TLS, and explains its errors.
//! - `client` sends a request to the first member that answers, and authenticates.
//! - `watch` reads the stream of changes.
//! - `engine` has a cache of all entries, which the watch keeps current.

mod messages;

mod connector;

mod client;
mod watch;

mod engine;

pub use engine::EtcdEngine;
