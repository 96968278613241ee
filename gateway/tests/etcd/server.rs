//! An etcd server of a test, and certificates for it.

use std::{
    env, fs,
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use causeway_gateway::{
    config,
    shared_state::{EtcdEngine, StateEngine},
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use tempfile::TempDir;
use test_summary::{Skipped, unused_port};
use tokio::{
    net::TcpStream,
    process::{Child, Command},
    time::{sleep, timeout},
};

/// Time limit of a condition, on a machine that does other work as well.
const PATIENCE: Duration = Duration::from_mins(1);

/// Returns from the test, which is reported as skipped, unless etcd is here.
macro_rules! need_etcd {
    () => {
        if !$crate::server::has_etcd() {
            return;
        }
    };
}
pub(crate) use need_etcd;

/// Whether etcd is installed. Reports the test if it is not.
pub(crate) fn has_etcd() -> bool {
    let runs = |program: &str, argument: &str| {
        let output = std::process::Command::new(program).arg(argument).output();
        output.is_ok_and(|output| output.status.success())
    };
    if runs("etcd", "--version") && runs("etcdctl", "version") {
        return true;
    }
    let command = ".ci/setup && cargo test --workspace";
    let required = env::var_os("CAUSEWAY_TEST_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!required, "needs etcd: {command}");
    let name = test_name();
    // libtest hides the output of `eprintln!`.
    let mut stderr = std::io::stderr().lock();
    writeln!(stderr, "{name}: skipped: needs etcd: {command}").unwrap();
    let skipped = skipped().add(&name, "needs etcd", command);
    skipped.expect("the target directory can be written to");
    false
}

/// Whether long runs and measurements are wanted.
pub(crate) fn full() -> bool {
    skipped().full(&test_name())
}

fn skipped() -> Skipped {
    Skipped::of_this_run(env!("CARGO_TARGET_TMPDIR"))
}

fn test_name() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let waited = timeout(PATIENCE, async {
        while !condition().await {
            sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what} within {PATIENCE:?}");
}

/// Waits until the engine loads entries for which the condition is true. Between two loads it waits for a change.
pub(crate) async fn until_loaded(
    engine: &EtcdEngine,
    condition: impl Fn(&causeway_certs::Entries) -> bool,
) {
    let waited = timeout(PATIENCE, async {
        loop {
            if engine.load().await.is_ok_and(|entries| condition(&entries)) {
                return;
            }
            engine.changed().await;
        }
    });
    let late = waited.await.is_err();
    assert!(
        !late,
        "{engine}: not within {PATIENCE:?}: {:?}",
        engine.load().await
    );
}

/// A running etcd server: the only member of a cluster, or one of three.
pub(crate) struct Etcd {
    child: Child,
    folder: TempDir,
    port: u16,
    tls: Vec<String>,
    cluster: Vec<String>,
}

impl Etcd {
    /// Starts a server without TLS.
    pub(crate) async fn start() -> Self {
        Self::start_with(Vec::new()).await
    }

    /// Starts a server with these flags for TLS; none for a server without TLS.
    pub(crate) async fn start_with(tls: Vec<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cluster = [
            // The only member dials no peer, so the announced port may be a wrong one.
            "--listen-peer-urls=http://127.0.0.1:0",
            "--initial-advertise-peer-urls=http://127.0.0.1:1",
            "--initial-cluster=default=http://127.0.0.1:1",
        ];
        let cluster = cluster.map(str::to_owned).to_vec();
        // Another process may take the port before the server does.
        for _ in 0..5 {
            let port = unused_port();
            let mut child = spawn(folder.path(), port, &tls, &cluster);
            if is_serving(&mut child, port).await {
                return Self {
                    child,
                    folder,
                    port,
                    tls,
                    cluster,
                };
            }
            let _ = fs::remove_dir_all(folder.path().join("data"));
        }
        let log = fs::read_to_string(folder.path().join("log"));
        panic!("etcd does not start: {}", log.unwrap_or_default());
    }

    /// Starts the three members of a cluster.
    pub(crate) async fn start_cluster() -> [Self; 3] {
        let peers = [(); 3].map(|()| format!("http://127.0.0.1:{}", unused_port()));
        let [one, two, three] = &peers;
        let all = format!("--initial-cluster=0={one},1={two},2={three}");
        let mut members = [0, 1, 2].map(|index| {
            let (folder, port) = (tempfile::tempdir().unwrap(), unused_port());
            let url = &peers[index];
            let cluster = vec![
                format!("--name={index}"),
                format!("--listen-peer-urls={url}"),
                format!("--initial-advertise-peer-urls={url}"),
                all.clone(),
            ];
            Self {
                child: spawn(folder.path(), port, &[], &cluster),
                folder,
                port,
                tls: Vec::new(),
                cluster,
            }
        });
        for member in &mut members {
            assert!(is_serving(&mut member.child, member.port).await);
        }
        members
    }

    /// Ends the server as a power cut does.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// Starts the server again, at the same port and with its data.
    pub(crate) async fn restart(&mut self) {
        self.child = spawn(self.folder.path(), self.port, &self.tls, &self.cluster);
        assert!(is_serving(&mut self.child, self.port).await);
    }

    /// Sends a signal to the server.
    pub(crate) async fn signal(&self, name: &str) {
        let id = self.child.id().unwrap().to_string();
        let kill = format!("kill -s {name} {id}");
        run(Command::new("sh").args(["-c", &kill])).await;
    }

    /// Removes the data of the server, which does not run.
    pub(crate) fn remove_data(&self) {
        fs::remove_dir_all(self.data()).unwrap();
    }

    /// Returns the path of a file in the folder of the server.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path("data")
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Returns the URL of the server, with an address as the host.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.tls.is_empty() { "http" } else { "https" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// Returns the configuration for this server.
    pub(crate) fn config(&self) -> config::Etcd {
        config::Etcd {
            endpoints: vec![self.url()],
            ..config::Etcd::default()
        }
    }

    /// Returns an engine for this server.
    pub(crate) fn engine(&self) -> EtcdEngine {
        EtcdEngine::new(&self.config()).unwrap()
    }

    /// Runs etcdctl with these arguments, separated by spaces. Returns its output.
    pub(crate) async fn etcdctl(&self, arguments: &str) -> String {
        run(Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url()])
            .args(arguments.split(' ')))
        .await
    }

    /// Returns the value of a metric.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let url = format!("{}/metrics", self.url());
        let text = run(Command::new("curl").args(["-q", "-sSf", &url])).await;
        let line = text.lines().find(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(' '))
        });
        let value = line.and_then(|line| line.split(' ').nth(1));
        value.and_then(|value| value.parse().ok()).unwrap()
    }
}

fn spawn(folder: &Path, port: u16, tls: &[String], cluster: &[String]) -> Child {
    let scheme = if tls.is_empty() { "http" } else { "https" };
    let url = format!("{scheme}://127.0.0.1:{port}");
    let log = fs::File::create(folder.join("log")).unwrap();
    Command::new("etcd")
        .arg("--data-dir")
        .arg(folder.join("data"))
        .args([
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ])
        .args(cluster)
        .args(["--heartbeat-interval", "20", "--election-timeout", "200"])
        .args(tls)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn is_serving(child: &mut Child, port: u16) -> bool {
    let serving = timeout(PATIENCE, async {
        loop {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            if TcpStream::connect((Ipv4Addr::LOCALHOST, port))
                .await
                .is_ok()
            {
                return true;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    serving.await.expect("etcd listens in time")
}

/// Runs a program to its successful end. Returns its output.
pub(crate) async fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// A CA that issues certificates for a server and for clients.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "etcd CA");
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    /// Returns the file of the CA's certificate.
    pub(crate) fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Issues a certificate for this address or name, for servers and for clients. etcd's JSON gateway is a client of its own
    /// server, with the server's certificate.
    pub(crate) fn issue(&self, name: &str) -> config::Certificate {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |extension: &str| self.folder.path().join(format!("{name}.{extension}"));
        let files = config::Certificate {
            chain: path("pem"),
            key: path("key"),
        };
        fs::write(&files.chain, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }

    /// Returns the flags of a server, which may require certificates of clients.
    pub(crate) fn flags(&self, is_mutual: bool) -> Vec<String> {
        let files = self.issue("127.0.0.1");
        let mut flags = vec![
            format!("--cert-file={}", files.chain.display()),
            format!("--key-file={}", files.key.display()),
        ];
        if is_mutual {
            flags.push("--client-cert-auth".to_owned());
            flags.push(format!("--trusted-ca-file={}", self.ca().display()));
        }
        flags
    }
}
