//! Error codes (RFC 9113 section 7), and the errors of connections and streams.

use bytes::Bytes;
use std::{fmt, io, sync::Arc};

/// Error code of a `RST_STREAM` or GOAWAY frame (RFC 9113 section 7).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reason(u32);

/// Names of the codes, in the order of their numbers, and descriptions for people, as those of h2.
const NAMES: [(&str, &str); 14] = [
    ("NO_ERROR", "not a result of an error"),
    ("PROTOCOL_ERROR", "unspecific protocol error detected"),
    ("INTERNAL_ERROR", "unexpected internal error encountered"),
    ("FLOW_CONTROL_ERROR", "flow-control protocol violated"),
    (
        "SETTINGS_TIMEOUT",
        "settings ACK not received in timely manner",
    ),
    ("STREAM_CLOSED", "received frame when stream half-closed"),
    ("FRAME_SIZE_ERROR", "frame with invalid size"),
    (
        "REFUSED_STREAM",
        "refused stream before processing any application logic",
    ),
    ("CANCEL", "stream no longer needed"),
    (
        "COMPRESSION_ERROR",
        "unable to maintain the header compression context",
    ),
    (
        "CONNECT_ERROR",
        "connection established in response to a CONNECT request was reset or abnormally closed",
    ),
    (
        "ENHANCE_YOUR_CALM",
        "detected excessive load generating behavior",
    ),
    (
        "INADEQUATE_SECURITY",
        "security properties do not meet minimum requirements",
    ),
    ("HTTP_1_1_REQUIRED", "endpoint requires HTTP/1.1"),
];

impl Reason {
    /// The end is not the result of an error.
    pub const NO_ERROR: Self = Self(0);
    /// The peer violated the protocol.
    pub const PROTOCOL_ERROR: Self = Self(1);
    /// This end has failed.
    pub const INTERNAL_ERROR: Self = Self(2);
    /// The peer exceeded a window.
    pub const FLOW_CONTROL_ERROR: Self = Self(3);
    /// The peer did not acknowledge SETTINGS in time.
    pub const SETTINGS_TIMEOUT: Self = Self(4);
    /// A frame came for a stream that was already closed.
    pub const STREAM_CLOSED: Self = Self(5);
    /// A frame has an invalid size.
    pub const FRAME_SIZE_ERROR: Self = Self(6);
    /// The stream was refused before it was processed.
    pub const REFUSED_STREAM: Self = Self(7);
    /// The stream is not needed any more.
    pub const CANCEL: Self = Self(8);
    /// The compression state of header blocks is lost.
    pub const COMPRESSION_ERROR: Self = Self(9);
    /// The TCP connection behind a CONNECT was reset or closed abnormally.
    pub const CONNECT_ERROR: Self = Self(10);
    /// The peer causes excessive load.
    pub const ENHANCE_YOUR_CALM: Self = Self(11);
    /// The transport's security does not suffice.
    pub const INADEQUATE_SECURITY: Self = Self(12);
    /// The endpoint requires HTTP/1.1.
    pub const HTTP_1_1_REQUIRED: Self = Self(13);

    /// Returns the code's name and description, if it has any.
    fn name(self) -> Option<(&'static str, &'static str)> {
        let place = usize::try_from(self.0).ok()?;
        NAMES.get(place).copied()
    }
}

impl From<u32> for Reason {
    fn from(code: u32) -> Self {
        Self(code)
    }
}

impl From<Reason> for u32 {
    fn from(reason: Reason) -> Self {
        reason.0
    }
}

impl fmt::Debug for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "Reason({:#x})", self.0),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().map_or("unknown reason", |(_, text)| text))
    }
}

/// Cause of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Initiator {
    /// The user of a handle.
    User,
    /// This end's engine, because of the peer's behaviour.
    Engine,
    /// The peer.
    Remote,
}

/// Error of a connection or a stream.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Reset(Reason, Initiator),
    /// GOAWAY, with the peer's text.
    GoAway(Bytes, Reason, Initiator),
    /// A code that a user turned into an error.
    Reason(Reason),
    /// A call that the state of the connection or stream does not allow.
    User(&'static str),
    Io(Arc<io::Error>),
}

impl Error {
    pub(super) fn reset(reason: Reason, initiator: Initiator) -> Self {
        Self {
            kind: Kind::Reset(reason, initiator),
        }
    }

    pub(super) fn go_away(reason: Reason, initiator: Initiator, text: Bytes) -> Self {
        Self {
            kind: Kind::GoAway(text, reason, initiator),
        }
    }

    pub(super) fn user(why: &'static str) -> Self {
        Self {
            kind: Kind::User(why),
        }
    }

    pub(super) fn io(error: io::Error) -> Self {
        Self {
            kind: Kind::Io(Arc::new(error)),
        }
    }

    /// Returns the error of streams that end with their connection.
    pub(super) fn broken_pipe() -> Self {
        let text = "the connection of the stream has ended";
        Self::io(io::Error::new(io::ErrorKind::BrokenPipe, text))
    }

    /// Returns the code of the reset or GOAWAY, if the error is one.
    pub fn reason(&self) -> Option<Reason> {
        match &self.kind {
            Kind::Reset(reason, _) | Kind::GoAway(_, reason, _) | Kind::Reason(reason) => {
                Some(*reason)
            }
            Kind::User(_) | Kind::Io(_) => None,
        }
    }

    /// Whether a GOAWAY of either end ended the stream or connection.
    pub fn is_go_away(&self) -> bool {
        matches!(self.kind, Kind::GoAway(..))
    }

    /// Whether a `RST_STREAM` of either end ended the stream.
    pub fn is_reset(&self) -> bool {
        matches!(self.kind, Kind::Reset(..))
    }

    /// Whether the transport failed.
    pub fn is_io(&self) -> bool {
        matches!(self.kind, Kind::Io(_))
    }

    /// Whether the peer sent the reset or GOAWAY.
    pub fn is_remote(&self) -> bool {
        matches!(
            self.kind,
            Kind::Reset(_, Initiator::Remote) | Kind::GoAway(_, _, Initiator::Remote)
        )
    }

    /// Returns the error of the transport, if the error is one.
    pub fn get_io(&self) -> Option<&io::Error> {
        match &self.kind {
            Kind::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        Self {
            kind: Kind::Reason(reason),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = |initiator: &Initiator| match initiator {
            Initiator::User => "sent by user",
            Initiator::Engine => "detected",
            Initiator::Remote => "received",
        };
        match &self.kind {
            Kind::Reset(reason, initiator) => {
                write!(f, "stream error {}: {reason}", by(initiator))
            }
            Kind::GoAway(text, reason, initiator) => {
                if let (Initiator::Engine, Ok(text)) = (initiator, std::str::from_utf8(text))
                    && !text.is_empty()
                {
                    return f.write_str(text);
                }
                write!(f, "connection error {}: {reason}", by(initiator))?;
                if text.is_empty() {
                    return Ok(());
                }
                write!(f, " ({text:?})")
            }
            Kind::Reason(reason) => write!(f, "protocol error: {reason}"),
            Kind::User(why) => write!(f, "user error: {why}"),
            Kind::Io(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl std::error::Error for Error {}
