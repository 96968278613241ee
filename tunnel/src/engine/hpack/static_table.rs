//! Static table (RFC 7541, appendix A), and the sizes that both tables have in common.

/// Size of the dynamic table before SETTINGS change it (RFC 9113 section 6.5.2).
pub(super) const DEFAULT_TABLE_SIZE: usize = 4096;

/// Size that each field has in addition to its name and value (RFC 7541 section 4.1, RFC 9113 section 6.5.2).
pub(super) const FIELD_OVERHEAD: usize = 32;

/// Number of entries. The first index of the dynamic table is one more.
pub(super) const LENGTH: usize = 61;

/// Index of the first entry that is no pseudo-header field.
pub(super) const FIRST_HEADER: usize = 15;

/// Names and values. The entry with index 1 comes first.
pub(super) const ENTRIES: [(&str, &str); LENGTH] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];
