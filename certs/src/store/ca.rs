//! The CA of a data directory: `ca.json`, and beside it the roots for people, `ca.pem`.
//!
//! All of a CA is in one file, so that each change is atomic. `ca.pem` is derived from it, and is rewritten whenever it differs.
//! A directory of an older version has no `ca.json`, but `ca.pem` and `ca.key`. That root is read as before, and moves into the
//! one file with the first step of a rotation.

use super::atomic_file::StoreError;
use super::data_dir::{CA, ROOTS, Store, TICKETS};
use crate::ca::{Ca, CaError, RotationStep, file::CaFile};
use crate::token::TokenStore;
use std::path::PathBuf;

/// The key of a root from before `ca.json`.
const OLD_KEY: &str = "ca.key";

impl Store {
    /// Returns the path of our roots, for `curl --cacert` at a client.
    pub fn root_path(&self) -> PathBuf {
        self.dir.path(ROOTS)
    }

    /// The CA, if one was made here.
    pub fn ca(&self) -> Result<Option<Ca>, StoreError> {
        let found = self.read_ca()?;
        let settled = found.as_ref().is_none_or(|ca| self.is_settled(ca));
        if settled || self.dir.read(CA)?.is_none() {
            return Ok(found);
        }
        let _lock = self.dir.lock()?;
        // The previous holder of the lock may have finished.
        let found = self.read_ca()?;
        if let Some(ca) = &found {
            self.settle(ca)?;
        }
        Ok(found)
    }

    /// Reads the CA, independent of the other files.
    pub(super) fn read_ca(&self) -> Result<Option<Ca>, StoreError> {
        if let Some(file) = self.dir.read_json::<CaFile>(CA)? {
            let ca = file.read().map_err(|error| self.dir.corrupt(CA, error))?;
            return Ok(Some(ca));
        }
        match (self.dir.read(ROOTS)?, self.dir.read(OLD_KEY)?) {
            (Some(root), Some(key)) => match Ca::load(&root, &key) {
                Ok(ca) => Ok(Some(ca)),
                Err(error @ CaError::Unusable { part: "key", .. }) => {
                    Err(self.dir.corrupt(OLD_KEY, error))
                }
                Err(error) => Err(self.dir.corrupt(ROOTS, error)),
            },
            (Some(_), None) => Err(StoreError::Missing {
                path: self.dir.path(CA),
            }),
            // Older versions left a key alone after an interrupted `ca init`.
            (None, _) => Ok(None),
        }
    }

    /// Stores a new CA. Refuses to replace one: every edge would be lost.
    pub fn save_ca(&self, ca: &Ca) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        for name in [CA, ROOTS] {
            if self.dir.read(name)?.is_some() {
                return Err(StoreError::Exists {
                    path: self.dir.path(name),
                });
            }
        }
        // TLS sessions of the previous CA must not be resumed under this one.
        self.dir.remove(TICKETS)?;
        self.keep(ca)
    }

    /// Takes the CA a step further, if `change` makes one.
    ///
    /// # Errors
    /// If there is no CA, or `change` refuses; then nothing has changed.
    pub fn change_ca<E: From<StoreError>>(
        &self,
        change: impl FnOnce(Ca) -> Result<(Ca, RotationStep), E>,
    ) -> Result<(Ca, RotationStep), E> {
        let _lock = self.dir.lock()?;
        let missing = || StoreError::Missing {
            path: self.dir.path(CA),
        };
        let before = self.read_ca()?.ok_or_else(missing)?;
        let roots = before.fingerprints();
        let (ca, step) = change(before)?;
        if step == RotationStep::Made {
            // Sessions of a removed root must not be resumed: who stole the root may also have the ticket secret.
            let stay = ca.fingerprints();
            if !roots.iter().all(|root| stay.contains(root)) {
                self.dir.remove(TICKETS)?;
            }
            self.keep(&ca)?;
        }
        Ok((ca, step))
    }

    /// The join tokens of this directory's CA.
    pub fn tokens(&self) -> Result<TokenStore, StoreError> {
        let ca = self.ca()?.ok_or_else(|| StoreError::Missing {
            path: self.root_path(),
        })?;
        Ok(self.tokens_of(&ca))
    }

    /// Returns the token store for a CA that is known.
    pub fn tokens_of(&self, ca: &Ca) -> TokenStore {
        TokenStore::new(self.dir.clone(), ca)
    }

    /// Writes the CA. Before the one rename nothing has changed, after it everything has. [`Store::ca`] completes the rest.
    fn keep(&self, ca: &Ca) -> Result<(), StoreError> {
        self.dir.write_json(CA, &CaFile::of(ca))?;
        self.settle(ca)
    }

    /// Writes the files that are derived from `ca.json`.
    pub(super) fn settle(&self, ca: &Ca) -> Result<(), StoreError> {
        if !self.is_settled(ca) {
            self.dir.write(ROOTS, &ca.client_bundle_pem())?;
        }
        self.dir.remove(OLD_KEY)
    }

    /// Roots that do not read are not worth more than those that are not there.
    fn is_settled(&self, ca: &Ca) -> bool {
        let shown = self.dir.read(ROOTS).ok().flatten();
        shown.as_ref() == Some(&ca.client_bundle_pem()) && !self.dir.path(OLD_KEY).exists()
    }
}
