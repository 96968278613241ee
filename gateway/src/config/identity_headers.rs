//! Request fields with the client's identity for applications. Clients cannot set them. The gateway removes the values that
//! clients send in these fields and in others of the same family. This includes any spelling that an application may read as the
//! same name.

use causeway_tunnel::wire::PRIVATE_PREFIX;
use http::HeaderName;
use serde::{Deserialize, Serialize};

/// Names of the request fields that tell an upstream who the client is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IdentityHeaders {
    /// Field for the client's name, such as `X-Remote-User`.
    pub user: Option<String>,
    /// Field for the client's groups, one field each, such as `X-Remote-Group`.
    pub groups: Option<String>,
    /// Prefixes of the request fields that clients may not send because they describe the client as well, such as `X-Remote-`. Without this key: the names above up to their last hyphen, so that `X-Remote-Uid` and `X-Remote-Extra-Scopes` are removed if `user` is `X-Remote-User`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strip_prefixes: Option<Vec<String>>,
}

/// Names of fields that HTTP, an intermediary or this gateway uses itself.
const STANDARD_FIELDS: &[&str] = &[
    "accept",
    "accept-encoding",
    "authorization",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "date",
    "expect",
    "forwarded",
    "host",
    "if-match",
    "if-none-match",
    "if-range",
    "keep-alive",
    "origin",
    "proxy-authorization",
    "proxy-connection",
    "range",
    "referer",
    "sec-websocket-accept",
    "sec-websocket-extensions",
    "sec-websocket-key",
    "sec-websocket-protocol",
    "sec-websocket-version",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
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
    "x-forwarded-uri",
    "x-real-ip",
];

/// Folded prefix of fields without a standard. It is too wide to be a family.
const EXTENSION_PREFIX: &str = "x-";

impl IdentityHeaders {
    /// Returns each key with its field name.
    pub(crate) fn field_names(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let keys = [("user", &self.user), ("groups", &self.groups)];
        keys.into_iter()
            .filter_map(|(key, name)| Some((key, name.as_deref()?)))
    }

    /// Returns the prefixes of the family, [folded](fold).
    pub(crate) fn family_prefixes(&self) -> Vec<String> {
        let mut prefixes: Vec<_> = match &self.strip_prefixes {
            Some(prefixes) => prefixes.iter().map(|prefix| fold(prefix)).collect(),
            None => self
                .field_names()
                .filter_map(|(_, name)| family_prefix(name))
                .collect(),
        };
        prefixes.sort_unstable();
        prefixes.dedup();
        prefixes
    }
}

/// Returns the name up to its last separator, [folded](fold), if that prefix is narrow enough for a family.
fn family_prefix(name: &str) -> Option<String> {
    let folded = fold(name);
    let end = folded.rfind('-')? + 1;
    let stem = folded.get(..end)?;
    (stem != EXTENSION_PREFIX).then(|| stem.to_owned())
}

/// Returns the name as the most lenient applications read it: CGI reads `_` as `-`, PHP also reads `.` as `-`, and some servers
/// all characters that are neither letters nor digits.
pub(crate) fn fold(name: &str) -> String {
    name.bytes()
        .map(|byte| char::from(fold_byte(byte)))
        .collect()
}

/// Returns one byte of a [folded](fold) name.
pub(crate) fn fold_byte(byte: u8) -> u8 {
    if byte.is_ascii_alphanumeric() {
        byte.to_ascii_lowercase()
    } else {
        b'-'
    }
}

/// Whether a field with this name, in lower case, has a standard meaning, which no prefix covers.
pub(crate) fn is_standard_field(name: &str) -> bool {
    STANDARD_FIELDS.contains(&name)
}

/// Checks the prefix of a family of fields.
///
/// # Errors
/// The fault of the prefix.
pub(crate) fn check_prefix(prefix: &str) -> Result<(), String> {
    if HeaderName::from_bytes(prefix.as_bytes()).is_err() {
        return Err(format!(
            "\"{prefix}\" is not the beginning of a field name; write X-Remote-"
        ));
    }
    if EXTENSION_PREFIX.starts_with(&fold(prefix)) {
        return Err(format!(
            "\"{prefix}\" would remove every non-standard field; write a longer prefix, such as X-Remote-"
        ));
    }
    Ok(())
}

/// Parses the name of an identity field.
///
/// # Errors
/// The fault of the name.
pub(crate) fn parse_field_name(name: &str) -> Result<HeaderName, String> {
    let parsed = HeaderName::from_bytes(name.as_bytes());
    let parsed = parsed.map_err(|_| {
        format!("\"{name}\" is not a valid field name; write a name such as X-Remote-User")
    })?;
    if is_standard_field(parsed.as_str()) || parsed.as_str().starts_with(PRIVATE_PREFIX) {
        return Err(format!(
            "\"{name}\" is a standard field with another meaning; write another name, such as X-Remote-User"
        ));
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_with_another_meaning_cannot_carry_client_identity() {
        assert_eq!(parse_field_name("X-Remote-User").unwrap(), "x-remote-user");
        for bad in ["Host", "AUTHORIZATION", "te", "Causeway-Target", "a b", ""] {
            assert!(parse_field_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_header_family_ends_at_the_last_hyphen_or_as_configured() {
        let families = |user: &str, groups: &str, prefixes: Option<&[&str]>| {
            let owned =
                |prefixes: &[&str]| prefixes.iter().map(|each| (*each).to_owned()).collect();
            let headers = IdentityHeaders {
                user: Some(user.into()),
                groups: Some(groups.into()),
                strip_prefixes: prefixes.map(owned),
            };
            headers.family_prefixes()
        };
        assert_eq!(
            families("X-Remote-User", "X-Remote-Group", None),
            ["x-remote-"]
        );
        assert_eq!(
            families("Remote_User", "X-WEBAUTH-ROLE", None),
            ["remote-", "x-webauth-"]
        );
        // Only the exact names are removed, because these prefixes do not form a family.
        assert!(families("X-User", "Groups", None).is_empty());
        assert_eq!(
            families("X-User", "Groups", Some(&["X-Auth_"])),
            ["x-auth-"]
        );
        assert!(families("X-Remote-User", "X-Remote-Group", Some(&[])).is_empty());
        assert!(check_prefix("X-Remote-").is_ok() && check_prefix("Remote").is_ok());
        for bad in ["", "X", "x-", "X_", "a b"] {
            assert!(check_prefix(bad).is_err(), "{bad}");
        }
    }
}
