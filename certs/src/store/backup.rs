//! Backup of a gateway's identity in one file: CA, secret of tickets, tokens, nodes, pinned keys of upstreams,
//! revocations of gateways.
//!
//! A backup is taken under the lock of the directory, so that its parts are consistent; the gateway may run meanwhile. A backup
//! is read and validated as a whole before any of it is written. A restore first puts the whole backup into the directory, by one
//! rename. From then on the next process that opens the directory completes the restore. No process may use the directory
//! meanwhile.

use super::atomic_file::{StoreError, io_error};
use super::data_dir::NODES_FILE;
use super::data_dir::{CA_FILE, Store, TICKETS_FILE};
use super::nodes::{ENDED_FILE, EndedRevocations, NodeRecord};
use super::pins::{PINS_FILE, PinTable};
use super::revoked_gateways::{REVOKED_GATEWAYS_FILE, RevokedGateways};
use crate::ca::{Ca, file::CaFile};
use crate::token::TOKENS_FILE;
use crate::token::TokenRecord;
use crate::verify::TicketSecret;
use causeway_tls::NodeName;
use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// File of a backup whose restore has begun.
const PENDING_FILE: &str = ".restore.json";
const VERSION: u32 = 1;
/// Maximum difference between two clocks, in seconds.
const MAX_CLOCK_SKEW: u64 = 24 * 60 * 60;
/// Files in a backup. The CA comes last; the restored state is not valid without it.
const BACKUP_FILES: [&str; 7] = [
    TOKENS_FILE,
    ENDED_FILE,
    NODES_FILE,
    PINS_FILE,
    REVOKED_GATEWAYS_FILE,
    TICKETS_FILE,
    CA_FILE,
];

/// A backup that was read and validated, or created.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backup {
    version: u32,
    /// Time of the backup, in Unix seconds.
    made_at: u64,
    /// Content of each file, by its name.
    files: BTreeMap<String, String>,
}

/// `Debug` shows no content, because all of it is secret.
impl std::fmt::Debug for Backup {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Backup")
            .field("made_at", &self.made_at)
            .finish_non_exhaustive()
    }
}

impl Backup {
    /// Reads a backup and validates all parts of it.
    ///
    /// # Errors
    /// If a part cannot be parsed.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let text = std::fs::read_to_string(path).map_err(io_error("read", path))?;
        Self::parse(&text).map_err(|why| StoreError::Corrupt {
            path: path.into(),
            why,
        })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let backup: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if backup.version != VERSION {
            let found = backup.version;
            return Err(format!(
                "it has version {found}, but this program reads version {VERSION}"
            ));
        }
        if let Some(other) = backup
            .files
            .keys()
            .find(|name| !BACKUP_FILES.contains(&name.as_str()))
        {
            return Err(format!(
                "it contains {other}, which is not part of a backup"
            ));
        }
        if backup.made_at > UnixTime::now().as_secs() + MAX_CLOCK_SKEW {
            return Err("its creation time is in the future; check the clock".to_owned());
        }
        backup.ca()?;
        backup.parse_file::<BTreeMap<NodeName, NodeRecord>>(NODES_FILE)?;
        backup.parse_file::<EndedRevocations>(ENDED_FILE)?;
        backup.parse_file::<Vec<TokenRecord>>(TOKENS_FILE)?;
        backup.parse_file::<PinTable>(PINS_FILE)?;
        backup.parse_file::<RevokedGateways>(REVOKED_GATEWAYS_FILE)?;
        match backup
            .files
            .get(TICKETS_FILE)
            .map(|text| TicketSecret::parse(text))
        {
            Some(None) => Err(format!("{TICKETS_FILE} in it is damaged")),
            _ => Ok(backup),
        }
    }

    fn parse_file<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>, String> {
        let part = self.files.get(name).map(|text| serde_json::from_str(text));
        part.transpose()
            .map_err(|error| format!("{name} in it is damaged: {error}"))
    }

    fn ca(&self) -> Result<Ca, String> {
        let file: CaFile = self.parse_file(CA_FILE)?.ok_or("there is no CA in it")?;
        file.into_ca()
            .map_err(|error| format!("{CA_FILE} in it is damaged: {error}"))
    }

    /// Returns the time of the backup, in Unix seconds.
    pub fn made_at(&self) -> u64 {
        self.made_at
    }

    /// Writes the backup to a new file with mode 0600, completely or not at all.
    ///
    /// # Errors
    /// If the file already exists, or it cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), StoreError> {
        let directory = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let write = || -> io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(directory)?;
            serde_json::to_writer_pretty(&mut file, self)?;
            file.write_all(b"\n")?;
            file.as_file().sync_all()?;
            file.persist_noclobber(path)?;
            std::fs::File::open(directory)?.sync_all()
        };
        match write() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(StoreError::Exists { path: path.into() })
            }
            written => written.map_err(io_error("write", path)),
        }
    }
}

impl Store {
    /// Takes a backup of this directory, which must have a CA.
    pub fn backup(&self) -> Result<Backup, StoreError> {
        let _lock = self.dir.lock()?;
        let missing = || StoreError::Missing {
            path: self.dir.path(CA_FILE),
        };
        let ca = self.read_ca()?.ok_or_else(missing)?;
        let mut files = BTreeMap::new();
        for name in BACKUP_FILES {
            if let Some(text) = self.dir.read(name)? {
                files.insert(name.to_owned(), text);
            }
        }
        // A CA older than `ca.json` is converted to that format.
        if !files.contains_key(CA_FILE) {
            let text = serde_json::to_string_pretty(&CaFile::from_ca(&ca));
            let text = text.map_err(|error| self.dir.corrupt(CA_FILE, error))?;
            files.insert(CA_FILE.to_owned(), text);
        }
        Ok(Backup {
            version: VERSION,
            made_at: UnixTime::now().as_secs(),
            files,
        })
    }

    /// Restores the content that this directory had at the time of the backup.
    ///
    /// # Errors
    /// If a process uses the directory, or it has another CA. Nothing has changed then.
    pub fn restore(&self, backup: &Backup) -> Result<(), StoreError> {
        let _claim = self.claim()?;
        let _lock = self.dir.lock()?;
        let backup_roots = backup
            .ca()
            .map_err(|why| self.dir.corrupt(CA_FILE, why))?
            .fingerprints();
        if let Some(existing) = self.read_ca()?
            && !existing
                .fingerprints()
                .iter()
                .any(|root| backup_roots.contains(root))
        {
            return Err(StoreError::Exists {
                path: self.root_path(),
            });
        }
        self.dir.write_json(PENDING_FILE, backup)?;
        self.write_files(backup)
    }

    /// Finishes a restore that was begun.
    pub(super) fn finish_restore(&self) -> Result<(), StoreError> {
        if self.dir.read(PENDING_FILE)?.is_none() {
            return Ok(());
        }
        let _lock = self.dir.lock()?;
        // The previous holder of the lock may have done it.
        let Some(text) = self.dir.read(PENDING_FILE)? else {
            return Ok(());
        };
        let backup = Backup::parse(&text).map_err(|why| self.dir.corrupt(PENDING_FILE, why))?;
        self.write_files(&backup)
    }

    fn write_files(&self, backup: &Backup) -> Result<(), StoreError> {
        for name in BACKUP_FILES {
            match backup.files.get(name) {
                Some(text) => self.dir.write(name, text)?,
                None => self.dir.remove(name)?,
            }
        }
        // Writes the root file for users, and removes old keys.
        if let Some(ca) = self.read_ca()? {
            self.write_derived_files(&ca)?;
        }
        self.dir.remove(PENDING_FILE)
    }
}
