//! Tables: what control writes and the way of a request reads, without waiting.

pub mod nodes;
pub mod policy;
pub mod registry;

pub use nodes::{Node, Nodes, NodesWriter};
pub use policy::{Policy, PolicyReader, PolicyWriter};
pub use registry::{Admitted, Away, Edge, Registry, TunnelId};
