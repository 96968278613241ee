//! Causeway as a whole: gateway, edges, apps and clients over real sockets, in one binary.
//!
//! Each file tests one promise; `world` builds the parts of a test. A test consists of a world, an action and an assertion.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod world;

mod api_cache;
mod node_sets;
mod proxied;
mod redirect;
mod routing;
mod shared_state;
mod sites;

mod dns;

mod data_dirs;
mod drains;
mod records;

mod errors;
mod forward_proxy;
mod forwarding_headers;
mod grpc_errors;

mod heartbeats;
mod identity;

mod jwt;

mod policy;

mod balanced;
mod certificates;
mod company;
mod given;
mod recheck;
mod recheck_apps;
mod rejoin;
mod reload;
mod renewal;
mod replicas;
mod request_targets;
mod requests;
mod revocation;
mod rolling_restart;
mod sessions;
mod takeover;

mod kills;

mod direct;
mod egress;
mod pod_objects;
mod pods;
mod rebinding;
mod reviews;
mod server_names;
mod services;
mod testbed;

mod clients_curl;

mod laptop;
mod laptop_apps;

mod streams;

mod faces;

mod traps;

mod leaks;

mod abuse;

mod h2spec;

mod allowed;
mod app_faults;
mod apps;
mod apps_http2;
mod attacks;
mod audit;
mod partitions;
mod passthrough;
mod peers;
mod pins;
mod prometheus;
mod upstream;

mod stalled;

mod idle;

mod slow_peers;
mod soak;

mod hostile;

mod smuggling;

mod hostile_edge;

mod greedy_edge;

mod hostile_names;

mod tls_scan;

mod binary;

mod book;
mod imports;

mod bad_input;

mod status;

mod demo;

mod links;

mod operator;
mod outages;

mod clocks;
mod clones;

mod fleet;
mod forged;

mod edge_faults;
