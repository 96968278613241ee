//! Fixtures for tests of the request path: the state of a gateway without a control plane, an edge, and requests of clients.

use super::{
    Proxy, ProxyState,
    access_log::OpenStreams,
    authn::Authenticator,
    authz::PolicyAuthorizer,
    forwarding_headers::ForwardingHeaders,
    identity_headers::IdentityHeaderFields,
    limits::{Counter, Limits},
    listener::{Listener, accept::AcceptedSocket},
    upstream::{ByPort, ConnectionPool, UpstreamTlsPorts},
};
use crate::{
    config::{self, AccessLog, ErrorFormat, ListenAddr, ListenerProtocol, Timeouts},
    metrics::Metrics,
    state::{EgressRules, EgressUsage, Node, NodesWriter, PolicyWriter, Registry, pins},
    worker::WorkerId,
};
use bytes::Bytes;
use causeway_certs::{NodeName, PinTable};
use causeway_rt::{
    listener::RemoteAddr, log_throttle::LogThrottle, socket::CountedIo, task::TaskGroup,
};
use causeway_tunnel::{
    TunnelEnd,
    edge_side::{self, EdgeSideConfig, IncomingStream, StreamRequest},
    informational::ExchangeId,
};
use futures_util::future::{Either, join, select};
use http::{Request, Response, header::SERVER, response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use std::{
    convert::Infallible,
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, duplex},
    sync::watch,
    time::sleep,
};

/// Returns the state of a gateway that knows these nodes and allows all requests.
pub(crate) fn proxy_state(registry: &Registry, nodes: &[NodeName]) -> Arc<ProxyState> {
    let (metrics, timeouts, limits) = (
        Metrics::new(),
        Timeouts::default(),
        config::Limits::default(),
    );
    let known = NodesWriter::default();
    for node in nodes {
        known.upsert(node.clone(), Node::default());
    }
    let authorizer = Arc::new(PolicyAuthorizer {
        policy: PolicyWriter::new(None).reader(),
        nodes: known.reader(),
    });
    let pool = ConnectionPool::new(1, timeouts.idle_keepalive);
    let (pins, ..) = pins::pins(PinTable::new());
    Arc::new(ProxyState {
        nodes: known.reader(),
        registry: registry.clone(),
        direct_streams: Counter::default(),
        egress: EgressRules::default(),
        egress_usage: EgressUsage::default(),
        streams: Arc::new(OpenStreams::new(
            1,
            (authorizer.clone(), registry.clone()),
            (AccessLog::None, timeouts.drain),
        )),
        upstream_tls_ports: UpstreamTlsPorts::new(ByPort::new(), pool, pins),
        pods: None,
        reviews: None,
        authorizer,
        max_uri_bytes: limits.max_uri_bytes,
        max_kubernetes_uri_bytes: limits.max_kubernetes_uri_bytes,
        header_bytes: limits.max_header_bytes,
        max_headers: limits.max_headers,
        limits: Arc::new(Limits::new(limits, &metrics)),
        metrics,
        timeouts,
    })
}

/// Returns a listener for anonymous clients.
pub(crate) fn proxy(shared: &Arc<ProxyState>) -> Proxy {
    let address = ListenAddr::Tcp(([127, 0, 0, 1], 0).into());
    let config = config::Listener::new("web", ListenerProtocol::Http, address);
    let listener = Listener {
        name: config.name.clone(),
        protocol: ListenerProtocol::Http,
        node: None,
        node_set: None,
        port: Some(9100),
        has_node_list: false,
        names: Vec::new(),
        bound_port: None,
        tls: None,
        plaintext_networks: Vec::new(),
        authentication: Authenticator {
            allows_anonymous: true,
            ..Authenticator::default()
        },
        kubelets: Vec::new(),
        revoked: [].into(),
        disconnect_expired: true,
        forward_authorization: false,
        identity_headers: IdentityHeaderFields::default(),
        forwarding: ForwardingHeaders::new(&config),
        error_format: ErrorFormat::Problem,
        original_destination: false,
        direct_networks: Vec::new(),
        proxy_protocol: Vec::new(),
        metrics: shared.metrics.listener("web"),
        tls_refusal_throttle: LogThrottle::default(),
        exhaustion_throttle: LogThrottle::default(),
        retired_at: OnceLock::new(),
        successor: OnceLock::new(),
    };
    Proxy {
        shared: shared.clone(),
        listener: Arc::new(listener),
        worker: WorkerId(0),
        tasks: Arc::default(),
    }
}

/// Sends a request on a new connection, and reads the response to its end. Calls a function when the head of the response arrives.
pub(crate) async fn send(
    proxy: &Proxy,
    request: Request<Full<Bytes>>,
    on_head: impl FnOnce(&response::Parts),
) -> hyper::Result<Response<Bytes>> {
    let peer = RemoteAddr::Tcp(([192, 0, 2, 1], 4711).into());
    let accepted = AcceptedSocket {
        peer,
        original: None,
        member: None,
        room: proxy.shared.limits.admit_connection(peer).unwrap(),
    };
    let connection = &Arc::new(accepted.connection(proxy, None, false, Ok(None)));
    let service = service_fn(async |request: Request<Incoming>| {
        Ok::<_, Infallible>(proxy.handle(connection, request, ExchangeId::None).await)
    });
    let (near, far) = duplex(64 << 10);
    let server = hyper::server::conn::http1::Builder::new();
    let serving = server.serve_connection(TokioIo::new(far), service);
    let (mut sender, sending) = hyper::client::conn::http1::handshake(TokioIo::new(near)).await?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let (head, body) = response.into_parts();
        on_head(&head);
        Ok(Response::from_parts(head, body.collect().await?.to_bytes()))
    };
    // The connection is closed when the response has been read.
    match select(pin!(exchange), pin!(join(serving, sending))).await {
        Either::Left((response, _)) => response,
        Either::Right((_, exchange)) => exchange.await,
    }
}

/// Serves the streams of a tunnel or of a link until it ends. Neither reads nor answers while `is_frozen`.
pub(crate) async fn serve_streams<S>(
    io: S,
    mut is_frozen: watch::Receiver<bool>,
    serve: impl Fn(IncomingStream, &TaskGroup),
) -> TunnelEnd
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let io = CountedIo::new(io);
    let traffic = io.traffic();
    let mut connection = match edge_side::accept(io, traffic, EdgeSideConfig::default()).await {
        Ok(connection) => connection,
        Err(end) => return end,
    };
    let tasks = TaskGroup::default();
    loop {
        // The connection stays frozen if nobody can thaw it.
        let _ = is_frozen.wait_for(|is_frozen| !is_frozen).await;
        tokio::select! {
            biased;
            Ok(()) = is_frozen.changed() => {}
            next = connection.next_stream() => match next {
                Ok(stream) => serve(stream, &tasks),
                Err(end) => return end,
            },
        }
    }
}

/// Reads a request to its end and answers it with the name of a server, as an upstream behind an edge does. The body of the
/// response follows its head after a delay.
pub(crate) async fn answer(mut request: StreamRequest, server: String, delay: Duration) {
    while let Some(chunk) = request.body.next_chunk().await {
        if chunk.is_err() {
            return;
        }
    }
    let head = Response::builder().header(SERVER, &server).body(());
    if let Ok(mut body) = request.responder.send(head.unwrap(), false) {
        sleep(delay).await;
        let _ = body.send_last(server.into()).await;
    }
}
