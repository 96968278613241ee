//! Tests of an edge with tunnels at every gateway.

use super::*;
use std::sync::Mutex;
use tokio::sync::watch;

/// Starts a gateway at another address of this machine.
pub(super) async fn also(ca: &Arc<Ca>, instance: &str, gateways: Vec<String>) -> Gateway {
    let says = Says {
        instance: instance.into(),
        gateways,
        replicas: None,
        dismiss: None,
    };
    Gateway::start_on(reserved_address(), acceptor(ca, ca), says).await
}

/// One attempt failed because the edge was already connected with the gateway through another address.
const WAITS: &str = "outcome=\"reached\"} 1\n";

fn every() -> Value {
    json!({
        "tunnels": { "gateways": "every", "resolve_after": "200ms" },
        "backoff": { "silent_max": "500ms", "refused_max": "500ms" },
    })
}

pub(super) fn addresses(gateways: &[&Gateway]) -> Vec<String> {
    let addresses = gateways.iter().map(|gateway| gateway.address.to_string());
    addresses.collect()
}

#[tokio::test]
async fn an_edge_has_independent_tunnels_at_each_gateway() {
    let ca = ca();
    let (mut first, mut second) = (Gateway::start(&ca).await, Gateway::start(&ca).await);
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&first, &second]), every()).await;
    let (one, two) = (first.next().await, second.next().await);
    assert_eq!((one.welcome.slot, two.welcome.slot), (0, 0));
    assert_eq!(one.welcome.instance, two.welcome.instance);
    // A drain waits until the edge has announced that it leaves.
    assert!(one.welcome.elsewhere);
    let address = first.address;
    drop((one, first));
    let status = edge.until(|status| status.trouble.is_some()).await;
    assert_eq!((status.state, status.tunnels.len()), ("connected", 1));
    let trouble = status.trouble.unwrap().what;
    assert!(trouble.contains(&address.to_string()), "{trouble}");
    let says = Says {
        instance: "restarted".into(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: None,
    };
    let mut again = Gateway::start_on(address, acceptor(&ca, &ca), says).await;
    again.next().await;
    let mended =
        |status: &crate::status::Status| status.tunnels.len() == 2 && status.trouble.is_none();
    edge.until(mended).await;
    assert!(second.registered.try_recv().is_err(), "dialled again");
    edge.stop.cancel();
    edge.tasks.drain(SOON).await;
}

#[tokio::test]
async fn the_first_gateways_leader_hint_counts_until_it_goes() {
    let ca = ca();
    let (mut first, mut second) = (
        also(&ca, "a", Vec::new()).await,
        also(&ca, "b", Vec::new()).await,
    );
    let mut more = every();
    more["api_cache"] = json!({ "listen": "127.0.0.1:0" });
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&first, &second]), more).await;
    let (mut one, mut two) = (first.next().await, second.next().await);
    let led = async |leader: &str| {
        let leads = |status: &crate::status::Status| {
            let reader = status.api_cache.as_ref();
            reader.is_some_and(|reader| reader.leader.as_deref() == Some(leader))
        };
        edge.until(leads).await;
    };
    let pool = |leader: &str| {
        GatewayMessage::Pool(NodePoolMembers {
            pool: Some("north".into()),
            leader: Some(leader.into()),
            members: Vec::new(),
        })
    };
    two.control.send(&pool("by-b")).await.unwrap();
    led("by-b").await;
    one.control.send(&pool("by-a")).await.unwrap();
    led("by-a").await;
    two.control.send(&pool("again-by-b")).await.unwrap();
    one.control.send(&pool("again-by-a")).await.unwrap();
    led("again-by-a").await;
    let drain = GatewayMessage::Drain {
        grace_ms: 60_000,
        successor: false,
    };
    one.control.send(&drain).await.unwrap();
    led("again-by-b").await;

    drop((one, first));
    let mut back = also(&ca, "a", Vec::new()).await;
    let gateways = addresses(&[&back, &second]);
    let line = GatewayMessage::Gateways {
        gateways,
        replicas: None,
    };
    two.control.send(&line).await.unwrap();
    let mut came = back.next().await;
    came.control.send(&pool("back-by-a")).await.unwrap();
    led("back-by-a").await;
    drop((came, back));
    led("again-by-b").await;
}

#[tokio::test]
async fn a_gateway_with_two_addresses_uses_one_and_fails_over() {
    let ca = ca();
    let (mut left, mut right) = (
        also(&ca, "a", Vec::new()).await,
        also(&ca, "a", Vec::new()).await,
    );
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&left, &right]), every()).await;
    // The edge received the second gateway's hello, and closed the connection.
    let began = Instant::now();
    while !edge.admin("/metrics").await.contains(WAITS) {
        assert!(began.elapsed() < SOON, "no task waits");
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
async fn a_tunnel_of_a_removed_gateway_ends_without_redial() {
    let ca = ca();
    let (mut old, mut new) = (Gateway::start(&ca).await, Gateway::start(&ca).await);
    let mut teller = also(&ca, "teller", addresses(&[&old])).await;
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&teller]), every()).await;
    let (mut told, was) = (teller.next().await, old.next().await);
    let gateways = addresses(&[&new]);
    let line = GatewayMessage::Gateways {
        gateways,
        replicas: None,
    };
    told.control.send(&line).await.unwrap();
    new.next().await;
    edge.until(|status| status.gateways.len() == 2 && status.tunnels.len() == 3)
        .await;
    drop((was, old));
    edge.until(|status| status.tunnels.len() == 2 && status.trouble.is_none())
        .await;
}

#[tokio::test]
async fn gateways_that_announce_only_themselves_do_not_displace_each_other() {
    let ca = ca();
    let start = async |name: &str| {
        let address = reserved_address();
        let says = Says {
            instance: name.into(),
            gateways: vec![address.to_string()],
            replicas: None,
            dismiss: None,
        };
        Gateway::start_on(address, acceptor(&ca, &ca), says).await
    };
    let (mut a, mut b) = (start("a").await, start("b").await);
    let mut first = also(&ca, "first", addresses(&[&a, &b])).await;
    let world = World::joined(&ca);
    let edge = world.run(&addresses(&[&first]), every()).await;
    let (one, two) = (a.next().await, b.next().await);
    let mut announced = first.next().await;
    let knows = |count| move |status: &crate::status::Status| status.gateways.len() == count;
    edge.until(knows(3)).await;
    // The configured gateway announces only one of the two now; the other announces itself.
    let line = GatewayMessage::Gateways {
        gateways: addresses(&[&a]),
        replicas: None,
    };
    announced.control.send(&line).await.unwrap();
    pass(Duration::from_millis(500)).await;
    edge.admin("/status").await;
    assert!(knows(3)(&edge.reader.status()));
    // Its address stays after its end, for its return.
    drop((one, a));
    edge.until(|status| status.tunnels.len() == 2).await;
    assert!(knows(3)(&edge.reader.status()));
    let mut line_of_b = two.control;
    let moved = also(&ca, "moved", Vec::new()).await;
    let line = GatewayMessage::Gateways {
        gateways: addresses(&[&moved]),
        replicas: None,
    };
    line_of_b.send(&line).await.unwrap();
    let address = moved.address.to_string();
    let status = edge
        .until(|status| status.gateways.contains(&address))
        .await;
    assert!(!status.gateways.contains(&b.address.to_string()));
}

#[tokio::test]
async fn an_unresolvable_name_is_reported_and_delays_no_other_gateway() {
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

/// Load balancer address that leads to several gateways in turn, or only to the first one.
pub(super) struct Balancer {
    pub(super) address: SocketAddr,
    pub(super) behind: Arc<Mutex<Vec<SocketAddr>>>,
    pub(super) dialled: watch::Sender<usize>,
    _tasks: TaskGroup,
}

impl Balancer {
    pub(super) async fn start(behind: &[SocketAddr]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let behind = Arc::new(Mutex::new(behind.to_vec()));
        let (dialled, tasks) = (watch::Sender::new(0), TaskGroup::default());
        let (now, count) = (behind.clone(), dialled.clone());
        tasks.spawn(info_span!("balancer"), async move {
            let passing = TaskGroup::default();
            while let Ok((mut near, _)) = listener.accept().await {
                let turn = *count.borrow();
                count.send_modify(|dialled| *dialled += 1);
                let to = now.lock().unwrap().clone();
                passing.spawn(info_span!("passing"), async move {
                    if let Ok(mut far) = TcpStream::connect(to[turn % to.len()]).await {
                        let _ = copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Self {
            address,
            behind,
            dialled,
            _tasks: tasks,
        }
    }
}

/// Starts a gateway that announces the number of gateways.
pub(super) async fn one_of(ca: &Arc<Ca>, instance: &str, replicas: u32) -> Gateway {
    let says = Says {
        instance: instance.into(),
        gateways: Vec::new(),
        replicas: Some(replicas),
        dismiss: None,
    };
    Gateway::start_on(reserved_address(), acceptor(ca, ca), says).await
}

pub(super) fn reached(gateways: u32, of: u32) -> impl Fn(&crate::status::Status) -> bool {
    move |status| {
        let reached = status.reached.map(|reached| (reached.gateways, reached.of));
        reached == Some((gateways, of))
    }
}

#[tokio::test]
async fn all_gateways_at_one_address_are_found_without_tunnel_loss() {
    let ca = ca();
    let (mut a, mut b) = (one_of(&ca, "a", 2).await, one_of(&ca, "b", 2).await);
    // The balancer selects one gateway more often than the other.
    let balancer = Balancer::start(&[a.address, a.address, b.address]).await;
    let world = World::joined(&ca);
    let edge = world.run(&[balancer.address.to_string()], every()).await;
    let (mut first, _second) = (a.next().await, b.next().await);
    edge.until(reached(2, 2)).await;
    assert!(a.registered.try_recv().is_err(), "it was dialled again");
    // Another gateway is added, and announced.
    let mut c = one_of(&ca, "c", 3).await;
    balancer.behind.lock().unwrap().push(c.address);
    let gateways = vec![balancer.address.to_string()];
    let replicas = Some(3);
    let line = GatewayMessage::Gateways { gateways, replicas };
    first.control.send(&line).await.unwrap();
    let third = c.next().await;
    let status = edge.until(reached(3, 3)).await;
    assert_eq!((status.state, status.tunnels.len()), ("connected", 3));
    // One gateway ends without notice, and starts again.
    drop((third, c));
    edge.until(reached(2, 3)).await;
    let mut again = one_of(&ca, "c2", 3).await;
    *balancer.behind.lock().unwrap() = vec![a.address, b.address, again.address];
    let found = again.next().await;
    edge.until(reached(3, 3)).await;
    // A draining gateway gets no clients.
    let mut draining = found.control;
    let drain = GatewayMessage::Drain {
        grace_ms: 1000,
        successor: false,
    };
    draining.send(&drain).await.unwrap();
    edge.until(reached(2, 3)).await;
    for gateway in [&mut a, &mut b] {
        assert!(gateway.registered.try_recv().is_err(), "dialled again");
    }
    edge.stop.cancel();
    edge.tasks.drain(SOON).await;
}

#[tokio::test]
async fn a_sticky_balancer_costs_few_attempts_and_no_tunnel() {
    let ca = ca();
    let mut only = one_of(&ca, "a", 3).await;
    let balancer = Balancer::start(&[only.address]).await;
    let world = World::joined(&ca);
    let mut more = every();
    more["backoff"]["refused_max"] = json!("1h");
    let edge = world.run(&[balancer.address.to_string()], more).await;
    let _tunnel = only.next().await;
    edge.until(reached(1, 3)).await;
    // The test is about time: the dials are at least half a second apart.
    let (began, mut dialled) = (Instant::now(), balancer.dialled.subscribe());
    let before = *dialled.borrow();
    let again = dialled.wait_for(|dialled| *dialled >= before + 4);
    timeout(SOON, again)
        .await
        .expect("no dial is made")
        .unwrap();
    let took = began.elapsed();
    assert!(
        took >= Duration::from_millis(1_500),
        "three pauses in {took:?}"
    );
    assert!(only.registered.try_recv().is_err(), "dialled again");
    assert_eq!(edge.reader.status().tunnels.len(), 1);
}

/// Starts an edge with tunnels at every gateway behind the balancer, and an upstream at its port 7.
async fn behind(world: &World, balancer: &Balancer, app: SocketAddr) -> Running {
    let mut more = every();
    more["ports"] = json!({ "7": { "target": app.to_string() } });
    world.run(&[balancer.address.to_string()], more).await
}

#[tokio::test]
async fn a_discovered_gateway_has_its_own_bulk_tunnels() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let (mut a, mut b) = (one_of(&ca, "a", 2).await, one_of(&ca, "b", 2).await);
    let balancer = Balancer::start(&[a.address, b.address]).await;
    let world = World::joined(&ca);
    let edge = behind(&world, &balancer, echo(&tasks).await).await;
    let (one, two) = (a.next().await, b.next().await);
    edge.until(reached(2, 2)).await;
    let mut further = Vec::new();
    for (registered, gateway) in [(&one, &mut a), (&two, &mut b)] {
        let (mut send, mut receive) = session(&registered.tunnel).await;
        // A dropped tunnel would end and be dialled again.
        further.push(bulk_tunnel(gateway, &mut send, &mut receive).await);
        assert_eq!(further.last().unwrap().welcome.slot, 1);
        send.end().unwrap();
    }
    assert!(a.registered.try_recv().is_err(), "dialled again");
}

#[tokio::test]
async fn a_lost_first_tunnel_beside_a_bulk_tunnel_redials_its_gateway() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let (mut a, mut b) = (one_of(&ca, "a", 2).await, one_of(&ca, "b", 2).await);
    let balancer = Balancer::start(&[a.address, b.address]).await;
    let world = World::joined(&ca);
    let edge = behind(&world, &balancer, echo(&tasks).await).await;
    let (first, _found) = (a.next().await, b.next().await);
    edge.until(reached(2, 2)).await;
    let (mut send, mut receive) = session(&first.tunnel).await;
    let further = bulk_tunnel(&mut a, &mut send, &mut receive).await;
    assert_eq!(further.welcome.slot, 1);
    let mut first = first;
    for _ in 0..3 {
        // The next address of the balancer may be either gateway.
        first.tunnel.close();
        first = a.next().await;
        assert_eq!(first.welcome.slot, 0);
    }
    assert!(b.registered.try_recv().is_err(), "dialled again");
    edge.until(reached(2, 2)).await;
}

#[tokio::test]
async fn a_refusing_gateway_behind_a_balancer_gets_its_retry_delay() {
    let ca = ca();
    let mut takes = one_of(&ca, "a", 2).await;
    let says = Says {
        instance: "b".into(),
        gateways: Vec::new(),
        replicas: Some(2),
        dismiss: Some(GoAway::Full),
    };
    let refuses = Gateway::start_on(reserved_address(), acceptor(&ca, &ca), says).await;
    let balancer = Balancer::start(&[takes.address, refuses.address, refuses.address]).await;
    let world = World::joined(&ca);
    let edge = world.run(&[balancer.address.to_string()], every()).await;
    let _tunnel = takes.next().await;
    edge.until(reached(1, 2)).await;
    let sent_away = "outcome=\"refused\"} 1\n";
    let began = Instant::now();
    while !edge.admin("/metrics").await.contains(sent_away) {
        assert!(began.elapsed() < SOON, "no edge was refused");
    }
    // Some pauses would have ended, but the gateway requested 90 s.
    for _ in 0..4 {
        pass(Duration::from_millis(500)).await;
        // A dial takes no more turns than this.
        edge.admin("/metrics").await;
    }
    assert_eq!(*balancer.dialled.borrow(), 2);
    assert_eq!(edge.reader.status().state, "connected");
    drop(refuses);
}

#[test]
fn gateway_messages_parse_without_replicas_or_with_new_fields() {
    let heard = |line: &str| {
        causeway_tunnel::control_stream::parse_message::<GatewayMessage>(line.as_bytes()).unwrap()
    };
    let gateways = |replicas| GatewayMessage::Gateways {
        gateways: vec!["a:1".into()],
        replicas,
    };
    let older = r#"{"type":"gateways","gateways":["a:1"]}"#;
    assert_eq!(heard(older), gateways(None));
    let later = r#"{"type":"gateways","gateways":["a:1"],"replicas":2,"zones":{}}"#;
    assert_eq!(heard(later), gateways(Some(2)));
    let hello = r#"{"type":"hello","protocol":1,"version":"0","gateway":"a","node":"edge-1","gateways":[]}"#;
    assert!(matches!(heard(hello), GatewayMessage::Hello(hello) if hello.replicas.is_none()));
    // Without a number of gateways the message has no field that older edges do not know.
    let message = serde_json::to_string(&gateways(None)).unwrap();
    assert_eq!(message, older);
}
