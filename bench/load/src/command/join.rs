//! Many nodes that join at once with tokens, as after the installation of a fleet.
//!
//! 1. The tokens and the nodes' keys are made before: one token for all nodes, or one for each.
//! 2. All nodes dial at once. Each sends the request of an edge over HTTP/1.1, and repeats it with the same key until it gets a
//!    certificate.

use crate::{
    cli, files,
    measure::{Failures, Latencies, per_second},
    report::{self, rounded},
    stop::Stop,
};
use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_certs::{
    JoinToken, NodeAttributes, NodeName, OpenMode, PrivateKey, Store, TokenStore, verify,
};
use causeway_rt::task::TaskGroup;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde_json::json;
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsConnector;
use tracing::Span;

/// Time limit of an attempt: that of a gateway's answer, and that of the connection.
const BOUND: Duration = Duration::from_secs(15);
/// Pause after a failed attempt; an edge waits for up to two seconds.
const PAUSE: Duration = Duration::from_secs(1);
/// Time for which the tokens are valid.
const TTL: Duration = Duration::from_hours(1);

/// Data that all nodes share.
struct Joins {
    gateway: SocketAddr,
    tls: Arc<ClientConfig>,
    results: Mutex<(Latencies, Failures)>,
}

/// Joins all nodes and reports.
pub(super) async fn run(asked: cli::Join, stop: Stop) -> anyhow::Result<()> {
    files::enough(asked.nodes)?;
    let store = Store::open(&asked.data_dir, OpenMode::Existing)?;
    let ca = store.ca()?.context("the data directory has no CA")?;
    let bodies = bodies(&store.tokens()?, &asked)?;
    let mut tls = ClientConfig::clone(&*verify::join_client(ca.fingerprint())?);
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let joins = Arc::new(Joins {
        gateway: asked.gateway,
        tls: Arc::new(tls),
        results: Mutex::new((Latencies::new(), Failures::default())),
    });
    report::say(&json!({"event": "ready", "nodes": asked.nodes}));
    let nodes = TaskGroup::new(&stop.token);
    let began = Instant::now();
    for body in bodies {
        nodes.spawn(Span::none(), Box::pin(joins.clone().join(body)));
    }
    let left = nodes.drain(asked.within).await;
    let took = began.elapsed();
    let results = joins.results.lock().unwrap_or_else(PoisonError::into_inner);
    let (latencies, failures) = &*results;
    report::say(&json!({
        "event": "result",
        "joined": latencies.count(),
        "left": left,
        "seconds": rounded(took.as_secs_f64(), 3),
        "per_second": per_second(latencies.count(), took),
        "latency_us": latencies.summary(),
        "failures": failures,
    }));
    Ok(())
}

/// Returns the request of each node.
fn bodies(tokens: &TokenStore, asked: &cli::Join) -> anyhow::Result<Vec<String>> {
    let create = |nodes: &str, uses| -> anyhow::Result<JoinToken> {
        let nodes = (&nodes.parse()?, uses);
        Ok(tokens.create_for(nodes, TTL, NodeAttributes::default())?)
    };
    let shared = if asked.tokens_of_their_own {
        None
    } else {
        let uses = u32::try_from(asked.nodes)?;
        Some(create(&format!("{}*", asked.prefix), uses)?)
    };
    let body = |number| {
        let node = NodeName::parse(&format!("{}{number}", asked.prefix))?;
        let token = match &shared {
            Some(token) => token.text(),
            None => create(node.as_str(), 1)?.text(),
        };
        let csr = STANDARD.encode(PrivateKey::generate()?.request()?);
        let body = json!({
            "token": token.expose(), "node": node, "csr": csr, "version": env!("CARGO_PKG_VERSION"),
        });
        Ok(body.to_string())
    };
    (1..=asked.nodes).map(body).collect()
}

impl Joins {
    /// Repeats the request until the node has its certificate. The latency includes all attempts.
    async fn join(self: Arc<Self>, body: String) {
        let began = Instant::now();
        loop {
            let attempt = timeout(BOUND, self.attempt(&body)).await;
            let failure = match attempt {
                Ok(Ok(status)) if status == "200" => break,
                Ok(Ok(status)) => status,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer in time".to_owned(),
            };
            self.with_results(|_, failures| failures.add(failure));
            sleep(PAUSE.mul_f64(0.5 + rand::random::<f64>())).await;
        }
        self.with_results(|latencies, _| latencies.add(began.elapsed()));
    }

    fn with_results(&self, with: impl FnOnce(&mut Latencies, &mut Failures)) {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let (latencies, failures) = &mut *results;
        with(latencies, failures);
    }

    /// Sends the request once, and returns the status.
    async fn attempt(&self, body: &str) -> anyhow::Result<String> {
        let tcp = TcpStream::connect(self.gateway).await.context("TCP")?;
        let name = ServerName::from(self.gateway.ip());
        let connector = TlsConnector::from(self.tls.clone());
        let mut io = connector.connect(name, tcp).await.context("TLS")?;
        let head = format!(
            "POST /v1/enrol HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        io.write_all(head.as_bytes()).await.context("request")?;
        io.write_all(body.as_bytes()).await.context("request")?;
        let mut answer = Vec::new();
        io.read_to_end(&mut answer).await.context("answer")?;
        let line = answer.split(|byte| *byte == b'\r').next();
        let line = String::from_utf8_lossy(line.unwrap_or_default()).into_owned();
        let status = line.split(' ').nth(1).context("no status line")?;
        Ok(status.to_owned())
    }
}
