//! The fields in which an app is told who calls. Callers cannot set them: what they send under these names is taken
//! away, also where an app would take another spelling for the same name.

use causeway_tunnel::wire::PRIVATE_PREFIX;
use http::HeaderName;
use serde::{Deserialize, Serialize};

/// The names of the fields that tell an app who calls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IdentityHeaders {
    /// Field for the caller's name, such as `X-Remote-User`.
    pub user: Option<String>,
    /// Field for the caller's groups, one field each, such as `X-Remote-Group`.
    pub groups: Option<String>,
}

/// What a hop, a message or this gateway says in fields of its own.
const TAKEN: [&str; 38] = [
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
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
];

impl IdentityHeaders {
    /// Each key with the name that it gives.
    pub(crate) fn names(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let keys = [("user", &self.user), ("groups", &self.groups)];
        keys.into_iter()
            .filter_map(|(key, name)| Some((key, name.as_deref()?)))
    }
}

/// The name of such a field.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn field(name: &str) -> Result<HeaderName, String> {
    let parsed = HeaderName::from_bytes(name.as_bytes());
    let parsed =
        parsed.map_err(|_| format!("\"{name}\" is no name of a field; write X-Remote-User"))?;
    if TAKEN.contains(&parsed.as_str()) || parsed.as_str().starts_with(PRIVATE_PREFIX) {
        return Err(format!(
            "\"{name}\" says something else already; write a name of its own, such as X-Remote-User"
        ));
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_means_something_else_already_tells_nobody_who_calls() {
        assert_eq!(field("X-Remote-User").unwrap(), "x-remote-user");
        for bad in ["Host", "AUTHORIZATION", "te", "Causeway-Target", "a b", ""] {
            assert!(field(bad).is_err(), "{bad}");
        }
    }
}
