//! Reasons for the end of a tunnel, the end of a stream, and the refusals of an edge.
//!
//! The variants state which end caused the error. The error of a reset has an error of h2 as its source, from which hyper's
//! HTTP/2 listeners read the code that they send on (invariant 3).

use crate::engine;
use nix::errno::Errno;
use std::{borrow::Cow, fmt, io, net::IpAddr};

/// Reason for which a stream ended early.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The other end reset the stream: the upstream, the edge or the client aborted it.
    #[error("the stream was reset: {cause}")]
    Reset {
        /// Error of h2 with the code (RFC 9113 §7), for listeners that speak HTTP/2 themselves.
        #[source]
        cause: h2::Error,
    },
    /// The tunnel below the stream is gone.
    #[error("the tunnel was lost: {}", TunnelEnd::by(.cause))]
    Lost {
        /// Error of the connection.
        #[source]
        cause: engine::Error,
    },
    /// The tunnel accepts no further stream: it drains, or has its maximum number of streams.
    #[error("the tunnel accepts no more streams")]
    Busy,
    /// This end reset the stream: its buffered bytes were not consumed while memory ran short, or for too long.
    #[error("the stream was reset, because its buffered bytes were not read")]
    Evicted,
    /// A head or trailers exceed the size that a tunnel carries ([`crate::wire::MAX_HEAD`]).
    #[error("the header or trailers are larger than a tunnel allows")]
    TooLarge,
    /// The other end violated the protocol.
    #[error("{0}")]
    ProtocolViolation(&'static str),
}

impl StreamError {
    /// Returns the error of a stream that this process aborted, for example because its peer disconnected.
    pub fn cancelled() -> Self {
        engine::Error::from(engine::Reason::CANCEL).into()
    }

    /// Whether the other end refused the stream, which then counts as never opened (RFC 9113 §8.7).
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Reset { cause } if cause.reason() == Some(h2::Reason::REFUSED_STREAM))
    }

    /// Whether this end or the other one reset the stream because its buffered bytes were not consumed (see
    /// [`crate::eviction`]).
    pub fn is_eviction(&self) -> bool {
        match self {
            Self::Evicted => true,
            Self::Reset { cause } => cause.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM),
            _ => false,
        }
    }

    /// Whether the stream was reset because the edge's policy does not allow it any more.
    pub fn is_withdrawn(&self) -> bool {
        matches!(self, Self::Reset { cause } if cause.reason().map(u32::from) == Some(crate::wire::WITHDRAWN.into()))
    }

    /// Whether the other end closed the connection in order before it responded on the stream.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Lost { cause } if is_tunnel_close(cause))
    }

    /// Whether the stream was reset, in contrast to a lost tunnel.
    pub fn is_reset(&self) -> bool {
        matches!(self, Self::Reset { .. })
    }
}

impl From<engine::Error> for StreamError {
    fn from(cause: engine::Error) -> Self {
        match cause.reason() {
            Some(reason) if !cause.is_go_away() && !cause.is_io() => Self::Reset {
                cause: h2::Reason::from(u32::from(reason)).into(),
            },
            _ => Self::Lost { cause },
        }
    }
}

/// Whether a request without a response failed because its peer closed the connection in order or refused the stream. A
/// reset, a lost tunnel and bytes that are not HTTP do not count. Searches the causes of an error of h2 or hyper.
pub fn is_close(error: &(dyn std::error::Error + 'static)) -> bool {
    if error.is::<StreamError>() {
        return false;
    }
    if let Some(h2_error) = error.downcast_ref::<h2::Error>() {
        return h2_error.reason() == Some(h2::Reason::REFUSED_STREAM) || is_h2_close(h2_error);
    }
    if let Some(error) = error.downcast_ref::<engine::Error>() {
        let is_refused = error.reason() == Some(engine::Reason::REFUSED_STREAM);
        return is_refused || is_tunnel_close(error);
    }
    if let Some(io) = error.downcast_ref::<io::Error>() {
        // An `io::Error` does not return its inner error as `source`.
        let inner = io.get_ref();
        return inner.map_or_else(
            || is_socket_close(io),
            |below| is_close(below) || (!below.is::<StreamError>() && is_socket_close(io)),
        );
    }
    error.source().is_some_and(is_close)
}

fn is_h2_close(error: &h2::Error) -> bool {
    if error.is_go_away() {
        return error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR);
    }
    error.get_io().is_some_and(is_socket_close)
}

fn is_tunnel_close(error: &engine::Error) -> bool {
    if error.is_go_away() {
        return error.is_remote() && error.reason() == Some(engine::Reason::NO_ERROR);
    }
    error.get_io().is_some_and(is_socket_close)
}

/// Whether the error is that of a write behind the peer's FIN, or of TLS that ended without `close_notify`.
fn is_socket_close(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof
    )
}

/// Whether the system refused a socket because this process or machine has no file descriptors, memory or local ports left.
pub fn is_exhaustion(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrInUse, AddrNotAvailable, OutOfMemory, WouldBlock};
    // `connect` reports the lack of local ports by the first two kinds, `bind` by the second.
    has_errno(error, &[Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS])
        || matches!(
            error.kind(),
            AddrNotAvailable | AddrInUse | OutOfMemory | WouldBlock
        )
}

fn has_errno(error: &io::Error, codes: &[Errno]) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw);
    code.is_some_and(|code| codes.contains(&code))
}

/// Maximum length of the text of a failure, in characters.
const MAX_FAILURE_LEN: usize = 200;

/// Reason for the end of a tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TunnelEnd {
    /// The peer closed the tunnel in order, or disappeared without notice (a killed peer sends no `close_notify`).
    Peer,
    /// This side closed the tunnel, because it was replaced or drained or the process stops.
    Closed,
    /// Nothing was read within the keepalive period.
    Silent,
    /// The peer violated the protocol, or the connection failed.
    Failed(String),
}

impl TunnelEnd {
    pub(crate) fn from_result(result: Result<(), engine::Error>) -> Self {
        result.err().map_or(Self::Peer, |error| Self::by(&error))
    }

    fn by(error: &engine::Error) -> Self {
        match error.get_io().map(io::Error::kind) {
            Some(
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionAborted,
            ) => Self::Peer,
            _ if error.is_go_away() && error.reason() == Some(engine::Reason::NO_ERROR) => {
                Self::Peer
            }
            // The text of a peer's GOAWAY may have 64 KiB.
            _ => Self::Failed(error.to_string().chars().take(MAX_FAILURE_LEN).collect()),
        }
    }

    /// Returns the reason as one word, for logs and metric labels.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Peer => "peer_gone",
            Self::Closed => "closed",
            Self::Silent => "silent",
            Self::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for TunnelEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer => f.write_str("the peer closed the connection"),
            Self::Closed => f.write_str("closed by this side"),
            Self::Silent => f.write_str("nothing was received in time"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// Reason for which an edge itself failed a stream. The tunnel carries it as [`crate::wire::FAILURE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RejectCode {
    /// The edge's allow-list does not contain the target.
    Policy,
    /// The edge has no service of this name.
    ServiceUnknown,
    /// The target refused the connection.
    TargetRefused,
    /// The target did not accept the connection in time, or did not respond to an upgrade in time.
    TargetTimeout,
    /// The target's name does not resolve.
    TargetUnresolved,
    /// The target's name was not resolved in time.
    ResolveTimeout,
    /// No route leads to the target, or a firewall forbids it.
    TargetUnreachable,
    /// The edge's own process has no file descriptors, local ports or memory left.
    Exhausted,
    /// The target sent an invalid response, or closed the connection before it sent one.
    TargetBroken,
    /// The edge stops, or has its maximum number of streams.
    Busy,
    /// The gateway sent a request that this edge does not understand.
    Malformed,
}

impl RejectCode {
    /// All codes, for parsing and for tests.
    pub const ALL: [Self; 11] = [
        Self::Policy,
        Self::ServiceUnknown,
        Self::TargetRefused,
        Self::TargetTimeout,
        Self::TargetUnresolved,
        Self::ResolveTimeout,
        Self::TargetUnreachable,
        Self::Exhausted,
        Self::TargetBroken,
        Self::Busy,
        Self::Malformed,
    ];

    /// Returns the code's word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::ServiceUnknown => "service-unknown",
            Self::TargetRefused => "target-refused",
            Self::TargetTimeout => "target-timeout",
            Self::TargetUnresolved => "target-unresolved",
            Self::ResolveTimeout => "resolve-timeout",
            Self::TargetUnreachable => "target-unreachable",
            Self::Exhausted => "exhausted",
            Self::TargetBroken => "target-broken",
            Self::Busy => "busy",
            Self::Malformed => "malformed",
        }
    }

    /// Returns the code with this word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|refusal| refusal.as_str() == word)
    }

    /// Returns the code for a failed TCP connection attempt at this address.
    pub fn from_dial_error(error: &io::Error, address: IpAddr) -> Self {
        use io::ErrorKind::{
            AddrNotAvailable, HostUnreachable, NetworkDown, NetworkUnreachable, PermissionDenied,
            TimedOut,
        };
        // Errors of `connect` for IPv6 on a system without IPv6.
        let without_ipv6 = address.is_ipv6()
            && (error.kind() == AddrNotAvailable || has_errno(error, &[Errno::EAFNOSUPPORT]));
        if without_ipv6 {
            return Self::TargetUnreachable;
        }
        if is_exhaustion(error) {
            return Self::Exhausted;
        }
        match error.kind() {
            TimedOut => Self::TargetTimeout,
            HostUnreachable | NetworkUnreachable | NetworkDown | PermissionDenied => {
                Self::TargetUnreachable
            }
            _ => Self::TargetRefused,
        }
    }

    /// Returns the rejection with this code and a sentence for people.
    pub fn with_detail(self, detail: impl Into<Cow<'static, str>>) -> Rejected {
        Rejected {
            code: self,
            detail: detail.into(),
        }
    }
}

/// Rejection of a stream: a code, and a sentence for people.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{detail}")]
pub struct Rejected {
    /// Reason of the rejection.
    pub code: RejectCode,
    /// Description of the failure for the client.
    pub detail: Cow<'static, str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_dials_are_distinguished_by_their_cause() {
        for (code, refusal) in [
            (Errno::ECONNREFUSED, RejectCode::TargetRefused),
            (Errno::ECONNRESET, RejectCode::TargetRefused),
            (Errno::ETIMEDOUT, RejectCode::TargetTimeout),
            (Errno::EHOSTUNREACH, RejectCode::TargetUnreachable),
            (Errno::ENETUNREACH, RejectCode::TargetUnreachable),
            (Errno::EACCES, RejectCode::TargetUnreachable),
            (Errno::EPERM, RejectCode::TargetUnreachable),
            (Errno::EMFILE, RejectCode::Exhausted),
            (Errno::ENFILE, RejectCode::Exhausted),
            (Errno::ENOBUFS, RejectCode::Exhausted),
            (Errno::ENOMEM, RejectCode::Exhausted),
            (Errno::EADDRNOTAVAIL, RejectCode::Exhausted),
            (Errno::EAGAIN, RejectCode::Exhausted),
        ] {
            let error = io::Error::from_raw_os_error(code as i32);
            let address = IpAddr::from([127, 0, 0, 1]);
            assert_eq!(
                RejectCode::from_dial_error(&error, address),
                refusal,
                "{code}"
            );
        }
        // A system without IPv6.
        let error = io::Error::from_raw_os_error(Errno::EADDRNOTAVAIL as i32);
        let address = "::1".parse().unwrap();
        assert_eq!(
            RejectCode::from_dial_error(&error, address),
            RejectCode::TargetUnreachable
        );
    }

    #[test]
    fn a_close_without_an_answer_is_no_reset_and_no_garbage() {
        let io = |kind| io::Error::new(kind, "inside");
        assert!(is_close(&io(io::ErrorKind::UnexpectedEof)));
        assert!(is_close(&io::Error::other(io(io::ErrorKind::BrokenPipe))));
        assert!(is_close(&h2::Error::from(h2::Reason::REFUSED_STREAM)));
        for other in [
            io(io::ErrorKind::ConnectionReset),
            io::Error::new(io::ErrorKind::BrokenPipe, StreamError::cancelled()),
            io::Error::other(h2::Error::from(h2::Reason::PROTOCOL_ERROR)),
        ] {
            assert!(!is_close(&other), "{other:?}");
        }
    }
}
