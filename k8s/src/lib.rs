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
pub mod api_cache_source;
pub mod client;
pub mod coredns_hosts;
mod csr_client;
pub mod csr_controller;
pub mod egress_config;
mod event_writer;
pub mod gateway_certificate;
mod leader_election;
mod log_throttle;
pub mod node_csr;
pub mod node_informer;
mod ownership;
pub mod pods;
pub mod port_list;
mod replicas;
pub mod reviews;
pub mod shared_state;
pub mod yurthub_leaders;

pub use address_conflicts::ConflictEvents;
pub use advertise::ServiceWatcher;
pub use api_cache_source::ApiCacheSource;
pub use client::{ClientError, client};
pub use coredns_hosts::HostsController;
pub use csr_controller::CsrController;
pub use gateway_certificate::{GatewayCertificate, Purpose};
pub use kube::Client;
pub use node_csr::NodeCsrClient;
pub use node_informer::NodeInformer;
pub use pods::PodLookup;
pub use port_list::PortListController;
pub use reviews::ReviewClient;
pub use shared_state::SharedState;
pub use yurthub_leaders::YurtHubLeaders;
