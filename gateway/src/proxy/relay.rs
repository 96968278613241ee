//! Step 6c: bytes both ways, for CONNECT, for upgraded requests and for TCP fronts.
//!
//! The edge dials before it answers, so a refused port is a refusal here and never a success that breaks. A
//! CONNECT is answered within a bound whatever happens: kube-apiserver sets none of its own.

use crate::{
    config::ErrorForm,
    error::{Error, Reason},
    proxy::{
        Proxy, Way,
        access::Record,
        authorize::{Act, Ask, Destination},
        forward,
        front::{Connection, idle::Busy, io::Io},
        held::{Waiting, weighed},
        outgoing::Outgoing,
        recheck::Allowed,
        request_body::RequestBody,
    },
};
use causeway_tunnel::{Receive, Send, client, copy, interim::Exchange, socket::Abort};
use http::{Method, Request, Response, StatusCode, Version};
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
    way: Way<'_>,
    mut request: Request<RequestBody>,
) -> Result<Response<Outgoing>, Error> {
    let switched = hyper::upgrade::on(&mut request);
    let window = (request.version() == Version::HTTP_2).then_some(way.connection.window);
    let halves = open(way).await?;
    way.record.opened(StatusCode::OK);
    let hold = way.proxy.front.errors == ErrorForm::Kubernetes;
    spawn(way, (switched, window), halves, hold);
    Ok(Response::new(Outgoing::empty()))
}

/// Opens a TCP stream to the way's target, within a bound.
pub(super) async fn open(way: Way<'_>) -> Result<(Send, Receive), Error> {
    let bound = way.proxy.shared.timeouts.open;
    let answered = async {
        let opened = way
            .tunnel
            .open(
                Request::new(()),
                &client::Ask::Tcp,
                &way.route.target,
                false,
            )
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
                return Err(Reason::TargetBroken.says(detail));
            }
            Ok((send, answer.into_body()))
        }
        Ok(Err(error)) => Err(forward::failed(way, &error)),
        Err(_) => {
            let detail = format!(
                "{} did not connect to {} within {bound:?}",
                way.route.node, way.route.target
            );
            Err(Reason::TargetTimeout.says(detail))
        }
    }
}

/// Relays between what becomes of the caller's connection, or of its stream with such a window, and a stream, in a
/// task of its own.
pub(super) fn spawn(
    way: Way<'_>,
    (switched, window): (OnUpgrade, Option<u32>),
    (send, receive): (Send, Receive),
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
            Err(error) => return tracing::debug!(%error, "a caller left before its session began"),
        };
        let waiting = Waiting::default();
        let session = Session::new(upgraded, connection, (window, waiting.clone()), busy);
        let work = pin!(copy::relay(
            session,
            send,
            receive,
            record.passed.clone(),
            hold
        ));
        let work = pin!(weighed(shared.limits.pressure(), &waiting, work));
        if let Some(outcome) = record.session_unless_ended(work).await {
            note(&record, node.as_str(), &outcome);
        }
    });
}

/// Runs the session of a TCP front: the way of a request, for a connection that is one.
///
/// # Errors
/// If the session could not begin; the connection then ends with a reset.
pub(super) async fn session(
    proxy: &Proxy,
    io: Io,
    connection: &Arc<Connection>,
    record: &Arc<Record>,
) -> Result<(), Error> {
    let begun = begin(proxy, connection, record).await;
    let (send, receive) = begun.inspect_err(|_| io.abort())?;
    record.opened(StatusCode::OK);
    let work = pin!(copy::relay(io, send, receive, record.passed.clone(), false));
    if let Some(outcome) = record.session_unless_ended(work).await {
        note(record, proxy.front.name.as_str(), &outcome);
    }
    Ok(())
}

async fn begin(
    proxy: &Proxy,
    connection: &Arc<Connection>,
    record: &Arc<Record>,
) -> Result<(Send, Receive), Error> {
    let asked = proxy.front.asked(connection, None);
    let shared = &proxy.shared;
    let nothing = http::HeaderMap::new();
    let (caller, route) = proxy.meet(connection, &nothing, &asked).await?;
    record.caller(&caller);
    record.route(&route);
    let ask = Ask {
        caller: &caller,
        from: connection.peer,
        destination: Destination::Node(&route),
        act: Act::Connect,
        method: &Method::CONNECT,
        path: "",
    };
    record.allow(Allowed::session());
    proxy.authorize(&ask, record).await?;
    let picked = proxy.pick(&route).await?;
    record.permit(shared.limits.admit(&caller.open, &picked.streams)?);
    record.tunnel(picked.id);
    open(Way {
        proxy,
        connection,
        caller: &caller,
        route: &route,
        tunnel: &picked.tunnel,
        id: picked.id,
        record,
        exchange: Exchange::None,
    })
    .await
}

fn note(record: &Record, node: &str, outcome: &copy::Outcome) {
    match outcome {
        copy::Outcome::Clean => record.session_ended(),
        copy::Outcome::Near(error) => {
            record.abandoned(&format!("the client broke its session off: {error}"));
        }
        copy::Outcome::Far(error) => record.failed(&Error::of_stream(node, error)),
    }
}

/// A caller's connection after HTTP gave it up.
pub(super) struct Session {
    io: TokioIo<Upgraded>,
    connection: Arc<Connection>,
    /// What waits behind the last bytes read, where HTTP/2 is spoken.
    window: Option<u32>,
    waiting: Waiting,
    _busy: Busy,
}

impl Session {
    /// Keeps the caller's connection busy for as long as it lives.
    pub(super) fn new(
        upgraded: Upgraded,
        connection: Arc<Connection>,
        (window, waiting): (Option<u32>, Waiting),
        busy: Busy,
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

impl Abort for Session {
    fn abort(&self) {
        self.connection.condition.abort();
    }
}

impl AsyncRead for Session {
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

impl AsyncWrite for Session {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
