//! HTTP client to upstreams, for the gateway and for the edge.
//!
//! Each end opens connections in its own way, and drives HTTP/1.1 connections in its own way. At an edge, the stream of the
//! request drives its connection. At a gateway a separate task drives it, since an upload continues while its client does not
//! read.

pub mod connection;
pub mod head;
pub mod http1;
pub mod http2_observer;
pub mod http2_pool;
pub mod pool;
pub mod response_error;
pub mod retry;
