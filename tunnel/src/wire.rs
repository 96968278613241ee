//! All constants on the wire: ALPN, private header names, the protocol's version, sizes.
//!
//! A name that begins with [`PRIVATE_PREFIX`] belongs to the two ends of a tunnel. A gateway strips such fields from every
//! request of a client, an edge from every response of an upstream. So neither a client nor an upstream can speak for the
//! other end.

use crate::engine::Reason;
use http::HeaderName;

/// ALPN of a tunnel: HTTP/2 with the roles reversed (draft-thomson-ptth-potato).
pub const ALPN_TUNNEL: &[u8] = b"rh2";
/// ALPN of a connection between two gateways. It is a tunnel on which the dialling gateway opens the streams.
pub const ALPN_PEER: &[u8] = b"rh2-peer";
/// ALPN of an edge's connection for egress. It is a tunnel on which the edge opens the streams, each a CONNECT (RFC 9113 §8.5).
pub const ALPN_EGRESS: &[u8] = b"h2-egress";
/// ALPN of an edge's own connection over HTTP/2 (enrolment, renewal).
pub const ALPN_H2: &[u8] = b"h2";
/// ALPN of an edge's own connection over HTTP/1.1.
pub const ALPN_HTTP11: &[u8] = b"http/1.1";
/// ALPN of HTTP/1.0, which is served too.
pub const ALPN_HTTP10: &[u8] = b"http/1.0";

/// Version of the hello and of the private headers. A change that older peers cannot handle raises it.
pub const VERSION: u32 = 1;

/// Prefix of the names of private header fields.
pub const PRIVATE_PREFIX: &str = "causeway-";
/// Request: the address that the edge dials, `host:port` as seen from the node. For a service of the node it is `SERVICE.NODE`, with
/// the port if the client named one.
pub const TARGET: HeaderName = HeaderName::from_static("causeway-target");
/// Request of an upgrade: the method that the client used (kubectl uses POST and GET).
pub const METHOD: HeaderName = HeaderName::from_static("causeway-method");
/// Request: length of the body, in bytes, if `Content-Length` cannot state it. In an upgrade the body comes first on the
/// stream, and the bytes that the client sends after the 101 follow. The other case is a request with a [`TARGET_REST`].
pub const CONTENT: HeaderName = HeaderName::from_static("causeway-content");
/// Request: number of the stream's first bytes that are the rest of its target, see [`crate::request_target`].
pub const TARGET_REST: HeaderName = HeaderName::from_static("causeway-target-rest");
/// CONNECT request: address and port of the client, which the edge may pass to the upstream in a PROXY header.
pub const SOURCE: HeaderName = HeaderName::from_static("causeway-source");
/// Request: marks the control stream of a tunnel.
pub const CONTROL: HeaderName = HeaderName::from_static("causeway-control");
/// Request that a gateway forwards to another one: the node whose edge has to receive it.
pub const NODE: HeaderName = HeaderName::from_static("causeway-node");
/// Request that a gateway forwards to another one: the client, as JSON in base64url.
pub const CLIENT: HeaderName = HeaderName::from_static("causeway-client");
/// Request that a gateway forwards to another one: the trace of the request in access records, 32 hexadecimal digits.
pub const TRACE: HeaderName = HeaderName::from_static("causeway-trace");
/// Request that a gateway forwards to another one: a third gateway holds the node too. The receiver then answers [`LATE`] if its
/// own tunnel of the node does not answer at present, and says so by an interim response if that happens later.
pub const ALTERNATIVE: HeaderName = HeaderName::from_static("causeway-alternative");
/// Interim response to a forwarded request: the other gateway has opened a stream to the node.
pub const ACCEPTED: HeaderName = HeaderName::from_static("causeway-accepted");
/// Response to a forwarded request: the other gateway itself failed it. The value is a word of the gateways' error table.
pub const REASON: HeaderName = HeaderName::from_static("causeway-reason");
/// Value of [`REASON`] besides those words: the gateway holds the node, but its tunnel does not answer at present.
pub const LATE: &str = "late";
/// Response to an upgrade: the upstream switched protocols (the tunnel carries its 101 as 200).
pub const SWITCHED: HeaderName = HeaderName::from_static("causeway-switched");
/// Response: the edge itself failed the stream. The value is the word of a [`crate::RejectCode`].
pub const FAILURE: HeaderName = HeaderName::from_static("causeway-failure");
/// Response: the sentence that belongs to [`FAILURE`].
pub const DETAIL: HeaderName = HeaderName::from_static("causeway-detail");

/// Code with which an edge resets a stream that its policy does not allow any more. A gateway that does not know the code
/// treats the stream as aborted.
pub(crate) const WITHDRAWN: Reason = Reason::INADEQUATE_SECURITY;

/// Largest HTTP/2 frame that either end accepts, in bytes. Larger ones delay small requests beside bulk.
pub const MAX_FRAME: u32 = 64 * 1024;
/// Number of bytes that TLS accepts at once: a frame with its header. At rustls' own 64 KiB the last nine bytes of a full
/// frame would be sent in a write and a packet of their own.
pub const TLS_BUFFER: usize = MAX_FRAME as usize + 4 * 1024;
/// The connection window, in bytes: the maximum of RFC 9113 §6.9.1, so that it is never the bottleneck.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Largest head or trailers that either end sends, in bytes of [`crate::headers::header_list_size`] (upstreams may send 60 KiB and
/// more).
pub const MAX_HEAD: usize = 256 * 1024;
/// Maximum header list that either end accepts, in bytes: four times [`MAX_HEAD`]. The number of accepted
/// CONTINUATION frames depends on it. An octet may take 30 bits on the wire (RFC 7541, Appendix B), and one head beyond that number
/// of frames ends the whole tunnel.
pub const MAX_HEADER_LIST: u32 = 1024 * 1024;
/// Maximum number of interim responses of one stream: a 102 every 20 seconds (RFC 2518 §10.1) for five hours.
pub const MAX_INTERIM_RESPONSES: usize = 1_000;

/// Maximum number of services in the hello of an edge.
pub const MAX_REPORTED_SERVICES: usize = 256;

/// Maximum number of ports of one edge whose health checks fail, in a message.
pub const MAX_UNHEALTHY_PORTS: usize = 32;

/// Maximum number of tunnels of one edge process: one, and those that it dials beside bulk.
pub const MAX_TUNNELS_PER_EDGE: u32 = 16;

/// Maximum number of gateways to which one edge has tunnels, however many gateways there are.
pub const MAX_GATEWAYS_PER_EDGE: u32 = 64;

/// Maximum number of reset streams that a tunnel remembers. The peer is authenticated, and many clients may disconnect at
/// once.
pub const MAX_RESETS: usize = 65_536;
/// Longest line of the control stream, in bytes.
pub const MAX_MESSAGE: usize = 64 * 1024;
