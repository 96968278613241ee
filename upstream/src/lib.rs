//! HTTP client to upstreams, for the gateway and for the edge.
//!
//! Both ends keep two things to themselves: how a connection is made, and the task that drives an HTTP/1.1 connection. At an
//! edge the stream that asks drives it. At a gateway a task does, since an upload goes on while its client does not read.

pub mod alpn;
pub mod connection;
pub mod head;
pub mod http1;
pub mod http2_observer;
pub mod http2_pool;
pub mod pool;
pub mod progress;
pub mod response_error;
pub mod retry;
mod status_line;
