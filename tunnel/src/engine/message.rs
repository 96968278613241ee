//! Header blocks as messages of the crate http, and the rules for their fields (RFC 9113 section 8).

use super::{
    ext::Protocol,
    hpack::{Encoder, Field, Name},
};
use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, TE, TRANSFER_ENCODING, UPGRADE},
    uri::{Authority, Parts, PathAndQuery, Scheme},
};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Number of fields for which a list has space at first.
const FIELDS: usize = 8;

/// A header block that does not make a valid message: a stream error of type `PROTOCOL_ERROR` (RFC 9113 section 8.1.1).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Whether HTTP/2 forbids the field (RFC 9113 section 8.2.2).
fn is_forbidden(name: &HeaderName, value: &HeaderValue) -> bool {
    *name == CONNECTION
        || *name == TRANSFER_ENCODING
        || *name == UPGRADE
        || *name == KEEP_ALIVE
        || *name == PROXY_CONNECTION
        || (*name == TE && value != "trailers")
}

/// Whether a message that this end sends has a field that HTTP/2 forbids.
pub(super) fn has_forbidden_field(fields: &HeaderMap) -> bool {
    fields.iter().any(|(name, value)| is_forbidden(name, value))
}

/// Fields of a block that is being decoded.
#[derive(Debug)]
pub(super) struct Collected {
    method: Option<Method>,
    scheme: Option<Bytes>,
    authority: Option<Bytes>,
    path: Option<Bytes>,
    protocol: Option<Bytes>,
    status: Option<StatusCode>,
    content_length: Option<u64>,
    fields: HeaderMap,
    size_left: usize,
    is_over_size: bool,
    has_fields: bool,
    is_malformed: bool,
}

impl Collected {
    /// Creates an empty list that keeps fields of at most `max_size` bytes (RFC 9113 section 6.5.2).
    pub(super) fn new(max_size: usize) -> Self {
        Self {
            method: None,
            scheme: None,
            authority: None,
            path: None,
            protocol: None,
            status: None,
            content_length: None,
            fields: HeaderMap::new(),
            size_left: max_size,
            is_over_size: false,
            has_fields: false,
            is_malformed: false,
        }
    }

    /// Adds a field, unless the list is larger than allowed or malformed already.
    pub(super) fn add(&mut self, field: Field, size: usize) {
        self.is_over_size |= size > self.size_left;
        if self.is_over_size || self.is_malformed {
            return;
        }
        self.size_left -= size;
        let is_valid = match field {
            Field::Header(name, value) => {
                if !self.has_fields {
                    self.has_fields = true;
                    // Most heads have about so many fields.
                    self.fields.reserve(FIELDS);
                }
                !is_forbidden(&name, &value)
                    && (name != CONTENT_LENGTH || self.add_length(&value))
                    && self.fields.try_append(name, value).is_ok()
            }
            // Pseudo-header fields come first (RFC 9113 section 8.3).
            _ if self.has_fields => false,
            Field::Method(method) => self.method.replace(method).is_none(),
            Field::Scheme(scheme) => self.scheme.replace(scheme).is_none(),
            Field::Authority(authority) => self.authority.replace(authority).is_none(),
            Field::Path(path) => self.path.replace(path).is_none(),
            Field::Protocol(protocol) => self.protocol.replace(protocol).is_none(),
            Field::Status(status) => self.status.replace(status).is_none(),
        };
        self.is_malformed = !is_valid;
    }

    /// Takes a `Content-Length`. Returns `false` if it is invalid or differs from an earlier one (RFC 9110 section 8.6).
    fn add_length(&mut self, value: &HeaderValue) -> bool {
        let digits = value.to_str().unwrap_or_default();
        let length = digits
            .parse()
            .ok()
            .filter(|_| digits.bytes().all(|digit| digit.is_ascii_digit()));
        let earlier = std::mem::replace(&mut self.content_length, length);
        length.is_some() && (earlier.is_none() || earlier == length)
    }

    /// Returns the length of the body that the fields state.
    pub(super) fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    /// Returns the size of the fields, out of a maximum.
    pub(super) fn size(&self, max_size: usize) -> usize {
        max_size - self.size_left
    }

    /// Whether the fields exceed the maximum size.
    pub(super) fn is_over_size(&self) -> bool {
        self.is_over_size
    }

    fn has_request_fields(&self) -> bool {
        self.method.is_some()
            || self.scheme.is_some()
            || self.authority.is_some()
            || self.path.is_some()
            || self.protocol.is_some()
    }

    /// Returns the request (RFC 9113 sections 8.3.1 and 8.5, RFC 8441 section 4).
    pub(super) fn into_request(self, allow_protocol: bool) -> Result<Request<()>, Malformed> {
        let method = self.method.ok_or(Malformed)?;
        let is_connect = method == Method::CONNECT;
        if self.is_malformed
            || self.status.is_some()
            || (self.protocol.is_some() && !(is_connect && allow_protocol))
        {
            return Err(Malformed);
        }
        let is_plain_connect = is_connect && self.protocol.is_none();
        if is_plain_connect {
            if self.scheme.is_some() || self.path.is_some() || self.authority.is_none() {
                return Err(Malformed);
            }
        } else if self.scheme.is_none() || self.path.is_none() {
            return Err(Malformed);
        }
        let mut parts = Parts::default();
        if let Some(authority) = self.authority {
            parts.authority = Some(Authority::from_maybe_shared(authority).map_err(|_| Malformed)?);
        }
        if let Some(scheme) = self.scheme {
            let scheme = Scheme::try_from(&scheme[..]).map_err(|_| Malformed)?;
            // A `Uri` has no scheme without an authority.
            parts.scheme = parts.authority.is_some().then_some(scheme);
        }
        if let Some(path) = self.path {
            if path.is_empty() {
                return Err(Malformed);
            }
            let path = PathAndQuery::from_maybe_shared(path).map_err(|_| Malformed)?;
            parts.path_and_query = Some(path);
        }
        let mut request = Request::new(());
        *request.method_mut() = method;
        *request.uri_mut() = Uri::from_parts(parts).map_err(|_| Malformed)?;
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.fields;
        if let Some(protocol) = self.protocol {
            let protocol = Protocol::from_bytes(protocol).ok_or(Malformed)?;
            request.extensions_mut().insert(protocol);
        }
        Ok(request)
    }

    /// Returns the final or interim response (RFC 9113 section 8.3.2).
    pub(super) fn into_response(self) -> Result<Response<()>, Malformed> {
        if self.is_malformed || self.has_request_fields() {
            return Err(Malformed);
        }
        let status = self.status.ok_or(Malformed)?;
        // RFC 9113 section 8.6.
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(Malformed);
        }
        let mut response = Response::new(());
        *response.status_mut() = status;
        *response.version_mut() = Version::HTTP_2;
        *response.headers_mut() = self.fields;
        Ok(response)
    }

    /// Returns the trailers, which have no pseudo-header fields (RFC 9113 section 8.1).
    pub(super) fn into_trailers(self) -> Result<HeaderMap, Malformed> {
        if self.is_malformed || self.status.is_some() || self.has_request_fields() {
            return Err(Malformed);
        }
        Ok(self.fields)
    }
}

/// Whether a request can be sent: its URI has the parts of its method (RFC 9113 section 8.3.1). A relative URI without
/// `:authority` is that of a forwarded HTTP/1 request.
pub(super) fn is_sendable(request: &Request<()>) -> bool {
    let is_relative = request.uri().scheme().is_none() && request.uri().authority().is_none();
    let is_complete = !is_relative || request.version() != Version::HTTP_2;
    is_complete && !has_forbidden_field(request.headers())
}

/// Appends the header block of a request.
pub(super) fn put_request(encoder: &mut Encoder, request: &Request<()>, block: &mut BytesMut) {
    let (uri, protocol) = (request.uri(), request.extensions().get::<Protocol>());
    let is_plain_connect = request.method() == Method::CONNECT && protocol.is_none();
    encoder.begin(block);
    encoder.encode(
        Name::Method,
        request.method().as_str().as_bytes(),
        false,
        block,
    );
    if !is_plain_connect {
        let scheme = uri.scheme_str().unwrap_or("http");
        encoder.encode(Name::Scheme, scheme.as_bytes(), false, block);
    }
    if let Some(authority) = uri.authority() {
        encoder.encode(Name::Authority, authority.as_str().as_bytes(), false, block);
    }
    if !is_plain_connect {
        let path = uri.path_and_query().map_or("", PathAndQuery::as_str);
        let default = if request.method() == Method::OPTIONS {
            "*"
        } else {
            "/"
        };
        let path = if path.is_empty() { default } else { path };
        encoder.encode(Name::Path, path.as_bytes(), false, block);
    }
    if let Some(protocol) = protocol {
        encoder.encode(Name::Protocol, protocol.as_str().as_bytes(), false, block);
    }
    put_fields(encoder, request.headers(), block);
}

/// Appends the header block of a response.
pub(super) fn put_response(encoder: &mut Encoder, response: &Response<()>, block: &mut BytesMut) {
    encoder.begin(block);
    encoder.encode(
        Name::Status,
        response.status().as_str().as_bytes(),
        false,
        block,
    );
    put_fields(encoder, response.headers(), block);
}

/// Appends the header block of trailers.
pub(super) fn put_trailers(encoder: &mut Encoder, trailers: &HeaderMap, block: &mut BytesMut) {
    encoder.begin(block);
    put_fields(encoder, trailers, block);
}

fn put_fields(encoder: &mut Encoder, fields: &HeaderMap, block: &mut BytesMut) {
    for (name, value) in fields {
        encoder.encode(
            Name::Field(name),
            value.as_bytes(),
            value.is_sensitive(),
            block,
        );
    }
}
