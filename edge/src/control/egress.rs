//! Egress: listeners on this node that lead to the cloud or to other nodes.
//!
//! A connection to a listener becomes a stream on this edge's connection to a gateway (`gateway_link`). The gateway decides about the
//! destination, resolves its name, and connects. A refused connection to a listener with one destination ends with a reset, because TCP
//! has no error messages. The proxy answers in the protocol of its client. Either way the log and the status have the reason.
//!
//! An address that cannot be bound is tried again: the bridge of the pods may not exist yet, because its creation may itself need this
//! edge.

mod gateway_link;

use super::tunnels::context::TunnelContext;
use crate::{
    config::Egress,
    metrics::{EgressGuard, EgressOutcome},
    status::EgressListenerStatus,
};
use causeway_rt::{
    listener::{BoundSocket, SocketListener},
    local_proxy::{AcceptedClient, HttpExchange, ProxyRequest},
    log_throttle::{FailureThrottle, LogThrottle},
    socket::{ResetOnClose, Socket},
    task::TaskGroup,
};
use causeway_tunnel::{
    Target,
    copy::{self, CopyOutcome, MeteredIo},
    eviction::Eviction,
    stream_io::StreamIo,
};
use futures_util::future::OptionFuture;
use gateway_link::{EgressError, GatewayLink};
use std::{
    fmt::Display, future::pending, io, net::SocketAddr, os::fd::AsFd, pin::pin, sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest},
    net::TcpStream,
    sync::Semaphore,
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, info_span, warn};

/// Interval of attempts to bind an address.
const BIND_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time for the request of a program to the proxy.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Context of all listeners.
struct EgressContext {
    link: Arc<GatewayLink>,
    /// Maximum number of open connections to each listener.
    listener_limit: usize,
    context: Arc<TunnelContext>,
    refusal_throttle: LogThrottle,
}

/// Starts the listeners. They close when the edge stops, or when `stop` is cancelled. Returns the tasks of their connections, which get
/// the time of a shutdown.
pub(crate) fn start(
    config: &Egress,
    context: &Arc<TunnelContext>,
    (tasks, stop): (&Arc<TaskGroup>, &CancellationToken),
) -> Arc<TaskGroup> {
    let connections = Arc::<TaskGroup>::default();
    context.status.change_egress(|_| {});
    let egress = Arc::new(EgressContext {
        link: Arc::new(GatewayLink::new(context.clone(), tasks.clone())),
        listener_limit: listener_limit(config),
        context: context.clone(),
        refusal_throttle: LogThrottle::default(),
    });
    // The configuration has been validated.
    let fixed = config.listeners.iter();
    let fixed = fixed.filter_map(|each| Some((each.listen, Some(each.target().ok()?))));
    let proxy = config.proxy.iter().map(|proxy| (proxy.listen, None));
    for (listen, target) in fixed.chain(proxy) {
        let (egress, stop) = (egress.clone(), stop.clone());
        let connections = connections.clone();
        tasks.spawn(info_span!("egress", %listen), async move {
            let running = pin!(egress.run_listener((listen, target), &connections));
            // The next process needs the address. Programs that connect before it runs are refused at once.
            tokio::select! {
                () = egress.context.stop.cancelled() => {}
                () = stop.cancelled() => {}
                () = running => {}
            }
        });
    }
    connections
}

/// Returns the maximum number of open connections to each listener: an equal share. So a listener that many programs can reach, such as
/// the proxy or a listener for pods, never takes the connections of another one.
fn listener_limit(config: &Egress) -> usize {
    let listeners = config.listeners.len() + usize::from(config.proxy.is_some());
    let share = config.max_connections / listeners.max(1);
    share.clamp(1, Semaphore::MAX_PERMITS)
}

impl EgressContext {
    /// Binds an address, and serves its connections. Connections to a listener without a `target` are requests to the proxy.
    async fn run_listener(
        self: &Arc<Self>,
        (listen, target): (SocketAddr, Option<Target>),
        tasks: &TaskGroup,
    ) {
        let listener = self.bind(listen).await;
        let bound = listener.local_addr().unwrap_or(listen);
        let to = target.as_ref().map(ToString::to_string);
        info!(listen = %bound, to = to.as_deref().unwrap_or("(proxy)"), "egress listener is open");
        self.context.status.change_egress(|status| {
            let listener = EgressListenerStatus { listen: bound, to };
            status.listeners.push(listener);
        });
        let permits = Arc::new(Semaphore::new(self.listener_limit));
        loop {
            let (socket, peer) = listener.accept().await;
            let Ok(permit) = permits.clone().try_acquire_owned() else {
                self.context.metrics.count_egress(EgressOutcome::Limit);
                socket.abort();
                if let Some(times) = self.refusal_throttle.record() {
                    warn!(
                        times,
                        limit = self.listener_limit,
                        "refused connections, because this listener has its share of egress.max_connections"
                    );
                }
                continue;
            };
            let (egress, target) = (self.clone(), target.clone());
            tasks.spawn(info_span!("egress", %peer), async move {
                let _permit = permit;
                match target {
                    Some(target) => egress.serve_fixed(socket, &target).await,
                    None => egress.serve_proxy(socket).await,
                }
            });
        }
    }

    async fn bind(&self, listen: SocketAddr) -> BoundListener {
        let mut throttle = FailureThrottle::default();
        loop {
            match BoundListener::bind(listen) {
                Ok(listener) => return listener,
                Err(error) => {
                    let detail = format!("cannot listen on {listen}: {error}");
                    if throttle.should_log(&detail) {
                        warn!("{detail}; trying again");
                    }
                    self.context.status.set_egress_error(&detail);
                }
            }
            sleep(BIND_INTERVAL).await;
        }
    }

    async fn serve_fixed(&self, socket: Socket, target: &Target) {
        let guard = self.context.metrics.egress_guard();
        let opened = tokio::select! {
            opened = self.link.open(target) => opened,
            () = wait_until_aborted(&socket) => {
                guard.finish(EgressOutcome::Aborted);
                return debug!("a program aborted its connection before it was open");
            }
        };
        match opened {
            Ok(halves) => relay(socket, halves, guard).await,
            Err(error) => {
                socket.abort();
                self.report(target, &error, guard);
            }
        }
    }

    async fn serve_proxy(&self, socket: Socket) {
        let guard = self.context.metrics.egress_guard();
        // The request owns the socket.
        let mut aborted = Box::pin(wait_until_duplicate_aborted(&socket));
        let request = match ProxyRequest::read(socket, REQUEST_TIMEOUT).await {
            Ok(request) => request,
            Err(error) => {
                guard.finish(EgressOutcome::Malformed);
                return debug!(%error, "a program sent no usable request to the proxy");
            }
        };
        let target = Target::new(request.host.as_str(), request.port);
        let opened = tokio::select! {
            opened = self.link.open(&target) => opened,
            () = &mut aborted => {
                guard.finish(EgressOutcome::Aborted);
                return debug!("a program aborted its connection to the proxy before it was open");
            }
        };
        match opened {
            Ok(halves) => match request.accept().await {
                Ok(AcceptedClient::Bytes(io)) => {
                    drop(aborted);
                    relay(io, halves, guard).await;
                }
                Ok(AcceptedClient::Http(exchange)) => {
                    forward_request(exchange, halves, aborted, guard).await;
                }
                Err(error) => {
                    guard.finish(EgressOutcome::Aborted);
                    debug!(%error, "a program closed its connection to the proxy");
                }
            },
            Err(error) => {
                drop(aborted);
                self.report(&target, &error, guard);
                request.refuse(error.failure, &error.detail).await;
            }
        }
    }

    /// Counts a failed connection, and makes its reason known in the log and the status.
    fn report(&self, target: &Target, error: &EgressError, guard: EgressGuard) {
        guard.finish(error.outcome);
        let detail = format!("{target}: {}", error.detail);
        self.context.status.set_egress_error(&detail);
        if let Some(times) = self.refusal_throttle.record() {
            warn!(%target, times, reason = error.reason, why = error.detail, "cannot open connections for programs on this node");
        }
    }
}

/// Waits until the program has aborted its connection. The end of its sending half alone is not an abort, because the program may wait
/// for an answer.
async fn wait_until_aborted(socket: &Socket) {
    match socket.tcp() {
        // The readiness is that of an error, or the socket is broken.
        Some(tcp) => drop(tcp.ready(Interest::ERROR).await),
        None => pending().await,
    }
}

/// Waits until the program has aborted its connection, as [`wait_until_aborted`] does, by a duplicate of the socket. The returned future
/// must be dropped before the socket is, because the connection is not closed before.
fn wait_until_duplicate_aborted(socket: &Socket) -> impl Future<Output = ()> + use<> {
    let duplicate = socket.tcp().and_then(|tcp| {
        let file = tcp.as_fd().try_clone_to_owned().ok()?;
        TcpStream::from_std(file.into()).ok()
    });
    async move {
        match duplicate {
            Some(duplicate) => drop(duplicate.ready(Interest::ERROR).await),
            None => pending().await,
        }
    }
}

/// Relays a connection until both directions have ended. An abort on one side becomes a reset on the other side.
async fn relay<S>(socket: S, (send, receive): gateway_link::StreamHalves, guard: EgressGuard)
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    let counters = guard.bytes();
    let outcome = copy::relay(socket, send, receive, counters, false).await;
    finish(guard, outcome);
}

/// Forwards an HTTP request and its response. Ends early, with a reset of both sides, if the stream is evicted, or once the
/// program has `aborted`: the exchange notices neither while it waits to write.
async fn forward_request(
    exchange: HttpExchange<Socket>,
    (send, receive): gateway_link::StreamHalves,
    aborted: impl Future<Output = ()>,
    guard: EgressGuard,
) {
    let eviction = receive.eviction_handle();
    let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::wait_for_eviction));
    let stream = MeteredIo::new(StreamIo::new(send, receive), guard.bytes());
    tokio::select! {
        biased;
        outcome = exchange.forward(stream) => return finish(guard, outcome),
        Some(()) = evicted => guard.finish(EgressOutcome::Reset),
        () = aborted => guard.finish(EgressOutcome::Aborted),
    }
    debug!("an HTTP request of a program was evicted or aborted");
}

fn finish<E: Display>(guard: EgressGuard, outcome: CopyOutcome<E>) {
    guard.finish(match outcome {
        CopyOutcome::Clean => EgressOutcome::Done,
        CopyOutcome::Socket(_) => EgressOutcome::Aborted,
        CopyOutcome::Stream(error) => {
            debug!(%error, "the gateway or the destination aborted a connection");
            EgressOutcome::Reset
        }
    });
}

/// Bound TCP listener.
struct BoundListener {
    listener: SocketListener,
    address: Option<SocketAddr>,
}

impl BoundListener {
    fn bind(listen: SocketAddr) -> io::Result<Self> {
        let socket = BoundSocket::tcp(listen)?;
        Ok(Self {
            address: socket.local_addr(),
            listener: socket.attach()?,
        })
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.address
    }

    async fn accept(&self) -> (Socket, causeway_rt::listener::RemoteAddr) {
        self.listener.accept().await
    }
}
