//! Control plane of an edge; never in the data path of a stream.
//!
//! `dial` makes one authenticated connection to a gateway, directly or through a proxy, and `tunnels` maintains tunnels on
//! such connections. `enrol` gets a certificate with a token, and `csr_bootstrap` gets one from the cluster. `renew` renews
//! the certificate, and `rejoin` replaces an identity that gateways refuse. All of them send requests with `enrol_client`.
//! `external_certificate` is for a certificate of an external CA. `identity_store` holds the identity and the roots, and
//! `gateway_list` the addresses. `connect_error` describes failures and the delay before the next attempt.
//! `network_monitor` reports changes of the machine's network, and `admin` serves health, metrics and status. `heartbeat`
//! sends heartbeats through other nodes while this node has no gateway. `egress` opens connections of this node's programs to the
//! cloud.

pub(crate) mod connect_error;
pub(crate) mod dial;
pub(crate) mod external_certificate;
pub(crate) mod gateway_list;
pub(crate) mod identity_store;

pub(crate) mod network_monitor;
pub(crate) mod tunnels;

pub(crate) mod csr_bootstrap;
pub(crate) mod enrol;
pub(crate) mod enrol_client;
pub(crate) mod rejoin;
pub(crate) mod rejoin_state;
pub(crate) mod renew;

pub(crate) mod admin;
pub(crate) mod api_cache;
pub(crate) mod egress;
pub(crate) mod evict;
pub(crate) mod heartbeat;
mod http_server;
#[cfg(test)]
mod test_address;
