//! Groups of targets for the HTTP service discovery of Prometheus (`http_sd_config`).

use super::nodes::Node;
use causeway_certs::NodeName;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// Group of targets: ports of one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TargetGroup {
    /// Addresses `NODE:PORT`.
    targets: Vec<String>,
    /// Labels of the node for relabelling.
    labels: BTreeMap<String, String>,
}

impl TargetGroup {
    /// Returns the group of these ports of a node, or `None` without a port.
    pub fn new(node: &NodeName, ports: &[u16], data: &Node) -> Option<Self> {
        let mut labels: BTreeMap<_, _> = data
            .labels
            .iter()
            .map(|(key, value)| {
                let name = format!("__meta_causeway_label_{}", label_name(key));
                (name, value.clone())
            })
            .collect();
        let pool = data.pool.clone();
        labels.extend(pool.map(|pool| ("__meta_causeway_pool".to_owned(), pool)));
        labels.insert("__meta_causeway_node".to_owned(), node.to_string());
        let target = |port: &u16| format!("{node}:{port}");
        (!ports.is_empty()).then(|| Self {
            targets: ports.iter().map(target).collect(),
            labels,
        })
    }
}

/// Returns a label's key as the name of a label of Prometheus, as its Kubernetes service discovery does.
fn label_name(key: &str) -> String {
    let allowed = |each: char| {
        if each.is_ascii_alphanumeric() {
            each
        } else {
            '_'
        }
    };
    key.chars().map(allowed).collect()
}

/// Returns the port in the query of a request, if there is one. All nodes then become targets at this port.
///
/// # Errors
/// A sentence, if the query has anything else.
pub fn requested_port(query: Option<&str>) -> Result<Option<u16>, String> {
    let Some(query) = query.filter(|query| !query.is_empty()) else {
        return Ok(None);
    };
    let port = query
        .strip_prefix("port=")
        .and_then(|text| text.parse().ok());
    match port.filter(|port| *port > 0) {
        Some(port) => Ok(Some(port)),
        None => Err("the query may only be port=NUMBER, such as port=9100".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_becomes_a_target_group_with_meta_labels() {
        let labels = [("example.com/site", "north")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let data = Node {
            pool: Some("mill".into()),
            labels: labels.into(),
            ..Node::default()
        };
        let node = NodeName::parse("edge-1").unwrap();
        let group = TargetGroup::new(&node, &[9100, 9101], &data);
        let expected = serde_json::json!({
            "targets": ["edge-1:9100", "edge-1:9101"],
            "labels": {
                "__meta_causeway_label_example_com_site": "north",
                "__meta_causeway_node": "edge-1",
                "__meta_causeway_pool": "mill",
            },
        });
        assert_eq!(serde_json::to_value(group).unwrap(), expected);
        assert_eq!(TargetGroup::new(&node, &[], &data), None);
    }

    #[test]
    fn a_query_may_only_name_a_port() {
        for (query, port) in [
            (None, None),
            (Some(""), None),
            (Some("port=9100"), Some(9100)),
        ] {
            assert_eq!(requested_port(query), Ok(port), "{query:?}");
        }
        for query in ["port=", "port=0", "port=65536", "port=1&port=2", "node=a"] {
            assert!(requested_port(Some(query)).is_err(), "{query}");
        }
    }
}
