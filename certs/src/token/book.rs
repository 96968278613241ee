//! The book of join tokens, kept in the data directory.
//!
//! The gateway redeems and `causeway token create` writes, from two processes: so each operation
//! takes the directory's lock, reads the file anew, changes it, and has it on disk before it
//! returns. Of two that redeem one token at once, the second finds it used.
//! Every call does blocking I/O and may wait for the lock: call it off the core threads.

use std::time::Duration;

use rustls_pki_types::UnixTime;
use thiserror::Error;

use super::{Confirmed, JoinToken, TokenRecord};
use crate::certificate::date;
use crate::name::NodeName;
use crate::secret::Fingerprint;
use crate::store::{Dir, StoreError};

/// The file in the data directory.
const FILE: &str = "tokens.json";
/// How long a token is remembered after its end, so that a late user learns "used" or "expired"
/// rather than "unknown".
const REMEMBERED: u64 = 30 * 86_400;

/// Why a token was not redeemed.
#[derive(Debug, Error)]
pub enum TokenRefused {
    /// Never made here, forgotten, or its secret is wrong.
    #[error("the join token is unknown to this gateway")]
    Unknown,
    /// Too late.
    #[error("the join token expired at {}", date(*when))]
    Expired {
        /// When it ended.
        when: u64,
    },
    /// A token joins one edge, once.
    #[error("the join token was already used at {}; make a new one", date(*when))]
    Used {
        /// When it was spent.
        when: u64,
    },
    /// The edge wants to be another node.
    #[error("the join token is for node {bound_to}, not for this one")]
    OtherNode {
        /// For which node it was made.
        bound_to: NodeName,
    },
    /// The token is of another gateway's CA.
    #[error("the join token is of another CA than this gateway's")]
    WrongCa,
    /// The book could not be read or written; the token is not spent.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// All join tokens of one data directory.
#[derive(Debug, Clone)]
pub struct TokenBook {
    dir: Dir,
    root: Fingerprint,
}

impl TokenBook {
    pub(crate) fn new(dir: Dir, root: Fingerprint) -> Self {
        Self { dir, root }
    }

    /// Makes a token for one node, and says what joining confirms of it.
    pub fn create(
        &self,
        node: &NodeName,
        ttl: Duration,
        confirmed: Confirmed,
    ) -> Result<JoinToken, StoreError> {
        let token = JoinToken::generate(self.root);
        let now = UnixTime::now().as_secs();
        let Confirmed {
            addresses,
            pool,
            labels,
        } = confirmed;
        let record = TokenRecord {
            id: token.id.clone(),
            hash: hash(&token),
            node: node.clone(),
            addresses,
            pool,
            labels,
            created: now,
            expires: now.saturating_add(ttl.as_secs()),
            used: None,
        };
        self.dir.update(FILE, |records: &mut Vec<TokenRecord>| {
            records.retain(|old| old.expires.saturating_add(REMEMBERED) > now);
            records.push(record);
            Ok::<_, StoreError>(())
        })?;
        Ok(token)
    }

    /// Spends a token, if it is good for this node now. Once this returns `Ok`, no other call
    /// anywhere will; a refusal spends nothing.
    pub fn redeem(
        &self,
        token: &JoinToken,
        requested: &NodeName,
        now: UnixTime,
    ) -> Result<TokenRecord, TokenRefused> {
        if token.root != self.root {
            return Err(TokenRefused::WrongCa);
        }
        let (presented, now) = (hash(token), now.as_secs());
        self.dir.update(FILE, |records: &mut Vec<TokenRecord>| {
            let record = records
                .iter_mut()
                .find(|record| record.id == token.id)
                .filter(|record| record.hash.matches(&presented))
                .ok_or(TokenRefused::Unknown)?;
            if record.node != *requested {
                return Err(TokenRefused::OtherNode {
                    bound_to: record.node.clone(),
                });
            }
            if let Some(when) = record.used {
                return Err(TokenRefused::Used { when });
            }
            if now >= record.expires {
                return Err(TokenRefused::Expired {
                    when: record.expires,
                });
            }
            record.used = Some(now);
            Ok(record.clone())
        })
    }

    /// All tokens that are remembered.
    pub fn all(&self) -> Result<Vec<TokenRecord>, StoreError> {
        self.dir.read_json(FILE).map(Option::unwrap_or_default)
    }

    /// Forgets a token; whether there was one.
    pub fn remove(&self, id: &str) -> Result<bool, StoreError> {
        self.dir.update(FILE, |records: &mut Vec<TokenRecord>| {
            let before = records.len();
            records.retain(|record| record.id != id);
            Ok(records.len() < before)
        })
    }
}

fn hash(token: &JoinToken) -> Fingerprint {
    Fingerprint::digest(token.secret.expose().as_bytes())
}
