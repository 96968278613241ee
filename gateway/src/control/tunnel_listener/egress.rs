//! Connection on which an edge opens streams: connections to the cloud, or to other edges (egress).
//!
//! The edge is the HTTP/2 client here, in contrast to its tunnels. It is checked like an edge that opens a tunnel, and again while the
//! connection is open, so that the streams of a node that was revoked end within seconds. The request path decides about each stream.

use super::{
    HandshakeContext,
    context::{EgressEdge, EgressLink, TunnelListener},
    handshake_error::HandshakeError,
    tls::Io,
};
use crate::{
    control::eligibility::{rejection_reason, untrusted_reason},
    error::Reason,
    state::{
        egress::{MAX_LINKS, NodeEgress},
        registry::EdgeCertificate,
    },
    worker::WorkerId,
};
use causeway_certs::NodeName;
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    TunnelEnd,
    edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream},
    refusal,
};
use std::{fmt, net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, interval, timeout},
};
use tracing::{debug, info, info_span, warn};

/// Interval of checks whether the edge is still admitted, and whether a gateway that drains still needs the connection.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Largest window of a stream towards this gateway, in bytes. The streams of many nodes with slow destinations must fit into
/// `limits.buffered_bytes`.
const MAX_STREAM_WINDOW: u32 = 1 << 20;
/// Maximum number of concurrent streams of one connection. The limit of a node's connections is in the configuration.
const MAX_STREAMS: u32 = 10_000;
/// Time for the connection to close in order, with the bytes that are queued.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

impl HandshakeContext {
    /// Serves an edge that opens streams, until the connection ends, the edge is rejected, or the edge has to leave and no stream is
    /// open.
    pub(super) async fn serve_egress(
        &self,
        io: Io,
        (from, worker): (SocketAddr, WorkerId),
        round_trip: Duration,
    ) -> Result<(), HandshakeError> {
        let admission = &self.admission;
        let verified = admission.tls.load().verify_edge(&io);
        let (node, certificate) = match verified {
            Ok(verified) => verified,
            Err(error) => return Err(refuse(io, error).await),
        };
        // If the gateway cannot check the node in time, it refuses the edge, and the edge dials again.
        let wait_limit = admission.settings.hello_timeout / 2;
        admission.wait_until_checkable(&node, wait_limit).await;
        let rejection = || admission.egress_rejection(&node, &certificate);
        if let Some(why) = rejection() {
            return Err(refuse(io, HandshakeError::NotAdmitted(why)).await);
        }
        if self.stop.is_cancelled() {
            return Err(refuse(io, HandshakeError::Stopping).await);
        }
        let edge = EgressEdge {
            node: node.clone(),
            address: from,
            worker,
        };
        let Some(link) = (admission.egress.0)(edge) else {
            return Err(refuse(io, HandshakeError::EgressFull).await);
        };
        let settings = &admission.settings;
        let config = EdgeSideConfig {
            read_timeout: settings.ping_after + settings.ping_timeout + settings.close_after,
            budget: usize::MAX,
            max_window: MAX_STREAM_WINDOW,
            max_streams: MAX_STREAMS,
            round_trip,
            memory_budget: admission.memory_budget.clone(),
            is_trusted: false,
            ..EdgeSideConfig::default()
        };
        let traffic = io.get_ref().0.traffic();
        let accepting = edge_side::accept(io, traffic, config);
        let accepted = link.replaced.run_until_cancelled(accepting).await;
        let Some(accepted) = accepted else {
            debug!(%node, "an egress connection of {node} ended before its start");
            return Ok(());
        };
        match accepted {
            Ok(connection) => {
                serve_streams(connection, &link, (&node, rejection)).await;
            }
            Err(end @ TunnelEnd::Failed(_)) => log_failure(&link.usage, &node, &end),
            Err(error) => {
                debug!(%node, %error, "the egress connection of {node} ended at its start");
            }
        }
        Ok(())
    }
}

/// Refuses an edge. A plain close would not tell the edge from a lost connection, so it receives the reason.
async fn refuse(io: Io, error: impl Into<HandshakeError>) -> HandshakeError {
    let error = error.into();
    refusal::refuse(io, &error.to_string()).await;
    error
}

impl TunnelListener {
    /// Returns the reason why an edge may not open streams, if there is one.
    fn egress_rejection(&self, node: &NodeName, certificate: &EdgeCertificate) -> Option<String> {
        let is_trusted = || self.tls.load().is_still_trusted(certificate);
        rejection_reason(&self.nodes, node, certificate)
            .or_else(|| untrusted_reason(is_trusted(), node, certificate))
    }
}

async fn serve_streams<S: AsyncRead + AsyncWrite + Unpin>(
    mut connection: EdgeSide<S>,
    link: &EgressLink,
    (node, rejection): (&NodeName, impl Fn() -> Option<String>),
) {
    let streams = TaskGroup::default();
    let mut check = interval(CHECK_INTERVAL);
    loop {
        tokio::select! {
            next = connection.next_stream() => match next {
                Ok(IncomingStream::Stream(request)) if !link.usage.take_stream(Instant::now()) => {
                    let detail = format!("{node} opens connections too fast");
                    request.responder.reject_forwarded(Reason::LimitReached.word(), &detail);
                }
                Ok(IncomingStream::Stream(request)) => {
                    let span = info_span!("egress", %node, target = %request.target);
                    streams.spawn(span, (link.serve_stream)(*request));
                }
                // This end of the connection refuses control streams of nodes itself.
                Ok(IncomingStream::Control(_)) => {}
                // The node violates the protocol or floods, or its connection failed.
                Err(end @ TunnelEnd::Failed(_)) => return log_failure(&link.usage, node, &end),
                Err(end) => return debug!(%node, %end, "the egress connection of {node} ended"),
            },
            () = link.replaced.cancelled() => {
                log_replacement(&link.usage, node);
                break;
            }
            _ = check.tick() => {
                if let Some(why) = rejection() {
                    return info!(%node, why, "closing the egress connection of {node}");
                }
                if streams.is_empty() && (link.must_leave)() {
                    debug!(%node, "closing the egress connection of {node}, because this gateway stops");
                    break;
                }
            }
        }
    }
    drop(streams);
    // A gateway or an edge that hangs does not delay the end.
    let _ = timeout(CLOSE_TIMEOUT, close(connection)).await;
}

/// Logs the failure of a connection. The edge dials again, so the lines of a node are throttled.
fn log_failure(usage: &NodeEgress, node: &NodeName, why: &dyn fmt::Display) {
    if let Some(times) = usage.failure_throttle.record() {
        warn!(%node, times, %why, "egress connections of {node} failed");
    } else {
        debug!(%node, %why, "an egress connection of {node} failed");
    }
}

/// Logs the end of a connection that has not failed. These lines have their own throttle, so they do not hide a failure.
fn log_replacement(usage: &NodeEgress, node: &NodeName) {
    const WHY: &str = "the edge has that many newer ones, or this gateway stops";
    if let Some(times) = usage.replacement_throttle.record() {
        warn!(%node, times, most = MAX_LINKS, "closing egress connections of {node}: {WHY}");
    } else {
        debug!(%node, most = MAX_LINKS, "closing an egress connection of {node}: {WHY}");
    }
}

/// Closes a connection once the bytes of streams that have ended are sent. Streams that the edge opens meanwhile are refused, and the
/// edge opens them on another connection.
async fn close<S: AsyncRead + AsyncWrite + Unpin>(mut connection: EdgeSide<S>) {
    connection.start_shutdown();
    while let Ok(next) = connection.next_stream().await {
        if let IncomingStream::Stream(request) = next {
            let (reason, detail) = (Reason::Draining.word(), "this connection is closing");
            request.responder.reject_forwarded(reason, detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        proxy::{egress::Egress, tests::proxy_state},
        state::Registry,
        worker::Workers,
    };
    use bytes::Bytes;
    use causeway_certs::TrustDomain;
    use causeway_rt::socket::CountedIo;
    use causeway_tunnel::{
        StreamKind, Target,
        gateway_side::{self, GatewaySideConfig, Tunnel},
        wire,
    };
    use http::{Request, Response};
    use serde_json::json;
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    };
    use tokio::{
        io::{AsyncWriteExt, DuplexStream, duplex},
        net::TcpListener,
    };
    use tokio_util::sync::CancellationToken;

    /// Returns a connection whose streams end when the edge resets them, and the switch that makes the edge leave.
    fn link() -> (EgressLink, Arc<AtomicBool>) {
        let leaves = Arc::<AtomicBool>::default();
        let must_leave = leaves.clone();
        let link = EgressLink {
            serve_stream: Arc::new(|mut request| {
                Box::pin(async move {
                    request.responder.wait_for_reset().await;
                })
            }),
            usage: Arc::default(),
            replaced: CancellationToken::new(),
            must_leave: Box::new(move || must_leave.load(Relaxed)),
        };
        (link, leaves)
    }

    /// Serves a connection of an edge. Returns when both ends have ended.
    async fn serve(link: &EgressLink, edge: impl AsyncFn(Tunnel)) {
        let (near, far) = duplex(1 << 14);
        let edge = async {
            let io = CountedIo::new(near);
            let (traffic, config) = (io.traffic(), GatewaySideConfig::default());
            let (tunnel, driver) = gateway_side::connect(io, traffic, config).await.unwrap();
            tokio::join!(driver.run(), edge(tunnel));
        };
        let gateway = async {
            let io = CountedIo::new(far);
            let (traffic, config) = (io.traffic(), EdgeSideConfig::default());
            let connection = edge_side::accept(io, traffic, config).await.unwrap();
            let node = NodeName::parse("edge-1").unwrap();
            serve_streams(connection, link, (&node, || None)).await;
        };
        let ended = timeout(Duration::from_mins(1), async {
            tokio::join!(edge, gateway)
        });
        Box::pin(ended).await.expect("the connection ends");
    }

    async fn open(tunnel: &Tunnel) -> gateway_side::OpenStream {
        let target = Target::new("app", 443);
        let opening = tunnel.open(Request::new(()), &StreamKind::Tcp, &target, false);
        opening.await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_newer_ones_replace_ends_although_a_stream_lasts() {
        let (link, _) = link();
        let edge = async |tunnel| {
            let stream = open(&tunnel).await;
            link.replaced.cancel();
            assert!(stream.response.await.is_err());
        };
        serve(&link, edge).await;
        // This hides no failure that follows.
        assert_eq!(link.usage.failure_throttle.record(), Some(1));
        assert_eq!(link.usage.replacement_throttle.record(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_an_edge_must_leave_ends_with_its_last_stream() {
        let (link, leaves) = link();
        let edge = async |tunnel: Tunnel| {
            // Between two checks, so that none comes before the stream arrives.
            tokio::time::sleep(CHECK_INTERVAL * 41 / 2).await;
            assert!(tunnel.is_open(), "without streams");
            let stream = open(&tunnel).await;
            leaves.store(true, Relaxed);
            tokio::time::sleep(CHECK_INTERVAL * 10).await;
            assert!(tunnel.is_open(), "a stream lasts");
            drop(stream);
        };
        serve(&link, edge).await;
    }

    /// The bytes are more than the connection holds, so most of them are queued when the connection begins to close.
    #[tokio::test(start_paused = true)]
    async fn queued_bytes_of_an_ended_stream_arrive_before_the_connection_ends() {
        const LENGTH: usize = 60_000;
        let (mut link, _) = link();
        let replaced = link.replaced.clone();
        link.serve_stream = Arc::new(move |request| {
            let replaced = replaced.clone();
            Box::pin(async move {
                let mut send = request.responder.send(Response::new(()), false).unwrap();
                let whole = Bytes::from(vec![7; LENGTH]);
                send.send_last(whole).await.unwrap();
                replaced.cancel();
            })
        });
        let edge = async |tunnel: Tunnel| {
            let stream = open(&tunnel).await;
            let mut body = stream.response.await.unwrap().into_body();
            let mut received = 0;
            while let Some(chunk) = body.next_chunk().await {
                received += chunk.expect("no reset").len();
            }
            assert_eq!(received, LENGTH);
        };
        serve(&link, edge).await;
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_a_node_share_its_allowance_of_streams() {
        let (link, _) = link();
        let now = Instant::now();
        while link.usage.take_stream(now) {}
        let edge = async |tunnel: Tunnel| {
            let refused = open(&tunnel).await.response.await.unwrap();
            assert_eq!(refused.headers()[wire::REASON], "limit_reached");
            tunnel.close();
        };
        serve(&link, edge).await;
    }

    /// Returns a connection whose edge ends it with a long text of control characters, and the edge's end.
    async fn failing() -> (EdgeSide<CountedIo<DuplexStream>>, DuplexStream) {
        const PREFACE_AND_SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        let text = b"\n\x1b[31m".repeat(1000);
        let length = u16::try_from(8 + text.len()).unwrap().to_be_bytes();
        let goaway = [
            &[0][..],
            &length,
            &[7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2],
        ]
        .concat();
        let (mut near, far) = duplex(1 << 14);
        let sent = [PREFACE_AND_SETTINGS, &goaway, &text].concat();
        near.write_all(&sent).await.unwrap();
        let io = CountedIo::new(far);
        let (traffic, config) = (io.traffic(), EdgeSideConfig::default());
        let connection = edge_side::accept(io, traffic, config).await;
        (connection.unwrap(), near)
    }

    #[tokio::test(start_paused = true)]
    async fn failures_of_a_node_share_a_throttle_and_have_a_short_text() {
        let (mut connection, _edge) = failing().await;
        let Err(TunnelEnd::Failed(why)) = connection.next_stream().await else {
            panic!("the connection fails");
        };
        assert!(why.contains(r"\n\x1b[31m"), "{why}");
        assert!(!why.contains(char::is_control) && why.len() <= 200, "{why}");
        let (link, _) = link();
        let node = NodeName::parse("edge-1").unwrap();
        for _ in 0..5 {
            let (connection, _edge) = failing().await;
            serve_streams(connection, &link, (&node, || None)).await;
        }
        tokio::time::advance(Duration::from_mins(1)).await;
        // The first was logged.
        assert_eq!(link.usage.failure_throttle.record(), Some(5));
    }

    #[tokio::test]
    async fn a_drain_waits_for_streams_and_cuts_the_rest() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let node = NodeName::parse("edge-1").unwrap();
        let registry = Registry::new(&Workers::on_current_runtime());
        let shared = proxy_state(&registry, std::slice::from_ref(&node));
        let rules = json!({
            "destinations": { "app": server.local_addr().unwrap().to_string() },
            "rules": [{ "to": { "destinations": ["app"] } }],
        });
        let rules = serde_json::from_value(rules).unwrap();
        shared.egress.replace(Some(&rules));
        let (tasks, finish) = (Arc::<TaskGroup>::default(), CancellationToken::new());
        let domain = TrustDomain::parse("causeway.test").unwrap();
        let egress = Egress::new(&shared, domain, (&tasks, &finish));
        let connection = egress.connect(node, ([192, 0, 2, 1], 1).into(), WorkerId(0));
        let connection = Arc::new(connection.unwrap());
        let of_drain = connection.clone();
        let link = EgressLink {
            usage: connection.usage(),
            replaced: connection.replaced(),
            must_leave: Box::new(move || of_drain.must_leave()),
            serve_stream: Arc::new(move |request| {
                let connection = connection.clone();
                Box::pin(async move { connection.serve(request).await })
            }),
        };
        let edge = async |tunnel: Tunnel| {
            let stream = open(&tunnel).await;
            let mut body = stream.response.await.unwrap().into_body();
            assert_eq!(tasks.len(), 1);
            registry.start_drain();
            let refused = open(&tunnel).await.response.await.unwrap();
            assert_eq!(refused.headers()[wire::REASON], "draining", "no tunnel");
            assert_eq!(tasks.drain(Duration::ZERO).await, 1);
            assert!(body.next_chunk().await.unwrap().is_err());
        };
        serve(&link, edge).await;
    }
}
