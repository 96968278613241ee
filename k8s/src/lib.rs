//! Kubernetes support of Causeway: controllers that each fill a table of the gateway, one per file. An edge requests its
//! certificate from its cluster with the client here.
//!
//! No other crate knows Kubernetes. The gateway offers writers of its tables, and also runs without this crate.
//! - `client` connects to the cluster's API.
//! - `node_informer` fills `state::nodes` from Node objects; `address_conflicts` warns if two of them have one address.
//! - `pod_informer` fills `state::pods` from Pod objects.
//! - `pods` looks up the node of a pod.
//! - `reviews` authenticates tokens and authorizes requests to a kubelet.
//! - `coredns_hosts` writes the nodes' names into a `ConfigMap` for `CoreDNS`, while it holds a Lease (`leader_election`).
//! - `yurthub_leaders` publishes the edges from which `YurtHub` reads.
//! - `port_list` has the gateway serve the ports that a `ConfigMap` lists.
//! - `advertise` sends edges the addresses of the gateways from a Service, and their number (`replicas`).
//! - `csr_controller` signs the certificates that edges request from the cluster, in place of join tokens.
//! - `node_csr` requests such a certificate at an edge, `gateway_certificate` a gateway's own (`csr_client`).
//! - `state_engine` stores the state that gateways share in Secrets.
//! - `api_cache_source` fills the cache of all objects that edges may read.
//! - `heartbeat` renews Leases of nodes without a gateway by delegated heartbeats.
//! - `controllers` builds all controllers of a gateway, and runs them.
//! - `egress_config` writes the egress selector configuration of kube-apiserver.

mod address_conflicts;
mod advertise;
mod api_cache_source;
mod client;
mod controllers;
mod coredns_hosts;
mod csr_client;
mod csr_controller;
pub mod egress_config;
mod event_writer;
mod gateway_certificate;
mod heartbeat;
mod leader_election;
mod log_throttle;
mod node_csr;
mod node_informer;
mod ownership;
mod pod_informer;
mod pods;
mod port_list;
mod replicas;
mod reviews;
mod state_engine;
mod yurthub_leaders;

pub use client::{ClientError, build_client};
pub use controllers::{ClusterSenders, Controllers, ControllersError};
pub use kube::Client;
pub use node_csr::NodeCsrClient;
pub use state_engine::SecretEngine;
