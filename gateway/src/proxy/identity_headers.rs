//! Identity headers: fields that contain the client's identity for the upstream, and that only this gateway sets.
//!
//! A client's fields with these names are removed, and so are those of the whole family (`X-Remote-Extra-…`). This applies to
//! heads and trailers, in any spelling that an upstream may take for the same name (`X_Remote_User` reaches CGI as
//! `X-Remote-User` does). Kubernetes' aggregator removes the same fields (`SetAuthProxyHeaders` in client-go). A value contains
//! the characters of a name that a field can contain. All others are percent-encoded, and so are `%` and the comma, by which
//! upstreams join and split fields with the same name.

use crate::{
    config::{
        IdentityHeaders,
        identity_headers::{fold_byte, is_standard_field, parse_field_name},
    },
    proxy::authn::identity::{AuthMethod, ClientIdentity},
};
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use std::sync::Arc;

/// Characters that are percent-encoded in values, besides non-ASCII characters.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b',');

/// Fields in which a listener sends the client's identity to upstreams. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct IdentityHeaderFields(Option<Arc<HeaderNames>>);

#[derive(Debug)]
struct HeaderNames {
    user: Option<HeaderName>,
    groups: Option<HeaderName>,
    /// Folded prefixes of the names that clients may not use.
    families: Vec<String>,
}

impl IdentityHeaderFields {
    /// Returns the fields with these names.
    ///
    /// # Errors
    /// If this gateway cannot set a field with one of the names.
    pub fn from_config(names: &IdentityHeaders) -> Result<Self, String> {
        let parse_name = |name: &Option<String>| name.as_deref().map(parse_field_name).transpose();
        let (user, groups) = (parse_name(&names.user)?, parse_name(&names.groups)?);
        let families = names.family_prefixes();
        let has_any = user.is_some() || groups.is_some() || !families.is_empty();
        let names = HeaderNames {
            user,
            groups,
            families,
        };
        Ok(Self(has_any.then(|| Arc::new(names))))
    }

    /// Removes these fields from a request of a client.
    pub fn strip_fields(&self, fields: &mut HeaderMap) {
        let Some(names) = &self.0 else { return };
        let is_reserved = |name: &HeaderName| {
            let exact_names = [&names.user, &names.groups].into_iter().flatten();
            let mut families = names.families.iter();
            exact_names
                .map(HeaderName::as_str)
                .any(|own| names_equal_folded(own, name.as_str()))
                || (families.any(|family| has_folded_prefix(family, name.as_str()))
                    && !is_standard_field(name.as_str()))
        };
        let client_fields: Vec<_> = fields
            .keys()
            .filter(|name| is_reserved(name))
            .cloned()
            .collect();
        for name in client_fields {
            fields.remove(name);
        }
    }

    /// Removes these fields from the client's request, and sets them to the client's identity. An anonymous client has no name.
    pub fn set_identity(&self, fields: &mut HeaderMap, client: &ClientIdentity) {
        self.strip_fields(fields);
        let Some(names) = &self.0 else { return };
        if client.method == AuthMethod::Anonymous {
            return;
        }
        if let Some(name) = &names.user {
            append_encoded(fields, name, &client.name);
        }
        if let Some(name) = &names.groups {
            for group in &*client.groups {
                append_encoded(fields, name, group);
            }
        }
    }
}

fn append_encoded(fields: &mut HeaderMap, name: &HeaderName, text: &str) {
    // Cannot fail, because the encoded text is visible ASCII.
    if let Ok(value) = HeaderValue::try_from(utf8_percent_encode(text, ENCODED).to_string()) {
        fields.append(name.clone(), value);
    }
}

/// Whether an application may treat the two names as equal.
pub(super) fn names_equal_folded(one: &str, other: &str) -> bool {
    one.len() == other.len() && has_folded_prefix(one, other)
}

/// Whether an application may read the name as one with this prefix.
fn has_folded_prefix(prefix: &str, name: &str) -> bool {
    let (prefix, name) = (prefix.as_bytes(), name.as_bytes());
    name.get(..prefix.len()).is_some_and(|begin| {
        let fold = |byte: &u8| fold_byte(*byte);
        begin.iter().map(fold).eq(prefix.iter().map(fold))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told() -> IdentityHeaderFields {
        IdentityHeaderFields::from_config(&IdentityHeaders {
            user: Some("X-Remote-User".into()),
            groups: Some("X-Remote-Group".into()),
            strip_prefixes: None,
        })
        .unwrap()
    }

    fn forged() -> HeaderMap {
        let mut fields = HeaderMap::new();
        for name in [
            "x-remote-user",
            "x_remote_user",
            "x.remote.user",
            "x~remote!user",
            "x-remote_group",
            "x-remote-group",
            // Kubernetes' aggregator uses the same names.
            "x-remote-uid",
            "x-remote-extra-scopes",
            "x_remote.extra-scopes",
            "x-other",
        ] {
            fields.append(name, "root".parse().unwrap());
            fields.append(name, "admin".parse().unwrap());
        }
        fields
    }

    fn all<'a>(fields: &'a HeaderMap, name: &str) -> Vec<&'a str> {
        let values = fields.get_all(name).iter();
        values.map(|value| value.to_str().unwrap()).collect()
    }

    #[test]
    fn an_upstream_gets_the_verified_identity_and_no_client_value() {
        let mut fields = forged();
        let mut client = ClientIdentity::for_test("ann");
        client.groups = ["ops".to_owned(), "dev".to_owned()].into();
        told().set_identity(&mut fields, &client);
        assert_eq!(all(&fields, "x-remote-user"), ["ann"]);
        assert_eq!(all(&fields, "x-remote-group"), ["ops", "dev"]);
        assert_eq!(fields.keys_len(), 3, "{fields:?}");

        let mut fields = forged();
        client.method = AuthMethod::Anonymous;
        told().set_identity(&mut fields, &client);
        assert_eq!(
            fields.keys_len(),
            1,
            "an anonymous client has no name: {fields:?}"
        );
        let mut fields = forged();
        told().strip_fields(&mut fields);
        assert_eq!(all(&fields, "x-other"), ["root", "admin"]);
        assert_eq!(fields.keys_len(), 1);
        let mut fields = forged();
        IdentityHeaderFields::default().set_identity(&mut fields, &client);
        assert_eq!(fields, forged(), "without the setting no field is changed");
    }

    #[test]
    fn the_header_family_is_configured_and_takes_no_other_field() {
        let told = IdentityHeaderFields::from_config(&IdentityHeaders {
            user: Some("X-Forwarded-User".into()),
            groups: None,
            strip_prefixes: Some(vec!["X-Forwarded-".into(), "X-Auth-".into()]),
        });
        let mut fields = HeaderMap::new();
        for name in [
            "x-forwarded-for",
            "x-forwarded-email",
            "x-auth-request-email",
            "x_auth_request_email",
            "x-remote-uid",
        ] {
            fields.append(name, "root".parse().unwrap());
        }
        told.unwrap()
            .set_identity(&mut fields, &ClientIdentity::for_test("ann"));
        assert_eq!(all(&fields, "x-forwarded-user"), ["ann"]);
        assert_eq!(all(&fields, "x-forwarded-for"), ["root"]);
        assert_eq!(all(&fields, "x-remote-uid"), ["root"]);
        assert_eq!(fields.keys_len(), 3, "{fields:?}");

        let prefixes = IdentityHeaders {
            strip_prefixes: Some(vec!["X-Remote-".into()]),
            ..IdentityHeaders::default()
        };
        let mut fields = forged();
        IdentityHeaderFields::from_config(&prefixes)
            .unwrap()
            .strip_fields(&mut fields);
        assert_eq!(fields.keys_len(), 1, "prefixes alone do: {fields:?}");
    }

    #[test]
    fn a_name_that_no_field_can_hold_is_percent_encoded() {
        for (name, value) in [
            ("ann@example.com", "ann@example.com"),
            (
                "spiffe://example.org/ns/prom",
                "spiffe://example.org/ns/prom",
            ),
            ("Ann Onym", "Ann%20Onym"),
            ("jürgen", "j%C3%BCrgen"),
            ("x,admin", "x%2Cadmin"),
            ("100%", "100%25"),
            (
                "a\r\nX-Remote-Group: admin",
                "a%0D%0AX-Remote-Group:%20admin",
            ),
        ] {
            let mut fields = HeaderMap::new();
            told().set_identity(&mut fields, &ClientIdentity::for_test(name));
            assert_eq!(all(&fields, "x-remote-user"), [value]);
        }
    }
}
