//! An edge with tunnels at every gateway.

use super::*;

/// A gateway of this process, at another of its addresses.
async fn also(ca: &Arc<Ca>, instance: &str, gateways: Vec<String>) -> Gateway {
    let says = Says {
        instance: instance.into(),
        gateways,
        dismiss: None,
    };
    Gateway::start_on("127.0.0.1:0".parse().unwrap(), acceptor(ca, ca), says).await
}

/// One attempt came to nothing because the gateway was reached elsewhere.
const WAITS: &str = "outcome=\"reached\"} 1\n";

fn every() -> Value {
    json!({
        "tunnels": { "gateways": "every", "resolve_after": "200ms" },
        "backoff": { "silent_max": "500ms", "refused_max": "500ms" },
    })
}

fn addresses(gateways: &[&Gateway]) -> Vec<String> {
    let addresses = gateways.iter().map(|gateway| gateway.address.to_string());
    addresses.collect()
}

#[tokio::test]
async fn it_has_a_tunnel_at_each_and_what_one_does_is_nothing_to_the_others() {
    let ca = ca();
    let (mut first, mut second) = (Gateway::start(&ca).await, Gateway::start(&ca).await);
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&first, &second]), every()).await;
    let (one, two) = (first.next().await, second.next().await);
    assert_eq!((one.welcome.slot, two.welcome.slot), (0, 0));
    assert_eq!(one.welcome.instance, two.welcome.instance);
    // A drain need not wait for it: it is elsewhere already.
    assert!(!one.welcome.elsewhere);
    let address = first.address;
    drop((one, first));
    let status = edge.until(|status| status.trouble.is_some()).await;
    assert_eq!((status.state, status.tunnels.len()), ("connected", 1));
    let trouble = status.trouble.unwrap().what;
    assert!(trouble.contains(&address.to_string()), "{trouble}");
    let says = Says {
        instance: "restarted".into(),
        gateways: Vec::new(),
        dismiss: None,
    };
    let mut again = Gateway::start_on(address, acceptor(&ca, &ca), says).await;
    again.next().await;
    let mended =
        |status: &crate::state::Status| status.tunnels.len() == 2 && status.trouble.is_none();
    edge.until(mended).await;
    assert!(second.registered.try_recv().is_err(), "dialled again");
    edge.stop.cancel();
    edge.tasks.drain(SOON).await;
}

#[tokio::test]
async fn a_gateway_with_two_addresses_has_tunnels_at_one_of_them_and_at_the_other_when_that_is_lost()
 {
    let ca = ca();
    let (mut left, mut right) = (
        also(&ca, "a", Vec::new()).await,
        also(&ca, "a", Vec::new()).await,
    );
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&left, &right]), every()).await;
    // It came to the second one's hello, and left.
    let began = Instant::now();
    while !edge.admin("/metrics").await.contains(WAITS) {
        assert!(began.elapsed() < SOON, "nobody waits");
    }
    let (lost, mut other) = tokio::select! {
        registered = left.next() => ((registered, left), right),
        registered = right.next() => ((registered, right), left),
    };
    assert!(other.registered.try_recv().is_err(), "both have tunnels");
    edge.until(|status| status.tunnels.len() == 1 && status.trouble.is_none())
        .await;
    drop(lost);
    other.next().await;
    assert!(
        edge.admin("/metrics").await.contains(WAITS),
        "it did not wait"
    );
}

#[tokio::test]
async fn where_no_gateway_is_any_more_a_tunnel_stands_until_it_ends_and_is_not_dialled_again() {
    let ca = ca();
    let (mut old, mut new) = (Gateway::start(&ca).await, Gateway::start(&ca).await);
    let mut teller = also(&ca, "teller", addresses(&[&old])).await;
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&teller]), every()).await;
    let (mut told, was) = (teller.next().await, old.next().await);
    let gateways = addresses(&[&new]);
    let line = ToEdge::Gateways { gateways };
    told.control.tell(&line).await.unwrap();
    new.next().await;
    edge.until(|status| status.gateways.len() == 2 && status.tunnels.len() == 3)
        .await;
    drop((was, old));
    edge.until(|status| status.tunnels.len() == 2 && status.trouble.is_none())
        .await;
}

#[tokio::test]
async fn a_name_that_leads_nowhere_is_told_and_keeps_nobody_from_the_others() {
    let ca = ca();
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let mut gateways = addresses(&[&gateway]);
    gateways.push("gateway.invalid:10262".into());
    let edge = world.run(&gateways, every()).await;
    gateway.next().await;
    let status = edge
        .until(|status| !status.tunnels.is_empty() && status.trouble.is_some())
        .await;
    let trouble = status.trouble.unwrap();
    assert!(trouble.what.contains("gateway.invalid"), "{}", trouble.what);
    assert_eq!(status.state, "connected");
}
