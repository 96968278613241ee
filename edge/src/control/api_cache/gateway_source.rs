//! A gateway to read from: one HTTP/2 connection, dialled like a tunnel, for lists and watches of all resources.
//!
//! It is dialled when something is asked and none is there, with the identity of that moment; what is asked meanwhile waits
//! for the same one. With another identity, or at another gateway, the next question has a connection of its own, and watches
//! that are open keep theirs until they end by themselves. How long to wait after a failure is what it is for tunnels.

use super::list_watch_http::{build_request, error_chain, to_answer};
use crate::control::{
    connect_error::ConnectError,
    dial::{GatewayConnection, GatewayConnector},
    tunnels::context::TunnelContext,
};
use bytes::Bytes;
use causeway_certs::{LeafCertificate, verify::control_client};
use causeway_rt::{
    backoff::Backoff,
    socket::IoActivity,
    task::{TaskExecutor, TaskGroup},
};
use causeway_tunnel::wire;
use causeway_watch_cache::{ListWatch, SourceResponse};
use futures_util::future::BoxFuture;
use http::{
    HeaderMap,
    header::{ACCEPT_ENCODING, HeaderValue},
};
use http_body_util::Full;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ClientConfig;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::Mutex as Turn,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, info, info_span};

/// A gateway is asked whether it is there this often, and is gone when it does not say so within this time.
const PING: Duration = Duration::from_secs(5);
const PONG: Duration = Duration::from_secs(10);
/// A gateway has what it serves in memory; a watch of a version that it does not know yet waits 3 s for it.
const ANSWER: Duration = Duration::from_secs(15);
/// Between two gateways that do not serve what is asked.
const MOVES: Duration = Duration::from_secs(30);

/// Source that reads at any gateway that answers.
pub(super) struct GatewaySource {
    links: Arc<TunnelContext>,
    tasks: Arc<TaskGroup>,
    line: Mutex<SourceConnection>,
    /// Lock of the task that dials.
    turn: Turn<()>,
}

/// The connection, and what is known for the next one.
struct SourceConnection {
    open: Option<OpenConnection>,
    backoff: Backoff,
    /// Nothing is dialled before.
    after: Option<Instant>,
    /// Gateways that did not serve this node, the last one last.
    refused: Vec<String>,
    /// When it last went to another.
    moved: Option<Instant>,
    /// Traffic of the connection that was dialled last. Watches on an earlier connection, of another identity or gateway,
    /// are taken to be as silent as this.
    traffic: Option<Arc<IoActivity>>,
}

#[derive(Clone)]
struct OpenConnection {
    sender: SendRequest<Full<Bytes>>,
    gateway: String,
    /// As whom it was dialled.
    shown: LeafCertificate,
}

impl GatewaySource {
    pub(super) fn new(links: Arc<TunnelContext>, tasks: Arc<TaskGroup>) -> Self {
        let bounds = &links.config.backoff;
        let line = SourceConnection {
            open: None,
            backoff: Backoff::new(bounds.silent_max, bounds.refused_max),
            after: None,
            refused: Vec::new(),
            moved: None,
            traffic: None,
        };
        Self {
            links,
            tasks,
            line: Mutex::new(line),
            turn: Turn::default(),
        }
    }

    fn line(&self) -> MutexGuard<'_, SourceConnection> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the gateway that it reads from now.
    pub(super) fn at(&self) -> Option<String> {
        self.line().open.as_ref().map(|open| open.gateway.clone())
    }

    /// Dials another gateway next, if there is one: this one does not serve what is asked. Where none does that is no reason to
    /// go round without end.
    pub(super) fn elsewhere(&self) {
        let mut line = self.line();
        if line.moved.is_some_and(|moved| moved.elapsed() < MOVES) {
            return;
        }
        if let Some(open) = line.open.take() {
            line.moved = Some(Instant::now());
            line.refused.retain(|gateway| *gateway != open.gateway);
            line.refused.push(open.gateway);
        }
    }

    /// Needs no connection for now.
    pub(super) fn rest(&self) {
        self.line().open = None;
    }

    /// The connection that is open, as this node is now.
    fn opened(&self) -> Option<OpenConnection> {
        let own = self.links.held.identity().leaf;
        let mut line = self.line();
        let open = line.open.take();
        line.open = open.filter(|open| open.shown == own && !open.sender.is_closed());
        line.open.clone()
    }

    /// The connection that is open, or the next.
    async fn open(&self) -> Result<OpenConnection, String> {
        if let Some(open) = self.opened() {
            return Ok(open);
        }
        let _turn = self.turn.lock().await;
        // The previous holder of the lock may have opened a connection.
        if let Some(open) = self.opened() {
            return Ok(open);
        }
        let (after, refused) = {
            let line = self.line();
            (line.after, line.refused.clone())
        };
        if let Some(after) = after {
            sleep_until(after).await;
        }
        let dialled = self.dial(&refused).await;
        let mut line = self.line();
        match dialled {
            Ok((open, traffic)) => {
                line.backoff.reset();
                line.after = None;
                line.traffic = Some(traffic);
                info!(gateway = open.gateway, "API cache reads from a gateway");
                Ok(line.open.insert(open).clone())
            }
            Err(trouble) => {
                let delay = trouble.delay(&mut line.backoff, rand::random());
                line.after = Some(Instant::now() + delay);
                Err(trouble.what().to_owned())
            }
        }
    }

    async fn dial(
        &self,
        refused: &[String],
    ) -> Result<(OpenConnection, Arc<IoActivity>), ConnectError> {
        let identity = self.links.held.identity();
        let tls = control_client(&identity);
        let tls = tls.map_err(|error| ConnectError::unwelcome(error.to_string()))?;
        let dialler = GatewayConnector::new(http2_only(&tls), &self.links.config);
        let mut gateways = self.links.gateways.all();
        // Gateways that refused come last, the most recent refusal at the end.
        gateways.sort_by_key(|gateway| refused.iter().position(|one| one == gateway));
        let GatewayConnection { io, place, .. } = dialler.dial(&gateways, None).await?;
        // Gateways without API cache support may negotiate HTTP/1.1 here.
        if io.get_ref().1.alpn_protocol() != Some(wire::ALPN_H2) {
            return Err(ConnectError::refused(format!(
                "{place} does not support HTTP/2 for API cache reads; upgrade the gateway"
            )));
        }
        let traffic = io.get_ref().0.traffic();
        let handshake = http2::Builder::new(TaskExecutor::new(self.tasks.clone(), || {
            info_span!("reading")
        }))
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(io))
        .await;
        let silent = |error: hyper::Error| ConnectError::silent(error_chain(&error));
        let (sender, connection) = handshake.map_err(silent)?;
        let gateway = place.gateway.clone();
        self.tasks.spawn(info_span!("reading", %place), async move {
            let ended = connection.await;
            debug!(?ended, "the connection was closed");
        });
        let open = OpenConnection {
            sender,
            gateway,
            shown: identity.leaf,
        };
        Ok((open, traffic))
    }

    async fn ask(&self, path_and_query: &str) -> Result<SourceResponse, String> {
        let mut open = self.open().await?;
        let fields = [(ACCEPT_ENCODING, HeaderValue::from_static("gzip"))];
        let uri = format!("https://{}{path_and_query}", open.gateway);
        let request = build_request(&uri, HeaderMap::from_iter(fields))?;
        let late = "no response in time";
        let answer = match timeout(ANSWER, open.sender.send_request(request)).await {
            Ok(answer) => answer.map(to_answer).map_err(|error| error_chain(&error)),
            Err(_) => Err(late.to_owned()),
        };
        if answer.is_err() {
            let mut line = self.line();
            let same = |now: &OpenConnection| now.gateway == open.gateway;
            // Other requests on this connection may still finish.
            line.open = line.open.take().filter(|now| !same(now));
        }
        answer.map_err(|why| format!("gateway {}: {why}", open.gateway))
    }
}

impl ListWatch for GatewaySource {
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        Box::pin(async move { self.ask(&path_and_query).await })
    }

    /// By its answers to pings, when it says nothing else.
    fn silent(&self) -> Duration {
        let line = self.line();
        let traffic = line.traffic.as_ref();
        traffic.map_or(Duration::ZERO, |traffic| traffic.last_read().elapsed())
    }
}

/// The same trust and identity for HTTP/2.
fn http2_only(config: &ClientConfig) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![wire::ALPN_H2.to_vec()];
    Arc::new(config)
}
