//! Tests of an edge with tunnels at some of its gateways.

use super::{
    super::gateway_selection,
    every::{Balancer, addresses, also, one_of, reached},
    *,
};
use crate::{control::dial::GatewayAddr, status::Status};
use std::collections::BTreeSet;

/// Configuration of an edge that wants this number of gateways, with short times.
fn count(gateways: u32, app: SocketAddr) -> Value {
    json!({
        "tunnels": { "gateways": gateways, "resolve_after": "1s" },
        "backoff": { "silent_max": "300ms", "refused_max": "300ms" },
        "ports": { "7": { "target": app.to_string() } },
    })
}

/// Starts this number of gateways, in the order of their rank for the node `edge-1`.
async fn ranked(ca: &Arc<Ca>, number: usize) -> Vec<Gateway> {
    let mut gateways = Vec::new();
    for name in 0..number {
        let gateway = also(ca, &format!("gateway-{name}"), Vec::new()).await;
        let addr = GatewayAddr {
            gateway: gateway.address.to_string(),
            address: Some(gateway.address),
        };
        gateways.push((
            gateway_selection::rendezvous_weight("edge-1", &addr),
            gateway,
        ));
    }
    gateways.sort_by_key(|(weight, _)| std::cmp::Reverse(*weight));
    gateways.into_iter().map(|(_, gateway)| gateway).collect()
}

fn all_addresses(gateways: &[Gateway]) -> Vec<String> {
    addresses(&gateways.iter().collect::<Vec<_>>())
}

/// Whether the edge has active tunnels at exactly these gateways.
fn active_at(gateways: &[SocketAddr]) -> impl Fn(&Status) -> bool + use<> {
    let wanted: BTreeSet<_> = gateways.iter().copied().map(Some).collect();
    move |status| {
        let active = status.tunnels.iter().filter(|one| one.state == "active");
        active.map(|one| one.address).collect::<BTreeSet<_>>() == wanted
    }
}

async fn restart(ca: &Arc<Ca>, address: SocketAddr) -> Gateway {
    let says = Says {
        instance: "restarted".into(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: None,
    };
    Gateway::start_on(address, acceptor(ca, ca), says).await
}

fn drain() -> GatewayMessage {
    GatewayMessage::Drain {
        grace_ms: 60_000,
        successor: false,
    }
}

/// Waits until the edge announces that a tunnel leaves, and still serves streams for which the gateway has no other tunnel.
async fn announced_leave(registered: &mut Registered) {
    let leave = timeout(SOON, registered.control.receive::<EdgeMessage>());
    let leave = leave.await.unwrap().unwrap();
    assert!(
        matches!(leave, EdgeMessage::Leave { serves: true, .. }),
        "{leave:?}"
    );
}

#[tokio::test]
async fn the_next_gateway_replaces_one_that_dies_until_it_returns() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateways = ranked(&ca, 4).await;
    let at: Vec<_> = gateways.iter().map(|gateway| gateway.address).collect();
    let world = World::joined(&ca);
    let edge = world
        .run(&all_addresses(&gateways), count(2, echo(&tasks).await))
        .await;
    let first = gateways[0].next().await;
    let second = gateways[1].next().await;
    assert!(second.welcome.elsewhere);
    edge.until(active_at(&at[..2])).await;
    edge.until(|status| {
        status.reached.is_some_and(|reached| {
            (reached.gateways, reached.of, reached.wanted) == (2, 4, Some(2))
        })
    })
    .await;

    drop((first, gateways.remove(0)));
    let mut third = gateways[1].next().await;
    edge.until(active_at(&at[1..3])).await;
    let (mut send, mut receive) = session(&third.tunnel).await;
    round_trip(&mut send, &mut receive, 1000).await;

    let mut back = restart(&ca, at[0]).await;
    let returned = back.next().await;
    // The replacement stays until the returned gateway has proved itself.
    let status = edge.until(active_at(&at[..3])).await;
    assert_eq!(status.tunnels.len(), 3);
    let leave = timeout(SOON, third.control.receive::<EdgeMessage>());
    let leave = leave.await.unwrap().unwrap();
    assert!(
        matches!(
            leave,
            EdgeMessage::Leave {
                until_idle: true,
                ..
            }
        ),
        "{leave:?}"
    );
    edge.until(active_at(&at[..2])).await;
    let alive = [&second.tunnel, &returned.tunnel];
    pass_with_stream(&mut send, &mut receive, &alive).await;
    assert_eq!(edge.reader.status().tunnels.len(), 3);
    send.end().unwrap();
    assert!(receive.next_chunk().await.is_none());
    pass_until_left(&edge, &alive).await;
    for gateway in &mut gateways {
        assert!(gateway.registered.try_recv().is_err(), "dialled again");
    }
    drop((returned, second));
}

#[tokio::test]
async fn the_next_gateway_replaces_one_that_refuses_or_drains() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateways = ranked(&ca, 4).await;
    let at: Vec<_> = gateways.iter().map(|gateway| gateway.address).collect();
    let says = Says {
        instance: "full".into(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: Some(GoAway::Full),
    };
    gateways[0].tasks.drain(Duration::ZERO).await;
    gateways[0] = Gateway::start_on(at[0], acceptor(&ca, &ca), says).await;
    let world = World::joined(&ca);
    let edge = world
        .run(&all_addresses(&gateways), count(2, echo(&tasks).await))
        .await;
    let mut second = gateways[1].next().await;
    let _third = gateways[2].next().await;
    edge.until(active_at(&at[1..3])).await;
    let (mut send, mut receive) = session(&second.tunnel).await;
    second.control.send(&drain()).await.unwrap();
    let _fourth = gateways[3].next().await;
    announced_leave(&mut second).await;
    edge.until(active_at(&at[2..])).await;
    round_trip(&mut send, &mut receive, 1000).await;
    assert!(gateways[1].registered.try_recv().is_err(), "dialled again");
    // The gateway closes the tunnel at the end of its drain, and accepts tunnels again.
    drop((send, receive));
    second.tunnel.close();
    let _back = gateways[1].next().await;
    edge.until(active_at(&at[1..3])).await;
}

#[tokio::test]
async fn an_edge_that_wants_one_gateway_moves_before_its_gateway_closes() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateways = ranked(&ca, 3).await;
    let at: Vec<_> = gateways.iter().map(|gateway| gateway.address).collect();
    let world = World::joined(&ca);
    let edge = world
        .run(&all_addresses(&gateways), count(1, echo(&tasks).await))
        .await;
    let mut first = gateways[0].next().await;
    assert!(first.welcome.elsewhere);
    first.control.send(&drain()).await.unwrap();
    let _second = gateways[1].next().await;
    announced_leave(&mut first).await;
    edge.until(active_at(&at[1..2])).await;
    assert!(gateways[2].registered.try_recv().is_err());
}

#[tokio::test]
async fn an_edge_that_wants_more_gateways_than_exist_has_all() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateways = ranked(&ca, 2).await;
    let at: Vec<_> = gateways.iter().map(|gateway| gateway.address).collect();
    let world = World::joined(&ca);
    let edge = world
        .run(&all_addresses(&gateways), count(3, echo(&tasks).await))
        .await;
    let (mut first, _second) = (gateways[0].next().await, gateways[1].next().await);
    edge.until(active_at(&at)).await;
    // A third gateway is announced, and gets its tunnel at once.
    let mut third = also(&ca, "third", Vec::new()).await;
    let line = GatewayMessage::Gateways {
        gateways: addresses(&[&third]),
        replicas: None,
    };
    first.control.send(&line).await.unwrap();
    third.next().await;
}

#[tokio::test]
async fn behind_one_address_the_edge_finds_as_many_gateways_as_it_wants() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut behind = Vec::new();
    for name in ["a", "b", "c"] {
        behind.push(one_of(&ca, name, 3).await);
    }
    let balancer = Balancer::start(&[
        behind[0].address,
        behind[0].address,
        behind[1].address,
        behind[2].address,
    ])
    .await;
    let world = World::joined(&ca);
    let edge = world
        .run(
            &[balancer.address.to_string()],
            count(2, echo(&tasks).await),
        )
        .await;
    let _first = behind[0].next().await;
    let second = behind[1].next().await;
    edge.until(reached(2, 3)).await;
    // The search has ended: the balancer would lead to the third gateway next.
    let dialled = *balancer.dialled.borrow();
    for _ in 0..6 {
        pass(Duration::from_millis(500)).await;
        edge.admin("/metrics").await;
    }
    assert_eq!(*balancer.dialled.borrow(), dialled);
    assert!(behind[2].registered.try_recv().is_err());
    // One of the two is lost, and the third one takes its place.
    let only = vec![behind[0].address, behind[2].address];
    *balancer.behind.lock().unwrap() = only;
    drop((second, behind.remove(1)));
    behind[1].next().await;
    let status = edge.until(reached(2, 3)).await;
    assert_eq!(status.reached.unwrap().wanted, Some(2));
    assert!(behind[0].registered.try_recv().is_err(), "dialled again");
}

#[tokio::test]
async fn an_edge_leaves_a_gateway_that_drains_if_it_is_connected_to_another_one() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateways = ranked(&ca, 2).await;
    let at: Vec<_> = gateways.iter().map(|gateway| gateway.address).collect();
    let world = World::joined(&ca);
    let edge = world
        .run(&all_addresses(&gateways), count(2, echo(&tasks).await))
        .await;
    let (mut first, _second) = (gateways[0].next().await, gateways[1].next().await);
    edge.until(active_at(&at)).await;
    let (mut send, mut receive) = session(&first.tunnel).await;
    first.control.send(&drain()).await.unwrap();
    announced_leave(&mut first).await;
    edge.until(active_at(&at[1..])).await;
    // Open streams continue, the gateway can open others as a last resort, and it is not dialled again.
    round_trip(&mut send, &mut receive, 1000).await;
    let (mut send, mut receive) = session(&first.tunnel).await;
    round_trip(&mut send, &mut receive, 1000).await;
    assert!(gateways[0].registered.try_recv().is_err(), "dialled again");
}

#[tokio::test]
async fn an_edge_whose_gateways_all_drain_leaves_once_one_is_back() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateways = ranked(&ca, 2).await;
    let world = World::joined(&ca);
    let _edge = world
        .run(&all_addresses(&gateways), count(2, echo(&tasks).await))
        .await;
    let (mut first, mut second) = (gateways[0].next().await, gateways[1].next().await);
    first.control.send(&drain()).await.unwrap();
    announced_leave(&mut first).await;
    second.control.send(&drain()).await.unwrap();
    first.tunnel.close();
    let _back = gateways[0].next().await;
    announced_leave(&mut second).await;
}

#[tokio::test]
async fn behind_one_address_a_drain_leads_to_a_gateway_that_nobody_announced() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let (mut first, mut second) = (
        Gateway::start(&ca).await,
        also(&ca, "second", Vec::new()).await,
    );
    let balancer = Balancer::start(&[first.address, second.address]).await;
    let world = World::joined(&ca);
    let address = balancer.address.to_string();
    let _edge = world.run(&[address], count(2, echo(&tasks).await)).await;
    let mut connected = first.next().await;
    let (mut send, mut receive) = session(&connected.tunnel).await;
    assert!(second.registered.try_recv().is_err());
    connected.control.send(&drain()).await.unwrap();
    let _second = second.next().await;
    announced_leave(&mut connected).await;
    round_trip(&mut send, &mut receive, 1000).await;
}

#[tokio::test]
async fn two_addresses_of_one_gateway_are_counted_as_one() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let gateways = [
        also(&ca, "a", Vec::new()).await,
        also(&ca, "a", Vec::new()).await,
    ];
    let world = World::joined(&ca);
    let edge = world
        .run(&all_addresses(&gateways), count(2, echo(&tasks).await))
        .await;
    edge.until(reached(1, 1)).await;
}
