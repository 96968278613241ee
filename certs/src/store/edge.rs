//! The identity of an edge, in `edge.json`.

use super::atomic_file::StoreError;
use super::data_dir::Store;
use super::pending_csr::Requested;
use crate::edge_identity::{EdgeFile, EdgeIdentity};
use crate::gateway_revocations::GatewayRevocations;
use rustls_pki_types::UnixTime;
use std::path::PathBuf;

const EDGE_FILE: &str = "edge.json";
/// File of the id of the join token that created the identity in `edge.json`.
const JOINED_BY_FILE: &str = "joined-by";
/// File of the gateway addresses that an edge has received, if an external CA issues the edge's identity.
const GATEWAYS_FILE: &str = "gateways.json";
/// File of the revocations of gateways' certificates that an edge has received.
const REVOCATIONS_FILE: &str = "gateway-revocations.json";
/// New name of that file if it cannot be read.
const DAMAGED_REVOCATIONS_FILE: &str = "gateway-revocations.damaged";
/// Space that is reserved for an identity, in bytes: twice the size of one with two certificates, a key and some gateways.
const RESERVED_EDGE_BYTES: usize = 8 * 1024;

impl Store {
    /// Returns the edge's identity, if this edge has enrolled.
    pub fn edge(&self) -> Result<Option<EdgeIdentity>, StoreError> {
        let Some(file) = self.dir.read_json::<EdgeFile>(EDGE_FILE)? else {
            return Ok(None);
        };
        let mut edge =
            EdgeIdentity::from_file(file).map_err(|error| self.dir.corrupt(EDGE_FILE, error))?;
        edge.revoked_gateways = self.gateway_revocations();
        Ok(Some(edge))
    }

    /// Returns the revocations of gateways' certificates that an edge has received. If the file cannot be read, it is set aside,
    /// because the edge receives the revocations again from the next gateway.
    pub fn gateway_revocations(&self) -> GatewayRevocations {
        let stored = self.dir.read_json(REVOCATIONS_FILE);
        let set_aside = |error: StoreError| {
            let kept = self.dir.rename(REVOCATIONS_FILE, DAMAGED_REVOCATIONS_FILE);
            let kept = kept.map(|_| DAMAGED_REVOCATIONS_FILE);
            tracing::warn!(%error, ?kept, "the revocations of gateways cannot be read: the next gateway sends them again");
            GatewayRevocations::default()
        };
        stored.map_or_else(set_aside, Option::unwrap_or_default)
    }

    /// Stores the revocations of gateways' certificates that an edge has received.
    pub fn save_gateway_revocations(&self, all: &GatewayRevocations) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write_json(REVOCATIONS_FILE, all)
    }

    /// Checks that an edge's identity can be stored, before a token is spent on it.
    pub fn check_edge_space(&self) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.check_space(EDGE_FILE, RESERVED_EDGE_BYTES)
    }

    /// Replaces the edge's stored identity, atomically. If an external CA issues the identity, only the received gateway
    /// addresses are stored.
    pub fn save_edge(&self, edge: &EdgeIdentity) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        if edge.is_external {
            return self.dir.write_json(GATEWAYS_FILE, &edge.gateways);
        }
        self.dir.write_json(EDGE_FILE, &edge.to_file())
    }

    /// Stores the identity that came from the join token with this id, or from the node's cluster. The previous identity
    /// stays in the directory. Returns its new path.
    pub fn replace_edge(
        &self,
        edge: &EdgeIdentity,
        token: Option<&str>,
    ) -> Result<Option<PathBuf>, StoreError> {
        let _lock = self.dir.lock()?;
        let backup_path = match self.dir.read(EDGE_FILE)? {
            Some(text) => {
                let name = self.unused_backup_name();
                self.dir.write(&name, &text)?;
                Some(self.dir.path(&name))
            }
            None => None,
        };
        self.dir.write_json(EDGE_FILE, &edge.to_file())?;
        match token {
            // Last: after a crash before this write, the used token is only refused again.
            Some(id) => self.dir.write(JOINED_BY_FILE, &format!("{id}\n"))?,
            None => self.dir.remove(JOINED_BY_FILE)?,
        }
        Ok(backup_path)
    }

    /// Gives up the edge's identity, which stays in the directory under another name. Returns its new path, or `None` if
    /// there is no identity. The file is not parsed, so that a damaged one can be given up as well.
    pub fn leave_edge(&self) -> Result<Option<PathBuf>, StoreError> {
        let _lock = self.dir.lock()?;
        let name = self.unused_backup_name();
        let was_renamed = self.dir.rename(EDGE_FILE, &name)?;
        self.dir.remove(JOINED_BY_FILE)?;
        self.remove_request(Requested::Identity)?;
        Ok(was_renamed.then(|| self.dir.path(&name)))
    }

    /// Returns an unused name for an identity that is set aside.
    fn unused_backup_name(&self) -> String {
        let mut suffix = UnixTime::now().as_secs();
        loop {
            let name = format!("edge-replaced-{suffix}.json");
            if !self.dir.path(&name).exists() {
                return name;
            }
            suffix += 1;
        }
    }

    /// Returns the id of the join token that created the edge's identity, if there was a token and its id was recorded.
    pub fn joined_by(&self) -> Result<Option<String>, StoreError> {
        let id = self.dir.read(JOINED_BY_FILE)?;
        Ok(id.map(|id| id.trim().to_owned()))
    }

    /// Returns the gateway addresses that an edge has received, if an external CA issues the edge's identity.
    pub fn learned_gateways(&self) -> Result<Vec<String>, StoreError> {
        let learned = self.dir.read_json::<Vec<String>>(GATEWAYS_FILE)?;
        Ok(learned.unwrap_or_default())
    }
}
