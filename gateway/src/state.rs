//! Tables: what control writes and the way of a request reads, without waiting.

pub mod advertised;
pub mod hubs;
pub mod keys;
pub mod nodes;
pub mod pins;
pub mod policy;
pub mod readings;
pub mod registry;

pub use advertised::{Advertised, ListedPorts, Whereabouts};
pub use hubs::{Hubs, PoolHubs};
pub use keys::{KeySet, Keys, KeysWriter};
pub use nodes::{Member, Node, Nodes, NodesWriter, Place};
pub use pins::{Pins, PinsWriter};
pub use policy::{Policy, PolicyReader, PolicyWriter};
pub use readings::Readings;
pub use registry::{Admitted, Away, Edge, Registry, TunnelId};
