//! The durable state that gateways share, as entries of a key and a value.
//!
//! | key | value (JSON) |
//! | --- | --- |
//! | `node/NAME` | [`NodeRecord`] without the revocation |
//! | `revoked/NAME` | [`RevocationEntry`] |
//! | `token/ID` | [`TokenRecord`] |
//! | `pin/NAME:PORT` | [`Pin`] |
//! | `revoked-gateway/SERIAL` | [`RevokedGateway`] |
//! | `ca` | the CA and the secret of session tickets, see [`SharedCa::to_entry`] |
//!
//! The data directory stores these entries in its files. Other engines store them as they are. An entry is compared by its
//! text, which is the same at every gateway of a version.

use std::collections::BTreeMap;

use causeway_tls::NodeName;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::atomic_file::StoreError;
use super::data_dir::{CA_FILE, NODES_FILE, Store, TICKETS_FILE};
use super::nodes::{ENDED_FILE, EndedRevocations, NodeRecord, Revocation, RevocationEntry};
use super::pins::{PINS_FILE, PinEntry, StoredPins};
use super::revoked_gateways::{
    REVOKED_GATEWAYS_FILE, RevokedGateway, RevokedGateways, parse_serial,
};
use super::shared_ca::SharedCa;
use crate::token::{TOKENS_FILE, TokenRecord};

/// Entries by their keys.
pub type Entries = BTreeMap<String, String>;

/// Change of an entry, which only takes place if the entry has the expected value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryChange {
    /// Key of the entry.
    pub key: String,
    /// Value before the change; `None` if there is no entry.
    pub expected: Option<String>,
    /// Value after the change; `None` removes the entry.
    pub value: Option<String>,
}

/// Kind and name of an entry, as its key has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKey<'a> {
    /// Record of this node.
    Node(&'a str),
    /// Revocation of this node.
    Revoked(&'a str),
    /// Join token with this id.
    Token(&'a str),
    /// Pinned key of this node at this port.
    Pin(&'a str, u16),
    /// Revocation of the gateway's certificate with this serial number.
    RevokedGateway(&'a str),
    /// The CA.
    Ca,
}

impl<'a> EntryKey<'a> {
    /// Parses a key. Returns `None` for a key of another version.
    pub fn parse(key: &'a str) -> Option<Self> {
        if key == "ca" {
            return Some(Self::Ca);
        }
        let (kind, name) = key.split_once('/')?;
        match kind {
            "node" => Some(Self::Node(name)),
            "revoked" => Some(Self::Revoked(name)),
            "token" => Some(Self::Token(name)),
            "revoked-gateway" => Some(Self::RevokedGateway(name)),
            "pin" => {
                let (node, port) = name.rsplit_once(':')?;
                Some(Self::Pin(node, port.parse().ok()?))
            }
            _ => None,
        }
    }
}

impl std::fmt::Display for EntryKey<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Node(name) => write!(out, "node/{name}"),
            Self::Revoked(name) => write!(out, "revoked/{name}"),
            Self::Token(id) => write!(out, "token/{id}"),
            Self::Pin(node, port) => write!(out, "pin/{node}:{port}"),
            Self::RevokedGateway(serial) => write!(out, "revoked-gateway/{serial}"),
            Self::Ca => out.write_str("ca"),
        }
    }
}

/// The files of the data directory that contain entries.
struct Files {
    nodes: BTreeMap<NodeName, NodeRecord>,
    ended: EndedRevocations,
    tokens: Vec<TokenRecord>,
    pins: StoredPins,
    revoked_gateways: RevokedGateways,
}

impl Store {
    /// Returns all entries of this directory.
    ///
    /// # Errors
    /// If a file cannot be read or parsed.
    pub fn entries(&self) -> Result<Entries, StoreError> {
        let ca = self.ca()?.map(|_| self.shared()).transpose()?;
        let _lock = self.dir.lock()?;
        let mut entries = self.read_files()?.to_entries();
        if let Some(ca) = ca {
            let text = ca.to_entry();
            let text = text.map_err(|error| damaged(CA_FILE, &error))?;
            entries.insert(EntryKey::Ca.to_string(), text);
        }
        Ok(entries)
    }

    /// Applies each change whose expected value is current. Returns the keys of the other changes. The entry `ca` is changed by
    /// [`Store::import_shared`] only.
    ///
    /// # Errors
    /// If a file cannot be read or written, or a value cannot be parsed. Nothing has changed in the latter case.
    pub fn change_entries(&self, changes: &[EntryChange]) -> Result<Vec<String>, StoreError> {
        self.change_if(changes, |_| true)
    }

    /// Applies all changes if the expected value of each is current, else none. Returns whether they are applied.
    ///
    /// # Errors
    /// Those of [`Store::change_entries`].
    pub fn change_all_entries(&self, changes: &[EntryChange]) -> Result<bool, StoreError> {
        let conflicts = self.change_if(changes, <[String]>::is_empty)?;
        Ok(conflicts.is_empty())
    }

    /// Applies each change whose expected value is current, if `accepts` returns `true` for the keys of the others. Returns these
    /// keys.
    fn change_if(
        &self,
        changes: &[EntryChange],
        accepts: impl FnOnce(&[String]) -> bool,
    ) -> Result<Vec<String>, StoreError> {
        let _lock = self.dir.lock()?;
        let previous = self.read_files()?;
        let current = previous.to_entries();
        let mut conflicts = Vec::new();
        let mut next = self.read_files()?;
        // The change of a revocation keeps or makes the node's record, so that of the record comes after it.
        let is_revocation = |change: &&EntryChange| change.key.starts_with("revoked/");
        let (first, rest): (Vec<_>, Vec<_>) = changes.iter().partition(is_revocation);
        for change in first.into_iter().chain(rest) {
            if current.get(&change.key) == change.expected.as_ref() {
                next.apply(change)?;
            } else {
                conflicts.push(change.key.clone());
            }
        }
        if !accepts(&conflicts) {
            return Ok(conflicts);
        }
        // A node's certificate must not be admitted between two writes, so its revocation is written with the node.
        if next.ended != previous.ended {
            self.dir.write_json(ENDED_FILE, &next.ended)?;
        }
        // A directory whose first entries are ends of revocations gets an empty file of nodes. Without it, the next reader takes
        // the file for lost.
        let is_first = next.ended != previous.ended && self.dir.require(NODES_FILE).is_err();
        if next.nodes != previous.nodes || is_first {
            self.dir.write_json(NODES_FILE, &next.nodes)?;
        }
        if next.tokens != previous.tokens {
            self.dir.write_json(TOKENS_FILE, &next.tokens)?;
        }
        if next.pins != previous.pins {
            self.dir.write_json(PINS_FILE, &next.pins)?;
        }
        if next.revoked_gateways != previous.revoked_gateways {
            let revoked = &next.revoked_gateways;
            self.dir.write_json(REVOKED_GATEWAYS_FILE, revoked)?;
        }
        Ok(conflicts)
    }

    /// Returns the times of the last changes of the files with entries, each `None` without its file.
    pub fn entry_changes(&self) -> [Option<std::time::SystemTime>; 6] {
        [
            CA_FILE,
            NODES_FILE,
            ENDED_FILE,
            TOKENS_FILE,
            PINS_FILE,
            REVOKED_GATEWAYS_FILE,
        ]
        .map(|name| self.dir.path(name).metadata().ok()?.modified().ok())
    }

    fn read_files(&self) -> Result<Files, StoreError> {
        Ok(Files {
            nodes: self.dir.read_json(NODES_FILE)?.unwrap_or_default(),
            ended: self.dir.read_json(ENDED_FILE)?.unwrap_or_default(),
            tokens: self.dir.read_json(TOKENS_FILE)?.unwrap_or_default(),
            pins: self.dir.read_json(PINS_FILE)?.unwrap_or_default(),
            revoked_gateways: self.revoked_gateways()?,
        })
    }
}

impl Files {
    /// Changes the files in memory.
    ///
    /// # Errors
    /// If the value cannot be parsed.
    fn apply(&mut self, change: &EntryChange) -> Result<(), StoreError> {
        let (key, value) = (&change.key, change.value.as_deref());
        let name = |text: &str| NodeName::parse(text).map_err(|why| damaged(key, &why));
        match EntryKey::parse(key) {
            Some(EntryKey::Node(node)) => {
                let node = name(node)?;
                let revoked = self.nodes.remove(&node).and_then(|record| record.revoked);
                let record = value.map(|text| parse::<NodeRecord>(key, text));
                let record = record.transpose()?;
                // A revocation stays until its own entry is removed.
                let revoked_only = |revoked: &Revocation| NodeRecord::name_only(&node, revoked.at);
                let record = record.or_else(|| revoked.as_ref().map(revoked_only));
                if let Some(record) = record {
                    self.nodes.insert(node, NodeRecord { revoked, ..record });
                }
            }
            Some(EntryKey::Revoked(node)) => {
                let node = name(node)?;
                let entry = value.map(|text| parse::<RevocationEntry>(key, text));
                self.set_revocation(&node, entry.transpose()?);
            }
            Some(EntryKey::Token(id)) => {
                let token = value.map(|text| parse::<TokenRecord>(key, text));
                let token = token.transpose()?;
                let place = self.tokens.iter().position(|token| token.id == id);
                match (place, token) {
                    (Some(place), Some(token)) => self.tokens[place] = token,
                    (Some(place), None) => drop(self.tokens.remove(place)),
                    (None, token) => self.tokens.extend(token),
                }
            }
            Some(EntryKey::Pin(node, port)) => {
                let node = name(node)?;
                let pin = value.map(|text| parse::<PinEntry>(key, text)).transpose()?;
                let ports = self.pins.entry(node).or_default();
                match pin {
                    Some(pin) => drop(ports.insert(port, pin)),
                    None => drop(ports.remove(&port)),
                }
                self.pins.retain(|_, ports| !ports.is_empty());
            }
            Some(EntryKey::RevokedGateway(serial)) => {
                let revoked = value.map(|text| parse(key, text));
                self.revoked_gateways.set(serial, revoked.transpose()?);
            }
            Some(EntryKey::Ca) | None => {}
        }
        Ok(())
    }

    fn set_revocation(&mut self, node: &NodeName, entry: Option<RevocationEntry>) {
        self.ended.remove(node);
        let revoked = match entry {
            Some(entry) if entry.is_in_force() => Some(entry.revocation),
            Some(end) => {
                self.ended.insert(node.clone(), end);
                None
            }
            None => None,
        };
        if let Some(at) = revoked.as_ref().map(|revoked| revoked.at) {
            let record = || NodeRecord::name_only(node, at);
            self.nodes.entry(node.clone()).or_insert_with(record);
        }
        if let Some(record) = self.nodes.get_mut(node) {
            record.revoked = revoked;
        }
    }

    fn to_entries(&self) -> Entries {
        let mut entries = Entries::new();
        for (name, end) in &self.ended {
            let key = EntryKey::Revoked(name.as_ref()).to_string();
            entries.insert(key, entry_text(end));
        }
        // A revocation in force replaces an end.
        for (name, record) in &self.nodes {
            let name = name.to_string();
            if let Some(revoked) = &record.revoked {
                entries.insert(EntryKey::Revoked(&name).to_string(), entry_text(revoked));
            }
            let record = NodeRecord {
                revoked: None,
                ..record.clone()
            };
            entries.insert(EntryKey::Node(&name).to_string(), entry_text(&record));
        }
        for token in &self.tokens {
            entries.insert(EntryKey::Token(&token.id).to_string(), entry_text(token));
        }
        for (node, ports) in &self.pins {
            let node = node.to_string();
            for (port, pin) in ports {
                entries.insert(EntryKey::Pin(&node, *port).to_string(), entry_text(pin));
            }
        }
        for (serial, revoked) in self.revoked_gateways.iter() {
            let key = EntryKey::RevokedGateway(serial).to_string();
            entries.insert(key, entry_text(revoked));
        }
        entries
    }
}

/// Returns the value of an entry of the engine as this version writes it. A later version may write the same value in another
/// order.
///
/// # Errors
/// If this version cannot read the value.
pub fn normalize_entry(key: &str, text: &str) -> Result<String, StoreError> {
    let other_name = |is_same: bool| {
        let why = || damaged(key, &"its value has another name than its key");
        is_same.then_some(()).ok_or_else(why)
    };
    let check_name = |node: &str| {
        let parsed = NodeName::parse(node).map_err(|why| damaged(key, &why))?;
        other_name(parsed.as_ref() == node)
    };
    match EntryKey::parse(key) {
        Some(EntryKey::Node(node)) => {
            let record = parse::<NodeRecord>(key, text)?;
            other_name(record.node.as_ref() == node)?;
            Ok(entry_text(&NodeRecord {
                revoked: None,
                ..record
            }))
        }
        Some(EntryKey::Revoked(node)) => {
            check_name(node)?;
            Ok(entry_text(&parse::<RevocationEntry>(key, text)?))
        }
        Some(EntryKey::Token(id)) => {
            let token = parse::<TokenRecord>(key, text)?;
            other_name(token.id == id)?;
            Ok(entry_text(&token))
        }
        Some(EntryKey::Pin(node, _)) => {
            check_name(node)?;
            Ok(entry_text(&parse::<PinEntry>(key, text)?))
        }
        Some(EntryKey::RevokedGateway(serial)) => {
            other_name(parse_serial(serial).as_deref() == Some(serial))?;
            Ok(entry_text(&parse::<RevokedGateway>(key, text)?))
        }
        Some(EntryKey::Ca) | None => Ok(text.to_owned()),
    }
}

fn parse<T: DeserializeOwned>(key: &str, text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| damaged(key, &error))
}

fn damaged(key: &str, why: &impl ToString) -> StoreError {
    StoreError::Entry {
        key: key.to_owned(),
        why: why.to_string(),
    }
}

/// Returns the value of an entry.
///
/// # Panics
/// Never for the types of entries, which have text keys only.
pub fn entry_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("the types of entries can be written as JSON")
}

/// Value of the entry `ca`: the contents of the two files.
#[derive(Serialize, Deserialize)]
struct CaEntry {
    ca: String,
    tickets: String,
}

impl SharedCa {
    /// Returns the value of the entry `ca`. It is secret.
    ///
    /// # Errors
    /// If the state cannot be written as JSON.
    pub fn to_entry(&self) -> serde_json::Result<String> {
        let [(_, ca), (_, tickets)] = self.files()?;
        serde_json::to_string(&CaEntry { ca, tickets })
    }

    /// Parses the value of the entry `ca`.
    ///
    /// # Errors
    /// The fault, as a sentence.
    pub fn from_entry(text: &str) -> Result<Self, String> {
        let [(_, ca), (_, tickets)] = Self::files_of_entry(text)?;
        Self::parse(&ca, &tickets).map_err(|(name, why)| format!("{name}: {why}"))
    }

    /// Returns the content of each file in the value of the entry `ca`, by its name like [`SharedCa::files`]. The contents are
    /// not parsed.
    ///
    /// # Errors
    /// The fault, as a sentence.
    pub fn files_of_entry(text: &str) -> Result<[(&'static str, String); 2], String> {
        let CaEntry { ca, tickets } =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        Ok([(CA_FILE, ca), (TICKETS_FILE, tickets)])
    }

    /// Returns the value of the entry `ca` for the contents of the files, which `read` returns by their names. Returns `None` if
    /// there is neither of them.
    ///
    /// # Errors
    /// If one of the two files is missing, as a sentence.
    pub fn entry_of_files(
        mut read: impl FnMut(&str) -> Option<String>,
    ) -> Result<Option<String>, String> {
        let missing = |name| Err(format!("{name} is missing"));
        match (read(CA_FILE), read(TICKETS_FILE)) {
            (Some(ca), Some(tickets)) => Ok(Some(entry_text(&CaEntry { ca, tickets }))),
            (None, None) => Ok(None),
            (None, Some(_)) => missing(CA_FILE),
            (Some(_), None) => missing(TICKETS_FILE),
        }
    }
}
