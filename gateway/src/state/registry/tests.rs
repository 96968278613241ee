use super::{shard::MAX_AWAY, *};
use crate::state::directory::{PeerLink, PeerRefusal, REFUSAL_TIME};
use causeway_rt::{socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    StreamKind, Target,
    edge_side::{self, IncomingStream},
    gateway_side::{self, GatewaySideConfig},
    load::BULK_BYTES,
};
use futures_util::FutureExt;
use http::{Request, Response};
use std::pin::pin;
use tracing::info_span;

const FROM: ([u8; 4], u16) = ([192, 0, 2, 1], 4711);

/// Registry with peers, and with tunnels of edges that answer `/bulk` with bulk data and keep all other streams open.
pub(crate) struct World {
    pub(crate) registry: Registry,
    tasks: TaskGroup,
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            registry: Registry::new(&Workers::on_current_runtime()),
            tasks: TaskGroup::default(),
        }
    }

    async fn tunnel(&self) -> Tunnel {
        let (near, far) = tokio::io::duplex(1 << 20);
        self.tasks.spawn(info_span!("edge"), async move {
            let io = CountedIo::new(far);
            let traffic = io.traffic();
            let mut server = edge_side::accept(io, traffic, edge_side::EdgeSideConfig::default())
                .await
                .unwrap();
            let (answers, mut open) = (TaskGroup::default(), Vec::new());
            while let Ok(IncomingStream::Stream(asked)) = server.next_stream().await {
                if asked.head.uri().path() == "/bulk" {
                    answers.spawn(info_span!("bulk"), async move {
                        let mut send = asked.responder.send(Response::new(()), false).unwrap();
                        let bulk = usize::try_from(BULK_BYTES).unwrap() + 1;
                        send.send_last(vec![0; bulk].into()).await.unwrap();
                    });
                } else {
                    open.push(asked);
                }
            }
        });
        let io = CountedIo::new(near);
        let traffic = io.traffic();
        let (tunnel, driver) = gateway_side::connect(io, traffic, GatewaySideConfig::default())
            .await
            .unwrap();
        self.tasks.spawn(info_span!("driver"), async move {
            driver.run().await;
        });
        tunnel
    }

    async fn admitted(&self, instance: &str, slot: u32) -> NewTunnel {
        let welcome = EdgeHello {
            instance: instance.to_owned(),
            slot,
            ..EdgeHello::default()
        };
        NewTunnel {
            tunnel: self.tunnel().await,
            hello: Arc::new(welcome),
            remote_address: FROM.into(),
            certificate: EdgeCertificate::default(),
            roots: Arc::default(),
            crls: Arc::default(),
            unhealthy_ports: Arc::default(),
            control: mpsc::channel(1).0,
            taken_over: CancellationToken::new(),
        }
    }

    /// Registers a tunnel of this node.
    pub(crate) async fn register_node(&self, node: &NodeName) -> (TunnelId, Tunnel) {
        let admitted = self.admitted("edge", 0).await;
        let tunnel = admitted.tunnel.clone();
        let (id, _) = self.registry.register(node, admitted).unwrap();
        (id, tunnel)
    }

    pub(crate) async fn register(
        &self,
        instance: &str,
        slot: u32,
    ) -> Result<(TunnelId, Vec<ReplacedTunnel>), RegisterError> {
        let admitted = self.admitted(instance, slot).await;
        self.registry.register(&node(), admitted)
    }
}

/// Returns the name of the node that all tunnels and peers have.
pub(crate) fn node() -> NodeName {
    NodeName::parse("edge-1").unwrap()
}

pub(crate) async fn open(tunnel: &Tunnel, path: &str) -> gateway_side::OpenStream {
    let head = Request::get(path).body(()).unwrap();
    let target = Target::new("edge-1", 9100);
    tunnel
        .open(head, &StreamKind::Request, &target, true)
        .await
        .unwrap()
}

fn superseded_by(instance: &str) -> RegisterError {
    RegisterError::Superseded {
        instance: instance.to_owned(),
        remote_address: FROM.into(),
    }
}

fn ids(replaced: &[ReplacedTunnel]) -> Vec<(TunnelId, bool)> {
    replaced
        .iter()
        .map(|old| (old.tunnel.id, old.mode == ReplaceMode::Superseded))
        .collect()
}

#[tokio::test]
async fn the_newest_instance_replaces_all_tunnels_of_the_old_one() {
    let world = World::new();
    let (first, _) = world.register("old", 0).await.unwrap();
    let (second, _) = world.register("old", 1).await.unwrap();
    let (newest, replaced) = world.register("new", 0).await.unwrap();
    assert_eq!(ids(&replaced), [(first, true), (second, true)]);
    assert_eq!(world.registry.select_tunnel(&node()).unwrap().id, newest);
}

#[tokio::test]
async fn a_superseded_instance_is_refused_while_its_successor_lives() {
    let world = World::new();
    world.register("old", 0).await.unwrap();
    let (newest, _) = world.register("new", 0).await.unwrap();
    let refused = world.register("old", 0).await.unwrap_err();
    assert_eq!(refused, superseded_by("new"));
    assert!(world.registry.unregister(&node(), newest));
    world.register("old", 0).await.unwrap();
}

#[tokio::test]
async fn a_second_successor_tunnel_keeps_the_superseded_one_out() {
    let world = World::new();
    world.register("old", 0).await.unwrap();
    world.register("new", 0).await.unwrap();
    world.register("new", 1).await.unwrap();
    let refused = world.register("old", 0).await.unwrap_err();
    assert_eq!(refused, superseded_by("new"));
}

#[tokio::test]
async fn one_process_has_so_many_tunnels_and_no_more() {
    let world = World::new();
    for slot in 0..MAX_TUNNELS_PER_EDGE {
        world.register("a", slot).await.unwrap();
    }
    let refused = world.register("a", u32::MAX).await.unwrap_err();
    assert_eq!(refused, RegisterError::TooManyTunnels);
    // A tunnel that takes a used slot again does not count as a further tunnel, and another process has its own slots.
    world.register("a", 3).await.unwrap();
    world.register("b", u32::MAX).await.unwrap();
}

#[tokio::test]
async fn endless_replacement_of_processes_does_not_grow_the_registry() {
    let world = World::new();
    for number in 0..3 * MAX_SUPERSEDED {
        world.register(&number.to_string(), 0).await.unwrap();
    }
    let shard = world.registry.shard(&node());
    assert_eq!(shard.nodes[&node()].superseded.len(), MAX_SUPERSEDED);
}

#[tokio::test]
async fn the_same_slot_is_replaced_and_other_slots_stay() {
    let world = World::new();
    let (first, _) = world.register("a", 0).await.unwrap();
    let (bulk, _) = world.register("a", 1).await.unwrap();
    let (again, replaced) = world.register("a", 0).await.unwrap();
    assert_eq!(ids(&replaced), [(first, false)]);
    let held: Vec<_> = world
        .registry
        .node_tunnels(&node())
        .0
        .iter()
        .map(|edge| edge.id)
        .collect();
    assert_eq!(held, [bulk, again]);
}

#[tokio::test]
async fn the_end_of_an_old_tunnel_does_not_unregister_its_successor() {
    let world = World::new();
    let (old, _) = world.register("a", 0).await.unwrap();
    let (new, _) = world.register("a", 0).await.unwrap();
    assert!(!world.registry.unregister(&node(), old));
    assert_eq!(world.registry.select_tunnel(&node()).unwrap().id, new);
    assert!(world.registry.unregister(&node(), new));
    assert!(!world.registry.unregister(&node(), new));
    assert!(!world.registry.has_tunnel(&node()));
}

#[tokio::test]
async fn a_stream_goes_where_the_fewest_are() {
    let world = World::new();
    let (first, _) = world.register("a", 0).await.unwrap();
    let (second, _) = world.register("a", 1).await.unwrap();
    let busy = world.registry.select_tunnel(&node()).unwrap();
    assert_eq!(busy.id, first);
    let _open = open(&busy.tunnel, "/").await;
    let next = world.registry.select_tunnel(&node()).unwrap();
    assert_eq!(next.id, second);
    let _two = (open(&next.tunnel, "/").await, open(&next.tunnel, "/").await);
    assert_eq!(world.registry.select_tunnel(&node()).unwrap().id, first);
}

#[tokio::test]
async fn a_tunnel_that_moves_bulk_is_chosen_last() {
    let world = World::new();
    world.register("a", 0).await.unwrap();
    let bulky = world.registry.select_tunnel(&node()).unwrap().tunnel;
    let (second, _) = world.register("a", 1).await.unwrap();
    let mut answer = open(&bulky, "/bulk").await.response.await.unwrap();
    while let Some(chunk) = answer.body_mut().next_chunk().await {
        chunk.unwrap();
    }
    drop(answer);
    let calm = world.registry.select_tunnel(&node()).unwrap();
    assert_eq!(calm.id, second);
    let _open = (open(&calm.tunnel, "/").await, open(&calm.tunnel, "/").await);
    assert_eq!(
        world.registry.select_tunnel(&node()).unwrap().id,
        second,
        "although it has more streams"
    );
    calm.tunnel.drain();
    assert_ne!(
        world.registry.select_tunnel(&node()).unwrap().id,
        second,
        "bulk is better than nothing"
    );
}

#[tokio::test]
async fn a_draining_tunnel_is_selected_if_the_node_has_no_other() {
    let world = World::new();
    let (stops, _) = world.register("a", 0).await.unwrap();
    world.registry.mark_leaving(&node(), stops);
    assert_eq!(world.registry.select_tunnel(&node()).unwrap().id, stops);
    let (next, _) = world.register("b", 0).await.unwrap();
    let picked = world.registry.select_tunnel(&node()).unwrap();
    let _busy = (
        open(&picked.tunnel, "/").await,
        open(&picked.tunnel, "/").await,
    );
    assert_eq!(world.registry.select_tunnel(&node()).unwrap().id, next);
    world.registry.unregister(&node(), next);
    assert_eq!(world.registry.select_tunnel(&node()).unwrap().id, stops);
}

#[tokio::test]
async fn a_node_that_may_be_back_soon_is_waited_for() {
    let long = Duration::from_hours(1);
    let world = World::new();
    let name = node();
    // The wait begins at the start of the gateway, and again at the end of the last tunnel.
    for _ in 0..2 {
        let mut waits = pin!(world.registry.select_tunnel_within(&name, long));
        assert!((&mut waits).now_or_never().is_none());
        let other = NodeName::parse("edge-2").unwrap();
        let admitted = world.admitted("b", 0).await;
        world.registry.register(&other, admitted).unwrap();
        assert!((&mut waits).now_or_never().is_none(), "for another node");
        let (id, _) = world.register("a", 0).await.unwrap();
        assert_eq!(waits.await.unwrap().id, id);
        world.registry.unregister(&name, id);
    }
    let away = world
        .registry
        .select_tunnel_within(&name, Duration::ZERO)
        .await;
    assert!(matches!(away, Err(NodeUnavailable::LastSeen { .. })));
    world.registry.start_drain();
    let away = world.registry.select_tunnel_within(&name, long).await;
    assert!(matches!(away, Err(NodeUnavailable::LastSeen { .. })));
}

#[tokio::test]
async fn a_gateway_that_drains_waits_for_other_gateways_until_its_time_is_over() {
    let (world, name, long) = (World::new(), node(), Duration::from_hours(1));
    let waits = || Box::pin(world.registry.select_tunnel_within(&name, long));
    let peer = world.peer("other", HeldState::Connected).await;
    peer.set_node(name.clone(), None);
    let (mut before, mut to_the_end) = (waits(), waits());
    assert!((&mut before).now_or_never().is_none());
    world.registry.start_drain();
    let mut during = waits();
    assert!((&mut before).now_or_never().is_none());
    assert!((&mut during).now_or_never().is_none());
    peer.set_node(name.clone(), Some(HeldState::Connected));
    world.registry.wake_waiting(&name);
    for selected in [before.await, during.await] {
        assert_eq!(selected.unwrap().peer.unwrap().instance, "other");
    }
    peer.set_node(name.clone(), None);
    assert!((&mut to_the_end).now_or_never().is_none());
    world.registry.expire_drain();
    assert_eq!(to_the_end.await.unwrap_err(), NodeUnavailable::NeverSeen);
    peer.mark_draining();
    assert_eq!(waits().await.unwrap_err(), NodeUnavailable::NeverSeen);
}

/// The session of a tunnel takes a moment to notice the tunnel's end.
#[tokio::test]
async fn a_node_with_an_ended_tunnel_is_waited_for_until_unregistered() {
    let (world, name, long) = (World::new(), node(), Duration::from_hours(1));
    let (old, _) = world.register("a", 0).await.unwrap();
    world.registry.select_tunnel(&name).unwrap().tunnel.close();
    let mut waits = pin!(world.registry.select_tunnel_within(&name, long));
    assert!((&mut waits).now_or_never().is_none());
    world.registry.unregister(&name, old);
    assert!((&mut waits).now_or_never().is_none());
    let (next, _) = world.register("a", 0).await.unwrap();
    assert_eq!(waits.await.unwrap().id, next);
}

#[tokio::test]
async fn a_crowd_that_waits_is_bounded() {
    let world = World::new();
    let (name, long) = (node(), Duration::from_hours(1));
    let waits = || Box::pin(world.registry.select_tunnel_within(&name, long));
    let mut crowd: Vec<_> = (0..MAX_WAITING_REQUESTS).map(|_| waits()).collect();
    for one in &mut crowd {
        assert!(one.now_or_never().is_none());
    }
    assert_eq!(waits().await.unwrap_err(), NodeUnavailable::NeverSeen);
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_several_nodes_with_one_permit() {
    let world = World::new();
    let permit = world.registry.wait_permit().unwrap();
    let nodes = ["edge-1", "edge-2"].map(|name| NodeName::parse(name).unwrap());
    let wait_limit = Duration::from_secs(1);
    let wait = |node| (world.registry).select_tunnel_permitted(node, wait_limit, &permit);
    let permits = || world.registry.wait_permits.available_permits();
    let counting = async { assert_eq!(permits(), MAX_WAITING_REQUESTS - 1) };
    let (first, second, ()) = tokio::join!(wait(&nodes[0]), wait(&nodes[1]), counting);
    assert!(first.is_err() && second.is_err());
    drop(permit);
    assert_eq!(permits(), MAX_WAITING_REQUESTS);
}

#[tokio::test]
async fn a_node_without_a_tunnel_says_why() {
    let world = World::new();
    assert_eq!(
        world.registry.select_tunnel(&node()).unwrap_err(),
        NodeUnavailable::NeverSeen
    );
    let (id, _) = world.register("a", 0).await.unwrap();
    let tunnel = world.registry.select_tunnel(&node()).unwrap().tunnel;
    tunnel.drain();
    assert_eq!(
        world.registry.select_tunnel(&node()).unwrap_err(),
        NodeUnavailable::Draining
    );
    world.registry.unregister(&node(), id);
    let away = world.registry.select_tunnel(&node()).unwrap_err();
    assert!(
        matches!(away, NodeUnavailable::LastSeen { remote_address, .. } if remote_address == FROM.into())
    );
}

impl World {
    /// Adds a peer that holds the node.
    pub(crate) async fn peer(&self, instance: &str, state: HeldState) -> Arc<Peer> {
        let identity = (instance.to_owned(), "1".to_owned());
        let peer = Peer::new(
            &format!("{instance}.test:1"),
            identity,
            self.tunnel().await,
            1,
        );
        let link = PeerLink {
            tunnel: self.tunnel().await,
            id: self.registry.next_tunnel_id(),
        };
        peer.set_link(WorkerId(0), Some(link));
        peer.replace_nodes([(node(), state)].into());
        let peer = Arc::new(peer);
        assert!(self.registry.directory().add(&peer));
        peer
    }

    /// Returns the peer that is selected; `None` for an own tunnel.
    fn selected_peer(&self) -> Option<String> {
        let selected = self.registry.select_tunnel(&node()).unwrap();
        selected.peer.map(|peer| peer.instance.clone())
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_is_selected_if_no_own_tunnel_is_as_good() {
    let world = World::new();
    let peer = world.peer("near", HeldState::Connected).await;
    assert_eq!(world.selected_peer().as_deref(), Some("near"));
    let (own, _) = world.register("edge", 0).await.unwrap();
    assert_eq!(world.selected_peer(), None);
    world.registry.mark_leaving(&node(), own);
    assert_eq!(world.selected_peer().as_deref(), Some("near"));
    // Both drain: the own one costs no further step.
    peer.mark_draining();
    assert_eq!(world.selected_peer(), None);
    assert!(world.registry.unregister(&node(), own));
    assert_eq!(world.selected_peer().as_deref(), Some("near"));

    world.peer("far", HeldState::Connected).await;
    assert_eq!(world.selected_peer().as_deref(), Some("far"));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_has_refused_a_request_is_asked_again_after_a_moment() {
    let world = World::new();
    let peer = world.peer("near", HeldState::Connected).await;
    let leaving = peer.leaving_token(&node());
    peer.record_refusal(&node(), PeerRefusal::NotHeld);
    assert!(leaving.is_cancelled(), "idle connections through it end");
    assert!(world.registry.select_tunnel(&node()).is_err());
    tokio::time::advance(REFUSAL_TIME).await;
    assert_eq!(world.selected_peer().as_deref(), Some("near"));
    // A new statement of the peer counts at once.
    peer.record_refusal(&node(), PeerRefusal::NotHeld);
    peer.set_node(node(), Some(HeldState::Connected));
    assert_eq!(world.selected_peer().as_deref(), Some("near"));
}

#[tokio::test(start_paused = true)]
async fn a_peer_whose_tunnel_was_late_is_asked_last_for_a_moment() {
    let world = World::new();
    let late = world.peer("late", HeldState::Connected).await;
    let has_alternative = |peer: &Arc<Peer>| {
        let directory = world.registry.directory();
        directory
            .alternative(&node(), WorkerId(0), Some(peer))
            .is_some()
    };
    assert!(!has_alternative(&late), "no other peer holds the node");
    let other = world.peer("other", HeldState::Draining).await;
    assert!(!has_alternative(&late), "the other peer loses the node");
    other.set_node(node(), Some(HeldState::Connected));
    assert!(has_alternative(&late));
    late.record_refusal(&node(), PeerRefusal::Late);
    assert_eq!(world.selected_peer().as_deref(), Some("other"));
    assert!(!has_alternative(&other));
    other.record_refusal(&node(), PeerRefusal::NotHeld);
    assert_eq!(world.selected_peer().as_deref(), Some("late"));
    tokio::time::advance(REFUSAL_TIME).await;
    assert!(has_alternative(&other));
    assert_eq!(world.selected_peer().as_deref(), Some("late"));
}

#[tokio::test]
async fn a_newer_connection_replaces_that_to_the_same_process_alone() {
    let world = World::new();
    let directory = world.registry.directory();
    let first = world.peer("near", HeldState::Connected).await;
    let second = world.peer("near", HeldState::Connected).await;
    assert!(first.replaced().is_cancelled() && !second.replaced().is_cancelled());
    assert!(!directory.remove(&first), "it was replaced");
    assert_eq!(world.selected_peer().as_deref(), Some("near"));
    let identity = ("near".to_owned(), "1".to_owned());
    let elsewhere = Peer::new("other.test:1", identity, world.tunnel().await, 1);
    assert!(
        !directory.add(&Arc::new(elsewhere)),
        "it has another address"
    );
    assert!(directory.remove(&second));
    assert!(world.registry.select_tunnel(&node()).is_err());
}

#[tokio::test]
async fn peers_hear_of_each_change_of_a_node() {
    let world = World::new();
    let mut changes = world.registry.watch_changes();
    let (first, _) = world.register("edge", 0).await.unwrap();
    assert_eq!(changes.recv().await.unwrap(), node());
    let held = || world.registry.held_state(&node());
    assert_eq!(held(), Some(HeldState::Connected));
    assert_eq!(
        world.registry.held_nodes(),
        [(node(), HeldState::Connected)]
    );
    world.registry.mark_leaving(&node(), first);
    assert_eq!(changes.recv().await.unwrap(), node());
    assert_eq!(held(), Some(HeldState::Draining));
    world.registry.unregister(&node(), first);
    assert_eq!(changes.recv().await.unwrap(), node());
    assert_eq!(held(), None);
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_node_that_has_just_left_a_peer() {
    let world = World::new();
    tokio::time::advance(Duration::from_hours(1)).await;
    let (name, long) = (node(), Duration::from_secs(5));
    let never = world.registry.select_tunnel_within(&name, long).await;
    assert_eq!(never.unwrap_err(), NodeUnavailable::NeverSeen);
    world
        .registry
        .record_left_peer(&name, &"near.test:1".into());
    let mut waits = pin!(world.registry.select_tunnel_within(&name, long));
    assert!(waits.as_mut().now_or_never().is_none());
    world.peer("far", HeldState::Connected).await;
    world.registry.wake_waiting(&name);
    assert_eq!(waits.await.unwrap().peer.unwrap().instance, "far");
}

/// The paused clock runs apart from the wall clock, as after a correction of the latter.
#[tokio::test(start_paused = true)]
async fn the_wait_for_a_node_does_not_depend_on_the_wall_clock() {
    let (world, name, long) = (World::new(), node(), Duration::from_secs(5));
    let (id, _) = world.register("a", 0).await.unwrap();
    world.registry.unregister(&name, id);
    for left in [false, true] {
        if left {
            let gateway = "near.test:1".into();
            world.registry.record_left_peer(&name, &gateway);
        }
        tokio::time::advance(long).await;
        let before = Instant::now();
        let away = world.registry.select_tunnel_within(&name, long).await;
        let away = away.unwrap_err();
        assert_eq!(Instant::now(), before, "{away:?}");
        let (NodeUnavailable::LastSeen { ended_at, .. }
        | NodeUnavailable::LeftPeer { ended_at, .. }) = away
        else {
            panic!("{away:?}");
        };
        assert_eq!(ended_at.elapsed(), long);
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_that_were_away_for_longest_are_forgotten() {
    let world = World::new();
    let (registry, gateway) = (&world.registry, "near.test:1".into());
    let node = |number: usize| NodeName::parse(&format!("edge-{number}")).unwrap();
    let known = |number: usize| {
        let shard = registry.shard(&node(number));
        shard.nodes.contains_key(&node(number))
    };
    world.register_node(&node(0)).await;
    let streams = registry.streams_of(&node(1));
    let waiting = node(2);
    let mut waits = pin!(registry.select_tunnel_within(&waiting, Duration::from_hours(1)));
    assert!(waits.as_mut().now_or_never().is_none());
    for number in 3..2 * MAX_AWAY {
        registry.record_left_peer(&node(number), &gateway);
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    let total: usize = registry
        .shards
        .iter()
        .map(|shard| shard.lock().unwrap().nodes.len())
        .sum();
    assert!(total <= MAX_AWAY + 3, "{total}");
    assert!(known(0) && known(1) && known(2) && known(2 * MAX_AWAY - 1));
    assert!(!known(3));
    drop(streams);
    world.register_node(&node(2)).await;
    assert!(waits.await.is_ok());
}
