//! State that gateways of the same edges share: the CA and the secret of session tickets.
//!
//! It is in a folder with both files, such as a mounted Secret of a cluster. A data directory imports it as a whole and keeps
//! its own tokens and nodes. A directory with another CA is left unchanged, because its edges would be lost. So is a
//! directory whose rotation is further ahead. The import would bring back a retired root, or lose the only key of a new root.

use super::atomic_file::{StoreError, io_error};
use super::data_dir::{CA_FILE, Store, TICKETS_FILE};
use crate::ca::{Ca, file::CaFile};
use crate::verify::TicketSecret;
use std::io;
use std::path::Path;

/// A CA and a secret of session tickets. `Debug` shows neither.
#[derive(Debug)]
pub struct SharedCa {
    ca: Ca,
    tickets: TicketSecret,
}

/// Outcome of an import of shared state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The shared state was imported now.
    Imported,
    /// The shared state was imported before.
    AlreadyImported,
    /// The shared state is older than the local one. The local state is unchanged.
    Behind,
    /// Each of the two has a change that the other lacks: a root, a request or a chain. The local state is unchanged.
    Diverged,
}

impl SharedCa {
    /// Returns this CA with a new secret of session tickets.
    pub fn new(ca: Ca) -> Self {
        Self {
            ca,
            tickets: TicketSecret::random(),
        }
    }

    /// Reads the shared state from the folder.
    ///
    /// # Errors
    /// If one of the two files is missing or cannot be parsed.
    pub fn read(directory: &Path) -> Result<Self, StoreError> {
        let read_text = |name: &str| {
            let path = directory.join(name);
            std::fs::read_to_string(&path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => StoreError::Missing { path },
                _ => io_error("read", &path)(error),
            })
        };
        let (ca, tickets) = (read_text(CA_FILE)?, read_text(TICKETS_FILE)?);
        Self::parse(&ca, &tickets).map_err(|(name, why)| StoreError::Corrupt {
            path: directory.join(name),
            why,
        })
    }

    /// Parses the contents of the two files. An error includes the name of the file.
    pub(super) fn parse(ca: &str, tickets: &str) -> Result<Self, (&'static str, String)> {
        let ca_fault = |why: String| (CA_FILE, why);
        let file: CaFile = serde_json::from_str(ca).map_err(|error| ca_fault(error.to_string()))?;
        let ca = file
            .into_ca()
            .map_err(|error| ca_fault(error.to_string()))?;
        let tickets = TicketSecret::parse(tickets)
            .ok_or_else(|| (TICKETS_FILE, "it is not 32 bytes in base64url".to_owned()))?;
        Ok(Self { ca, tickets })
    }

    /// Returns the CA.
    pub fn ca(&self) -> &Ca {
        &self.ca
    }

    /// Returns the content of each file, by its name. All of it is secret.
    ///
    /// # Errors
    /// If the state cannot be written as JSON.
    pub fn files(&self) -> Result<[(&'static str, String); 2], serde_json::Error> {
        let ca = serde_json::to_string_pretty(&CaFile::from_ca(&self.ca))?;
        Ok([
            (CA_FILE, ca),
            (TICKETS_FILE, format!("{}\n", self.tickets.text())),
        ])
    }
}

impl Store {
    /// Returns the state that this directory shares with others. The directory must have a CA.
    pub fn shared(&self) -> Result<SharedCa, StoreError> {
        let ca = self.ca()?.ok_or_else(|| StoreError::Missing {
            path: self.dir.path(CA_FILE),
        })?;
        let tickets = self.ticket_secret()?;
        Ok(SharedCa { ca, tickets })
    }

    /// Imports shared state, if it is equal to the state of this directory or newer.
    ///
    /// # Errors
    /// If this directory has another CA, none of whose roots is in the shared one. Nothing has changed then.
    pub fn import_shared(&self, shared: &SharedCa) -> Result<ImportOutcome, StoreError> {
        let _lock = self.dir.lock()?;
        let current = self.read_ca()?;
        let roots = shared.ca.fingerprints();
        if let Some(current) = &current {
            let mut current_roots = current.fingerprints().into_iter();
            if !current_roots.any(|root| roots.contains(&root)) {
                return Err(StoreError::Exists {
                    path: self.dir.path(CA_FILE),
                });
            }
            if !shared.ca.is_same_or_newer(current) {
                return Ok(if current.is_same_or_newer(&shared.ca) {
                    ImportOutcome::Behind
                } else {
                    ImportOutcome::Diverged
                });
            }
        }
        let mut outcome = ImportOutcome::AlreadyImported;
        let files = shared.files();
        // The CA is written last, because the other files have no effect without it.
        for (name, text) in files
            .map_err(|error| self.dir.corrupt(CA_FILE, error))?
            .iter()
            .rev()
        {
            if self.dir.read(name)?.as_ref() != Some(text) {
                self.dir.write(name, text)?;
                outcome = ImportOutcome::Imported;
            }
        }
        self.write_derived_files(&shared.ca)?;
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::{CaError, RotationStep};
    use crate::store::{NodeRecord, OpenMode};
    use causeway_tls::{NodeName, TrustDomain};

    fn ca() -> Ca {
        Ca::create(&TrustDomain::parse("test.example").unwrap()).unwrap()
    }

    fn keep(folder: &Path, shared: &SharedCa) {
        for (name, text) in shared.files().unwrap() {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn a_shared_ca_is_loaded_through_rotation_and_nodes_stay() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| Store::open(folder.path().join(name), OpenMode::Create).unwrap();
        let (one, other) = (place("one"), place("other"));
        let first = SharedCa::new(ca());
        keep(folder.path(), &first);
        let read = || SharedCa::read(folder.path()).unwrap();
        assert_eq!(one.import_shared(&read()).unwrap(), ImportOutcome::Imported);
        assert_eq!(
            one.import_shared(&read()).unwrap(),
            ImportOutcome::AlreadyImported
        );
        other.import_shared(&read()).unwrap();
        let secret = |store: &Store| store.ticket_secret().unwrap();
        assert!(secret(&one) == secret(&other));
        let node = NodeName::parse("edge-1").unwrap();
        other.nodes().put(NodeRecord::name_only(&node, 7)).unwrap();

        for step in [Ca::prepare, Ca::activate, Ca::retire] {
            let before = secret(&one);
            one.change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()))
                .unwrap();
            let shared = one.shared().unwrap();
            let gone = shared.ca().other().is_none();
            assert_eq!(secret(&one) != before, gone, "with a removed root");
            keep(folder.path(), &shared);
            assert_eq!(
                other.import_shared(&read()).unwrap(),
                ImportOutcome::Imported
            );
            let roots = |store: &Store| store.ca().unwrap().unwrap().bundle_pem();
            assert_eq!(roots(&one), roots(&other));
            assert!(secret(&one) == secret(&other));
        }
        assert_eq!(other.nodes().all().unwrap().len(), 1);
    }

    /// Returns all content in which two directories could differ.
    fn whole(store: &Store) -> [Option<String>; 3] {
        [CA_FILE, TICKETS_FILE, "ca.pem"].map(|name| store.dir.read(name).unwrap())
    }

    /// Returns a store with this CA and its own copy of the shared state.
    fn at(place: &Path, shared: &SharedCa) -> Store {
        let store = Store::open(place, OpenMode::Create).unwrap();
        assert_eq!(
            store.import_shared(shared).unwrap(),
            ImportOutcome::Imported
        );
        store
    }

    /// A step of a rotation.
    type Stepping = fn(Ca) -> Result<(Ca, RotationStep), CaError>;

    /// Makes each step, and returns the shared state after each.
    fn history(store: &Store, steps: &[Stepping]) -> Vec<SharedCa> {
        let then = |step: &Stepping| {
            store
                .change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()))
                .unwrap();
            store.shared().unwrap()
        };
        let first = store.shared().unwrap();
        [first].into_iter().chain(steps.iter().map(then)).collect()
    }

    #[test]
    fn a_directory_follows_the_shared_ca_and_never_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        let source = at(&folder.path().join("source"), &SharedCa::new(ca()));
        let turn = [Ca::prepare, Ca::activate, Ca::retire];
        let all = history(&source, &[turn, turn].concat());
        let (mut forward, mut back) = (0, 0);
        for (here, own) in all.iter().enumerate() {
            for (there, shared) in all.iter().enumerate() {
                let place = folder.path().join(format!("{here}-{there}"));
                let store = at(&place, own);
                let before = whole(&store);
                let known = own.ca.fingerprints();
                let roots = shared.ca.fingerprints();
                let common = known.iter().any(|root| roots.contains(root));
                let taken = store.import_shared(shared);
                if !common {
                    assert!(matches!(taken, Err(StoreError::Exists { .. })));
                    assert_eq!(whole(&store), before);
                } else if there < here {
                    assert_eq!(
                        taken.unwrap(),
                        ImportOutcome::Behind,
                        "{there} after {here}"
                    );
                    assert_eq!(whole(&store), before, "{there} after {here}");
                    back += 1;
                } else if there > here {
                    assert_eq!(
                        taken.unwrap(),
                        ImportOutcome::Imported,
                        "{there} after {here}"
                    );
                    let after = store.shared().unwrap().files().unwrap();
                    assert!(after == shared.files().unwrap(), "{there} after {here}");
                    forward += 1;
                } else {
                    assert_eq!(taken.unwrap(), ImportOutcome::AlreadyImported);
                }
            }
        }
        assert_eq!((forward, back), (14, 14));
    }

    #[test]
    fn a_root_that_two_have_prepared_apart_is_kept_by_each() {
        let folder = tempfile::tempdir().unwrap();
        let first = SharedCa::new(ca());
        let one = at(&folder.path().join("one"), &first);
        let other = at(&folder.path().join("other"), &first);
        let [.., prepared] = &history(&one, &[Ca::prepare])[..] else {
            unreachable!()
        };
        for step in [Ca::prepare, Ca::activate] {
            history(&other, &[step]);
            let before = whole(&other);
            assert_eq!(
                other.import_shared(prepared).unwrap(),
                ImportOutcome::Diverged
            );
            assert_eq!(whole(&other), before);
        }
    }

    #[test]
    fn a_listener_ca_request_and_its_chain_are_loaded_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let source = at(&folder.path().join("source"), &SharedCa::new(ca()));
        let import = |ca: Ca| {
            let chain = crate::ca::signed_request(&ca);
            ca.import_listener_chain(&chain, &[])
        };
        let remove = |ca: Ca| Ok(ca.remove_listener_chain());
        let steps: [Stepping; 5] = [
            Ca::request_listener_ca,
            import,
            Ca::prepare,
            Ca::renew_listener_request,
            remove,
        ];
        let all = history(&source, &steps);
        let store = at(&folder.path().join("data"), &all[0]);
        for pair in all.windows(2) {
            assert_eq!(
                store.import_shared(&pair[1]).unwrap(),
                ImportOutcome::Imported
            );
            let before = whole(&store);
            assert_eq!(
                store.import_shared(&pair[0]).unwrap(),
                ImportOutcome::Behind
            );
            assert_eq!(whole(&store), before);
            assert_eq!(
                store.import_shared(&pair[1]).unwrap(),
                ImportOutcome::AlreadyImported
            );
        }
        // Two gateways with different pending requests keep their own.
        let apart = at(&folder.path().join("apart"), &all[0]);
        history(&apart, &[Ca::request_listener_ca]);
        assert_eq!(
            apart.import_shared(&all[1]).unwrap(),
            ImportOutcome::Diverged
        );
        history(&apart, &[import]);
        let before = whole(&apart);
        assert_eq!(
            apart.import_shared(&all[2]).unwrap(),
            ImportOutcome::Diverged
        );
        assert_eq!(whole(&apart), before);
    }

    #[test]
    fn a_different_or_incomplete_ca_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), OpenMode::Create).unwrap();
        store.import_shared(&SharedCa::new(ca())).unwrap();
        let roots = store.ca().unwrap().unwrap().bundle_pem();
        let refused = store.import_shared(&SharedCa::new(ca())).unwrap_err();
        assert!(matches!(refused, StoreError::Exists { .. }), "{refused}");
        assert_eq!(store.ca().unwrap().unwrap().bundle_pem(), roots);
        keep(folder.path(), &SharedCa::new(ca()));
        for (name, text, says) in [
            (TICKETS_FILE, "short", "base64url"),
            (CA_FILE, "{}", "damaged"),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
            let refused = SharedCa::read(folder.path()).unwrap_err().to_string();
            assert!(refused.contains(says), "{refused}");
            std::fs::remove_file(folder.path().join(name)).unwrap();
            let missing = SharedCa::read(folder.path()).unwrap_err();
            assert!(matches!(missing, StoreError::Missing { .. }), "{missing}");
            keep(folder.path(), &SharedCa::new(ca()));
        }
    }
}
