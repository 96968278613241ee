//! The CA of a data directory: `ca.json`, and beside it the roots for people, `ca.pem`.
//!
//! All of a CA is in one file, so that each change is atomic. `ca.pem` is derived from it, and is rewritten whenever it
//! differs. A directory of an older version has no `ca.json`, but `ca.pem` and `ca.key`. Such a root is loaded from these two
//! files. The first step of a rotation moves it into `ca.json`.

use super::atomic_file::StoreError;
use super::data_dir::{CA_FILE, ROOTS_FILE, Store, TICKETS_FILE};
use crate::ca::{Ca, CaError, RotationStep, file::CaFile};
use crate::token::TokenStore;
use std::path::PathBuf;

/// File of the key of a root that is older than `ca.json`.
const OLD_KEY_FILE: &str = "ca.key";

impl Store {
    /// Returns the path of our roots, for `curl --cacert` at a client.
    pub fn root_path(&self) -> PathBuf {
        self.dir.path(ROOTS_FILE)
    }

    /// Returns the CA, if the directory has one.
    pub fn ca(&self) -> Result<Option<Ca>, StoreError> {
        let found = self.read_ca()?;
        let is_settled = found
            .as_ref()
            .is_none_or(|ca| self.has_current_derived_files(ca));
        if is_settled || self.dir.read(CA_FILE)?.is_none() {
            return Ok(found);
        }
        let _lock = self.dir.lock()?;
        // The previous holder of the lock may have finished.
        let found = self.read_ca()?;
        if let Some(ca) = &found {
            self.write_derived_files(ca)?;
        }
        Ok(found)
    }

    /// Reads the CA, independent of the other files.
    pub(super) fn read_ca(&self) -> Result<Option<Ca>, StoreError> {
        if let Some(file) = self.dir.read_json::<CaFile>(CA_FILE)? {
            let ca = file
                .into_ca()
                .map_err(|error| self.dir.corrupt(CA_FILE, error))?;
            return Ok(Some(ca));
        }
        match (self.dir.read(ROOTS_FILE)?, self.dir.read(OLD_KEY_FILE)?) {
            (Some(root), Some(key)) => match Ca::load(&root, &key) {
                Ok(ca) => Ok(Some(ca)),
                Err(error @ CaError::Unusable { part: "key", .. }) => {
                    Err(self.dir.corrupt(OLD_KEY_FILE, error))
                }
                Err(error) => Err(self.dir.corrupt(ROOTS_FILE, error)),
            },
            (Some(_), None) => Err(StoreError::Missing {
                path: self.dir.path(CA_FILE),
            }),
            // Older versions left a key alone after an interrupted `ca init`.
            (None, _) => Ok(None),
        }
    }

    /// Stores a new CA. Never replaces one, because every edge would be lost.
    pub fn save_ca(&self, ca: &Ca) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        for name in [CA_FILE, ROOTS_FILE] {
            if self.dir.read(name)?.is_some() {
                return Err(StoreError::Exists {
                    path: self.dir.path(name),
                });
            }
        }
        // TLS sessions of the previous CA must not be resumed under this one.
        self.dir.remove(TICKETS_FILE)?;
        self.write_ca(ca)
    }

    /// Changes the CA, if `change` returns a new one.
    ///
    /// # Errors
    /// If there is no CA, or `change` fails. Nothing has changed then.
    pub fn change_ca<E: From<StoreError>>(
        &self,
        change: impl FnOnce(Ca) -> Result<(Ca, RotationStep), E>,
    ) -> Result<(Ca, RotationStep), E> {
        let _lock = self.dir.lock()?;
        let missing = || StoreError::Missing {
            path: self.dir.path(CA_FILE),
        };
        let previous = self.read_ca()?.ok_or_else(missing)?;
        let roots = previous.fingerprints();
        let (ca, step) = change(previous)?;
        if step == RotationStep::Applied {
            // Sessions of a removed root must not be resumed: an attacker who stole the root may also have the ticket secret.
            let remaining = ca.fingerprints();
            if !roots.iter().all(|root| remaining.contains(root)) {
                self.dir.remove(TICKETS_FILE)?;
            }
            self.write_ca(&ca)?;
        }
        Ok((ca, step))
    }

    /// Returns the join tokens of this directory's CA.
    pub fn tokens(&self) -> Result<TokenStore, StoreError> {
        let ca = self.ca()?.ok_or_else(|| StoreError::Missing {
            path: self.root_path(),
        })?;
        Ok(self.tokens_of(&ca))
    }

    /// Returns the token store for this CA.
    pub fn tokens_of(&self, ca: &Ca) -> TokenStore {
        TokenStore::new(self.dir.clone(), ca)
    }

    /// Writes the CA by one rename, so the change is atomic. [`Store::ca`] writes the derived files if this process dies
    /// before.
    fn write_ca(&self, ca: &Ca) -> Result<(), StoreError> {
        self.dir.write_json(CA_FILE, &CaFile::from_ca(ca))?;
        self.write_derived_files(ca)
    }

    /// Writes the files that are derived from `ca.json`.
    pub(super) fn write_derived_files(&self, ca: &Ca) -> Result<(), StoreError> {
        if !self.has_current_derived_files(ca) {
            self.dir.write(ROOTS_FILE, &ca.client_bundle_pem())?;
        }
        self.dir.remove(OLD_KEY_FILE)
    }

    /// Whether the derived files are up to date. Roots that cannot be parsed count as missing.
    fn has_current_derived_files(&self, ca: &Ca) -> bool {
        let written = self.dir.read(ROOTS_FILE).ok().flatten();
        written.as_ref() == Some(&ca.client_bundle_pem()) && !self.dir.path(OLD_KEY_FILE).exists()
    }
}
