//! Identity headers: fields that tell the upstream who the client is, and that only this gateway sets.
//!
//! Fields of these names that a client sends are removed, and so are those of the whole family (`X-Remote-Extra-…`), from heads
//! and trailers, in any spelling that an upstream may take for the same name (`X_Remote_User` reaches CGI as `X-Remote-User`
//! does). Kubernetes' aggregator removes the same (`SetAuthProxyHeaders` in client-go). A value contains the characters of a name
//! that a field can contain. All others are percent-encoded, and so are `%` and the comma, by which upstreams join and split
//! like-named fields.

use crate::{
    config::{
        IdentityHeaders,
        identity_headers::{field, fold_byte, is_taken},
    },
    proxy::authn::identity::{AuthMethod, ClientIdentity},
};
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use std::sync::Arc;

/// Characters that are percent-encoded in values, besides all that are not ASCII.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b',');

/// Fields by which a listener tells upstreams who the client is. A cheap clone.
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
    /// By fields of these names.
    ///
    /// # Errors
    /// If a name is none that this gateway could set.
    pub fn of(names: &IdentityHeaders) -> Result<Self, String> {
        let parsed = |name: &Option<String>| name.as_deref().map(field).transpose();
        let (user, groups) = (parsed(&names.user)?, parsed(&names.groups)?);
        let families = names.families();
        let any = user.is_some() || groups.is_some() || !families.is_empty();
        let names = HeaderNames {
            user,
            groups,
            families,
        };
        Ok(Self(any.then(|| Arc::new(names))))
    }

    /// Removes these fields from a client's request.
    pub fn strip(&self, fields: &mut HeaderMap) {
        let Some(names) = &self.0 else { return };
        let ours = |name: &HeaderName| {
            let own = [&names.user, &names.groups].into_iter().flatten();
            let mut families = names.families.iter();
            own.map(HeaderName::as_str)
                .any(|own| alike(own, name.as_str()))
                || (families.any(|family| begins_alike(family, name.as_str()))
                    && !is_taken(name.as_str()))
        };
        let theirs: Vec<_> = fields.keys().filter(|name| ours(name)).cloned().collect();
        for name in theirs {
            fields.remove(name);
        }
    }

    /// Sets the client's identity, and removes these fields of the client's request. An anonymous client has no name.
    pub fn put(&self, fields: &mut HeaderMap, client: &ClientIdentity) {
        self.strip(fields);
        let Some(names) = &self.0 else { return };
        if client.method == AuthMethod::Anonymous {
            return;
        }
        if let Some(name) = &names.user {
            add(fields, name, &client.name);
        }
        if let Some(name) = &names.groups {
            for group in &*client.groups {
                add(fields, name, group);
            }
        }
    }
}

fn add(fields: &mut HeaderMap, name: &HeaderName, word: &str) {
    // Nothing but visible ASCII is left, so this cannot fail.
    if let Ok(value) = HeaderValue::try_from(utf8_percent_encode(word, ENCODED).to_string()) {
        fields.append(name.clone(), value);
    }
}

/// Whether an application may read one name as the other.
pub(super) fn alike(one: &str, other: &str) -> bool {
    one.len() == other.len() && begins_alike(one, other)
}

/// Whether an application may read the name as one that begins with the prefix.
fn begins_alike(prefix: &str, name: &str) -> bool {
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
        IdentityHeaderFields::of(&IdentityHeaders {
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
            // As Kubernetes' aggregator says it.
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
        told().put(&mut fields, &client);
        assert_eq!(all(&fields, "x-remote-user"), ["ann"]);
        assert_eq!(all(&fields, "x-remote-group"), ["ops", "dev"]);
        assert_eq!(fields.keys_len(), 3, "{fields:?}");

        let mut fields = forged();
        client.method = AuthMethod::Anonymous;
        told().put(&mut fields, &client);
        assert_eq!(
            fields.keys_len(),
            1,
            "an anonymous client has no name: {fields:?}"
        );
        let mut fields = forged();
        told().strip(&mut fields);
        assert_eq!(all(&fields, "x-other"), ["root", "admin"]);
        assert_eq!(fields.keys_len(), 1);
        let mut fields = forged();
        IdentityHeaderFields::default().put(&mut fields, &client);
        assert_eq!(fields, forged(), "without the setting no field is changed");
    }

    #[test]
    fn the_header_family_is_configured_and_takes_no_other_field() {
        let told = IdentityHeaderFields::of(&IdentityHeaders {
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
            .put(&mut fields, &ClientIdentity::for_test("ann"));
        assert_eq!(all(&fields, "x-forwarded-user"), ["ann"]);
        assert_eq!(all(&fields, "x-forwarded-for"), ["root"]);
        assert_eq!(all(&fields, "x-remote-uid"), ["root"]);
        assert_eq!(fields.keys_len(), 3, "{fields:?}");

        let prefixes = IdentityHeaders {
            strip_prefixes: Some(vec!["X-Remote-".into()]),
            ..IdentityHeaders::default()
        };
        let mut fields = forged();
        IdentityHeaderFields::of(&prefixes)
            .unwrap()
            .strip(&mut fields);
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
            told().put(&mut fields, &ClientIdentity::for_test(name));
            assert_eq!(all(&fields, "x-remote-user"), [value]);
        }
    }
}
