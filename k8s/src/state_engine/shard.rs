//! Distribution of entries among Secrets, and the content of one Secret.

use causeway_certs::{Entries, EntryKey};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::ResourceExt;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Number of Secrets. The manifests have this number, and a key of an entry always leads to the same Secret.
pub(crate) const SHARDS: usize = 16;
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
/// without a name, such as `ca`, is in the first Secret.
pub(super) fn shard_index(key: &str) -> usize {
    let name = match EntryKey::parse(key) {
        Some(EntryKey::Pin(node, _)) => node,
        _ => match key.split_once('/') {
            Some((_, name)) => name,
            None => return 0,
        },
    };
    let first_byte = Sha256::digest(name.as_bytes()).first().copied();
    usize::from(first_byte.unwrap_or_default()) % SHARDS
}

/// Returns the name of the Secret with this number.
pub(super) fn shard_name(name: &str, index: usize) -> String {
    match index {
        0 => name.to_owned(),
        index => format!("{name}-{index}"),
    }
}

/// A Secret with its entries.
#[derive(Clone, Debug)]
pub(super) struct ShardObject {
    /// The Secret without its entries.
    secret: Secret,
    /// The entries, or the reason for which they cannot be parsed. `None` without the key [`ENTRIES_KEY`].
    pub(super) entries: Option<Result<Arc<Entries>, String>>,
}

impl ShardObject {
    /// Parses a Secret.
    pub(super) fn parse(mut secret: Secret) -> Self {
        // Without managed fields in a request, the API keeps those of the object.
        secret.metadata.managed_fields = None;
        let text = secret
            .data
            .as_mut()
            .and_then(|data| data.remove(ENTRIES_KEY));
        let parse = |text: ByteString| {
            let entries = serde_json::from_slice::<Entries>(&text.0);
            entries.map(Arc::new).map_err(|error| error.to_string())
        };
        Self {
            // An empty text is the result of `kubectl create secret` or of an editor, and no JSON.
            entries: text.filter(|text| !text.0.is_empty()).map(parse),
            secret,
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
    /// The size, if the API would refuse it.
    pub(super) fn with(
        &self,
        entries: &Entries,
        data_keys: &[(&str, Option<&str>)],
    ) -> Result<Secret, usize> {
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
        data.insert(ENTRIES_KEY.to_owned(), ByteString(entries_text(entries)));
        let size = data.values().map(|value| value.0.len()).sum();
        if size > MAX_SECRET_BYTES {
            return Err(size);
        }
        Ok(secret)
    }
}

/// Returns the content of [`ENTRIES_KEY`].
pub(super) fn entries_text(entries: &Entries) -> Vec<u8> {
    // A map of texts can always be written.
    serde_json::to_vec(entries).unwrap_or_default()
}
