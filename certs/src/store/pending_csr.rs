//! Stored certificate requests that wait for an answer, and the certificates that a gateway received for them. A process that
//! restarts continues to wait for the same request.

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
    /// Returns the name of the file of the pending request.
    fn pending_file(self) -> String {
        match self {
            Self::Identity => "request.json".to_owned(),
            Self::AppClient(port) => format!("request-app-{port}.json"),
        }
    }

    /// Returns the name of the file of a gateway's certificate.
    fn certificate_file(self) -> String {
        match self {
            Self::Identity => "identity.pem".to_owned(),
            Self::AppClient(port) => format!("app-{port}.pem"),
        }
    }
}

/// Space that is reserved for a key and a chain, in bytes.
const RESERVED_CERTIFICATE_BYTES: usize = 16 * 1024;

/// A pending request and its key.
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
    /// Creates a record of a request for this key.
    pub fn new(name: String, asks: String, since: u64, key: &PrivateKey) -> Self {
        Self {
            name,
            asks,
            since,
            key: key.key_pem().expose().to_owned(),
        }
    }

    /// Returns the key.
    pub fn key(&self) -> Result<PrivateKey, CsrError> {
        PrivateKey::load(&self.key)
    }
}

impl Store {
    /// Returns the pending request, if any.
    pub fn pending(&self, kind: Requested) -> Result<Option<PendingCsr>, StoreError> {
        self.dir.read_json(&kind.pending_file())
    }

    /// Stores the pending request, before it is submitted.
    pub fn save_pending(&self, kind: Requested, pending: &PendingCsr) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write_json(&kind.pending_file(), pending)
    }

    /// Removes the pending request.
    pub fn remove_pending(&self, kind: Requested) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.remove_request(kind)
    }

    /// Removes the request. The calling code must hold the lock.
    pub(super) fn remove_request(&self, kind: Requested) -> Result<(), StoreError> {
        self.dir.remove(&kind.pending_file())
    }
}

/// Certificates that a gateway's cluster has issued for it.
impl Store {
    /// Returns the path of a certificate that a gateway's cluster issues. Chain and key are in one file, so that they change
    /// at once.
    pub fn issued_certificate_path(data_dir: &Path, kind: Requested) -> PathBuf {
        data_dir.join(kind.certificate_file())
    }

    /// Checks that such a certificate can be stored, before it is requested.
    pub fn check_issued_certificate_space(&self, kind: Requested) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir
            .check_space(&kind.certificate_file(), RESERVED_CERTIFICATE_BYTES)
    }

    /// Returns the stored certificate and key.
    pub fn issued_certificate(&self, kind: Requested) -> Result<Option<String>, StoreError> {
        self.dir.read(&kind.certificate_file())
    }

    /// Replaces the stored certificate and key.
    pub fn save_issued_certificate(&self, kind: Requested, text: &str) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write(&kind.certificate_file(), text)
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
        store.remove_pending(Requested::Identity).unwrap();
        store.remove_pending(Requested::Identity).unwrap();
        assert_eq!(store.pending(Requested::Identity).unwrap(), None);
    }
}
