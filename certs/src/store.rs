//! The data directory: everything that outlives a process, typed.
//!
//! `ca.json`, `ca.pem` and `tickets.key` of the gateway, `tokens.json`, `nodes.json`, `pins.json`, `edge.json` of an edge, and
//! small `run-…` files by which one command finds another's process; `version` says how to read
//! them. The directory is 0700 and each file 0600, of the directory's user whoever wrote it.
//! Never repairs: a file that does not read is named, and the process stops. How a file is read
//! and written is `dir`'s; every call here blocks on the disk.

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
/// What the keys of session tickets follow from.
const TICKETS: &str = "tickets.key";
const NODES: &str = "nodes.json";
const EDGE: &str = "edge.json";
/// The id of the join token that has brought the identity in `edge.json`.
const JOINED_BY: &str = "joined-by";
/// What an edge has learned of gateways, where another system keeps its identity.
const GATEWAYS: &str = "gateways.json";
/// Twice what an identity takes with two certificates, a key and some gateways, in bytes.
const EDGE_SIZE: usize = 8 * 1024;

/// Whether a data directory may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Make it where there is none.
    Create,
    /// It must be there.
    Existing,
}

/// The right to live on a data directory; dropping it gives it back.
#[derive(Debug)]
pub struct DirLock {
    lock: Lock,
    dir: Dir,
}

impl DirLock {
    /// Gives the directory back, and tells from then on whether another process has claimed it.
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

    /// Makes sure that an edge's identity can be kept, before a token is given for it.
    pub fn prepare_edge(&self) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        self.dir.rehearse(EDGE, EDGE_SIZE)
    }

    /// Keeps an edge's identity in place of the one before, all of it at once. Of one that another system keeps, these
    /// are the gateways that it has learned.
    pub fn save_edge(&self, edge: &EdgeIdentity) -> Result<(), StoreError> {
        let _lock = self.dir.lock()?;
        if edge.given {
            return self.dir.write_json(GATEWAYS, &edge.gateways);
        }
        self.dir.write_json(EDGE, &edge.to_file())
    }

    /// Keeps the identity that a join token of this id, or the node's cluster, has brought. The identity before it stays in
    /// the directory: returns its new place.
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

    /// A name for an identity that is kept aside.
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

    /// The id of the join token that has brought the edge's identity, if a token has and that was noted.
    pub fn joined_by(&self) -> Result<Option<String>, StoreError> {
        let id = self.dir.read(JOINED_BY)?;
        Ok(id.map(|id| id.trim().to_owned()))
    }

    /// The gateways that an edge has learned whose identity another system keeps.
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

/// `name` is a word of ours; whatever it holds, it stays in the directory.
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

/// What enrolment has confirmed of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// The node.
    pub node: NodeName,
    /// Its confirmed addresses.
    pub addresses: Vec<IpAddr>,
    /// Its confirmed pool.
    pub pool: Option<String>,
    /// Its confirmed labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// When it joined last, in Unix seconds: certificates from before are not its own any more.
    pub enrolled_at: u64,
    /// Serial number of its certificate, in hexadecimal.
    pub serial: String,
    /// The root on which that hangs; unknown of certificates from before roots could be replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Fingerprint>,
    /// Its last second, in Unix time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<u64>,
    /// Since when it is not welcome, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Revocation>,
    /// Whether the cluster, where one is followed and has a Node of this name, says if it is at the edge: neither a token nor
    /// a command names this very node. Records of older versions do not say, and count as named.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_cluster: bool,
}

/// What is to be noted of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeUpdate {
    /// It has come by a certificate of another system, and nobody has let it join; what is known already stays.
    Arrived {
        /// When, in Unix seconds.
        at: u64,
    },
    /// Its next certificate, which is not noted of a node that is revoked.
    Renewed(IssuedCertificate),
    /// It has joined anew, since its cluster says who it is; what a token has confirmed stays.
    Joined {
        /// Certificates from before, in Unix seconds, are not its own any more.
        at: u64,
        /// Its certificate, which is not noted of a node that is revoked.
        issued: IssuedCertificate,
    },
}

impl NodeRecord {
    /// A node of which only the name is known, whose certificates another system makes.
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

    /// Its certificate is this one, unless it is revoked.
    fn note(&mut self, issued: &IssuedCertificate) {
        if self.revoked.is_none() {
            self.serial = issued.serial_hex();
            self.root = Some(issued.root);
            self.not_after = Some(issued.not_after.as_secs());
        }
    }
}

/// A node is not welcome any more, until it is allowed again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    /// Since then, in Unix seconds.
    pub at: u64,
    /// Why, for people.
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

    /// As [`NodeStore::put`] for many, which take the disk once: one by one, each would rewrite all before it.
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

    /// Notes that a node is not welcome, whether it is known or not.
    pub fn shut_out(&self, node: &NodeName, revoked: &Revocation) -> Result<(), StoreError> {
        self.dir
            .update(NODES, |nodes: &mut BTreeMap<NodeName, NodeRecord>| {
                let record = || NodeRecord::arrived(node, revoked.at);
                let known = nodes.entry(node.clone()).or_insert_with(record);
                known.revoked = Some(revoked.clone());
                Ok(())
            })
    }

    /// Notes that a node is not welcome any more, or that it is again; whether it is known.
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

    /// Changes which nodes are not welcome, and returns these. Nothing is written if nothing changes.
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

    /// Fails if the file of nodes is missing: whoever has read it before must not take that for an empty one.
    pub fn require(&self) -> Result<(), StoreError> {
        self.dir.require(NODES)
    }

    /// All nodes, by name.
    pub fn all(&self) -> Result<Vec<NodeRecord>, StoreError> {
        let nodes = self
            .dir
            .read_json::<BTreeMap<NodeName, NodeRecord>>(NODES)?;
        Ok(nodes.unwrap_or_default().into_values().collect())
    }
}

#[cfg(test)]
mod tests;
