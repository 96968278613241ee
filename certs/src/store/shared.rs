//! What gateways of the same edges have in common: the CA and the secret of session tickets.
//!
//! A folder with both files says it, such as a Secret of a cluster. A data directory takes it up whole and keeps its own tokens
//! and nodes. One with another CA is left as it is, for its edges would be lost.

use super::{Store, StoreError, TICKETS, authority::CA, dir::failed};
use crate::ca::{Ca, CaFile, Step};
use crate::verify::TicketSecret;
use std::io;
use std::path::Path;

/// A CA and a secret of session tickets. `Debug` shows neither.
#[derive(Debug)]
pub struct Shared {
    ca: Ca,
    tickets: TicketSecret,
}

impl Shared {
    /// This CA, with a new secret.
    pub fn new(ca: Ca) -> Self {
        Self {
            ca,
            tickets: TicketSecret::random(),
        }
    }

    /// What the folder says.
    ///
    /// # Errors
    /// If one of the two is not there, or does not read.
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

    /// What each file says, by its name. All of it is secret.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn files(&self) -> Result<[(&'static str, String); 2], serde_json::Error> {
        let ca = serde_json::to_string_pretty(&CaFile::of(&self.ca))?;
        Ok([(CA, ca), (TICKETS, format!("{}\n", self.tickets.text()))])
    }
}

impl Store {
    /// What this directory shares with others. It has a CA.
    pub fn shared(&self) -> Result<Shared, StoreError> {
        let ca = self.ca()?.ok_or_else(|| StoreError::Missing {
            path: self.dir.path(CA),
        })?;
        let tickets = self.ticket_secret()?;
        Ok(Shared { ca, tickets })
    }

    /// Takes up what others share.
    ///
    /// # Errors
    /// If this directory has another CA, none of whose roots is in that one; then nothing has changed.
    pub fn take_up(&self, shared: &Shared) -> Result<Step, StoreError> {
        let _lock = self.dir.lock()?;
        let before = self.read_ca()?;
        let roots = shared.ca.fingerprints();
        if let Some(before) = &before
            && !before
                .fingerprints()
                .iter()
                .any(|root| roots.contains(root))
        {
            return Err(StoreError::Exists {
                path: self.dir.path(CA),
            });
        }
        let mut step = Step::Standing;
        let files = shared.files();
        // The CA comes last, without which nothing counts.
        for (name, text) in files
            .map_err(|error| self.dir.corrupt(CA, error))?
            .iter()
            .rev()
        {
            if self.dir.read(name)?.as_ref() != Some(text) {
                self.dir.write(name, text)?;
                step = Step::Made;
            }
        }
        self.settle(&shared.ca)?;
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::{NodeName, TrustDomain};
    use crate::store::{Access, NodeRecord};

    fn ca() -> Ca {
        Ca::create(&TrustDomain::parse("test.example").unwrap()).unwrap()
    }

    fn keep(folder: &Path, shared: &Shared) {
        for (name, text) in shared.files().unwrap() {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn what_is_shared_is_taken_up_through_a_rotation_and_nodes_stay() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| Store::open(folder.path().join(name), Access::Create).unwrap();
        let (one, other) = (place("one"), place("other"));
        let first = Shared::new(ca());
        keep(folder.path(), &first);
        let read = || Shared::read(folder.path()).unwrap();
        assert_eq!(one.take_up(&read()).unwrap(), Step::Made);
        assert_eq!(one.take_up(&read()).unwrap(), Step::Standing);
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
            assert_eq!(secret(&one) != before, gone, "with a root that is gone");
            keep(folder.path(), &shared);
            assert_eq!(other.take_up(&read()).unwrap(), Step::Made);
            let roots = |store: &Store| store.ca().unwrap().unwrap().bundle_pem();
            assert_eq!(roots(&one), roots(&other));
            assert!(secret(&one) == secret(&other));
        }
        assert_eq!(other.nodes().all().unwrap().len(), 1);
    }

    #[test]
    fn another_ca_or_half_of_one_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), Access::Create).unwrap();
        store.take_up(&Shared::new(ca())).unwrap();
        let roots = store.ca().unwrap().unwrap().bundle_pem();
        let refused = store.take_up(&Shared::new(ca())).unwrap_err();
        assert!(matches!(refused, StoreError::Exists { .. }), "{refused}");
        assert_eq!(store.ca().unwrap().unwrap().bundle_pem(), roots);
        keep(folder.path(), &Shared::new(ca()));
        for (name, text, says) in [(TICKETS, "short", "base64url"), (CA, "{}", "damaged")] {
            std::fs::write(folder.path().join(name), text).unwrap();
            let refused = Shared::read(folder.path()).unwrap_err().to_string();
            assert!(refused.contains(says), "{refused}");
            std::fs::remove_file(folder.path().join(name)).unwrap();
            let missing = Shared::read(folder.path()).unwrap_err();
            assert!(matches!(missing, StoreError::Missing { .. }), "{missing}");
            keep(folder.path(), &Shared::new(ca()));
        }
    }
}
