//! Store of join tokens in the data directory.
//!
//! The gateway redeems tokens and `causeway token create` creates them, in two processes. So each operation takes the
//! directory's lock, reads the file again, changes it, and writes it to the disk before it returns. If two edges redeem one
//! token at once, the second finds it used. Every method does blocking I/O and may wait for the lock, so it must not be
//! called on a worker thread.

use std::time::Duration;

use causeway_tls::{Fingerprint, NodeName, NodePattern};
use rustls_pki_types::UnixTime;
use thiserror::Error;

use super::{JoinRecord, JoinToken, NodeAttributes, TokenRecord};
use crate::ca::Ca;
use crate::certificate::format_date;
use crate::store::atomic_file::{Dir, OtherFields, StoreError};

/// The file in the data directory.
pub(crate) const TOKENS_FILE: &str = "tokens.json";
/// Period for which a token is remembered after its expiry, in seconds. A late user then receives "used" or "expired" rather
/// than "unknown".
const RETENTION_SECS: u64 = 30 * 86_400;

/// Period after the use of a token in which the same request is accepted again, in seconds. An edge tries again within minutes.
const REPEAT_SECS: u64 = 3_600;

/// Error that refuses a token.
#[derive(Debug, Error)]
pub enum TokenRejected {
    /// The token was never created here, was forgotten, or has a wrong secret.
    #[error(
        "the join token is unknown to this gateway; create one at this gateway with `causeway token create`"
    )]
    Unknown,
    /// The token has expired.
    #[error(
        "the join token expired at {}, and the clock of this gateway shows {}; create a new one with `causeway token create`, or correct the clock",
        format_date(*when), format_date(*now)
    )]
    Expired {
        /// Time of the expiry, in Unix seconds.
        when: u64,
        /// Time of the gateway.
        now: u64,
    },
    /// The maximum number of nodes has joined with the token.
    #[error("the join token was already used at {}; create a new one with `causeway token create`", format_date(*when))]
    Used {
        /// Time of the last use, in Unix seconds.
        when: u64,
    },
    /// The operator has revoked it.
    #[error("the join token was revoked at {}; create a new one with `causeway token create`", format_date(*when))]
    Revoked {
        /// Time of the revocation, in Unix seconds.
        when: u64,
    },
    /// The edge requests the identity of another node.
    #[error(
        "the join token is for node {bound_to}, not for node {node}; correct the name of the edge (`node`), or create a token with `causeway token create --node {node}`"
    )]
    OtherNode {
        /// The node.
        node: NodeName,
        /// Nodes for which the token was created.
        bound_to: NodePattern,
    },
    /// The pattern is for new nodes only: the holder of such a token must not become a node that already exists.
    #[error(
        "node {node} has joined before, but the join token is only for new nodes of {bound_to}; create a token for exactly this node"
    )]
    NotNew {
        /// The node.
        node: NodeName,
        /// Nodes for which the token was created.
        bound_to: NodePattern,
    },
    /// The token belongs to another gateway's CA.
    #[error(
        "the join token is of another CA than the CA of this gateway, or of a retired root; create a new one with `causeway token create`"
    )]
    UnexpectedCa,
    /// The file of tokens could not be read or written; the token is not spent.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether a node that would join is already known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeStatus {
    /// No edge has joined as this node.
    New,
    /// An edge has joined as this node.
    Known,
}

/// A node that joins with a token.
#[derive(Debug, Clone, Copy)]
pub struct Joining<'a> {
    /// The node.
    pub node: &'a NodeName,
    /// Whether the node is already known.
    pub status: NodeStatus,
    /// Data that recognises a repeated request. Without it each request is a use of its own.
    pub repeat: Option<RepeatCheck>,
}

/// Data that recognises the repeated request of an edge whose previous answer was lost.
#[derive(Debug, Clone, Copy)]
pub struct RepeatCheck {
    /// SHA-256 of the public key of the request.
    pub key: Fingerprint,
    /// SHA-256 of the public key with which the node last joined.
    pub last_join_key: Option<Fingerprint>,
    /// Time when the node last joined, in Unix seconds.
    pub last_joined_at: Option<u64>,
    /// Time when the node was removed last, in Unix seconds.
    pub removed_at: Option<u64>,
}

impl<'a> From<(&'a NodeName, NodeStatus)> for Joining<'a> {
    fn from((node, status): (&'a NodeName, NodeStatus)) -> Self {
        Self {
            node,
            status,
            repeat: None,
        }
    }
}

impl Joining<'_> {
    /// Whether this request repeats a use of a token. It must have the same node and the same key as the use, which is recent.
    /// In the meantime the node was neither removed, nor has it joined with another key.
    ///
    /// A node that is older than the use has no certificate of the use yet: the gateway failed after it had spent the token. Only
    /// a token that names the node then proves that the request may replace the node.
    fn repeats(&self, token: &TokenRecord, now: u64) -> bool {
        let Some(repeat) = &self.repeat else {
            return false;
        };
        let is_pending = |join: &JoinRecord| {
            token.nodes.node().is_some() && repeat.last_joined_at.is_some_and(|at| at < join.at)
        };
        let is_same = |join: &JoinRecord| {
            join.node.as_ref() == Some(self.node)
                && join.key == Some(repeat.key)
                && join.at.saturating_add(REPEAT_SECS) > now
                && match self.status {
                    NodeStatus::New => repeat.removed_at.is_none_or(|at| at < join.at),
                    NodeStatus::Known => {
                        repeat.last_join_key == Some(repeat.key) || is_pending(join)
                    }
                }
        };
        token.used.iter().any(is_same)
    }
}

/// All join tokens of one data directory.
#[derive(Debug, Clone)]
pub struct TokenStore {
    dir: Dir,
    /// Fingerprint of the active root, which new tokens carry.
    active_root: Fingerprint,
    /// Fingerprints of the trusted roots, whose tokens are valid.
    trusted_roots: Vec<Fingerprint>,
}

impl TokenStore {
    pub(crate) fn new(dir: Dir, ca: &Ca) -> Self {
        Self {
            dir,
            active_root: ca.fingerprint(),
            trusted_roots: ca.fingerprints(),
        }
    }

    /// Creates a token for one node, to be used once. The arguments include the attributes that joining confirms.
    pub fn create(
        &self,
        node: &NodeName,
        ttl: Duration,
        confirmed: NodeAttributes,
    ) -> Result<JoinToken, StoreError> {
        self.create_for((&node.into(), 1), ttl, confirmed)
    }

    /// Creates a token with which this many of these nodes may join. The arguments include the attributes that joining
    /// confirms for each node.
    pub fn create_for(
        &self,
        (nodes, uses): (&NodePattern, u32),
        ttl: Duration,
        confirmed: NodeAttributes,
    ) -> Result<JoinToken, StoreError> {
        let token = JoinToken::generate(self.active_root);
        let now = UnixTime::now().as_secs();
        let NodeAttributes {
            addresses,
            pool,
            labels,
        } = confirmed;
        let record = TokenRecord {
            id: token.id.clone(),
            hash: secret_hash(&token),
            nodes: nodes.clone(),
            addresses,
            pool,
            labels,
            created: now,
            expires: now.saturating_add(ttl.as_secs()),
            uses,
            used: Vec::new(),
            revoked: None,
            root: Some(token.root),
            other: OtherFields::new(),
        };
        self.dir
            .update(TOKENS_FILE, |records: &mut Vec<TokenRecord>| {
                records.retain(|old| old.expires.saturating_add(RETENTION_SECS) > now);
                records.push(record);
                Ok::<_, StoreError>(())
            })?;
        Ok(token)
    }

    /// Spends one use of a token, if it is valid for this node now. In all processes together, it returns `Ok` for at most as
    /// many different requests as the token has uses. A refusal spends nothing.
    pub fn redeem<'a>(
        &self,
        token: &JoinToken,
        joining: impl Into<Joining<'a>>,
        now: UnixTime,
    ) -> Result<TokenRecord, TokenRejected> {
        let mut results = self.redeem_all(&[(token, joining.into())], now)?;
        results.pop().unwrap_or(Err(TokenRejected::Unknown))
    }

    /// Spends tokens like [`TokenStore::redeem`], in this order and with one write. Separate writes would each rewrite the whole
    /// file. Returns the result of each.
    ///
    /// # Errors
    /// If the file cannot be read or written. No token is spent.
    pub fn redeem_all(
        &self,
        uses: &[(&JoinToken, Joining<'_>)],
        now: UnixTime,
    ) -> Result<Vec<Result<TokenRecord, TokenRejected>>, StoreError> {
        let _lock = self.dir.lock()?;
        let mut records = self.all()?;
        let mut is_changed = false;
        let redeem = |(token, joining): &(&JoinToken, Joining<'_>)| {
            let record = records.iter_mut().find(|record| record.id == token.id);
            let spent = self.spend(record.as_deref().cloned(), token, joining, now)?;
            if let Some(record) = record.filter(|record| **record != spent) {
                record.clone_from(&spent);
                is_changed = true;
            }
            Ok(spent)
        };
        let results = uses.iter().map(redeem).collect();
        if is_changed {
            self.dir.write_json(TOKENS_FILE, &records)?;
        }
        Ok(results)
    }

    /// Returns the record of this token with one more use, if the token is valid for this node now. A repeated request is no further
    /// use. Nothing is stored.
    pub fn spend(
        &self,
        record: Option<TokenRecord>,
        token: &JoinToken,
        joining: &Joining<'_>,
        now: UnixTime,
    ) -> Result<TokenRecord, TokenRejected> {
        self.check_root(token)?;
        let (presented_hash, now) = (secret_hash(token), now.as_secs());
        let mut record = record
            .filter(|record| record.hash.matches(&presented_hash))
            .ok_or(TokenRejected::Unknown)?;
        let is_repeated = joining.repeats(&record, now);
        check_record(&record, joining, is_repeated, now)?;
        if !is_repeated {
            record.used.push(JoinRecord {
                node: Some(joining.node.clone()),
                at: now,
                key: joining.repeat.map(|repeat| repeat.key),
                other: OtherFields::new(),
            });
        }
        Ok(record)
    }

    /// Checks that a token is of one of the trusted roots. Reads nothing.
    pub fn check_root(&self, token: &JoinToken) -> Result<(), TokenRejected> {
        if self.trusted_roots.contains(&token.root) {
            Ok(())
        } else {
            Err(TokenRejected::UnexpectedCa)
        }
    }

    /// Returns whether these records contain a token.
    ///
    /// # Errors
    /// If the token will never be valid for this key again. Nothing that other gateways know can change that.
    pub fn check_known(
        records: &[TokenRecord],
        token: &JoinToken,
        key: Fingerprint,
        now: UnixTime,
    ) -> Result<bool, TokenRejected> {
        let Some(record) = records.iter().find(|record| record.id == token.id) else {
            return Ok(false);
        };
        if !record.hash.matches(&secret_hash(token)) {
            return Err(TokenRejected::Unknown);
        }
        if let Some(when) = record.revoked {
            return Err(TokenRejected::Revoked { when });
        }
        if let Some(last) = record.used.last()
            && record.used.len() >= record.uses as usize
            && record.used.iter().all(|join| join.key != Some(key))
        {
            return Err(TokenRejected::Used { when: last.at });
        }
        let (when, now) = (record.expires, now.as_secs());
        if now >= when {
            return Err(TokenRejected::Expired { when, now });
        }
        Ok(true)
    }

    /// Returns the nodes for which a token in these records was made.
    pub fn nodes_of<'a>(
        records: &'a [TokenRecord],
        token: &JoinToken,
    ) -> Result<&'a NodePattern, TokenRejected> {
        let presented_hash = secret_hash(token);
        let record = records.iter().find(|record| record.id == token.id);
        record
            .filter(|record| record.hash.matches(&presented_hash))
            .map(|record| &record.nodes)
            .ok_or(TokenRejected::Unknown)
    }

    /// Whether the root that a token carries is trusted. Records of older versions do not name the root and count as trusted.
    pub fn trusts(&self, record: &TokenRecord) -> bool {
        record
            .root
            .is_none_or(|root| self.trusted_roots.contains(&root))
    }

    /// Revokes a token. Returns whether the token existed. The record stays, so that the holder of the token receives the
    /// reason.
    pub fn revoke(&self, id: &str, now: UnixTime) -> Result<bool, StoreError> {
        self.dir
            .update(TOKENS_FILE, |records: &mut Vec<TokenRecord>| {
                let found = records.iter_mut().find(|record| record.id == id);
                Ok(found
                    .map(|record| record.revoked.get_or_insert(now.as_secs()))
                    .is_some())
            })
    }

    /// Returns all remembered tokens.
    pub fn all(&self) -> Result<Vec<TokenRecord>, StoreError> {
        self.dir
            .read_json(TOKENS_FILE)
            .map(Option::unwrap_or_default)
    }

    /// Removes a token. Returns whether there was one.
    pub fn remove(&self, id: &str) -> Result<bool, StoreError> {
        self.dir
            .update(TOKENS_FILE, |records: &mut Vec<TokenRecord>| {
                let previous_len = records.len();
                records.retain(|record| record.id != id);
                Ok(records.len() < previous_len)
            })
    }
}

/// Returns the reason for which a known token is not valid.
fn check_record(
    record: &TokenRecord,
    joining: &Joining<'_>,
    is_repeated: bool,
    now: u64,
) -> Result<(), TokenRejected> {
    let node = joining.node;
    if !record.nodes.matches(node) {
        return Err(TokenRejected::OtherNode {
            node: node.clone(),
            bound_to: record.nodes.clone(),
        });
    }
    if let Some(when) = record.revoked {
        return Err(TokenRejected::Revoked { when });
    }
    if let Some(last) = record.used.last()
        && record.used.len() >= record.uses as usize
        && !is_repeated
    {
        return Err(TokenRejected::Used { when: last.at });
    }
    if now >= record.expires {
        return Err(TokenRejected::Expired {
            when: record.expires,
            now,
        });
    }
    if joining.status == NodeStatus::Known && record.nodes.node().is_none() && !is_repeated {
        return Err(TokenRejected::NotNew {
            node: node.clone(),
            bound_to: record.nodes.clone(),
        });
    }
    Ok(())
}

fn secret_hash(token: &JoinToken) -> Fingerprint {
    Fingerprint::digest(token.secret.expose().as_bytes())
}
