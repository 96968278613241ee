//! Meaning and remedy of each reason, for the reference documentation and `causeway errors`.

use super::Reason;

#[allow(clippy::too_many_lines, reason = "one text for each reason")]
impl Reason {
    /// Returns the explanation of the failure in one or two sentences (Markdown).
    pub fn explanation(self) -> &'static str {
        match self {
            Self::NodeUnknown => "No node of this name or address has joined this gateway.",
            Self::ServiceUnknown => {
                "The client asks for `SERVICE.NODE`, and `services` of the node's edge has no such name."
            }
            Self::NodeNotConnected => {
                "The node has no tunnel, and had none within `timeouts.reconnect`. The detail says since when, and the last address."
            }
            Self::Misdirected => {
                "SNI and Host name two different nodes, or an address belongs to several nodes. Or an anonymous client without TLS asks a `connect` listener for its lists under a `Host` that is none of its `names`."
            }
            Self::Unauthenticated => {
                "The client presented no certificate or token, or one that this listener does not accept. For requests through a `connect` listener the status is 407. The detail begins with the method (`certificate`, `token`, `jwt`, `token_review`)."
            }
            Self::Forbidden => {
                "The policy or the cluster denies this request. The detail says which."
            }
            Self::EdgePolicy => "The node does not serve this port or host.",
            Self::TargetRefused => "The app's port is closed.",
            Self::TargetUnresolved => {
                "The name in `ports.*.target`, or the requested host, does not resolve at the edge."
            }
            Self::TargetUnreachable => {
                "No route leads to the target, or a firewall rejects the connection."
            }
            Self::ResolveTimeout => {
                "The target's name was not resolved within `timeouts.dial` of the edge."
            }
            Self::Exhausted => {
                "The edge (with `direct_networks` the gateway) has no file descriptors, local ports or memory left."
            }
            Self::TargetBroken => {
                "The app used another protocol, or closed the connection during the answer."
            }
            Self::TargetKeyChanged => {
                "The app presents another key than the pinned one (`upstream_tls.*.pin`)."
            }
            Self::TunnelLost => "The tunnel ended during the stream.",
            Self::TargetTimeout => "The edge or the app was too slow.",
            Self::DependencyUnavailable => {
                "A service that authenticates or authorizes the client, or locates a pod, does not answer; or the nodes of the cluster are not known yet; or a key could not be stored."
            }
            Self::LimitReached => {
                "The gateway or the client has too many streams, or there are too many buffered bytes; or a stalled stream was reset. The detail names the limit."
            }
            Self::NodeLimitReached => {
                "The node, its tunnel or its edge has too many streams, or its edge has no memory left. The detail names the limit."
            }
            Self::Draining => {
                "The gateway or the edge stops, and no replacement connected within `timeouts.reconnect`; or the gateway stopped before the end of the answer."
            }
            Self::UriTooLong => {
                "Path and query exceed `limits.max_uri_bytes`, or `limits.max_kubernetes_uri_bytes` with `errors: kubernetes`."
            }
            Self::HeaderTooLarge => {
                "The request's head exceeds `limits.max_header_bytes` or `limits.max_headers`."
            }
            Self::ContentTooLarge => {
                "The body of an upgrade request exceeds 64 KiB and has no `Content-Length`."
            }
            Self::Malformed => {
                "The request is ambiguous or invalid, or names no port. The detail says why."
            }
            Self::VersionNotSupported => "The request line names an HTTP version other than 1.",
            Self::MethodNotAllowed => {
                "CONNECT at a listener with another protocol than `connect`, or another request at a `connect` listener whose target does not begin with `http://`."
            }
            Self::ClientClosed => {
                "The client closed the connection before it had the complete answer. In metrics and logs only."
            }
        }
    }

    /// Returns the remedy for an operator or the client (Markdown).
    pub fn remedy(self) -> &'static str {
        match self {
            Self::NodeUnknown => {
                "Check the spelling. `causeway node list` and `causeway status` show the nodes."
            }
            Self::ServiceUnknown => "Check the spelling, and `services` of the edge.",
            Self::NodeNotConnected => {
                "On the node: run `causeway health --ready`, and read the log of the edge."
            }
            Self::Misdirected => {
                "Call the node by its name. For the lists, add the `Host` to `names` of the listener."
            }
            Self::Unauthenticated => "Present a credential that the listener accepts.",
            Self::Forbidden => "Ask the author of the policy, or grant the right in the cluster.",
            Self::EdgePolicy => "Add it to `ports` or `allow.hosts` of the edge.",
            Self::TargetRefused => "Start the app, and check `ports.*.target` of the edge.",
            Self::TargetUnresolved => "Check the name and the DNS of the edge.",
            Self::TargetUnreachable => "Check routes and firewall of the edge.",
            Self::ResolveTimeout => "Check the DNS of the edge.",
            Self::Exhausted => "Raise its limit of open files (`ulimit -n`, `LimitNOFILE`).",
            Self::TargetBroken => "Check `ports.*.scheme` of the edge: `http`, `h2c` or `https`.",
            Self::TargetKeyChanged => {
                "If the app has a new key on purpose, run `causeway node unpin NODE PORT`. If not, another server answers in its place."
            }
            Self::TunnelLost => "Retry. The edge reconnects by itself.",
            Self::TargetTimeout => {
                "Check the app, then `timeouts.connect`, `timeouts.upgrade_first_byte` and `timeouts.upload` of the gateway, and `timeouts.dial` of the edge."
            }
            Self::DependencyUnavailable => {
                "The detail names the service. Check `/readyz`, the key `kubernetes`, and the gateway's rights in the cluster."
            }
            Self::LimitReached => {
                "Raise the limit in `limits` of the gateway, or send fewer requests."
            }
            Self::NodeLimitReached => {
                "Raise `limits.per_node` or `tunnel.max_streams_per_tunnel` of the gateway or `limits.streams` of the edge, or send fewer requests to this node."
            }
            Self::Draining => "Retry after the time in `Retry-After`.",
            Self::UriTooLong => "Shorten the request target, or raise the limit.",
            Self::HeaderTooLarge => "Send fewer or shorter header fields, or raise the limit.",
            Self::ContentTooLarge => "Send `Content-Length`: then the body may have any size.",
            Self::Malformed => "Correct the client.",
            Self::VersionNotSupported => "Use HTTP/1.1, or HTTP/2 with its preface.",
            Self::MethodNotAllowed => "Use the right listener.",
            Self::ClientClosed => "Nothing, or raise the client's timeout.",
        }
    }
}
