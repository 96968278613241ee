//! Connection of another gateway: it reads the nodes of this gateway, and forwards requests for them.

use super::{HandshakeContext, HandshakeError, tls::Io};
use crate::control::peers::{ForwardHandler, NodeFeed};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream},
    liveness::KeepaliveConfig,
};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, interval},
};
use tracing::{debug, info_span};

/// Time without streams after which a gateway that drains closes the connection.
const IDLE_CLOSE_AFTER: Duration = Duration::from_secs(1);
/// Interval of checks for that.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(200);

impl HandshakeContext {
    /// Serves another gateway until the connection ends, or until this gateway drains and no stream is open.
    pub(super) async fn serve_peer(
        &self,
        io: Io,
        from: SocketAddr,
        round_trip: Duration,
    ) -> Result<(), HandshakeError> {
        let admission = &self.admission;
        admission.tls.load().verify_gateway(&io)?;
        let Some(serve_stream) = admission.peer_streams.clone() else {
            return Ok(());
        };
        let settings = &admission.settings;
        let keepalive = KeepaliveConfig {
            probe_after: settings.ping_after,
            suspect_after: settings.ping_timeout,
            close_after: settings.close_after,
        };
        let config = EdgeSideConfig {
            read_timeout: keepalive.probe_after + keepalive.suspect_after + keepalive.close_after,
            budget: settings.memory,
            max_streams: u32::try_from(settings.max_streams_per_tunnel).unwrap_or(u32::MAX),
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
            instance: admission.instance.to_string(),
            hello_timeout: settings.hello_timeout,
        };
        serve_streams(connection, &feed, &serve_stream).await;
        Ok(())
    }
}

async fn serve_streams<S: AsyncRead + AsyncWrite + Unpin>(
    mut connection: EdgeSide<S>,
    feed: &NodeFeed,
    serve_stream: &ForwardHandler,
) {
    let (feeds, streams) = (TaskGroup::default(), TaskGroup::default());
    let mut idle_check = interval(IDLE_CHECK_INTERVAL);
    let mut last_active = Instant::now();
    loop {
        tokio::select! {
            next = connection.next_stream() => match next {
                Ok(IncomingStream::Stream(request)) => {
                    last_active = Instant::now();
                    let span = info_span!("forwarded", target = %request.target);
                    streams.spawn(span, (serve_stream.0)(*request));
                }
                Ok(IncomingStream::Control(control)) => {
                    feeds.spawn(info_span!("peer_feed"), feed.clone().run(*control));
                }
                Err(end) => return debug!(%end, "the connection of another gateway ended"),
            },
            _ = idle_check.tick(), if feed.registry.is_draining() => {
                if !streams.is_empty() {
                    last_active = Instant::now();
                } else if last_active.elapsed() >= IDLE_CLOSE_AFTER {
                    return;
                }
            }
        }
    }
}
