//! Forwarding headers: request fields that give an upstream the client's address, the scheme and the host.
//!
//! `Forwarded` (RFC 7239), `X-Forwarded-For`, `X-Forwarded-Proto`, `X-Forwarded-Host` and `X-Real-IP`. The values that a client
//! sends are removed, in any spelling that an upstream may read as the same name. The values of a proxy in `trusted_proxies` are
//! forwarded: this hop is appended to lists, and single values stay as they are. All of these fields are removed from trailers.

use crate::{
    config::{self, ForwardingHeader},
    proxy::identity_headers::names_equal_folded,
};
use http::{HeaderMap, HeaderName, HeaderValue, header::FORWARDED, uri::Authority};
use ipnet::IpNet;
use std::{
    net::{IpAddr, SocketAddr},
    sync::{Mutex, PoisonError},
};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Names of fields that give applications one of these facts. The gateway sets five of them. Frameworks read the others in their
/// place: gunicorn and Rack treat `X-Forwarded-Ssl: on` as https.
const FORWARDING_HEADERS: [&str; 12] = [
    "forwarded",
    "x-forwarded-by",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-prefix",
    "x-forwarded-proto",
    "x-forwarded-protocol",
    "x-forwarded-scheme",
    "x-forwarded-server",
    "x-forwarded-ssl",
    "x-real-ip",
];

/// The forwarding headers of a listener.
#[derive(Debug)]
pub struct ForwardingHeaders {
    headers: Vec<ForwardingHeader>,
    trusted_proxies: Vec<IpNet>,
}

/// Request as it arrived on the client's connection.
#[derive(Clone, Copy)]
pub(super) struct Hop<'a> {
    /// Address of the client, or of the proxy in front of this gateway. `None` for a unix socket.
    pub(super) peer: Option<IpAddr>,
    pub(super) tls: bool,
    pub(super) authority: Option<&'a Authority>,
    /// Cached values of the last request of the connection.
    pub(super) cached_values: &'a CachedValues,
}

/// Values of the last request of a connection, because most clients request the same authority.
pub(crate) type CachedValues = Mutex<Option<Values>>;

#[derive(Debug)]
pub(crate) struct Values {
    authority: Option<Box<str>>,
    forwarded: Option<HeaderValue>,
    host: Option<HeaderValue>,
    address: Option<HeaderValue>,
}

impl ForwardingHeaders {
    /// Creates the forwarding headers of a listener from its configuration.
    pub fn new(listener: &config::Listener) -> Self {
        Self {
            headers: listener.forwarding_headers.clone(),
            trusted_proxies: listener.trusted_proxies.clone(),
        }
    }

    /// Sets the fields of a request.
    pub(super) fn apply(&self, hop: Hop<'_>, fields: &mut HeaderMap) {
        let trusted = hop.peer.is_some_and(|peer| self.is_trusted(peer));
        remove_forwarding_headers(fields, trusted);
        // Includes `Via`, so that a small head grows once, and not with each field.
        fields.reserve(self.headers.len() + 1);
        let mut cache = hop
            .cached_values
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let authority = hop.authority.map(Authority::as_str);
        let values = match &mut *cache {
            Some(values) if values.authority.as_deref() == authority => values,
            last => last.insert(Values::new(hop)),
        };
        if self.is_enabled(ForwardingHeader::XRealIp) {
            let peer_address = values.address.as_ref();
            // Read before this hop is appended to the list.
            let client = if trusted {
                self.original_client(fields)
                    .or_else(|| peer_address.cloned())
            } else {
                peer_address.cloned()
            };
            insert_value(fields, X_REAL_IP, client);
        }
        if self.is_enabled(ForwardingHeader::Forwarded)
            && let Some(value) = &values.forwarded
        {
            fields.append(FORWARDED, value.clone());
        }
        if self.is_enabled(ForwardingHeader::XForwardedFor)
            && let Some(value) = &values.address
        {
            append_to_list(fields, X_FORWARDED_FOR, value);
        }
        if self.is_enabled(ForwardingHeader::XForwardedProto)
            && !fields.contains_key(X_FORWARDED_PROTO)
        {
            fields.insert(X_FORWARDED_PROTO, HeaderValue::from_static(hop.scheme()));
        }
        if self.is_enabled(ForwardingHeader::XForwardedHost)
            && !fields.contains_key(X_FORWARDED_HOST)
        {
            insert_value(fields, X_FORWARDED_HOST, values.host.clone());
        }
    }

    fn is_enabled(&self, header: ForwardingHeader) -> bool {
        self.headers.contains(&header)
    }

    fn is_trusted(&self, address: IpAddr) -> bool {
        self.trusted_proxies
            .iter()
            .any(|net| net.contains(&address))
    }

    /// Returns the client that a trusted proxy names: the last address of `X-Forwarded-For` that is no trusted proxy itself, or
    /// else the value of `X-Real-IP`. The list takes precedence, because load balancers that write the list forward a client's
    /// `X-Real-IP` unchanged.
    fn original_client(&self, fields: &HeaderMap) -> Option<HeaderValue> {
        let reversed_lists = fields.get_all(X_FORWARDED_FOR).iter().rev();
        let items = reversed_lists.flat_map(|list| list.to_str().unwrap_or_default().rsplit(','));
        let mut client = None;
        for address in items.map_while(parse_address) {
            client = Some(address);
            if !self.is_trusted(address) {
                break;
            }
        }
        match client {
            Some(client) => HeaderValue::try_from(client.to_string()).ok(),
            None => fields.get(X_REAL_IP).cloned(),
        }
    }
}

impl Values {
    fn new(hop: Hop<'_>) -> Self {
        let for_node = match hop.peer {
            Some(IpAddr::V4(ip)) => ip.to_string(),
            Some(IpAddr::V6(ip)) => format!("\"[{ip}]\""),
            None => "unknown".to_owned(),
        };
        let authority = hop.authority.map(Authority::as_str);
        let host = authority
            .map(|host| format!(";host=\"{host}\""))
            .unwrap_or_default();
        let forwarded = format!("for={for_node}{host};proto={}", hop.scheme());
        Self {
            // Copied, because an authority may be a slice of a whole read buffer.
            authority: authority.map(Into::into),
            forwarded: HeaderValue::try_from(forwarded).ok(),
            host: authority.and_then(|host| HeaderValue::from_str(host).ok()),
            address: hop
                .peer
                .and_then(|ip| HeaderValue::try_from(ip.to_string()).ok()),
        }
    }
}

impl Hop<'_> {
    fn scheme(self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }
}

/// Removes these fields from trailers, because they belong in a head.
pub(super) fn strip_trailers(trailers: &mut HeaderMap) {
    remove_forwarding_headers(trailers, false);
}

/// Removes all forwarding headers. With `keep_exact`, removes only other spellings of their names, which no proxy writes.
fn remove_forwarding_headers(fields: &mut HeaderMap, keep_exact: bool) {
    let should_remove = |name: &HeaderName| {
        let name = name.as_str();
        name.starts_with(['f', 'x'])
            && FORWARDING_HEADERS
                .iter()
                .any(|own| names_equal_folded(own, name) && !(keep_exact && *own == name))
    };
    // Allocates only if there are such names.
    let names: Vec<_> = fields
        .keys()
        .filter(|name| should_remove(name))
        .cloned()
        .collect();
    for name in names {
        fields.remove(name);
    }
}

fn insert_value(fields: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let Some(value) = value {
        fields.insert(name, value);
    }
}

/// Appends to a list in one field, because many applications read only the first field of a name.
fn append_to_list(fields: &mut HeaderMap, name: HeaderName, value: &HeaderValue) {
    let mut joined: Vec<u8> = Vec::new();
    for list in fields.get_all(&name).iter().filter(|list| !list.is_empty()) {
        joined.extend_from_slice(list.as_bytes());
        joined.extend_from_slice(b", ");
    }
    if joined.is_empty() {
        fields.insert(name, value.clone());
        return;
    }
    joined.extend_from_slice(value.as_bytes());
    insert_value(fields, name, HeaderValue::from_maybe_shared(joined).ok());
}

/// Returns an item's address, with or without brackets and a port.
fn parse_address(item: &str) -> Option<IpAddr> {
    let item = item.trim();
    let bare = item
        .strip_prefix('[')
        .and_then(|item| item.strip_suffix(']'));
    let ip = bare.unwrap_or(item).parse::<IpAddr>().ok();
    let ip = ip.or_else(|| item.parse::<SocketAddr>().ok().map(|at| at.ip()));
    ip.map(|ip| ip.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ListenAddr, Listener, ListenerProtocol};

    fn listener(trusted: &[&str]) -> Listener {
        let listen = ListenAddr::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut listener = Listener::new("http", ListenerProtocol::Http, listen);
        listener.trusted_proxies = trusted.iter().map(|net| net.parse().unwrap()).collect();
        listener
    }

    fn fields(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut fields = HeaderMap::new();
        for (name, value) in lines {
            fields.append(*name, HeaderValue::from_static(value));
        }
        fields
    }

    /// Returns the fields after a TLS request from 10.0.0.7 for edge-1.
    fn applied(listener: &Listener, lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut fields = fields(lines);
        let hop = Hop {
            peer: Some([10, 0, 0, 7].into()),
            tls: true,
            authority: Some(&Authority::from_static("edge-1:9100")),
            cached_values: &CachedValues::default(),
        };
        ForwardingHeaders::new(listener).apply(hop, &mut fields);
        fields
    }

    const OURS: [(&str, &str); 5] = [
        ("forwarded", "for=10.0.0.7;host=\"edge-1:9100\";proto=https"),
        ("x-forwarded-for", "10.0.0.7"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "edge-1:9100"),
        ("x-real-ip", "10.0.0.7"),
    ];

    #[test]
    fn client_values_are_replaced_in_every_spelling() {
        let mut forged = vec![("x-forwarded-uri", "/stays"), ("x-forward", "stays")];
        for name in FORWARDING_HEADERS {
            forged.extend([(name, "forged"), (name, "twice")]);
        }
        forged.extend([
            ("x_forwarded_for", "forged"),
            ("x-forwarded_proto", "forged"),
            ("x.real.ip", "forged"),
        ]);
        let mut expected = fields(&OURS);
        expected.extend(fields(&forged[..2]));
        assert_eq!(applied(&listener(&[]), &forged), expected);
        // This client is not in the trusted network.
        assert_eq!(applied(&listener(&["10.0.1.0/24"]), &forged), expected);
        let mut trailers = fields(&forged);
        strip_trailers(&mut trailers);
        assert_eq!(trailers, fields(&forged[..2]));
    }

    #[test]
    fn lists_of_a_trusted_proxy_get_this_hop_and_single_values_stay() {
        let came = [
            ("forwarded", "for=192.0.2.1"),
            ("x-forwarded-for", "198.51.100.9"),
            ("x-forwarded-for", "192.0.2.1, 10.0.0.8"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-host", "shop.example"),
            ("x-forwarded-port", "80"),
            ("x-real-ip", "203.0.113.1"),
            ("x_forwarded_for", "forged"),
        ];
        let expected = fields(&[
            came[0],
            OURS[0],
            (
                "x-forwarded-for",
                "198.51.100.9, 192.0.2.1, 10.0.0.8, 10.0.0.7",
            ),
            came[3],
            came[4],
            came[5],
            // The last address that is not a trusted proxy.
            ("x-real-ip", "192.0.2.1"),
        ]);
        assert_eq!(applied(&listener(&["10.0.0.0/24"]), &came), expected);
    }

    #[test]
    fn a_trusted_proxy_names_the_client_by_its_list_or_by_x_real_ip() {
        let trusting = listener(&["10.0.0.0/24", "2001:db8::/32"]);
        for (list, real_ip, client) in [
            ("", "", "10.0.0.7"),
            ("", "192.0.2.1", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.9", "192.0.2.1"),
            ("192.0.2.9, 192.0.2.1:4711", "", "192.0.2.1"),
            ("[2001:db9::1]:443,2001:db8::1", "", "2001:db9::1"),
            ("[2001:db9::1], ::ffff:10.0.0.1", "", "2001:db9::1"),
            ("10.0.0.2, 10.0.0.1", "", "10.0.0.2"),
            ("192.0.2.9, unknown, 10.0.0.1", "", "10.0.0.1"),
        ] {
            let came = [("x-forwarded-for", list), ("x-real-ip", real_ip)];
            let came: Vec<_> = came
                .into_iter()
                .filter(|(_, value)| !value.is_empty())
                .collect();
            let fields = applied(&trusting, &came);
            assert_eq!(fields["x-real-ip"], client, "{came:?}");
        }
    }

    #[test]
    fn only_configured_fields_are_set_and_forged_ones_are_removed() {
        let mut some = listener(&[]);
        some.forwarding_headers = vec![ForwardingHeader::XForwardedProto];
        let forged = [
            ("forwarded", "for=1"),
            ("x-real-ip", "1"),
            ("x-forwarded-proto", "http"),
        ];
        assert_eq!(applied(&some, &forged), fields(&OURS[2..3]));
        some.trusted_proxies = vec!["10.0.0.7/32".parse().unwrap()];
        assert_eq!(applied(&some, &forged), fields(&forged));
    }

    #[test]
    fn values_follow_the_authority_and_omit_an_unknown_address() {
        let (headers, last) = (
            ForwardingHeaders::new(&listener(&[])),
            CachedValues::default(),
        );
        for host in ["edge-1", "edge-1", "edge-2"] {
            let mut fields = fields(&[("x-forwarded-for", "forged")]);
            let authority = Authority::from_static(host);
            let hop = Hop {
                peer: None,
                tls: false,
                authority: Some(&authority),
                cached_values: &last,
            };
            headers.apply(hop, &mut fields);
            assert_eq!(fields["x-forwarded-host"], host);
            assert_eq!(fields["x-forwarded-proto"], "http");
            assert_eq!(
                fields["forwarded"],
                format!("for=unknown;host=\"{host}\";proto=http")
            );
            assert_eq!(fields.len(), 3, "{fields:?}");
        }
        let mut fields = fields(&[("x-forwarded-host", "forged")]);
        let peer = Some("2001:db8::1".parse().unwrap());
        let hop = Hop {
            peer,
            tls: false,
            authority: None,
            cached_values: &last,
        };
        headers.apply(hop, &mut fields);
        assert_eq!(fields["forwarded"], "for=\"[2001:db8::1]\";proto=http");
        assert_eq!(fields["x-forwarded-for"], "2001:db8::1");
        assert!(!fields.contains_key("x-forwarded-host"));
    }
}
