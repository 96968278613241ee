//! Step 6c: relays bytes both ways, for CONNECT, for upgraded requests and for TCP listeners.
//!
//! The edge dials before it answers. A refused port is therefore an error response, and never a success that breaks afterwards. A
//! CONNECT is answered within a timeout in every case, because kube-apiserver has none of its own.

use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    proxy::{
        access_log::AccessRecord, client_session::PendingSession, context::StreamContext, forward,
        peer, request_body::RequestBody, response_body::ResponseBody,
        upload_budget::track_buffered,
    },
};
use causeway_rt::listener::RemoteAddr;
use causeway_tunnel::{StreamError, StreamKind, StreamReceiver, StreamSender, copy, edge_side};
use http::{Request, Response, StatusCode};
use std::{pin::pin, time::Duration};
use tracing::debug_span;

/// Detail of the record of a session whose client has reset its HTTP/2 stream.
pub(super) const RESET_BY_CLIENT: &str =
    "the client aborted its session: it has reset its HTTP/2 stream";

/// Answers a CONNECT, and relays bytes after the response.
///
/// # Errors
/// If the stream cannot be opened or the target cannot be dialled.
pub async fn connect(
    ctx: StreamContext<'_>,
    mut request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let session = PendingSession::take(&mut request);
    let source = ctx.connection.peer;
    let halves = open_tcp_stream(ctx, Some(source), ctx.proxy.shared.timeouts.connect).await?;
    ctx.record.session_started(StatusCode::OK);
    let client_speaks_first = ctx.proxy.listener.error_format == ErrorFormat::Kubernetes;
    spawn_relay(ctx, session, halves, client_speaks_first);
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
        let opening = peer::open_stream(ctx, &mut head, &StreamKind::Tcp, false);
        let (opened, moved_to) = opening.await?;
        let answer = opened.response.await;
        let answer = answer.map_err(|error| peer::stream_error(ctx, &error))?;
        forward::check_edge_rejection(ctx.moved_to(moved_to.as_ref()), answer.headers())?;
        Ok((opened.send, answer))
    };
    match tokio::time::timeout(connect_timeout, connecting).await {
        Ok(Ok((sender, answer))) => {
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

/// Spawns a task that relays between a stream and the client's session.
pub(super) fn spawn_relay(
    ctx: StreamContext<'_>,
    session: PendingSession,
    (sender, receiver): (StreamSender, StreamReceiver),
    client_speaks_first: bool,
) {
    let starting = session.start(ctx.connection.clone());
    let shared = ctx.proxy.shared.clone();
    let record = ctx.record.clone();
    let node = ctx.route.node.clone();
    ctx.proxy.tasks.spawn(debug_span!("session"), async move {
        let Some(session) = starting.await else {
            return;
        };
        let (buffered, reset) = (session.buffered(), session.wait_reset());
        let relaying = pin!(copy::relay(
            session,
            sender,
            receiver,
            &record.bytes,
            client_speaks_first
        ));
        let work = pin!(track_buffered(
            shared.limits.memory_budget(),
            &buffered,
            relaying
        ));
        tokio::select! {
            biased;
            outcome = record.run_unless_terminated(work) => if let Ok(outcome) = outcome {
                note(&record, node.as_str(), &outcome);
            },
            () = reset => record.record_abandoned(RESET_BY_CLIENT),
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
            if matches!(error, StreamError::Evicted) {
                record.connection().condition.lost_stream();
            }
            record.record_failure(&Error::from_stream_error(node, error));
        }
    }
}
