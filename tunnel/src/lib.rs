//! What both ends of a Causeway tunnel share.
//!
//! A tunnel is one mutually authenticated TLS 1.3 connection, dialled by an edge, on which HTTP/2 runs
//! reversed (ALPN `rh2`): the gateway is the HTTP/2 client, the edge the server. This crate knows
//! HTTP/2 and sockets; it reads no configuration file and knows nothing of Kubernetes.
//! Reading order: what is on the wire, the two ends of a connection, its streams, their bytes, and
//! below them the runtime pieces that every connection needs.

pub mod wire;

pub mod hello;
pub mod target;

pub mod client;
mod flood;
pub mod liveness;
pub mod server;
pub mod window;

pub mod body;
pub mod calm;
pub mod copy;
mod cork;
pub mod duplex;
pub mod eviction;
pub mod frames;
pub mod headers;
pub mod heard;
pub mod interim;
pub mod load;
mod small;
pub mod stream;
pub mod unread;

pub mod backoff;
pub mod connection_limit;
pub mod error;
pub mod linger;
pub mod listener;
pub mod places;
pub mod request_target;
pub mod socket;
pub mod status_line;
pub mod tap;
pub mod task;
mod tcp_memory;

pub use client::Tunnel;
pub use error::{Ended, Refusal, StreamError};
pub use stream::{Receive, Send};
pub use target::Target;
