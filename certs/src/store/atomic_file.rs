//! Files of the data directory: complete, private, and either old or new but never partial.
//!
//! A file is written to a temporary file beside it and synced to the disk. Then it is renamed, and the rename is synced too.
//! An error before the rename leaves the old file unchanged. Files that several processes change are changed with `update`.
//! Every write happens under an advisory lock on `.lock`, which the kernel releases when its holder dies. The next holder
//! removes temporary files that a killed holder left.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;
use thiserror::Error;

use super::file_owner::{chown_to_parent, open_private};

/// Prefix of temporary files that were not renamed yet. A process that holds the lock and has created none can remove all of
/// them.
const TEMP_PREFIX: &str = ".new-";
const LOCK_FILE: &str = ".lock";
const CLAIM_FILE: &str = ".in-use";

/// Fields of an entry that this version does not know. A gateway of this version writes them back, so that a later version loses
/// nothing.
pub type OtherFields = BTreeMap<String, serde_json::Value>;

/// Error that makes the data directory unusable.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The system refused an operation: no permission, disk full, and so on. The old file is intact.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// Verb: `read`, `write`, …
        doing: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file cannot be parsed. It is left unchanged.
    #[error("{} is damaged: {why}", path.display())]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Description of the fault.
        why: String,
    },
    /// A required file or directory is missing.
    #[error("{} is missing", path.display())]
    Missing {
        /// Path of the file or directory.
        path: PathBuf,
    },
    /// An entry of the shared state cannot be parsed. It is left unchanged.
    #[error(
        "the entry {key} of the shared state cannot be parsed, perhaps because a later version wrote it: {why}"
    )]
    Entry {
        /// Key of the entry.
        key: String,
        /// Description of the fault.
        why: String,
    },
    /// Another process uses this directory.
    #[error("{} is in use by another causeway process; give each its own data directory", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A list has its maximum length.
    #[error("{} has {max} entries, and no more are possible", path.display())]
    Full {
        /// Path of the file.
        path: PathBuf,
        /// Maximum number of entries.
        max: usize,
    },
    /// A file that must not be replaced already exists.
    #[error("{} exists already and is not overwritten", path.display())]
    Exists {
        /// Path of the file.
        path: PathBuf,
    },
}

/// A directory of small files. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Dir(Arc<Path>);

/// Lock on the directory while a file is changed. It is released when the value is dropped.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl From<OwnedFd> for Lock {
    /// Takes over a lock that another process holds and passes on. The lock ends when both have closed it.
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor.into())
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Lock {
    /// Returns the last modification time of the locked file.
    pub(super) fn modified(&self) -> Option<SystemTime> {
        let file = self.0.metadata();
        file.and_then(|file| file.modified()).ok()
    }
}

impl Dir {
    /// Creates the directory with mode 0700, if it does not exist.
    pub(crate) fn create(path: &Path) -> Result<Self, StoreError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(io_error("make", path))?;
        Ok(Self(path.into()))
    }

    pub(crate) fn open_existing(path: &Path) -> Result<Self, StoreError> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Ok(Self(path.into())),
            Ok(_) => Err(StoreError::Corrupt {
                path: path.into(),
                why: "not a directory".into(),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(StoreError::Missing { path: path.into() })
            }
            Err(error) => Err(io_error("open", path)(error)),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn corrupt(&self, name: &str, why: impl Display) -> StoreError {
        StoreError::Corrupt {
            path: self.path(name),
            why: why.to_string(),
        }
    }

    /// Returns a file's text, or `None` if there is no file.
    pub(crate) fn read(&self, name: &str) -> Result<Option<String>, StoreError> {
        let path = self.path(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(self.corrupt(name, "not UTF-8 text"))
            }
            Err(error) => Err(io_error("read", &path)(error)),
        }
    }

    /// Fails with [`StoreError::Missing`] if there is no such file.
    pub(crate) fn require(&self, name: &str) -> Result<(), StoreError> {
        let path = self.path(name);
        match fs::metadata(&path) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(StoreError::Missing { path })
            }
            Err(error) => Err(io_error("read", &path)(error)),
        }
    }

    /// Replaces a file. When this returns `Ok`, the new file is on the disk. The calling code must hold the lock.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<(), StoreError> {
        let path = self.path(name);
        self.replace(&path, text).map_err(io_error("write", &path))
    }

    /// Checks that a file of this size could be written now. Leaves no file behind.
    pub(crate) fn check_space(&self, name: &str, size: usize) -> Result<(), StoreError> {
        let written = self.write_temp_file(&" ".repeat(size));
        written
            .map(drop)
            .map_err(io_error("write", &self.path(name)))
    }

    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        self.write_temp_file(text)?.persist(path)?;
        File::open(&self.0)?.sync_all()
    }

    /// Writes a temporary file beside its later place, synced to the disk. tempfile makes it 0600, and removes it if it is not
    /// renamed to its place. The file belongs to the directory's user, whichever user runs this.
    fn write_temp_file(&self, text: &str) -> io::Result<NamedTempFile> {
        let mut file = tempfile::Builder::new()
            .prefix(TEMP_PREFIX)
            .tempfile_in(&self.0)?;
        chown_to_parent(file.as_file(), &self.0)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        Ok(file)
    }

    /// Renames a file. Returns whether there was one. The calling code must hold the lock.
    pub(crate) fn rename(&self, name: &str, to: &str) -> Result<bool, StoreError> {
        let path = self.path(name);
        match fs::rename(&path, self.path(to)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            renamed => renamed.map_err(io_error("rename", &path))?,
        }
        let synced = File::open(&*self.0).and_then(|directory| directory.sync_all());
        synced.map_err(io_error("rename", &path))?;
        Ok(true)
    }

    pub(crate) fn remove(&self, name: &str) -> Result<(), StoreError> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn read_json<T: DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Option<T>, StoreError> {
        let Some(text) = self.read(name)? else {
            return Ok(None);
        };
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| self.corrupt(name, error))
    }

    pub(crate) fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), StoreError> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| io_error("write", &self.path(name))(error.into()))?;
        self.write(name, &(text + "\n"))
    }

    /// Locks the directory. Waits until no other process or thread changes files in it.
    pub(crate) fn lock(&self) -> Result<Lock, StoreError> {
        let path = self.path(LOCK_FILE);
        let locked = open_lock(&path).and_then(|file| file.lock().map(|()| file));
        let locked = locked.map(Lock).map_err(io_error("lock", &path))?;
        self.remove_temp_files();
        Ok(locked)
    }

    /// Removes temporary files of a process that was killed before it had completed them.
    fn remove_temp_files(&self) {
        let entries = fs::read_dir(&*self.0).into_iter().flatten().flatten();
        let leftovers = entries.filter(|entry| {
            entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(TEMP_PREFIX.as_bytes())
        });
        for entry in leftovers {
            // The next write tries again.
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Claims the directory for one process, until the lock is dropped or the process ends.
    pub(crate) fn claim(&self) -> Result<Lock, StoreError> {
        let path = self.path(CLAIM_FILE);
        let file = open_lock(&path).map_err(io_error("lock", &path))?;
        match file.try_lock() {
            Ok(()) => {
                // The previous process detects its successor by this time. Without it, the previous process keeps its ports
                // longer.
                let _ = file.set_modified(SystemTime::now());
                Ok(Lock(file))
            }
            Err(TryLockError::WouldBlock) => Err(StoreError::InUse {
                path: self.0.to_path_buf(),
            }),
            Err(TryLockError::Error(error)) => Err(io_error("lock", &path)(error)),
        }
    }

    /// Returns the time of the last claim of the directory.
    pub(crate) fn last_claim(&self) -> Option<SystemTime> {
        let claim = fs::metadata(self.path(CLAIM_FILE));
        claim.and_then(|claim| claim.modified()).ok()
    }

    /// Reads a file, changes its value and writes it, all under the lock. An error from `change` leaves the file unchanged.
    pub(crate) fn update<T, R, E>(
        &self,
        name: &str,
        change: impl FnOnce(&mut T) -> Result<R, E>,
    ) -> Result<R, E>
    where
        T: Default + Serialize + DeserializeOwned,
        E: From<StoreError>,
    {
        let _lock = self.lock()?;
        let mut value = self.read_json::<T>(name)?.unwrap_or_default();
        let outcome = change(&mut value)?;
        self.write_json(name, &value)?;
        Ok(outcome)
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    open_private(path, OpenOptions::new().write(true))
}

pub(super) fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |source| StoreError::Io {
        doing,
        path: path.into(),
        source,
    }
}
