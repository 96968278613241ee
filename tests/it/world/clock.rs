//! Wall clock of a process, under a test's control (libfaketime). Clocks that measure spans are right.

use super::process::{Causeway, binary, program};
use std::{fs, path::PathBuf};
use tempfile::TempDir;

/// A wall clock; the processes that read it run as long as the value lives.
pub(crate) struct WallClock {
    folder: TempDir,
}

impl WallClock {
    /// Returns a clock with this offset, such as `-1d`.
    pub(crate) fn new(offset: &str) -> Self {
        let clock = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        clock.set(offset);
        clock
    }

    /// Sets another offset, which running processes see at once.
    pub(crate) fn set(&self, offset: &str) {
        // A reader must not see an empty file.
        let next = self.folder.path().join("next");
        fs::write(&next, offset).unwrap();
        fs::rename(next, self.path()).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("clock")
    }

    /// Returns the binary, which reads this clock each time.
    pub(crate) fn causeway(&self) -> Causeway {
        // Not by the program `faketime`: if it is killed it leaves a semaphore with the name of its pid behind, and fails later
        // because of that.
        program("env")
            .args(["LD_PRELOAD=/usr/$LIB/faketime/libfaketimeMT.so.1"])
            .args([format!("FAKETIME_TIMESTAMP_FILE={}", self.path().display())])
            .args(["FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1"])
            .args([binary()])
    }
}
