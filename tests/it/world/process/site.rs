//! A test's own gateway: CA, configuration, process, and the files that edges and clients need.
//!
//! Each site has its own directory and ports, and ends with the test.

use super::{
    Causeway, ExitedProcess, Process, causeway, causeway_asking, causeway_on_a_full_disk,
    causeway_with_files,
};
use crate::world::{
    Metrics, admin,
    client::{Client, ListenerAddress},
    log::Log,
    netns::Host,
    tool::Tool,
    until,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};
use tempfile::TempDir;
use test_summary::unused_port;

/// Listener without authentication and without TLS.
pub(crate) const OPEN: &str = "listeners: [{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }]";

/// The node port that the listener serves.
const PORT: u16 = 9100;

/// A gateway with one https listener, `web`, and a client, `alice`.
pub(crate) struct GatewayProcess {
    folder: TempDir,
    pub(crate) gateway: Process,
    /// The tunnel port.
    pub(crate) tunnel: String,
    pub(crate) admin: String,
    pub(crate) listener: String,
}

impl GatewayProcess {
    /// A running gateway.
    pub(crate) async fn start() -> Self {
        Self::with("").await
    }

    /// A running gateway whose listener admits every client, without TLS.
    pub(crate) async fn open_to_all(tunnel: &str) -> Self {
        Self::listening(tunnel, OPEN).await
    }

    /// A running gateway with further lines of configuration.
    pub(crate) async fn with(configuration: &str) -> Self {
        let listener = "{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100 }";
        Self::with_listeners(&format!("listeners: [{listener}]\n{configuration}")).await
    }

    /// The same, with only these listeners.
    pub(crate) async fn with_listeners(configuration: &str) -> Self {
        Self::listening("127.0.0.1:0", configuration).await
    }

    /// The same with its tunnel port at an address other than loopback.
    pub(crate) async fn listening(tunnel: &str, configuration: &str) -> Self {
        Self::of(folder_with_ca().await, tunnel, configuration).await
    }

    /// A running gateway on a host of a network. Its admin listener has the host's address as well.
    pub(crate) async fn on_host(host: &Host<'_>, port: u16, configuration: &str) -> Self {
        Self::on_host_in(folder_with_ca().await, host, port, configuration).await
    }

    /// Another gateway on a host, with the present files of this one.
    pub(crate) async fn replica_on_host(
        &self,
        host: &Host<'_>,
        port: u16,
        configuration: &str,
    ) -> Self {
        Self::on_host_in(self.copied_folder().await, host, port, configuration).await
    }

    async fn on_host_in(folder: TempDir, host: &Host<'_>, port: u16, configuration: &str) -> Self {
        write(&folder, configuration);
        let admin = format!("{}:0", host.address());
        let tunnel = format!("{}:{port}", host.address());
        let flags = ["--admin-listen", &admin];
        Self::anew(folder, (host.causeway(), &flags), &tunnel).await
    }

    /// A running gateway in a folder with all needed files.
    pub(crate) async fn of(folder: TempDir, tunnel: &str, configuration: &str) -> Self {
        Self::of_by(causeway(""), folder, tunnel, configuration).await
    }

    /// The same by `program`, which finally executes the binary.
    pub(crate) async fn of_by(
        program: Causeway,
        folder: TempDir,
        tunnel: &str,
        configuration: &str,
    ) -> Self {
        write(&folder, configuration);
        Self::anew(folder, (program, &[]), tunnel).await
    }

    /// A running gateway that resolves names only with this server, at its port 53.
    pub(crate) async fn asking(server: IpAddr, configuration: &str) -> Self {
        let folder = folder_with_ca().await;
        let program = causeway_asking(server, folder.path());
        Self::of_by(program, folder, "127.0.0.1:0", configuration).await
    }

    /// Returns the answer about its readiness.
    pub(crate) async fn readyz(&self) -> String {
        let answer = admin::try_get(&self.admin, "/readyz").await;
        answer.unwrap_or_default()
    }

    /// Waits until it is ready without a fault. With shared state, other gateways find its CA there from then on.
    pub(crate) async fn until_ready(&self) {
        until("the gateway is ready", async || {
            self.readyz().await == "ready\n"
        })
        .await;
    }

    /// Returns the output of a gateway that fails to start in this folder.
    pub(crate) async fn refused(folder: &TempDir, configuration: &str) -> ExitedProcess {
        write(folder, configuration);
        let gateway = gateway(causeway(""), folder.path(), "127.0.0.1:0");
        gateway.run().await
    }

    /// Kills the gateway, runs `change` on its data directory, and starts it at the same tunnel port.
    pub(crate) async fn restart(self, change: impl FnOnce(&Path)) -> Self {
        self.again(causeway(""), &[], change).await
    }

    /// The same, started again with these addresses for edges.
    pub(crate) async fn advertising(self, addresses: &str) -> Self {
        self.again(causeway(""), &["--tunnel-advertise", addresses], |_| {})
            .await
    }

    /// The same, started again with files limited to `blocks` of 512 bytes.
    pub(crate) async fn on_a_full_disk(self, blocks: u32) -> Self {
        self.again(causeway_on_a_full_disk(blocks), &[], |_| {})
            .await
    }

    /// The same, started again with at most this many files.
    pub(crate) async fn with_files(self, most: u32) -> Self {
        self.again(causeway_with_files(most), &[], |_| {}).await
    }

    /// The gateway's metrics now.
    pub(crate) async fn metrics(&self) -> Metrics {
        Metrics(admin::get(&self.admin, "/metrics").await)
    }

    /// Returns the admin API's row of a node.
    pub(crate) async fn node(&self, node: &str) -> serde_json::Value {
        self.api(&format!("edges/{node}")).await
    }

    /// Returns the admin API's answer for this path below `/api/v1/`.
    pub(crate) async fn api(&self, path: &str) -> serde_json::Value {
        admin::json(&self.admin, &format!("/api/v1/{path}")).await
    }

    /// Starts a process that takes over from the running one. Returns the running one as well.
    pub(crate) async fn take_over(self, flags: &[&str]) -> (Self, Process) {
        let Self {
            folder,
            gateway: old,
            tunnel,
            ..
        } = self;
        let new = gateway(causeway(""), folder.path(), &tunnel);
        let (gateway, [tunnel_now, admin, listener]) =
            open(new.args(flags).args(["--take-over"])).await;
        assert_eq!(tunnel_now, tunnel);
        let site = Self {
            folder,
            gateway,
            tunnel,
            admin,
            listener,
        };
        (site, old)
    }

    /// Waits until the gateway has ended by itself and starts it at the same tunnel port.
    pub(crate) async fn start_again(self) -> Self {
        let Self {
            folder,
            gateway: old,
            tunnel,
            ..
        } = self;
        old.ended().await.ok();
        Self::anew(folder, (causeway(""), &[]), &tunnel).await
    }

    async fn again(self, program: Causeway, flags: &[&str], change: impl FnOnce(&Path)) -> Self {
        let data = self.data();
        let Self {
            folder,
            gateway: old,
            tunnel,
            ..
        } = self;
        old.kill().await;
        change(&data);
        Self::anew(folder, (program, flags), &tunnel).await
    }

    async fn anew(folder: TempDir, (program, flags): (Causeway, &[&str]), tunnel: &str) -> Self {
        let new = gateway(program, folder.path(), tunnel).args(flags);
        let (gateway, [tunnel, admin, listener]) = open(new).await;
        Self {
            folder,
            gateway,
            tunnel,
            admin,
            listener,
        }
    }

    /// A second gateway that has the present state of this one, and sends edges both addresses.
    pub(crate) async fn twin(&self) -> Self {
        self.twin_at("127.0.0.1:0").await
    }

    /// The same, with its tunnel port here.
    pub(crate) async fn twin_at(&self, tunnel: &str) -> Self {
        self.copy_at(tunnel, &["--tunnel-advertise", &self.tunnel])
            .await
    }

    /// The same, which sends edges only the addresses of its configuration.
    pub(crate) async fn replica_at(&self, tunnel: &str) -> Self {
        self.copy_at(tunnel, &[]).await
    }

    /// Another gateway with the present files of this one, and another configuration.
    pub(crate) async fn replica_with(&self, tunnel: &str, configuration: &str) -> Self {
        Self::of(self.copied_folder().await, tunnel, configuration).await
    }

    /// Returns a folder with the present files of this gateway.
    pub(crate) async fn copied_folder(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        // The copy fails if the gateway replaces a file meanwhile.
        until("the files are copied", async || {
            let copy =
                Tool::new("cp").args(["-a".into(), self.path("."), folder.path().to_owned()]);
            copy.run().await.status.success()
        })
        .await;
        folder
    }

    async fn copy_at(&self, tunnel: &str, flags: &[&str]) -> Self {
        let folder = self.copied_folder().await;
        let configuration = folder.path().join("gateway.yaml");
        let text = fs::read_to_string(&configuration).unwrap();
        let (here, there) = (self.folder.path(), folder.path());
        let text = text.replace(here.to_str().unwrap(), there.to_str().unwrap());
        fs::write(configuration, text).unwrap();
        let second = gateway(causeway(""), folder.path(), tunnel);
        let (gateway, [tunnel, admin, listener]) = open(second.args(flags)).await;
        Self {
            folder,
            gateway,
            tunnel,
            admin,
            listener,
        }
    }

    /// The site's directory.
    pub(crate) fn folder(&self) -> &TempDir {
        &self.folder
    }

    /// A path in the site's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The gateway's data directory.
    pub(crate) fn data(&self) -> PathBuf {
        self.path("gateway")
    }

    /// The data directory of a node's edge.
    pub(crate) fn edge_data(&self, node: &str) -> PathBuf {
        self.path(&format!("edge-of-{node}"))
    }

    /// Removes the address of this gateway from the files of an edge that has joined here. The edge would connect here as well.
    pub(crate) fn forget_gateways(&self, node: &str) {
        let path = self.edge_data(node).join("edge.json");
        let text = fs::read(&path).unwrap();
        let mut identity: serde_json::Value = serde_json::from_slice(&text).unwrap();
        identity["gateways"] = serde_json::Value::Array(Vec::new());
        fs::write(path, identity.to_string()).unwrap();
    }

    /// A token of `token create` with these arguments.
    pub(crate) async fn token(&self, line: &str) -> String {
        let made = causeway("token create").args(line.split_whitespace());
        let made = made.flag("--data-dir", self.data()).run().await.ok();
        made.stdout.trim().to_owned()
    }

    /// Completes `program`: this gateway, the data directory of `node`, and its port 9100, which is `app`.
    pub(crate) fn edge_of(&self, program: Causeway, node: &str, app: u16) -> Causeway {
        program
            .args(["edge", "--admin-listen", "127.0.0.1:0"])
            .flag("--gateway", &self.tunnel)
            .flag("--data-dir", self.edge_data(node))
            .flag(
                "--ports",
                format!("{{{PORT}: {{target: \"127.0.0.1:{app}\"}}}}"),
            )
    }

    /// An edge that has its identity, or gets a token next.
    pub(crate) fn edge(&self, node: &str, app: u16) -> Causeway {
        self.edge_of(causeway(""), node, app)
    }

    /// An edge that has joined and has a tunnel.
    pub(crate) async fn join(&self, node: &str, app: u16) -> Process {
        self.join_by(causeway(""), node, app).await
    }

    /// The same by `program`, which finally executes the binary.
    pub(crate) async fn join_by(&self, program: Causeway, node: &str, app: u16) -> Process {
        let token = self.token(&format!("--node {node}")).await;
        let edge = self.edge_of(program, node, app).flag("--join", token);
        let mut edge = edge.start();
        edge.wait_for_line("tunnel registered").await;
        edge
    }

    /// Returns a client of the first listener, which admits every client without TLS.
    pub(crate) fn nobody(&self) -> Client {
        self.nobody_at(ListenerAddress::Plain(self.listener.parse().unwrap()))
    }

    /// The same at another listener.
    pub(crate) fn nobody_at(&self, place: ListenerAddress) -> Client {
        let root = CertificateDer::from_pem_file(self.data().join("ca.pem")).unwrap();
        Client::new(place, &root, Log::default())
    }

    /// curl of the client alice to a node's port 9100; the argument is the rest of the URL.
    pub(crate) fn curl(&self, node: &str, rest: &str) -> Tool {
        self.curl_as_nobody(node, rest)
            .args([Path::new("--cert"), &self.path("alice.pem")])
            .args([Path::new("--key"), &self.path("alice-key.pem")])
    }

    /// The same without a certificate.
    pub(crate) fn curl_as_nobody(&self, node: &str, rest: &str) -> Tool {
        let to = format!("{node}:{PORT}:{}", self.listener);
        Tool::curl()
            .args([Path::new("--cacert"), &self.data().join("ca.pem")])
            .args(["--connect-to", &to])
            .args([format!("https://{node}:{PORT}/{rest}")])
    }
}

/// Returns a folder with a CA and the certificate of the client `alice`.
async fn folder_with_ca() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("gateway");
    let init = causeway("ca init").flag("--data-dir", &data);
    init.run().await.ok();
    let certificate = causeway("client certificate --name alice")
        .flag("--out", folder.path())
        .flag("--data-dir", &data);
    certificate.run().await.ok();
    folder
}

fn write(folder: &TempDir, configuration: &str) {
    let data = folder.path().join("gateway");
    let text = format!(
        "data_dir: {}\nadmin: {{ listen: \"127.0.0.1:0\" }}\n{configuration}\n",
        data.display()
    );
    fs::write(folder.path().join("gateway.yaml"), text).unwrap();
}

fn gateway(program: Causeway, folder: &Path, tunnel: &str) -> Causeway {
    // At a port that the system chooses, the gateway could not start again while a connection uses that port.
    let tunnel = match tunnel.strip_suffix(":0") {
        Some(host) => format!("{host}:{}", unused_port()),
        None => tunnel.to_owned(),
    };
    program
        .args(["gateway"])
        .flag("--config", folder.join("gateway.yaml"))
        .flag("--tunnel-listen", tunnel)
}

/// Waits until it is ready; its addresses are those in its log.
async fn open(gateway: Causeway) -> (Process, [String; 3]) {
    let mut gateway = gateway.start();
    let ready = gateway.wait_for_line("gateway ready").await;
    let listener = gateway.wait_for_line("listener open").await;
    let addresses = [
        address_after(&ready, "tunnel="),
        address_after(&ready, "admin="),
        address_after(&listener, "address="),
    ];
    (gateway, addresses)
}

/// The address in a log line behind `name`, with any quotes around it.
pub(crate) fn address_after(line: &str, name: &str) -> String {
    let (_, rest) = line
        .split_once(name)
        .unwrap_or_else(|| panic!("no {name} in {line}"));
    let word = rest.split(' ').next().unwrap();
    let word = word.trim_start_matches("Some(");
    let address = word.trim_matches(['"', ')']);
    let parsed = address.parse::<SocketAddr>();
    parsed.unwrap_or_else(|_| panic!("no address behind {name} in {line}"));
    address.to_owned()
}
