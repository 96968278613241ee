//! HTTP of a listener: serves one connection, HTTP/1.1 or HTTP/2, until it ends or the listener drains.
//!
//! The version is the one that ALPN negotiated; without ALPN the first bytes decide. A head that takes longer than its timeout
//! ends the connection. A much longer timeout applies to a client without any request. HTTP/2's own limits on resets keep their
//! defaults here, because they protect a public listener. Control frames have a budget below hyper, see [`ControlFrameLimiter`].

use super::{
    ClientConnection, LongTarget,
    conn_io::{ClientIo, ConnState},
    idle_timer::IdleTimer,
    stream_reset::StreamReset,
};
use crate::{
    config::ErrorFormat,
    error::Reason,
    proxy::{
        Proxy, access_log::AccessRecord, error_response::unparsed::unparsed_detail,
        response_body::ResponseBody,
    },
};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    control_frame_limit::ControlFrameLimiter,
    cork::Cork,
    eviction::Eviction,
    informational::{ExchangeId, InformationalIo},
    request_target::MAX_URI_BYTES,
};
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{CONNECTION, UPGRADE},
};
use hyper::{
    body::{Body as _, Incoming},
    ext::ReasonPhrase,
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use pin_project_lite::pin_project;
use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    task::futures::TaskLocalFuture,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Executor that runs hyper's tasks in our task group.
#[derive(Clone, Debug)]
struct TaskExecutor(Arc<TaskGroup>);

impl<F> hyper::rt::Executor<F> for TaskExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0
            .spawn(tracing::Span::current(), StreamTask::new(task));
    }
}

/// Handles that end the tasks of an HTTP/2 stream.
#[derive(Default)]
struct StreamHandles {
    /// Eviction handle of the stream that carries the response.
    eviction: OnceLock<(Eviction, Arc<ClientConnection>)>,
    /// Reset of the stream of a session.
    reset: OnceLock<StreamReset>,
}

tokio::task_local! {
    /// Handles of the stream whose task runs.
    static HANDLES: Arc<StreamHandles>;
}

pin_project! {
    /// Task of one stream. It runs until it ends, the stream that carries its response is evicted, or the session requests a
    /// reset. Dropping the task resets the stream.
    struct StreamTask<F> {
        #[pin]
        task: TaskLocalFuture<Arc<StreamHandles>, F>,
        handles: Arc<StreamHandles>,
        // Whether the task sends the bytes of a session.
        is_sender: bool,
    }
}

impl<F: Future<Output = ()>> StreamTask<F> {
    fn new(task: F) -> Self {
        // The task that sends the bytes of a session is started by the task of its request.
        let outer = HANDLES.try_with(Arc::clone);
        let is_sender = outer.is_ok();
        let handles = outer.unwrap_or_default();
        Self {
            task: HANDLES.scope(handles.clone(), task),
            handles,
            is_sender,
        }
    }
}

impl<F: Future<Output = ()>> Future for StreamTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        // Before the task, which would end the stream in order.
        if let Some(reset) = this.handles.reset.get()
            && reset.poll_requested(cx).is_ready()
        {
            return Poll::Ready(());
        }
        if this.task.poll(cx).is_ready() {
            if let (true, Some(reset)) = (*this.is_sender, this.handles.reset.get()) {
                reset.mark_sender_done();
            }
            return Poll::Ready(());
        }
        let Some((eviction, connection)) = this.handles.eviction.get() else {
            return Poll::Pending;
        };
        ready!(eviction.poll_evicted(cx));
        connection.condition.lost_stream();
        Poll::Ready(())
    }
}

/// Stream window for HTTP/2 clients, in bytes. Clients are near: 256 KiB fill 2 Gbit/s at 1 ms. Each stream whose upstream does
/// not read may buffer as much.
const STREAM_WINDOW: u32 = 256 << 10;
/// Stream window while too many bytes are buffered: the initial window of RFC 9113 §6.9.2.
const SMALL_STREAM_WINDOW: u32 = (64 << 10) - 1;
/// Maximum number of response bytes that wait for a client's socket, if the client speaks HTTP/2. hyper's default is 400 KiB.
const MAX_SEND_BUFFER: usize = 128 << 10;
/// Maximum number of streams on one HTTP/2 connection. Go's server allows as many; its client opens a second connection for more.
const MAX_CONCURRENT_STREAMS: u32 = 250;
/// Time without a byte from an HTTP/2 client after which it is sent a PING.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time without a byte from an HTTP/2 client with open requests after which its connection ends.
const SILENCE_LIMIT: Duration = Duration::from_mins(1);
/// Timeout of hyper for the answer to a PING, which must never pass: hyper ends the connection as if all sessions and bodies were
/// complete (hyper 1.12).
const NO_PING_TIMEOUT: Duration = Duration::from_hours(24 * 365);
/// Interval of the checks for such clients.
const SILENCE_CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// Time for one more HTTP/1.1 request, whose response announces the end of the connection. A connection that closed without that
/// response would lose a request in transit. An HTTP/2 connection announces its end by GOAWAY and loses no request.
const LAST_REQUEST_WAIT: Duration = Duration::from_secs(1);

/// Time for the orderly close of an idle connection, or of one that has become no session. It includes the time for which the
/// bytes that still arrive are discarded.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one connection until it ends. After `stop`, finishes the requests that have begun.
pub(super) async fn serve(
    proxy: &Proxy,
    io: ClientIo,
    connection: Arc<ClientConnection>,
    stop: CancellationToken,
) {
    let builder = builder(proxy, connection.window);
    let service = service_fn(|request: Request<Incoming>| {
        let (proxy, connection) = (proxy.clone(), connection.clone());
        // Computed here and not in the task, because h2 returns streams in their order.
        let exchange = exchange_id(&connection, request.version());
        // Boxed, because hyper and tokio move the future several times before its first poll, and it has 6 kB.
        Box::pin(async move {
            Ok::<_, Infallible>(respond(&proxy, &connection, request, exchange).await)
        })
    });
    let cork = Cork::new(io);
    let io = wrap_io(proxy, cork.clone(), &connection);
    let mut serving = pin!(builder.serve_connection_with_upgrades(TokioIo::new(io), service));
    let condition = connection.condition.clone();
    let mut events = events(proxy, &connection, &stop);
    loop {
        tokio::select! {
            biased;
            ended = poll_fn(|cx| poll_corked(serving.as_mut(), (&cork, &condition), cx)) => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a client's connection ended");
                    record_parse_failure(proxy, &connection, error.downcast_ref());
                }
                return;
            }
            () = condition.wait_evicted() => return,
            Some(event) = events.next() => match event {
                Event::Stalled => {
                    tracing::debug!("a stream was reset because its client did not read");
                    return;
                }
                Event::SlowHead => {
                    tracing::debug!("a client did not send the request head in time");
                    proxy.shared.metrics.count_limit_reached("slow_head");
                    return;
                }
                Event::Silent => {
                    tracing::debug!("a client with open requests answers no PING");
                    return;
                }
                Event::Idle => {
                    serving.as_mut().graceful_shutdown();
                    let idle = connection.idle.wait_idle(&condition, proxy.shared.timeouts.header);
                    events.push(idle.map(|()| Event::StillIdle).boxed());
                }
                Event::StillIdle => {
                    tracing::debug!("an idle client did not close its connection");
                    // A reset would discard what the client has not read of its responses.
                    let _ = timeout(SHUTDOWN_TIMEOUT, cork.clone().shutdown()).await;
                    return;
                }
                Event::Unread => {
                    tracing::debug!("a client did not read the end of its responses in time");
                    return;
                }
                Event::Stop => serving.as_mut().graceful_shutdown(),
            }
        }
    }
}

/// Polls a connection, and sends together what it has written if it speaks HTTP/2: the responses to several requests.
fn poll_corked<F: Future>(
    serving: Pin<&mut F>,
    (cork, condition): (&Cork<ClientIo>, &ConnState),
    cx: &mut Context<'_>,
) -> Poll<F::Output> {
    let is_http2 = condition.http2_activity() > 0;
    if is_http2 {
        cork.cork();
    }
    let polled = serving.poll(cx);
    if is_http2 {
        cork.uncork(cx);
    }
    polled
}

/// Event of a connection besides its requests. Such events are rare, so their futures are polled only when they are woken, and
/// not with each request. The wait for a drain takes a lock that all connections share.
enum Event {
    /// The client reads nothing, and a stream was evicted.
    Stalled,
    /// The head of a request is too slow.
    SlowHead,
    /// An HTTP/2 client with open requests sends nothing, not even answers to pings.
    Silent,
    /// There was no request for a long time.
    Idle,
    /// The end of the connection was announced, and the client does not close it.
    StillIdle,
    /// The responses are complete, and the client does not read the rest of their bytes. As long as a response is incomplete, its
    /// stream is evicted instead.
    Unread,
    /// The listener closes or its configuration was replaced.
    Stop,
}

/// Returns the futures of the events of a connection.
fn events<'a>(
    proxy: &'a Proxy,
    connection: &'a ClientConnection,
    stop: &'a CancellationToken,
) -> FuturesUnordered<BoxFuture<'a, Event>> {
    let (timeouts, drain) = (
        &proxy.shared.timeouts,
        proxy.shared.registry.drain_started(),
    );
    let (condition, idle) = (&connection.condition, &connection.idle);
    let slow_head = condition.wait_slow_head(timeouts.header);
    [
        slow_head.map(|()| Event::SlowHead).boxed(),
        condition.wait_stalled().map(|()| Event::Stalled).boxed(),
        wait_silent(condition, idle).map(|()| Event::Silent).boxed(),
        (idle.wait_idle(condition, timeouts.idle_keepalive))
            .map(|()| Event::Idle)
            .boxed(),
        (idle.wait_unread(condition, timeouts.download))
            .map(|()| Event::Unread)
            .boxed(),
        (wait_to_close(drain, stop, condition).map(|()| Event::Stop)).boxed(),
    ]
    .into_iter()
    .collect()
}

/// Waits until a client that speaks HTTP/2 and has open requests has shown no activity for [`SILENCE_LIMIT`], rounded up to an interval of
/// checks. Activity is what hyper counts as such, because hyper sends the PINGs: bytes from the socket, and buffered bytes that a body
/// or a session takes. Until the first frame, the client may still speak HTTP/1.1, whose clients may be silent.
async fn wait_silent(condition: &ConnState, idle: &IdleTimer) {
    let (mut seen, mut silence) = (0, Duration::ZERO);
    while silence < SILENCE_LIMIT {
        sleep(SILENCE_CHECK_INTERVAL).await;
        let activity = condition.http2_activity();
        silence = if activity > 0 && activity == seen && idle.has_open_requests() {
            silence + SILENCE_CHECK_INTERVAL
        } else {
            Duration::ZERO
        };
        seen = activity;
    }
}

/// Waits until `stop` requires the end of a connection. On HTTP/1.1, each response since the start of the drain announces the
/// end. A connection without a drain gets its announcement from `stop` on, and has time for at least one request.
async fn wait_to_close(
    drain: impl Future<Output = ()>,
    stop: &CancellationToken,
    condition: &ConnState,
) {
    tokio::select! {
        () = drain => {}
        () = stop.cancelled() => {}
    }
    if condition.http2_activity() == 0 {
        sleep(LAST_REQUEST_WAIT).await;
    }
    stop.cancelled().await;
}

/// Whether the connections of this listener have to end: the gateway drains, or the listener is closed or replaced.
fn is_closing(proxy: &Proxy) -> bool {
    proxy.shared.registry.is_draining() || proxy.listener.is_retired()
}

/// Whether an HTTP/1.1 connection becomes a session with a response of this `status`.
fn begins_session(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

/// Records a request whose head cannot be parsed, because no other part of the gateway has seen it.
fn record_parse_failure(
    proxy: &Proxy,
    connection: &Arc<ClientConnection>,
    error: Option<&hyper::Error>,
) {
    if let Some(error) = error.filter(|error| error.is_parse()) {
        let default_reason = if error.is_parse_too_large() {
            Reason::HeaderTooLarge
        } else {
            Reason::Malformed
        };
        let reason = connection
            .condition
            .parse_failure()
            .unwrap_or(default_reason);
        let detail = unparsed_detail(reason);
        let record = AccessRecord::unparsed(
            &proxy.shared.streams,
            (&proxy.listener, proxy.worker),
            connection,
        );
        record.record_failure(&reason.with_source(detail, error.to_string()));
        record.response_started(match proxy.listener.error_format {
            ErrorFormat::Problem => reason.status(),
            ErrorFormat::Kubernetes => StatusCode::BAD_GATEWAY,
        });
    }
}

/// Wraps the connection for hyper.
fn wrap_io(
    proxy: &Proxy,
    io: Cork<ClientIo>,
    connection: &ClientConnection,
) -> InformationalIo<ControlFrameLimiter<Cork<ClientIo>, impl Fn() + use<>>> {
    let metrics = proxy.shared.metrics.clone();
    let io = ControlFrameLimiter::new(io, move || {
        tracing::debug!("a client flooded its connection with control frames");
        metrics.count_limit_reached("control_frames");
    });
    let io = io.with_aborted_streams(connection.aborted.clone());
    InformationalIo::new(io, connection.interims.clone())
}

/// Returns the exchange of the interim responses to the request that hyper returns now.
fn exchange_id(connection: &ClientConnection, version: Version) -> ExchangeId {
    match version {
        Version::HTTP_2 => connection.interims.next_exchange(),
        Version::HTTP_11 => ExchangeId::Http1,
        _ => ExchangeId::None,
    }
}

async fn respond(
    proxy: &Proxy,
    connection: &Arc<ClientConnection>,
    mut request: Request<Incoming>,
    exchange: ExchangeId,
) -> Response<ResponseBody> {
    let busy_guard = connection.idle.begin_request();
    if request.version() == Version::HTTP_2 {
        if request.method() == Method::CONNECT {
            let stream = match exchange {
                ExchangeId::Http2(stream) => Some(stream),
                ExchangeId::None | ExchangeId::Http1 => None,
            };
            let reset = StreamReset::new(stream, connection.aborted.clone());
            request.extensions_mut().insert(reset.clone());
            let _ = HANDLES.try_with(|handles| handles.reset.set(reset));
        }
        let response = proxy.handle(connection, request, exchange).await;
        if let Some(eviction) = response.body().eviction_handle() {
            // Outside a task of the executor, no waker is registered.
            let _ =
                HANDLES.try_with(|handles| handles.eviction.set((eviction, connection.clone())));
        }
        return response.map(|body| body.with_busy_guard(busy_guard));
    }
    let condition = &connection.condition;
    let may_begin_session =
        request.method() == Method::CONNECT || request.headers().contains_key(UPGRADE);
    match condition.begin_request(!request.body().is_end_stream(), may_begin_session) {
        None => {}
        Some(LongTarget::Overflow(rest)) => drop(request.extensions_mut().insert(rest)),
        Some(LongTarget::Rejected(reason)) => drop(request.extensions_mut().insert(reason)),
    }
    condition.set_eviction(None);
    let method = request.method().clone();
    let on_upgrade = request.extensions().get::<OnUpgrade>().cloned();
    let mut response = proxy.handle(connection, request, exchange).await;
    let begins_session = begins_session(&method, response.status());
    if begins_session {
        // hyper may read bytes of the session before it releases the connection.
        condition.begin_session();
    } else if let Some(on_upgrade) = on_upgrade {
        close_without_session(proxy, connection, on_upgrade);
    }
    if !begins_session && is_closing(proxy) {
        // hyper closes the connection after this response (RFC 9112, section 9.6). A session ends by itself.
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    if response.status().canonical_reason().is_none() {
        // hyper writes `<none>` if neither hyper nor the response has a phrase; a phrase is optional (RFC 9112, section 4).
        let extensions = response.extensions_mut();
        extensions.get_or_insert_with(|| ReasonPhrase::from_static(b""));
    }
    condition.set_eviction(response.body().eviction_handle());
    response.map(|body| {
        body.with_busy_guard(busy_guard)
            .with_socket(Some(condition.clone()))
    })
}

/// Closes the connection in order if it ends with the response to a request for a session that does not begin. hyper releases such a
/// connection as for a session, and does not close it. A dropped connection is reset.
fn close_without_session(proxy: &Proxy, connection: &Arc<ClientConnection>, on_upgrade: OnUpgrade) {
    let connection = connection.clone();
    proxy.tasks.spawn(debug_span!("close"), async move {
        // An error means that the connection continues with another request, or has failed.
        if let Ok(upgraded) = on_upgrade.await {
            let mut io = TokioIo::new(upgraded);
            let _ = timeout(SHUTDOWN_TIMEOUT, io.shutdown()).await;
        }
        drop(connection);
    });
}

/// Returns the stream window of a connection that begins now.
pub(super) fn stream_window(proxy: &Proxy) -> u32 {
    if proxy.shared.limits.memory_budget().is_high() {
        SMALL_STREAM_WINDOW
    } else {
        STREAM_WINDOW
    }
}

fn builder(proxy: &Proxy, window: u32) -> auto::Builder<TaskExecutor> {
    let mut builder = auto::Builder::new(TaskExecutor(proxy.tasks.clone()));
    let header_bytes = proxy.shared.header_bytes;
    builder
        .http1()
        .title_case_headers(true)
        .half_close(false)
        // hyper would allocate and start a timer for each request. `IdleTimer` and `ConnState` limit the same times.
        .header_read_timeout(None)
        .max_headers(proxy.shared.max_headers * 2)
        // A target and fields at their limits. Fields beyond theirs are refused by us as far as they fit, and else by hyper.
        // A body that waits takes as much.
        .max_buf_size((MAX_URI_BYTES + header_bytes).max(header_bytes * 2));
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(window)
        // The window covers all streams at once, so a stream whose body is not read delays only itself.
        .initial_connection_window_size(window * MAX_CONCURRENT_STREAMS)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .max_send_buf_size(MAX_SEND_BUFFER)
        .max_frame_size(causeway_tunnel::wire::MAX_FRAME)
        .max_header_list_size(u32::try_from(MAX_URI_BYTES + header_bytes * 2).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(NO_PING_TIMEOUT);
    builder
}

#[cfg(test)]
mod tests {
    use super::{super::accept::AcceptedSocket, *};
    use crate::{
        config::ListenerProtocol,
        proxy::tests::{proxy, proxy_state},
        state::Registry,
        worker::Workers,
    };
    use bytes::Bytes;
    use causeway_rt::listener::RemoteAddr;
    use futures_util::FutureExt;
    use std::io;
    use tokio::{
        io::AsyncReadExt,
        net::{TcpListener, TcpStream},
        time::Instant,
    };

    #[tokio::test(start_paused = true)]
    async fn a_connection_of_http1_ends_after_time_for_one_more_request() {
        let (drain, stop) = (CancellationToken::new(), CancellationToken::new());
        let condition = Arc::new(ConnState::default());
        let ends = |after: Duration| {
            let (drain, stop, condition) = (drain.clone(), stop.clone(), condition.clone());
            async move {
                let began = Instant::now();
                wait_to_close(drain.cancelled(), &stop, &condition).await;
                assert_eq!(began.elapsed(), after);
            }
        };
        assert!(ends(LAST_REQUEST_WAIT).now_or_never().is_none());
        // The configuration of the listener was replaced.
        stop.cancel();
        ends(LAST_REQUEST_WAIT).await;
        condition.note_http2_read();
        ends(Duration::ZERO).await;
    }

    /// hyper's own timeout for a PING would end the session in order.
    #[tokio::test]
    async fn a_session_of_a_silent_http2_client_ends_as_a_broken_one() {
        const PREFACE_AND_SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        const HEADERS: u8 = 1;
        let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = app.local_addr().unwrap().to_string();
        let shared = proxy_state(&Registry::new(&Workers::on_current_runtime()), &[]);
        let mut proxy = proxy(&shared);
        let listener = Arc::get_mut(&mut proxy.listener).unwrap();
        listener.protocol = ListenerProtocol::Connect;
        listener.direct_networks = vec!["127.0.0.1/32".parse().unwrap()];
        let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(front.local_addr().unwrap())
            .await
            .unwrap();
        let (socket, peer) = front.accept().await.unwrap();
        let peer = RemoteAddr::Tcp(peer);
        let accepted = AcceptedSocket {
            peer,
            original: None,
            member: None,
            room: shared.limits.admit_connection(peer).unwrap(),
        };
        let connection = Arc::new(accepted.connection(&proxy, None, false, Ok(None)));
        let socket = (socket.into(), Bytes::new());
        let io = ClientIo::plain(socket, &connection.condition, proxy.error_format());
        let serving = serve(&proxy, io, connection, CancellationToken::new());
        let silent = async {
            // Literals with indexed names: `:method` and `:authority` (RFC 7541, Appendix A).
            let length = u8::try_from(target.len()).unwrap();
            let head = [b"\x02\x07CONNECT\x01", &[length][..], target.as_bytes()].concat();
            let length = u8::try_from(head.len()).unwrap();
            let head = [&[0, 0, length, 1, 4, 0, 0, 0, 1], &head[..]].concat();
            let sent = [PREFACE_AND_SETTINGS, &head].concat();
            client.write_all(&sent).await.unwrap();
            let (mut session, _) = app.accept().await.unwrap();
            let mut kind = 0;
            while kind != HEADERS {
                let mut head = [0; 9];
                client.read_exact(&mut head).await.unwrap();
                let [high, middle, low, found, ..] = head;
                let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
                client.read_exact(&mut payload).await.unwrap();
                kind = found;
            }
            // From here on only the client's silence decides. The clock would also skip time while a socket gets ready.
            tokio::time::pause();
            session.read(&mut [0]).await
        };
        let ((), end) = tokio::join!(serving, silent);
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test(start_paused = true)]
    async fn only_an_http2_client_with_open_requests_is_too_silent() {
        let (condition, idle) = (ConnState::default(), Arc::new(IdleTimer::default()));
        let waiting = || tokio::time::timeout(10 * SILENCE_LIMIT, wait_silent(&condition, &idle));
        let request = idle.begin_request();
        condition.note_taken();
        waiting().await.expect_err("HTTP/1.1");
        condition.note_http2_read();
        drop(request);
        waiting().await.expect_err("no request is open");
        let _request = idle.begin_request();
        let answering = async {
            for _ in 0..100 {
                sleep(SILENCE_LIMIT / 2).await;
                condition.note_http2_read();
            }
        };
        tokio::select! {
            () = wait_silent(&condition, &idle) => panic!("the client answers"),
            () = answering => {}
        }
        // Bytes that were read long ago are taken, so hyper sends no PING.
        let taking = async {
            for _ in 0..100 {
                sleep(SILENCE_LIMIT / 2).await;
                condition.note_taken();
            }
        };
        tokio::select! {
            () = wait_silent(&condition, &idle) => panic!("hyper sends no PING"),
            () = taking => {}
        }
        waiting().await.expect("the client is silent");
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_since_the_drain_began_counts() {
        let (drain, stop) = (CancellationToken::new(), CancellationToken::new());
        let condition = ConnState::default();
        drain.cancel();
        let began = Instant::now();
        let ending = wait_to_close(drain.cancelled(), &stop, &condition);
        let closing = async {
            sleep(3 * LAST_REQUEST_WAIT).await;
            stop.cancel();
        };
        tokio::join!(ending, closing);
        assert_eq!(began.elapsed(), 3 * LAST_REQUEST_WAIT);
    }
}
