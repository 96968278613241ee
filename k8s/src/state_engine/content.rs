//! Completeness of the Secrets: the first content, the move of the earlier format, and the repair of emptied Secrets.
//!
//! The first Secret is filled last. The state is in use as soon as the first Secret has entries, and not before. Until then
//! only this module writes, so a gateway that ends in between leaves Secrets that another gateway fills again.
//!
//! Two gateways may fill the Secrets at the same time. Each reads the first Secret after all others, and writes only what it
//! has read. Each fill changes the version of the others, because it contains the version of the first Secret. So a gateway
//! with an earlier version of the first Secret cannot write any Secret after another gateway with a later version has done so.

use super::{
    SecretEngine, Written,
    shard::{CONTENT_ID_KEY, PREPARED_KEY, SHARDS, ShardObject, shard_index},
};
use causeway_certs::{Entries, EntryKey, NodeName, Pin, Revocation, entry_text};
use causeway_gateway::shared_state::EngineError;
use futures_util::future::try_join_all;
use serde::Deserialize;
use std::{collections::BTreeMap, sync::Arc};

/// Data key of the earlier format, in the first Secret.
const EARLIER_KEY: &str = "state.json";
/// Content of [`EARLIER_KEY`] after the move. Gateways of the earlier version cannot parse it, and keep their own copy. An empty
/// value would tell them that no node is revoked any more.
const MOVED: &str = r#"{"revoked":"moved to entries.json of 16 Secrets by a later version"}"#;

/// State in the earlier format.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EarlierState {
    revoked: BTreeMap<NodeName, Revocation>,
    /// Pinned keys by `NODE:PORT`.
    pins: BTreeMap<String, Pin>,
}

impl EarlierState {
    /// Returns the entries of each Secret.
    fn into_shards(self) -> Vec<Entries> {
        let mut shards = vec![Entries::new(); SHARDS];
        let mut insert = |key: String, value: String| {
            if let Some(shard) = shards.get_mut(shard_index(&key)) {
                shard.insert(key, value);
            }
        };
        for (node, revocation) in &self.revoked {
            let key = EntryKey::Revoked(node.as_ref()).to_string();
            insert(key, entry_text(revocation));
        }
        for (upstream, pin) in &self.pins {
            insert(format!("pin/{upstream}"), entry_text(pin));
        }
        shards
    }
}

/// Completeness of the Secrets.
pub(super) enum Assessment {
    /// All Secrets have entries, which are these.
    Complete(Entries),
    /// These Secrets have lost entries that this gateway has.
    Emptied(Vec<usize>),
    /// The first Secret has no entries. The state was not in use before.
    Empty,
}

impl SecretEngine {
    /// Assesses the Secrets, the first of which was read last or at the same time.
    pub(super) fn assess(&self, objects: &[Arc<ShardObject>]) -> Result<Assessment, EngineError> {
        let Some(first) = objects.first() else {
            return Ok(Assessment::Empty);
        };
        let loaded = self.cache.loaded();
        if !first.has_entries() {
            if loaded.is_none() {
                return Ok(Assessment::Empty);
            }
            // Another gateway, which has not loaded the state before, may have begun to fill the Secrets.
            let is_emptied = |(index, object): (usize, &Arc<ShardObject>)| {
                let last = self.cache.last_entries(index);
                let is_filled = object.text(PREPARED_KEY).is_some();
                let differs = object.parsed_entries() != last.as_ref();
                (index == 0 || !object.has_entries() || (is_filled && differs)).then_some(index)
            };
            let emptied = objects.iter().enumerate().filter_map(is_emptied);
            return Ok(Assessment::Emptied(emptied.collect()));
        }
        let last_id = loaded.as_ref().and_then(|loaded| loaded.id.as_deref());
        if let (Some(last), Some(id)) = (last_id, first.text(CONTENT_ID_KEY))
            && last != id
        {
            return Err(self.error(0, "all Secrets were emptied, and another gateway has filled them again. This gateway keeps its copy of the state. Restart it to accept the new content"));
        }
        let emptied = objects
            .iter()
            .enumerate()
            .filter(|(_, object)| !object.has_entries());
        let emptied: Vec<usize> = emptied.map(|(index, _)| index).collect();
        if let Some(index) = emptied.first() {
            let is_known = |index: &usize| self.cache.last_entries(*index).is_some();
            if emptied.iter().all(is_known) {
                return Ok(Assessment::Emptied(emptied));
            }
            return Err(self.emptied_error(*index));
        }
        let mut entries = Entries::new();
        for (index, object) in objects.iter().enumerate() {
            let shard = self.check_entries(index, object)?;
            entries.extend(
                shard
                    .iter()
                    .map(|(key, value)| (key.clone(), value.clone())),
            );
        }
        self.cache.record_loaded(objects);
        Ok(Assessment::Complete(entries))
    }

    fn emptied_error(&self, index: usize) -> EngineError {
        let patch = r#"-p '{"data":{"entries.json":"e30="}}'"#;
        let name = self.names.name(index);
        self.error(index, format!("it has lost its entries (it was deleted or replaced), and other Secrets have theirs. A gateway that has loaded the state before writes them back. To go on without them: kubectl -n {} patch secret {name} {patch}", self.namespace))
    }

    /// Writes the entries that this gateway has into Secrets that have lost them.
    pub(super) async fn write_back(
        &self,
        objects: &[Arc<ShardObject>],
        emptied: &[usize],
    ) -> Result<(), EngineError> {
        let id = self.cache.loaded().and_then(|loaded| loaded.id);
        // The first Secret is the last one.
        for index in emptied.iter().rev() {
            let (Some(object), Some(entries)) =
                (objects.get(*index), self.cache.last_entries(*index))
            else {
                continue;
            };
            let id = [(PREPARED_KEY, None), (CONTENT_ID_KEY, id.as_deref())];
            let data_keys = if *index == 0 { &id[..] } else { &id[..1] };
            match self.replace(*index, object, &entries, data_keys).await? {
                Written::Done => tracing::warn!(
                    secret = self.secret_name(*index),
                    entries = entries.len(),
                    "a Secret of the shared state was emptied; its entries were written back"
                ),
                Written::Conflict => return Ok(()),
            }
        }
        Ok(())
    }

    /// Fills the Secrets, with the state of the earlier format if there is one. Ends without an error if another gateway writes
    /// at the same time.
    pub(super) async fn initialize(&self, objects: &[Arc<ShardObject>]) -> Result<(), EngineError> {
        let Some((first, others)) = objects.split_first() else {
            return Ok(());
        };
        let earlier = first.text(EARLIER_KEY).filter(|text| !text.is_empty());
        if earlier == Some(MOVED) {
            return Err(self.emptied_error(0));
        }
        for object in others {
            let has_content = object
                .parsed_entries()
                .is_none_or(|entries| !entries.is_empty());
            let is_prepared = earlier.is_some() && object.text(PREPARED_KEY).is_some();
            if object.has_entries() && has_content && !is_prepared {
                return Err(self.emptied_error(0));
            }
        }
        let state = match earlier {
            Some(text) => serde_json::from_str(text).map_err(|error| {
                self.error(
                    0,
                    format!("its data key {EARLIER_KEY} cannot be parsed: {error}"),
                )
            })?,
            None => EarlierState::default(),
        };
        let shards = state.into_shards();
        let prepared_for = first.version();
        let prepared = [(PREPARED_KEY, Some(prepared_for.as_str()))];
        let prepare = async |index: usize, object: &ShardObject, entries: &Entries| {
            if object.text(PREPARED_KEY) == Some(&prepared_for) {
                return Ok(true);
            }
            let written = self.replace(index, object, entries, &prepared).await?;
            Ok(matches!(written, Written::Done))
        };
        let contents = (1..).zip(others).zip(shards.iter().skip(1));
        let writes = contents.map(|((index, object), entries)| prepare(index, object, entries));
        if try_join_all(writes).await?.contains(&false) {
            return Ok(());
        }
        let id = format!("{:032x}", rand::random::<u128>());
        let moved = earlier.map(|_| MOVED);
        let data_keys = [(CONTENT_ID_KEY, Some(id.as_str())), (EARLIER_KEY, moved)];
        let Some(entries) = shards.first() else {
            return Ok(());
        };
        if let Written::Done = self.replace(0, first, entries, &data_keys).await? {
            tracing::info!(
                secrets = %self,
                entries = shards.iter().map(Entries::len).sum::<usize>(),
                "the Secrets of the shared state are filled"
            );
        }
        Ok(())
    }
}
