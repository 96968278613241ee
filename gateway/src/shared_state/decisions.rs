//! Decisions that all gateways make together, by compare-and-swap in the engine: the use of a join token, the first record of a
//! node, and the first pinned key of an upstream. Also reads of single tokens and nodes that a gateway does not know yet.

use super::{MAX_ATTEMPTS, SharedState, SyncError, merge, parse_entry};
use causeway_certs::{
    EntryChange, EntryKey, JoinToken, Joining, NodeName, NodeRecord, NodeStatus, Pin, RepeatCheck,
    RevocationEntry, Store, StoreError, TokenRecord, TokenRejected, TokenStore, entry_text,
};
use rustls_pki_types::UnixTime;
use tokio::task::spawn_blocking;

/// Reason why a join token was not spent.
#[derive(Debug, thiserror::Error)]
pub enum RedeemError {
    /// The token is not valid.
    #[error(transparent)]
    Rejected(#[from] TokenRejected),
    /// The request repeats an earlier one, and the node was revoked in the meantime.
    #[error("the node is revoked: {reason}")]
    NodeRevoked {
        /// Reason of the revocation.
        reason: String,
    },
    /// It is not known whether the token is valid. The edge may retry.
    #[error(transparent)]
    Unavailable(#[from] SyncError),
}

impl SharedState {
    /// Takes over a token that this gateway does not know yet, without waiting for the next synchronization.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub async fn fetch_token(&self, id: &str) -> Result<(), SyncError> {
        let key = EntryKey::Token(id).to_string();
        let value = self.0.engine.get(&key).await?;
        let change = EntryChange {
            key,
            expected: None,
            value,
        };
        // A conflict means that this gateway has the token.
        self.on_disk(move |store| store.change_entries(&[change]))
            .await?;
        Ok(())
    }

    /// Takes over the record of a node that this gateway does not know yet, like [`SharedState::fetch_node_now`]. If the engine did
    /// not have the node a moment ago, the engine is not asked again.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub async fn fetch_node(&self, node: &NodeName) -> Result<Option<NodeRecord>, SyncError> {
        if self.0.absent_nodes.contains(node) {
            return Ok(None);
        }
        let record = self.fetch_node_now(node).await?;
        if record.is_none() {
            self.0.absent_nodes.insert(node);
        }
        Ok(record)
    }

    /// Takes over the record of a node that this gateway does not know yet, without waiting for the next synchronization.
    /// Returns the record, if there is one.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub async fn fetch_node_now(&self, node: &NodeName) -> Result<Option<NodeRecord>, SyncError> {
        let key = EntryKey::Node(node.as_ref()).to_string();
        // A synchronization must not come between, or it could take the entry for a new one.
        let last = self.0.last.lock().await;
        if last
            .as_ref()
            .is_some_and(|last| last.digests.contains_key(&key))
        {
            // A command has removed the node here, and the engine does not know it yet.
            return Ok(None);
        }
        let (Some(record), revoked) = self.read_node(node).await? else {
            return Ok(None);
        };
        for _ in 0..MAX_ATTEMPTS {
            let (record, revoked) = (record.clone(), revoked.clone());
            let stored = self.on_disk(move |store| store_fetched(store, record, revoked));
            match stored.await? {
                Fetched::Stored(record) => return Ok(Some(*record)),
                Fetched::Removed => return Ok(None),
                // A command has changed the node meanwhile.
                Fetched::Conflict => {}
            }
        }
        Err(SyncError::Contention)
    }

    /// Spends one use of a token, if it is valid for this node now. At all gateways together, it returns `Ok` for at most as many
    /// different requests as the token has uses. A refusal spends nothing.
    ///
    /// # Errors
    /// If the token is not valid, or the engine does not answer.
    pub async fn redeem<'a>(
        &self,
        tokens: &TokenStore,
        token: &JoinToken,
        joining: impl Into<Joining<'a>>,
    ) -> Result<TokenRecord, RedeemError> {
        let key = EntryKey::Token(&token.id).to_string();
        let joining = joining.into();
        self.share_new_token(&token.id, tokens).await?;
        let mut lost = None;
        for _ in 0..MAX_ATTEMPTS {
            let current = self.0.engine.get(&key).await.map_err(SyncError::from)?;
            let known = merged_token(tokens, &token.id, current.as_deref()).await?;
            let mut spent = tokens.spend(known.clone(), token, &joining, UnixTime::now())?;
            if known.as_ref() == Some(&spent) {
                // Since that use, the node may have changed at another gateway.
                let joining = self.update_joining(joining).await?;
                spent = tokens.spend(known.clone(), token, &joining, UnixTime::now())?;
            }
            if known.as_ref() == Some(&spent) {
                // The use is in the engine, or in the data directory, from which the next synchronization stores it.
                self.request();
                return Ok(spent);
            }
            let change = EntryChange {
                key: key.clone(),
                expected: current,
                value: Some(entry_text(&spent)),
            };
            match self.0.engine.write(vec![change]).await {
                Ok(conflicts) if conflicts.is_empty() => {
                    // The next synchronization writes the use to the data directory.
                    self.request();
                    return Ok(spent);
                }
                Ok(_) => {}
                // The engine may have applied the change. If it has, the next attempt repeats this use.
                Err(error) if lost.is_none() => lost = Some(error),
                Err(error) => return Err(SyncError::from(error).into()),
            }
        }
        Err(SyncError::Contention.into())
    }

    /// Returns a request with the state that its node has in the engine.
    ///
    /// # Errors
    /// If the node is revoked, or the engine does not answer.
    async fn update_joining<'a>(&self, joining: Joining<'a>) -> Result<Joining<'a>, RedeemError> {
        let (record, there) = self.read_node(joining.node).await?;
        let name = joining.node.clone();
        // A command may have ended the revocation here a moment ago.
        let here = self.on_disk(move |store| store.nodes().ended_revocation(&name));
        let entry = match (here.await?, there) {
            (Some(here), Some(there)) => Some(here.newest(there)),
            (here, there) => here.or(there),
        };
        if let Some(RevocationEntry {
            revocation,
            lifted: None,
            ..
        }) = entry
        {
            let reason = revocation.reason;
            return Err(RedeemError::NodeRevoked { reason });
        }
        let removal = entry.filter(|end| end.removed.is_some());
        let is_removed = |record: &NodeRecord| {
            let removal = removal.as_ref();
            removal.is_some_and(|end| end.removes(record))
        };
        let record = record.filter(|record| !is_removed(record));
        let status = match (&record, &removal) {
            (Some(_), _) => NodeStatus::Known,
            (None, Some(_)) => NodeStatus::New,
            // The record of a node that joined without the engine is stored by the next synchronization.
            (None, None) => joining.status,
        };
        let removed_at = removal.and_then(|end| end.lifted);
        let repeat = joining.repeat.map(|repeat| RepeatCheck {
            last_join_key: record.map_or(repeat.last_join_key, |record| record.join_key),
            removed_at: repeat.removed_at.max(removed_at),
            ..repeat
        });
        Ok(Joining {
            status,
            repeat,
            ..joining
        })
    }

    /// Reads the record of a node, and its revocation or the end of one, from the engine.
    async fn read_node(
        &self,
        node: &NodeName,
    ) -> Result<(Option<NodeRecord>, Option<RevocationEntry>), SyncError> {
        let key = EntryKey::Node(node.as_ref()).to_string();
        let revoked_key = EntryKey::Revoked(node.as_ref()).to_string();
        let record = self.0.engine.get(&key).await?;
        // The revocation is read last, so that none is missed that comes after the record.
        let revoked = self.0.engine.get(&revoked_key).await?;
        let record = record.map(|text| parse_entry(&key, &text)).transpose()?;
        let revoked = revoked.map(|text| parse_entry(&revoked_key, &text));
        Ok((record, revoked.transpose()?))
    }

    /// Stores a token in the engine that a command has just created in the data directory.
    async fn share_new_token(&self, id: &str, tokens: &TokenStore) -> Result<(), SyncError> {
        let key = EntryKey::Token(id).to_string();
        let last = self.0.last.lock().await;
        let is_shared = last
            .as_ref()
            .is_some_and(|last| last.digests.contains_key(&key));
        drop(last);
        let tokens = tokens.clone();
        if !is_shared {
            let local = spawn_blocking(move || tokens.all()).await??;
            if local.iter().any(|token| token.id == id) {
                self.synchronize_now().await?;
            }
        }
        Ok(())
    }

    /// Stores the record of a node that has joined. Returns whether it is stored: a record of a `new` node is not, if the
    /// node has joined through another gateway.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub async fn store_node(
        &self,
        record: &NodeRecord,
        status: NodeStatus,
    ) -> Result<bool, SyncError> {
        let key = EntryKey::Node(record.node.as_ref()).to_string();
        let record = NodeRecord {
            revoked: None,
            ..record.clone()
        };
        for _ in 0..MAX_ATTEMPTS {
            let expected = self.0.engine.get(&key).await?;
            let previous = expected.as_deref().map(|text| parse_entry(&key, text));
            let previous: Option<NodeRecord> = previous.transpose()?;
            // The edge may have sent its request twice.
            let is_repeated = |previous: &NodeRecord| {
                record.join_key.is_some() && previous.join_key == record.join_key
            };
            if status == NodeStatus::New && !previous.as_ref().is_none_or(is_repeated) {
                return Ok(false);
            }
            let value = NodeRecord {
                other: previous.map(|record| record.other).unwrap_or_default(),
                ..record.clone()
            };
            let change = EntryChange {
                key: key.clone(),
                expected,
                value: Some(entry_text(&value)),
            };
            if self.0.engine.write(vec![change]).await?.is_empty() {
                return Ok(true);
            }
        }
        Err(SyncError::Contention)
    }

    /// Pins each of these keys unless another gateway has pinned one for the same port. Returns the keys that are pinned.
    ///
    /// # Errors
    /// If the engine does not answer. Keys that were pinned before stay pinned.
    pub async fn pin_first(
        &self,
        observed: Vec<(NodeName, u16, Pin)>,
    ) -> Result<Vec<(NodeName, u16, Pin)>, SyncError> {
        let key_of = |node: &NodeName, port| EntryKey::Pin(node.as_ref(), port).to_string();
        let changes = observed.iter().map(|(node, port, pin)| EntryChange {
            key: key_of(node, *port),
            expected: None,
            value: Some(entry_text(pin)),
        });
        let conflicts = self.0.engine.write(changes.collect()).await?;
        let mut pinned = Vec::new();
        for (node, port, pin) in observed {
            let key = key_of(&node, port);
            let earlier = if conflicts.contains(&key) {
                self.0.engine.get(&key).await?
            } else {
                None
            };
            let earlier = earlier.map(|text| parse_entry(&key, &text)).transpose()?;
            pinned.push((node, port, earlier.unwrap_or(pin)));
        }
        Ok(pinned)
    }
}

/// Returns the record of a token in the engine, with the uses and the revocation that the data directory has: the engine may lack
/// a revocation by a command, or uses after a restored backup.
async fn merged_token(
    tokens: &TokenStore,
    id: &str,
    there: Option<&str>,
) -> Result<Option<TokenRecord>, SyncError> {
    let key = EntryKey::Token(id).to_string();
    let there: Option<TokenRecord> = there.map(|text| parse_entry(&key, text)).transpose()?;
    let (tokens, id) = (tokens.clone(), id.to_owned());
    let all = spawn_blocking(move || tokens.all()).await??;
    let here = all.into_iter().find(|token| token.id == id);
    Ok(match (here, there) {
        (Some(here), Some(there)) => Some(merge::merge_tokens(here, there)),
        (_, there) => there,
    })
}

/// Outcome of the storing of a node's record from the engine.
enum Fetched {
    /// The data directory has the record, with the revocation in force.
    Stored(Box<NodeRecord>),
    /// The node was removed after the enrolment of the record.
    Removed,
    /// The data directory was changed meanwhile.
    Conflict,
}

/// Stores the record of a node from the engine together with its revocation, or with that of the data directory if that is newer.
fn store_fetched(
    store: &Store,
    record: NodeRecord,
    there: Option<RevocationEntry>,
) -> Result<Fetched, StoreError> {
    let node = record.node.as_ref();
    let (key, revoked_key) = (EntryKey::Node(node), EntryKey::Revoked(node));
    let (key, revoked_key) = (key.to_string(), revoked_key.to_string());
    let mut entries = store.entries()?;
    let (own_record, own_text) = (entries.remove(&key), entries.remove(&revoked_key));
    let here = own_text.as_deref();
    let here = here.map(|text| parse_entry::<RevocationEntry>(&revoked_key, text));
    let here = here.transpose()?;
    if here.iter().chain(&there).any(|end| end.removes(&record)) {
        return Ok(Fetched::Removed);
    }
    let newest = match (here, there) {
        (Some(here), Some(there)) => Some(here.newest(there)),
        (here, there) => here.or(there),
    };
    let change = |key, expected: Option<String>, value| EntryChange {
        key,
        expected,
        value,
    };
    let changes = [
        change(revoked_key, own_text, newest.as_ref().map(entry_text)),
        // The next synchronization merges a record that is here already.
        change(
            key,
            own_record.clone(),
            own_record.or_else(|| Some(entry_text(&record))),
        ),
    ];
    if !store.change_all_entries(&changes)? {
        return Ok(Fetched::Conflict);
    }
    let in_force = newest.filter(RevocationEntry::is_in_force);
    Ok(Fetched::Stored(Box::new(NodeRecord {
        revoked: in_force.map(|entry| entry.revocation),
        ..record
    })))
}
