//! Configuration types that gateway and edge share.
//!
//! Contains:
//! - durations and sizes as people write them;
//! - secrets that no log contains;
//! - addresses that may be a unix socket;
//! - `ConfigError` for the fault of a value and its path;
//! - the channel for reload requests to a running process;
//! - level and format of the log, which the binary's `telemetry` applies;
//! - the description of admin listeners (OpenAPI).
//!
//! This crate knows neither YAML nor flags: the binary reads those, and these types only parse text.

mod address;
mod error;
pub mod openapi;
mod reload;
mod secret;
mod units;

pub use crate::reload::{RestartKey, RestartKeys};
pub use address::{ListenAddr, ListenAddrs, SocketAddrStr, host_port};
pub use error::{ConfigError, ConfigErrors, Validate};
pub use reload::{ReloadReceiver, ReloadRequest, ReloadResult, ReloadSender, reload_channel};
pub use secret::Secret;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
pub use units::{ByteSize, DurationStr, IpNetList, canonical_network};

/// Value of a key, if the key is present. For `#[serde(default)]`.
///
/// If a missing key means "any", an empty list must not mean the same. Otherwise a list that a template left empty would
/// allow everything that it was meant to restrict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specified<T>(pub Option<T>);

impl<T> Default for Specified<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Specified<T> {
    /// Whether the key is absent. For `skip_serializing_if`, so that the serialized form can be parsed again.
    pub fn is_absent(&self) -> bool {
        self.0.is_none()
    }
}

impl<T> From<T> for Specified<T> {
    fn from(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Serialize> Serialize for Specified<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Specified<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        T::deserialize(from).map(Self::from)
    }
}

/// Schema of `T`: a key without a value (`users:`) counts as missing.
impl<T: schemars::JsonSchema> schemars::JsonSchema for Specified<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        T::schema_name()
    }

    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        T::json_schema(generator)
    }
}

/// Level and format of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Level (`off`, `error`, `warn`, `info`, `debug`; `trace` in development builds) or filter, such as `info,causeway_tunnel=debug`.
    pub filter: String,
    /// `text` for people, `json` for collectors.
    pub format: LogFormat,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            // One line per connect, disconnect and stream; nothing per frame.
            filter: "info".into(),
            format: LogFormat::Text,
        }
    }
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text for people.
    Text,
    /// One JSON object per line for collectors.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    #[derive(Deserialize)]
    struct Sample {
        #[serde(default)]
        users: Specified<Vec<String>>,
    }

    #[test]
    fn a_key_that_is_empty_is_not_one_that_is_absent() {
        let read = |value| from_value::<Sample>(value).map(|sample| sample.users.0);
        assert_eq!(read(json!({})).unwrap(), None);
        assert_eq!(read(json!({ "users": [] })).unwrap(), Some(Vec::new()));
        assert!(read(json!({ "users": null })).is_err());
    }
}
