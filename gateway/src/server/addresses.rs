//! Listen addresses of a gateway, and the addresses that it announces to edges.

use crate::{config, state::GatewayEndpoints};
use std::net::SocketAddr;

/// Returns the endpoints that are announced to edges: this gateway's addresses (by default its listen address), those of further
/// gateways, and the number of gateways.
pub(super) fn advertised(
    config: &config::Tunnel,
    bound_address: Option<SocketAddr>,
) -> GatewayEndpoints {
    let mut all = config.advertise.clone();
    if all.is_empty() {
        let listens = bound_address.filter(|address| !address.ip().is_unspecified());
        all.extend(listens.map(|address| address.to_string()));
    }
    all.extend_from_slice(&config.gateways);
    GatewayEndpoints {
        gateways: all,
        replicas: config.replicas,
    }
}
