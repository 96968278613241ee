//! Gateway as a source: one HTTP/2 connection, dialled like a tunnel, for lists and watches of all resources.
//!
//! The connection is dialled when a request needs it and none is open, with the identity of that moment. Requests that arrive
//! meanwhile wait for the same connection. After a change of the identity or of the gateway, the next request opens a new
//! connection. Open watches keep the old connection until they end by themselves. The delay after a failure is the same as
//! for tunnels.

use super::list_watch_http::{build_request, error_chain, to_source_response};
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
use tracing::{debug, info, info_span, warn};

/// Interval of the PINGs on the connection. The gateway counts as gone if it does not answer one within `PING_TIMEOUT`.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which a gateway must answer. A gateway serves from memory, but a watch of a version that it does not know yet
/// waits 3 s for that version.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Minimum time between two switches away from gateways that do not serve a request.
const MIN_SWITCH_INTERVAL: Duration = Duration::from_secs(30);

/// Source that reads from any gateway that answers.
pub(super) struct GatewaySource {
    context: Arc<TunnelContext>,
    tasks: Arc<TaskGroup>,
    state: Mutex<SourceConnection>,
    /// Lock of the task that dials.
    dial_lock: Turn<()>,
}

/// Current connection, and the state for the next dial.
struct SourceConnection {
    open: Option<OpenConnection>,
    backoff: Backoff,
    /// Time before which no gateway is dialled.
    not_before: Option<Instant>,
    /// Gateways that did not serve this node, the most recent one last.
    rejected_gateways: Vec<String>,
    /// Time of the last switch to another gateway.
    switched_at: Option<Instant>,
    /// Traffic of the connection that was dialled last. Watches on an earlier connection, of another identity or gateway, are
    /// assumed to be as silent as this connection.
    traffic: Option<Arc<IoActivity>>,
}

#[derive(Clone)]
struct OpenConnection {
    sender: SendRequest<Full<Bytes>>,
    gateway: String,
    /// Certificate that this node presented on the connection.
    certificate: LeafCertificate,
}

impl GatewaySource {
    pub(super) fn new(context: Arc<TunnelContext>, tasks: Arc<TaskGroup>) -> Self {
        let backoff_config = &context.config.backoff;
        let state = SourceConnection {
            open: None,
            backoff: Backoff::new(backoff_config.silent_max, backoff_config.refused_max),
            not_before: None,
            rejected_gateways: Vec::new(),
            switched_at: None,
            traffic: None,
        };
        Self {
            context,
            tasks,
            state: Mutex::new(state),
            dial_lock: Turn::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SourceConnection> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the gateway of the open connection.
    pub(super) fn gateway(&self) -> Option<String> {
        self.lock().open.as_ref().map(|open| open.gateway.clone())
    }

    /// Closes the connection, so that the next dial prefers another gateway, because this one does not serve the request.
    /// Does nothing for `MIN_SWITCH_INTERVAL` after a switch: the source must not switch without end if no gateway serves the
    /// request.
    pub(super) fn switch_gateway(&self) {
        let mut state = self.lock();
        if state
            .switched_at
            .is_some_and(|moved| moved.elapsed() < MIN_SWITCH_INTERVAL)
        {
            return;
        }
        if let Some(open) = state.open.take() {
            state.switched_at = Some(Instant::now());
            state
                .rejected_gateways
                .retain(|gateway| *gateway != open.gateway);
            state.rejected_gateways.push(open.gateway);
        }
    }

    /// Closes the connection until a request needs one.
    pub(super) fn disconnect(&self) {
        self.lock().open = None;
    }

    /// Returns the open connection, if this node's certificate has not changed since it was dialled.
    fn reusable_connection(&self) -> Option<OpenConnection> {
        let current_certificate = self.context.identity_store.identity().leaf;
        let mut state = self.lock();
        let open = state.open.take();
        state.open =
            open.filter(|open| open.certificate == current_certificate && !open.sender.is_closed());
        state.open.clone()
    }

    /// Returns the open connection, or dials a new one.
    async fn connect(&self) -> Result<OpenConnection, String> {
        if let Some(open) = self.reusable_connection() {
            return Ok(open);
        }
        let _dial_guard = self.dial_lock.lock().await;
        // The previous holder of the lock may have opened a connection.
        if let Some(open) = self.reusable_connection() {
            return Ok(open);
        }
        let (not_before, rejected_gateways) = {
            let state = self.lock();
            (state.not_before, state.rejected_gateways.clone())
        };
        if let Some(not_before) = not_before {
            sleep_until(not_before).await;
        }
        let result = self.dial(&rejected_gateways).await;
        let mut state = self.lock();
        match result {
            Ok((open, traffic)) => {
                state.backoff.reset();
                state.not_before = None;
                state.traffic = Some(traffic);
                info!(gateway = open.gateway, "API cache reads from a gateway");
                Ok(state.open.insert(open).clone())
            }
            Err(error) => {
                let delay = error.delay(&mut state.backoff, rand::random());
                state.not_before = Some(Instant::now() + delay);
                Err(error.detail().to_owned())
            }
        }
    }

    async fn dial(
        &self,
        rejected_gateways: &[String],
    ) -> Result<(OpenConnection, Arc<IoActivity>), ConnectError> {
        let identity = self.context.identity_store.identity();
        let tls = control_client(&identity);
        let tls = tls.map_err(|error| ConnectError::unwelcome(error.to_string()))?;
        let connector = GatewayConnector::new(http2_only(&tls), &self.context.config);
        let mut gateways = self.context.gateways.all();
        // Gateways that refused come last, the most recent refusal at the end.
        gateways.sort_by_key(|gateway| rejected_gateways.iter().position(|one| one == gateway));
        let GatewayConnection {
            io,
            gateway_addr: place,
            ..
        } = connector.dial(&gateways, None).await?;
        // Gateways without API cache support may negotiate HTTP/1.1 here.
        if io.get_ref().1.alpn_protocol() != Some(wire::ALPN_H2) {
            return Err(ConnectError::refused(format!(
                "{place} does not support HTTP/2 for API cache reads; upgrade the gateway"
            )));
        }
        let traffic = io.get_ref().0.traffic();
        let gateway_chain = io.get_ref().1.peer_certificates().unwrap_or_default();
        let gateway_chain = gateway_chain
            .iter()
            .map(|one| one.clone().into_owned())
            .collect();
        let handshake = http2::Builder::new(TaskExecutor::new(self.tasks.clone(), || {
            info_span!("reading")
        }))
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(io))
        .await;
        let to_connect_error = |error: hyper::Error| ConnectError::silent(error_chain(&error));
        let (sender, connection) = handshake.map_err(to_connect_error)?;
        let gateway = place.gateway.clone();
        let identity_store = self.context.identity_store.clone();
        let untrusted = identity_store.wait_until_untrusted(gateway_chain);
        self.tasks.spawn(info_span!("reading", %place), async move {
            tokio::select! {
                ended = connection => debug!(?ended, "the connection was closed"),
                why = untrusted => warn!("{why}: closed the connection of the API cache"),
            }
        });
        let open = OpenConnection {
            sender,
            gateway,
            certificate: identity.leaf,
        };
        Ok((open, traffic))
    }

    async fn send_request(&self, path_and_query: &str) -> Result<SourceResponse, String> {
        let mut open = self.connect().await?;
        let fields = [(ACCEPT_ENCODING, HeaderValue::from_static("gzip"))];
        let uri = format!("https://{}{path_and_query}", open.gateway);
        let request = build_request(&uri, HeaderMap::from_iter(fields))?;
        let timeout_message = "no response in time";
        let response = match timeout(RESPONSE_TIMEOUT, open.sender.send_request(request)).await {
            Ok(answer) => answer
                .map(to_source_response)
                .map_err(|error| error_chain(&error)),
            Err(_) => Err(timeout_message.to_owned()),
        };
        if response.is_err() {
            let mut state = self.lock();
            let is_same = |now: &OpenConnection| now.gateway == open.gateway;
            // Other requests on this connection may still finish.
            state.open = state.open.take().filter(|now| !is_same(now));
        }
        response.map_err(|why| format!("gateway {}: {why}", open.gateway))
    }
}

impl ListWatch for GatewaySource {
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        Box::pin(async move { self.send_request(&path_and_query).await })
    }

    /// Returns the time since the last received byte. The gateway's answers to PINGs count as well.
    fn time_since_contact(&self) -> Duration {
        let state = self.lock();
        let traffic = state.traffic.as_ref();
        traffic.map_or(Duration::ZERO, |traffic| traffic.last_read().elapsed())
    }
}

/// Returns a copy of the configuration that offers only HTTP/2.
fn http2_only(config: &ClientConfig) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![wire::ALPN_H2.to_vec()];
    Arc::new(config)
}
