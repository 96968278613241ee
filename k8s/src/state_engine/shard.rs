//! Distribution of entries among Secrets, and the content of one Secret.

use causeway_certs::{Entries, EntryKey, SharedCa};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::ResourceExt;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Number of Secrets. The manifests have this number, and a key of an entry always leads to the same Secret.
pub(super) const SHARDS: usize = 16;
/// Number of the Secret with the CA, which follows those of the other entries.
pub(super) const CA_SECRET: usize = SHARDS;
/// Data key of the entries: a JSON object of key to value, both texts.
pub(super) const ENTRIES_KEY: &str = "entries.json";
/// Data key of the random id of this content, in the first Secret only. Content that was made anew has another id.
pub(super) const CONTENT_ID_KEY: &str = "content-id";
/// Data key of a Secret that was filled before the first Secret was: the version of the first Secret by which it was filled.
pub(super) const PREPARED_KEY: &str = "prepared-for";
/// Maximum size of the data of a Secret (`MaxSecretSize` of Kubernetes), in bytes before base64.
pub(super) const MAX_SECRET_BYTES: usize = 1 << 20;

/// Returns the number of the Secret that contains the entry of this key.
///
/// It is the first byte of the SHA-256 of the key's name, modulo [`SHARDS`]. The name is what follows the first slash,
/// without the port of a pinned key. So the record, the revocation and the pinned keys of one node are in one Secret. A key
/// without a name, such as `version`, is in the first Secret. The CA has a Secret of its own.
pub(super) fn shard_index(key: &str) -> usize {
    let name = match EntryKey::parse(key) {
        Some(EntryKey::Ca) => return CA_SECRET,
        Some(EntryKey::Pin(node, _)) => node,
        _ => match key.split_once('/') {
            Some((_, name)) => name,
            None => return 0,
        },
    };
    let first_byte = Sha256::digest(name.as_bytes()).first().copied();
    usize::from(first_byte.unwrap_or_default()) % SHARDS
}

/// Names of the Secrets.
#[derive(Clone, Debug)]
pub(super) struct SecretNames {
    /// Name of the first Secret of the entries.
    pub(super) state: String,
    /// Name of the Secret with the CA.
    pub(super) ca: String,
}

impl SecretNames {
    /// Returns the name of the Secret with this number.
    pub(super) fn name(&self, index: usize) -> String {
        match index {
            0 => self.state.clone(),
            CA_SECRET => self.ca.clone(),
            index => format!("{}-{index}", self.state),
        }
    }
}

/// A Secret with its entries.
#[derive(Clone, Debug)]
pub(super) struct ShardObject {
    /// The Secret without its entries.
    secret: Secret,
    /// The entries, or the reason for which they cannot be parsed. `None` without the key [`ENTRIES_KEY`]. The Secret with the CA
    /// always has entries, at most one.
    pub(super) entries: Option<Result<Arc<Entries>, String>>,
    /// Whether this is the Secret with the CA.
    has_ca: bool,
}

impl ShardObject {
    /// Parses the Secret with this number.
    pub(super) fn parse(index: usize, mut secret: Secret) -> Self {
        // Without managed fields in a request, the API keeps those of the object.
        secret.metadata.managed_fields = None;
        let mut take = |key: &str| {
            let text = secret.data.as_mut()?.remove(key)?.0;
            // An empty text is the result of `kubectl create secret` or of an editor.
            (!text.is_empty()).then_some(text)
        };
        let has_ca = index == CA_SECRET;
        let entries = if has_ca {
            Some(parse_ca(take))
        } else {
            take(ENTRIES_KEY).map(|text| {
                serde_json::from_slice(&text).map_err(|error| {
                    format!("the data key {ENTRIES_KEY} cannot be parsed: {error}")
                })
            })
        };
        Self {
            entries: entries.map(|entries| entries.map(Arc::new)),
            secret,
            has_ca,
        }
    }

    /// Returns the version of the object.
    pub(super) fn version(&self) -> String {
        self.secret.resource_version().unwrap_or_default()
    }

    /// Whether this version of the object is later than the other. Versions of Kubernetes are numbers.
    pub(super) fn is_later_than(&self, other: &Self) -> bool {
        let number = |object: &Self| object.version().parse::<u64>().ok();
        match (number(self), number(other)) {
            (Some(own), Some(other)) => own > other,
            _ => self.version() != other.version(),
        }
    }

    /// Returns the value of a data key as text.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        let bytes = self.secret.data.as_ref()?.get(key)?;
        std::str::from_utf8(&bytes.0).ok()
    }

    /// Whether the Secret has entries. They may be unparsable.
    pub(super) fn has_entries(&self) -> bool {
        self.entries.is_some()
    }

    /// Returns the entries that can be parsed.
    pub(super) fn parsed_entries(&self) -> Option<&Arc<Entries>> {
        self.entries.as_ref()?.as_ref().ok()
    }

    /// Returns the Secret with other entries and other data keys, for a write that requires the version of this object.
    /// A value `None` removes the data key.
    ///
    /// # Errors
    /// If the API would refuse the size, or the value of the entry `ca` does not contain the files of the CA.
    pub(super) fn with(
        &self,
        entries: &Entries,
        data_keys: &[(&str, Option<&str>)],
    ) -> Result<Secret, String> {
        let mut secret = self.secret.clone();
        let data = secret.data.get_or_insert_default();
        for (key, value) in data_keys {
            match value {
                Some(value) => {
                    data.insert((*key).to_owned(), ByteString(value.as_bytes().to_vec()));
                }
                None => drop(data.remove(*key)),
            }
        }
        if self.has_ca {
            for text in entries.values() {
                for (name, text) in SharedCa::files_of_entry(text)? {
                    data.insert(name.to_owned(), ByteString(text.into_bytes()));
                }
            }
        } else {
            data.insert(ENTRIES_KEY.to_owned(), ByteString(entries_text(entries)));
        }
        let size: usize = data.values().map(|value| value.0.len()).sum();
        if size > MAX_SECRET_BYTES {
            return Err(format!(
                "it would have {size} bytes of data, and the API accepts {MAX_SECRET_BYTES}; remove nodes that no longer exist (causeway node remove)"
            ));
        }
        Ok(secret)
    }
}

/// Parses the Secret with the CA, whose data keys are the names of the CA's files, as `causeway k8s ca-secret` writes them.
/// `take` returns the value of a data key.
fn parse_ca(mut take: impl FnMut(&str) -> Option<Vec<u8>>) -> Result<Entries, String> {
    let entry = SharedCa::entry_of_files(|name| {
        let text = take(name)?;
        Some(String::from_utf8_lossy(&text).into_owned())
    });
    let entry = entry.map_err(|why| format!("the data key {why}"))?;
    let entry = entry.map(|value| (EntryKey::Ca.to_string(), value));
    Ok(entry.into_iter().collect())
}

/// Returns the content of [`ENTRIES_KEY`].
pub(super) fn entries_text(entries: &Entries) -> Vec<u8> {
    // A map of texts can always be written.
    serde_json::to_vec(entries).unwrap_or_default()
}
