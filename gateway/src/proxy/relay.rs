//! Step 6c: bytes both ways, for CONNECT, for upgraded requests and for TCP listeners.
//!
//! The edge dials before it answers, so a refused port is a refusal here and never a success that breaks. A CONNECT is answered
//! within a bound in every case: kube-apiserver sets none of its own.

use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    proxy::{
        access_log::AccessRecord,
        context::StreamContext,
        forward,
        listener::{ClientConnection, idle_timer::ActiveRequest},
        request_body::RequestBody,
        response_body::ResponseBody,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::{StreamKind, StreamReceiver, StreamSender, copy};
use http::{Request, Response, StatusCode, Version};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::{
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tracing::debug_span;

/// Answers a CONNECT, and relays behind the answer.
///
/// # Errors
/// If the stream cannot be opened or the target cannot be dialled.
pub async fn connect(
    way: StreamContext<'_>,
    mut request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let switched = hyper::upgrade::on(&mut request);
    let window = (request.version() == Version::HTTP_2).then_some(way.connection.window);
    let halves = open(way).await?;
    way.record.opened(StatusCode::OK);
    let hold = way.proxy.listener.errors == ErrorFormat::Kubernetes;
    spawn(way, (switched, window), halves, hold);
    Ok(Response::new(ResponseBody::empty()))
}

/// Opens a TCP stream to the target of the route, within a bound.
pub(super) async fn open(way: StreamContext<'_>) -> Result<(StreamSender, StreamReceiver), Error> {
    let bound = way.proxy.shared.timeouts.connect;
    let answered = async {
        let opened = way
            .tunnel
            .open(Request::new(()), &StreamKind::Tcp, &way.route.target, false)
            .await?;
        Ok((opened.send, opened.answer.await?))
    };
    match tokio::time::timeout(bound, answered).await {
        Ok(Ok((send, answer))) => {
            forward::refusal(way, answer.headers())?;
            if answer.status() != StatusCode::OK {
                let detail = format!(
                    "{} answered {} to a CONNECT",
                    way.route.node,
                    answer.status()
                );
                return Err(Reason::TargetBroken.error(detail));
            }
            Ok((send, answer.into_body()))
        }
        Ok(Err(error)) => Err(forward::failed(way, &error)),
        Err(_) => {
            let detail = format!(
                "{} did not connect to {} within {bound:?}",
                way.route.node, way.route.target
            );
            Err(Reason::TargetTimeout.error(detail))
        }
    }
}

/// Relays between a stream and the client's connection, or the client's HTTP/2 stream with this window, in a task of its own.
pub(super) fn spawn(
    way: StreamContext<'_>,
    (switched, window): (OnUpgrade, Option<u32>),
    (send, receive): (StreamSender, StreamReceiver),
    hold: bool,
) {
    let connection = way.connection.clone();
    let shared = way.proxy.shared.clone();
    // The answer is over at once.
    let busy = connection.idle.busy();
    let record = way.record.clone();
    let node = way.route.node.clone();
    way.proxy.tasks.spawn(debug_span!("session"), async move {
        let upgraded = match switched.await {
            Ok(upgraded) => upgraded,
            Err(error) => {
                return tracing::debug!(%error, "a client disconnected before its session began");
            }
        };
        let waiting = BufferedBody::default();
        let session = UpgradedClient::new(upgraded, connection, (window, waiting.clone()), busy);
        let work = pin!(copy::relay(
            session,
            send,
            receive,
            record.passed.clone(),
            hold
        ));
        let work = pin!(track_buffered(shared.limits.pressure(), &waiting, work));
        if let Some(outcome) = record.session_unless_ended(work).await {
            note(&record, node.as_str(), &outcome);
        }
    });
}

/// Notes how a session has ended.
pub(super) fn note(record: &AccessRecord, node: &str, outcome: &copy::CopyOutcome) {
    match outcome {
        copy::CopyOutcome::Clean => record.session_ended(),
        copy::CopyOutcome::Near(error) => {
            record.abandoned(&format!("the client aborted its session: {error}"));
        }
        copy::CopyOutcome::Far(error) => record.failed(&Error::of_stream(node, error)),
    }
}

/// A client's connection after HTTP has released it.
pub(super) struct UpgradedClient {
    io: TokioIo<Upgraded>,
    connection: Arc<ClientConnection>,
    /// Maximum bytes buffered behind the last bytes read, if HTTP/2 is spoken.
    window: Option<u32>,
    waiting: BufferedBody,
    _busy: ActiveRequest,
}

impl UpgradedClient {
    /// Returns a session that keeps the client's connection busy for as long as it lives.
    pub(super) fn new(
        upgraded: Upgraded,
        connection: Arc<ClientConnection>,
        (window, waiting): (Option<u32>, BufferedBody),
        busy: ActiveRequest,
    ) -> Self {
        Self {
            io: TokioIo::new(upgraded),
            connection,
            window,
            waiting,
            _busy: busy,
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
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        let Some(window) = self.window else {
            return polled;
        };
        match buf.filled().len() - before {
            0 if polled.is_pending() => self.waiting.none(),
            0 => self.waiting.some(0),
            read => {
                let window = usize::try_from(window).unwrap_or(usize::MAX);
                self.waiting.some(read + window);
            }
        }
        polled
    }
}

impl AsyncWrite for UpgradedClient {
    causeway_rt::forward!(io: poll_write, poll_flush, poll_shutdown);
}
