//! Stored certificate requests that wait for an answer, and the certificates that a gateway received for them. A process that
//! restarts goes on waiting for the same request.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::atomic_file::StoreError;
use super::data_dir::Store;
use crate::csr::{CsrError, PrivateKey};

/// The certificate that a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// Certificate of the edge or of the gateway's tunnel port.
    Identity,
    /// Client certificate of the gateway at the upstreams of this port.
    AppClient(u16),
}

impl Requested {
    /// The file of the request that waits.
    fn pending(self) -> String {
        match self {
            Self::Identity => "request.json".to_owned(),
            Self::AppClient(port) => format!("request-app-{port}.json"),
        }
    }

    /// The file of the certificate, for a gateway.
    fn made(self) -> String {
        match self {
            Self::Identity => "identity.pem".to_owned(),
            Self::AppClient(port) => format!("app-{port}.pem"),
        }
    }
}

/// Room for a key and a chain.
const MADE_SIZE: usize = 16 * 1024;

/// A request, and the key that it is for.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PendingCsr {
    /// Name of the request at the signer.
    pub name: String,
    /// Description of the request and its signer, in the format of the code that made it.
    pub asks: String,
    /// Time when the request was made, in Unix seconds.
    pub since: u64,
    key: String,
}

impl fmt::Debug for PendingCsr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({}, {})", self.name, self.asks)
    }
}

impl PendingCsr {
    /// A request for this key.
    pub fn new(name: String, asks: String, since: u64, key: &PrivateKey) -> Self {
        Self {
            name,
            asks,
            since,
            key: key.key_pem().expose().to_owned(),
        }
    }

    /// The key.
    pub fn key(&self) -> Result<PrivateKey, CsrError> {
        PrivateKey::load(&self.key)
    }
}

impl Store {
    /// Returns the pending request, if any.
    pub fn pending(&self, what: Requested) -> Result<Option<PendingCsr>, StoreError> {
        self.dir.read_json(&what.pending())
    }

    /// Stores the pending request, before it is submitted.
    pub fn save_pending(&self, what: Requested, pending: &PendingCsr) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write_json(&what.pending(), pending)
    }

    /// Removes the pending request.
    pub fn forget_pending(&self, what: Requested) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.forget_request(what)
    }

    /// Removes the request. Under the lock only.
    pub(super) fn forget_request(&self, what: Requested) -> Result<(), StoreError> {
        self.dir.remove(&what.pending())
    }
}

/// Certificates that a gateway's cluster has made for it.
impl Store {
    /// The file of a certificate that a gateway's cluster makes: chain and key in one, so that they change at once.
    pub fn made_path(data_dir: &Path, what: Requested) -> PathBuf {
        data_dir.join(what.made())
    }

    /// Checks that such a certificate can be stored, before it is requested.
    pub fn prepare_made(&self, what: Requested) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.rehearse(&what.made(), MADE_SIZE)
    }

    /// Returns the stored certificate and key.
    pub fn made(&self, what: Requested) -> Result<Option<String>, StoreError> {
        self.dir.read(&what.made())
    }

    /// Stores the certificate and key in place of the ones before.
    pub fn save_made(&self, what: Requested, text: &str) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write(&what.made(), text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenMode;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_pending_request_survives_restart_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), OpenMode::Create).unwrap();
        assert_eq!(store.pending(Requested::Identity).unwrap(), None);
        let key = PrivateKey::generate().unwrap();
        let pending = PendingCsr::new("name".to_owned(), "all".to_owned(), 1, &key);
        store.save_pending(Requested::Identity, &pending).unwrap();
        let again = Store::open(dir.path(), OpenMode::Existing).unwrap();
        let kept = again.pending(Requested::Identity).unwrap().unwrap();
        assert_eq!(kept, pending);
        assert_eq!(kept.key().unwrap().key_pem(), key.key_pem());
        let mode = std::fs::metadata(dir.path().join("request.json")).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
        store.forget_pending(Requested::Identity).unwrap();
        store.forget_pending(Requested::Identity).unwrap();
        assert_eq!(store.pending(Requested::Identity).unwrap(), None);
    }
}
