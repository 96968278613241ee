//! Groups of targets for the HTTP service discovery of Prometheus (`http_sd_config`).

use super::nodes::Node;
use causeway_certs::NodeName;
use causeway_tunnel::Target;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// Group of targets: ports of one node, or one of its services.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TargetGroup {
    /// Addresses `NODE:PORT`, or one `SERVICE.NODE:PORT`.
    targets: Vec<String>,
    /// Labels of the node for relabelling, and the name of the service.
    labels: BTreeMap<String, String>,
}

impl TargetGroup {
    /// Returns a group of these ports of a node, if there are any, and one for each of these services.
    pub fn for_node<'a>(
        (node, data): (&NodeName, &Node),
        ports: &[u16],
        services: impl IntoIterator<Item = (&'a str, u16)>,
    ) -> Vec<Self> {
        let labels = node_labels(node, data);
        let mut groups = Vec::new();
        if !ports.is_empty() {
            groups.push(Self {
                targets: ports.iter().map(|port| format!("{node}:{port}")).collect(),
                labels: labels.clone(),
            });
        }
        groups.extend(services.into_iter().map(|(service, port)| {
            let mut labels = labels.clone();
            labels.insert(meta_label("service"), service.to_owned());
            Self {
                targets: vec![Target::service(service, node.as_str(), Some(port)).to_string()],
                labels,
            }
        }));
        groups
    }
}

/// Returns the confirmed properties of a node as labels.
fn node_labels(node: &NodeName, data: &Node) -> BTreeMap<String, String> {
    let labels = data.labels.iter();
    let mut labels: BTreeMap<_, _> = labels
        .map(|(key, value)| {
            let name = meta_label(&format!("label_{}", label_name(key)));
            (name, value.clone())
        })
        .collect();
    let pool = data.pool.clone();
    labels.extend(pool.map(|pool| (meta_label("pool"), pool)));
    labels.insert(meta_label("node"), node.to_string());
    labels
}

/// Returns the name of a label that Prometheus drops after relabelling.
fn meta_label(name: &str) -> String {
    format!("__meta_causeway_{name}")
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
    fn a_node_and_its_services_become_target_groups_with_meta_labels() {
        let labels = [("example.com/site", "north")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let data = Node {
            pool: Some("mill".into()),
            labels: labels.into(),
            ..Node::default()
        };
        let node = NodeName::parse("edge-1").unwrap();
        let groups = TargetGroup::for_node((&node, &data), &[9100, 9101], [("printer", 631)]);
        let mut labels = serde_json::json!({
            "__meta_causeway_label_example_com_site": "north",
            "__meta_causeway_node": "edge-1",
            "__meta_causeway_pool": "mill",
        });
        let ports = serde_json::json!({
            "targets": ["edge-1:9100", "edge-1:9101"],
            "labels": labels,
        });
        labels["__meta_causeway_service"] = "printer".into();
        let service = serde_json::json!({ "targets": ["printer.edge-1:631"], "labels": labels });
        assert_eq!(
            serde_json::to_value(groups).unwrap(),
            serde_json::json!([ports, service])
        );
        assert_eq!(TargetGroup::for_node((&node, &data), &[], []), []);
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
