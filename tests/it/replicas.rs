//! One edge with tunnels to several gateways behind one name: a Service in front of these loses no request when one of them
//! goes.

use crate::{
    fleet::{Load, load},
    world::{
        PATIENCE,
        app::App,
        names::NameServer,
        process::{GatewayProcess, OPEN, Process, causeway, causeway_asking},
        tool::need,
        until,
    },
};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
};

/// Address of the name server.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 53, 17, 2);
/// Log message of a gateway about a new tunnel. Without a tunnel the gateway says that the node is not connected.
const ARRIVED: &str = "edge-1 connected";
const URL: &str = "http://edge-1:9100/";

/// The gateways' common port.
fn gateway(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 53, 18, number)
}

/// The gateways with one CA and one known node; and the addresses of their name.
struct Replicas {
    sites: Vec<GatewayProcess>,
    names: Arc<Mutex<Vec<Ipv4Addr>>>,
    _server: NameServer,
}

/// Copies the records of a node from another gateway, as documented.
async fn take_up_nodes(site: &GatewayProcess, other: &GatewayProcess) {
    let remove = causeway("node remove edge-1").flag("--data-dir", site.data());
    remove.run().await.ok();
    let status = async || site.nobody().get(URL).await.status;
    assert_eq!(status().await, 404);
    let nodes = |site: &GatewayProcess| site.data().join("nodes.json");
    fs::copy(nodes(other), nodes(site)).unwrap();
    site.gateway.signal("HUP").await;
    until("the node is known", async || status().await == 503).await;
}

impl Replicas {
    /// Starts this many gateways, which have no name yet.
    async fn start(count: u8, app: &App) -> Self {
        let first = GatewayProcess::listening(&format!("{}:0", gateway(1)), OPEN).await;
        drop(first.join("edge-1", app.port()).await);
        // The line about this tunnel must not count as one of a later tunnel.
        first.gateway.wrote(ARRIVED, 1, PATIENCE).await;
        let port = first.tunnel.parse::<SocketAddr>().unwrap().port();
        let mut sites = vec![first];
        for number in 2..=count {
            let tunnel = SocketAddr::from((gateway(number), port)).to_string();
            let site = sites[0].twin_at(&tunnel).await;
            take_up_nodes(&site, &sites[0]).await;
            sites.push(site);
        }
        let names = Arc::new(Mutex::new(Vec::new()));
        let now = names.clone();
        let now = move || now.lock().unwrap().clone();
        Self {
            sites,
            names,
            _server: NameServer::start(SERVER, now).await,
        }
    }

    /// From now on the name has these addresses.
    fn lead_to(&self, numbers: &[u8]) {
        *self.names.lock().unwrap() = numbers.iter().map(|number| gateway(*number)).collect();
    }

    /// The node's edge, which knows only the name.
    fn edge(&self, app: &App) -> Process {
        let first = &self.sites[0];
        let port = first.tunnel.parse::<SocketAddr>().unwrap().port();
        causeway_asking(SERVER.into(), &first.path(""))
            .args(["edge", "--admin-listen", "127.0.0.1:0"])
            .flag("--gateway", format!("gateways.test:{port}"))
            .args(["--tunnels-gateways", "every"])
            .args(["--tunnels-resolve-after", "500ms"])
            .flag("--data-dir", first.edge_data("edge-1"))
            .flag(
                "--ports",
                format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port()),
            )
            .start()
    }

    /// Returns the number of tunnels that have connected to this gateway.
    fn arrived(&self, number: u8) -> usize {
        let site = &self.sites[usize::from(number) - 1];
        site.gateway.written().count(ARRIVED)
    }
}

#[tokio::test]
async fn gateways_behind_one_name_change_without_request_loss() {
    need!("mounts");
    let app = App::saying("here").await;
    let mut replicas = Replicas::start(3, &app).await;
    // The edge joined at the first one.
    let before = replicas.arrived(1);
    replicas.lead_to(&[1, 2]);
    let _edge = replicas.edge(&app);
    until("the edge is at both", async || {
        replicas.arrived(1) > before && replicas.arrived(2) == 1
    })
    .await;

    let (one, two) = (&replicas.sites[0], &replicas.sites[1]);
    let shared = Load::default();
    let acting = async {
        // One load before the signal, and one after it.
        shared.goes_on(100).await;
        one.gateway.signal("TERM").await;
        until("its listener is closed", async || {
            tokio::net::TcpStream::connect(&one.listener).await.is_err()
        })
        .await;
        replicas.lead_to(&[2, 3]);
        until("the edge is at the new gateway", async || {
            replicas.arrived(3) == 1
        })
        .await;
        shared.goes_on(100).await;
        shared.enough.store(true, Relaxed);
    };
    // As a Service does: to each of them, and to the other one if one is gone.
    let (ones, twos, ()) = tokio::join!(load(one, two, &shared), load(two, one, &shared), acting);
    for met in [&ones, &twos] {
        assert!(
            met.failed.is_empty(),
            "for example {:?}",
            met.failed.first()
        );
        // Each gateway always had a tunnel.
        assert_eq!(met.told, 0, "{met:?}");
        assert!(met.first > 0, "{met:?}");
    }
    assert!(ones.refused > 0 && twos.refused == 0, "{ones:?} {twos:?}");
    // The edge has not dialled the remaining gateway again.
    assert_eq!(replicas.arrived(2), 1);

    // The same without notice: the next request goes to the other gateway, which has had a tunnel all the time.
    let killed = replicas.sites.remove(1);
    drop(killed);
    let three = &replicas.sites[1];
    let answer = three.nobody().get(URL).await;
    assert_eq!(answer.text(), "here");
}
