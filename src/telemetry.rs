//! Logs: format and filter from the configuration, to standard error.
//!
//! Set up once, before the runtime. `RUST_LOG` wins over the configured filter, because
//! whoever sets it is looking for something now. No colours where nobody can see them.

use std::io::IsTerminal;

use anyhow::Context;
use causeway_config::{Log, LogFormat};
use tracing_subscriber::EnvFilter;

/// Starts logging for the rest of the process.
pub(crate) fn start(log: &Log) -> anyhow::Result<()> {
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(text) if !text.is_empty() => filter(&text).context("RUST_LOG")?,
        _ => filter(&log.filter).context("log.filter")?,
    };
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let started = match log.format {
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}

/// Reads a filter.
pub(crate) fn filter(text: &str) -> anyhow::Result<EnvFilter> {
    EnvFilter::try_new(text).with_context(|| {
        format!(
            "\"{text}\" is no log filter; write a level such as info, or info,causeway_tunnel=debug"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_says_what_to_write() {
        assert!(filter("info,causeway_tunnel=debug").is_ok());
        let error = format!("{:#}", filter("causeway=loud").unwrap_err());
        assert!(
            error.contains("causeway=loud") && error.contains("such as info"),
            "{error}"
        );
    }
}
