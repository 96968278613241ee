//! Objects without a version: the content of manifests, for use without an API server.
//!
//! Versions are milliseconds since the Unix epoch, so they grow over restarts. An unchanged object keeps its version.

use crate::{
    object::{Object, ObjectError, TypeMeta},
    server::WatchCache,
    store::Store,
};
use serde_json::{Value, value::to_raw_value};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Objects that have been read from manifests, and that a watch cache can load.
#[derive(Debug)]
pub struct Manifests {
    pool: Arc<WatchCache>,
    /// Objects by the index of their store: the kind that they state, and the objects.
    of: BTreeMap<usize, (String, Vec<Value>)>,
}

/// Error that makes an object unusable.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The object states no kind.
    #[error("an object has no apiVersion or no kind")]
    MissingKind,
    /// Clients may not read the resource of this kind.
    #[error(
        "the resource of {kind} in {api_version} is not in api_cache.resources; add the resource there, or remove the object"
    )]
    NotServed {
        /// Kind that the object states.
        kind: String,
        /// API version that the object states.
        api_version: String,
    },
    /// The object is malformed.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// There are two objects with one name.
    #[error("{0:?} occurs twice")]
    Duplicate(String),
}

impl Manifests {
    /// Returns an empty set of objects for this cache.
    pub fn new(cache: Arc<WatchCache>) -> Self {
        // A resource without objects is empty, not unread.
        let stores = cache.stores().iter().enumerate();
        let objects_by_store =
            stores.filter_map(|(at, store)| Some((at, (store.kind()?.kind, Vec::new()))));
        let objects_by_store = objects_by_store.collect();
        Self {
            pool: cache,
            of: objects_by_store,
        }
    }

    /// Adds an object, or all objects of a `List`.
    ///
    /// # Errors
    /// If the object is invalid or its kind may not be read.
    pub fn add(&mut self, mut value: Value) -> Result<(), ManifestError> {
        let field_text = |field: &str| value.get(field).and_then(Value::as_str).map(str::to_owned);
        let (kind, api_version) = field_text("kind")
            .zip(field_text("apiVersion"))
            .ok_or(ManifestError::MissingKind)?;
        if let Some(Value::Array(items)) = value.get_mut("items").map(Value::take) {
            return items.into_iter().try_for_each(|item| self.add(item));
        }
        let mut stores = self.pool.stores().iter();
        let at = stores.position(|store| serves_kind(store, &kind, &api_version));
        let Some(at) = at else {
            return Err(ManifestError::NotServed { kind, api_version });
        };
        // Errors are reported before any object is served.
        let type_meta = TypeMeta {
            kind: &kind,
            api_version: &api_version,
        };
        let object = object_at_version(&value, 1, type_meta)?;
        let (_, objects) = self
            .of
            .entry(at)
            .or_insert_with(|| (kind.clone(), Vec::new()));
        let is_same_object = |existing: &Value| {
            ["name", "namespace"]
                .iter()
                .all(|field| existing["metadata"][field] == value["metadata"][field])
        };
        if objects.iter().any(is_same_object) {
            return Err(ManifestError::Duplicate(object.key.1.to_string()));
        }
        objects.push(value);
        Ok(())
    }

    /// Returns the number of objects.
    pub fn count(&self) -> usize {
        self.of.values().map(|(_, objects)| objects.len()).sum()
    }

    /// Replaces the content of the cache with these objects.
    pub fn load(self) {
        for (at, (kind, objects)) in self.of {
            if let Some(store) = self.pool.stores().get(at) {
                load_store(store, &kind, &objects);
            }
        }
    }
}

/// Whether a store has objects of this kind.
fn serves_kind(store: &Store, kind: &str, api_version: &str) -> bool {
    let resource = store.resource();
    let matches_plural = || {
        let lower = kind.to_lowercase();
        ["s", "es"]
            .iter()
            .any(|suffix| format!("{lower}{suffix}") == resource.plural)
            || lower == resource.plural
    };
    resource.api_version() == api_version
        && store
            .kind()
            .map_or_else(matches_plural, |kind_of_store| kind_of_store.kind == kind)
}

fn load_store(store: &Store, kind: &str, objects: &[Value]) {
    let now_millis = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_millis = now_millis.map_or(1, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
    let mut version = now_millis.max(store.version() + 1);
    let api_version = store.resource().api_version();
    let type_meta = TypeMeta {
        kind,
        api_version: &api_version,
    };
    let mut parsed = Vec::with_capacity(objects.len());
    // The objects have already been parsed once.
    for value in objects {
        let Ok(object) = object_at_version(value, version, type_meta) else {
            continue;
        };
        let previous = store
            .get(&object.key)
            .filter(|previous| previous.with_version(version) == object);
        if let Some(previous) = previous {
            parsed.push(Object::clone(&previous));
        } else {
            parsed.push(object);
            version += 1;
        }
    }
    store.set_kind(kind);
    store.replace(version, parsed);
    store.mark_connected(None);
}

/// Returns the object in the form of an API server.
fn object_at_version(
    value: &Value,
    version: u64,
    type_meta: TypeMeta<'_>,
) -> Result<Object, ObjectError> {
    let mut value = value.clone();
    if let Some(meta) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.insert("resourceVersion".to_owned(), version.to_string().into());
    }
    let raw = to_raw_value(&value)?;
    Object::parse(&raw, type_meta)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{resource::GroupVersionResource, server::CacheLimits};
    use serde_json::json;

    fn pool() -> Arc<WatchCache> {
        let services: GroupVersionResource = "v1/services".parse().unwrap();
        let widgets: GroupVersionResource = "a.io/v1/widgets".parse().unwrap();
        WatchCache::new(
            &[services, widgets],
            &CacheLimits {
                response_bytes: 1 << 20,
                event_buffer_bytes: 1 << 20,
            },
        )
    }

    fn service(name: &str, port: u16) -> Value {
        json!({ "kind": "Service", "apiVersion": "v1", "metadata": { "name": name, "namespace": "n" }, "spec": { "ports": [{ "port": port }] } })
    }

    fn held(pool: &Arc<WatchCache>, objects: Vec<Value>) {
        let mut manifests = Manifests::new(pool.clone());
        for object in objects {
            manifests.add(object).unwrap();
        }
        manifests.load();
    }

    #[test]
    fn unchanged_objects_keep_their_version_and_versions_grow() {
        let pool = pool();
        held(&pool, vec![service("a", 1), service("b", 1)]);
        let store = pool.stores()[0].clone();
        let (first, version) = (store.snapshot().unwrap(), store.version());
        let list = json!({ "kind": "List", "apiVersion": "v1", "items": [service("a", 2), service("b", 1)] });
        held(&pool, vec![list]);
        let second = store.snapshot().unwrap();
        assert!(second.objects[0].version > version);
        assert_eq!(first.objects[1], second.objects[1]);
        assert_eq!(store.status().lost, None);
        held(&pool, vec![]);
        assert_eq!(store.snapshot().unwrap().objects, []);
        assert!(!pool.stores()[1].status().synced);
        held(
            &pool,
            vec![json!({ "kind": "Widget", "apiVersion": "a.io/v1", "metadata": { "name": "w" } })],
        );
        assert!(pool.stores()[1].status().synced);
    }

    #[test]
    fn an_object_that_cannot_be_stored_names_the_reason() {
        let mut manifests = Manifests::new(pool());
        manifests.add(service("a", 1)).unwrap();
        for (value, says) in [
            (json!({ "kind": "Service" }), "apiVersion"),
            (
                json!({ "kind": "Secret", "apiVersion": "v1", "metadata": { "name": "a" } }),
                "the resource of Secret in v1 is not in api_cache.resources",
            ),
            (
                json!({ "kind": "Service", "apiVersion": "v1", "metadata": {} }),
                "metadata.name",
            ),
            (service("a", 2), "\"a\" occurs twice"),
        ] {
            let error = manifests.add(value).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(manifests.count(), 1);
    }
}
