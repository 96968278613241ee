//! Step 6d: a CONNECT to an address that is at no node's edge, dialled from here.
//!
//! A kube-apiserver with an egress selector sends all traffic for its cluster: to pods and Services elsewhere, webhooks and
//! aggregated APIs beside kubelets. A listener dials the addresses in its networks (`direct_networks`), and nothing else. The node of a
//! name or an address is looked up first, so a target at an edge is never dialled directly. A name is resolved and checked here,
//! and the gateway dials exactly the address that was checked. `special_addresses` decides which addresses a network means, and
//! the policy decides which clients may connect to one.

mod special_addresses;

use super::{
    access_log::AccessRecord,
    authn::ClientIdentity,
    authz::{Action, AuthzRequest, Destination},
    context::Proxy,
    listener::{ClientConnection, Listener},
    relay::UpgradedClient,
    request_body::RequestBody,
    response_body::ResponseBody,
    route::{self, RouteInput},
    upload_budget::BufferedBody,
};
use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    state::{NodeLocation, Nodes},
};
use causeway_rt::resolve;
use causeway_rt::socket::{self, ResetOnClose};
use causeway_tunnel::{RejectCode, Target, copy::ByteCounters};
use http::{Method, Request, Response, StatusCode};
use hyper::upgrade::{self, OnUpgrade};
use ipnet::IpNet;
use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{
        AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional_with_sizes,
    },
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tracing::debug_span;

/// Bytes that are read at once, each way.
const CHUNK: usize = 16 * 1024;

/// The least time between two log lines about the exhaustion of this process.
const LOG_PAUSE: Duration = Duration::from_mins(1);

/// Context of a CONNECT that the gateway dials itself.
pub struct DirectConnect<'a> {
    /// The listener.
    pub proxy: &'a Proxy,
    /// The client's connection.
    pub connection: &'a Arc<ClientConnection>,
    /// Identity of the client.
    pub client: &'a ClientIdentity,
    /// Requested target.
    pub target: &'a Target,
    /// The record of this session.
    pub record: &'a Arc<AccessRecord>,
}

/// Returns the target of a CONNECT that this listener may dial itself, because the target is at no edge.
pub(crate) fn target(networks: &[IpNet], asked: &RouteInput<'_>, nodes: &Nodes) -> Option<Target> {
    if networks.is_empty() {
        return None;
    }
    let unknown =
        matches!(route::of(asked, nodes), Err(error) if error.reason == Reason::NodeUnknown);
    asked.authority.filter(|_| unknown)?.parse().ok()
}

/// Answers a CONNECT once the target is dialled, and relays bytes after the answer.
///
/// # Errors
/// If the client has too many open streams, or the target lies in no network of the listener, or cannot be dialled.
pub(super) async fn connect(
    direct: DirectConnect<'_>,
    mut request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let shared = &direct.proxy.shared;
    let permit = shared.limits.admit(&direct.client.open, &shared.direct)?;
    direct.record.permit(permit);
    let switched = upgrade::on(&mut request);
    let deadline = Instant::now() + shared.timeouts.connect;
    let (tcp, address) = dial(&direct, deadline).await?;
    // A reload from now on finds the address in the record; this finds one from before.
    check(&direct.proxy.listener.latest(), &shared.nodes, address)?;
    direct.record.opened(StatusCode::OK);
    spawn(&direct, switched, tcp);
    Ok(Response::new(ResponseBody::empty()))
}

async fn dial(
    direct: &DirectConnect<'_>,
    deadline: Instant,
) -> Result<(TcpStream, SocketAddr), Error> {
    let target = direct.target;
    let addresses = look_up(direct, deadline).await?;
    let nodes = &direct.proxy.shared.nodes;
    let inside = |address: &&SocketAddr| is_meant(&direct.proxy.listener, nodes, address.ip());
    let inside: Vec<_> = addresses.iter().filter(inside).collect();
    let mut failed = None;
    for (tried, address) in inside.iter().enumerate() {
        match may(direct, **address).await {
            Err(refusal) if refusal.reason == Reason::Forbidden => {
                failed = Some(refusal);
                continue;
            }
            decided => decided?,
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(inside.len() - tried).unwrap_or(u32::MAX);
        match timeout_at(Instant::now() + share, TcpStream::connect(address)).await {
            Ok(Ok(tcp)) => {
                socket::set_tcp_options(&tcp);
                return Ok((tcp, **address));
            }
            Ok(Err(cause)) => {
                let detail = format!("this gateway could not dial {target}: {cause}");
                let reason = Reason::from(RejectCode::of_dial(&cause, address.ip()));
                if reason == Reason::Exhausted
                    && let Some(count) =
                        direct.proxy.listener.exhaustions.happened_within(LOG_PAUSE)
                {
                    tracing::warn!(%target, error = %cause, count, "this gateway is out of file descriptors, local ports or memory");
                }
                failed = Some(reason.with_source(detail, cause));
            }
            Err(_) => {
                let detail = format!("{target} did not accept this gateway's connection in time");
                failed = Some(Reason::TargetTimeout.error(detail));
            }
        }
    }
    Err(failed.unwrap_or_else(|| {
        let listener = &direct.proxy.listener.name;
        Reason::Forbidden.error(format!(
            "{target} belongs to no edge, and is in no network that listener {listener:?} dials itself (direct)"
        ))
    }))
}

/// Checks that a listener may still dial an address.
///
/// # Errors
/// [`Reason::Forbidden`] if the address no longer lies in any of the listener's networks.
pub(super) fn check(listener: &Listener, nodes: &Nodes, address: SocketAddr) -> Result<(), Error> {
    if is_meant(listener, nodes, address.ip()) {
        return Ok(());
    }
    Err(Reason::Forbidden.error(format!(
        "{address} is no longer in a network that listener {:?} dials itself (direct)",
        listener.name
    )))
}

/// Whether a listener dials this address itself.
fn is_meant(listener: &Listener, nodes: &Nodes, address: IpAddr) -> bool {
    // A kubelet on this host is dialled like any other.
    let is_own = special_addresses::own_addresses().contains(&address.to_canonical())
        && !nodes.is_elsewhere(address);
    let mut networks = listener.direct.iter();
    networks.any(|network| special_addresses::is_allowed_in(address, network, is_own))
}

/// Whether the client may connect to this address.
async fn may(direct: &DirectConnect<'_>, address: SocketAddr) -> Result<(), Error> {
    // Recorded first: a later change of the policy is checked against this address.
    direct.record.dials(address);
    let ask = AuthzRequest {
        client: direct.client,
        from: direct.connection.peer,
        destination: Destination::Direct(address),
        act: Action::Connect,
        method: &Method::CONNECT,
        path: "",
    };
    direct.proxy.authorize(&ask, direct.record).await
}

/// Resolves the target: the node's own addresses if the target is a node of the cluster, or else the result of name resolution.
async fn look_up(direct: &DirectConnect<'_>, deadline: Instant) -> Result<Vec<SocketAddr>, Error> {
    let Target { host, port } = direct.target;
    if let Some(NodeLocation::Elsewhere(addresses)) = direct.proxy.shared.nodes.place(host) {
        let addresses = addresses.into_iter();
        return Ok(addresses.map(|ip| SocketAddr::new(ip, *port)).collect());
    }
    match timeout_at(deadline, resolve(host, *port)).await {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(cause)) => {
            let detail =
                format!("no node has the name {host}, and the name cannot be resolved: {cause}");
            Err(Reason::NodeUnknown.with_source(detail, cause))
        }
        Err(_) => {
            let detail =
                format!("no node has the name {host}, and the name was not resolved in time");
            Err(Reason::ResolveTimeout.error(detail))
        }
    }
}

fn spawn(direct: &DirectConnect<'_>, switched: OnUpgrade, tcp: TcpStream) {
    let connection = direct.connection.clone();
    let record = direct.record.clone();
    let hold = direct.proxy.listener.errors == ErrorFormat::Kubernetes;
    // The answer is over at once.
    let busy = connection.idle.busy();
    let work = async move {
        let upgraded = match switched.await {
            Ok(upgraded) => upgraded,
            Err(error) => {
                return tracing::debug!(%error, "a client disconnected before its session began");
            }
        };
        let session =
            UpgradedClient::new(upgraded, connection, (None, BufferedBody::default()), busy);
        let mut far = CountedIo::new(tcp, record.passed.clone());
        let passed = {
            let work = pin!(pass(session, &mut far, hold));
            record.session_unless_ended(work).await
        };
        match passed {
            Some(Ok(())) => record.session_ended(),
            Some(Err(error)) if far.is_broken() => {
                let detail = format!("the target aborted the session: {error}");
                record.failed(&Reason::TargetBroken.error(detail));
            }
            Some(Err(error)) => {
                record.abandoned(&format!("the client aborted its session: {error}"));
            }
            // A target must not treat the bytes received so far as the complete stream.
            None => far.io.abort(),
        }
    };
    direct.proxy.tasks.spawn(debug_span!("session"), work);
}

/// Relays bytes both ways, and half-closes as well. A failure on one side resets the other.
pub(super) async fn pass<S, F>(mut near: S, far: &mut CountedIo<F>, hold: bool) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    F: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    let work = async {
        if hold {
            // kube-apiserver must receive no byte after the answer to its CONNECT before it has sent data (invariant 4).
            let mut first = vec![0; CHUNK];
            let read = near.read(&mut first).await?;
            far.write_all(first.get(..read).unwrap_or_default()).await?;
            if read == 0 {
                far.shutdown().await?;
            }
        }
        copy_bidirectional_with_sizes(&mut near, far, CHUNK, CHUNK).await
    };
    let done = work.await;
    if done.is_err() {
        near.abort();
        far.io.abort();
    }
    done.map(drop)
}

/// Connection to the target, whose bytes are counted.
pub(super) struct CountedIo<F> {
    io: F,
    passed: Arc<ByteCounters>,
    broken: bool,
}

impl<F> CountedIo<F> {
    pub(super) fn new(io: F, passed: Arc<ByteCounters>) -> Self {
        Self {
            io,
            passed,
            broken: false,
        }
    }

    /// Whether the connection has failed, and not that of the client.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    fn noted<T>(&mut self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.broken |= matches!(polled, Poll::Ready(Err(_)));
        polled
    }
}

impl<F: AsyncRead + Unpin> AsyncRead for CountedIo<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        ready!(self.noted(polled))?;
        let read = u64::try_from(buf.filled().len() - before).unwrap_or_default();
        self.passed.down.fetch_add(read, Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<F: AsyncWrite + Unpin> AsyncWrite for CountedIo<F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        let written = ready!(self.noted(polled))?;
        let up = u64::try_from(written).unwrap_or_default();
        self.passed.up.fetch_add(up, Relaxed);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_flush(cx);
        self.noted(polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_shutdown(cx);
        self.noted(polled)
    }
}
