//! Encoded answers, shared by all who ask the same: bounded in bytes, and what is evicted costs an encoding.

use bytes::Bytes;
use causeway_kept::{Answer, Kept};
use std::sync::Arc;

/// What the entry of a cache costs beyond its bytes.
const ENTRY: usize = 160;

/// Encoded answers by what was asked. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Encoded(Kept<Bytes>);

impl Encoded {
    /// With room for so many bytes.
    pub(crate) fn new(most: u64) -> Self {
        Self(Kept::new(most))
    }

    pub(crate) fn get(&self, asked: &str) -> Option<Bytes> {
        let held = self.0.look(asked.as_bytes())?;
        Some(Bytes::clone(&held))
    }

    pub(crate) fn put(&self, asked: &str, bytes: &Bytes) {
        let weight = u32::try_from(asked.len() + bytes.len() + ENTRY);
        let answer = Answer {
            held: Arc::new(bytes.clone()),
            weight: weight.unwrap_or(u32::MAX),
            life: None,
        };
        self.0.keep(asked.as_bytes(), answer);
    }

    /// Bytes that are held now.
    #[cfg(test)]
    pub(crate) async fn held(&self) -> u64 {
        self.0.weight().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_holds_no_more_than_it_may() {
        let cache = Encoded::new(100_000);
        let bytes = Bytes::from(vec![0; 1000]);
        for number in 0..1000 {
            cache.put(&format!("{number}"), &bytes);
            assert!(cache.held().await <= 100_000);
        }
        assert!((0..1000).any(|number| cache.get(&format!("{number}")).is_some()));
        assert!(cache.get("1001").is_none());
    }
}
