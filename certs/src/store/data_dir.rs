//! The data directory itself: its version, its claim, and the files with a single value.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::atomic_file::{Dir, Lock, StoreError};
use crate::verify::TicketSecret;

const VERSION_FILE: &str = "version";
/// Version of the files that this program reads and writes.
const VERSION: &str = "1";
/// File of the CA.
pub(super) const CA_FILE: &str = "ca.json";
/// File of the records.
pub(super) const NODES_FILE: &str = "nodes.json";
/// File of the roots, for clients.
pub(super) const ROOTS_FILE: &str = "ca.pem";
/// File of the secret from which the keys of session tickets are derived.
pub(super) const TICKETS_FILE: &str = "tickets.key";
/// Whether a missing data directory is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Create the directory if it does not exist.
    Create,
    /// The directory must exist.
    Existing,
}

/// Exclusive claim on a data directory. It is released when the value is dropped, here and in a process that has adopted it.
#[derive(Debug)]
pub struct DirLock {
    lock: Lock,
    dir: Dir,
}

impl AsFd for DirLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }
}

impl DirLock {
    /// Releases the directory. The result then shows whether another process has claimed it.
    pub fn release(self) -> ReleasedClaim {
        ReleasedClaim {
            claimed_at: self.lock.modified(),
            dir: self.dir,
        }
    }
}

/// Released claim of a process that continues for some time.
#[derive(Debug)]
pub struct ReleasedClaim {
    claimed_at: Option<SystemTime>,
    dir: Dir,
}

impl ReleasedClaim {
    /// Whether another process has claimed the directory since the release.
    pub fn is_taken(&self) -> bool {
        self.dir.last_claim() != self.claimed_at
    }
}

/// An open data directory. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    pub(super) dir: Dir,
}

impl Store {
    /// Name of the small value with the admin address of the running process.
    pub const ADMIN_ADDRESS: &str = "admin";

    /// Opens the directory and checks its version.
    pub fn open(path: impl AsRef<Path>, access: OpenMode) -> Result<Self, StoreError> {
        let dir = match access {
            OpenMode::Create => Dir::create(path.as_ref())?,
            OpenMode::Existing => Dir::open_existing(path.as_ref())?,
        };
        match (dir.read(VERSION_FILE)?, access) {
            (Some(version), _) if version.trim() == VERSION => {}
            (Some(version), _) => {
                let why = format!(
                    "it has version '{}', but this program reads version {VERSION}",
                    version.trim().chars().take(20).collect::<String>()
                );
                return Err(dir.corrupt(VERSION_FILE, why));
            }
            (None, OpenMode::Create) => {
                let _lock = dir.lock()?;
                dir.write(VERSION_FILE, &format!("{VERSION}\n"))?;
            }
            // The CA was copied from another gateway; reading it checks its version.
            (None, OpenMode::Existing) if dir.path(CA_FILE).exists() => {}
            (None, OpenMode::Existing) => {
                return Err(StoreError::Missing {
                    path: dir.path(VERSION_FILE),
                });
            }
        }
        let store = Self { dir };
        store.finish_restore()?;
        Ok(store)
    }

    /// Whether a gateway uses this directory or will use it: it has a CA, or a file that a gateway creates at its start.
    pub fn is_gateway_dir(&self) -> bool {
        let exists = |name: &str| self.dir.path(name).exists();
        exists(TICKETS_FILE) || exists(CA_FILE) || exists(ROOTS_FILE)
    }

    /// Returns the secret of session tickets, which the first call creates. Gateways that share it resume each other's
    /// sessions.
    pub fn ticket_secret(&self) -> Result<TicketSecret, StoreError> {
        let _lock = self.dir.lock()?;
        if let Some(text) = self.dir.read(TICKETS_FILE)? {
            let why = "it is not 32 bytes in base64url; delete the file, and the next start creates a new one";
            return TicketSecret::parse(&text).ok_or_else(|| self.dir.corrupt(TICKETS_FILE, why));
        }
        let secret = TicketSecret::random();
        self.dir
            .write(TICKETS_FILE, &format!("{}\n", secret.text()))?;
        Ok(secret)
    }

    /// Claims the directory for this process, which is going to use it as long as it runs. Commands that only change a file
    /// need no claim.
    pub fn claim(&self) -> Result<DirLock, StoreError> {
        let (lock, dir) = (self.dir.claim()?, self.dir.clone());
        Ok(DirLock { lock, dir })
    }

    /// Takes over the claim of another process on this directory, whose descriptor that process has passed on.
    pub fn adopt_claim(&self, descriptor: OwnedFd) -> DirLock {
        DirLock {
            lock: descriptor.into(),
            dir: self.dir.clone(),
        }
    }

    /// Returns the path of the unix socket at which the running process takes commands.
    pub fn admin_socket(&self) -> PathBuf {
        self.runtime_socket("admin")
    }

    /// Returns the path of the unix socket at which the running process hands its sockets over to another process.
    pub fn handover_socket(&self) -> PathBuf {
        self.runtime_socket("handover")
    }

    fn runtime_socket(&self, name: &str) -> PathBuf {
        self.dir.path(&format!("{}.sock", runtime_file_name(name)))
    }

    /// Returns the times of the last changes of the CA and of the nodes, each `None` without its file.
    pub fn last_changes(&self) -> [Option<SystemTime>; 2] {
        [CA_FILE, NODES_FILE].map(|name| self.dir.path(name).metadata().ok()?.modified().ok())
    }

    /// Stores a small value about the running process, such as its admin address.
    pub fn write_runtime(&self, name: &str, text: &str) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write(&runtime_file_name(name), text)
    }

    /// Reads a value that [`Store::write_runtime`] stored.
    pub fn read_runtime(&self, name: &str) -> Result<Option<String>, StoreError> {
        self.dir.read(&runtime_file_name(name))
    }

    /// Removes such a value, at the end of the process.
    pub fn remove_runtime(&self, name: &str) -> Result<(), StoreError> {
        self.dir.remove(&runtime_file_name(name))
    }
}

/// Returns the name of a run file. `name` is chosen by our code; any content is made safe, so that the file stays in the
/// directory.
fn runtime_file_name(name: &str) -> String {
    let sanitized: String = name
        .chars()
        .map(|char| {
            if char.is_ascii_alphanumeric() {
                char
            } else {
                '-'
            }
        })
        .collect();
    format!("run-{sanitized}")
}
