//! Programs that users know, through the commands of a laptop: OpenSSH, scp, rsync, PostgreSQL, kubectl. Also OpenSSH with netcat
//! and corkscrew, which need no command of ours.

use crate::{
    laptop::{Laptop, command, opened},
    world::{
        World,
        app::{App, answer, answer::pattern},
        authority::Authority,
        edge::Edge,
        gateway::{anonymous, listener},
        process::{GatewayProcess, Process, binary},
        tool::{Tool, corkscrew, full, kubectl, need, openssh_server, postgresql},
        until,
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{ClientAuth, Listener, ListenerProtocol};
use std::{
    env::consts::ARCH,
    fs::{self, File},
    net::{Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use test_summary::unused_port;
use tokio::{
    net::{TcpListener, TcpStream},
    process::Command,
    task::JoinSet,
};

/// Time limit of a transfer in the long run, for a slow machine.
const TRANSFER: Duration = Duration::from_mins(10);

/// OpenSSH server that starts a process for each connection, in a mount namespace with the user and the directory that it needs.
struct SshServer {
    address: SocketAddr,
    folder: PathBuf,
    _serving: JoinSet<()>,
}

impl SshServer {
    async fn start(folder: &Path) -> Self {
        let folder = folder.join("ssh");
        fs::create_dir(&folder).unwrap();
        for key in ["host", "user"] {
            let keygen = Tool::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]);
            keygen.args([folder.join(key)]).run().await.ok();
        }
        let place = folder.display();
        let config = format!(
            "HostKey {place}/host\nAuthorizedKeysFile {place}/user.pub\nStrictModes no\nPidFile none\n\
             MaxStartups 100\nLogLevel VERBOSE\nSubsystem sftp internal-sftp\n"
        );
        fs::write(folder.join("sshd_config"), config).unwrap();
        let server = openssh_server().unwrap();
        let server = server.display();
        let script = format!(
            "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && \
             {{ grep -v ^sshd: /etc/passwd; echo 'sshd:x:74:65534::/run/sshd:/usr/sbin/nologin'; }} >/run/passwd && \
             mount --bind /run/passwd /etc/passwd && \
             export LD_LIBRARY_PATH=$(echo {server}/usr/lib/*-linux-gnu) && \
             exec {server}/usr/sbin/sshd -i -e -f {place}/sshd_config"
        );
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let log = File::create(folder.join("log")).unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut processes = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut process = serve(stream, &script, log.try_clone().unwrap());
                processes.spawn(async move { drop(process.wait().await) });
            }
        });
        Self {
            address,
            folder,
            _serving: serving,
        }
    }

    /// Returns the log of all connections.
    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap()
    }

    /// Options of ssh, scp and sftp with the user's key and without a configuration.
    fn options(&self) -> Vec<String> {
        let mut options = self.options_with(Path::new("none"));
        options.extend(["-i".to_owned(), self.key()]);
        options
    }

    /// Options with this configuration.
    fn options_with(&self, config: &Path) -> Vec<String> {
        let known = self.folder.join("known_hosts");
        vec![
            "-F".into(),
            config.display().to_string(),
            "-oBatchMode=yes".into(),
            "-oStrictHostKeyChecking=accept-new".into(),
            format!("-oUserKnownHostsFile={}", known.display()),
        ]
    }

    /// The file of the user's key.
    fn key(&self) -> String {
        self.folder.join("user").display().to_string()
    }
}

fn serve(stream: TcpStream, script: &str, log: File) -> tokio::process::Child {
    let stream = stream.into_std().unwrap();
    stream.set_nonblocking(false).unwrap();
    let input = OwnedFd::from(stream);
    let output = input.try_clone().unwrap();
    Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .stdin(input)
        .stdout(output)
        .stderr(Stdio::from(log))
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// A laptop with an SSH server as port 22 of edge-1, and the `ProxyCommand` that `ssh-config` prints.
async fn with_ssh() -> (Laptop, SshServer, String) {
    let build = Laptop::build();
    let server = SshServer::start(build.folder()).await;
    let app = server.address;
    let laptop = Box::pin(Laptop::before_login(build, app)).await;
    laptop.login().await;
    let config = laptop.causeway("ssh-config edge-1").run().await.ok().text();
    let command = config
        .strip_prefix("Host edge-1\n  ProxyCommand ")
        .unwrap()
        .trim();
    assert!(command.contains(binary()), "{command}");
    let option = format!("-oProxyCommand={command}");
    (laptop, server, option)
}

#[tokio::test]
async fn ssh_logs_in_with_a_key_and_gets_exit_codes_and_half_closes() {
    need!("mounts", "sshd");
    let (laptop, server, _) = with_ssh().await;
    let ssh = |remote: &[&str]| {
        let all = laptop.causeway("ssh root@edge-1 --").args(server.options());
        all.args(["-p9100"]).args(remote)
    };
    let done = ssh(&["echo hello; exit 3"]).run().await;
    assert_eq!(done.text(), "hello\n", "{}", done.stderr);
    assert_eq!(done.status.code(), Some(3));
    let input = pattern(1 << 20);
    let counted = ssh(&["wc", "-c"]).input(input).run().await.ok();
    assert_eq!(counted.text().trim(), "1048576");
    let all = laptop.causeway("ssh root@edge-9 --").args(server.options());
    let unknown = all.run().await;
    assert_eq!(unknown.status.code(), Some(255));
    assert!(unknown.stderr.contains("causeway: "), "{}", unknown.stderr);
    assert!(unknown.stderr.contains("edge-9"), "{}", unknown.stderr);
}

#[tokio::test]
async fn scp_and_rsync_copy_files_whole_in_both_directions() {
    need!("mounts", "sshd", "rsync");
    let (laptop, server, proxy) = with_ssh().await;
    let length = if full() { 200 << 20 } else { 8 << 20 };
    let folder = laptop.world.folder();
    let names = ["file", "there", "back", "rsync-back"];
    let [file, there, back, rsync_back] = names.map(|name| folder.join(name));
    let bytes = pattern(length);
    fs::write(&file, &bytes).unwrap();
    let remote = format!("root@edge-1:{}", there.display());
    let scp = || {
        let scp = Tool::new("scp")
            .within(TRANSFER)
            .args(["-q", "-P9100", &proxy]);
        let scp = scp.args(server.options());
        scp.env("XDG_CONFIG_HOME", laptop.home())
    };
    scp()
        .args([file.as_os_str(), remote.as_ref()])
        .run()
        .await
        .ok();
    scp()
        .args([remote.as_ref(), back.as_os_str()])
        .run()
        .await
        .ok();
    assert!(fs::read(&back).unwrap() == bytes);

    fs::remove_file(&there).unwrap();
    // A word with blanks for rsync, which splits at them.
    let shell = format!("ssh -p9100 {} '{proxy}'", server.options().join(" "));
    let rsync = async |from: &Path, to: &Path| {
        let rsync = Tool::new("rsync").within(TRANSFER).args(["-e", &shell]);
        let rsync = rsync.env("XDG_CONFIG_HOME", laptop.home());
        rsync.args([from, to]).run().await.ok();
    };
    rsync(&file, Path::new(&remote)).await;
    assert!(fs::read(&there).unwrap() == bytes);
    rsync(Path::new(&remote), &rsync_back).await;
    assert!(fs::read(&rsync_back).unwrap() == bytes);
}

/// As `causeway ssh-config >>~/.ssh/config`: the file has lines of the user as well.
#[tokio::test]
async fn ssh_and_scp_use_the_file_that_ssh_config_wrote() {
    need!("mounts", "sshd");
    let (laptop, server, _) = with_ssh().await;
    let folder = laptop.world.folder();
    let (config, file, copy) = (
        folder.join("config"),
        folder.join("file"),
        folder.join("copy"),
    );
    // Without names: the nodes that the user may reach.
    let printed = laptop.causeway("ssh-config").run().await.ok().text();
    let own = format!(
        "Host edge-*\n  Port 9100\n  User root\n  IdentityFile {}\n",
        server.key()
    );
    fs::write(&config, own + &printed).unwrap();
    let with_file = |program: &str| {
        let program = Tool::new(program).args(server.options_with(&config));
        program.env("XDG_CONFIG_HOME", laptop.home())
    };
    let ran = with_file("ssh").args(["edge-1", "echo hello; exit 3"]);
    let ran = ran.run().await;
    assert_eq!(ran.text(), "hello\n", "{}", ran.stderr);
    assert_eq!(ran.status.code(), Some(3));
    let bytes = pattern(1 << 20);
    fs::write(&file, &bytes).unwrap();
    let remote = format!("edge-1:{}", copy.display());
    let scp = with_file("scp").args(["-q".as_ref(), file.as_os_str(), remote.as_ref()]);
    scp.run().await.ok();
    assert!(fs::read(&copy).unwrap() == bytes);
}

/// Two listeners without TLS, of which one demands a token, with an SSH server as port 22 of edge-1.
struct PlainProxies {
    server: SshServer,
    token: String,
    world: World,
    _edge: Edge,
}

impl PlainProxies {
    async fn start() -> Self {
        let build = World::build();
        let plain = |listener: Listener| Listener {
            plaintext_networks: vec!["127.0.0.0/8".parse().unwrap()],
            ..listener
        };
        let closed = Listener {
            client_auth: ClientAuth {
                tokens: Some(build.tokens()),
                ..ClientAuth::default()
            },
            ..plain(listener("closed", ListenerProtocol::Connect))
        };
        let token = build.token("ann");
        let build = build.listener(plain(anonymous("open", ListenerProtocol::Connect)));
        let server = SshServer::start(build.folder()).await;
        let world = Box::pin(build.listener(closed).start()).await;
        let edge = world.edge("edge-1");
        let edge = edge.port_as(22, Protocol::Tcp, server.address);
        let edge = Box::pin(edge.join()).await;
        Self {
            server,
            token,
            world,
            _edge: edge,
        }
    }

    /// ssh with this `ProxyCommand`.
    fn ssh(&self, command: &str) -> Tool {
        let ssh = Tool::new("ssh").args(self.server.options());
        let option = format!("-oProxyCommand={command}");
        ssh.args([option.as_str(), "root@edge-1"])
    }
}

/// As on machines without our command. corkscrew shows the token as the password of a file.
#[tokio::test]
async fn ssh_uses_netcat_and_corkscrew_at_a_listener_without_tls() {
    need!("mounts", "sshd", "nc", "corkscrew");
    let proxies = Box::pin(PlainProxies::start()).await;
    let (world, folder) = (&proxies.world, proxies.world.folder());
    let [open, closed] = ["open", "closed"].map(|name| world.listener(name));
    let password = world.write(&format!("ann:{}\n", proxies.token));
    let corkscrew = corkscrew().unwrap().display().to_string();
    let with_corkscrew =
        |proxy: SocketAddr| format!("{corkscrew} {} {} %h %p", proxy.ip(), proxy.port());
    let (file, bytes) = (folder.join("file"), pattern(1 << 20));
    for command in [
        format!("nc -X connect -x {open} %h %p"),
        with_corkscrew(open),
        format!("{} {}", with_corkscrew(closed), password.display()),
    ] {
        let ssh = |script: &str| proxies.ssh(&command).args([script]);
        let ran = ssh("echo hello; exit 3").run().await;
        assert_eq!(ran.text(), "hello\n", "{command}: {}", ran.stderr);
        assert_eq!(ran.status.code(), Some(3), "{command}");
        let upload = ssh(&format!("cat >{}", file.display()));
        upload.input(bytes.clone()).run().await.ok();
        assert!(fs::read(&file).unwrap() == bytes, "{command}");
        let download = ssh(&format!("cat {}", file.display())).run().await.ok();
        assert!(download.stdout == bytes, "{command}");
        fs::remove_file(&file).unwrap();
    }
    for command in [
        format!("nc -X connect -x {closed} %h %p"),
        with_corkscrew(closed),
    ] {
        let refused = proxies.ssh(&command).args(["true"]).run().await;
        assert_eq!(refused.status.code(), Some(255), "{command}: {refused:?}");
    }
    until("the refusals are counted", async || {
        world.metrics().await.outcomes("closed", "unauthenticated") == 2
    })
    .await;
}

#[tokio::test]
async fn twenty_ssh_sessions_run_at_once() {
    need!("mounts", "sshd");
    let (laptop, server, _) = with_ssh().await;
    let mut sessions = Vec::new();
    for number in 0..20 {
        let all = laptop.causeway("ssh root@edge-1 --").args(server.options());
        let script = format!("echo {number}; cat");
        sessions.push(all.args(["-p9100", &script]).start());
    }
    for (number, session) in sessions.iter_mut().enumerate() {
        assert_eq!(session.line().await, number.to_string());
    }
    for mut session in sessions {
        session.send("last").await;
        let ended = session.finish().await.ok();
        assert_eq!(ended.text(), "last");
    }
}

#[tokio::test]
async fn a_transfer_over_ssh_fails_when_the_gateway_dies() {
    need!("mounts", "sshd");
    let (mut laptop, server, proxy) = with_ssh().await;
    let folder = laptop.world.folder().to_owned();
    let there = folder.join("there");
    let ssh = Tool::new("ssh")
        .args(["-p9100", &proxy])
        .args(server.options());
    let ssh = ssh.env("XDG_CONFIG_HOME", laptop.home());
    let remote = format!(
        "cat >{}; echo complete >{}.end",
        there.display(),
        there.display()
    );
    let mut copying = ssh.args(["root@edge-1", &remote]).start();
    copying.send(pattern(1 << 20)).await;
    until("a part has arrived", async || {
        fs::metadata(&there).is_ok_and(|file| file.len() > 0)
    })
    .await;
    laptop.world.kill_gateway().await;
    let failed = copying.over().await;
    assert_eq!(failed.status.code(), Some(255), "{failed:?}");
    assert!(failed.stderr.contains("broke"), "{failed:?}");
}

/// A laptop whose gateway is a process, with an SSH server as port 9100 of edge-1.
struct OwnGateway {
    server: SshServer,
    site: GatewayProcess,
    _edge: Process,
}

impl OwnGateway {
    async fn start() -> Self {
        let listener = "listeners: [{ name: laptops, protocol: connect, listen: \"127.0.0.1:0\" }]";
        let site = GatewayProcess::with_listeners(listener).await;
        let server = SshServer::start(site.folder().path()).await;
        let edge = site.join("edge-1", server.address.port()).await;
        let login = command(&site.path("home"), &format!("login {}", site.listener));
        let login = login.args(["--ca".into(), site.data().join("ca.pem")]);
        let login = login.args(["--cert".into(), site.path("alice.pem")]);
        let login = login.args(["--key".into(), site.path("alice-key.pem")]);
        login.run().await.ok();
        Self {
            server,
            site,
            _edge: edge,
        }
    }

    /// scp with at most this many kbit/s.
    fn scp(&self, rate: u32) -> Tool {
        let connect = format!("-oProxyCommand={} connect edge-1:9100", binary());
        Tool::new("scp")
            .within(TRANSFER)
            .args(["-l", &rate.to_string(), &connect])
            .args(self.server.options())
            .env("XDG_CONFIG_HOME", self.site.path("home"))
    }
}

/// Length of the file that is copied in vain, in bytes.
const LENGTH: u64 = 200 << 20;

/// Time within which both ends report the death of the gateway, in the long run.
const REPORT: Duration = Duration::from_secs(10);

/// The copy is slow, so that it lasts until the gateway dies: in the long run at half of the file.
#[tokio::test]
async fn scp_fails_at_both_ends_when_the_gateway_is_killed() {
    need!("mounts", "sshd");
    let is_long = full();
    let (part, rate) = if is_long {
        (LENGTH / 2, 160_000)
    } else {
        (1, 8_000)
    };
    for is_upload in [true, false] {
        let laptop = Box::pin(OwnGateway::start()).await;
        let [file, copy] = ["file", "copy"].map(|name| laptop.site.path(name));
        File::create(&file).unwrap().set_len(LENGTH).unwrap();
        let remote = |path: &Path| format!("root@edge-1:{}", path.display());
        let (from, to) = if is_upload {
            (file.display().to_string(), remote(&copy))
        } else {
            (remote(&file), copy.display().to_string())
        };
        let copying = laptop.scp(rate).args([from, to]).start();
        let length = || fs::metadata(&copy).map_or(0, |file| file.len());
        until("a part has arrived", async || length() >= part).await;
        let killed = Instant::now();
        laptop.site.gateway.signal("KILL").await;
        let failed = copying.over().await;
        assert!(!failed.status.success(), "{failed:?}");
        let message = "the session to edge-1:9100 broke";
        assert!(failed.stderr.contains(message), "{failed:?}");
        until("the server has the error", async || {
            laptop.server.log().contains("Connection reset by")
        })
        .await;
        let took = killed.elapsed();
        assert!(took < REPORT || !is_long, "upload: {is_upload}: {took:?}");
        assert!(length() < LENGTH, "upload: {is_upload}");
    }
}

/// A program of PostgreSQL on the laptop.
fn postgresql_client(program: &str) -> Tool {
    let folder = postgresql().unwrap();
    let program = folder.join("usr/lib/postgresql/15/bin").join(program);
    let libraries = folder.join(format!("usr/lib/{ARCH}-linux-gnu"));
    Tool::new(program).env("LD_LIBRARY_PATH", libraries)
}

/// Starts a PostgreSQL server as the user nobody, because it refuses to run as root. `$1` is its folder, `$2` that of its programs,
/// which may be in the home of root, and `$3` its port. The libraries of its compiler are not unpacked (`jit`).
const POSTGRESQL: &str = r#"
mkdir "$1/data" "$1/programs"
chown nobody "$1" "$1/data"
mount --bind "$2" "$1/programs"
export LD_LIBRARY_PATH=$(echo "$1"/programs/usr/lib/*-linux-gnu)
export PATH="$1/programs/usr/lib/postgresql/15/bin:$PATH"
exec setpriv --reuid=nobody --clear-groups sh -ec '
initdb -D "$1/data" -A trust -U ann --no-locale --no-sync >/dev/null
exec postgres -D "$1/data" -k "$1" -p "$2" -c listen_addresses=127.0.0.1 -c jit=off -c fsync=off' sh "$1" "$3"
"#;

#[tokio::test]
async fn psql_reaches_a_server_by_forward() {
    need!("mounts", "postgresql");
    let build = Laptop::build();
    let (data, port) = (build.folder().join("postgres"), unused_port());
    fs::create_dir(&data).unwrap();
    Tool::new("chmod")
        .args(["-R", "a+rX"])
        .args([build.folder()])
        .run()
        .await
        .ok();
    let server = Tool::new("unshare").args(["--mount", "sh", "-ec", POSTGRESQL, "sh"]);
    let server = server.args([data, postgresql().unwrap()]);
    let _server = server.args([port.to_string()]).start();
    let local = format!("--port={port}");
    // It accepts connections before it serves queries.
    until("PostgreSQL serves", async || {
        let asked = postgresql_client("pg_isready").args(["--host=127.0.0.1", &local]);
        asked.run().await.status.success()
    })
    .await;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let laptop = Box::pin(Laptop::before_login(build, address)).await;
    laptop.login().await;
    let mut forward = laptop.causeway("forward edge-1 :9100 --json").start();
    let local = opened(&mut forward).await;
    let query = "select count(*), sum(length(repeat('x', 1000))) from generate_series(1, 10000)";
    let url = format!("postgresql://ann@{local}/postgres");
    let psql = postgresql_client("psql").args([&url, "-X", "-At", "-c", query]);
    assert_eq!(psql.run().await.ok().text(), "10000|10000000\n");
}

#[tokio::test]
async fn kubectl_reaches_an_api_server_by_the_proxy() {
    need!("kubectl");
    let authority = Authority::new();
    let tls = authority.serve(&authority.app(&["edge-1"]), false);
    let app = App::https(tls, |_| answer::ok("ok")).await;
    let laptop = Box::pin(Laptop::to(app.address())).await;
    let mut proxy = laptop.causeway("proxy --listen 127.0.0.1:0 --json").start();
    let local = opened(&mut proxy).await;
    let ca = laptop.world.write(authority.pem());
    for scheme in ["http", "socks5"] {
        let config = laptop.world.write(&format!(
            "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}],\n\
             users: [{{name: u, user: {{token: t}}}}],\n\
             clusters: [{{name: c, cluster: {{server: 'https://edge-1:9100', certificate-authority: {}, proxy-url: '{scheme}://{local}'}}}}]}}\n",
            ca.display()
        ));
        let kubectl = Tool::new(kubectl().unwrap()).args([Path::new("--kubeconfig"), &config]);
        let done = kubectl.args(["get", "--raw", "/readyz"]).run().await.ok();
        assert_eq!(done.text().trim(), "ok", "{scheme}");
    }
}
