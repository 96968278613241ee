//! Tables that the control plane writes, and that the request path reads without waiting.

pub mod advertised;
pub mod api_cache_connections;
pub mod directory;
pub mod egress;
pub mod jwks;
pub mod node_set;
pub mod nodes;
pub mod peer_addresses;
pub mod pins;
pub mod pods;
pub mod policy;
pub mod pool_reports;
pub mod registry;
pub mod target_group;
pub mod yurthubs;

pub use advertised::{AdvertisedGateways, AnnouncedPortsCell, GatewayEndpoints};
pub use api_cache_connections::ApiCacheConnections;
pub use directory::TunnelId;
pub use egress::{EgressRules, EgressUsage};
pub use jwks::{JwksCache, JwksWriter, KeySet};
pub use node_set::{NodeSelector, NodeSet};
pub use nodes::{ClusterNode, Node, NodeLocation, Nodes, NodesWriter};
pub use pins::{Pins, PinsWriter};
pub use pods::{Pod, PodsWriter};
pub use policy::{Policy, PolicyReader, PolicyWriter};
pub use registry::{NewTunnel, NodeUnavailable, Registry, TunnelInfo};
pub use target_group::TargetGroup;
pub use yurthubs::{NodePoolEndpoints, YurtHubEndpoints};
