//! The data directory: all state that outlives a process, typed.
//!
//! `ca.json`, `ca.pem` and `tickets.key` of the gateway, `tokens.json`, `nodes.json`, `pins.json`, `edge.json` of an edge, and
//! small `run-…` files by which one command finds another's process; `version` names the format of the files. The directory has
//! mode 0700 and each file 0600. Each file belongs to the directory's user, whichever user wrote it. The store never repairs: it
//! names a file that cannot be parsed, and the process stops. `atomic_file` reads and writes the files. Every method here blocks
//! on the disk.

mod atomic_file;
mod backup;
mod ca;
mod file_owner;
mod pending_csr;
mod pins;
mod shared_ca;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};

pub use atomic_file::StoreError;
pub(crate) use atomic_file::{Dir, Lock};
pub use backup::Backup;
pub use file_owner::open_private;
pub use pending_csr::{PendingCsr, Requested};
pub use pins::{Pin, PinTable, Pins};
pub use shared_ca::{ImportOutcome, SharedCa};

use crate::ca::IssuedCertificate;
use crate::edge_identity::{EdgeFile, EdgeIdentity};
use crate::name::NodeName;
use crate::secret::Fingerprint;
use crate::token::NodeAttributes;
use crate::verify::TicketSecret;

const VERSION_FILE: &str = "version";
/// The version of the files that this program reads and writes.
const VERSION: &str = "1";
/// File of the secret from which the keys of session tickets are derived.
const TICKETS: &str = "tickets.key";
const NODES: &str = "nodes.json";
const EDGE: &str = "edge.json";
/// File of the id of the join token that created the identity in `edge.json`.
const JOINED_BY: &str = "joined-by";
/// File of the gateways that an edge has learned, if an external CA makes the edge's identity.
const GATEWAYS: &str = "gateways.json";
/// Twice what an identity takes with two certificates, a key and some gateways, in bytes.
const EDGE_SIZE: usize = 8 * 1024;

/// Whether a data directory may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Create the directory if it does not exist.
    Create,
    /// The directory must exist.
    Existing,
}

/// Exclusive claim on a data directory. It is released when the value is dropped.
#[derive(Debug)]
pub struct DirLock {
    lock: Lock,
    dir: Dir,
}

impl DirLock {
    /// Releases the directory. The result then shows whether another process has claimed it.
    pub fn release(self) -> ReleasedClaim {
        ReleasedClaim {
            claimed: self.lock.modified(),
            dir: self.dir,
        }
    }
}

/// Former claim of a process that goes on for a while.
#[derive(Debug)]
pub struct ReleasedClaim {
    claimed: Option<SystemTime>,
    dir: Dir,
}

impl ReleasedClaim {
    /// Whether another process has claimed the directory since.
    pub fn is_taken(&self) -> bool {
        self.dir.claimed() != self.claimed
    }
}

/// An open data directory. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    dir: Dir,
}

impl Store {
    /// Opens the directory and checks its version.
    pub fn open(path: impl AsRef<Path>, access: OpenMode) -> Result<Self, StoreError> {
        let dir = match access {
            OpenMode::Create => Dir::create(path.as_ref())?,
            OpenMode::Existing => Dir::existing(path.as_ref())?,
        };
        match (dir.read(VERSION_FILE)?, access) {
            (Some(version), _) if version.trim() == VERSION => {}
            (Some(version), _) => {
                let why = format!(
                    "it says version '{}' and this program reads {VERSION}",
                    version.trim().chars().take(20).collect::<String>()
                );
                return Err(dir.corrupt(VERSION_FILE, why));
            }
            (None, OpenMode::Create) => {
                let _lock = dir.lock()?;
                dir.write(VERSION_FILE, &format!("{VERSION}\n"))?;
            }
            // A CA that was copied from another gateway, as for several of them: of this version, or it cannot be read.
            (None, OpenMode::Existing) if dir.path(ca::CA).exists() => {}
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

    /// Whether a gateway has it, or is going to: there is a CA, or what a gateway makes when it starts.
    pub fn is_of_a_gateway(&self) -> bool {
        let there = |name: &str| self.dir.path(name).exists();
        there(TICKETS) || there(ca::CA) || there(ca::ROOTS)
    }

    /// The secret of session tickets, made at the first call. Gateways that share it resume each other's sessions.
    pub fn ticket_secret(&self) -> Result<TicketSecret, StoreError> {
        let _lock = self.dir.lock()?;
        if let Some(text) = self.dir.read(TICKETS)? {
            let why =
                "it is not 32 bytes in base64url; without the file, the next start makes another";
            return TicketSecret::parse(&text).ok_or_else(|| self.dir.corrupt(TICKETS, why));
        }
        let secret = TicketSecret::random();
        self.dir.write(TICKETS, &format!("{}\n", secret.text()))?;
        Ok(secret)
    }

    /// The enrolled nodes.
    pub fn nodes(&self) -> NodeStore {
        NodeStore {
            dir: self.dir.clone(),
        }
    }

    /// The edge's identity, if this edge has enrolled.
    pub fn edge(&self) -> Result<Option<EdgeIdentity>, StoreError> {
        let Some(file) = self.dir.read_json::<EdgeFile>(EDGE)? else {
            return Ok(None);
        };
        EdgeIdentity::from_file(file)
            .map(Some)
            .map_err(|error| self.dir.corrupt(EDGE, error))
    }

    /// Takes the directory for this process, which is going to live on it. Commands that only change a file
    /// need no claim.
    pub fn claim(&self) -> Result<DirLock, StoreError> {
        let (lock, dir) = (self.dir.claim()?, self.dir.clone());
        Ok(DirLock { lock, dir })
    }

    /// Checks that an edge's identity can be stored, before a token is spent on it.
    pub fn prepare_edge(&self) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.rehearse(EDGE, EDGE_SIZE)
    }

    /// Stores an edge's identity in place of the one before, atomically. If an external CA makes the identity, only the learned
    /// gateways are stored.
    pub fn save_edge(&self, edge: &EdgeIdentity) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        if edge.given {
            return self.dir.write_json(GATEWAYS, &edge.gateways);
        }
        self.dir.write_json(EDGE, &edge.to_file())
    }

    /// Stores the identity that came from a join token of this id, or from the node's cluster. The identity before it stays in
    /// the directory. Returns the new place of the old identity.
    pub fn replace_edge(
        &self,
        edge: &EdgeIdentity,
        token: Option<&str>,
    ) -> Result<Option<PathBuf>, StoreError> {
        let _lock = self.dir.lock()?;
        let kept = match self.dir.read(EDGE)? {
            Some(text) => {
                let name = self.unused_name();
                self.dir.write(&name, &text)?;
                Some(self.dir.path(&name))
            }
            None => None,
        };
        self.dir.write_json(EDGE, &edge.to_file())?;
        match token {
            // Last: a token that was spent for nothing is only refused once more.
            Some(id) => self.dir.write(JOINED_BY, &format!("{id}\n"))?,
            None => self.dir.remove(JOINED_BY)?,
        }
        Ok(kept)
    }

    /// Gives up the edge's identity, which stays in the directory under another name: returns its new place, or `None` if
    /// there is no identity. The file is not read, so that one that is damaged can be given up as well.
    pub fn leave_edge(&self) -> Result<Option<PathBuf>, StoreError> {
        let _lock = self.dir.lock()?;
        let name = self.unused_name();
        let left = self.dir.rename(EDGE, &name)?;
        self.dir.remove(JOINED_BY)?;
        self.forget_request(Requested::Identity)?;
        Ok(left.then(|| self.dir.path(&name)))
    }

    /// Returns an unused name for an identity that is set aside.
    fn unused_name(&self) -> String {
        let mut at = UnixTime::now().as_secs();
        loop {
            let name = format!("edge-replaced-{at}.json");
            if !self.dir.path(&name).exists() {
                return name;
            }
            at += 1;
        }
    }

    /// Returns the id of the join token that created the edge's identity, if there was a token and its id was recorded.
    pub fn joined_by(&self) -> Result<Option<String>, StoreError> {
        let id = self.dir.read(JOINED_BY)?;
        Ok(id.map(|id| id.trim().to_owned()))
    }

    /// Returns the gateways that an edge has learned, if an external CA makes the edge's identity.
    pub fn learned_gateways(&self) -> Result<Vec<String>, StoreError> {
        let learned = self.dir.read_json::<Vec<String>>(GATEWAYS)?;
        Ok(learned.unwrap_or_default())
    }

    /// Returns the path of the unix socket at which the running process takes commands.
    pub fn admin_socket(&self) -> PathBuf {
        self.dir.path(&format!("{}.sock", runtime("admin")))
    }

    /// Notes a small fact about the running process, such as its admin address.
    pub fn write_runtime(&self, name: &str, text: &str) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.write(&runtime(name), text)
    }

    /// Reads such a fact.
    pub fn read_runtime(&self, name: &str) -> Result<Option<String>, StoreError> {
        self.dir.read(&runtime(name))
    }

    /// Forgets such a fact, as a process does that ends.
    pub fn remove_runtime(&self, name: &str) -> Result<(), StoreError> {
        self.dir.remove(&runtime(name))
    }
}

/// Returns the name of a run file. `name` is chosen by our code; any content is made safe, so that the file stays in the
/// directory.
fn runtime(name: &str) -> String {
    let safe: String = name
        .chars()
        .map(|char| {
            if char.is_ascii_alphanumeric() {
                char
            } else {
                '-'
            }
        })
        .collect();
    format!("run-{safe}")
}

/// Record of a node, as confirmed by enrolment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// The node.
    pub node: NodeName,
    /// Confirmed addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// Confirmed pool of the node.
    pub pool: Option<String>,
    /// Confirmed labels of the node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Time of the last enrolment, in Unix seconds: certificates from before are no longer the node's own.
    pub enrolled_at: u64,
    /// Serial number of its certificate, in hexadecimal.
    pub serial: String,
    /// Root above the certificate. It is unknown for certificates from before roots could be replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Fingerprint>,
    /// Last second of the certificate, in Unix time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<u64>,
    /// Start and reason of the node's revocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Revocation>,
    /// Whether the cluster decides if the node is at the edge, if the cluster is watched and has a Node of this name. Then
    /// neither a token nor a command names this very node. Records of older versions lack the field, and count as named.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_cluster: bool,
}

/// An update of a node's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeUpdate {
    /// The node has connected with a certificate of an external CA, without enrolment. Facts that are recorded already stay.
    Arrived {
        /// Time of the connection, in Unix seconds.
        at: u64,
    },
    /// Next certificate of the node. It is not recorded for a revoked node.
    Renewed(IssuedCertificate),
    /// The node has joined anew by its identity in the cluster; facts that a token has confirmed stay.
    Joined {
        /// Certificates from before, in Unix seconds, are not its own any more.
        at: u64,
        /// Certificate of the node. It is not recorded for a revoked node.
        issued: IssuedCertificate,
    },
}

impl NodeRecord {
    /// Returns the record of a node of which only the name is known, because an external CA makes its certificates.
    pub fn arrived(node: &NodeName, at: u64) -> Self {
        Self {
            node: node.clone(),
            addresses: Vec::new(),
            pool: None,
            labels: BTreeMap::new(),
            enrolled_at: at,
            serial: String::new(),
            root: None,
            not_after: None,
            revoked: None,
            follows_cluster: true,
        }
    }

    /// Records this certificate, unless the node is revoked.
    fn note(&mut self, issued: &IssuedCertificate) {
        if self.revoked.is_none() {
            self.serial = issued.serial_hex();
            self.root = Some(issued.root);
            self.not_after = Some(issued.not_after.as_secs());
        }
    }
}

/// Revocation of a node, in force until the node is allowed again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    /// Start of the revocation, in Unix seconds.
    pub at: u64,
    /// Reason, for people.
    pub reason: String,
}

/// The enrolled nodes of one data directory.
#[derive(Debug, Clone)]
pub struct NodeStore {
    dir: Dir,
}

impl NodeStore {
    /// Notes a node in place of what was known of it; one that is revoked stays so.
    pub fn put(&self, record: NodeRecord) -> Result<(), StoreError> {
        self.put_all([record])
    }

    /// Stores many records like [`NodeStore::put`], but with one write: one by one, each would rewrite all before it.
    pub fn put_all(&self, records: impl IntoIterator<Item = NodeRecord>) -> Result<(), StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                for mut record in records {
                    if let Some(before) = nodes.get(&record.node) {
                        record.revoked.clone_from(&before.revoked);
                    }
                    nodes.insert(record.node.clone(), record);
                }
                Ok(())
            })
    }

    /// Makes many changes by one write, for a fleet that comes at once. What is known of each node then; nothing of one
    /// that is not known.
    pub fn change(
        &self,
        changes: &[(NodeName, NodeUpdate)],
    ) -> Result<Vec<Option<NodeRecord>>, StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                let made = changes.iter().map(|(node, change)| match change {
                    NodeUpdate::Arrived { at } => {
                        let record = || NodeRecord::arrived(node, *at);
                        Some(nodes.entry(node.clone()).or_insert_with(record).clone())
                    }
                    NodeUpdate::Renewed(issued) => nodes.get_mut(node).map(|record| {
                        record.note(issued);
                        record.clone()
                    }),
                    NodeUpdate::Joined { at, issued } => {
                        let record = || NodeRecord::arrived(node, *at);
                        let record = nodes.entry(node.clone()).or_insert_with(record);
                        if record.revoked.is_none() {
                            record.enrolled_at = record.enrolled_at.max(*at);
                        }
                        record.note(issued);
                        Some(record.clone())
                    }
                });
                Ok(made.collect())
            })
    }

    /// Records that a node is revoked, whether it has a record or not.
    pub fn shut_out(&self, node: &NodeName, revoked: &Revocation) -> Result<(), StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                let record = || NodeRecord::arrived(node, revoked.at);
                let known = nodes.entry(node.clone()).or_insert_with(record);
                known.revoked = Some(revoked.clone());
                Ok(())
            })
    }

    /// Sets or removes the revocation of a node. Returns whether the node has a record.
    pub fn set_revoked(
        &self,
        node: &NodeName,
        revoked: Option<Revocation>,
    ) -> Result<bool, StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                let known = nodes.get_mut(node);
                Ok(known.map(|record| record.revoked = revoked).is_some())
            })
    }

    /// Changes the set of revoked nodes, and returns it. Nothing is written if nothing changes.
    pub fn change_revoked(
        &self,
        change: impl FnOnce(&mut BTreeMap<NodeName, Revocation>),
    ) -> Result<BTreeMap<NodeName, Revocation>, StoreError> {
        let _lock = self.dir.lock()?;
        let nodes = self
            .dir
            .read_json::<BTreeMap<NodeName, NodeRecord>>(NODES)?;
        let mut nodes = nodes.unwrap_or_default();
        let revoked =
            |(name, node): (&NodeName, &NodeRecord)| Some((name.clone(), node.revoked.clone()?));
        let before: BTreeMap<_, _> = nodes.iter().filter_map(revoked).collect();
        let mut after = before.clone();
        change(&mut after);
        if after == before {
            return Ok(after);
        }
        for (name, node) in &mut nodes {
            node.revoked = after.get(name).cloned();
        }
        for (name, revoked) in &after {
            if !nodes.contains_key(name) {
                let mut node = NodeRecord::arrived(name, revoked.at);
                node.revoked = Some(revoked.clone());
                nodes.insert(name.clone(), node);
            }
        }
        self.dir.write_json(NODES, &nodes)?;
        Ok(after)
    }

    /// Notes what is confirmed of a node, in place of what was; all else that is known of it stays.
    pub fn confirm(
        &self,
        node: &NodeName,
        confirmed: NodeAttributes,
        at: u64,
    ) -> Result<(), StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                let known = nodes.remove(node);
                let record = NodeRecord {
                    addresses: confirmed.addresses,
                    pool: confirmed.pool,
                    labels: confirmed.labels,
                    follows_cluster: false,
                    ..known.unwrap_or_else(|| NodeRecord::arrived(node, at))
                };
                nodes.insert(node.clone(), record);
                Ok(())
            })
    }

    /// Forgets a node; whether it was known.
    pub fn remove(&self, node: &NodeName) -> Result<bool, StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                Ok(nodes.remove(node).is_some())
            })
    }

    /// Fails if the file of nodes is missing. Code that has read the file before must not take a missing file for an empty one.
    pub fn require(&self) -> Result<(), StoreError> {
        self.dir.require(NODES)
    }

    /// Returns all nodes, by name.
    pub fn all(&self) -> Result<Vec<NodeRecord>, StoreError> {
        let nodes = self
            .dir
            .read_json::<BTreeMap<NodeName, NodeRecord>>(NODES)?;
        Ok(nodes.unwrap_or_default().into_values().collect())
    }
}

#[cfg(test)]
mod tests;
