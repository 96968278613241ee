//! Selectors by label and by field, as lists and watches carry them (`LabelSelector` as text, `fields.Selector`).

use crate::{object::Object, resource::GroupVersionResource};
use serde_json::Value;
use std::borrow::Cow;

/// Selector of objects. An empty one selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    namespace: Option<Box<str>>,
    labels: LabelSelector,
    fields: Vec<Field>,
}

/// Selector by labels, in the text form of Kubernetes: `a=b,c!=d,e in (f,g),h notin (i),j,!k`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector(Vec<Requirement>);

impl LabelSelector {
    /// Parses the requirements, all of which must hold. A text without requirements selects everything.
    ///
    /// # Errors
    /// The description of the fault.
    pub fn parse(text: &str) -> Result<Self, String> {
        let labels: Result<Vec<_>, _> = split_terms(text)
            .map(|term| parse_label(term.trim()))
            .collect();
        sort_and_limit(labels?).map(Self)
    }

    /// Whether the selector has no requirement.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether labels match. `label` returns the value of the label with a key.
    pub fn matches<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|each| each.matches(label(&each.key)))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Requirement {
    key: Box<str>,
    /// Sorted values; `None` if the key only has to exist.
    values: Option<Vec<Box<str>>>,
    /// Whether the requirement is negated.
    is_negated: bool,
}

/// Path of a field, its text, and whether the requirement is negated.
type Field = (Vec<Box<str>>, Box<str>, bool);

/// Fields by which objects can be selected besides name and namespace.
const SUPPORTED_FIELDS: [(&str, &str); 4] = [
    ("v1/services", "spec.clusterIP"),
    ("v1/services", "spec.type"),
    ("v1/nodes", "spec.unschedulable"),
    ("v1/namespaces", "status.phase"),
];

/// Maximum number of requirements of one kind in a selector. Each is checked for each object, and a query has room for tens
/// of thousands.
const MAX_REQUIREMENTS: usize = 128;

impl Selector {
    /// Parses the conditions, all of which must hold. The error is a description of the fault.
    pub(crate) fn parse(
        resource: &GroupVersionResource,
        namespace: Option<&str>,
        labels: &str,
        fields: &str,
    ) -> Result<Self, String> {
        Ok(Self {
            namespace: namespace.map(Into::into),
            labels: LabelSelector::parse(labels)?,
            fields: parse_fields(resource, fields)?,
        })
    }

    pub(crate) fn matches(&self, object: &Object) -> bool {
        let namespace = self.namespace.as_deref();
        namespace.is_none_or(|namespace| namespace == &*object.key.0)
            && self.labels.matches(|key| object.label(key))
            && self.has_fields(object)
    }

    fn has_fields(&self, object: &Object) -> bool {
        // Cheap checks come first; the object is parsed at most once.
        let indexed_value = |path: &[Box<str>]| match path {
            [meta, own] if **meta == *"metadata" && **own == *"name" => Some(&*object.key.1),
            [meta, own] if **meta == *"metadata" && **own == *"namespace" => Some(&*object.key.0),
            _ => None,
        };
        let mut fields = self.fields.iter();
        if !fields.all(|(path, value, not)| {
            indexed_value(path).is_none_or(|known| (*known == **value) != *not)
        }) {
            return false;
        }
        let mut others = self
            .fields
            .iter()
            .filter(|field| indexed_value(&field.0).is_none())
            .peekable();
        if others.peek().is_none() {
            return true;
        }
        let json = object.to_value();
        others.all(|(path, value, not)| (field_text(&json, path) == **value) != *not)
    }
}

/// Returns the text of a field, empty if the field is missing, as in Kubernetes.
fn field_text<'a>(object: &'a Value, path: &[Box<str>]) -> Cow<'a, str> {
    let found = path
        .iter()
        .try_fold(object, |value, part| value.get(&**part));
    match found {
        Some(Value::String(text)) => text.into(),
        Some(other) => other.to_string().into(),
        None if path.last().is_some_and(|last| &**last == "unschedulable") => "false".into(),
        None => "".into(),
    }
}

impl Requirement {
    fn matches(&self, label: Option<&str>) -> bool {
        let is_match = match (&self.values, label) {
            (None, label) => label.is_some(),
            (Some(values), Some(label)) => {
                let found = values.binary_search_by(|value| (**value).cmp(label));
                found.is_ok()
            }
            (Some(_), None) => false,
        };
        is_match != self.is_negated
    }
}

fn parse_fields(resource: &GroupVersionResource, text: &str) -> Result<Vec<Field>, String> {
    let terms = text.split(',').filter(|term| !term.is_empty());
    let fields: Result<Vec<_>, String> = terms
        .map(|term| {
            let (path, value, not) = if let Some((path, value)) = term.split_once("!=") {
                (path, value, true)
            } else if let Some((path, value)) = term.split_once("==") {
                (path, value, false)
            } else if let Some((path, value)) = term.split_once('=') {
                (path, value, false)
            } else {
                return Err(format!(
                    "invalid field selector {term:?}: write PATH=VALUE or PATH!=VALUE"
                ));
            };
            let is_supported = SUPPORTED_FIELDS.contains(&(resource.to_string().as_str(), path));
            if !is_supported && !["metadata.name", "metadata.namespace"].contains(&path) {
                return Err(format!(
                    "{path:?} is not a known field selector of {resource}"
                ));
            }
            Ok((path.split('.').map(Into::into).collect(), value.into(), not))
        })
        .collect();
    sort_and_limit(fields?)
}

/// Sorts and deduplicates values, so that equal requests share one response.
fn sort_and_limit<T: Ord>(mut all: Vec<T>) -> Result<Vec<T>, String> {
    all.sort_unstable();
    all.dedup();
    if all.len() > MAX_REQUIREMENTS {
        return Err(format!(
            "a selector may have at most {MAX_REQUIREMENTS} requirements"
        ));
    }
    Ok(all)
}

/// Returns the parts between commas that are not in parentheses.
fn split_terms(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .filter(|term| !term.trim().is_empty())
}

fn parse_label(term: &str) -> Result<Requirement, String> {
    let malformed = || format!("unable to parse requirement {term:?} of the label selector");
    let requirement = |key: &str, values: Option<Vec<Box<str>>>, not| {
        let key = key.trim();
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
        if key.is_empty() || !key.chars().all(is_allowed) {
            return Err(malformed());
        }
        Ok(Requirement {
            key: key.into(),
            values,
            is_negated: not,
        })
    };
    let parse_value = |value: &str| {
        let value = value.trim();
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        value
            .chars()
            .all(is_allowed)
            .then(|| vec![Box::from(value)])
            .ok_or_else(malformed)
    };
    if let Some(inner) = term.strip_suffix(')') {
        let (key_and_operator, values) = inner.split_once('(').ok_or_else(malformed)?;
        let key_and_operator = key_and_operator.trim();
        let (key, not) = if let Some(key) = key_and_operator.strip_suffix(" notin") {
            (key, true)
        } else {
            (
                key_and_operator.strip_suffix(" in").ok_or_else(malformed)?,
                false,
            )
        };
        let values: Result<Vec<_>, _> = values.split(',').map(parse_value).collect();
        let mut values = values?.concat();
        values.sort_unstable();
        values.dedup();
        return requirement(key, Some(values), not);
    }
    if let Some((key, value)) = term.split_once("!=") {
        return requirement(key, Some(parse_value(value)?), true);
    }
    if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return requirement(key, Some(parse_value(value)?), false);
    }
    match term.strip_prefix('!') {
        Some(key) => requirement(key, None, true),
        None => requirement(term, None, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::tests::read;

    fn service() -> GroupVersionResource {
        "v1/services".parse().unwrap()
    }

    fn matches(labels: &str, fields: &str) -> Result<bool, String> {
        let object = read(
            r#"{"metadata":{"name":"a","namespace":"n","resourceVersion":"1","labels":{"app":"web","tier":""}},"spec":{"type":"ClusterIP"}}"#,
        );
        let selector = Selector::parse(&service(), None, labels, fields)?;
        Ok(selector.matches(&object.unwrap()))
    }

    #[test]
    fn label_selectors_match_like_kubernetes() {
        for (text, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier=", true),
            ("app!=web", false),
            ("other!=web", true),
            ("app in (api, web)", true),
            ("app notin (api,web)", false),
            ("other notin (a)", true),
            ("other in (a)", false),
            ("app,!other", true),
            ("!app", false),
            (
                "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name",
                true,
            ),
        ] {
            assert_eq!(matches(text, ""), Ok(expected), "{text}");
        }
        for text in ["app in web", "=x", "a b", "app in (a", "!", "a=b c"] {
            assert!(matches(text, "").is_err(), "{text}");
        }
    }

    #[test]
    fn fields_select_by_name_namespace_and_resource_fields() {
        for (text, expected) in [
            ("metadata.name=a", true),
            ("metadata.name!=a", false),
            ("metadata.namespace==n,spec.type=ClusterIP", true),
            ("spec.clusterIP=", true),
            ("spec.clusterIP=None", false),
        ] {
            assert_eq!(matches("", text), Ok(expected), "{text}");
        }
        assert!(
            matches("", "spec.replicas=1")
                .unwrap_err()
                .contains("spec.replicas")
        );
        assert!(matches("", "metadata.name").is_err());
    }

    #[test]
    fn a_selector_is_bounded_and_says_the_same_in_any_order() {
        let many: Vec<_> = (0..5000).map(|number| format!("!k{number}")).collect();
        assert!(matches(&many.join(","), "").unwrap_err().contains("128"));
        let many: Vec<_> = (0..5000)
            .map(|number| format!("spec.type!=k{number}"))
            .collect();
        assert!(matches("", &many.join(",")).unwrap_err().contains("128"));
        // The number of values is not limited, and duplicates count once.
        let many: Vec<_> = (0..5000).map(|number| format!("v{number}")).collect();
        assert_eq!(
            matches(&format!("app in (web,{})", many.join(",")), ""),
            Ok(true)
        );
        assert_eq!(
            matches(&"app,".repeat(5000), &"spec.type=ClusterIP,".repeat(3000)),
            Ok(true)
        );
        let of = |labels| Selector::parse(&service(), None, labels, "").unwrap();
        assert_eq!(of("a in (x,y),b"), of("b,a in (y,x),b"));
    }

    #[test]
    fn a_namespace_leaves_out_the_others() {
        let object =
            read(r#"{"metadata":{"name":"a","namespace":"n","resourceVersion":"1"}}"#).unwrap();
        let of = |namespace| Selector::parse(&service(), Some(namespace), "", "").unwrap();
        assert!(of("n").matches(&object) && !of("m").matches(&object));
    }
}
