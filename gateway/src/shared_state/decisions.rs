//! Decisions that all gateways make together, by compare-and-swap in the engine: the use of a join token, the first record of a
//! node, and the first pinned key of an upstream. Also reads of single tokens and nodes that a gateway does not know yet.

use super::{
    LastState, MAX_ATTEMPTS, SharedState, SyncError, engine::EngineError, merge, parse_entry,
};
use causeway_certs::{
    EntryChange, EntryKey, JoinToken, Joining, NodeName, NodeRecord, NodeStatus, Pin, RepeatCheck,
    RevocationEntry, Store, StoreError, TokenRecord, TokenRejected, TokenStore, entry_text,
};
use futures_util::{FutureExt, StreamExt, TryStreamExt, future::ready, stream};
use rustls_pki_types::UnixTime;
use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};
use tokio::task::spawn_blocking;

/// Number of concurrent reads of entries.
const CONCURRENT_READS: usize = 16;

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
    /// Takes over tokens that this gateway does not know yet, without waiting for the next synchronization.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub async fn fetch_tokens(&self, ids: BTreeSet<&str>) -> Result<(), SyncError> {
        let keys = token_keys(ids);
        let entries = self.read_entries(keys).await?;
        let changes: Vec<_> = entries
            .into_iter()
            .map(|(key, value)| EntryChange {
                key,
                expected: None,
                value,
            })
            .collect();
        // A conflict means that this gateway has the token.
        self.on_disk(move |store| store.change_entries(&changes))
            .await?;
        Ok(())
    }

    /// Reads entries of the engine, several at once.
    async fn read_entries(
        &self,
        keys: Vec<String>,
    ) -> Result<Vec<(String, Option<String>)>, EngineError> {
        let read = |key: String| async move {
            let value = self.0.engine.get(&key).await?;
            Ok((key, value))
        };
        let reads: Vec<_> = keys.into_iter().map(|key| read(key).boxed()).collect();
        stream::iter(reads)
            .buffered(CONCURRENT_READS)
            .try_collect()
            .await
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
        let mut fetched = self.fetch_nodes_now(slice::from_ref(node)).await?;
        Ok(fetched.pop())
    }

    /// Takes over the records of nodes like [`SharedState::fetch_node_now`]. Returns the records of those that there are.
    ///
    /// # Errors
    /// If the engine does not answer. Records that were taken over before stay.
    pub async fn fetch_nodes_now(&self, nodes: &[NodeName]) -> Result<Vec<NodeRecord>, SyncError> {
        // A synchronization must not come between, or it could take the entry for a new one.
        let last = self.0.last.lock().await;
        let mut fetches = Vec::new();
        for node in nodes {
            let key = EntryKey::Node(node.as_ref()).to_string();
            let is_common = |last: &LastState| last.digests.contains_key(&key);
            // Otherwise a command has removed the node here, and the engine does not know it yet.
            if !last.as_ref().is_some_and(is_common) {
                fetches.push(self.fetch_unlocked(node).boxed());
            }
        }
        let records = stream::iter(fetches).buffered(CONCURRENT_READS);
        let found = records.try_filter_map(|record| ready(Ok(record)));
        found.try_collect().await
    }

    /// Takes over the record of a node. `last` must be locked.
    async fn fetch_unlocked(&self, node: &NodeName) -> Result<Option<NodeRecord>, SyncError> {
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

    /// Spends one use of each token that is valid for its node now, in this order and with one write of each token. At all gateways
    /// together, it accepts at most as many different requests as a token has uses. A refusal spends nothing. Returns the result of
    /// each use.
    ///
    /// # Errors
    /// If the engine cannot be read. Uses that were spent before stay, and are accepted again.
    pub async fn redeem_all(
        &self,
        tokens: &TokenStore,
        uses: &[(&JoinToken, Joining<'_>)],
    ) -> Result<Vec<Result<TokenRecord, RedeemError>>, SyncError> {
        let ids = uses.iter().map(|(token, _)| token.id.as_str()).collect();
        self.share_new_tokens(&ids, tokens).await?;
        let mut results: BTreeMap<usize, Result<TokenRecord, RedeemError>> = BTreeMap::new();
        let mut failed = BTreeSet::new();
        for _ in 0..MAX_ATTEMPTS {
            let open: Vec<_> = (0..uses.len())
                .filter(|index| !results.contains_key(index))
                .collect();
            if open.is_empty() {
                break;
            }
            let (spent, changes) = self.spend_all(tokens, uses, &open).await?;
            let written = self.write_by_key(changes).await;
            for (index, result) in spent {
                let (token, _) = uses[index];
                match written.get(&EntryKey::Token(&token.id).to_string()) {
                    // Another gateway has changed the token meanwhile.
                    Some(Ok(false)) => {}
                    // The engine may have applied the change. If it has, the next attempt repeats these uses.
                    Some(Err(_)) if failed.insert(index) => {}
                    Some(Err(error)) => {
                        let error = SyncError::from(error.clone());
                        results.insert(index, Err(error.into()));
                    }
                    None | Some(Ok(true)) => drop(results.insert(index, result)),
                }
            }
        }
        if results.values().any(Result::is_ok) {
            // The next synchronization writes the uses to the data directory.
            self.request();
        }
        let contention = || Err(SyncError::Contention.into());
        let results =
            (0..uses.len()).map(|index| results.remove(&index).unwrap_or_else(contention));
        Ok(results.collect())
    }

    /// Writes changes to the engine. Returns for each key whether the expected value was current.
    async fn write_by_key(
        &self,
        changes: Vec<EntryChange>,
    ) -> BTreeMap<String, Result<bool, EngineError>> {
        let keys: Vec<_> = changes.iter().map(|change| change.key.clone()).collect();
        let written = self.0.engine.write_each(changes).await;
        keys.into_iter().zip(written).collect()
    }

    /// Returns the results of these uses by the current records of the tokens, and the changes of the engine by which the results
    /// become valid.
    async fn spend_all(
        &self,
        tokens: &TokenStore,
        uses: &[(&JoinToken, Joining<'_>)],
        open: &[usize],
    ) -> Result<
        (
            Vec<(usize, Result<TokenRecord, RedeemError>)>,
            Vec<EntryChange>,
        ),
        SyncError,
    > {
        let mut by_token: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for index in open {
            let (token, _) = uses[*index];
            by_token.entry(&token.id).or_default().push(*index);
        }
        let keys = token_keys(by_token.keys().copied());
        let current = self.read_entries(keys).await?;
        let own = tokens.clone();
        let here = spawn_blocking(move || own.all()).await??;
        let mut here: BTreeMap<_, _> = here
            .into_iter()
            .map(|token| (token.id.clone(), token))
            .collect();
        let (mut spent, mut changes) = (Vec::new(), Vec::new());
        for ((id, indexes), (key, expected)) in by_token.into_iter().zip(current) {
            let known = merged_token(&key, here.remove(id), expected.as_deref())?;
            let mut record = known.clone();
            for index in indexes {
                let result = self.spend(tokens, record.clone(), uses[index]).await;
                if let Ok(spent) = &result {
                    record = Some(spent.clone());
                }
                spent.push((index, result));
            }
            // An unchanged record is in the engine, or in the data directory, from which the next synchronization stores it.
            if record != known {
                changes.push(EntryChange {
                    key,
                    expected,
                    value: record.as_ref().map(entry_text),
                });
            }
        }
        Ok((spent, changes))
    }

    /// Returns the record of a token with one more use, if the token is valid for this node now. Nothing is stored.
    async fn spend(
        &self,
        tokens: &TokenStore,
        record: Option<TokenRecord>,
        (token, joining): (&JoinToken, Joining<'_>),
    ) -> Result<TokenRecord, RedeemError> {
        let spent = tokens.spend(record.clone(), token, &joining, UnixTime::now())?;
        if record.as_ref() != Some(&spent) {
            return Ok(spent);
        }
        // Since that use, the node may have changed at another gateway.
        let joining = self.update_joining(joining).await?;
        Ok(tokens.spend(record, token, &joining, UnixTime::now())?)
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
            last_join_key: record
                .as_ref()
                .map_or(repeat.last_join_key, |record| record.join_key),
            last_joined_at: record.map_or(repeat.last_joined_at, |record| Some(record.enrolled_at)),
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

    /// Stores tokens in the engine that a command has just created in the data directory.
    async fn share_new_tokens(
        &self,
        ids: &BTreeSet<&str>,
        tokens: &TokenStore,
    ) -> Result<(), SyncError> {
        let last = self.0.last.lock().await;
        let is_shared = |id: &str| {
            let key = EntryKey::Token(id).to_string();
            last.as_ref()
                .is_some_and(|last| last.digests.contains_key(&key))
        };
        let new: BTreeSet<_> = ids.iter().filter(|id| !is_shared(id)).copied().collect();
        drop(last);
        let tokens = tokens.clone();
        if !new.is_empty() {
            let local = spawn_blocking(move || tokens.all()).await??;
            if local.iter().any(|token| new.contains(token.id.as_str())) {
                self.synchronize_now().await?;
            }
        }
        Ok(())
    }

    /// Stores the records of nodes that have joined. Returns for each whether it is stored: a record of a `New` node is not, if the
    /// node has joined through another gateway. An error means that the engine does not answer.
    pub async fn store_nodes(
        &self,
        records: &[(&NodeRecord, NodeStatus)],
    ) -> Vec<Result<bool, SyncError>> {
        let mut results: BTreeMap<usize, Result<bool, SyncError>> = BTreeMap::new();
        for _ in 0..MAX_ATTEMPTS {
            let open: Vec<_> = (0..records.len())
                .filter(|index| !results.contains_key(index))
                .collect();
            if open.is_empty() {
                break;
            }
            let keys = open.iter().map(|index| node_key(records[*index].0));
            let current = self.read_entries(keys.collect()).await;
            let mut changes = Vec::new();
            for (index, (key, expected)) in open.iter().zip(current.as_ref().into_iter().flatten())
            {
                match node_change(records[*index], key, expected.clone()) {
                    Ok(Some(change)) => changes.push(change),
                    Ok(None) => drop(results.insert(*index, Ok(false))),
                    Err(error) => drop(results.insert(*index, Err(error.into()))),
                }
            }
            let written = self.write_by_key(changes).await;
            for index in open {
                let stored = match (&current, written.get(&node_key(records[index].0))) {
                    (Err(error), _) | (_, Some(Err(error))) => Err(error.clone().into()),
                    (_, Some(Ok(true))) => Ok(true),
                    _ => continue,
                };
                results.insert(index, stored);
            }
        }
        let contention = || Err(SyncError::Contention);
        let results =
            (0..records.len()).map(|index| results.remove(&index).unwrap_or_else(contention));
        results.collect()
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
fn merged_token(
    key: &str,
    here: Option<TokenRecord>,
    there: Option<&str>,
) -> Result<Option<TokenRecord>, StoreError> {
    let there: Option<TokenRecord> = there.map(|text| parse_entry(key, text)).transpose()?;
    Ok(match (here, there) {
        (Some(here), Some(there)) => Some(merge::merge_tokens(here, there)),
        (_, there) => there,
    })
}

fn token_keys<'a>(ids: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let keys = ids.into_iter().map(|id| EntryKey::Token(id).to_string());
    keys.collect()
}

fn node_key(record: &NodeRecord) -> String {
    EntryKey::Node(record.node.as_ref()).to_string()
}

/// Returns the change that stores the record of a node which has joined, or `None` if the node was new and has joined through
/// another gateway.
fn node_change(
    (record, status): (&NodeRecord, NodeStatus),
    key: &str,
    expected: Option<String>,
) -> Result<Option<EntryChange>, StoreError> {
    let previous = expected.as_deref().map(|text| parse_entry(key, text));
    let previous: Option<NodeRecord> = previous.transpose()?;
    // The edge may have sent its request twice.
    let is_repeated =
        |previous: &NodeRecord| record.join_key.is_some() && previous.join_key == record.join_key;
    if status == NodeStatus::New && !previous.as_ref().is_none_or(is_repeated) {
        return Ok(None);
    }
    let mut value = NodeRecord {
        revoked: None,
        ..record.clone()
    };
    if let Some(previous) = previous {
        value.follow(&previous);
        value.other = previous.other;
    }
    Ok(Some(EntryChange {
        key: key.to_owned(),
        expected,
        value: Some(entry_text(&value)),
    }))
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
