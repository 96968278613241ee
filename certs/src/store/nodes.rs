//! Records of the enrolled nodes, in `nodes.json`, and the ends of revocations, in `revocations-ended.json`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use causeway_tls::{Fingerprint, NodeName};
use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};

use super::atomic_file::{Dir, OtherFields, StoreError};
use super::data_dir::{NODES_FILE, Store};
use crate::ca::IssuedCertificate;
use crate::token::NodeAttributes;

/// File of the ends of revocations.
pub(super) const ENDED_FILE: &str = "revocations-ended.json";
/// Time for which the end of a revocation is stored, in seconds. A backup of the shared state that is older brings the revocation
/// or the removed node back.
const ENDED_RETENTION_SECS: u64 = 90 * 86_400;

/// Record of a node, as confirmed by enrolment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Time of the last enrolment, in Unix seconds. Earlier certificates of the node are no longer accepted.
    pub enrolled_at: u64,
    /// Order of the last enrolment among all enrolments of the node, if the time is not: an earlier enrolment has a later time, because
    /// the clock of its gateway was ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u64>,
    /// Serial number of the node's certificate, in hexadecimal.
    pub serial: String,
    /// Root above the certificate. It is unknown for certificates from before the support of rotation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Fingerprint>,
    /// Last second of the certificate, in Unix time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<u64>,
    /// Start and reason of the node's revocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Revocation>,
    /// Whether the cluster decides if the node is at the edge. This requires that the cluster is watched and has a Node of
    /// this name. If set, neither a token nor a command names this node. Records of older versions lack the field, and count
    /// as named.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_cluster: bool,
    /// SHA-256 of the public key with which the node last joined by a token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub join_key: Option<Fingerprint>,
    /// Fields of later versions.
    #[serde(flatten)]
    pub other: OtherFields,
}

/// Update of a node's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeUpdate {
    /// The node has connected with a certificate of an external CA, without enrolment. Attributes that are already recorded
    /// stay.
    Connected {
        /// Time of the connection, in Unix seconds.
        at: u64,
    },
    /// Next certificate of the node. It is not recorded for a revoked node.
    Renewed(IssuedCertificate),
    /// The node has joined again by its identity in the cluster. Attributes that a token has confirmed stay.
    Joined {
        /// Time of the join, in Unix seconds. Certificates from before are no longer accepted.
        at: u64,
        /// Certificate of the node. It is not recorded for a revoked node.
        issued: IssuedCertificate,
    },
}

impl NodeRecord {
    /// Returns the record of a node with only its name, because an external CA issues its certificates.
    pub fn name_only(node: &NodeName, at: u64) -> Self {
        Self {
            node: node.clone(),
            addresses: Vec::new(),
            pool: None,
            labels: BTreeMap::new(),
            enrolled_at: at,
            order: None,
            serial: String::new(),
            root: None,
            not_after: None,
            revoked: None,
            follows_cluster: true,
            join_key: None,
            other: OtherFields::new(),
        }
    }

    /// Returns the order of the last enrolment among all enrolments of the node.
    pub fn order(&self) -> u64 {
        self.order.unwrap_or_default().max(self.enrolled_at)
    }

    /// Orders this enrolment behind an earlier one.
    pub fn follow(&mut self, earlier: &Self) {
        if earlier.order() > self.order() {
            self.order = Some(earlier.order().saturating_add(1));
        }
    }

    /// Orders this enrolment behind the removal of the node: the clock of the gateway at which the node was enrolled or removed may
    /// have been ahead.
    pub fn follow_removal(&mut self, removal: &RevocationEntry) {
        if let Some(last) = removal.removed.filter(|_| removal.removes(self)) {
            self.order = Some(last.saturating_add(1));
        }
    }

    /// Records this certificate, unless the node is revoked.
    fn record_certificate(&mut self, issued: &IssuedCertificate) {
        if self.revoked.is_none() {
            self.serial = issued.serial_hex();
            self.root = Some(issued.root);
            self.not_after = Some(issued.not_after.as_secs());
        }
    }
}

/// Revocation of a node, in force until the node is allowed again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Start of the revocation, in Unix seconds.
    pub at: u64,
    /// Reason, for people.
    pub reason: String,
    /// Fields of later versions.
    #[serde(flatten)]
    pub other: OtherFields,
}

/// Value of the entry `revoked/NAME`: a revocation in force, or the end of one.
///
/// The absence of an entry is also the result of a restored backup, so it never ends a revocation. The end has a value of its
/// own. It also states that a node was removed, so that the record does not come back from a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationEntry {
    /// The revocation. For the removal of a node that was not revoked, its time is that of the enrolment.
    #[serde(flatten)]
    pub revocation: Revocation,
    /// Time of the end, in Unix seconds. `None` while the revocation is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifted: Option<u64>,
    /// Set if the node was removed: the record of an enrolment at this time or earlier does not come back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed: Option<u64>,
}

/// Ends of revocations, by node.
pub(super) type EndedRevocations = BTreeMap<NodeName, RevocationEntry>;

impl From<Revocation> for RevocationEntry {
    fn from(revocation: Revocation) -> Self {
        Self {
            revocation,
            lifted: None,
            removed: None,
        }
    }
}

impl RevocationEntry {
    /// Returns the end of a revocation. It is newer than the revocation, even if the clock of this host is behind.
    fn ended(revocation: Revocation, now: u64) -> Self {
        Self {
            lifted: Some(now.max(revocation.at)),
            revocation,
            removed: None,
        }
    }

    /// Returns the removal of a node.
    fn of_removed(record: &NodeRecord, now: u64) -> Self {
        let revocation = record.revoked.clone().unwrap_or_else(|| Revocation {
            at: record.enrolled_at,
            reason: "the node was removed".to_owned(),
            other: OtherFields::new(),
        });
        Self {
            // A revocation may come back as the record of a node that is not enrolled, which has the time of the revocation.
            removed: Some(record.order().max(revocation.at)),
            ..Self::ended(revocation, now)
        }
    }

    /// Whether the node is revoked.
    pub fn is_in_force(&self) -> bool {
        self.lifted.is_none()
    }

    /// Whether this record was removed.
    pub fn removes(&self, record: &NodeRecord) -> bool {
        let removed = self.removed;
        removed.is_some_and(|last| record.order() <= last)
    }

    /// Whether the end is so old that it is no longer stored.
    pub fn is_outdated(&self, now: u64) -> bool {
        let lifted = self.lifted;
        lifted.is_some_and(|at| at.saturating_add(ENDED_RETENTION_SECS) < now)
    }

    /// Returns the value that was set last.
    #[must_use]
    pub fn newest(self, other: Self) -> Self {
        // The end of a revocation may have the time of the revocation.
        let order = |entry: &Self| {
            let last = entry.lifted.unwrap_or(entry.revocation.at);
            let reason = entry.revocation.reason.clone();
            (last, entry.lifted.is_some(), entry.removed, reason)
        };
        if order(&other) > order(&self) {
            other
        } else {
            self
        }
    }
}

impl Store {
    /// Returns the records of the enrolled nodes.
    pub fn nodes(&self) -> NodeStore {
        NodeStore {
            dir: self.dir.clone(),
        }
    }
}

/// Records of the enrolled nodes of one data directory.
#[derive(Debug, Clone)]
pub struct NodeStore {
    dir: Dir,
}

impl NodeStore {
    /// Replaces the record of a node. A revocation stays.
    pub fn put(&self, record: NodeRecord) -> Result<(), StoreError> {
        self.put_all([record])
    }

    /// Stores many records like [`NodeStore::put`], but with one write. Separate writes would each rewrite the whole file.
    pub fn put_all(&self, records: impl IntoIterator<Item = NodeRecord>) -> Result<(), StoreError> {
        self.update(|nodes| {
            for mut record in records {
                if let Some(previous) = nodes.get(&record.node) {
                    record.follow(previous);
                    record.revoked.clone_from(&previous.revoked);
                    record.other.clone_from(&previous.other);
                }
                nodes.insert(record.node.clone(), record);
            }
            Ok(())
        })
    }

    /// Applies many updates with one write, for a fleet that connects at once. Returns the new record for each update, or
    /// `None` if the node is unknown.
    pub fn change(
        &self,
        changes: &[(NodeName, NodeUpdate)],
    ) -> Result<Vec<Option<NodeRecord>>, StoreError> {
        self.update(|nodes| {
            let outcomes = changes.iter().map(|(node, change)| match change {
                NodeUpdate::Connected { at } => {
                    let record = || NodeRecord::name_only(node, *at);
                    Some(nodes.entry(node.clone()).or_insert_with(record).clone())
                }
                NodeUpdate::Renewed(issued) => nodes.get_mut(node).map(|record| {
                    record.record_certificate(issued);
                    record.clone()
                }),
                NodeUpdate::Joined { at, issued } => {
                    let record = || NodeRecord::name_only(node, *at);
                    let record = nodes.entry(node.clone()).or_insert_with(record);
                    if record.revoked.is_none() {
                        record.enrolled_at = record.enrolled_at.max(*at);
                        record.join_key = None;
                    }
                    record.record_certificate(issued);
                    Some(record.clone())
                }
            });
            Ok(outcomes.collect())
        })
    }

    /// Records that a node is revoked, whether it has a record or not.
    pub fn revoke_or_create(
        &self,
        node: &NodeName,
        revoked: &Revocation,
    ) -> Result<(), StoreError> {
        self.update(|nodes| {
            let record = || NodeRecord::name_only(node, revoked.at);
            let entry = nodes.entry(node.clone()).or_insert_with(record);
            entry.revoked = Some(revoked.clone());
            Ok(())
        })
    }

    /// Sets or removes the revocation of a node. Returns whether the node has a record.
    pub fn set_revoked(
        &self,
        node: &NodeName,
        revoked: Option<Revocation>,
    ) -> Result<bool, StoreError> {
        self.update(|nodes| {
            let known = nodes.get_mut(node);
            Ok(known.map(|record| record.revoked = revoked).is_some())
        })
    }

    /// Replaces the confirmed attributes of a node. The rest of its record stays.
    pub fn confirm(
        &self,
        node: &NodeName,
        confirmed: NodeAttributes,
        at: u64,
    ) -> Result<(), StoreError> {
        self.update(|nodes| {
            let previous = nodes.remove(node);
            let record = NodeRecord {
                addresses: confirmed.addresses,
                pool: confirmed.pool,
                labels: confirmed.labels,
                follows_cluster: false,
                ..previous.unwrap_or_else(|| NodeRecord::name_only(node, at))
            };
            nodes.insert(node.clone(), record);
            Ok(())
        })
    }

    /// Removes the record of a node. Returns whether there was one.
    pub fn remove(&self, node: &NodeName) -> Result<bool, StoreError> {
        self.update(|nodes| Ok(nodes.remove(node).is_some()))
    }

    /// Returns the end of the last revocation of a node, or its removal, if it is still stored.
    pub fn ended_revocation(&self, node: &NodeName) -> Result<Option<RevocationEntry>, StoreError> {
        Ok(self.ended_revocations()?.remove(node))
    }

    /// Returns the ends of revocations and the removals of all nodes, like [`NodeStore::ended_revocation`].
    pub fn ended_revocations(&self) -> Result<BTreeMap<NodeName, RevocationEntry>, StoreError> {
        let ended: Option<EndedRevocations> = self.dir.read_json(ENDED_FILE)?;
        Ok(ended.unwrap_or_default())
    }

    /// Changes the records, and stores the ends of revocations and the removals that follow.
    fn update<R>(
        &self,
        change: impl FnOnce(&mut BTreeMap<NodeName, NodeRecord>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let _lock = self.dir.lock()?;
        let mut nodes: BTreeMap<_, _> = self.dir.read_json(NODES_FILE)?.unwrap_or_default();
        let ended: EndedRevocations = self.dir.read_json(ENDED_FILE)?.unwrap_or_default();
        let previous = nodes.clone();
        let outcome = change(&mut nodes)?;
        let mut next = ended.clone();
        record_ends(&previous, &mut nodes, &mut next, UnixTime::now().as_secs());
        // If this process ends between the two writes, the revocation in the records counts.
        if next != ended {
            self.dir.write_json(ENDED_FILE, &next)?;
        }
        self.dir.write_json(NODES_FILE, &nodes)?;
        Ok(outcome)
    }

    /// Fails if the file of nodes is missing. Code that has read the file before must not take a missing file for an empty one.
    pub fn require(&self) -> Result<(), StoreError> {
        self.dir.require(NODES_FILE)
    }

    /// Fails if the file of the ends of revocations is missing, like [`NodeStore::require`].
    pub fn require_ended(&self) -> Result<(), StoreError> {
        self.dir.require(ENDED_FILE)
    }

    /// Returns all nodes, by name.
    pub fn all(&self) -> Result<Vec<NodeRecord>, StoreError> {
        let nodes = self
            .dir
            .read_json::<BTreeMap<NodeName, NodeRecord>>(NODES_FILE)?;
        Ok(nodes.unwrap_or_default().into_values().collect())
    }
}

/// Records which revocations a change of the records has ended, and which nodes it has removed.
fn record_ends(
    previous: &BTreeMap<NodeName, NodeRecord>,
    nodes: &mut BTreeMap<NodeName, NodeRecord>,
    ended: &mut EndedRevocations,
    now: u64,
) {
    ended.retain(|_, end| !end.is_outdated(now));
    for (name, record) in previous {
        let mut end = match (nodes.get(name), &record.revoked) {
            (None, _) => RevocationEntry::of_removed(record, now),
            (Some(NodeRecord { revoked: None, .. }), Some(revoked)) => {
                RevocationEntry::ended(revoked.clone(), now)
            }
            _ => continue,
        };
        // The end is newer than an earlier one, even if the clock of this host is behind.
        let earlier = ended.get(name).and_then(|end| end.lifted);
        end.lifted = end.lifted.max(earlier.map(|at| at.saturating_add(1)));
        ended.insert(name.clone(), end);
    }
    ended.retain(|name, end| {
        let Some(record) = nodes.get_mut(name) else {
            return true;
        };
        let lifted = end.lifted.unwrap_or_default();
        if let Some(revoked) = &mut record.revoked {
            // A new revocation is newer than the end of the previous one, even if the clock of this host is behind.
            revoked.at = revoked.at.max(lifted.saturating_add(1));
            return false;
        }
        record.follow_removal(end);
        true
    });
}
