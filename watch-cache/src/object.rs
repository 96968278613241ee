//! An object: its JSON as the cloud sent it, and the fields that are read often.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, value::RawValue};
use std::borrow::Cow;

/// Namespace and name. The namespace is empty for an object without one.
pub(crate) type NamespacedName = (Box<str>, Box<str>);

/// An object of Kubernetes' API. It is immutable: a change is another object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub(crate) key: NamespacedName,
    pub(crate) version: u64,
    pub(crate) labels: Box<[(Box<str>, Box<str>)]>,
    /// JSON of the whole object, kind and API version included.
    pub(crate) json: Bytes,
}

/// Error that makes a text unusable as an object.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The text is not JSON, or not an object.
    #[error("malformed: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The object has no name.
    #[error("an object has no metadata.name")]
    MissingName,
    /// The version of the object is not a number.
    #[error("{name}: metadata.resourceVersion {version:?} is not a number")]
    Version {
        /// The object's name.
        name: String,
        /// Text in the field.
        version: String,
    },
}

#[derive(Deserialize)]
struct PartialObject<'a> {
    #[serde(default, borrow)]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    metadata: ObjectMeta<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ObjectMeta<'a> {
    #[serde(default, borrow)]
    namespace: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    name: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    resource_version: Option<Cow<'a, str>>,
    #[serde(default)]
    labels: Option<Map<String, Value>>,
}

/// Kind and version of objects that a list does not state for each object.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TypeMeta<'a> {
    pub(crate) kind: &'a str,
    pub(crate) api_version: &'a str,
}

impl Object {
    /// Parses an object. An object without a kind, as in lists, gets this one.
    ///
    /// # Errors
    /// If the text is not an object.
    pub(crate) fn parse(raw: &RawValue, type_meta: TypeMeta<'_>) -> Result<Self, ObjectError> {
        let text = raw.get();
        let partial: PartialObject<'_> = serde_json::from_str(text)?;
        let json = if partial.kind.is_some() {
            Bytes::copy_from_slice(text.as_bytes())
        } else {
            // The text after the opening brace follows the kind and version.
            let mut json = serde_json::to_vec(&type_meta)?;
            json.pop();
            let remainder = text.trim_start().get(1..).unwrap_or_default();
            if !remainder.trim_start().starts_with('}') {
                json.push(b',');
            }
            json.extend_from_slice(remainder.as_bytes());
            Bytes::from(json)
        };
        let meta = partial.metadata;
        let name = meta.name.filter(|name| !name.is_empty());
        let name = name.ok_or(ObjectError::MissingName)?;
        let version = meta.resource_version.unwrap_or_default();
        let number = version.parse().map_err(|_| ObjectError::Version {
            name: name.to_string(),
            version: version.to_string(),
        })?;
        let labels = meta.labels.into_iter().flatten();
        let labels = labels.filter_map(|(key, value)| match value {
            Value::String(value) => Some((key.into(), value.into())),
            _ => None,
        });
        Ok(Self {
            key: (meta.namespace.unwrap_or_default().into(), name.into()),
            version: number,
            labels: labels.collect(),
            json,
        })
    }

    /// Returns the same object at another version.
    pub(crate) fn with_version(&self, version: u64) -> Self {
        let mut value = self.to_value();
        if let Some(meta) = value.get_mut("metadata") {
            meta["resourceVersion"] = Value::String(version.to_string());
        }
        Self {
            key: self.key.clone(),
            version,
            labels: self.labels.clone(),
            json: Bytes::from(value.to_string()),
        }
    }

    /// Returns the whole object, parsed.
    pub(crate) fn to_value(&self) -> Value {
        // The object has already been parsed once.
        serde_json::from_slice(&self.json).unwrap_or_default()
    }

    /// Returns the approximate size in memory, in bytes.
    pub(crate) fn memory_size(&self) -> usize {
        let labels: usize = self
            .labels
            .iter()
            .map(|(key, value)| key.len() + value.len() + 32)
            .sum();
        self.json.len() + labels + self.key.0.len() + self.key.1.len() + 160
    }

    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        let mut labels = self.labels.iter();
        labels
            .find(|(name, _)| &**name == key)
            .map(|(_, value)| &**value)
    }

    /// Returns the object's JSON.
    pub fn json(&self) -> &Bytes {
        &self.json
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const NAMED: TypeMeta<'static> = TypeMeta {
        kind: "Service",
        api_version: "v1",
    };

    pub(crate) fn read(text: &str) -> Result<Object, ObjectError> {
        Object::parse(serde_json::from_str(text).unwrap(), NAMED)
    }

    #[test]
    fn an_object_of_a_list_gets_the_kind_that_the_list_leaves_out() {
        let object = read(
            r#"{"metadata":{"name":"a","namespace":"n","resourceVersion":"7","labels":{"k":"v"}},"spec":{}}"#,
        );
        let object = object.unwrap();
        assert_eq!(object.version, 7);
        assert_eq!((&*object.key.0, &*object.key.1), ("n", "a"));
        assert_eq!(object.label("k"), Some("v"));
        let value = object.to_value();
        assert_eq!(
            (&value["kind"], &value["apiVersion"]),
            (&"Service".into(), &"v1".into())
        );
        assert_eq!(value["metadata"]["name"], "a");
        let message = r#"{"kind":"Other","metadata":{"name":"a","resourceVersion":"7"}}"#;
        assert_eq!(read(message).unwrap().json, message.as_bytes());
    }

    #[test]
    fn another_version_differs_only_in_its_version() {
        let object =
            read(r#"{"metadata":{"name":"a","resourceVersion":"7"},"spec":{"x":1}}"#).unwrap();
        let later = object.with_version(9);
        assert_eq!(later.to_value()["metadata"]["resourceVersion"], "9");
        assert_eq!(
            (later.version, &later.to_value()["spec"]["x"]),
            (9, &1.into())
        );
    }

    #[test]
    fn a_non_object_is_reported_as_such() {
        for (text, says) in [
            (r#"{"metadata":{"resourceVersion":"7"}}"#, "metadata.name"),
            (
                r#"{"metadata":{"name":"a","resourceVersion":"x"}}"#,
                "\"x\"",
            ),
            (r#"{"metadata":{"name":"a"}}"#, "resourceVersion"),
            ("{}", "metadata"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
