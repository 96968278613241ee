//! Listeners for other clients than kube-apiserver: kubelets with TLS passthrough, and kubectl through a proxy.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use libtest_mimic::Trial;
use serde_json::Value;

use crate::{
    steps::{self, NODES, by},
    world::{
        Way, World, assets,
        causeway::BINARY,
        net::CLOUD,
        process::{Process, Program, ToolOutput, until},
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        by(
            "listeners::a_kubelet_ends_tls_itself_behind_passthrough".to_owned(),
            Way::Unix,
            a_kubelet_ends_tls_itself_behind_passthrough,
        ),
        by(
            "listeners::kubectl_uses_the_gateway_as_a_proxy".to_owned(),
            Way::Unix,
            kubectl_uses_the_gateway_as_a_proxy,
        ),
    ]
}

const PASSTHROUGH: &str = "127.0.0.1:10273";
const PROXY: &str = "127.0.0.1:10274";

/// Adds a listener to the gateway, and waits until it is open.
pub(crate) fn open(world: &World, listener: &str, address: &str) {
    let more = format!("\nlisteners:\n  - {listener}\n");
    let road = world.the_road();
    road.gateway_anew(|text| text.replacen("\nlisteners:\n", &more, 1));
    until("the listener is open", || {
        std::net::TcpStream::connect(address).is_ok()
    });
}

/// Returns the fingerprint of the first certificate in this text.
fn fingerprint(pem: Vec<u8>) -> String {
    let openssl = Program::new("openssl").words("x509 -noout -fingerprint -sha256");
    openssl.input(pem).run().ok().text()
}

fn a_kubelet_ends_tls_itself_behind_passthrough(world: &mut World) {
    let listener = format!(
        "{{ name: passthrough, protocol: passthrough, listen: \"{PASSTHROUGH}\", port: 10250, anonymous: true }}"
    );
    open(world, &listener, PASSTHROUGH);
    let pki = |name: &str| world.cluster.pki.path(name);
    for (namespace, node) in NODES {
        let client = Program::new("openssl").words("s_client -verify_return_error -CAfile");
        let client = client.args([pki("ca.pem")]);
        let client = client.args(["-connect", PASSTHROUGH, "-servername", node]);
        let shown = fingerprint(client.run().ok().stdout);
        let own = fs::read(pki(&format!("{node}-kubelet.pem"))).unwrap();
        assert_eq!(shown, fingerprint(own), "{node}");

        let get = |more: &[String]| {
            let curl = Program::new("curl").words("-q -sS -w %{stderr}%{http_code} --cacert");
            let curl = curl.args([pki("ca.pem")]).args(more);
            let to = format!("{node}:10250:{PASSTHROUGH}");
            let curl = curl.args(["--connect-to", &to]);
            curl.args([format!("https://{node}:10250/pods")]).run().ok()
        };
        let with = ["--cert", "--key"].map(str::to_owned);
        let [cert, key] = with;
        let answer = get(&[
            cert,
            pki("kubelet-client.pem"),
            key,
            pki("kubelet-client.key"),
        ]);
        let pods: Value = serde_json::from_slice(&answer.stdout).unwrap();
        let pods = pods["items"].as_array().unwrap();
        let is_ours = |pod: &&Value| pod["metadata"]["namespace"] == namespace;
        assert!(pods.iter().filter(is_ours).count() >= 3, "{pods:?}");
        // The kubelet refuses this client: the gateway has no certificate to show in its place.
        assert_eq!(get(&[]).stderr, "401");
    }
}

/// A user whose only way to the API server is the gateway.
struct User<'a> {
    world: &'a World,
    folder: PathBuf,
    token: String,
}

impl<'a> User<'a> {
    fn new(world: &'a World) -> Self {
        let folder = world.path("user");
        fs::create_dir_all(&folder).unwrap();
        let clients = folder.join("clients");
        let create = Program::new(BINARY).words("client token --name ann --file");
        let token = create.args([&clients]).run().ok().text();
        let listener = format!(
            "{{ name: proxy, protocol: connect, listen: \"{PROXY}\", direct_networks: [{CLOUD}], \
             client_auth: {{ tokens: \"{}\" }} }}",
            clients.display(),
        );
        open(world, &listener, PROXY);
        let token = token.trim().to_owned();
        Self {
            world,
            folder,
            token,
        }
    }

    /// Starts `causeway proxy` after a login with the token.
    fn local_proxy(&self) -> (Process, SocketAddr) {
        let file = self.folder.join("token");
        fs::write(&file, &self.token).unwrap();
        let causeway = || Program::new(BINARY).env("XDG_CONFIG_HOME", self.folder.join("home"));
        let login = causeway().words("login").args([PROXY]);
        let login = login.args(["--ca".into(), self.world.the_road().ca()]);
        login.args(["--token-file".into(), file]).run().ok();
        let proxy = causeway().words("proxy --listen 127.0.0.1:0 --json");
        let mut proxy = proxy.start(&self.folder.join("proxy.log"));
        proxy.says("listening");
        let line: Value = serde_json::from_str(proxy.output().lines().next().unwrap()).unwrap();
        let address = line["address"].as_str().unwrap().parse().unwrap();
        (proxy, address)
    }

    /// Returns an administrator's kubeconfig with this proxy. It trusts the cluster and the gateway, because kubectl verifies both by
    /// the same CAs.
    fn kubeconfig(&self, proxy_url: &str) -> PathBuf {
        let pki = |name: &str| self.world.cluster.pki.path(name);
        let both = [PathBuf::from(pki("ca.pem")), self.world.the_road().ca()];
        let both: Vec<_> = both
            .iter()
            .map(|file| fs::read_to_string(file).unwrap())
            .collect();
        let authorities = self.folder.join("ca.pem");
        fs::write(&authorities, both.concat()).unwrap();
        let text = fs::read_to_string(pki("admin.kubeconfig")).unwrap();
        let own = format!("certificate-authority: {}", pki("ca.pem"));
        assert!(text.contains(&own), "{text}");
        let ours = format!(
            "certificate-authority: {}, proxy-url: '{proxy_url}'",
            authorities.display()
        );
        let file = self.folder.join("kubeconfig");
        fs::write(&file, text.replace(&own, &ours)).unwrap();
        file
    }

    fn kubectl(&self, program: &Path, config: &Path, line: &str) -> Program {
        let config = format!("--kubeconfig={}", config.display());
        let kubectl = Program::new(program).args([config]).words(line);
        kubectl.env("HOME", &self.folder)
    }
}

/// The proxies are a `connect` listener with TLS, as `https://` (kubernetes/kubernetes#126134), and `causeway proxy` on the user's machine.
/// kubectl shows its client certificate to the `https://` proxy as well, which does not know its CA and accepts tokens.
fn kubectl_uses_the_gateway_as_a_proxy(world: &mut World) {
    let user = User::new(world);
    let (_proxy, local) = user.local_proxy();
    let ours = world.cluster.assets.join("kubectl");
    let old = assets::old_kubectl();
    if old.is_none() {
        crate::missing("kubectl 1.20 (run .ci/setup)");
    }
    let version = |password: &str| {
        let config = user.kubeconfig(&format!("https://ann:{password}@{PROXY}"));
        user.kubectl(&ours, &config, "get --raw /version").run()
    };
    assert!(version(&user.token).ok().text().contains("gitVersion"));
    let message = version("wrong").failed();
    assert!(message.contains("token: not known"), "{message}");
    for url in [
        format!("https://ann:{}@{PROXY}", user.token),
        format!("http://{local}"),
        format!("socks5://{local}"),
    ] {
        let config = user.kubeconfig(&url);
        // An old kubectl cannot open sessions through the other kinds of proxy.
        let old = old.iter().filter(|_| url.starts_with("http:"));
        for program in [&ours].into_iter().chain(old) {
            let run = |line: &str| user.kubectl(program, &config, line);
            let logs = run("logs -n a ticker").run().ok().text();
            assert!(logs.starts_with("ticker on edge-1\n"), "{url}: {logs}");
            let input = steps::noise(1 << 20);
            let echo: ToolOutput = run("exec -i -n b echo -- cat")
                .input(input.clone())
                .run()
                .ok();
            assert!(echo.stdout == input, "{url}: {}", echo.stdout.len());
            let failed = run("exec -n a echo -- sh -c").args(["exit 7"]).run();
            assert_eq!(failed.code, Some(7), "{url}: {failed:?}");
        }
    }
}
