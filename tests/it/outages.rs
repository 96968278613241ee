//! A link that dies, and one that returns: the time until each side detects it, and the effect on clients.
//!
//! Real processes in a network of namespaces. With `CAUSEWAY_TEST_FULL=1` the tests check the promised times, with an
//! allowance for a busy machine, and add outages of one minute and of ten.

use crate::world::{
    app::{App, answer},
    client::{Answer, CallError, whole},
    netns::{HUB, Host, NEED, SharedNetwork},
    process::{Causeway, GatewayProcess, Process},
    tool::{full, need},
    until,
};
use hyper::Request;
use std::{io::Write, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

/// Time in which both ends detect a silent death.
const KNOWN: Duration = Duration::from_secs(15);
/// Time in which requests succeed after a link's return.
const BACK: Duration = Duration::from_secs(2);
/// Limit of a wait for a log line of a process.
const SOON: Duration = Duration::from_mins(2);
/// Time that TCP itself may delay sent data after an outage that ended before either side detected it: its retransmissions
/// are 3.2 s apart by then.
const RETRANSMISSION: Duration = Duration::from_millis(3_200);
/// Length of an outage that ends before either side detects it.
const SHORT: Duration = Duration::from_secs(5);
/// Idle time before the outage. The gateway's probe, which is due 5 s after the last byte, is lost early, and by the link's
/// return TCP retransmits it at its longest interval.
const PROBED_EARLY: Duration = Duration::from_millis(3_500);
/// Allowance for a machine that does other work.
const BUSY: Duration = Duration::from_millis(1_500);

/// Number of bytes after which bulk has reached its full speed.
const BULK: u64 = 16 << 20;

const URL: &str = "http://edge-1:9100/";

/// Traffic while the link dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    Idle,
    Download,
    Upload,
}

/// An edge on a host of its own.
struct OutageSetup<'a> {
    site: &'a GatewayProcess,
    node: &'static str,
    edge: Process,
    host: Host<'a>,
    _app: App,
}

/// A gateway in the network's hub.
async fn gateway() -> GatewayProcess {
    GatewayProcess::open_to_all(&format!("{HUB}:0")).await
}

impl<'a> OutageSetup<'a> {
    async fn on(street: &'a SharedNetwork, site: &'a GatewayProcess, node: &'static str) -> Self {
        Self::with(street, site, node, |edge| edge).await
    }

    /// With an edge that is started with this program.
    async fn with(
        street: &'a SharedNetwork,
        site: &'a GatewayProcess,
        node: &'static str,
        so: impl FnOnce(Causeway) -> Causeway,
    ) -> Self {
        let host = street.host();
        let app = {
            let _there = host.enter();
            App::http(|head| match head.path().as_str() {
                "/silent" => answer::silence(),
                "/endless" => answer::endless(),
                _ => answer::ok("here"),
            })
            .await
        };
        let edge = site.join_by(so(host.causeway()), node, app.port()).await;
        let scene = Self {
            site,
            node,
            edge,
            host,
            _app: app,
        };
        assert_eq!(scene.ask().await.unwrap().text(), "here");
        scene
    }

    async fn ask(&self) -> Result<Answer, CallError> {
        let url = format!("http://{}:9100/", self.node);
        let request = Request::get(url).body(whole("")).unwrap();
        self.site.nobody().try_send(request).await
    }

    /// Returns the time until a request succeeds.
    async fn back(&self) -> Duration {
        let began = Instant::now();
        let asking = async {
            while !matches!(self.ask().await, Ok(answer) if answer.status == 200) {
                // Pause between the requests.
                sleep(Duration::from_millis(20)).await;
            }
        };
        let asked = timeout(SOON, asking).await;
        assert!(asked.is_ok(), "not back: {:#?}", self.edge.written());
        began.elapsed()
    }

    /// A client with a request in flight, whose failure it reports.
    async fn client(&self, traffic: Traffic, clients: &mut JoinSet<()>) {
        let path = match traffic {
            Traffic::Idle => "GET /silent",
            Traffic::Download => "GET /endless",
            Traffic::Upload => "POST /silent",
        };
        let node = self.node;
        let head = format!("{path} HTTP/1.1\r\nHost: {node}:9100\r\nConnection: close\r\n");
        let mut wire = self.site.nobody().tcp_stream().await;
        match traffic {
            Traffic::Idle | Traffic::Download => {
                wire.write_all(format!("{head}\r\n").as_bytes())
                    .await
                    .unwrap();
                clients.spawn(async move {
                    let mut buffer = vec![0; 64 << 10];
                    let mut told = Vec::new();
                    while let Ok(length @ 1..) = wire.read(&mut buffer).await {
                        told = buffer[..length].to_vec();
                    }
                    let told = String::from_utf8_lossy(&told);
                    assert!(
                        !told.contains("HTTP/1.1 200") && !told.ends_with("\r\n0\r\n\r\n"),
                        "{told}"
                    );
                });
            }
            Traffic::Upload => {
                let head = format!("{head}Content-Length: 1000000000000\r\n\r\n");
                wire.write_all(head.as_bytes()).await.unwrap();
                clients.spawn(async move {
                    let bytes = vec![b'x'; 64 << 10];
                    while wire.write_all(&bytes).await.is_ok() {}
                });
            }
        }
    }
}

/// Both ends and the clients detect a cut in time.
async fn known(scene: &OutageSetup<'_>, clients: &mut JoinSet<()>, cut: Instant) {
    let gone = format!("{} disconnected", scene.node);
    let gateway = async {
        scene.site.gateway.wrote(&gone, 1, SOON).await;
        cut.elapsed()
    };
    let edge = async {
        scene.edge.wrote("tunnel ended", 1, SOON).await;
        cut.elapsed()
    };
    let clients = async {
        while let Some(ended) = clients.join_next().await {
            ended.unwrap();
        }
        cut.elapsed()
    };
    let known = tokio::join!(gateway, edge, clients);
    say(&format!(
        "{}: gateway, edge and clients knew after {known:?}",
        scene.node
    ));
    let late = KNOWN + BUSY;
    assert!(!full() || known.0 <= late && known.1 <= late && known.2 <= late);
    let told = scene.ask().await.unwrap();
    assert_eq!(
        (told.status, told.reason()),
        (503, "node_not_connected".to_owned())
    );
}

async fn back_in_time(scene: &OutageSetup<'_>, bound: Duration) {
    let back = scene.back().await;
    say(&format!("{}: back after {back:?}", scene.node));
    assert!(!full() || back <= bound + BUSY, "back after {back:?}");
}

/// A request after `outage` succeeds in time.
async fn outage(outage: Duration, bound: Duration) {
    need!(NEED);
    outage_on(&SharedNetwork::new(), Duration::ZERO, outage, bound).await;
}

/// The same for a link that was idle for `idle` before.
async fn outage_on(street: &SharedNetwork, idle: Duration, outage: Duration, bound: Duration) {
    let site = gateway().await;
    let scene = OutageSetup::on(street, &site, "edge-1").await;
    // Time is the subject, before the cut and during it.
    sleep(idle).await;
    scene.host.cut();
    sleep(outage).await;
    scene.host.mend();
    back_in_time(&scene, bound).await;
}

/// Prints a figure although the test runner hides the output of tests.
fn say(figure: &str) {
    writeln!(std::io::stderr().lock(), "{figure}").unwrap();
}

#[tokio::test]
async fn both_ends_detect_a_silent_cut_and_recover_in_time() {
    need!(NEED);
    let street = SharedNetwork::new();
    let site = gateway().await;
    let idle = OutageSetup::on(&street, &site, "idle").await;
    let download = OutageSetup::on(&street, &site, "download").await;
    let upload = OutageSetup::on(&street, &site, "upload").await;
    let mut clients = [JoinSet::new(), JoinSet::new(), JoinSet::new()];
    let scenes = [&idle, &download, &upload];
    let traffics = [Traffic::Idle, Traffic::Download, Traffic::Upload];
    for ((scene, traffic), clients) in scenes.iter().zip(traffics).zip(&mut clients) {
        scene.client(Traffic::Idle, clients).await;
        scene.client(traffic, clients).await;
    }
    until("bulk passes in both directions", async || {
        let (down, up) = (site.node("download").await, site.node("upload").await);
        down["bytes_down"].as_u64() > Some(BULK) && up["bytes_up"].as_u64() > Some(BULK)
    })
    .await;
    for scene in scenes {
        scene.host.cut();
    }
    let cut = Instant::now();
    let [first, second, third] = &mut clients;
    tokio::join!(
        known(&idle, first, cut),
        known(&download, second, cut),
        known(&upload, third, cut),
    );
    for scene in scenes {
        scene.host.mend();
    }
    tokio::join!(
        back_in_time(&idle, BACK),
        back_in_time(&download, BACK),
        back_in_time(&upload, BACK),
    );
}

#[tokio::test]
async fn an_outage_of_five_seconds_is_over_when_the_link_is() {
    outage(SHORT, RETRANSMISSION).await;
}

#[tokio::test]
async fn a_five_second_outage_with_an_early_lost_probe_ends_soon() {
    need!(NEED);
    outage_on(&SharedNetwork::new(), PROBED_EARLY, SHORT, RETRANSMISSION).await;
}

#[tokio::test]
async fn a_five_second_outage_ends_in_two_with_fast_retransmission() {
    need!(NEED);
    if !full() {
        return;
    }
    let street = SharedNetwork::new();
    if street.insists() {
        outage_on(&street, PROBED_EARLY, SHORT, BACK).await;
    }
}

#[tokio::test]
async fn an_outage_of_a_minute_is_over_when_the_link_is() {
    if full() {
        outage(Duration::from_mins(1), BACK).await;
    }
}

#[tokio::test]
async fn an_outage_of_ten_minutes_is_over_when_the_link_is() {
    if full() {
        outage(Duration::from_mins(10), BACK).await;
    }
}

#[tokio::test]
async fn an_edge_reconnects_in_time_after_its_own_link_returns() {
    need!(NEED);
    let street = SharedNetwork::new();
    let site = gateway().await;
    let scene = OutageSetup::on(&street, &site, "edge-1").await;
    scene.host.down();
    scene.edge.wrote("could not dial", 1, SOON).await;
    scene.host.up();
    back_in_time(&scene, BACK).await;
}

#[tokio::test]
async fn an_edge_that_waits_long_dials_as_soon_as_its_network_changes() {
    need!(NEED);
    let (street, site) = (SharedNetwork::new(), gateway().await);
    // Repeated equal failures are logged at debug level only.
    let patient = |edge: Causeway| {
        let edge = edge.env("CAUSEWAY_BACKOFF_SILENT_MAX", "10m");
        edge.env("CAUSEWAY_LOG_FILTER", "info,causeway_edge=debug")
    };
    let scene = OutageSetup::with(&street, &site, "edge-1", patient).await;
    scene.host.down();
    // The pause after the sixth failure is four to eight seconds long.
    scene.edge.wrote("could not dial", 6, SOON).await;
    scene.host.up();
    back_in_time(&scene, BACK).await;
}

#[tokio::test]
async fn an_edge_that_is_killed_is_out_of_selection_at_once() {
    let app = App::http(|head| match head.path().as_str() {
        "/silent" => answer::silence(),
        _ => answer::ok("here"),
    });
    let app = app.await;
    let site = GatewayProcess::open_to_all("127.0.0.1:0").await;
    let edge = site.join("edge-1", app.port()).await;
    let (client, silent) = (site.nobody(), format!("{URL}silent"));
    let held = async {
        let answer = client.get(&silent).await;
        (answer, Instant::now())
    };
    let killing = async {
        app.head().await;
        edge.kill().await;
        let killed = Instant::now();
        let answer = client.get(URL).await;
        (answer, killed, killed.elapsed())
    };
    let ((held, ended), (next, killed, asked)) = tokio::join!(held, killing);
    // The gateway noticed the end by the closed connection, and not by silence. It counts the end after the streams have ended.
    let ended_tunnels = async |labels: &[(&str, &str)]| {
        let metrics = site.metrics().await;
        metrics.sum("tunnels_ended_total", labels)
    };
    until("the end is counted", async || ended_tunnels(&[]).await == 1).await;
    assert_eq!(ended_tunnels(&[("why", "silent")]).await, 0);
    assert_eq!(
        (held.status, held.reason()),
        (502, "tunnel_lost".to_owned())
    );
    assert_eq!(next.status / 100, 5, "{}", next.text());
    let at_once = Duration::from_secs(1);
    assert!(
        !full() || ended.duration_since(killed) < at_once && asked < at_once,
        "{asked:?}"
    );
}
