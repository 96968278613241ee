//! How a process logs: the same two keys at gateway and edge.
//!
//! Only says what is wanted; the binary's `telemetry` sets it up.

use serde::{Deserialize, Serialize};

/// What is logged and in which form.
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
