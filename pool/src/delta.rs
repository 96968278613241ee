//! What changed of an object, in place of all of it, for followers: LZ4 with the object before as its dictionary.
//!
//! A change of one endpoint is a hundred bytes of an `EndpointSlice` of two thousand. A follower asks for it by `delta=lz4` in
//! the query of its watch; who does not know that answers as to anybody. What does not fit the follower's own object is told by
//! the checksum, and listed anew.

use crate::object::Object;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The largest object that is told so, in bytes: LZ4 looks back so far.
const LARGEST: usize = 48 * 1024;

/// A change, as it stands in a watch's line beside its type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Delta<'a> {
    #[serde(borrow)]
    namespace: Cow<'a, str>,
    #[serde(borrow)]
    name: Cow<'a, str>,
    /// Of which version it is a change.
    base: u64,
    /// The object's length, in bytes.
    length: usize,
    /// A block of LZ4, in base64.
    #[serde(borrow)]
    lz4: Cow<'a, str>,
}

impl<'a> Delta<'a> {
    /// What changed; `None` where that is no smaller.
    pub(crate) fn between(before: &'a Object, after: &Object) -> Option<Self> {
        if before.json.len() > LARGEST || after.json.len() > LARGEST {
            return None;
        }
        let block = lz4_flex::block::compress_with_dict(&after.json, &before.json);
        let lz4 = STANDARD.encode(block);
        let (namespace, name) = (Cow::from(&*before.key.0), Cow::from(&*before.key.1));
        (lz4.len() < after.json.len() / 2).then_some(Self {
            namespace,
            name,
            base: before.version,
            length: after.json.len(),
            lz4: lz4.into(),
        })
    }

    /// Of which object.
    pub(crate) fn key(&self) -> (Box<str>, Box<str>) {
        (Box::from(&*self.namespace), Box::from(&*self.name))
    }

    /// The object's JSON afterwards; `None` if this is no change of that object.
    pub(crate) fn onto(&self, before: &Object) -> Option<Bytes> {
        if before.version != self.base || self.length > LARGEST {
            return None;
        }
        let block = STANDARD.decode(self.lz4.as_bytes()).ok()?;
        let json = lz4_flex::block::decompress_with_dict(&block, self.length, &before.json).ok()?;
        (json.len() == self.length).then(|| json.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::labelled;

    #[test]
    fn a_change_is_small_and_makes_the_object_that_it_is_of() {
        let before = labelled("n", "a", 7, &"x".repeat(2000));
        let after = before.at(8);
        let delta = Delta::between(&before, &after).unwrap();
        assert!(delta.lz4.len() < 100, "{}", delta.lz4.len());
        let line = serde_json::to_string(&delta).unwrap();
        let heard: Delta<'_> = serde_json::from_str(&line).unwrap();
        assert_eq!(heard.key(), before.key);
        assert_eq!(heard.onto(&before).unwrap(), after.json);
    }

    #[test]
    fn what_fits_no_object_makes_none() {
        let before = labelled("n", "a", 7, &"x".repeat(2000));
        let delta = Delta::between(&before, &before.at(8)).unwrap();
        assert_eq!(delta.onto(&before.at(9)), None);
        for (length, lz4) in [
            (LARGEST + 1, &*delta.lz4),
            (10, &*delta.lz4),
            (delta.length, "%"),
            (5, "AAAA"),
        ] {
            let other = Delta {
                length,
                lz4: lz4.into(),
                ..delta.clone()
            };
            assert_eq!(other.onto(&before), None, "{length} {lz4}");
        }
        let large = labelled("n", "a", 7, &"x".repeat(LARGEST));
        assert!(Delta::between(&large, &large.at(8)).is_none());
    }
}
