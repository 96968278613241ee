//! Decisions that all gateways make together, by compare-and-swap in the engine: the use of a join token, the first record of a
//! node, and the first pinned key of an upstream. Also reads of single tokens and nodes that a gateway does not know yet.

use super::{MAX_ATTEMPTS, SharedState, SyncError, engine::EngineError, merge, parse_entry};
use causeway_certs::{
    EntryChange, EntryKey, JoinToken, Joining, NodeName, NodeRecord, NodeStatus, Pin, RepeatCheck,
    Revocation, RevocationEntry, Store, StoreError, TokenRecord, TokenRejected, TokenStore,
    entry_text, normalize_entry,
};
use rustls_pki_types::UnixTime;
use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};
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
    /// Takes over tokens that this gateway does not know yet, without waiting for the next synchronization. Returns the tokens that
    /// the engine cannot read, or whose entries cannot be parsed.
    ///
    /// # Errors
    /// If the data directory cannot be written.
    pub async fn fetch_tokens<'a>(
        &self,
        ids: BTreeSet<&'a str>,
    ) -> Result<BTreeMap<&'a str, SyncError>, SyncError> {
        let keys = token_keys(ids.iter().copied());
        let texts = self.0.engine.get_each(keys.clone()).await;
        let (mut changes, mut failed) = (Vec::new(), BTreeMap::new());
        for ((id, key), text) in ids.into_iter().zip(keys).zip(texts) {
            let parse = |text: String| Ok(normalize_entry(&key, &text)?);
            match text
                .map_err(SyncError::from)
                .map(|text| text.map(parse).transpose())
            {
                Ok(Ok(None)) => {}
                // A conflict means that this gateway has the token.
                Ok(Ok(value)) => changes.push(EntryChange {
                    key,
                    expected: None,
                    value,
                }),
                Ok(Err(error)) | Err(error) => drop(failed.insert(id, error)),
            }
        }
        self.on_disk(move |store| store.change_entries(&changes))
            .await?;
        Ok(failed)
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
        let fetched = self.fetch_nodes_now(slice::from_ref(node)).await.pop();
        fetched.unwrap_or(Ok(None))
    }

    /// Takes over the records of nodes like [`SharedState::fetch_node_now`]. Returns the record of each, if there is one.
    pub async fn fetch_nodes_now(
        &self,
        nodes: &[NodeName],
    ) -> Vec<Result<Option<NodeRecord>, SyncError>> {
        // A synchronization must not come between, or it could take the entry for a new one.
        let last = self.0.last.lock().await;
        let is_synchronized = |node: &NodeName| {
            let key = EntryKey::Node(node.as_ref()).to_string();
            let last = last.as_ref();
            last.is_some_and(|last| last.digests.contains_key(&key))
        };
        // If the directory cannot be read, taking over a record fails as well.
        let recorded = if nodes.iter().any(is_synchronized) {
            self.recorded_nodes().await.ok()
        } else {
            None
        };
        // Otherwise a command has removed the node here, and the engine does not know it yet.
        let is_wanted = |node: &&NodeName| {
            let is_recorded = || recorded.as_ref().is_none_or(|nodes| nodes.contains(*node));
            !is_synchronized(node) || is_recorded()
        };
        let wanted: Vec<_> = nodes.iter().filter(is_wanted).collect();
        let mut read = self.read_nodes(&wanted).await.into_iter();
        let mut results = Vec::with_capacity(nodes.len());
        for node in nodes {
            let read = is_wanted(&node).then(|| read.next()).flatten();
            results.push(match read {
                Some(Ok((None, None))) | None => Ok(None),
                Some(Ok(stored)) => self.store_unlocked(node, stored).await,
                Some(Err(error)) => Err(error),
            });
        }
        results
    }

    /// Returns the nodes with a record in the data directory. The tables of this gateway may not have all of them yet.
    async fn recorded_nodes(&self) -> Result<BTreeSet<NodeName>, SyncError> {
        self.on_disk(|store| {
            let records = store.nodes().all()?.into_iter();
            Ok(records.map(|record| record.node).collect())
        })
        .await
    }

    /// Stores the record of a node and its revocation, or the end of one, from the engine in the data directory. `last` must be
    /// locked.
    async fn store_unlocked(
        &self,
        node: &NodeName,
        stored: StoredNode,
    ) -> Result<Option<NodeRecord>, SyncError> {
        for _ in 0..MAX_ATTEMPTS {
            let (node, stored) = (node.clone(), stored.clone());
            let fetched = self.on_disk(move |store| store_fetched(store, &node, stored));
            match fetched.await? {
                Fetched::Stored(record) => return Ok(Some(*record)),
                Fetched::Absent => return Ok(None),
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
    /// If the data directory cannot be read. Uses that were spent before stay, and are accepted again.
    pub async fn redeem_all(
        &self,
        tokens: &TokenStore,
        uses: &[(&JoinToken, Joining<'_>)],
    ) -> Result<Vec<Result<TokenRecord, RedeemError>>, SyncError> {
        let ids = uses.iter().map(|(token, _)| token.id.as_str()).collect();
        let unshared = self.share_new_tokens(&ids, tokens).await?;
        let mut results: BTreeMap<usize, Result<TokenRecord, RedeemError>> = BTreeMap::new();
        for (index, (token, _)) in uses.iter().enumerate() {
            if let Some(error) = unshared.get(&token.id) {
                results.insert(index, Err(SyncError::from(error.clone()).into()));
            }
        }
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
        if changes.is_empty() {
            return BTreeMap::new();
        }
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
    ) -> Result<(UseResults, Vec<EntryChange>), SyncError> {
        let (entries, mut spent) = self.read_tokens(tokens, uses, open).await?;
        let mut updated = self.update_repeats(tokens, uses, &entries).await?;
        let mut changes = Vec::new();
        for token in entries {
            let mut record = token.record.clone();
            for index in token.uses {
                let (presented, joining) = uses[index];
                let joining = updated.remove(&index).unwrap_or(Ok(joining));
                let result = joining.and_then(|joining| {
                    Ok(tokens.spend(record.clone(), presented, &joining, UnixTime::now())?)
                });
                if let Ok(spent) = &result {
                    record = Some(spent.clone());
                }
                spent.push((index, result));
            }
            // An unchanged record is in the engine, or in the data directory, from which the next synchronization stores it.
            if record != token.record {
                changes.push(EntryChange {
                    key: token.key,
                    expected: token.expected,
                    value: record.as_ref().map(entry_text),
                });
            }
        }
        Ok((spent, changes))
    }

    /// Reads the tokens of these uses from the engine. Returns also the uses of tokens that cannot be read or parsed, with the
    /// reason.
    async fn read_tokens(
        &self,
        tokens: &TokenStore,
        uses: &[(&JoinToken, Joining<'_>)],
        open: &[usize],
    ) -> Result<(Vec<TokenEntry>, UseResults), SyncError> {
        let mut by_token: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for index in open {
            let (token, _) = uses[*index];
            by_token.entry(&token.id).or_default().push(*index);
        }
        let keys = token_keys(by_token.keys().copied());
        let texts = self.0.engine.get_each(keys.clone()).await;
        let own = tokens.clone();
        let here = spawn_blocking(move || own.all()).await??;
        let here = here.into_iter().map(|token| (token.id.clone(), token));
        let mut here: BTreeMap<_, _> = here.collect();
        let (mut entries, mut failed) = (Vec::new(), Vec::new());
        for (((id, uses), key), text) in by_token.into_iter().zip(keys).zip(texts) {
            let here = here.remove(id);
            let merge = |expected: Option<&str>| merged_token(&key, here.clone(), expected);
            match text.map(|text| (merge(text.as_deref()), text)) {
                Ok((Ok(record), expected)) => entries.push(TokenEntry {
                    key,
                    expected,
                    record,
                    uses,
                }),
                // Each use gets an error of its own.
                Ok((Err(_), text)) => failed.extend(uses.into_iter().filter_map(|index| {
                    let error = merge(text.as_deref()).err().map(SyncError::from);
                    Some((index, Err(error?.into())))
                })),
                Err(error) => failed.extend(uses.into_iter().map(|index| {
                    let error = SyncError::from(error.clone());
                    (index, Err(error.into()))
                })),
            }
        }
        Ok((entries, failed))
    }

    /// Returns the requests that repeat earlier ones, with the current state of their nodes: since that use, the node may have
    /// changed at another gateway.
    async fn update_repeats<'a>(
        &self,
        tokens: &TokenStore,
        uses: &[(&JoinToken, Joining<'a>)],
        entries: &[TokenEntry],
    ) -> Result<BTreeMap<usize, Result<Joining<'a>, RedeemError>>, SyncError> {
        let now = UnixTime::now();
        let is_repeated = |record: &Option<TokenRecord>, index: usize| {
            let (token, joining) = &uses[index];
            let spent = tokens.spend(record.clone(), token, joining, now);
            spent.is_ok_and(|spent| record.as_ref() == Some(&spent))
        };
        let indexes = entries.iter().flat_map(|token| {
            let indexes = token.uses.iter().copied();
            indexes.filter(|index| is_repeated(&token.record, *index))
        });
        let indexes: Vec<_> = indexes.collect();
        if indexes.is_empty() {
            return Ok(BTreeMap::new());
        }
        let nodes: Vec<_> = indexes.iter().map(|index| uses[*index].1.node).collect();
        let read = self.read_nodes(&nodes).await;
        // A command may have ended a revocation here a moment ago.
        let ended = self.on_disk(|store| store.nodes().ended_revocations());
        let ended = ended.await?;
        let update = |(index, read): (usize, Result<_, SyncError>)| {
            let joining = uses[index].1;
            let here = ended.get(joining.node).cloned();
            let updated = read.map_err(RedeemError::from);
            (
                index,
                updated.and_then(|there| update_joining(joining, here, there)),
            )
        };
        Ok(indexes.into_iter().zip(read).map(update).collect())
    }

    /// Reads the records of nodes, and their revocations or the ends of these, from the engine.
    async fn read_nodes(&self, nodes: &[&NodeName]) -> Vec<Result<StoredNode, SyncError>> {
        let keys = nodes
            .iter()
            .map(|node| EntryKey::Node(node.as_ref()).to_string());
        let keys: Vec<_> = keys.collect();
        let records = self.0.engine.get_each(keys.clone()).await;
        // The revocations are read last, so that none is missed that comes after the record.
        let read = nodes
            .iter()
            .zip(&records)
            .filter(|(_, record)| record.is_ok());
        let revoked_keys = read.map(|(node, _)| EntryKey::Revoked(node.as_ref()).to_string());
        let revoked_keys: Vec<_> = revoked_keys.collect();
        let revoked = self.0.engine.get_each(revoked_keys.clone()).await;
        let mut revoked = revoked_keys.into_iter().zip(revoked);
        let parse = |(key, record): (String, Result<Option<String>, EngineError>)| {
            let record = record?.map(|text| parse_entry(&key, &text)).transpose()?;
            let Some((key, entry)) = revoked.next() else {
                return Ok((record, None));
            };
            let entry = entry?.map(|text| parse_entry(&key, &text)).transpose()?;
            Ok((record, entry))
        };
        keys.into_iter().zip(records).map(parse).collect()
    }

    /// Stores tokens in the engine that a command has just created in the data directory. Returns those that could not be stored.
    async fn share_new_tokens(
        &self,
        ids: &BTreeSet<&str>,
        tokens: &TokenStore,
    ) -> Result<BTreeMap<String, EngineError>, SyncError> {
        let last = self.0.last.lock().await;
        let is_shared = |id: &str| {
            let key = EntryKey::Token(id).to_string();
            last.as_ref()
                .is_some_and(|last| last.digests.contains_key(&key))
        };
        let new: BTreeSet<_> = ids.iter().filter(|id| !is_shared(id)).copied().collect();
        drop(last);
        let mut unshared = BTreeMap::new();
        if new.is_empty() {
            return Ok(unshared);
        }
        let tokens = tokens.clone();
        let local = spawn_blocking(move || tokens.all()).await??;
        let local = local.into_iter().map(|token| token.id);
        let local: Vec<_> = local.filter(|id| new.contains(id.as_str())).collect();
        if !local.is_empty() {
            match self.synchronize_now().await {
                // A fault of the CA alone does not keep the other entries out of the engine.
                Ok(()) | Err(SyncError::Ca(_)) => {}
                Err(error) => {
                    let error = EngineError(error.to_string());
                    unshared.extend(local.into_iter().map(|id| (id, error.clone())));
                }
            }
        }
        Ok(unshared)
    }

    /// Stores the records of nodes that have joined. Returns for each whether it is stored: a record of a `New` node is not, if the
    /// node has joined through another gateway.
    ///
    /// # Errors
    /// If the data directory cannot be read. The error of a record means that the engine does not answer.
    pub async fn store_nodes(
        &self,
        records: &[(&NodeRecord, NodeStatus)],
    ) -> Result<Vec<Result<bool, SyncError>>, SyncError> {
        let ended = self.on_disk(|store| store.nodes().ended_revocations());
        let ended = ended.await?;
        let mut results: BTreeMap<usize, Result<bool, SyncError>> = BTreeMap::new();
        for attempt in 0..MAX_ATTEMPTS {
            let open: Vec<_> = (0..records.len())
                .filter(|index| !results.contains_key(index))
                .collect();
            if open.is_empty() {
                break;
            }
            // The engine did not have the new nodes when their joins were checked, and the data directory has their removals.
            let is_read = |index: &usize| attempt > 0 || records[*index].1 == NodeStatus::Known;
            let to_read: Vec<_> = open.iter().copied().filter(is_read).collect();
            let mut current = self.read_current(records, to_read).await;
            let mut changes = Vec::new();
            for index in &open {
                let (record, _) = records[*index];
                let change = current
                    .remove(index)
                    .transpose()
                    .map(Option::unwrap_or_default);
                let change = change.and_then(|current| {
                    node_change(records[*index], current, ended.get(&record.node))
                });
                match change {
                    Ok(Some(change)) => changes.push(change),
                    Ok(None) => drop(results.insert(*index, Ok(false))),
                    Err(error) => drop(results.insert(*index, Err(error))),
                }
            }
            let written = self.write_by_key(changes).await;
            for index in open {
                match written.get(&node_key(records[index].0)) {
                    Some(Ok(true)) => drop(results.insert(index, Ok(true))),
                    Some(Err(error)) => drop(results.insert(index, Err(error.clone().into()))),
                    Some(Ok(false)) | None => {}
                }
            }
        }
        let contention = || Err(SyncError::Contention);
        let results =
            (0..records.len()).map(|index| results.remove(&index).unwrap_or_else(contention));
        Ok(results.collect())
    }

    /// Reads the entries of these records from the engine, and the ends of the nodes' revocations.
    async fn read_current(
        &self,
        records: &[(&NodeRecord, NodeStatus)],
        indexes: Vec<usize>,
    ) -> BTreeMap<usize, Result<CurrentNode, SyncError>> {
        let nodes = indexes.iter().map(|index| records[*index].0);
        let keys = nodes.flat_map(|record| {
            let end = EntryKey::Revoked(record.node.as_ref()).to_string();
            [node_key(record), end]
        });
        let keys: Vec<_> = keys.collect();
        let texts = self.0.engine.get_each(keys.clone()).await;
        let mut entries = keys.into_iter().zip(texts);
        let mut read_one = |index: usize| {
            let ((_, text), (key, end)) = entries.next().zip(entries.next())?;
            let current = || {
                let end = end?.map(|text| parse_entry(&key, &text)).transpose()?;
                Ok(CurrentNode { text: text?, end })
            };
            Some((index, current()))
        };
        indexes.into_iter().filter_map(&mut read_one).collect()
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

/// Record of a node in the engine, and its revocation or the end of one.
type StoredNode = (Option<NodeRecord>, Option<RevocationEntry>);

/// Entries of a node that has joined in the engine.
#[derive(Default)]
struct CurrentNode {
    /// Text of the record.
    text: Option<String>,
    /// Revocation, or the end of one.
    end: Option<RevocationEntry>,
}

/// Results of some uses of a batch, by their indexes.
type UseResults = Vec<(usize, Result<TokenRecord, RedeemError>)>;

/// Token in the engine, with the indexes of its uses in a batch.
struct TokenEntry {
    key: String,
    /// Value of the entry.
    expected: Option<String>,
    /// Record with the uses that the data directory has.
    record: Option<TokenRecord>,
    uses: Vec<usize>,
}

/// Returns a request with the state of its node in the engine. `here` is the end of the node's revocation in the data directory.
///
/// # Errors
/// If the node is revoked.
fn update_joining(
    joining: Joining<'_>,
    here: Option<RevocationEntry>,
    (record, there): StoredNode,
) -> Result<Joining<'_>, RedeemError> {
    let entry = match (here, there) {
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
/// another gateway. `current` has the entries of the node in the engine, if they were read, and `end` is the end of the node's
/// revocation in the data directory.
fn node_change(
    (record, status): (&NodeRecord, NodeStatus),
    current: CurrentNode,
    end: Option<&RevocationEntry>,
) -> Result<Option<EntryChange>, SyncError> {
    let (key, expected) = (node_key(record), current.text);
    let previous = expected.as_deref().map(|text| parse_entry(&key, text));
    let previous: Option<NodeRecord> = previous.transpose()?;
    let ends = || end.into_iter().chain(&current.end);
    let previous = previous.filter(|previous| !ends().any(|end| end.removes(previous)));
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
    ends().for_each(|end| value.follow_removal(end));
    Ok(Some(EntryChange {
        key,
        expected,
        value: Some(entry_text(&value)),
    }))
}

/// Outcome of the storing of a node from the engine.
enum Fetched {
    /// The data directory has the record, with the revocation in force.
    Stored(Box<NodeRecord>),
    /// The node has no record, or was removed after the enrolment of the record. The data directory has the removal.
    Absent,
    /// The data directory was changed meanwhile.
    Conflict,
}

/// Stores the record of a node from the engine together with its revocation, or with that of the data directory if that is newer.
fn store_fetched(
    store: &Store,
    node: &NodeName,
    (record, there): StoredNode,
) -> Result<Fetched, StoreError> {
    let (key, revoked_key) = (
        EntryKey::Node(node.as_ref()),
        EntryKey::Revoked(node.as_ref()),
    );
    let (key, revoked_key) = (key.to_string(), revoked_key.to_string());
    let mut entries = store.entries()?;
    let (own_record, own_text) = (entries.remove(&key), entries.remove(&revoked_key));
    let here = own_text.as_deref();
    let here = here.map(|text| parse_entry::<RevocationEntry>(&revoked_key, text));
    let here = here.transpose()?;
    let is_removed = |record: &NodeRecord| here.iter().chain(&there).any(|end| end.removes(record));
    let record = record.filter(|record| !is_removed(record));
    let newest = match (here, there) {
        (Some(here), Some(there)) => Some(here.newest(there)),
        (here, there) => here.or(there),
    };
    let in_force = newest.as_ref().filter(|entry| entry.is_in_force());
    let in_force = in_force.map(|entry| entry.revocation.clone());
    // A revoked node without a record gets one, which has the revocation.
    let revoked_only = |revoked: &Revocation| NodeRecord::name_only(node, revoked.at);
    let record = record.or_else(|| in_force.as_ref().map(revoked_only));
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
            own_record.or_else(|| record.as_ref().map(entry_text)),
        ),
    ];
    if !store.change_all_entries(&changes)? {
        return Ok(Fetched::Conflict);
    }
    Ok(record.map_or(Fetched::Absent, |record| {
        Fetched::Stored(Box::new(NodeRecord {
            revoked: in_force,
            ..record
        }))
    }))
}
