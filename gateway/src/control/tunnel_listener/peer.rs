//! Connection of another gateway: it reads the nodes of this gateway, and forwards requests for them.

use super::{HandshakeContext, handshake_error::HandshakeError, tls::Io};
use crate::{
    control::peers::{ForwardHandler, NodeFeed},
    state::directory::ForwardingGateway,
};
use causeway_certs::PeerRejected;
use causeway_rt::task::TaskGroup;
use causeway_tunnel::edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::interval,
};
use tracing::{debug, info_span, warn};

/// Interval of checks whether a gateway that drains still needs the connection.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of checks of the other gateway's certificate: its expiry, the trusted roots, and revocations.
const TRUST_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of control streams of a connection. A gateway needs one for nodes, and one for each question about a rotation.
pub(crate) const MAX_CONTROL_STREAMS: usize = 8;
/// Largest window of a stream towards this gateway, in bytes.
const MAX_STREAM_WINDOW: u32 = 512 << 10;

impl HandshakeContext {
    /// Serves another gateway until the connection ends, or until this gateway drains and no stream is open.
    pub(super) async fn serve_peer(
        &self,
        io: Io,
        from: SocketAddr,
        round_trip: Duration,
    ) -> Result<(), HandshakeError> {
        let admission = &self.admission;
        let chain = io.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: Vec<_> = chain.iter().map(|one| one.clone().into_owned()).collect();
        let serial = admission.tls.load().verify_gateway(&chain)?.into();
        let Some(serve_stream) = admission.peer_streams.clone() else {
            return Ok(());
        };
        let settings = &admission.settings;
        let config = EdgeSideConfig {
            read_timeout: settings.ping_after + settings.ping_timeout + settings.close_after,
            // Streams of many nodes: a slow edge may leave its windows unread, and takes nothing from those of the others.
            budget: usize::MAX,
            max_window: MAX_STREAM_WINDOW,
            // The limits of nodes and of the gateway apply to each stream.
            max_streams: u32::MAX,
            round_trip,
            memory_budget: admission.memory_budget.clone(),
            ..EdgeSideConfig::default()
        };
        let traffic = io.get_ref().0.traffic();
        let connection = match edge_side::accept(io, traffic, config).await {
            Ok(connection) => connection,
            Err(error) => {
                debug!(peer = %from, %error, "the connection of another gateway ended at its start");
                return Ok(());
            }
        };
        let feed = NodeFeed {
            registry: admission.registry.clone(),
            ca: admission.ca.clone(),
            revocation: Some(admission.gateway_revocation.clone()),
            instance: admission.instance.to_string(),
            hello_timeout: settings.hello_timeout,
        };
        let tls = admission.tls.clone();
        let rejection = move || tls.load().verify_gateway(&chain).err();
        let from = ForwardingGateway {
            address: from,
            serial,
        };
        serve_streams((connection, from), &feed, (&serve_stream, &rejection)).await;
        Ok(())
    }
}

/// Serves the streams of another gateway until the connection ends, until the certificate of that gateway is rejected, or until
/// this gateway drains and needs the connection no longer.
pub(crate) async fn serve_streams<S: AsyncRead + AsyncWrite + Unpin>(
    (mut connection, from): (EdgeSide<S>, ForwardingGateway),
    feed: &NodeFeed,
    (serve_stream, rejection): (&ForwardHandler, &(dyn Fn() -> Option<PeerRejected> + Sync)),
) {
    let registry = &feed.registry;
    let (feeds, streams) = (TaskGroup::default(), TaskGroup::default());
    let (mut idle_check, mut trust_check) = (
        interval(IDLE_CHECK_INTERVAL),
        interval(TRUST_CHECK_INTERVAL),
    );
    let mut drains = false;
    loop {
        tokio::select! {
            next = connection.next_stream() => match next {
                Ok(IncomingStream::Stream(request)) => {
                    let span = info_span!("forwarded", target = %request.target);
                    streams.spawn(span, (serve_stream.0)(*request, from.clone()));
                }
                Ok(IncomingStream::Control(_)) if feeds.len() >= MAX_CONTROL_STREAMS => {
                    debug!("refused a further control stream of another gateway");
                }
                Ok(IncomingStream::Control(control)) => {
                    feeds.spawn(info_span!("peer_feed"), feed.clone().run(*control));
                }
                Err(end) => return debug!(%end, "the connection of another gateway ended"),
            },
            () = registry.drain_started(), if !drains => drains = true,
            // Until then the other gateway may forward requests for nodes that have no other gateway.
            _ = idle_check.tick(), if drains && streams.is_empty() => {
                if registry.connected_nodes() == 0 {
                    return;
                }
            }
            _ = trust_check.tick() => if let Some(why) = rejection() {
                return warn!(%why, "closed the connection of another gateway");
            },
        }
    }
}
