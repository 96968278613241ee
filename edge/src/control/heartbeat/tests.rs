use super::relay::RelayRefused;
use super::*;
use crate::metrics::Metrics;
use causeway_tunnel::heartbeat::{DelegatedHeartbeat, KubeletState};
use std::{sync::Arc, time::Duration};
use tokio::time::advance;

fn relay() -> HeartbeatRelay {
    HeartbeatRelay::new(&Arc::new(Metrics::default()))
}

fn heartbeat(node: &str, nonce: &str) -> DelegatedHeartbeat {
    DelegatedHeartbeat {
        node: node.to_owned(),
        nonce: nonce.to_owned(),
        chain: String::new(),
        signature: String::new(),
        kubelet: KubeletState::Alive,
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_nonce_is_handed_out_while_it_is_fresh() {
    let relay = relay();
    assert_eq!(relay.nonce(), None);
    let (one, two) = (relay.tunnel(), relay.tunnel());
    assert_eq!(relay.nonce(), None, "no gateway has sent one");
    two.set_nonce("two".to_owned());
    advance(Duration::from_secs(1)).await;
    one.set_nonce("one".to_owned());
    one.set_nonce("x".repeat(65));
    assert_eq!(relay.nonce().as_deref(), Some("one"));
    drop(one);
    assert_eq!(relay.nonce().as_deref(), Some("two"));
    advance(Duration::from_secs(13)).await;
    assert_eq!(relay.nonce(), None, "the tunnel is probably lost");
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_goes_to_the_gateway_of_its_nonce() {
    let relay = relay();
    let (mut one, two) = (relay.tunnel(), relay.tunnel());
    one.set_nonce("one".to_owned());
    advance(Duration::from_secs(1)).await;
    two.set_nonce("two".to_owned());
    let sent = heartbeat("edge-1", "one");
    assert_eq!(relay.forward("edge-1", sent.clone()), Ok(()));
    assert_eq!(*one.next().await, sent);
    let refused = |client, heartbeat| relay.forward(client, heartbeat).unwrap_err();
    let again = refused("edge-1", heartbeat("edge-1", "two"));
    assert_eq!(again, RelayRefused::TooOften);
    let other = refused("edge-2", heartbeat("edge-3", "two"));
    assert_eq!(other, RelayRefused::Node);
    let unknown = refused("edge-2", heartbeat("edge-2", "three"));
    assert_eq!(unknown, RelayRefused::Nonce);
    let long = DelegatedHeartbeat {
        signature: "s".repeat(1000),
        ..heartbeat("edge-2", "two")
    };
    assert_eq!(refused("edge-2", long), RelayRefused::TooLong);
    advance(Duration::from_secs(5)).await;
    assert_eq!(relay.forward("edge-1", heartbeat("edge-1", "two")), Ok(()));
    drop(two);
    let gone = refused("edge-2", heartbeat("edge-2", "two"));
    assert_eq!(gone, RelayRefused::Nonce);
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_that_takes_no_heartbeats_refuses_more() {
    let relay = relay();
    let tunnel = relay.tunnel();
    tunnel.set_nonce("n".to_owned());
    let taken = (0..100)
        .map(|nth| format!("edge-{nth}"))
        .filter(|node| relay.forward(node, heartbeat(node, "n")).is_ok());
    assert_eq!(taken.count(), 64);
    let full = relay.forward("edge-99", heartbeat("edge-99", "n"));
    assert_eq!(full, Err(RelayRefused::NoGateway));
}
