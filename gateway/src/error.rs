//! Error of a stream: a row of the error table, a sentence for the client, and a cause for the log.
//!
//! A [`Reason`] decides the status, the word and whether a retry helps, each by an exhaustive `match`. A new reason therefore
//! breaks the build of every place that has to handle it. Only `proxy::error_response` turns an [`Error`] into a response.

mod explanation;

use crate::state::NodeUnavailable;
use causeway_certs::NodeName;
use causeway_tunnel::{RejectCode, StreamError};
use http::StatusCode;
use std::{borrow::Cow, fmt, time::Duration};

/// Cause of an error, for the log.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Reason of an error, one row of the error table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No node has this name or address.
    NodeUnknown,
    /// The node has no service of this name.
    ServiceUnknown,
    /// The node is known, but has no tunnel.
    NodeNotConnected,
    /// The request names two nodes, or none that this gateway serves.
    Misdirected,
    /// The client has not proven its identity.
    Unauthenticated,
    /// The client is not allowed to do this.
    Forbidden,
    /// The edge's own policy refuses the target.
    EdgePolicy,
    /// The target refused the connection.
    TargetRefused,
    /// The target's name does not resolve.
    TargetUnresolved,
    /// There is no route to the target.
    TargetUnreachable,
    /// The target's name was not resolved in time.
    ResolveTimeout,
    /// The side that dials, an edge or this gateway, has no file descriptors, local ports or memory left.
    Exhausted,
    /// The target broke the protocol or closed the connection early.
    TargetBroken,
    /// The target has another key than the pinned one.
    TargetKeyChanged,
    /// The tunnel was lost in flight.
    TunnelLost,
    /// The target or the edge was too slow.
    TargetTimeout,
    /// A required service does not answer: the service that authenticates or authorizes the client, finds the node of a pod, or
    /// records the key of a target.
    DependencyUnavailable,
    /// A limit of the gateway or the client is reached, or a stalled stream was reset.
    LimitReached,
    /// A limit of the node, its tunnel or its edge is reached.
    NodeLimitReached,
    /// The gateway or the edge drains.
    Draining,
    /// The request's target is too long.
    UriTooLong,
    /// The request's head is too large.
    HeaderTooLarge,
    /// The request's body is too large.
    ContentTooLarge,
    /// The request is malformed.
    Malformed,
    /// The request line names a version of HTTP other than 1.
    VersionNotSupported,
    /// The method is not served here.
    MethodNotAllowed,
    /// The client disconnected before it received a response.
    ClientClosed,
}

impl Reason {
    /// All reasons, for metrics and tests.
    pub const ALL: [Self; 27] = [
        Self::NodeUnknown,
        Self::ServiceUnknown,
        Self::NodeNotConnected,
        Self::Misdirected,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::EdgePolicy,
        Self::TargetRefused,
        Self::TargetUnresolved,
        Self::TargetUnreachable,
        Self::ResolveTimeout,
        Self::Exhausted,
        Self::TargetBroken,
        Self::TargetKeyChanged,
        Self::TunnelLost,
        Self::TargetTimeout,
        Self::DependencyUnavailable,
        Self::LimitReached,
        Self::NodeLimitReached,
        Self::Draining,
        Self::UriTooLong,
        Self::HeaderTooLarge,
        Self::ContentTooLarge,
        Self::Malformed,
        Self::VersionNotSupported,
        Self::MethodNotAllowed,
        Self::ClientClosed,
    ];

    /// Returns the reason with this word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.word() == word)
    }

    /// Returns the HTTP status.
    pub fn status(self) -> StatusCode {
        match self {
            Self::NodeUnknown | Self::ServiceUnknown => StatusCode::NOT_FOUND,
            Self::NodeNotConnected
            | Self::DependencyUnavailable
            | Self::LimitReached
            | Self::NodeLimitReached
            | Self::Draining
            | Self::Exhausted => StatusCode::SERVICE_UNAVAILABLE,
            Self::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Forbidden | Self::EdgePolicy => StatusCode::FORBIDDEN,
            Self::TargetRefused
            | Self::TargetUnresolved
            | Self::TargetUnreachable
            | Self::TargetBroken
            | Self::TargetKeyChanged
            | Self::TunnelLost => StatusCode::BAD_GATEWAY,
            Self::TargetTimeout | Self::ResolveTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::UriTooLong => StatusCode::URI_TOO_LONG,
            Self::VersionNotSupported => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
            Self::HeaderTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::ContentTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Malformed => StatusCode::BAD_REQUEST,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            // No client receives this status. nginx logs the same code for a client that has disconnected.
            Self::ClientClosed => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        }
    }

    /// Returns the status code for gRPC clients: the one into which Envoy translates the HTTP status of a local reply
    /// (`Grpc::Utility::httpToGrpcStatus`). The exception is an unknown node or service. Envoy answers 503 for an unknown
    /// cluster, and UNIMPLEMENTED would mean that the application lacks the method.
    pub fn grpc_status(self) -> u8 {
        const UNKNOWN: u8 = 2;
        const PERMISSION_DENIED: u8 = 7;
        const UNIMPLEMENTED: u8 = 12;
        const INTERNAL: u8 = 13;
        const UNAVAILABLE: u8 = 14;
        const UNAUTHENTICATED: u8 = 16;
        if matches!(self, Self::NodeUnknown | Self::ServiceUnknown) {
            return UNAVAILABLE;
        }
        match self.status() {
            StatusCode::BAD_REQUEST => INTERNAL,
            StatusCode::UNAUTHORIZED => UNAUTHENTICATED,
            StatusCode::FORBIDDEN => PERMISSION_DENIED,
            StatusCode::NOT_FOUND => UNIMPLEMENTED,
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => UNAVAILABLE,
            _ => UNKNOWN,
        }
    }

    /// Whether the request was refused, and the audit log records it.
    pub fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::Unauthenticated
                | Self::DependencyUnavailable
                | Self::Forbidden
                | Self::EdgePolicy
                | Self::Misdirected
                | Self::TargetKeyChanged
        )
    }

    /// Whether the node or its target is the cause, so that another node with the same service may serve the stream.
    pub fn is_of_node(self) -> bool {
        match self {
            Self::NodeNotConnected
            | Self::NodeLimitReached
            | Self::EdgePolicy
            | Self::TargetRefused
            | Self::TargetUnresolved
            | Self::TargetUnreachable
            | Self::ResolveTimeout
            | Self::Exhausted
            | Self::TargetBroken
            | Self::TargetKeyChanged
            | Self::TunnelLost
            | Self::TargetTimeout
            | Self::Draining => true,
            Self::NodeUnknown
            | Self::ServiceUnknown
            | Self::Misdirected
            | Self::Unauthenticated
            | Self::Forbidden
            | Self::DependencyUnavailable
            | Self::LimitReached
            | Self::UriTooLong
            | Self::HeaderTooLarge
            | Self::ContentTooLarge
            | Self::Malformed
            | Self::VersionNotSupported
            | Self::MethodNotAllowed
            | Self::ClientClosed => false,
        }
    }

    /// Returns the word: metric label, log field, and end of the problem's type.
    pub fn word(self) -> &'static str {
        match self {
            Self::NodeUnknown => "node_unknown",
            Self::ServiceUnknown => "service_unknown",
            Self::NodeNotConnected => "node_not_connected",
            Self::Misdirected => "misdirected",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::EdgePolicy => "edge_policy",
            Self::TargetRefused => "target_refused",
            Self::TargetUnresolved => "target_unresolved",
            Self::TargetUnreachable => "target_unreachable",
            Self::ResolveTimeout => "resolve_timeout",
            Self::Exhausted => "exhausted",
            Self::TargetBroken => "target_broken",
            Self::TargetKeyChanged => "target_key_changed",
            Self::TunnelLost => "tunnel_lost",
            Self::TargetTimeout => "target_timeout",
            Self::DependencyUnavailable => "dependency_unavailable",
            Self::LimitReached => "limit_reached",
            Self::NodeLimitReached => "node_limit_reached",
            Self::Draining => "draining",
            Self::UriTooLong => "uri_too_long",
            Self::VersionNotSupported => "version_not_supported",
            Self::HeaderTooLarge => "header_too_large",
            Self::ContentTooLarge => "content_too_large",
            Self::Malformed => "malformed",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::ClientClosed => "client_closed",
        }
    }

    /// Returns the closest proxy error type (RFC 9209 §2.3).
    pub fn proxy_status(self) -> &'static str {
        match self {
            Self::NodeUnknown | Self::ServiceUnknown => "destination_not_found",
            Self::NodeNotConnected | Self::Draining => "destination_unavailable",
            Self::Forbidden | Self::EdgePolicy => "http_request_denied",
            Self::TargetRefused => "connection_refused",
            Self::TargetUnresolved => "dns_error",
            Self::TargetUnreachable => "destination_ip_unroutable",
            Self::ResolveTimeout => "dns_timeout",
            Self::TargetBroken => "http_protocol_error",
            Self::TargetKeyChanged => "tls_certificate_error",
            Self::TunnelLost => "connection_terminated",
            Self::TargetTimeout => "connection_timeout",
            Self::DependencyUnavailable | Self::Exhausted => "proxy_internal_error",
            Self::LimitReached | Self::NodeLimitReached => "connection_limit_reached",
            Self::Unauthenticated
            | Self::Misdirected
            | Self::UriTooLong
            | Self::HeaderTooLarge
            | Self::ContentTooLarge
            | Self::Malformed
            | Self::VersionNotSupported
            | Self::MethodNotAllowed
            | Self::ClientClosed => "http_request_error",
        }
    }

    /// Returns the time that a client should wait before it retries, if a retry helps.
    pub fn retry_after(self) -> Option<Duration> {
        match self {
            Self::NodeNotConnected | Self::DependencyUnavailable => Some(Duration::from_secs(2)),
            Self::LimitReached | Self::NodeLimitReached | Self::Draining | Self::Exhausted => {
                Some(Duration::from_secs(1))
            }
            Self::NodeUnknown
            | Self::ServiceUnknown
            | Self::Misdirected
            | Self::Unauthenticated
            | Self::Forbidden
            | Self::EdgePolicy
            | Self::TargetRefused
            | Self::TargetUnresolved
            | Self::TargetUnreachable
            | Self::ResolveTimeout
            | Self::TargetBroken
            | Self::TargetKeyChanged
            | Self::TunnelLost
            | Self::TargetTimeout
            | Self::UriTooLong
            | Self::HeaderTooLarge
            | Self::ContentTooLarge
            | Self::Malformed
            | Self::VersionNotSupported
            | Self::MethodNotAllowed
            | Self::ClientClosed => None,
        }
    }

    /// Returns the title of the problem (RFC 9457 §3.1.3), which is the same for every occurrence.
    pub fn title(self) -> &'static str {
        match self {
            Self::NodeUnknown => "Node unknown",
            Self::ServiceUnknown => "Service unknown",
            Self::NodeNotConnected => "Node not connected",
            Self::Misdirected => "Request not for this gateway",
            Self::Unauthenticated => "Client not authenticated",
            Self::Forbidden => "Client not allowed",
            Self::EdgePolicy => "Refused by the edge's policy",
            Self::TargetRefused => "Target refused the connection",
            Self::TargetUnresolved => "Target name not resolved",
            Self::TargetUnreachable => "Target unreachable",
            Self::ResolveTimeout => "Target name not resolved in time",
            Self::Exhausted => "Out of file descriptors, ports or memory",
            Self::TargetBroken => "Target broke the protocol",
            Self::TargetKeyChanged => "Target key changed",
            Self::TunnelLost => "Tunnel lost in flight",
            Self::TargetTimeout => "Target too slow",
            Self::DependencyUnavailable => "Decision unavailable",
            Self::LimitReached => "Limit reached",
            Self::NodeLimitReached => "Limit of the node reached",
            Self::Draining => "Draining",
            Self::UriTooLong => "Request target too long",
            Self::VersionNotSupported => "HTTP version not supported",
            Self::HeaderTooLarge => "Request head too large",
            Self::ContentTooLarge => "Request body too large",
            Self::Malformed => "Malformed request",
            Self::MethodNotAllowed => "Method not allowed",
            Self::ClientClosed => "Client gone",
        }
    }

    /// Returns the error with the message for the client.
    pub fn error(self, detail: impl Into<Cow<'static, str>>) -> Error {
        Error {
            reason: self,
            detail: detail.into(),
            cause: None,
            is_token_error: false,
        }
    }

    /// Returns the same error as [`Reason::error`], with the cause for the log.
    pub fn with_source(
        self,
        detail: impl Into<Cow<'static, str>>,
        cause: impl Into<BoxError>,
    ) -> Error {
        Error {
            reason: self,
            detail: detail.into(),
            cause: Some(cause.into()),
            is_token_error: false,
        }
    }
}

impl From<RejectCode> for Reason {
    fn from(refusal: RejectCode) -> Self {
        match refusal {
            RejectCode::Policy => Self::EdgePolicy,
            RejectCode::ServiceUnknown => Self::ServiceUnknown,
            RejectCode::TargetRefused => Self::TargetRefused,
            RejectCode::TargetUnresolved => Self::TargetUnresolved,
            RejectCode::TargetUnreachable => Self::TargetUnreachable,
            RejectCode::ResolveTimeout => Self::ResolveTimeout,
            RejectCode::Exhausted => Self::Exhausted,
            RejectCode::TargetTimeout => Self::TargetTimeout,
            RejectCode::TargetBroken => Self::TargetBroken,
            RejectCode::Busy => Self::NodeLimitReached,
            RejectCode::Malformed => Self::Malformed,
        }
    }
}

/// Error of a stream.
#[derive(Debug)]
pub struct Error {
    /// Row of the error table.
    pub reason: Reason,
    /// Description of the failure for the client: the component, the cause, and the time.
    pub detail: Cow<'static, str>,
    /// Underlying cause, for the log.
    pub cause: Option<BoxError>,
    /// Whether the error is an invalid bearer token (RFC 6750 §3.1, `invalid_token`).
    pub is_token_error: bool,
}

impl Error {
    /// Returns the error, marked as caused by an invalid bearer token.
    #[must_use]
    pub fn as_token_error(self) -> Self {
        Self {
            is_token_error: true,
            ..self
        }
    }

    /// Returns the error of a request for a node without a usable tunnel.
    pub(crate) fn from_unavailable(node: &NodeName, unavailable: &NodeUnavailable) -> Self {
        match unavailable {
            NodeUnavailable::NeverSeen => Reason::NodeNotConnected.error(format!(
                "{node} is not connected and has not connected since this gateway started"
            )),
            NodeUnavailable::LastSeen {
                ended_at,
                remote_address,
            } => Reason::NodeNotConnected.error(format!(
                "{node} is not connected; it was last seen at {}, {} s ago; its last tunnel came from {remote_address}",
                humantime::format_rfc3339_seconds(ended_at.wall_clock),
                ended_at.elapsed().as_secs()
            )),
            NodeUnavailable::LeftPeer { ended_at, gateway } => Reason::NodeNotConnected.error(format!(
                "{node} is not connected; it was last seen at {}, {} s ago, by the gateway at {gateway}",
                humantime::format_rfc3339_seconds(ended_at.wall_clock),
                ended_at.elapsed().as_secs()
            )),
            NodeUnavailable::Suspect {
                remote_address: from,
            } => Reason::NodeNotConnected.error(format!(
                "{node} does not answer on its tunnel from {from}; the link is probably down"
            )),
            NodeUnavailable::Draining => Reason::Draining.error(format!(
                "{node} is disconnecting from this gateway and accepts no new streams"
            )),
        }
    }

    /// Returns the error of a stream to `node` that was reset by the edge, or lost with its tunnel.
    pub fn from_stream_error(node: &str, error: &StreamError) -> Self {
        match error {
            error if error.is_eviction() => Reason::LimitReached.error(format!(
                "the stream to {node} was reset because its buffered bytes were not read"
            )),
            error if error.is_withdrawn() => Reason::EdgePolicy.error(format!(
                "the policy of {node} was changed and no longer allows the stream"
            )),
            StreamError::Reset { .. }
            | StreamError::ProtocolViolation(_)
            | StreamError::Evicted => {
                Reason::TargetBroken.error(format!("{node} aborted the stream: {error}"))
            }
            StreamError::Lost { .. } => Reason::TunnelLost.error(format!(
                "the tunnel of {node} was lost during the stream: {error}"
            )),
            StreamError::TooLarge => {
                Reason::HeaderTooLarge.error(format!("the tunnel of {node}: {error}"))
            }
            StreamError::Busy => Reason::NodeLimitReached.error(format!(
                "the tunnel of {node} has reached its maximum number of streams"
            )),
        }
    }
}

impl Error {
    /// Returns the description for the log, with the cause.
    pub(crate) fn log_detail(&self) -> String {
        match &self.cause {
            Some(cause) => format!("{}: {cause}", self.detail),
            None => self.detail.to_string(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            Some(cause) => Some(cause.as_ref()),
            None => None,
        }
    }
}
