//! A key that is present, as distinct from one that is left out.
//!
//! If a missing key means "any", an empty list must not mean the same. Otherwise a list that a template left empty would
//! allow everything that it was meant to restrict.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Value of a key, if the key is present. For `#[serde(default)]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specified<T>(pub Option<T>);

impl<T> Default for Specified<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Specified<T> {
    /// Whether the key is absent. For `skip_serializing_if`, so that the serialized form can be parsed again.
    pub fn is_absent(&self) -> bool {
        self.0.is_none()
    }
}

impl<T> From<T> for Specified<T> {
    fn from(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Serialize> Serialize for Specified<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Specified<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        T::deserialize(from).map(Self::from)
    }
}

/// Schema of `T`: a key without a value (`users:`) counts as missing.
impl<T: schemars::JsonSchema> schemars::JsonSchema for Specified<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        T::schema_name()
    }

    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        T::json_schema(generator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    #[derive(Deserialize)]
    struct Sample {
        #[serde(default)]
        users: Specified<Vec<String>>,
    }

    #[test]
    fn a_key_that_is_empty_is_not_one_that_is_absent() {
        let read = |value| from_value::<Sample>(value).map(|sample| sample.users.0);
        assert_eq!(read(json!({})).unwrap(), None);
        assert_eq!(read(json!({ "users": [] })).unwrap(), Some(Vec::new()));
        assert!(read(json!({ "users": null })).is_err());
    }
}
