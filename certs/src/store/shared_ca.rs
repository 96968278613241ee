//! State that gateways of the same edges share: the CA and the secret of session tickets.
//!
//! A folder with both files holds it, such as a Secret of a cluster. A data directory imports it as a whole and keeps its own
//! tokens and nodes. A directory with another CA is left unchanged, because its edges would be lost. So is a directory whose
//! rotation is further ahead. The import would bring back a retired root, or lose the only key of a new root.

use super::atomic_file::{StoreError, failed};
use super::data_dir::{CA, Store, TICKETS};
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
    Now,
    /// The shared state was imported before.
    Before,
    /// The shared state is older than the local one. The local state is unchanged.
    Behind,
    /// Each of the two has a change that the other lacks: a root, a request or a chain. The local state is unchanged.
    Diverged,
}

impl SharedCa {
    /// Returns this CA with a new secret.
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
    pub fn read(folder: &Path) -> Result<Self, StoreError> {
        let text = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => StoreError::Missing { path },
                _ => failed("read", &path)(error),
            })
        };
        let corrupt = |name: &str, why: String| StoreError::Corrupt {
            path: folder.join(name),
            why,
        };
        let file: CaFile =
            serde_json::from_str(&text(CA)?).map_err(|error| corrupt(CA, error.to_string()))?;
        let ca = file
            .read()
            .map_err(|error| corrupt(CA, error.to_string()))?;
        let tickets = TicketSecret::parse(&text(TICKETS)?)
            .ok_or_else(|| corrupt(TICKETS, "it is not 32 bytes in base64url".to_owned()))?;
        Ok(Self { ca, tickets })
    }

    /// The CA.
    pub fn ca(&self) -> &Ca {
        &self.ca
    }

    /// Returns the content of each file, by its name. All of it is secret.
    ///
    /// # Errors
    /// If the state cannot be written as JSON.
    pub fn files(&self) -> Result<[(&'static str, String); 2], serde_json::Error> {
        let ca = serde_json::to_string_pretty(&CaFile::of(&self.ca))?;
        Ok([(CA, ca), (TICKETS, format!("{}\n", self.tickets.text()))])
    }
}

impl Store {
    /// Returns the state that this directory shares with others. The directory must have a CA.
    pub fn shared(&self) -> Result<SharedCa, StoreError> {
        let ca = self.ca()?.ok_or_else(|| StoreError::Missing {
            path: self.dir.path(CA),
        })?;
        let tickets = self.ticket_secret()?;
        Ok(SharedCa { ca, tickets })
    }

    /// Imports shared state, if it follows from the state of this directory.
    ///
    /// # Errors
    /// If this directory has another CA, none of whose roots is in the shared one; then nothing has changed.
    pub fn take_up(&self, shared: &SharedCa) -> Result<ImportOutcome, StoreError> {
        let _lock = self.dir.lock()?;
        let before = self.read_ca()?;
        let roots = shared.ca.fingerprints();
        if let Some(before) = &before {
            let mut known = before.fingerprints().into_iter();
            if !known.any(|root| roots.contains(&root)) {
                return Err(StoreError::Exists {
                    path: self.dir.path(CA),
                });
            }
            if !shared.ca.goes_on_from(before) {
                return Ok(if before.goes_on_from(&shared.ca) {
                    ImportOutcome::Behind
                } else {
                    ImportOutcome::Diverged
                });
            }
        }
        let mut taken = ImportOutcome::Before;
        let files = shared.files();
        // The CA is written last, because the other files have no effect without it.
        for (name, text) in files
            .map_err(|error| self.dir.corrupt(CA, error))?
            .iter()
            .rev()
        {
            if self.dir.read(name)?.as_ref() != Some(text) {
                self.dir.write(name, text)?;
                taken = ImportOutcome::Now;
            }
        }
        self.settle(&shared.ca)?;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::{CaError, RotationStep};
    use crate::name::{NodeName, TrustDomain};
    use crate::store::{NodeRecord, OpenMode};

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
        assert_eq!(one.take_up(&read()).unwrap(), ImportOutcome::Now);
        assert_eq!(one.take_up(&read()).unwrap(), ImportOutcome::Before);
        other.take_up(&read()).unwrap();
        let secret = |store: &Store| store.ticket_secret().unwrap();
        assert!(secret(&one) == secret(&other));
        let node = NodeName::parse("edge-1").unwrap();
        other.nodes().put(NodeRecord::arrived(&node, 7)).unwrap();

        for step in [Ca::prepare, Ca::activate, Ca::retire] {
            let before = secret(&one);
            one.change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()))
                .unwrap();
            let shared = one.shared().unwrap();
            let gone = shared.ca().other().is_none();
            assert_eq!(secret(&one) != before, gone, "with a removed root");
            keep(folder.path(), &shared);
            assert_eq!(other.take_up(&read()).unwrap(), ImportOutcome::Now);
            let roots = |store: &Store| store.ca().unwrap().unwrap().bundle_pem();
            assert_eq!(roots(&one), roots(&other));
            assert!(secret(&one) == secret(&other));
        }
        assert_eq!(other.nodes().all().unwrap().len(), 1);
    }

    /// Returns everything in which two directories could differ.
    fn whole(store: &Store) -> [Option<String>; 3] {
        [CA, TICKETS, "ca.pem"].map(|name| store.dir.read(name).unwrap())
    }

    /// A store that has this CA, and its own copy of what it shares.
    fn at(place: &Path, shared: &SharedCa) -> Store {
        let store = Store::open(place, OpenMode::Create).unwrap();
        assert_eq!(store.take_up(shared).unwrap(), ImportOutcome::Now);
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
                let taken = store.take_up(shared);
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
                    assert_eq!(taken.unwrap(), ImportOutcome::Now, "{there} after {here}");
                    let after = store.shared().unwrap().files().unwrap();
                    assert!(after == shared.files().unwrap(), "{there} after {here}");
                    forward += 1;
                } else {
                    assert_eq!(taken.unwrap(), ImportOutcome::Before);
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
            assert_eq!(other.take_up(prepared).unwrap(), ImportOutcome::Diverged);
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
            assert_eq!(store.take_up(&pair[1]).unwrap(), ImportOutcome::Now);
            let before = whole(&store);
            assert_eq!(store.take_up(&pair[0]).unwrap(), ImportOutcome::Behind);
            assert_eq!(whole(&store), before);
            assert_eq!(store.take_up(&pair[1]).unwrap(), ImportOutcome::Before);
        }
        // Two gateways with different pending requests keep their own.
        let apart = at(&folder.path().join("apart"), &all[0]);
        history(&apart, &[Ca::request_listener_ca]);
        assert_eq!(apart.take_up(&all[1]).unwrap(), ImportOutcome::Diverged);
        history(&apart, &[import]);
        let before = whole(&apart);
        assert_eq!(apart.take_up(&all[2]).unwrap(), ImportOutcome::Diverged);
        assert_eq!(whole(&apart), before);
    }

    #[test]
    fn a_different_or_incomplete_ca_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), OpenMode::Create).unwrap();
        store.take_up(&SharedCa::new(ca())).unwrap();
        let roots = store.ca().unwrap().unwrap().bundle_pem();
        let refused = store.take_up(&SharedCa::new(ca())).unwrap_err();
        assert!(matches!(refused, StoreError::Exists { .. }), "{refused}");
        assert_eq!(store.ca().unwrap().unwrap().bundle_pem(), roots);
        keep(folder.path(), &SharedCa::new(ca()));
        for (name, text, says) in [(TICKETS, "short", "base64url"), (CA, "{}", "damaged")] {
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
