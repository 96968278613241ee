//! The pages, each as its reader follows it: the blocks in their order, and the conditions that the text names in between.

use super::{blocks::ROOT, page::Page};
use crate::world::{
    process::{ExitedProcess, Process},
    tool::{corkscrew, kubectl, openssh_server},
};
use std::{fs, path::Path};

/// Starts a gateway as the pages require it.
pub(super) async fn gateway(page: &Page, config: &str) -> Process {
    let file = "cat >/etc/causeway/gateway.yaml <<'EOF'";
    page.commands(&format!(
        "mkdir -p /etc/causeway; causeway ca init 2>&1; {file}\n{config}\nEOF"
    ))
    .await;
    start_gateway(page).await
}

/// Starts the gateway of `/etc/causeway/gateway.yaml`.
async fn start_gateway(page: &Page) -> Process {
    let mut gateway = page.start_commands("causeway gateway --config /etc/causeway/gateway.yaml");
    gateway.wait_for_line("gateway ready").await;
    gateway
}

/// Starts the edge of the node, which joins with a token and serves these ports.
pub(super) async fn edge(page: &Page, ports: &str) -> Process {
    page.commands(&format!(
        "printf 'gateways: [gw.example.com:10262]\nports: {ports}\n' >/etc/causeway/edge.yaml"
    ))
    .await;
    start_edge(page).await
}

/// Starts the edge of `/etc/causeway/edge.yaml` with a token.
async fn start_edge(page: &Page) -> Process {
    let edge = "CAUSEWAY_JOIN=$(causeway token create --node edge-1) causeway edge --config /etc/causeway/edge.yaml";
    let mut edge = page.start_commands(edge);
    edge.wait_for_line("tunnel registered").await;
    edge
}

/// An app on port 9100 of the node, which serves the reader's folder.
async fn app(page: &Page) -> Process {
    let app = page.start_commands("exec python3 -m http.server 9100 --bind 127.0.0.1");
    page.until("curl -sSf -o app.html http://127.0.0.1:9100/")
        .await;
    app
}

/// Apps on these ports of the node.
async fn apps(page: &Page, ports: &[u16]) -> Vec<Process> {
    let mut apps = Vec::new();
    for port in ports {
        let app = format!("exec python3 -m http.server {port} --bind 127.0.0.1");
        apps.push(page.start_commands(&app));
        page.until(&format!("curl -sSf -o app.html http://127.0.0.1:{port}/"))
            .await;
    }
    apps
}

pub(super) const ADVERTISE: &str = "tunnel: { advertise: [gw.example.com:10262] }";

/// Returns the token that a process printed, which is the reader's to paste.
async fn token(process: &mut Process) -> String {
    let dots = |line: &str| line.matches('.').count() == 3 && !line.contains(' ');
    process.line("a token", dots).await
}

/// `cargo` in place of a build: the binary is built already.
async fn cargo(page: &Page) {
    let cargo = r#"case "$*" in
"run --release -- "*) shift 3; exec causeway "$@" ;;
"build --release") install -D "$(command -v causeway)" target/release/causeway ;;
*) exit 9 ;;
esac"#;
    page.stand_in("/usr/local/bin/cargo", cargo).await;
}

/// The demo, and each command that it prints.
async fn demo(page: &mut Page) -> ExitedProcess {
    cargo(page).await;
    let mut demo = page.start("cargo run");
    demo.line("ready", |line| line == "ready").await;
    let message = demo.written().stdout;
    let commands: Vec<&str> = message
        .lines()
        .filter(|line| line.starts_with("curl "))
        .collect();
    assert!(commands.len() > 2, "{message}");
    for command in commands {
        assert!(!page.commands(command).await.is_empty(), "{command}");
    }
    page.stop_all().await;
    demo.ended().await.ok()
}

pub(super) async fn readme(page: &mut Page) {
    let demo = demo(page).await;
    page.shows("causeway demo: a gateway", &demo.stdout);
    let mut gateway = page.start("causeway gateway --tunnel-advertise");
    gateway.wait_for_line("gateway ready").await;
    let token = token(&mut gateway).await;
    let _app = app(page).await;
    let mut edge = page.start_with("causeway edge", &token);
    edge.wait_for_line("tunnel registered").await;
    let ran = page.run("--key alice-key.pem").await.stdout;
    assert!(ran.contains("Directory listing"), "{ran}");
}

pub(super) async fn first_tunnel(page: &mut Page) {
    let demo = demo(page).await;
    page.shows("causeway demo: a gateway", &demo.stdout);
}

pub(super) async fn two_machines(page: &mut Page) {
    let mut gateway = page.start("causeway gateway --config");
    gateway.wait_for_line("gateway ready").await;
    let token = token(&mut gateway).await;
    let mut edge = page.start_with("causeway edge --config", &token);
    edge.wait_for_line("tunnel registered").await;
    page.until("curl -sSf -o app.html http://127.0.0.1:9100/")
        .await;
    let ran = page.run("causeway status").await.stdout;
    assert_eq!(ran.matches("Directory listing").count(), 2, "{ran}");
    let shown = page.text("NODE    STATE");
    let heads = [&shown, &ran].map(|text| text.lines().next().unwrap().split_whitespace());
    let [shown, ran] = heads.map(Vec::from_iter);
    assert_eq!(ran, shown);
}

pub(super) async fn company_ca(page: &mut Page) {
    let company = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=company";
    page.commands(&format!(
        "{company} -keyout ca.key -out ca.crt 2>&1; cp ca.crt company.pem"
    ))
    .await;
    let _gateway = gateway(page, ADVERTISE).await;
    let _edge = edge(page, "{ 9100: {} }").await;
    let _app = app(page).await;
    page.commands("causeway client certificate --name alice --out . 2>&1")
        .await;
    page.run("ca csr").await;
    page.run("openssl x509").await;
    page.run("ca import chain.pem").await;
    let call = "curl -sSf --cert alice.pem --key alice-key.pem --connect-to edge-1:9100:127.0.0.1:10263 https://edge-1:9100/";
    page.until(&format!("{call} --cacert company.pem")).await;
    page.run("ca import --remove").await;
    page.until(&format!("! {call} --cacert company.pem")).await;
    page.commands(&format!("{call} --cacert /var/lib/causeway/ca.pem"))
        .await;
}

pub(super) async fn enrol_nodes(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    let outputs = page.console("token create --node").await;
    page.commands("echo 'gateways: [gw.example.com:10262]' >/etc/causeway/edge.yaml")
        .await;
    let mut edge = page.start_with("CAUSEWAY_JOIN", outputs[0].trim());
    edge.wait_for_line("tunnel registered").await;
    let ran = page.run("causeway status").await.stdout;
    assert!(ran.contains("edge-1  connected"), "{ran}");
}

/// Makes files of an external CA: `leaf NAME SUBJECT-ALTERNATIVE-NAME USAGE`.
const EXTERNAL_CA: &str = r#"
mkdir -p /etc/causeway/tls && cd /etc/causeway/tls
new() { openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "$@" 2>&1; }
leaf() {
  new -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
  printf 'subjectAltName=%s\nextendedKeyUsage=%s\nauthorityKeyIdentifier=keyid\n' "$2" "$3" >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -days 90 -extfile "$1.ext" -out "$1.pem" 2>&1
}
new -x509 -days 90 -subj /CN=external -keyout ca.key -out ca.pem
leaf gateway URI:spiffe://example.com/gateway serverAuth
leaf listener DNS:edge-1 serverAuth
leaf edge-1 URI:spiffe://example.com/edge/edge-1 clientAuth
"#;

pub(super) async fn external_ca(page: &mut Page) {
    page.commands(EXTERNAL_CA).await;
    page.write("# gateway\n", "/etc/causeway/gateway.yaml")
        .await;
    page.write("# edge-1\n", "/etc/causeway/edge.yaml").await;
    let _gateway = start_gateway(page).await;
    page.run("causeway node add").await;
    let mut edge = page.start("causeway edge --config");
    edge.wait_for_line("tunnel registered").await;
}

pub(super) async fn forwarding_headers(page: &mut Page) {
    page.commands("ip address add 10.0.0.5/32 dev lo").await;
    let _gateway = gateway(page, ADVERTISE).await;
    let _edge = edge(page, "{ 8080: { target: \"127.0.0.1:9100\" } }").await;
    let _app = app(page).await;
    page.write("trusted_proxies", "/etc/causeway/gateway.yaml")
        .await;
    page.run("causeway reload").await;
    page.commands("curl -sSf -H 'Host: edge-1' http://10.0.0.5:8080/")
        .await;
}

/// In place of an editor: what its user writes.
const EDITOR: &str = r#"exec sed -i -e 's/^  advertise: \[\]/  advertise: [gw.example.com:10262]/' \
  -e 's/^gateways: \[\]/gateways: [gw.example.com:10262]/' -e 's/^ports: {}/ports: { 9100: {} }/' "$1""#;

/// In place of systemd: the commands of the units, with a token of the gateway where the page has TOKEN.
const SYSTEMCTL: &str = r#"case "$*" in
"enable --now causeway-gateway") causeway gateway --config /etc/causeway/gateway.yaml >gateway.log 2>&1 & ;;
"enable --now causeway-edge")
  sed -i "s/TOKEN/$(causeway token create --node edge-1)/" /etc/causeway/edge.env
  . /etc/causeway/edge.env; export CAUSEWAY_JOIN
  causeway edge --config /etc/causeway/edge.yaml >edge.log 2>&1 & ;;
"status causeway-edge") until causeway health --ready --data-dir /var/lib/causeway-edge; do sleep 0.1; done ;;
*) exit 9 ;;
esac"#;

/// The units themselves are run by `packaging/test`.
pub(super) async fn install(page: &mut Page) {
    cargo(page).await;
    page.run("cargo build").await;
    page.commands("causeway completions bash; causeway man man; causeway --version")
        .await;
    page.stand_in("packaging/build", "echo ./causeway_0_amd64.deb")
        .await;
    let unpack = format!(
        "[ \"$*\" = 'install -y ./causeway_0_amd64.deb' ] && install -D -t /etc/causeway {ROOT}/packaging/*.yaml"
    );
    page.stand_in("/usr/local/bin/apt-get", &unpack).await;
    page.stand_in("/usr/local/bin/editor", EDITOR).await;
    page.stand_in("/usr/local/bin/systemctl", SYSTEMCTL).await;
    page.run("systemctl enable").await;
    page.until("causeway status | grep 'edge-1 *connected'")
        .await;
}

pub(super) async fn jwt(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    page.write("issuer:", "/etc/causeway/gateway.yaml").await;
    page.run("causeway reload").await;
    let status = "curl -sS -o /dev/null -w '%{http_code}' --cacert /var/lib/causeway/ca.pem --connect-to edge-1:9100:127.0.0.1:10263 https://edge-1:9100/";
    let _edge = edge(page, "{ 9100: {} }").await;
    assert_eq!(page.commands(status).await, "401");
}

/// The CA of a site, the certificate of its kube-apiserver, and the kubeconfig of a user in the cloud. `new` makes a certificate.
const SITE: &str = r#"ip address add 192.168.7.20/32 dev lo
mkdir -p /etc/causeway /etc/kubernetes/pki .kube
new() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 "$@" 2>&1; }
new -subj /CN=site -keyout ca.key -out /etc/kubernetes/pki/ca.crt
new -subj /CN=kube-apiserver -CA /etc/kubernetes/pki/ca.crt -CAkey ca.key -keyout api.key -out api.pem \
  -addext basicConstraints=critical,CA:FALSE -addext subjectAltName=DNS:kubernetes,IP:192.168.7.20
cat >.kube/config <<'EOF'
apiVersion: v1
kind: Config
current-context: mill
contexts: [{ name: mill, context: { cluster: mill, user: ann } }]
clusters: [{ name: mill, cluster: { server: "https://192.168.7.20:6443", certificate-authority: /etc/kubernetes/pki/ca.crt } }]
users: [{ name: ann, user: { token: ann } }]
EOF"#;

/// The three nodes of the site are three edges of one machine. `tests/kube/site_api.rs` has the same with a real kube-apiserver.
pub(super) async fn edge_clusters(page: &mut Page) {
    page.commands(SITE).await;
    page.commands("causeway ca init 2>&1").await;
    page.write("name: mill", "/etc/causeway/gateway.yaml").await;
    page.commands(&format!("echo '{ADVERTISE}' >>/etc/causeway/gateway.yaml"))
        .await;
    let _gateway = start_gateway(page).await;
    let created = page.run("--pool mill").await.stdout;
    let tokens = created
        .lines()
        .filter(|line| line.matches('.').count() == 3);
    page.write("health_check:", "/etc/causeway/edge.yaml").await;
    let _api = page.start_commands(&format!(
        "exec python3 {ROOT}/tests/it/clients/site_api.py 192.168.7.20 6443 api.pem api.key"
    ));
    let mut edges = Vec::new();
    for token in tokens {
        let mut edge = page.start_commands(&format!(
            "echo $$ >{0}.pid
CAUSEWAY_JOIN={token} exec causeway edge --config /etc/causeway/edge.yaml --data-dir /var/lib/mill-{0} --admin-listen 127.0.0.1:0",
            edges.len()
        ));
        edge.wait_for_line("tunnel registered").await;
        edges.push(edge);
    }
    assert_eq!(edges.len(), 3, "{created}");
    install_kubectl(page).await;
    // The nodes are left out until their first health check has ended.
    page.until("! causeway status | grep unhealthy").await;
    page.until("curl -sSf --insecure https://127.0.0.1:16443/readyz")
        .await;
    let command = "kubectl --server";
    while let Some(edge) = edges.pop() {
        let listed = page.run(command).await.stdout;
        assert!(listed.contains("machine-of-the-site"), "{listed}");
        page.commands(&format!("kill $(cat {}.pid)", edges.len()))
            .await;
        edge.ended().await.ok();
    }
    let ended = page.start(command).ended().await;
    assert_ne!(ended.code, Some(0), "no node is left: {ended:?}");
}

/// A user with a key and a configuration of ssh, in the home directory of root, and what a server of ssh needs.
const SSH: &str = r#"sed -i -e "s|^\(root:.*:\)/root:|\1$HOME:|" -e /^sshd:/d /etc/passwd
echo 'sshd:x:74:65534::/run/sshd:/usr/sbin/nologin' >>/etc/passwd
mkdir -m 755 /run/sshd
mkdir -m 700 .ssh
for key in host .ssh/id_ed25519; do ssh-keygen -q -t ed25519 -N '' -f $key; done
cp .ssh/id_ed25519.pub .ssh/authorized_keys
printf 'Host *\n  StrictHostKeyChecking accept-new\n  BatchMode yes\n' >.ssh/config
printf '%s\n' "HostKey $HOME/host" 'ListenAddress 127.0.0.1' 'StrictModes no' 'PidFile none' 'Subsystem sftp internal-sftp' >sshd_config"#;

/// Starts the server of ssh on port 22 of the node.
async fn start_sshd(page: &Page) -> Process {
    page.commands(SSH).await;
    let folder = openssh_server().expect("it is needed");
    let folder = folder.display();
    let mut server = page.start_commands(&format!(
        "export LD_LIBRARY_PATH=$(echo {folder}/usr/lib/*-linux-gnu)
exec {folder}/usr/sbin/sshd -D -e -f ~/sshd_config"
    ));
    server.wait_for_line("Server listening").await;
    server
}

/// Listener of the page in front of the blocks.
const LAPTOPS: &str = "listeners: [{ name: laptops, protocol: connect, listen: \"127.0.0.1:10443\", names: [gw.example.com] }]";

/// Gives the gateway a first address that drops packets. Prints the addresses in the order of the system.
const SILENT_ADDRESS: &str = r"ip address add 2001:db8::1/128 dev lo nodad
echo '2001:db8::1 gw.example.com' >>/etc/hosts
nft add table inet silent
nft 'add chain inet silent input { type filter hook input priority 0; }'
nft add rule inet silent input ip6 daddr 2001:db8::1 tcp dport 10443 drop
getent ahosts gw.example.com";

pub(super) async fn laptop(page: &mut Page) {
    let _gateway = gateway(page, &format!("{ADVERTISE}\n{LAPTOPS}")).await;
    let ports = "{ 22: { scheme: tcp }, 80: { target: \"127.0.0.1:9100\" }, 9100: {} }";
    let _edge = edge(page, ports).await;
    let _app = app(page).await;
    let _sshd = start_sshd(page).await;
    page.commands(
        "cp /var/lib/causeway/ca.pem .; causeway client certificate --name ann --out . 2>&1",
    )
    .await;
    let first = page.commands(SILENT_ADDRESS).await;
    assert!(first.starts_with("2001:db8::1 "), "{first}");
    let said = page.run("causeway login").await.stdout;
    assert!(
        said.contains("as ann; nodes that you may reach: 1"),
        "{said}"
    );
    let listed = page.run("causeway nodes").await.stdout;
    assert!(listed.contains("22,80,9100"), "{listed}");

    // The first command is a session, in which the reader types. The second one runs a program.
    let sessions = page.start_with("causeway ssh root@edge-1", "echo a session");
    let said = sessions.ended().await.ok().stdout;
    assert!(
        said.contains("a session") && said.contains("load average"),
        "{said}"
    );
    page.run("causeway ssh-config").await;
    page.commands("ssh root@edge-1 touch by-ssh; scp -q root@edge-1:by-ssh by-scp; ls by-scp")
        .await;

    let mut forward = page.start("causeway forward");
    forward.wait_for_line(" -> 9100").await;
    let printed = forward.written().stdout;
    page.shows("Forwarding from", &printed);
    let shown = page.text("Forwarding from");
    for line in shown.lines().take(2) {
        assert!(printed.contains(line), "{line}: {printed}");
    }
    page.commands("curl -sSf http://127.0.0.1:8080/").await;

    let mut proxy = page.start("causeway proxy");
    proxy.wait_for_line("127.0.0.1:1080").await;
    let text = fs::read_to_string(Path::new(ROOT).join("docs/howto/laptop.md")).unwrap();
    let row = text.lines().find(|line| line.starts_with("| curl |"));
    let settings = row.unwrap().split('`').skip(1).step_by(2);
    let mut count = 0;
    for setting in settings {
        page.commands(&format!("curl -sSf {setting} http://edge-1:9100/"))
            .await;
        count += 1;
    }
    assert_eq!(count, 2, "{row:?}");

    page.run("kubectl-causeway").await;
    install_kubectl(page).await;
    let listed = page.commands("kubectl causeway nodes").await;
    assert!(listed.contains("22,80,9100"), "{listed}");
}

/// The listeners of the page, one example after another.
pub(super) async fn listeners(page: &mut Page) {
    const FILE: &str = "/etc/causeway/gateway.yaml";
    page.commands("ip address add 10.0.0.5/32 dev lo; causeway ca init 2>&1")
        .await;
    page.write("name: scrape", FILE).await;
    page.run("client token").await;
    page.run("--check-config").await;
    let _gateway = start_gateway(page).await;
    let _edge = edge(
        page,
        "{ 22: { scheme: tcp }, 9100: {}, 10250: { scheme: tcp } }",
    )
    .await;
    let _app = app(page).await;
    let _sshd = start_sshd(page).await;
    let session = "echo a session";
    let ran = page.start_with("ssh -p 2201", session).ended().await.ok();
    let listings = ran.stdout.matches("<h1>Directory listing").count();
    assert!(listings == 2 && ran.stdout.contains("a session"), "{ran:?}");

    page.write("name: kubelets", FILE).await;
    page.commands("causeway reload").await;
    page.commands(KUBELET).await;
    let _kubelet = page.start_commands(
        "exec openssl s_server -quiet -accept 10250 -cert /var/lib/kubelet/pki/kubelet.crt -key kubelet.key",
    );
    page.until("openssl s_client -connect 127.0.0.1:10250 </dev/null")
        .await;
    let ran = page.run("openssl s_client").await.stdout;
    assert!(ran.replace(' ', "").contains("subject=CN=edge-1"), "{ran}");

    page.write("name: proxy-lan", FILE).await;
    page.commands("causeway reload").await;
    let by_nc = page.start_with("-X connect", session).ended().await.ok();
    assert!(by_nc.stdout.contains("a session"), "{by_nc:?}");
    let corkscrew = corkscrew().expect("it is needed");
    page.stand_in(
        "/usr/local/bin/corkscrew",
        &format!("exec {} \"$@\"", corkscrew.display()),
    )
    .await;
    let token = "echo \"ann:$(cat /etc/causeway/bearer)\" >.ssh/causeway-token";
    page.commands(token).await;
    page.commands("sed -i '/anonymous/d' /etc/causeway/gateway.yaml; causeway reload")
        .await;
    let by_corkscrew = page.start_with("corkscrew", session).ended().await.ok();
    assert!(
        by_corkscrew.stdout.contains("a session"),
        "{by_corkscrew:?}"
    );
}

pub(super) async fn monitor(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    let _edge = edge(page, "{ 9100: {} }").await;
    let ran = page.run("causeway health").await.stdout;
    assert!(ran.contains("edge-1  connected"), "{ran}");
}

pub(super) async fn policy(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    let _edge = edge(page, "{ 9100: {} }").await;
    let rules = "no shells on gold";
    page.write(rules, "/etc/causeway/policy.yaml").await;
    page.write(rules, "policy.yaml").await;
    page.write("expect:", "expectations.yaml").await;
    page.add("policy: /etc", "/etc/causeway/gateway.yaml").await;
    page.run("causeway reload").await;
    page.console("policy check").await;
}

pub(super) async fn revoke_nodes(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    let mut edge = edge(page, "{ 9100: {} }").await;
    page.console("node revoke").await;
    edge.wait_for_line("tunnel ended").await;
    page.until("! causeway status | grep edge-1").await;
}

pub(super) async fn rotate_ca(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    let _edge = edge(page, "{ 9100: {} }").await;
    page.run("ca rotate prepare").await;
    page.until("causeway status | grep 'trusted by 1 of 1 connected edges'")
        .await;
    page.run("ca rotate activate").await;
    page.until("causeway status | grep 'used by 1 of 1 connected edges'")
        .await;
    page.run("ca rotate retire").await;
    page.until("causeway status | grep 'edge-1 *connected'")
        .await;
    // A restore needs a directory that no gateway uses.
    page.stop_all().await;
    page.run("ca backup").await;
    let _gateway = start_gateway(page).await;
}

/// An app that has a kubelet's port and makes its own certificate.
const KUBELET: &str = "mkdir -p /var/lib/kubelet/pki /etc/kubernetes/pki
new() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=edge-1 \"$@\" 2>&1; }
new -keyout kubelet.key -out /var/lib/kubelet/pki/kubelet.crt
new -keyout /etc/causeway/kubelet-client.key -out /etc/causeway/kubelet-client.crt
cp /var/lib/kubelet/pki/kubelet.crt /etc/kubernetes/pki/ca.crt";

pub(super) async fn upstreams(page: &mut Page) {
    let _gateway = gateway(page, ADVERTISE).await;
    let edge = edge(page, "{ 10250: { scheme: tcp } }").await;
    page.commands(KUBELET).await;
    page.commands("causeway client certificate --name alice --out . 2>&1")
        .await;
    page.commands("cp /etc/causeway/edge.yaml edge.yaml").await;

    page.write("50051: { scheme: h2c }", "/etc/causeway/edge.yaml")
        .await;
    let message = page.run("causeway reload").await.stdout;
    assert!(
        message.contains("serves 22, 8080, 9100, 10250, 50051"),
        "{message}"
    );

    page.add("pin: true", "/etc/causeway/gateway.yaml").await;
    page.commands("cp edge.yaml /etc/causeway/; causeway reload")
        .await;
    let _kubelet = page.start_commands(
        "exec openssl s_server -quiet -www -accept 10250 -cert /var/lib/kubelet/pki/kubelet.crt -key kubelet.key",
    );
    page.until("curl -sSf -o kubelet.html --cacert /var/lib/causeway/ca.pem --cert alice.pem --key alice-key.pem \
        --connect-to edge-1:10250:127.0.0.1:10263 https://edge-1:10250/").await;
    let outputs = page.console("causeway node pins").await;
    let key = outputs[1].split_whitespace().next().unwrap();
    assert!(outputs[0].contains(key), "{outputs:?}");
    assert!(!page.commands("causeway node pins").await.contains(key));
    drop(edge);
}

/// Makes kubectl of Debian 12 the machine's kubectl.
async fn install_kubectl(page: &Page) {
    let kubectl = format!("exec {} \"$@\"", kubectl().expect("it is needed").display());
    page.stand_in("/usr/local/bin/kubectl", &kubectl).await;
}

pub(super) async fn api_cache(page: &mut Page) {
    page.commands(&format!(
        "install -D -t /etc/causeway/objects {ROOT}/examples/compose/objects/*"
    ))
    .await;
    page.commands("ip address add 10.20.0.11/32 dev lo").await;
    page.write("manifests:", "manifests.yaml").await;
    let manifests = fs::read_to_string(page.file("manifests.yaml")).unwrap();
    let _gateway = gateway(page, &format!("{ADVERTISE}\n{manifests}")).await;
    page.write("members:", "/etc/causeway/edge.yaml").await;
    page.commands("echo 'gateways: [gw.example.com:10262]' >>/etc/causeway/edge.yaml")
        .await;
    let _edge = start_edge(page).await;
    install_kubectl(page).await;
    page.until("curl -sSf http://127.0.0.1:10270/apis/discovery.k8s.io/v1/endpointslices")
        .await;
    let read = page.run("limit=5").await.stdout;
    assert!(read.contains("web-1"), "{read}");
    let mut watch = page.start("endpointslices -A -w");
    watch.wait_for_line("web-1").await;
}

pub(super) async fn frp(page: &mut Page) {
    let prepare = "ip address add 203.0.113.5/32 dev lo; mkdir /etc/causeway; causeway ca init 2>&1
causeway client token --name bob --file /etc/causeway/clients >token";
    page.commands(prepare).await;
    page.write("name: ssh-edge-1", "/etc/causeway/gateway.yaml")
        .await;
    let _gateway = start_gateway(page).await;
    page.write("8080: {}", "/etc/causeway/edge.yaml").await;
    let _edge = start_edge(page).await;
    let _apps = apps(page, &[22, 8080]).await;
    // In place of ssh: a request through the ProxyCommand.
    let ssh = r#"printf 'GET / HTTP/1.0\r\n\r\n' | sh -c "exec ${2#ProxyCommand=}""#;
    page.stand_in("/usr/local/bin/ssh", ssh).await;
    let ran = page.run("ssh -o ProxyCommand").await.stdout;
    assert_eq!(ran.matches("Directory listing").count(), 4, "{ran}");
    page.run("nft add table").await;
    let rules = page.commands("nft list table ip causeway-move").await;
    assert!(rules.contains("dport 6001 redirect to :16001"), "{rules}");
}

pub(super) async fn rathole(page: &mut Page) {
    // The client and the gateway are in the network of `anonymous_from`.
    let prepare = "ip address add 198.51.100.1/32 dev lo; hostname nas; mkdir /etc/causeway; causeway ca init 2>&1
printf '127.0.0.1 localhost\n198.51.100.1 gw.example.com\n' >/etc/hosts";
    page.commands(prepare).await;
    page.write("name: ssh-nas", "/etc/causeway/gateway.yaml")
        .await;
    let _gateway = start_gateway(page).await;
    page.write("22: { scheme: tcp }", "/etc/causeway/edge.yaml")
        .await;
    let mut edge = page.start_commands(
        "CAUSEWAY_JOIN=$(causeway token create --node nas) causeway edge --config /etc/causeway/edge.yaml",
    );
    edge.wait_for_line("tunnel registered").await;
    let _apps = apps(page, &[22]).await;
    page.stand_in("/usr/local/bin/ssh", "exec curl -sSf http://${3#*@}:$2/")
        .await;
    let ran = page.run("ssh -p").await.stdout;
    assert!(ran.contains("Directory listing"), "{ran}");
    page.run("nft add table").await;
    let rules = page.commands("nft list table ip causeway-move").await;
    assert!(rules.contains("dport 5202 redirect to :15202"), "{rules}");
}

/// An etcd server, which is ready if a write succeeds.
pub(super) async fn shared_state(page: &mut Page) {
    page.commands("mkdir -p /etc/causeway; echo hunter2 >/etc/causeway/etcd.password")
        .await;
    let _etcd = page.start_commands("exec etcd --data-dir /var/lib/etcd");
    page.until("etcdctl put /ready 1").await;
    page.run("etcdctl role add").await;
    let root = "etcdctl user add root:root; etcdctl user grant-role root root; etcdctl auth enable";
    page.commands(root).await;
    let as_user = "etcdctl --user causeway:hunter2";
    page.commands(&format!(
        "{as_user} put /causeway/ca 1; ! {as_user} get /ready; {as_user} del /causeway/ca"
    ))
    .await;
    let section = "etcd: { endpoints: [\"http://127.0.0.1:2379\"], user: causeway, password_file: /etc/causeway/etcd.password }";
    page.commands(&format!(
        "causeway ca init --data-dir \"$PWD/old\"
echo \"data_dir: $PWD/old\" >gateway-old.yaml
printf '%s\\n' \"data_dir: $PWD/new\" 'state: {{ {section} }}' >gateway.yaml"
    ))
    .await;
    page.run("causeway state migrate").await;
}

pub(super) async fn konnectivity(page: &mut Page) {
    let before = "/etc/kubernetes/egress_selector_configuration.yaml";
    page.commands(&format!("mkdir /etc/kubernetes; echo before >{before}"))
        .await;
    superedge(page).await;
    let kept = page.commands("cat /etc/kubernetes/egress-konnectivity.yaml");
    assert_eq!(kept.await, "before\n");
}

pub(super) async fn superedge(page: &mut Page) {
    page.commands("mkdir -p /etc/kubernetes").await;
    page.run("k8s egress-config").await;
    let written = page.commands("cat /etc/kubernetes/egress.yaml").await;
    let socket = "udsName: \"/run/causeway/kube-apiserver.sock\"";
    assert!(written.contains(socket), "{written}");
}

/// Commands that make the files that configurations of the book name.
pub(super) fn configured_files() -> String {
    let more = r#"
leaf kubelet DNS:causeway-gateway clientAuth
mkdir -p /etc/kubernetes/pki /etc/causeway/objects /var/log/causeway
cp ca.pem /etc/kubernetes/pki/ca.crt
echo hunter2 >/etc/causeway/etcd.password
for name in kubelet.pem kubelet-client.crt; do cp kubelet.pem ../$name; done
for name in kubelet.key kubelet-client.key; do cp kubelet.key ../$name; done
causeway client token --name prometheus --file ../clients >token
echo 'rules: [{ then: allow, who: { users: ["*"] } }]' >/etc/causeway/policy.yaml
cluster='"clusters": [{ "name": "it", "cluster": { "server": "https://127.0.0.1:6443" } }]'
user='"users": [{ "name": "it", "user": { "token": "token" } }]'
context='"contexts": [{ "name": "it", "context": { "cluster": "it", "user": "it" } }], "current-context": "it"'
for name in kubernetes/kubelet.conf causeway/gateway.kubeconfig; do echo "{ $cluster, $user, $context }" >/etc/$name; done"#;
    format!("{EXTERNAL_CA}\n{more}")
}
