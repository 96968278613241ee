//! Path of a value in a configuration: `listeners[1].client_auth.client_ca[0]`.
//!
//! Faults, positions in a file and flags all refer to values by this path. The text form is that of
//! `causeway_config::ConfigError`.

use std::fmt;

use serde_json::Value;

/// Path from the root to a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ValuePath(Vec<PathSegment>);

/// One segment of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PathSegment {
    Key(String),
    Index(usize),
}

impl ValuePath {
    /// Parses the text form. Keys with dots in them (labels) become several segments.
    pub(super) fn parse(text: &str) -> Self {
        let steps = text.split(['.', '[']).map(|step| {
            let index = step.strip_suffix(']').and_then(|index| index.parse().ok());
            index.map_or_else(|| PathSegment::Key(step.into()), PathSegment::Index)
        });
        Self(steps.collect())
    }

    pub(super) fn key(&self, key: &str) -> Self {
        self.child(PathSegment::Key(key.into()))
    }

    pub(super) fn index(&self, index: usize) -> Self {
        self.child(PathSegment::Index(index))
    }

    pub(super) fn child(&self, step: PathSegment) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }

    pub(super) fn segments(&self) -> &[PathSegment] {
        &self.0
    }

    pub(super) fn parent(&self) -> Option<Self> {
        let (_, rest) = self.0.split_last()?;
        Some(Self(rest.to_vec()))
    }

    /// Returns the value at this path.
    pub(super) fn get_mut<'a>(&self, root: &'a mut Value) -> Option<&'a mut Value> {
        self.0.iter().try_fold(root, |value, step| match step {
            PathSegment::Key(key) => value.get_mut(key),
            PathSegment::Index(index) => value.get_mut(*index),
        })
    }

    /// Sets a value at a path of keys. Each value on the path that is no map becomes one.
    pub(super) fn set(&self, root: &mut Value, value: Value) {
        let mut current = root;
        for step in &self.0 {
            let PathSegment::Key(key) = step else { return };
            if !current.is_object() {
                *current = Value::Object(serde_json::Map::new());
            }
            current = &mut current[key.as_str()];
        }
        *current = value;
    }

    /// Removes the value. Returns whether there was one.
    pub(super) fn remove(&self, root: &mut Value) -> bool {
        let (Some(parent), Some(last)) = (self.parent(), self.0.last()) else {
            return false;
        };
        match (parent.get_mut(root), last) {
            (Some(Value::Object(map)), PathSegment::Key(key)) => map.shift_remove(key).is_some(),
            (Some(Value::Array(elements)), PathSegment::Index(index))
                if *index < elements.len() =>
            {
                elements.remove(*index);
                true
            }
            _ => false,
        }
    }
}

impl fmt::Display for ValuePath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, step) in self.0.iter().enumerate() {
            match step {
                PathSegment::Key(key) if position == 0 => out.write_str(key)?,
                PathSegment::Key(key) => write!(out, ".{key}")?,
                PathSegment::Index(index) => write!(out, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// Returns the path of the value that contains `path`, if that is not the root.
pub(super) fn parent(path: &str) -> Option<&str> {
    path.rfind(['.', '[']).map(|end| &path[..end])
}
