//! Every constant on the wire: ALPN, private header names, the protocol's version, sizes.
//!
//! A name that begins with [`PRIVATE_PREFIX`] belongs to the two ends of a tunnel. A gateway strips such fields from every
//! request of a client, an edge from every answer of an upstream, so that neither can speak for the other end.

use http::HeaderName;

/// ALPN of a tunnel: HTTP/2 with the roles reversed (draft-thomson-ptth-potato).
pub const ALPN_TUNNEL: &[u8] = b"rh2";
/// ALPN of an edge's own connection over HTTP/2 (enrolment, renewal).
pub const ALPN_H2: &[u8] = b"h2";
/// ALPN of an edge's own connection over HTTP/1.1.
pub const ALPN_HTTP11: &[u8] = b"http/1.1";
/// ALPN of HTTP/1.0, which is served as well.
pub const ALPN_HTTP10: &[u8] = b"http/1.0";

/// The version of the hello and of the private headers. A change that an older peer cannot bear raises it.
pub const VERSION: u32 = 1;

/// Prefix of the names of private header fields.
pub const PRIVATE_PREFIX: &str = "causeway-";
/// Request: the address that the edge dials, `host:port` as seen from the node.
pub const TARGET: HeaderName = HeaderName::from_static("causeway-target");
/// Request of an upgrade: the method that the client used (kubectl uses POST and GET).
pub const METHOD: HeaderName = HeaderName::from_static("causeway-method");
/// Request: the length of its body, in bytes, where `Content-Length` cannot say it: of an upgrade, whose body comes first on
/// the stream, and what the client sends behind the 101 follows; and of one with a [`TARGET_REST`].
pub const CONTENT: HeaderName = HeaderName::from_static("causeway-content");
/// Request: how many of the stream's first bytes are the rest of its target, see [`crate::request_target`].
pub const TARGET_REST: HeaderName = HeaderName::from_static("causeway-target-rest");
/// Request: marks the control stream of a tunnel.
pub const CONTROL: HeaderName = HeaderName::from_static("causeway-control");
/// Answer of an upgrade: the upstream switched protocols (its 101 travels as 200).
pub const SWITCHED: HeaderName = HeaderName::from_static("causeway-switched");
/// Answer: the edge itself failed the stream; the value is a [`crate::RejectCode`]'s word.
pub const FAILURE: HeaderName = HeaderName::from_static("causeway-failure");
/// Answer: the sentence that goes with [`FAILURE`].
pub const DETAIL: HeaderName = HeaderName::from_static("causeway-detail");

/// Code by which an edge resets a stream that its policy does not allow any more. A gateway that does not know it takes the
/// stream for one that broke off.
pub(crate) const WITHDRAWN: h2::Reason = h2::Reason::INADEQUATE_SECURITY;

/// Largest HTTP/2 frame that either end accepts, in bytes. Larger ones delay small requests beside bulk.
pub const MAX_FRAME: u32 = 64 * 1024;
/// Bytes that TLS takes at once: a frame with its head. At rustls' own 64 KiB the last nine bytes of a full frame would
/// leave in a write and a packet of their own.
pub const TLS_BUFFER: usize = MAX_FRAME as usize + 4 * 1024;
/// The connection window, in bytes: the maximum of RFC 9113 §6.9.1, so that it is never the bottleneck.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Largest head or trailers that either end sends, in bytes of [`crate::headers::header_list_size`] (upstreams may send 60 KiB and
/// more).
pub const MAX_HEAD: usize = 256 * 1024;
/// Largest header list that either end accepts, in bytes: four times [`MAX_HEAD`]. From it h2 derives the number of
/// CONTINUATION frames that it accepts, but an octet may take 30 bits on its way (RFC 7541, Appendix B), and one head beyond
/// that number ends the whole tunnel.
pub const MAX_HEADER_LIST: u32 = 1024 * 1024;
/// Interim answers of one stream at most: a 102 every 20 seconds (RFC 2518 §10.1) for five hours.
pub const MAX_INTERIM_RESPONSES: usize = 1_000;

/// Tunnels of one process of an edge at most: one, and those that it dials beside bulk.
pub const MAX_TUNNELS_PER_EDGE: u32 = 16;

/// Gateways at which one edge has tunnels at most, however many there are.
pub const MAX_GATEWAYS_PER_EDGE: u32 = 64;

/// Maximum number of streams of a tunnel whose reset is still remembered: the peer is authenticated, and many clients may
/// hang up at once.
pub const MAX_RESETS: usize = 65_536;
/// Budget for small DATA frames, in bytes of overhead: upstreams that answer in chunks of a few bytes are ordinary (h2's
/// default ends the connection after some megabytes of them).
pub const DATA_FRAME_BUDGET: usize = usize::MAX / 4;
/// Longest line of the control stream, in bytes.
pub const MAX_MESSAGE: usize = 64 * 1024;
