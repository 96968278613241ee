//! Step 6c: relays bytes both ways, for CONNECT, for upgraded requests and for TCP listeners.
//!
//! The edge dials before it answers. A refused port is therefore an error response, and never a success that breaks afterwards. A
//! CONNECT is answered within a timeout in every case, because kube-apiserver has none of its own.

use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    proxy::{
        access_log::AccessRecord,
        context::StreamContext,
        forward,
        listener::{ClientConnection, idle_timer::ActiveRequest},
        peer,
        request_body::RequestBody,
        response_body::ResponseBody,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use causeway_rt::{listener::RemoteAddr, socket::ResetOnClose};
use causeway_tunnel::{StreamKind, StreamReceiver, StreamSender, copy, edge_side};
use http::{Request, Response, StatusCode, Version};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::{
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tracing::debug_span;

/// Answers a CONNECT, and relays bytes after the response.
///
/// # Errors
/// If the stream cannot be opened or the target cannot be dialled.
pub async fn connect(
    ctx: StreamContext<'_>,
    mut request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let on_upgrade = hyper::upgrade::on(&mut request);
    let window = (request.version() == Version::HTTP_2).then_some(ctx.connection.window);
    let source = ctx.connection.peer;
    let halves = open_tcp_stream(ctx, Some(source), ctx.proxy.shared.timeouts.connect).await?;
    ctx.record.session_started(StatusCode::OK);
    let client_speaks_first = ctx.proxy.listener.error_format == ErrorFormat::Kubernetes;
    spawn_relay(ctx, (on_upgrade, window), halves, client_speaks_first);
    Ok(Response::new(ResponseBody::empty()))
}

/// Opens a TCP stream to the target of the route, within a timeout. The target may learn the `source`, so a connection that several
/// clients use has none.
pub(super) async fn open_tcp_stream(
    ctx: StreamContext<'_>,
    source: Option<RemoteAddr>,
    connect_timeout: Duration,
) -> Result<(StreamSender, StreamReceiver), Error> {
    let mut head = Request::new(());
    if let Some(RemoteAddr::Tcp(source)) = source {
        edge_side::set_source(head.headers_mut(), source);
    }
    let connecting = async {
        let opened = peer::open_stream(ctx, head, &StreamKind::Tcp, false).await?;
        let answer = opened.response.await;
        let answer = answer.map_err(|error| forward::stream_error(ctx, &error))?;
        Ok((opened.send, answer))
    };
    match tokio::time::timeout(connect_timeout, connecting).await {
        Ok(Ok((sender, answer))) => {
            forward::check_edge_rejection(ctx, answer.headers())?;
            if answer.status() != StatusCode::OK {
                let detail = format!(
                    "{} answered {} to a CONNECT",
                    ctx.route.node,
                    answer.status()
                );
                return Err(Reason::TargetBroken.error(detail));
            }
            Ok((sender, answer.into_body()))
        }
        Ok(Err(error)) => Err(error),
        Err(_) => {
            let detail = format!(
                "{} did not connect to {} within {connect_timeout:?}",
                ctx.route.node, ctx.route.target
            );
            Err(Reason::TargetTimeout.error(detail))
        }
    }
}

/// Spawns a task that relays between a stream and the client's connection, or the client's HTTP/2 stream with this window.
pub(super) fn spawn_relay(
    ctx: StreamContext<'_>,
    (on_upgrade, window): (OnUpgrade, Option<u32>),
    (sender, receiver): (StreamSender, StreamReceiver),
    client_speaks_first: bool,
) {
    let connection = ctx.connection.clone();
    let shared = ctx.proxy.shared.clone();
    // The response itself is complete at once.
    let busy_guard = connection.idle.begin_request();
    let record = ctx.record.clone();
    let node = ctx.route.node.clone();
    ctx.proxy.tasks.spawn(debug_span!("session"), async move {
        let upgraded = match on_upgrade.await {
            Ok(upgraded) => upgraded,
            Err(error) => {
                return tracing::debug!(%error, "a client disconnected before its session began");
            }
        };
        let buffered = BufferedBody::default();
        let session =
            UpgradedClient::new(upgraded, connection, (window, buffered.clone()), busy_guard);
        let relaying = pin!(copy::relay(
            session,
            sender,
            receiver,
            record.bytes.clone(),
            client_speaks_first
        ));
        let work = pin!(track_buffered(
            shared.limits.memory_budget(),
            &buffered,
            relaying
        ));
        if let Some(outcome) = record.run_session_unless_terminated(work).await {
            note(&record, node.as_str(), &outcome);
        }
    });
}

/// Records how a session has ended.
pub(super) fn note(record: &AccessRecord, node: &str, outcome: &copy::CopyOutcome) {
    match outcome {
        copy::CopyOutcome::Clean => record.mark_session_ended(),
        copy::CopyOutcome::Socket(error) => {
            record.record_abandoned(&format!("the client aborted its session: {error}"));
        }
        copy::CopyOutcome::Stream(error) => {
            record.record_failure(&Error::from_stream_error(node, error));
        }
    }
}

/// Client connection that HTTP has released after an upgrade.
pub(super) struct UpgradedClient {
    io: TokioIo<Upgraded>,
    connection: Arc<ClientConnection>,
    /// Maximum number of bytes buffered after the last bytes read, if the client speaks HTTP/2.
    window: Option<u32>,
    buffered: BufferedBody,
    _busy_guard: ActiveRequest,
}

impl UpgradedClient {
    /// Returns a session that keeps the client's connection busy until it is dropped.
    pub(super) fn new(
        upgraded: Upgraded,
        connection: Arc<ClientConnection>,
        (window, buffered): (Option<u32>, BufferedBody),
        busy_guard: ActiveRequest,
    ) -> Self {
        Self {
            io: TokioIo::new(upgraded),
            connection,
            window,
            buffered,
            _busy_guard: busy_guard,
        }
    }
}

impl ResetOnClose for UpgradedClient {
    fn abort(&self) {
        self.connection.condition.abort();
    }
}

impl AsyncRead for UpgradedClient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled_before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        let Some(window) = self.window else {
            return polled;
        };
        match buf.filled().len() - filled_before {
            0 if polled.is_pending() => self.buffered.note_pending(),
            0 => self.buffered.note_chunk(0),
            read => {
                let window = usize::try_from(window).unwrap_or(usize::MAX);
                self.buffered.note_chunk(read + window);
            }
        }
        polled
    }
}

impl AsyncWrite for UpgradedClient {
    causeway_rt::forward!(io: poll_write, poll_flush, poll_shutdown);
}
