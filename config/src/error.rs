//! What is wrong with a configuration, said so that its writer can put it right.
//!
//! Validation never stops at the first fault: it collects them in `Faults`, each with
//! the path of the value in the form `fronts[1].listen`, which the binary turns into a
//! file, a line and a column.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// One fault of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Where the value stands: `fronts[1].listen`, `ports.9100.ca`.
    pub path: String,
    /// What is wrong, and what to write instead.
    pub message: String,
    /// The other value that the fault rests on: without it there may be none.
    pub rests_on: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// A configuration that knows when its values make no sense together.
pub trait Validate {
    /// All faults at once; none means that the configuration can be used.
    fn validate(&self) -> Vec<ConfigError>;

    /// Faults of files that it names and that [`Self::validate`] leaves to the process, which may begin without them or wait for them.
    /// `--check-config` reports them as well.
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
            rests_on: None,
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
            rests_on: Some(other.into()),
        });
    }

    /// A file that must be there and readable.
    pub fn file(&mut self, path: impl Into<String>, file: &Path) {
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

    /// A directory that must be there and readable.
    pub fn directory(&mut self, path: impl Into<String>, directory: &Path) {
        if let Err(error) = std::fs::read_dir(directory) {
            let message = format!("cannot read {}: {error}", directory.display());
            self.add(path, message);
        }
    }

    /// Bounds of zero would end every wait at once.
    pub fn not_zero(&mut self, section: &str, waits: &[(&str, Duration)]) {
        for (key, wait) in waits {
            if wait.is_zero() {
                self.add(
                    format!("{section}.{key}"),
                    "must be longer than zero: every wait has a bound, and none may pass at once",
                );
            }
        }
    }

    /// Limits of zero would serve nobody.
    pub fn at_least_one(&mut self, section: &str, limits: &[(&str, usize)]) {
        for (key, limit) in limits {
            if *limit == 0 {
                self.add(
                    format!("{section}.{key}"),
                    "must be at least 1: with a limit of 0 nothing is served",
                );
            }
        }
    }

    /// What was found, in the order found.
    pub fn into_vec(self) -> Vec<ConfigError> {
        self.0
    }
}
