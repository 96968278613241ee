//! Addresses of the gateways that hold a node.

use crate::state::{
    Registry,
    directory::{HeldState, Peer},
};
use causeway_certs::NodeName;
use std::{net::IpAddr, sync::Arc};

/// Returns the addresses of the gateways that have a tunnel of this node. If none has one, returns those of all gateways, which
/// tell the client why. A gateway that drains or does not answer is left out. `own` are the addresses of this gateway, which also
/// forwards requests to the gateways that state no address.
pub(crate) fn addresses(own: &[IpAddr], node: &NodeName, registry: &Registry) -> Vec<IpAddr> {
    let directory = registry.directory();
    let is_own = registry.held_state(node) == Some(HeldState::Connected) && !registry.is_draining();
    let is_usable = |peer: &Arc<Peer>| !peer.is_draining() && !peer.is_suspect();
    let holders = directory.holders(node).into_iter();
    let mut peers: Vec<_> = holders
        .filter(|(peer, state)| *state == HeldState::Connected && is_usable(peer))
        .map(|(peer, _)| peer)
        .collect();
    let is_away = !is_own && peers.is_empty();
    if is_away {
        let all = directory.peers();
        peers = all.iter().filter(|peer| is_usable(peer)).cloned().collect();
    }
    let stated: Vec<_> = peers.iter().map(|peer| peer.addresses()).collect();
    let is_entry = is_own || is_away || stated.iter().any(|stated| stated.is_empty());
    let mut addresses = if is_entry && !registry.is_draining() {
        own.to_vec()
    } else {
        Vec::new()
    };
    for address in stated.iter().flat_map(|stated| stated.iter()) {
        if !addresses.contains(address) {
            addresses.push(*address);
        }
    }
    // A client that uses only one version of IP reaches a holder without such an address through this gateway.
    let is_missing = |wanted: &&IpAddr| {
        let mut same = addresses.iter().map(IpAddr::is_ipv4);
        !same.any(|is_ipv4| is_ipv4 == wanted.is_ipv4())
    };
    let missing: Vec<_> = own.iter().filter(is_missing).copied().collect();
    addresses.extend(missing);
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::registry::tests::{World, node};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn a_name_resolves_to_the_gateways_that_hold_the_node() {
        let world = World::new();
        let own = [ip("192.0.2.1")];
        let resolved = || addresses(&own, &node(), &world.registry);
        assert_eq!(resolved(), own, "no gateway has it");
        let (own_tunnel, _) = world.register("edge", 0).await.unwrap();
        let holder = world.peer("near", HeldState::Connected).await;
        holder.set_addresses(vec![ip("192.0.2.2"), ip("fd00::2")]);
        let other = world.peer("far", HeldState::Draining).await;
        other.set_addresses(vec![ip("192.0.2.3"), ip("192.0.2.2")]);
        let all = [ip("192.0.2.1"), ip("192.0.2.2"), ip("fd00::2")];
        assert_eq!(resolved(), all);
        world.registry.unregister(&node(), own_tunnel);
        assert_eq!(resolved(), all[1..], "the other tunnel drains");
        holder.set_addresses(vec![ip("fd00::2")]);
        let both = [ip("fd00::2"), ip("192.0.2.1")];
        assert_eq!(resolved(), both, "a client without IPv6");
        holder.mark_draining();
        let remaining = [ip("192.0.2.1"), ip("192.0.2.3"), ip("192.0.2.2")];
        assert_eq!(resolved(), remaining, "no gateway has it for new requests");
        // This gateway forwards to a holder that states no address.
        other.set_node(node(), Some(HeldState::Connected));
        other.set_addresses(Vec::new());
        assert_eq!(resolved(), own);
        world.registry.directory().remove(&other);
        assert_eq!(resolved(), own, "all others drain");
    }
}
