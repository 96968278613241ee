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
    state::{egress::MAX_LINKS, registry::EdgeCertificate},
    worker::WorkerId,
};
use causeway_certs::NodeName;
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    control_frame_limit::ControlFrameLimiter,
    edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream},
    liveness::KeepaliveConfig,
    refusal,
};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::interval,
};
use tracing::{debug, info, info_span, warn};

/// Interval of checks whether the edge is still admitted, and whether a gateway that drains still needs the connection.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of unread bytes for which the windows of one connection's streams are computed when it begins. They stay as they are, so
/// the streams of many nodes with slow destinations must fit into `limits.buffered_bytes`.
const UNREAD_BYTES: usize = 1 << 20;
/// Maximum number of concurrent streams of one connection. The limit of a node's connections is in the configuration.
const MAX_STREAMS: u32 = 10_000;
/// Number of streams that an edge may open at once on one connection, and for each further [`CHECK_INTERVAL`].
const MAX_BURST: u32 = 2_000;
const STREAMS_PER_CHECK: u32 = 200;

impl HandshakeContext {
    /// Serves an edge that opens streams, until the connection ends, the edge is rejected, or this gateway closes its listeners and
    /// no stream is open.
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
        let keepalive = KeepaliveConfig {
            probe_after: settings.ping_after,
            suspect_after: settings.ping_timeout,
            close_after: settings.close_after,
        };
        let config = EdgeSideConfig {
            read_timeout: keepalive.probe_after + keepalive.suspect_after + keepalive.close_after,
            budget: UNREAD_BYTES,
            max_streams: MAX_STREAMS,
            round_trip,
            memory_budget: admission.memory_budget.clone(),
            permits_many_resets: false,
            ..EdgeSideConfig::default()
        };
        let traffic = io.get_ref().0.traffic();
        let io = ControlFrameLimiter::new(io, || {
            warn!(%node, "{node} sent too many control frames on its egress connection, which ends");
        });
        match edge_side::accept(io, traffic, config).await {
            Ok(connection) => {
                serve_streams(connection, &link, (&node, rejection)).await;
            }
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

/// Number of streams that an edge may open on one connection. Each costs a task and a line of the access log, even if it is reset at
/// once.
struct StreamAllowance(u32);

impl Default for StreamAllowance {
    fn default() -> Self {
        Self(MAX_BURST)
    }
}

impl StreamAllowance {
    /// Whether one more stream may be opened now.
    fn take(&mut self) -> bool {
        let left = self.0.checked_sub(1);
        self.0 = left.unwrap_or_default();
        left.is_some()
    }

    /// Adds the streams of one [`CHECK_INTERVAL`].
    fn refill(&mut self) {
        self.0 = MAX_BURST.min(self.0 + STREAMS_PER_CHECK);
    }
}

async fn serve_streams<S: AsyncRead + AsyncWrite + Unpin>(
    mut connection: EdgeSide<S>,
    link: &EgressLink,
    (node, rejection): (&NodeName, impl Fn() -> Option<String>),
) {
    let streams = TaskGroup::default();
    let mut check = interval(CHECK_INTERVAL);
    let mut allowance = StreamAllowance::default();
    loop {
        tokio::select! {
            next = connection.next_stream() => match next {
                Ok(IncomingStream::Stream(request)) if !allowance.take() => {
                    let detail = format!("{node} opens connections too fast");
                    request.responder.reject_forwarded(Reason::LimitReached.word(), &detail);
                }
                Ok(IncomingStream::Stream(request)) => {
                    let span = info_span!("egress", %node, target = %request.target);
                    streams.spawn(span, (link.serve_stream)(*request));
                }
                Ok(IncomingStream::Control(_)) => {
                    debug!(%node, "refused a control stream on the egress connection of {node}");
                }
                Err(end) => return debug!(%node, %end, "the egress connection of {node} ended"),
            },
            () = link.replaced.cancelled() => {
                return warn!(
                    %node,
                    "closing the oldest egress connection of {node}, because the node has {MAX_LINKS} newer ones"
                );
            }
            _ = check.tick() => {
                allowance.refill();
                if let Some(why) = rejection() {
                    return info!(%node, why, "closing the egress connection of {node}");
                }
                if link.finish.is_cancelled() && streams.is_empty() {
                    return debug!(%node, "closing the egress connection of {node}, because this gateway stops");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_rt::socket::CountedIo;
    use causeway_tunnel::{
        StreamKind, Target,
        gateway_side::{self, GatewaySideConfig, Tunnel},
    };
    use http::Request;
    use std::sync::Arc;
    use tokio::{io::duplex, time::timeout};
    use tokio_util::sync::CancellationToken;

    /// Returns a connection whose streams end when the edge resets them.
    fn link() -> EgressLink {
        EgressLink {
            serve_stream: Arc::new(|mut request| {
                Box::pin(async move {
                    request.responder.wait_for_reset().await;
                })
            }),
            replaced: CancellationToken::new(),
            finish: CancellationToken::new(),
        }
    }

    /// Serves a connection of an edge. Returns when both ends have ended.
    async fn serve(link: &EgressLink, edge: impl AsyncFn(Tunnel)) {
        let (near, far) = duplex(1 << 16);
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
        let link = link();
        let edge = async |tunnel| {
            let stream = open(&tunnel).await;
            link.replaced.cancel();
            assert!(stream.response.await.is_err());
        };
        serve(&link, edge).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_streams_lasts_until_the_listeners_close() {
        let link = link();
        let edge = async |tunnel: Tunnel| {
            tokio::time::sleep(Duration::from_secs(20)).await;
            assert!(tunnel.is_open());
            let stream = open(&tunnel).await;
            link.finish.cancel();
            tokio::time::sleep(Duration::from_secs(20)).await;
            assert!(tunnel.is_open(), "a stream lasts");
            drop(stream);
        };
        serve(&link, edge).await;
    }

    #[test]
    fn an_edge_opens_a_burst_of_streams_and_then_so_many_for_each_check() {
        let mut allowance = StreamAllowance::default();
        let mut opened = || (0..10_000).filter(|_| allowance.take()).count();
        assert_eq!(opened(), 2_000);
        assert_eq!(opened(), 0);
        allowance.refill();
        let mut opened = || (0..10_000).filter(|_| allowance.take()).count();
        assert_eq!(opened(), 200);
        for _ in 0..100 {
            allowance.refill();
        }
        assert_eq!((0..10_000).filter(|_| allowance.take()).count(), 2_000);
    }
}
