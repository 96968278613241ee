//! `causeway policy test`: a table of expectations, for the user's own CI.
//!
//! ```yaml
//! policy: policy.yaml
//! nodes:
//!   edge-1: { pool: north, labels: { tier: gold } }
//! expect:
//!   - { as: prometheus, method: GET, url: "https://edge-1:9100/metrics", then: allow, rule: scraping }
//! ```

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail};
use causeway_certs::NodeName;
use causeway_config::{ConfigError, ConfigErrors, Validate};
use causeway_gateway::{
    config::policy::Effect,
    state::{Node, pods, policy::Decision},
};
use hyper::Method;
use serde::Deserialize;

use super::{Denied, RequestSpec, Subject, To, read};
use crate::cli::operator::PolicyTest;
use crate::operator::config_loader;
use crate::output::outln;

/// Expected decisions of a policy.
#[derive(Debug, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct TestTable {
    /// The policy file, seen from this one.
    #[serde(default)]
    policy: Option<PathBuf>,
    /// Confirmed attributes of the nodes, by name.
    #[serde(default)]
    nodes: BTreeMap<String, NodeSpec>,
    /// Requests, each with its client and the expected decision.
    expect: Vec<Expectation>,
}

/// Confirmed attributes of a node.
#[derive(Debug, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct NodeSpec {
    /// Its pool.
    #[serde(default)]
    pool: Option<String>,
    /// Its labels.
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

/// One request.
#[derive(Debug, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct Expectation {
    /// Name of the client; without it the client has no name.
    #[serde(default, rename = "as")]
    user: Option<String>,
    /// Groups of the client.
    #[serde(default)]
    groups: Vec<String>,
    /// URIs in the client's certificate.
    #[serde(default)]
    spiffe: Vec<String>,
    /// Address that the client connects from.
    #[serde(default)]
    from: Option<IpAddr>,
    /// The method, or CONNECT.
    method: String,
    /// `https://edge-1:10250/exec/…`, or edge-1:22 for CONNECT; 10.96.0.10:443 for a target that a listener dials itself.
    url: String,
    /// Service of the node to which the request goes; the URL then needs no port.
    #[serde(default)]
    service: Option<String>,
    /// Namespace of the pod to which the request goes; the URL then has the pod's node, or the address of a pod that a listener dials itself.
    #[serde(default)]
    pod_namespace: Option<String>,
    /// Whether it switches protocols.
    #[serde(default)]
    upgrade: bool,
    /// Expected decision: `allow` or `deny`.
    then: Effect,
    /// The rule that is to decide.
    #[serde(default)]
    rule: Option<String>,
}

impl Expectation {
    fn parse_request(&self) -> anyhow::Result<(Method, RequestSpec)> {
        let method = Method::from_str(&self.method)
            .with_context(|| format!("\"{}\" is not an HTTP method", self.method))?;
        let request =
            RequestSpec::parse(&method, (&self.url, self.service.as_deref()), self.upgrade)?
                .with_pod(self.pod_namespace.as_deref())?;
        if self.service.is_some() && self.pod_namespace.is_some() {
            bail!("has both service and pod_namespace; a request goes to a service or to a pod");
        }
        Ok((method, request))
    }

    fn is_met(&self, decision: &Decision) -> bool {
        let rule = decision.matched.as_ref().map(|by| &*by.rule);
        decision.allow == (self.then == Effect::Allow)
            && (self.rule.is_none() || self.rule.as_deref() == rule)
    }
}

impl Validate for TestTable {
    fn validate(&self) -> Vec<ConfigError> {
        let mut faults = ConfigErrors::default();
        for name in self.nodes.keys() {
            if let Err(error) = NodeName::parse(name) {
                faults.add(format!("nodes.{name}"), error.to_string());
            }
        }
        for (index, expectation) in self.expect.iter().enumerate() {
            let path = format!("expect[{index}]");
            let is_listed =
                |node: &NodeName| self.nodes.is_empty() || self.nodes.contains_key(node.as_str());
            match expectation.parse_request() {
                Err(error) => faults.add(path, format!("{error:#}")),
                Ok((
                    _,
                    RequestSpec {
                        to: To::Node(node), ..
                    },
                )) if !is_listed(&node) => {
                    faults.add(path, format!("{node} is missing from `nodes`; add it, with {{}} if it has no confirmed attributes"));
                }
                Ok((
                    _,
                    RequestSpec {
                        to: To::Node(node), ..
                    },
                )) if !self.nodes.contains_key(node.as_str()) => {
                    if let Some(namespace) = pods::namespace_of_host(node.as_str()) {
                        faults.add(path, format!("{node} is the name of a pod; write the pod's node in the URL, and `pod_namespace: {namespace}`"));
                    }
                }
                Ok(_) => {}
            }
        }
        if self.expect.is_empty() {
            faults.add(
                "expect",
                "is empty, so nothing would be tested; add at least one request",
            );
        }
        faults.into_vec()
    }
}

/// Prints each expectation that is not met, and the number of these.
pub(super) fn run(args: &PolicyTest) -> anyhow::Result<()> {
    let (table, lines) = config_loader::load_document::<TestTable>(&args.table)?;
    let policy = policy_path(args, &table)?;
    let rules = read(&policy)?;
    let mut failed = 0;
    for (index, expectation) in table.expect.iter().enumerate() {
        let (method, request) = expectation.parse_request()?;
        let spec = match &request.to {
            To::Node(node) => table.nodes.get(node.as_str()),
            To::Direct(_) => None,
        };
        let node = spec.map_or_else(Node::default, |known| Node {
            pool: known.pool.clone(),
            labels: known.labels.clone(),
            ..Node::default()
        });
        let client = Subject {
            user: expectation.user.as_deref(),
            groups: &expectation.groups,
            uris: &expectation.spiffe,
            source: expectation.from,
        };
        let decision = request.decide(&rules, &method, &client, &node);
        if !expectation.is_met(&decision) {
            failed += 1;
            let line = lines.line_of(&format!("expect[{index}]"));
            outln!(
                "{}:{line}: {} {method} {}: {}",
                args.table.display(),
                expectation.user.as_deref().unwrap_or("(nobody)"),
                expectation.url,
                super::format_decision(&decision, &policy)
            )?;
        }
    }
    let all = table.expect.len();
    outln!("{} of {all} expectations are met", all - failed)?;
    if failed > 0 {
        let message = format!(
            "{failed} of {all} expectations are not met by {}",
            policy.display()
        );
        return Err(Denied(message).into());
    }
    Ok(())
}

fn policy_path(args: &PolicyTest, table: &TestTable) -> anyhow::Result<PathBuf> {
    if let Some(path) = &args.policy {
        return Ok(path.clone());
    }
    let Some(path) = &table.policy else {
        bail!(
            "{} does not name a policy; add the key \"policy\", or give --policy FILE",
            args.table.display()
        );
    };
    Ok(args.table.parent().unwrap_or(Path::new("")).join(path))
}
