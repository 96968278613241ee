//! Errors of a configuration, worded so that its author can correct it.
//!
//! Validation never stops at the first fault: `ConfigErrors` collects all faults. Each has the path of its value in the form
//! `listeners[1].listen`. The binary converts the path to a file, a line and a column.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// A fault of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Path of the value: `listeners[1].listen`, `ports.9100.ca`.
    pub path: String,
    /// Description of the fault, and what to write instead.
    pub message: String,
    /// Path of the other value that causes the fault: without it there may be none.
    pub depends_on: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// A configuration that can check whether its values are consistent.
pub trait Validate {
    /// Returns all faults; if there are none, the configuration can be used.
    fn validate(&self) -> Vec<ConfigError>;

    /// Returns faults of files that the configuration names and that [`Self::validate`] leaves to the process. The process may
    /// start without these files or wait for them. `--check-config` reports the faults as well.
    fn validate_files(&self) -> Vec<ConfigError> {
        Vec::new()
    }
}

/// Collects faults under paths.
#[derive(Debug, Default)]
pub struct ConfigErrors(Vec<ConfigError>);

impl ConfigErrors {
    /// Adds a fault of the value at `path`.
    pub fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(ConfigError {
            path: path.into(),
            message: message.into(),
            depends_on: None,
        });
    }

    /// Adds a fault of the value at `path` against the one at `other`.
    pub fn add_against(
        &mut self,
        path: impl Into<String>,
        other: impl Into<String>,
        message: impl Into<String>,
    ) {
        self.0.push(ConfigError {
            path: path.into(),
            message: message.into(),
            depends_on: Some(other.into()),
        });
    }

    /// Reports a file that does not exist or is not readable.
    pub fn check_file(&mut self, path: impl Into<String>, file: &Path) {
        match File::open(file).and_then(|file| file.metadata()) {
            Ok(metadata) if metadata.is_dir() => {
                self.add(
                    path,
                    format!("{} is a directory; name a file", file.display()),
                );
            }
            Ok(_) => {}
            Err(error) => self.add(path, format!("cannot read {}: {error}", file.display())),
        }
    }

    /// Reports a directory that does not exist or is not readable.
    pub fn check_directory(&mut self, path: impl Into<String>, directory: &Path) {
        if let Err(error) = std::fs::read_dir(directory) {
            let message = format!("cannot read {}: {error}", directory.display());
            self.add(path, message);
        }
    }

    /// Reports time limits of zero, which would end every wait at once.
    pub fn check_not_zero(&mut self, section: &str, timeouts: &[(&str, Duration)]) {
        for (key, timeout) in timeouts {
            if timeout.is_zero() {
                self.add(
                    format!("{section}.{key}"),
                    "must be greater than zero: with 0 every wait would time out at once",
                );
            }
        }
    }

    /// Reports limits of zero, with which no client could be served.
    pub fn check_at_least_one(&mut self, section: &str, limits: &[(&str, usize)]) {
        for (key, limit) in limits {
            if *limit == 0 {
                self.add(
                    format!("{section}.{key}"),
                    "must be at least 1: with a limit of 0 nothing is served",
                );
            }
        }
    }

    /// Returns the faults, in the order found.
    pub fn into_vec(self) -> Vec<ConfigError> {
        self.0
    }
}
