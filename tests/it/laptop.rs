//! Commands that users run on their own machines: each as a process, against the `connect` listener of a real gateway.

use crate::world::{
    World,
    app::{App, End, answer},
    edge::Edge,
    gateway::{Build, listener},
    process::{GatewayProcess, binary},
    tool::{Running, Tool, kubectl, need},
    transfer::TransferServer,
};
use causeway_certs::Fingerprint;
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{ErrorFormat, ListenerProtocol, policy},
    state::{Policy, PolicyWriter},
};
use serde_json::{Value, json};
use std::{
    env, fs, io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// Server that answers with what it received, once its client has ended its sending half.
async fn mirror() -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            connections.spawn(async move {
                let mut received = Vec::new();
                if stream.read_to_end(&mut received).await.is_ok() {
                    let _ = stream.write_all(&received).await;
                }
            });
        }
    });
    (address, serving)
}

/// User's machine with a gateway and edge-1, whose port 9100 is an app of bytes.
pub(crate) struct Laptop {
    pub(crate) edge: Edge,
    pub(crate) world: World,
}

impl Laptop {
    /// A user who has logged in with a certificate.
    pub(crate) async fn to(app: SocketAddr) -> Self {
        let laptop = Self::before_login(Self::build(), app).await;
        laptop.login().await;
        laptop
    }

    pub(crate) fn build() -> Build {
        let mut connect = listener("laptops", ListenerProtocol::Connect);
        let build = World::build();
        connect.client_auth.tokens = Some(build.tokens());
        build.token("ann");
        build.listener(connect)
    }

    pub(crate) async fn before_login(build: Build, app: SocketAddr) -> Self {
        let world = Box::pin(build.start()).await;
        let edge = world.edge("edge-1").pool("mill").label("site", "north");
        let edge = edge.service("bytes", app);
        let edge = Box::pin(edge.port_as(9100, Protocol::Tcp, app).join()).await;
        Self { edge, world }
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.world.folder().join("home")
    }

    fn address(&self) -> SocketAddr {
        self.world.listener("laptops")
    }

    /// The command with these arguments, split at blanks.
    pub(crate) fn causeway(&self, line: &str) -> Tool {
        command(&self.home(), line)
    }

    pub(crate) async fn login(&self) {
        let leaf = self.world.client_leaf("tester");
        let certificate = self.world.write(&leaf.chain_pem());
        let key = self.world.write(leaf.key_pem().expose());
        let login = self.causeway(&format!("login {}", self.address()));
        let login = login.args([Path::new("--ca"), &self.world.root_path()]);
        let login = login.args([Path::new("--cert"), &certificate]);
        let done = login.args([Path::new("--key"), &key]).run().await.ok();
        let said = done.text();
        assert!(
            said.contains("as tester; nodes that you may reach: 1"),
            "{said}"
        );
    }
}

pub(crate) fn command(home: &Path, line: &str) -> Tool {
    Tool::new(binary())
        .env("XDG_CONFIG_HOME", home)
        .args(line.split_whitespace())
}

/// Sends a text over a connection to a local port. Returns the answer.
async fn exchange(local: SocketAddr, text: &str) -> io::Result<String> {
    let mut program = TcpStream::connect(local).await?;
    program.write_all(text.as_bytes()).await?;
    program.shutdown().await?;
    let mut answer = String::new();
    program.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The address in the line of a command that has opened a local port.
pub(crate) async fn opened(running: &mut Running) -> SocketAddr {
    let line = running.json().await;
    assert_eq!(line["event"], "listening", "{line}");
    line["address"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn login_stores_a_tested_profile_that_is_private() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    let path = laptop.home().join("causeway/profiles/default.json");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let listed = laptop.causeway("nodes -o json").run().await.ok().json();
    let expected = json!({
        "client": "tester",
        "nodes": [{
            "node": "edge-1", "connected": true, "ports": [9100], "connect": true, "services": ["bytes"],
            "pool": "mill",
            "labels": {"site": "north"},
        }],
    });
    assert_eq!(listed, expected);
    let table = laptop.causeway("nodes").run().await.ok().text();
    assert!(
        table.contains("connected") && table.contains("bytes") && table.contains("site=north"),
        "{table}"
    );
    let config = laptop.causeway("ssh-config").run().await.ok().text();
    assert!(config.starts_with("Host edge-1\n"), "{config}");

    let refused = laptop.causeway(&format!("login {} --profile other --ca", laptop.address()));
    let refused = refused.args([laptop.world.root_path()]).run().await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused.stderr.contains("no credentials were presented"),
        "{}",
        refused.stderr
    );
    assert!(!path.with_file_name("other.json").exists());
}

#[tokio::test]
async fn an_unknown_ca_is_pinned_by_the_flag_that_login_prints() {
    let (app, _serving) = mirror().await;
    let build = Laptop::build();
    let right = build.token("bea");
    let laptop = Laptop::before_login(build, app).await;
    let token = laptop.world.write("");
    let login = format!(
        "login {} --token-file {}",
        laptop.address(),
        token.display()
    );
    fs::write(&token, "cwc1-wrong").unwrap();
    let refused = laptop.causeway(&login).run().await;
    assert_eq!(refused.status.code(), Some(1));
    let root = laptop.world.ca().root();
    let pin = format!("--ca-pin sha256:{}", Fingerprint::of_certificate(root));
    assert!(refused.stderr.contains(&pin), "{}", refused.stderr);

    let other = Fingerprint::digest(b"another CA");
    let wrong = laptop
        .causeway(&format!("{login} --ca-pin {other}"))
        .run()
        .await;
    assert!(wrong.stderr.contains("has another CA"), "{}", wrong.stderr);

    let refused = laptop.causeway(&format!("{login} {pin}")).run().await;
    assert!(
        refused.stderr.contains("token"),
        "the CA is right: {}",
        refused.stderr
    );
    let profile = laptop.home().join("causeway/profiles/default.json");
    assert!(!profile.exists(), "only a login that succeeds is stored");

    fs::write(&token, right).unwrap();
    let login = laptop.causeway(&format!("{login} {pin}"));
    let said = login.run().await.ok().text();
    assert!(
        said.contains("as bea; nodes that you may reach: 1"),
        "{said}"
    );
    // The pinned CA is in the profile, so that the pin is not needed again.
    let echoed = laptop.causeway("connect edge-1:9100").input("hello");
    assert_eq!(echoed.run().await.ok().text(), "hello");
}

#[tokio::test]
async fn a_token_of_a_command_identifies_the_user() {
    let (app, _serving) = mirror().await;
    let build = Laptop::build();
    let token = build.token("bea");
    let laptop = Laptop::before_login(build, app).await;
    let script = laptop.world.write(&format!(
        r#"echo '{{"kind": "ExecCredential", "status": {{"token": "{token}"}}}}'"#
    ));
    let login = laptop.causeway(&format!("login {} --ca", laptop.address()));
    let login = login.args([laptop.world.root_path()]);
    let login = login.args(["--token-command", "sh"]).args([&script]);
    let said = login.run().await.ok().text();
    assert!(said.contains("as bea"), "{said}");
    let echoed = laptop.causeway("connect edge-1:9100").input("hello");
    assert_eq!(echoed.run().await.ok().text(), "hello");
    fs::write(&script, "echo 'not logged in' >&2; exit 1").unwrap();
    let failed = laptop.causeway("connect edge-1:9100").run().await;
    assert_eq!(failed.status.code(), Some(1));
    for part in ["not logged in", "exit status: 1"] {
        assert!(failed.stderr.contains(part), "{}", failed.stderr);
    }
}

#[tokio::test]
async fn a_command_can_print_a_client_certificate_with_its_key() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::before_login(Laptop::build(), app).await;
    let leaf = laptop.world.client_leaf("cleo");
    let status = json!({
        "clientCertificateData": leaf.chain_pem(),
        "clientKeyData": leaf.key_pem().expose(),
        "expirationTimestamp": "2999-01-01T00:00:00Z",
    });
    let printed = |status: &Value| {
        let api = "client.authentication.k8s.io/v1";
        json!({ "apiVersion": api, "kind": "ExecCredential", "status": status }).to_string()
    };
    let file = laptop.world.write(&printed(&status));
    let login = laptop.causeway(&format!("login {} --ca", laptop.address()));
    let login = login.args([laptop.world.root_path()]);
    let login = login.args(["--token-command", "cat"]).args([&file]);
    let said = login.run().await.ok().text();
    assert!(
        said.contains("as cleo; nodes that you may reach: 1"),
        "{said}"
    );
    let echoed = laptop.causeway("connect edge-1:9100").input("hello");
    assert_eq!(echoed.run().await.ok().text(), "hello");

    let half = json!({ "clientCertificateData": leaf.chain_pem() });
    fs::write(&file, printed(&half)).unwrap();
    let failed = laptop.causeway("connect edge-1:9100").run().await;
    assert_eq!(failed.status.code(), Some(1));
    let message = "a certificate without a key";
    assert!(failed.stderr.contains(message), "{}", failed.stderr);
}

#[tokio::test]
async fn commands_use_the_profile_that_a_flag_or_the_environment_names() {
    let (app, _serving) = mirror().await;
    let build = Laptop::build();
    let token = build.token("bea");
    let laptop = Laptop::before_login(build, app).await;
    laptop.login().await;
    let token = laptop.world.write(&token);
    let login = || {
        let login = laptop.causeway(&format!("login {} --ca", laptop.address()));
        let login = login.args([&laptop.world.root_path()]);
        login.args([Path::new("--token-file"), &token])
    };
    let said = login().args(["--profile", "work"]).run().await.ok().text();
    for part in ["as bea", "select it with --profile work"] {
        assert!(said.contains(part), "{said}");
    }
    let said = login().env("CAUSEWAY_PROFILE", "home").run().await;
    let said = said.ok().text();
    assert!(said.contains("select it with --profile home"), "{said}");

    for (variable, flag, client) in [
        ("", None, "tester"),
        ("work", None, "bea"),
        ("home", None, "bea"),
        ("", Some("work"), "bea"),
        ("work", Some("default"), "tester"),
    ] {
        let nodes = laptop.causeway("nodes -o json");
        let nodes = nodes.args(flag.into_iter().flat_map(|name| ["--profile", name]));
        let nodes = if variable.is_empty() {
            nodes
        } else {
            nodes.env("CAUSEWAY_PROFILE", variable)
        };
        let listed = nodes.run().await.ok().json();
        assert_eq!(listed["client"], client, "{variable:?} {flag:?}");
    }
    // The command of ssh names the profile, because ssh may run without the variable.
    let config = laptop
        .causeway("ssh-config")
        .env("CAUSEWAY_PROFILE", "work");
    let config = config.run().await.ok().text();
    assert!(config.contains(" connect --profile work %h:%p"), "{config}");
    let failed = laptop.causeway("nodes").env("CAUSEWAY_PROFILE", "other");
    let failed = failed.run().await;
    assert_eq!(failed.status.code(), Some(1));
    let message = "there is no profile other; there are: default, home, work";
    assert!(failed.stderr.contains(message), "{}", failed.stderr);
}

#[tokio::test]
async fn a_command_runs_again_when_the_gateway_refuses_its_last_token() {
    for errors in [ErrorFormat::Problem, ErrorFormat::Kubernetes] {
        let mut connect = listener("laptops", ListenerProtocol::Connect);
        let build = World::build();
        let (first, tokens) = (build.token("bea"), build.tokens());
        let only_first = fs::read_to_string(&tokens).unwrap();
        let second = build.token("cleo");
        let both = fs::read_to_string(&tokens).unwrap();
        connect.client_auth.tokens = Some(tokens.clone());
        connect.errors = errors;
        let (app, _serving) = mirror().await;
        let mut laptop = Laptop::before_login(build.listener(connect), app).await;
        let script = laptop.world.write(&format!("echo {first}"));
        let login = laptop.causeway(&format!("login {} --ca", laptop.address()));
        let login = login.args([laptop.world.root_path()]);
        let login = login.args(["--token-command", "sh"]).args([&script]);
        login.run().await.ok();
        let mut forward = laptop.causeway("forward edge-1 :9100 --json").start();
        let local = opened(&mut forward).await;
        assert_eq!(exchange(local, "one").await.unwrap(), "one");

        fs::write(&script, format!("echo {second}")).unwrap();
        fs::write(&tokens, both.strip_prefix(&only_first).unwrap()).unwrap();
        laptop.world.reload(|_| {}).unwrap();
        assert_eq!(exchange(local, "two").await.unwrap(), "two", "{errors:?}");
    }
}

#[tokio::test]
async fn nodes_and_service_discovery_show_only_what_the_policy_allows() {
    let rules = json!([
        { "who": { "users": ["tester"] }, "where": { "nodes": ["edge-1"] }, "what": { "ports": [9100] }, "then": "allow" },
        { "who": { "users": ["ann"] }, "where": { "nodes": ["edge-2"] }, "what": { "ports": ["30000-30010"] }, "then": "allow" },
    ]);
    let rules: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    let writer = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
    let build = World::build();
    let token = build.token("ann");
    let mut connect = listener("laptops", ListenerProtocol::Connect);
    connect.client_auth.tokens = Some(build.tokens());
    let build = build.listener(connect).policy(writer.reader());
    let (app, _serving) = mirror().await;
    let laptop = Laptop::before_login(build, app).await;
    laptop.login().await;
    let world = &laptop.world;
    let silent = world.edge("edge-2").port_as(30_005, Protocol::Tcp, app);
    let mut silent = Box::pin(silent.port_as(22, Protocol::Tcp, app).join()).await;

    let resource = async |name: &str| {
        let url = format!("https://{}/.well-known/causeway/{name}", laptop.address());
        let curl = Tool::curl().args([Path::new("--cacert"), &world.root_path()]);
        let bearer = format!("Authorization: Bearer {token}");
        curl.args(["-H", &bearer, &url]).run().await.ok().json()
    };
    let found = resource("http_sd").await;
    let expected =
        json!([{ "targets": ["edge-2:30005"], "labels": { "__meta_causeway_node": "edge-2" } }]);
    assert_eq!(found, expected);

    // A node that is away reports no ports. It is listed if any port would be allowed.
    silent.stop().await;
    world.until_tunnels("edge-2", 0).await;
    assert_eq!(resource("http_sd").await, json!([]));
    let found = resource("http_sd?port=30005").await;
    assert_eq!(found, expected, "it remains a target at a given port");
    let listed = resource("nodes").await;
    let away = json!([{ "node": "edge-2", "connected": false, "ports": [], "connect": true, "labels": {} }]);
    assert_eq!(listed["nodes"], away);
    let own = laptop.causeway("nodes -o json").run().await.ok().json();
    assert_eq!(own["nodes"][0]["node"], "edge-1");
    assert_eq!(own["nodes"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_user_who_may_only_send_requests_connects_to_no_node() {
    let rules = json!([
        { "where": { "nodes": ["edge-1"] }, "what": { "ports": [9100], "methods": ["GET"] }, "then": "allow" },
    ]);
    let rules: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    let writer = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
    let app = App::saying("hello").await;
    let build = Laptop::build().policy(writer.reader());
    let laptop = Laptop::before_login(build, app.address()).await;
    laptop.login().await;
    let listed = laptop.causeway("nodes -o json").run().await.ok().json();
    let row = &listed["nodes"][0];
    assert_eq!(row["node"], "edge-1");
    assert_eq!(row["connect"], false, "{row}");
    let printed = laptop.causeway("ssh-config").run().await;
    let reason = "the gateway allows you to connect to no node";
    assert!(printed.stderr.contains(reason), "{printed:?}");
    assert_eq!(
        (printed.text().as_str(), printed.status.code()),
        ("", Some(1))
    );
    let refused = laptop.causeway("connect edge-1:9100").run().await;
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(app.connections(), 0);
}

#[tokio::test]
async fn connect_copies_both_directions_and_ends_each_by_itself() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    let bytes: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let connect = laptop.causeway("connect edge-1:9100");
    let done = connect.input(bytes.clone()).run().await.ok();
    assert!(done.stdout == bytes, "{} bytes", done.stdout.len());
    assert_eq!(done.stderr, "");
}

#[tokio::test]
async fn connect_reaches_a_service_behind_a_node() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    let connect = laptop.causeway(&format!("connect bytes.edge-1:{}", app.port()));
    let done = connect.input("hello").run().await.ok();
    assert_eq!(done.text(), "hello");
}

#[tokio::test]
async fn connect_fails_with_the_gateways_own_sentence() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    for (target, sentence) in [
        ("edge-9:22", "edge-9"),
        ("edge-1:23", "port 23"),
        ("scanner.edge-1:631", "edge-1 has no service scanner"),
        ("edge-1", "such as edge-1:22"),
        ("edge-1:0", "such as edge-1:22"),
    ] {
        let failed = laptop.causeway(&format!("connect {target}")).run().await;
        assert_eq!(failed.status.code(), Some(1), "{target}");
        assert_eq!(failed.text(), "", "{target}");
        let lines: Vec<_> = failed.stderr.lines().collect();
        assert!(
            lines.len() == 1 && lines[0].starts_with("causeway: ") && lines[0].contains(sentence),
            "{target}: {lines:?}"
        );
    }
}

#[tokio::test]
async fn a_killed_gateway_is_an_error_at_both_ends_and_never_an_end() {
    let listener = "listeners: [{ name: laptops, protocol: connect, listen: \"127.0.0.1:0\", names: [127.0.0.1] }]";
    let site = Box::pin(GatewayProcess::with_listeners(listener)).await;
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = app.local_addr().unwrap().port();
    let _edge = Box::pin(site.join("edge-1", port)).await;
    let home = site.path("home");
    let files = ["ca.pem", "alice.pem", "alice-key.pem"].map(|name| site.path(name));
    let login = command(&home, &format!("login {}", site.listener));
    let login = login.args([Path::new("--ca"), &site.data().join("ca.pem")]);
    let login = login.args([
        Path::new("--cert"),
        &files[1],
        Path::new("--key"),
        &files[2],
    ]);
    login.run().await.ok();

    let mut connect = command(&home, "connect edge-1:9100").start();
    let mut forward = command(&home, "forward edge-1 :9100 --json").start();
    let local = opened(&mut forward).await;
    let mut program = TcpStream::connect(local).await.unwrap();
    let mut sides = Vec::new();
    connect.send("SSH\n").await;
    program.write_all(b"SSH\n").await.unwrap();
    for _ in 0..2 {
        let (mut peer, _) = app.accept().await.unwrap();
        peer.write_all(b"half of it\n").await.unwrap();
        sides.push(peer);
    }
    assert_eq!(connect.line().await, "half of it");
    let mut half = [0; 11];
    program.read_exact(&mut half).await.unwrap();
    let GatewayProcess { gateway, .. } = site;
    gateway.kill().await;
    let failed = connect.over().await;
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    assert!(
        failed.stderr.contains("the session to edge-1:9100 broke"),
        "{failed:?}"
    );
    let error = program.read(&mut half).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    for mut peer in sides {
        let mut rest = Vec::new();
        let ended = peer.read_to_end(&mut rest).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn forward_moves_a_large_transfer_each_way() {
    let server = TransferServer::start().await;
    let laptop = Box::pin(Laptop::to(server.address)).await;
    let mut forward = laptop.causeway("forward edge-1 :9100 --json").start();
    let wire = TcpStream::connect(opened(&mut forward).await)
        .await
        .unwrap();
    server.transfer(wire).await;
}

#[tokio::test]
async fn forward_keeps_its_ports_while_the_node_is_away() {
    let (app, _serving) = mirror().await;
    let Laptop { mut edge, world } = Laptop::to(app).await;
    let home = world.folder().join("home");
    // One attempt without a time limit, which the gateway answers at once.
    let line = "forward edge-1 :9100 :9101 --wait 0s --json";
    let mut forward = command(&home, line).start();
    let [served, refused] = [opened(&mut forward).await, opened(&mut forward).await];
    assert_eq!(exchange(served, "one").await.unwrap(), "one");
    assert_eq!(forward.json().await["event"], "connection");

    let mut program = TcpStream::connect(refused).await.unwrap();
    program.read(&mut [0; 1]).await.unwrap_err();
    let event = forward.json().await;
    assert_eq!(event["event"], "refused");
    assert_eq!(event["target"], "edge-1:9101");

    edge.stop().await;
    world.until_tunnels("edge-1", 0).await;
    let error = exchange(served, "two").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    let event = forward.json().await;
    assert!(
        event["reason"].as_str().unwrap().contains("not connected"),
        "{event}"
    );
    // This one waits for the node, which does not come in time.
    let mut impatient = command(&home, "forward edge-1 :9100 --wait 2s --json").start();
    let address = opened(&mut impatient).await;
    let error = exchange(address, "none").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    let event = impatient.json().await;
    assert_eq!(event["event"], "refused", "{event}");
    assert!(
        event["reason"].as_str().unwrap().contains("not connected"),
        "{event}"
    );
    let mut waiting_forward = command(&home, "forward edge-1 :9100 --wait 2m --json").start();
    let waiting_address = opened(&mut waiting_forward).await;
    let (answer, started) =
        tokio::join!(exchange(waiting_address, "three"), Box::pin(edge.start()));
    started.unwrap();
    assert_eq!(answer.unwrap(), "three");
    assert_eq!(exchange(served, "four").await.unwrap(), "four");
}

#[tokio::test]
async fn forward_prints_its_addresses_as_kubectl_does_and_nothing_else_to_a_pipe() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    let mut forward = laptop.causeway("forward edge-1 :9100").start();
    let line = forward.line().await;
    let (local, remote) = line
        .strip_prefix("Forwarding from ")
        .and_then(|rest| rest.split_once(" -> "))
        .unwrap();
    assert_eq!(remote, "9100");
    let mut program = TcpStream::connect(local).await.unwrap();
    program.write_all(b"x").await.unwrap();
    program.shutdown().await.unwrap();
    program.read_to_end(&mut Vec::new()).await.unwrap();
    forward.signal("TERM").await;
    let ended = forward.over().await.ok();
    assert_eq!((ended.text().as_str(), ended.stderr.as_str()), ("", ""));

    let refused = laptop.causeway("forward edge-1").run().await;
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(refused.stderr.contains("no port to forward"), "{refused:?}");
}

/// `script` gives the command a terminal. The key Ctrl-C ends the command.
#[tokio::test]
async fn forward_prints_a_line_for_each_event_on_a_terminal() {
    need!("script");
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let laptop = Laptop::to(app.local_addr().unwrap()).await;
    // The key interrupts a shell between `script` and the command, too.
    let command = format!("exec '{}' forward edge-1 :9100 :9101", binary());
    let script = Tool::new("script").args(["-qec", &command, "/dev/null"]);
    let script = script.env("XDG_CONFIG_HOME", laptop.home());
    let mut forward = script.start();
    let mut locals = Vec::new();
    for port in ["9100", "9101"] {
        let line = forward.line().await;
        let local = line.strip_prefix("Forwarding from ").unwrap();
        let local = local.strip_suffix(&format!(" -> {port}")).unwrap();
        locals.push(local.parse::<SocketAddr>().unwrap());
    }

    for is_broken in [false, true] {
        let mut program = TcpStream::connect(locals[0]).await.unwrap();
        let (mut peer, _) = app.accept().await.unwrap();
        let handling = format!("Handling connection for {}", locals[0].port());
        assert_eq!(forward.line().await, handling);
        program.write_all(b"question").await.unwrap();
        peer.read_exact(&mut [0; 8]).await.unwrap();
        if is_broken {
            peer.set_zero_linger().unwrap();
            drop(peer);
            program.read(&mut [0]).await.unwrap_err();
            let line = forward.line().await;
            assert!(line.starts_with("causeway: edge-1:9100: "), "{line}");
        } else {
            // An end in order has no line.
            drop(peer);
            assert_eq!(program.read(&mut [0]).await.unwrap(), 0);
        }
    }
    let mut program = TcpStream::connect(locals[1]).await.unwrap();
    program.read(&mut [0]).await.unwrap_err();
    let line = forward.line().await;
    assert!(line.starts_with("causeway: edge-1:9101: "), "{line}");
    assert!(line.contains("does not serve port 9101"), "{line}");
    forward.send("\x03").await;
    let ended = forward.over().await.ok();
    // The terminal shows the key.
    assert_eq!(ended.text().trim_start_matches("^C"), "", "{ended:?}");
}

#[tokio::test]
async fn proxy_serves_curl_by_http_connect_and_socks5() {
    need!("curl");
    let app = App::saying("hello").await;
    let laptop = Laptop::to(app.address()).await;
    let mut proxy = laptop.causeway("proxy --listen 127.0.0.1:0 --json").start();
    let local = opened(&mut proxy).await;
    let (http, socks) = (format!("http://{local}"), format!("socks5h://{local}"));
    let url = "http://edge-1:9100/";
    for arguments in [
        vec!["-p", "-x", &http],
        vec!["-x", &http],
        vec!["-x", &socks],
    ] {
        let curl = Tool::curl().args(&arguments).args([url]);
        assert_eq!(curl.run().await.ok().text(), "hello");
        assert_eq!(proxy.json().await["target"], "edge-1:9100");
    }
    let refused = Tool::curl().args(["-p", "-x", &http, "http://edge-1:23/"]);
    let refused = refused.args(["-w", "%{http_connect}"]).run().await;
    assert!(refused.text().ends_with("403"), "{refused:?}");
    let refused = Tool::curl()
        .args(["-x", &socks, "http://edge-9:23/"])
        .run()
        .await;
    // curl's code of an error of the proxy's protocol.
    assert_eq!(refused.status.code(), Some(97), "{refused:?}");
    for (url, status, reason) in [
        ("http://edge-1:23/", "403", "port 23"),
        ("http://edge-9/", "502", "edge-9"),
    ] {
        let plain = Tool::curl().args(["-x", &http, url, "-w", "%{http_code}"]);
        let plain = plain.run().await.ok().text();
        let is_refused = plain.ends_with(status) && plain.contains(reason);
        assert!(is_refused, "{url}: {plain}");
    }
    let open = laptop.causeway("proxy --listen 0.0.0.0:0").run().await;
    assert!(open.stderr.contains("not a loopback address"), "{open:?}");
}

/// Requests for URLs with `http://`, which the command forwards itself.
#[tokio::test]
async fn proxy_forwards_plain_requests_and_their_failures() {
    need!("curl");
    let app = App::http(|head| match head.path().as_str() {
        "/mirror" => answer::mirror(),
        "/cut" => answer::close_in_mid_body(),
        "/close" => answer::close(),
        "/endless" => answer::endless(),
        _ => answer::ok("hello"),
    })
    .await;
    let laptop = Laptop::to(app.address()).await;
    let mut proxy = laptop.causeway("proxy --listen 127.0.0.1:0 --json").start();
    let local = opened(&mut proxy).await;
    let http = format!("http://{local}");
    let curl = |path: &str, arguments: &[&str]| {
        let url = format!("http://edge-1:9100{path}");
        let curl = Tool::curl().args(["-x", &http, &url, "-w", "%{http_code}"]);
        curl.args(arguments)
    };

    let body = "y".repeat(3_000_000);
    // With `Content-Length`, and chunked.
    for arguments in [["--data-binary", "@-"], ["-T", "-"]] {
        let upload = curl("/mirror", &arguments).input(body.clone());
        let mirrored = upload.run().await.ok().text();
        let length = mirrored.len();
        assert!(mirrored == format!("{body}200"), "{length} bytes");
    }
    let cut = curl("/cut", &[]).run().await;
    // curl's codes of a transfer that broke off: by its end, or by a reset.
    assert!(matches!(cut.status.code(), Some(18 | 56)), "{cut:?}");
    let closed = curl("/close", &[]).run().await.ok().text();
    let is_502 = closed.contains("closed the connection") && closed.ends_with("502");
    assert!(is_502, "{closed}");
    let endless = curl("/endless", &["-m", "1"]).run().await;
    assert_eq!(endless.status.code(), Some(28), "{endless:?}");
    // The app learns that curl left. The connections before ended in order.
    while app.end().await != End::Reset {}
}

/// Also a request whose `Host` is another one, which counts for nothing.
#[tokio::test]
async fn proxy_refuses_ambiguous_requests() {
    let app = App::saying("hello").await;
    let laptop = Laptop::to(app.address()).await;
    let mut proxy = laptop.causeway("proxy --listen 127.0.0.1:0 --json").start();
    let local = opened(&mut proxy).await;
    let sent = async |head: &str| {
        let mut wire = TcpStream::connect(local).await.unwrap();
        wire.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        wire.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let target = "GET http://edge-1:9100/last HTTP/1.1\r\n";
    for refused in [
        format!("{target}Host: edge-1:9100\r\nHost: edge-1:9100\r\n\r\n"),
        format!(
            "{target}Host: edge-1:9100\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        "GET /last HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n".to_owned(),
    ] {
        let answer = sent(&refused).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    }
    let answer = sent(&format!("{target}Host: edge-2\r\nX-Last: yes\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let last = app.head().await;
    assert_eq!(last.value("x-last").as_deref(), Some("yes"), "the only one");
    assert_eq!(last.values("host"), ["edge-1:9100"]);
}

#[tokio::test]
async fn the_kubectl_plugin_is_the_same_program() {
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    let plugin = laptop.world.folder().join("kubectl-causeway");
    std::os::unix::fs::symlink(binary(), &plugin).unwrap();
    let plugin = |line: &str| {
        Tool::new(&plugin)
            .env("XDG_CONFIG_HOME", laptop.home())
            .args(line.split_whitespace())
    };
    let echoed = plugin("connect edge-1:9100").input("hello").run().await;
    assert_eq!(echoed.ok().text(), "hello");
    let help = plugin("forward --help").run().await.ok().text();
    assert!(help.contains("Usage: kubectl causeway forward "), "{help}");
}

/// kubectl runs `kubectl-causeway` of its `PATH` for `kubectl causeway`.
#[tokio::test]
async fn kubectl_finds_the_plugin_in_its_path() {
    need!("kubectl");
    let (app, _serving) = mirror().await;
    let laptop = Laptop::to(app).await;
    let folder = laptop.world.folder().join("bin");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(binary(), folder.join("kubectl-causeway")).unwrap();
    let mut path = folder.into_os_string();
    path.push(":");
    path.push(env::var_os("PATH").unwrap());
    let kubectl = |line: &str| {
        let kubectl = Tool::new(kubectl().unwrap()).env("PATH", &path);
        let kubectl = kubectl.env("XDG_CONFIG_HOME", laptop.home());
        kubectl.args(line.split_whitespace())
    };
    let listed = kubectl("causeway nodes").run().await.ok().text();
    let row = listed.lines().find(|line| line.starts_with("edge-1 "));
    assert!(row.is_some_and(|row| row.contains("9100")), "{listed}");
    let echoed = kubectl("causeway connect edge-1:9100").input("hello");
    assert_eq!(echoed.run().await.ok().text(), "hello");
    let failed = kubectl("causeway connect edge-1:23").run().await;
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    assert!(failed.stderr.contains("port 23"), "{}", failed.stderr);
}
