//! What ends a tunnel, what ends a stream, and what an edge refuses.
//!
//! The HTTP/2 engine's own error stays inside: callers see which end did what, and a body error keeps the
//! engine's error as its source, so that an HTTP/2 front sends the same code on (design trap 3).

use std::{borrow::Cow, fmt, io};

/// Why a stream ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The other end reset the stream: the app, the edge or the caller gave up.
    #[error("the stream was reset: {cause}")]
    Reset {
        /// The engine's error with its code (RFC 9113 §7), for fronts that speak HTTP/2 themselves.
        #[source]
        cause: h2::Error,
    },
    /// The tunnel below the stream is gone.
    #[error("the tunnel was lost: {}", Ended::by(.cause))]
    Lost {
        /// The engine's error.
        #[source]
        cause: h2::Error,
    },
    /// The tunnel takes no further stream: it drains, or has as many as it may have.
    #[error("the tunnel takes no further stream")]
    Busy,
    /// This end reset the stream: the bytes that waited in it were taken by nobody while memory ran short, or for too long.
    #[error("the stream was reset, because the bytes that waited in it were not taken")]
    Evicted,
    /// A head or trailers are larger than a tunnel carries ([`crate::wire::MAX_HEAD`]).
    #[error("a head or trailers are larger than a tunnel carries")]
    TooLarge,
    /// The other end did what the protocol forbids.
    #[error("{0}")]
    Nonsense(&'static str),
}

impl StreamError {
    /// The stream was given up by this process, for example because its peer went away.
    pub fn cancelled() -> Self {
        h2::Error::from(h2::Reason::CANCEL).into()
    }

    /// The other end has not taken the stream, which is as if it had never been opened (RFC 9113 §8.7).
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Reset { cause } if cause.reason() == Some(h2::Reason::REFUSED_STREAM))
    }

    /// This end or the other one reset the stream because nobody took the bytes that waited in it (see [`crate::eviction`]).
    pub fn is_eviction(&self) -> bool {
        match self {
            Self::Evicted => true,
            Self::Reset { cause } => cause.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM),
            _ => false,
        }
    }

    /// A reset, as against a lost tunnel.
    pub fn is_reset(&self) -> bool {
        matches!(self, Self::Reset { .. })
    }
}

impl From<h2::Error> for StreamError {
    fn from(cause: h2::Error) -> Self {
        match cause.reason() {
            Some(_) if !cause.is_go_away() && !cause.is_io() => Self::Reset { cause },
            _ => Self::Lost { cause },
        }
    }
}

/// How a tunnel ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The peer closed it in order, or went away without a word (a killed peer sends no `close_notify`).
    Peer,
    /// This side closed it: replaced, drained, or stopping.
    Closed,
    /// Nothing was read for the time that liveness allows.
    Silent,
    /// The peer broke the protocol, or the connection failed.
    Failed(String),
}

impl Ended {
    pub(crate) fn of(result: Result<(), h2::Error>) -> Self {
        result.err().map_or(Self::Peer, |error| Self::by(&error))
    }

    fn by(error: &h2::Error) -> Self {
        match error.get_io().map(io::Error::kind) {
            Some(
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionAborted,
            ) => Self::Peer,
            _ if error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR) => Self::Peer,
            _ => Self::Failed(error.to_string()),
        }
    }

    /// One word, for logs and metric labels.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Peer => "peer_gone",
            Self::Closed => "closed",
            Self::Silent => "silent",
            Self::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer => f.write_str("the peer closed the connection"),
            Self::Closed => f.write_str("closed by this side"),
            Self::Silent => f.write_str("nothing was heard in time"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// Why an edge itself failed a stream. Travels as [`crate::wire::FAILURE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The edge's allow-list does not have the target.
    Policy,
    /// The target refused the connection, or its name does not resolve.
    TargetRefused,
    /// The target did not take the connection, or did not answer an upgrade, in time.
    TargetTimeout,
    /// The target spoke nonsense, or closed before it had answered.
    TargetBroken,
    /// The edge stops, or has as many streams as it may have.
    Busy,
    /// The gateway asked for something that this edge does not understand.
    Malformed,
}

impl Refusal {
    /// All of them, for parsing and for tests.
    pub const ALL: [Self; 6] = [
        Self::Policy,
        Self::TargetRefused,
        Self::TargetTimeout,
        Self::TargetBroken,
        Self::Busy,
        Self::Malformed,
    ];

    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::TargetRefused => "target-refused",
            Self::TargetTimeout => "target-timeout",
            Self::TargetBroken => "target-broken",
            Self::Busy => "busy",
            Self::Malformed => "malformed",
        }
    }

    /// The refusal that a word names.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.word() == word)
    }

    /// The refusal with the sentence that a person reads.
    pub fn because(self, detail: impl Into<Cow<'static, str>>) -> Refused {
        Refused {
            refusal: self,
            detail: detail.into(),
        }
    }
}

/// A refusal and its sentence.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{detail}")]
pub struct Refused {
    /// The kind.
    pub refusal: Refusal,
    /// What happened, for the caller.
    pub detail: Cow<'static, str>,
}
