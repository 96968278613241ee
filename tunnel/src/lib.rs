//! Protocol and connection code shared by both ends of a Causeway tunnel.
//!
//! A tunnel is one mutually authenticated TLS 1.3 connection that an edge has dialled. HTTP/2 runs on it in reverse (ALPN
//! `rh2`): the gateway is the HTTP/2 client, the edge the server. This crate knows HTTP/2; it reads no configuration file and
//! knows nothing of Kubernetes. Sockets and tasks come from the crate `rt`. Reading order: wire format, the two ends of a
//! connection, streams, bodies.

pub mod wire;

pub mod control_stream;
pub mod heartbeat;
pub mod target;

pub mod edge_side;
pub mod engine;
pub mod flow_control;
pub mod gateway_side;
pub mod liveness;
pub mod refusal;

pub mod body;
pub mod buffered;
pub mod control_frame_limit;
pub mod copy;
pub mod cork;
pub mod eviction;
pub mod frame_parser;
pub mod headers;
pub mod informational;
pub mod load;
pub mod reset_codes;
pub mod stall_monitor;
pub mod stream;
pub mod stream_io;
mod token_bucket;

pub mod error;
pub mod io_observer;
pub mod request_target;

pub use error::{RejectCode, StreamError, TunnelEnd};
pub use gateway_side::Tunnel;
pub use stream::{StreamKind, StreamReceiver, StreamSender};
pub use target::Target;
