//! Connections to upstreams: name resolution, policy check, TCP, and TLS as the port's configuration requires.
//!
//! The policy checks each resolved address, and the edge connects only to an address that it has checked. A later change of
//! the name has no effect. If an address is permitted only because it belongs to this node, the connection also starts from
//! that address. So it cannot reach another machine that has the address by now. One timeout covers everything
//! (`timeouts.dial`), and the remaining time is divided among the addresses that are not tried yet.

use super::{
    policy::Policy,
    upstream::{Upstream, UpstreamIo, timeout_error},
    upstream_tls::UpstreamTls,
};
use crate::metrics::Metrics;
use causeway_rt::socket;
use causeway_tunnel::{
    RejectCode,
    error::{Rejected, is_exhaustion},
};
use causeway_upstream::connection::Alpn;
use futures_util::task::AtomicWaker;
use std::{
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::Duration,
};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::{Instant, timeout_at},
};
use tokio_rustls::TlsConnector;

/// Dialer of upstreams, according to the policy.
pub(super) struct Dialer {
    pub(super) policy: Policy,
    bound: Duration,
    metrics: Arc<Metrics>,
    exhaustion: ExhaustionLog,
}

impl Dialer {
    /// Creates a dialer whose dials have the timeout `bound`.
    pub(super) fn new(policy: Policy, bound: Duration, metrics: Arc<Metrics>) -> Self {
        Self {
            policy,
            bound,
            metrics,
            exhaustion: ExhaustionLog::default(),
        }
    }

    /// Returns the deadline of a dial that begins now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.bound
    }

    /// Opens a connection to the upstream that is ready for HTTP, until `deadline`. Returns it with the connected address.
    pub(super) async fn connect(
        &self,
        upstream: &Upstream,
        alpn: Alpn,
        deadline: Instant,
    ) -> Result<(UpstreamIo, SocketAddr), Rejected> {
        let (tcp, address) = self.dial(upstream, deadline).await?;
        Ok((
            into_upstream_io(upstream, tcp, alpn, deadline).await?,
            address,
        ))
    }

    /// Opens a connection like [`Dialer::connect`], which is not counted as one of a stream.
    pub(super) async fn connect_unrecorded(
        &self,
        upstream: &Upstream,
        alpn: Alpn,
        deadline: Instant,
    ) -> Result<UpstreamIo, Rejected> {
        let (tcp, _) = dial(&self.policy, upstream, deadline).await?;
        into_upstream_io(upstream, tcp, alpn, deadline).await
    }

    /// Opens a TCP connection to the upstream, until `deadline`, and records the result in the metrics. Returns it with the
    /// connected address.
    pub(super) async fn dial(
        &self,
        upstream: &Upstream,
        deadline: Instant,
    ) -> Result<(TcpStream, SocketAddr), Rejected> {
        let began = Instant::now();
        let dialled = dial(&self.policy, upstream, deadline).await;
        let cause = dialled.as_ref().err().map(|rejection| rejection.code);
        self.metrics.record_dial(cause, began.elapsed());
        dialled.inspect_err(|rejection| {
            if rejection.code == RejectCode::Exhausted {
                self.exhaustion.write(upstream, rejection);
            }
        })
    }
}

/// Finishes TLS on a connection, if the upstream uses TLS.
async fn into_upstream_io(
    upstream: &Upstream,
    tcp: TcpStream,
    alpn: Alpn,
    deadline: Instant,
) -> Result<UpstreamIo, Rejected> {
    match &upstream.tls {
        None => Ok(UpstreamIo::plain(tcp)),
        Some(tls) => connect_tls(upstream, tls, tcp, (alpn, deadline)).await,
    }
}

async fn connect_tls(
    upstream: &Upstream,
    tls: &UpstreamTls,
    tcp: TcpStream,
    (alpn, deadline): (Alpn, Instant),
) -> Result<UpstreamIo, Rejected> {
    let connector = TlsConnector::from(tls.configs().config_for(alpn));
    match timeout_at(deadline, connector.connect(tls.server_name(), tcp)).await {
        Ok(Ok(stream)) => Ok(UpstreamIo::tls(stream)),
        Ok(Err(error)) => {
            let why = reason(&error);
            let detail = format!(
                "{} failed TLS with {}: {why}",
                upstream.node, upstream.target
            );
            Err(RejectCode::TargetBroken.with_detail(detail))
        }
        Err(_) => Err(timeout_error(upstream, "did not complete TLS in time")),
    }
}

/// Opens a TCP connection to the upstream, until `deadline`. Returns it with the connected address.
async fn dial(
    policy: &Policy,
    upstream: &Upstream,
    deadline: Instant,
) -> Result<(TcpStream, SocketAddr), Rejected> {
    let addresses = resolve(upstream, deadline).await?;
    let allowed: Vec<SocketAddr> = addresses
        .into_iter()
        .filter_map(|address| policy.permitted_address(upstream, address))
        .collect();
    let mut rejection: Option<Rejected> = None;
    for (index, address) in allowed.iter().enumerate() {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let attempt_timeout = remaining / u32::try_from(allowed.len() - index).unwrap_or(u32::MAX);
        match timeout_at(
            Instant::now() + attempt_timeout,
            connect(policy, upstream, *address),
        )
        .await
        {
            Ok(Ok(tcp)) => {
                if address.ip().is_loopback() {
                    socket::set_local_tcp_options(&tcp);
                } else {
                    socket::set_tcp_options(&tcp);
                }
                return Ok((tcp, *address));
            }
            // The address does not belong to this node any more, so the error of loopback is reported.
            Ok(Err(error)) if is_addr_not_available(&error) && rejection.is_some() => {}
            Ok(Err(error)) => {
                let code = if is_addr_not_available(&error)
                    && policy.is_own_only(upstream, address.ip())
                {
                    RejectCode::TargetUnreachable
                } else {
                    RejectCode::from_dial_error(&error, address.ip())
                };
                // An unreachable address is less informative than one that responded, such as loopback of the other family.
                if rejection.is_none() || code != RejectCode::TargetUnreachable {
                    rejection = Some(dial_error(upstream, code, &error));
                }
            }
            Err(_) => {
                rejection = Some(timeout_error(
                    upstream,
                    "did not accept the connection in time",
                ));
            }
        }
    }
    Err(rejection.unwrap_or_else(|| policy.not_allowed(&upstream.target)))
}

/// Address that a stream is connected to. It changes when a request is sent again on another connection.
#[derive(Debug, Default)]
pub(super) struct Connected {
    address: Mutex<Option<SocketAddr>>,
    waker: AtomicWaker,
}

impl Connected {
    pub(super) fn set(&self, address: SocketAddr) {
        *self.lock() = Some(address);
        self.waker.wake();
    }

    /// Waits for an address other than this one. One task waits at a time.
    pub(super) async fn wait_for_change_from(&self, seen: Option<SocketAddr>) -> SocketAddr {
        poll_fn(|cx| {
            self.waker.register(cx.waker());
            let changed = self.lock().filter(|address| Some(*address) != seen);
            changed.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, Option<SocketAddr>> {
        self.address.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn connect(
    policy: &Policy,
    upstream: &Upstream,
    address: SocketAddr,
) -> io::Result<TcpStream> {
    let ip = address.ip();
    if !policy.is_own_only(upstream, ip) {
        return TcpStream::connect(address).await;
    }
    let socket = match ip {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Without SO_REUSEADDR each used local port is blocked for a minute (TIME_WAIT).
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(ip, 0))?;
    socket.connect(address).await
}

fn is_addr_not_available(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable
}

async fn resolve(upstream: &Upstream, deadline: Instant) -> Result<Vec<SocketAddr>, Rejected> {
    let (host, port) = (&*upstream.target.host, upstream.target.port);
    if let Some(ip) = upstream.target.ip() {
        let all = [ip]
            .into_iter()
            .chain(upstream.fallback_addresses.iter().copied());
        return Ok(all.map(|ip| SocketAddr::new(ip, port)).collect());
    }
    match timeout_at(deadline, causeway_rt::resolve(host, port)).await {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => {
            // A resolver without file descriptors may report an unknown name.
            let exhaustion = TcpSocket::new_v4().err().filter(is_exhaustion);
            let (code, error) = match exhaustion {
                Some(lack) => (RejectCode::Exhausted, lack),
                None if error.kind() == io::ErrorKind::TimedOut => {
                    (RejectCode::ResolveTimeout, error)
                }
                None => (RejectCode::TargetUnresolved, error),
            };
            let detail = format!("{} could not resolve {host}: {error}", upstream.node);
            Err(code.with_detail(detail))
        }
        Err(_) => {
            let detail = format!(
                "timeout while resolving the name of {}",
                upstream.describe()
            );
            Err(RejectCode::ResolveTimeout.with_detail(detail))
        }
    }
}

fn dial_error(upstream: &Upstream, code: RejectCode, error: &io::Error) -> Rejected {
    code.with_detail(format!(
        "{} could not dial {}: {}",
        upstream.node,
        upstream.target,
        reason(error)
    ))
}

/// Minimum time between two log messages about exhausted resources of this process.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Log of dials that failed because this process has no file descriptors, local ports or memory left.
#[derive(Debug, Default)]
struct ExhaustionLog(Mutex<Option<Instant>>);

impl ExhaustionLog {
    /// Logs the refusal, unless one was logged recently, because every request may fail in the same way.
    fn write(&self, app: &Upstream, refused: &Rejected) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= LOG_INTERVAL) {
            *last = Some(Instant::now());
            let (target, error) = (&app.target, &refused.detail);
            tracing::warn!(%target, %error, "this edge is out of file descriptors, local ports or memory");
        }
    }
}

/// Returns a readable description of the error, without the system's error number if there is a name.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        kind @ (io::ErrorKind::ConnectionRefused
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::TimedOut
        | io::ErrorKind::UnexpectedEof) => kind.to_string(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::LocalNode;
    use causeway_tunnel::{StreamKind, Target, control_stream::AnnouncedPorts};
    use serde_json::json;
    use tokio::net::TcpListener;

    /// Connects to this listed port, as a node of a cluster that has the address `own` in addition to loopback.
    async fn dialled(port: u16, own: &str) -> Result<TcpStream, Rejected> {
        let config =
            json!({ "kubernetes": {}, "addresses": [own], "allow": { "hosts": ["127.0.0.1"] } });
        let config = serde_json::from_value(config).unwrap();
        let listed = AnnouncedPorts {
            http: vec![port],
            tcp: Vec::new(),
        };
        let policy = Policy::new("edge-1", &config).unwrap();
        let policy = policy.with_announced(&listed, &LocalNode::default());
        let app = policy.select_upstream(&Target::new("edge-1", port), &StreamKind::Request);
        let app = app?;
        let dialled = dial(&policy, &app, Instant::now() + Duration::from_mins(2)).await;
        dialled.map(|(tcp, _)| tcp)
    }

    #[tokio::test]
    async fn own_addresses_are_dialled_and_foreign_ones_never() {
        // Not 127.0.0.1, so it counts as an ordinary address of this machine. A socket that does not listen keeps the same port of
        // 127.0.0.1 from other tests.
        let (app, _reserved) = loop {
            let app = TcpListener::bind("127.0.0.2:0").await.unwrap();
            let port = app.local_addr().unwrap().port();
            let reserved = tokio::net::TcpSocket::new_v4().unwrap();
            if reserved.bind(([127, 0, 0, 1], port).into()).is_ok() {
                break (app, reserved);
            }
        };
        let port = app.local_addr().unwrap().port();
        let tcp = dialled(port, "127.0.0.2").await.unwrap();
        assert_eq!(tcp.peer_addr().unwrap(), app.local_addr().unwrap());
        assert_eq!(
            tcp.local_addr().unwrap().ip(),
            tcp.peer_addr().unwrap().ip()
        );
        // For a documentation address (RFC 5737), the error of loopback is reported.
        let refused = dialled(port, "192.0.2.1").await.unwrap_err();
        assert_eq!(refused.code, RejectCode::TargetRefused);
        let message = format!("edge-1 could not dial 127.0.0.1:{port}: connection refused");
        assert_eq!(refused.detail, message);
    }
}
