use super::*;
use causeway_certs::{Ca, OpenMode, Store};
use causeway_edge::status::{ConnectedGatewaysStatus, LastErrorStatus, TunnelStatus};
use causeway_gateway::worker::{WorkerId, Workers};
use causeway_gateway::{Config, Gateway};
use causeway_rt::task::TaskGroup;
use std::path::Path;
use tempfile::TempDir;
use tokio::time::timeout;
use tracing::info_span;

const SOON: Duration = Duration::from_mins(2);

/// The service manager's end of the socket, which receives the notifications.
struct Systemd {
    folder: TempDir,
    socket: tokio::net::UnixDatagram,
}

impl Systemd {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let socket = tokio::net::UnixDatagram::bind(folder.path().join("notify")).unwrap();
        Self { folder, socket }
    }

    fn notify(&self, watchdog: Option<Duration>) -> SystemdNotifier {
        SystemdNotifier::new(
            connect(self.folder.path().join("notify").as_os_str()).unwrap(),
            watchdog,
        )
    }

    /// Receives the next datagram.
    async fn heard(&self) -> String {
        let mut words = [0; 4096];
        let read = timeout(SOON, self.socket.recv(&mut words)).await.unwrap();
        String::from_utf8(words[..read.unwrap()].to_vec()).unwrap()
    }

    /// Receives datagrams up to the first one with this beginning.
    async fn heard_until(&self, begin: &str) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            all.push(self.heard().await);
            if all.last().is_some_and(|last| last.starts_with(begin)) {
                return all;
            }
        }
    }

    /// Whether one of the datagrams that have arrived is a watchdog message.
    fn has_heard_watchdog(&self) -> bool {
        let mut words = [0; 4096];
        let mut heard = false;
        while let Ok(read) = self.socket.try_recv(&mut words) {
            heard |= &words[..read] == b"WATCHDOG=1";
        }
        heard
    }

    fn nothing_more(&self) {
        let mut words = [0; 4096];
        assert!(self.socket.try_recv(&mut words).is_err());
    }
}

#[tokio::test]
async fn ready_is_sent_once_and_a_status_line_on_each_change() {
    let systemd = Systemd::new();
    let notify = systemd.notify(None);
    for status in ["serving", "serving", "two\nlines"] {
        notify.notify_ready(status);
    }
    notify.notify_alive();
    assert_eq!(systemd.heard().await, "READY=1");
    assert_eq!(systemd.heard().await, "STATUS=serving");
    assert_eq!(systemd.heard().await, "STATUS=two lines");
    systemd.nothing_more();
}

#[tokio::test]
async fn a_stopping_process_reports_its_maximum_stop_time() {
    let systemd = Systemd::new();
    let notify = systemd.notify(None);
    notify.notify_stopping(Duration::from_mins(2));
    notify.notify_stopping(Duration::from_mins(2));
    assert_eq!(
        systemd.heard().await,
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=130000000"
    );
    assert_eq!(
        systemd.heard().await,
        "STATUS=stopping: open streams have at most 2m to end"
    );
    systemd.nothing_more();
}

#[tokio::test]
async fn an_abstract_socket_is_one_too() {
    let name = format!("causeway-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let socket = UnixDatagram::bind_addr(&address).unwrap();
    let notify = SystemdNotifier::new(connect(OsStr::new(&format!("@{name}"))).unwrap(), None);
    notify.notify_ready("here");
    let mut words = [0; 64];
    assert_eq!(socket.recv(&mut words).unwrap(), "READY=1".len());
}

#[tokio::test]
async fn without_a_service_manager_the_work_is_done_all_the_same() {
    let notify = SystemdNotifier::default();
    notify.notify_not_joined("nobody hears");
    assert_eq!(notify.run_join(async { 7 }).await, 7);
}

#[tokio::test]
async fn a_service_manager_that_does_not_read_causes_no_delay() {
    let systemd = Systemd::new();
    let notify = systemd.notify(None);
    for round in 0..10_000 {
        notify.notify_status(&round.to_string());
    }
}

/// Returns a gateway in `folder` that runs on these workers.
fn gateway(folder: &Path, workers: &Workers) -> causeway_gateway::Bound {
    let store = Store::open(folder, OpenMode::Create).unwrap();
    store
        .save_ca(&Ca::create(&"causeway.test".parse().unwrap()).unwrap())
        .unwrap();
    let loopback = "127.0.0.1:0".parse().unwrap();
    let mut config = Config {
        data_dir: folder.to_owned(),
        listeners: Vec::new(),
        ..Config::default()
    };
    (config.tunnel.listen, config.admin.listen) = (loopback, loopback);
    config.timeouts.drain = Duration::from_millis(100);
    Gateway::new(config)
        .workers(workers.clone())
        .bind()
        .unwrap()
}

#[tokio::test]
async fn a_gateway_lives_only_as_long_as_each_of_its_workers_answers() {
    let (folder, systemd) = (TempDir::new().unwrap(), Systemd::new());
    let workers = Workers::start(2).unwrap();
    let notify = systemd.notify(Some(Duration::from_secs(2)));
    let (stop, hung) = (CancellationToken::new(), TaskGroup::default());
    let bound = gateway(folder.path(), &workers);
    let pulse = bound.watchdog();
    let asked = (stop.clone(), Duration::from_millis(100));
    let told = async {
        let begin = systemd.heard_until("STATUS=0 nodes connected").await;
        assert!(begin.contains(&"READY=1".to_owned()), "{begin:?}");
        assert!(begin.contains(&"WATCHDOG=1".to_owned()), "{begin:?}");

        let (release, held) = std::sync::mpsc::channel::<()>();
        hung.spawn_on(
            workers.runtime(WorkerId(1)),
            info_span!("hang"),
            async move {
                let _ = held.recv();
            },
        );
        systemd
            .heard_until("STATUS=workers [1] do not respond")
            .await;
        // All notifications from here on follow a complete round without a response: none of them is a watchdog message. The other
        // worker may be late on a busy machine, which changes the status.
        let mut heard = vec![systemd.has_heard_watchdog()];
        for _ in 0..3 {
            pulse.unresponsive_workers(Duration::from_secs(1)).await;
            heard.push(systemd.has_heard_watchdog());
        }
        assert_eq!(heard, [false; 4]);

        release.send(()).unwrap();
        systemd.heard_until("WATCHDOG=1").await;
        stop.cancel();
        systemd
            .heard_until("STOPPING=1\nEXTEND_TIMEOUT_USEC=10100000")
            .await;
    };
    tokio::join!(
        notify.run_gateway(pulse.clone(), asked, bound.run(stop.clone())),
        told
    );
}

#[tokio::test]
async fn an_edge_that_cannot_join_yet_counts_as_started_and_says_why() {
    let systemd = Systemd::new();
    let notify = systemd.notify(None);
    notify.notify_not_joined("gw:10262: connection refused");
    assert_eq!(systemd.heard().await, "READY=1");
    let status = "STATUS=not joined yet: gw:10262: connection refused";
    assert_eq!(systemd.heard().await, status);
}

/// Status of an edge that knows two gateways and has no tunnel.
fn edge_without_tunnels() -> Status {
    Status {
        node: "edge-1".into(),
        version: "0",
        instance: String::new(),
        started: 0,
        state: "connecting",
        tunnels: Vec::new(),
        gateways: vec!["a:1".into(), "b:1".into()],
        reached: None,
        trouble: None,
        certificate: None,
        api_cache: None,
        egress: None,
        heartbeat: None,
    }
}

fn tunnel(slot: u32) -> TunnelStatus {
    TunnelStatus {
        slot,
        state: "active",
        gateway: "a:1".into(),
        address: None,
        since: 0,
        round_trip_us: 0,
        streams: 0,
        opened: 0,
        sent: 0,
        received: 0,
        unread: 0,
    }
}

#[test]
fn an_edge_status_names_its_connection_or_the_obstacle() {
    let mut status = edge_without_tunnels();
    assert_eq!(
        edge_status_line(&status),
        "edge-1: connecting to 2 gateways"
    );
    status.trouble = Some(LastErrorStatus {
        at: 0,
        what: "nobody answers".into(),
        refused: false,
        retry_at: 0,
    });
    assert_eq!(
        edge_status_line(&status),
        "edge-1: not connected: nobody answers; retrying"
    );
    status.tunnels = vec![tunnel(0), tunnel(1)];
    assert_eq!(
        edge_status_line(&status),
        "edge-1: connected to 1 of 2 gateways: a:1"
    );
    status.gateways.truncate(1);
    assert_eq!(edge_status_line(&status), "edge-1: connected to a:1");
    status.tunnels[0].address = Some("192.0.2.1:1".parse().unwrap());
    status.tunnels[1].address = Some("192.0.2.2:1".parse().unwrap());
    assert_eq!(
        edge_status_line(&status),
        "edge-1: connected to a:1 (192.0.2.1:1), a:1 (192.0.2.2:1)"
    );
    status.reached = Some(ConnectedGatewaysStatus {
        gateways: 2,
        of: 3,
        wanted: None,
    });
    assert_eq!(
        edge_status_line(&status),
        "edge-1: connected to 2 of 3 gateways: a:1 (192.0.2.1:1), a:1 (192.0.2.2:1)"
    );
    for (of, wanted) in [(2, None), (2, Some(2)), (2, Some(3)), (3, Some(2))] {
        status.reached = Some(ConnectedGatewaysStatus {
            gateways: 2,
            of,
            wanted,
        });
        assert!(
            !edge_status_line(&status).contains("of"),
            "{}",
            edge_status_line(&status)
        );
    }
    status.reached = Some(ConnectedGatewaysStatus {
        gateways: 2,
        of: 4,
        wanted: Some(3),
    });
    assert_eq!(
        edge_status_line(&status),
        "edge-1: connected to 2 of 4 gateways (3 wanted): a:1 (192.0.2.1:1), a:1 (192.0.2.2:1)"
    );
}
