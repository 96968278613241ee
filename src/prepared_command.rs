//! A command whose inputs are known: its future, with the log that the future needs.

use std::path::PathBuf;
use std::pin::Pin;

use causeway_config::Log;

/// Command that is ready to run once the configuration is known.
pub(crate) struct PreparedCommand {
    pub(crate) log: Log,
    /// Warnings to log at the start.
    pub(crate) warnings: Vec<String>,
    /// Path of the audit log's file.
    pub(crate) audit_log_path: Option<PathBuf>,
    /// Whether a thread of the command may be reading standard input when the command ends.
    pub(crate) reads_stdin: bool,
    pub(crate) future: Pin<Box<dyn Future<Output = anyhow::Result<()>>>>,
}

impl PreparedCommand {
    pub(crate) fn new(
        log: Log,
        future: impl Future<Output = anyhow::Result<()>> + 'static,
    ) -> Self {
        Self {
            log,
            warnings: Vec::new(),
            audit_log_path: None,
            reads_stdin: false,
            future: Box::pin(future),
        }
    }

    pub(crate) fn reading_stdin(self) -> Self {
        Self {
            reads_stdin: true,
            ..self
        }
    }

    /// Prepares a command that ends by itself. Its output is its result, so only errors are logged.
    pub(crate) fn one_shot(future: impl Future<Output = anyhow::Result<()>> + 'static) -> Self {
        let log = Log {
            filter: "warn".into(),
            ..Log::default()
        };
        Self::new(log, future)
    }
}
