//! The book of join tokens, kept in the data directory.
//!
//! The gateway redeems and `causeway token create` writes, from two processes: so each operation
//! takes the directory's lock, reads the file anew, changes it, and has it on disk before it
//! returns. Of two that redeem one token at once, the second finds it used.
//! Every call does blocking I/O and may wait for the lock: call it off the core threads.

use std::time::Duration;

use rustls_pki_types::UnixTime;
use thiserror::Error;

use super::{JoinRecord, JoinToken, NodeAttributes, TokenRecord};
use crate::ca::Ca;
use crate::certificate::date;
use crate::name::{NodeName, NodePattern};
use crate::secret::Fingerprint;
use crate::store::{Dir, StoreError};

/// The file in the data directory.
pub(crate) const TOKENS: &str = "tokens.json";
/// How long a token is remembered after its end, so that a late user learns "used" or "expired"
/// rather than "unknown".
const REMEMBERED: u64 = 30 * 86_400;

/// Why a token was not redeemed.
#[derive(Debug, Error)]
pub enum TokenRejected {
    /// Never made here, forgotten, or its secret is wrong.
    #[error("the join token is unknown to this gateway")]
    Unknown,
    /// Too late.
    #[error("the join token expired at {}", date(*when))]
    Expired {
        /// When it ended.
        when: u64,
    },
    /// As many have joined with it as may.
    #[error("the join token was already used at {}; make a new one", date(*when))]
    Used {
        /// When it was spent.
        when: u64,
    },
    /// Its maker takes it back.
    #[error("the join token was revoked at {}; make a new one", date(*when))]
    Revoked {
        /// When.
        when: u64,
    },
    /// The edge wants to be another node.
    #[error("the join token is for node {bound_to}, not for this one")]
    OtherNode {
        /// For which nodes it was made.
        bound_to: NodePattern,
    },
    /// A pattern is for new nodes: whoever has such a token must not become one that is there already.
    #[error(
        "node {node} has joined before, and the join token is for new nodes of {bound_to}; make one for this very node"
    )]
    NotNew {
        /// The node.
        node: NodeName,
        /// For which nodes it was made.
        bound_to: NodePattern,
    },
    /// The token is of another gateway's CA.
    #[error(
        "the join token is of another CA than this gateway's, or of a root that was retired; make a new one"
    )]
    UnexpectedCa,
    /// The book could not be read or written; the token is not spent.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether a node that would join is known already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeStatus {
    /// Nobody has joined as this node.
    New,
    /// Somebody has.
    Known,
}

/// All join tokens of one data directory.
#[derive(Debug, Clone)]
pub struct TokenStore {
    dir: Dir,
    /// The root that signs: new tokens carry it.
    signs: Fingerprint,
    /// The roots that are trusted: tokens of these are good.
    trusted: Vec<Fingerprint>,
}

impl TokenStore {
    pub(crate) fn new(dir: Dir, ca: &Ca) -> Self {
        Self {
            dir,
            signs: ca.fingerprint(),
            trusted: ca.fingerprints(),
        }
    }

    /// Makes a token for one node, to be used once, and says what joining confirms of it.
    pub fn create(
        &self,
        node: &NodeName,
        ttl: Duration,
        confirmed: NodeAttributes,
    ) -> Result<JoinToken, StoreError> {
        self.create_for((&node.into(), 1), ttl, confirmed)
    }

    /// Makes a token by which as many of these nodes may join, and says what that confirms of each.
    pub fn create_for(
        &self,
        (nodes, uses): (&NodePattern, u32),
        ttl: Duration,
        confirmed: NodeAttributes,
    ) -> Result<JoinToken, StoreError> {
        let token = JoinToken::generate(self.signs);
        let now = UnixTime::now().as_secs();
        let NodeAttributes {
            addresses,
            pool,
            labels,
        } = confirmed;
        let record = TokenRecord {
            id: token.id.clone(),
            hash: hash(&token),
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
        };
        self.dir.update(TOKENS, |records: &mut Vec<TokenRecord>| {
            records.retain(|old| old.expires.saturating_add(REMEMBERED) > now);
            records.push(record);
            Ok::<_, StoreError>(())
        })?;
        Ok(token)
    }

    /// Spends one use of a token, if it is good for this node now. Once this has returned `Ok` as often as the token
    /// has uses, it never will again, anywhere; a refusal spends nothing.
    pub fn redeem(
        &self,
        token: &JoinToken,
        (requested, standing): (&NodeName, NodeStatus),
        now: UnixTime,
    ) -> Result<TokenRecord, TokenRejected> {
        if !self.trusted.contains(&token.root) {
            return Err(TokenRejected::UnexpectedCa);
        }
        let (presented, now) = (hash(token), now.as_secs());
        self.dir.update(TOKENS, |records: &mut Vec<TokenRecord>| {
            let record = records
                .iter_mut()
                .find(|record| record.id == token.id)
                .filter(|record| record.hash.matches(&presented))
                .ok_or(TokenRejected::Unknown)?;
            refusal(record, requested, standing, now)?;
            record.used.push(JoinRecord {
                node: Some(requested.clone()),
                at: now,
            });
            Ok(record.clone())
        })
    }

    /// For which nodes a token was made.
    pub fn meant(&self, token: &JoinToken) -> Result<NodePattern, TokenRejected> {
        let presented = hash(token);
        let record = self.all()?.into_iter().find(|record| record.id == token.id);
        record
            .filter(|record| record.hash.matches(&presented))
            .map(|record| record.nodes)
            .ok_or(TokenRejected::Unknown)
    }

    /// Returns whether the root that a token carries is trusted. Records of older versions do not name the root and count
    /// as trusted.
    pub fn trusts(&self, record: &TokenRecord) -> bool {
        record.root.is_none_or(|root| self.trusted.contains(&root))
    }

    /// Takes a token back; whether there was one. It stays in the book, so that whoever has it learns why.
    pub fn revoke(&self, id: &str, now: UnixTime) -> Result<bool, StoreError> {
        self.dir.update(TOKENS, |records: &mut Vec<TokenRecord>| {
            let found = records.iter_mut().find(|record| record.id == id);
            Ok(found
                .map(|record| record.revoked.get_or_insert(now.as_secs()))
                .is_some())
        })
    }

    /// All tokens that are remembered.
    pub fn all(&self) -> Result<Vec<TokenRecord>, StoreError> {
        self.dir.read_json(TOKENS).map(Option::unwrap_or_default)
    }

    /// Forgets a token; whether there was one.
    pub fn remove(&self, id: &str) -> Result<bool, StoreError> {
        self.dir.update(TOKENS, |records: &mut Vec<TokenRecord>| {
            let before = records.len();
            records.retain(|record| record.id != id);
            Ok(records.len() < before)
        })
    }
}

/// Why a token that is known is not good.
fn refusal(
    record: &TokenRecord,
    requested: &NodeName,
    standing: NodeStatus,
    now: u64,
) -> Result<(), TokenRejected> {
    if !record.nodes.matches(requested) {
        return Err(TokenRejected::OtherNode {
            bound_to: record.nodes.clone(),
        });
    }
    if let Some(when) = record.revoked {
        return Err(TokenRejected::Revoked { when });
    }
    if let Some(last) = record.used.last()
        && record.used.len() >= record.uses as usize
    {
        return Err(TokenRejected::Used { when: last.at });
    }
    if now >= record.expires {
        return Err(TokenRejected::Expired {
            when: record.expires,
        });
    }
    if standing == NodeStatus::Known && record.nodes.node().is_none() {
        return Err(TokenRejected::NotNew {
            node: requested.clone(),
            bound_to: record.nodes.clone(),
        });
    }
    Ok(())
}

fn hash(token: &JoinToken) -> Fingerprint {
    Fingerprint::digest(token.secret.expose().as_bytes())
}
