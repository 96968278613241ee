//! Links as edges have them: with long delays and interruptions.

use crate::{
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, answer, answer::pattern},
        client::exchange,
        link::Link,
        until,
    },
};
use futures_util::future::join_all;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};

const MIB: usize = 1 << 20;
/// Delay in one direction.
const DELAY: Duration = Duration::from_millis(25);
/// Time limit on a machine that does other work as well.
const PATIENCE: Duration = Duration::from_mins(2);

/// A gateway and an edge with at most this number of tunnels, which use `link`.
async fn testbed(app: &App, delay: Duration, tunnels: usize) -> (TestBed, Link) {
    // A busy machine is silent as well.
    let build = TestBed::build().config(|config| config.tunnel.close_after = PATIENCE);
    let world = build.start().await;
    let link = Link::far(world.tunnel(), delay).await;
    let plan = world.edge("edge-1").port(9100, app.address());
    let plan = plan.config(|config| {
        config.tunnels.max = tunnels;
        config.timeouts.silence = PATIENCE;
    });
    let edge = plan.only_by(&link).join().await;
    (TestBed::of(world, edge), link)
}

async fn app(whole: &Arc<Vec<u8>>) -> App {
    let sent = whole.clone();
    App::http(move |head| match head.path().as_str() {
        "/endless" => answer::endless(),
        "/download" => answer::bytes(&sent),
        "/mirror" => answer::mirror(),
        _ => answer::ok("well"),
    })
    .await
}

#[tokio::test]
async fn a_link_of_50_ms_carries_bulk_and_small_requests_both_ways() {
    let whole = Arc::new(pattern(24 * MIB));
    let app = app(&whole).await;
    let (testbed, _link) = testbed(&app, DELAY, 2).await;
    let began = Instant::now();
    assert_eq!(testbed.client().get(URL).await.text(), "well");
    assert!(began.elapsed() >= 2 * DELAY, "the link has no delay");

    let mut stalled = testbed.tcp("plain").await;
    exchange(
        &mut stalled,
        "GET /endless HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
    )
    .await;
    let download = async {
        let answer = testbed.client().get(&format!("{URL}download")).await;
        assert!(answer.body == *whole);
    };
    let upload = async {
        let body = whole[..4 * MIB].to_vec();
        let answer = testbed
            .http2()
            .ask("POST", &format!("{URL}mirror"), body)
            .await;
        assert!(answer.body == whole[..4 * MIB]);
    };
    let small = join_all((0..64).map(|_| async {
        for _ in 0..5 {
            assert_eq!(testbed.client().get(URL).await.text(), "well");
        }
    }));
    // Each client has a time limit for each of its requests.
    tokio::join!(download, upload, small);
    drop(stalled);
    testbed.until_idle().await;
}

/// The link is silent repeatedly, each time for less than a timeout: nothing is lost, and no edge dials again.
#[tokio::test]
async fn a_stuttering_link_loses_no_data() {
    let whole = Arc::new(pattern(MIB));
    let app = app(&whole).await;
    let (testbed, link) = testbed(&app, Duration::ZERO, 2).await;
    let first = testbed.tunnels().await[0];
    let over = AtomicBool::new(false);
    let stutter = async {
        for _ in 0..20 {
            // Time is the subject: the rhythm of the interruptions.
            link.silence();
            sleep(Duration::from_millis(150)).await;
            link.restore();
            sleep(Duration::from_millis(50)).await;
        }
        over.store(true, Relaxed);
    };
    let clients = join_all((0..16).map(|_| async {
        let mut served = 0;
        while !over.load(Relaxed) {
            let answer = testbed.client().get(&format!("{URL}download")).await;
            assert!(answer.status == 200 && answer.body == *whole);
            served += 1;
        }
        served
    }));
    // Each client has a time limit for each of its requests.
    let ((), served) = tokio::join!(stutter, clients);
    assert!(served.iter().all(|served| *served > 0), "{served:?}");
    assert_eq!(testbed.tunnels().await[0], first);
    testbed.until_idle().await;
}

/// Each cut is an error only for clients with a request in flight. The edge returns each time.
#[tokio::test]
async fn a_flapping_link_costs_only_requests_in_progress() {
    let whole = Arc::new(pattern(MIB));
    let app = app(&whole).await;
    // With a second tunnel for bulk, which could begin just before a cut, a new tunnel could be one that is cut already.
    let (testbed, link) = testbed(&app, Duration::ZERO, 1).await;
    for _ in 0..10 {
        let before = testbed.tunnels().await;
        let waiting = async {
            let get = "GET /endless HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
            let mut wire = testbed.tcp("plain").await;
            exchange(&mut wire, get).await;
            link.cut();
            crate::world::client::read_to_end(&mut wire).await
        };
        let ended = timeout(PATIENCE, waiting)
            .await
            .expect("a client waits without end");
        assert!(ended.is_err(), "a body that was cut off ended in order");
        until("another tunnel exists", async || {
            let now = testbed.tunnels().await;
            !now.is_empty() && now.iter().all(|id| !before.contains(id))
        })
        .await;
        let answer = testbed.client().get(&format!("{URL}download")).await;
        assert!(answer.body == *whole);
    }
    testbed.until_idle().await;
}

/// Checks that an edge dials again if no byte passes while it dials.
#[tokio::test]
async fn an_edge_started_on_a_silent_link_connects_once_it_works() {
    let app = App::saying("well").await;
    let world = World::start().await;
    let link = Link::to(world.tunnel()).await;
    let plan = world.edge("edge-1").port(9100, app.address());
    let edge = plan.only_by(&link).join().await;
    for _ in 0..3 {
        link.silence();
        link.cut();
        // Dialled meanwhile: connected, but no byte of TLS has passed.
        world.until_tunnels("edge-1", 0).await;
        // Time is the subject: dials begin, and wait, while the link is cut.
        sleep(Duration::from_millis(300)).await;
        link.restore();
        world.until_tunnels("edge-1", 1).await;
        assert_eq!(
            world.client().get("https://edge-1:9100/").await.text(),
            "well"
        );
    }
    drop(edge);
}
