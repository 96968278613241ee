//! What Causeway knows of Kubernetes: one controller per file, each of which fills a table of the gateway; and an edge's one
//! question to its cluster.
//!
//! No other crate knows Kubernetes. The gateway offers writers of its tables, and runs without any of this as well.
//! `client` says how to reach the cluster's API; `nodes` fills `state::nodes` from Node
//! objects, of which `address_conflicts` warns where two have one address; `pods` says which node a pod is on, `reviews` who a token is and who may do what at a kubelet; `hosts` writes
//! the nodes' names into a `ConfigMap` for `CoreDNS`, while it holds a `lease`; `hubs` tells `YurtHub`s where to read; `ports` has the gateway serve what another
//! lists; `advertise` tells edges where a Service says that gateways are, and how many (`replicas`); `certificates` signs what edges ask the cluster
//! for, in place of tokens, and `vouch` asks for it at an edge, `identity` for a gateway's own (`asking`); `shared_state` keeps what gateways share in a Secret, and `pool` has all objects that edges may read; `egress` writes what kube-apiserver has to be told.

pub mod address_conflicts;
pub mod advertise;
mod asking;
pub mod certificates;
pub mod client;
pub mod egress;
mod event_writer;
pub mod hosts;
pub mod hubs;
pub mod identity;
mod lease;
pub mod nodes;
mod ours;
pub mod pods;
pub mod pool;
pub mod ports;
mod replicas;
pub mod reviews;
pub mod shared_state;
mod trouble;
pub mod vouch;

pub use address_conflicts::ConflictEvents;
pub use advertise::Advertise;
pub use certificates::Certificates;
pub use client::{ClientError, client};
pub use hosts::Hosts;
pub use hubs::Hubs;
pub use identity::{OwnCertificate, Purpose};
pub use kube::Client;
pub use nodes::Informer;
pub use pods::Pods;
pub use pool::Follower;
pub use ports::Ports;
pub use reviews::Reviews;
pub use shared_state::SharedState;
pub use vouch::Vouch;
