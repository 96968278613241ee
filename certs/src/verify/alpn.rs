//! Protocols that are negotiated by ALPN.

/// ALPN of the tunnel (draft-thomson-ptth-potato).
pub(super) const ALPN_TUNNEL: &[u8] = b"rh2";
/// ALPN of joining and of an edge's other requests.
pub(super) const ALPN_CONTROL: [&[u8]; 2] = [b"h2", b"http/1.1"];
