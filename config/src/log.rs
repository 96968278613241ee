//! Configuration of a process's log: the same two keys at gateway and edge.
//!
//! This module only holds the values; the binary's `telemetry` applies them.

use serde::{Deserialize, Serialize};

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
