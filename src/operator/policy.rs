//! `causeway policy`: evaluates the rules of the access policy without a gateway.
//!
//! The same code decides here and on every stream. Pool and labels of a node come from the gateway's data directory or from
//! arguments. A table of tests contains them itself, so that the tests can run on any machine.

mod test_table;

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use causeway_certs::{NodeName, OpenMode, Store, StoreError};
use causeway_gateway::{
    config::{
        self, Kubernetes,
        policy::{self, Action},
    },
    state::{
        Node, Policy as Rules, pods,
        policy::{Decision, MatchedRule, PodInput, PolicyInput},
    },
};
use causeway_tunnel::target;
use hyper::{Method, Uri};

use crate::cli::operator::{Policy, PolicyCheck};
use crate::operator::config_loader;
use crate::output::{errln, explain, outln};

/// Runs the command.
pub(crate) fn run(policy: Policy) -> anyhow::Result<()> {
    let result = match policy {
        Policy::Check(args) => check(&args),
        Policy::Test(args) => test_table::run(&args),
    };
    // A script that checks for a denial must not mistake a typing error for one.
    result.map_err(|error| {
        if error.is::<Denied>() || error.is::<config_loader::RejectedConfig>() {
            return error;
        }
        config_loader::RejectedConfig::from(vec![format!("causeway: {}", explain(&error))]).into()
    })
}

/// Maximum number of log lines about labels.
const MAX_LINES: usize = 20;

/// Warns of rules by a label or a pool that no token has confirmed and for which a Node object does not count.
pub(crate) fn warn_of_labels(
    rules: Option<&Rules>,
    kubernetes: Option<&Kubernetes>,
    store: &Store,
) {
    let Some((rules, kubernetes)) = rules.zip(kubernetes) else {
        return;
    };
    let Ok(records) = store.nodes().all() else {
        return;
    };
    let is_given = |key: &str| {
        let mut all = records.iter();
        all.any(|record| record.labels.contains_key(key))
    };
    for (by, key) in
        unusable_labels(rules, |key| kubernetes.trusts_label(key) || is_given(key)).take(MAX_LINES)
    {
        tracing::warn!(
            rule = %by.rule,
            line = by.line,
            label = key,
            "no node can have this label in the policy: no join token confirms it, and the label of Node objects is not used because a kubelet can write it (kubernetes.policy_labels)"
        );
    }
    let has_pool = records.iter().any(|record| record.pool.is_some());
    if rules.depends_on_pools() && !has_pool && !kubernetes.trusts_label(&kubernetes.pool_label) {
        tracing::warn!(
            label = kubernetes.pool_label,
            "no node can have a pool in the policy: no join token confirms one, and kubernetes.pool_label is not used there because a kubelet can write it (kubernetes.policy_labels)"
        );
    }
}

/// Checks that the gateway knows the pods that rules name.
///
/// # Errors
/// If a rule names namespaces of pods, and `kubernetes.pods` is not set.
pub(crate) fn check_pods(rules: &Rules, kubernetes: Option<&Kubernetes>) -> anyhow::Result<()> {
    let follows_pods = kubernetes.is_some_and(|kubernetes| kubernetes.pods.is_some());
    refuse_rules_of_pods(
        rules,
        follows_pods,
        "the gateway does not know which pods have which addresses; set kubernetes.pods",
    )
}

/// Checks that the running gateway knows the pods that rules name. A rule that denies pods would match none otherwise.
///
/// # Errors
/// If a rule names namespaces of pods, and the gateway does not follow pods (`follows_pods`).
pub(crate) fn check_followed_pods(rules: &Rules, follows_pods: bool) -> anyhow::Result<()> {
    refuse_rules_of_pods(
        rules,
        follows_pods,
        "this gateway was started without kubernetes.pods; restart it with kubernetes.pods before this policy comes into force",
    )
}

fn refuse_rules_of_pods(rules: &Rules, follows_pods: bool, why: &str) -> anyhow::Result<()> {
    match rules.first_rule_of_pods().filter(|_| !follows_pods) {
        None => Ok(()),
        Some(by) => Err(config_loader::RejectedConfig::from(vec![format!(
            "policy: {} (line {}) has where.pod_namespaces, but {why}",
            by.rule, by.line
        )])
        .into()),
    }
}

/// Returns the labels that rules require and no node can have.
fn unusable_labels(
    rules: &Rules,
    is_usable: impl Fn(&str) -> bool,
) -> impl Iterator<Item = (&MatchedRule, &str)> {
    rules.rules_by_labels().flat_map(move |(by, labels)| {
        let keys = labels.iter().map(|(key, _)| key.as_str());
        let unusable: Vec<_> = keys.filter(|key| !is_usable(key)).collect();
        unusable.into_iter().map(move |key| (by, key))
    })
}

/// Error for a denied request or an unmet expectation. The result was already printed, and only the exit code remains.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Denied(String);

/// Reads and compiles the rules of a file.
pub(crate) fn read(file: &Path) -> anyhow::Result<Rules> {
    let (mut policy, lines) = config_loader::load_document::<policy::Policy>(file)?;
    for (index, rule) in policy.rules.iter_mut().enumerate() {
        rule.line = lines.line_of(&format!("rules[{index}]"));
    }
    Rules::compile(&policy).map_err(|faults| {
        let messages = faults
            .iter()
            .map(|fault| format!("{}: {}", fault.path, fault.message));
        config_loader::RejectedConfig::from(messages.collect::<Vec<_>>()).into()
    })
}

/// Request as the user writes it.
#[derive(Debug)]
struct RequestSpec {
    to: To,
    service: Option<String>,
    /// Namespace of the pod to which the request goes.
    pod_namespace: Option<String>,
    /// The port; `None` for a service.
    port: Option<u16>,
    path: String,
    action: Action,
}

/// The destination of the request.
#[derive(Debug)]
enum To {
    Node(NodeName),
    /// Address that no edge serves and that the gateway dials itself.
    Direct(IpAddr),
}

impl RequestSpec {
    /// Parses a URL such as `https://edge-1:10250/exec/…`, or an authority such as `edge-1:22` for CONNECT. For a service of the
    /// node, the port is not used.
    fn parse(
        method: &Method,
        (url, service): (&str, Option<&str>),
        upgrade: bool,
    ) -> anyhow::Result<Self> {
        let not_a_url =
            || format!("\"{url}\" is not the URL of a request; write https://edge-1:10250/metrics");
        let (authority, path, action) = if method == Method::CONNECT {
            (url.to_owned(), String::new(), Action::Connect)
        } else {
            let uri: Uri = url.parse().with_context(not_a_url)?;
            // `edge-1:9100` alone is read as an authority without a path, which no rule for paths matches.
            let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
            let authority = uri.authority().filter(|_| is_http);
            let authority = authority.ok_or_else(|| anyhow!(not_a_url()))?;
            let action = if upgrade {
                Action::Upgrade
            } else {
                Action::Request
            };
            (authority.to_string(), uri.path().to_owned(), action)
        };
        let (host, port) = target::split_host_port(&authority)
            .map_err(|why| anyhow!("\"{authority}\" is not a node and its port: {why}"))?;
        let to = match host.parse() {
            Ok(address) if action == Action::Connect && service.is_none() => To::Direct(address),
            _ => To::Node(
                NodeName::parse(host)
                    .with_context(|| format!("\"{host}\" is not the name of a node"))?,
            ),
        };
        if port.is_none() && service.is_none() {
            bail!(
                "\"{url}\" has no port; write it after the name, as in {host}:10250. \
                 For a service behind a node write the node as host, and --service NAME"
            );
        }
        Ok(Self {
            to,
            port: port.filter(|_| service.is_none()),
            service: service.map(str::to_owned),
            pod_namespace: None,
            path,
            action,
        })
    }

    /// Sets the namespace of the pod to which the request goes.
    fn with_pod(mut self, namespace: Option<&str>) -> anyhow::Result<Self> {
        let is_valid = namespace.is_none_or(target::is_service_name);
        if !is_valid {
            bail!(
                "\"{}\" is not the name of a namespace",
                namespace.unwrap_or_default()
            );
        }
        self.pod_namespace = namespace.map(str::to_owned);
        Ok(self)
    }

    /// Replaces the name of a pod with the pod's node and namespace.
    fn with_pod_node(mut self, pod_node: Option<&str>) -> anyhow::Result<Self> {
        let Some(pod_node) = pod_node else {
            return Ok(self);
        };
        let namespace = match &self.to {
            To::Node(name) => pods::namespace_of_host(name.as_str()),
            To::Direct(_) => None,
        };
        self.pod_namespace = Some(namespace.context(
            "--pod-node is for a URL with the name of a pod, as in https://web-1.shop.pod:8080/",
        )?);
        let not_a_node = || format!("\"{pod_node}\" is not the name of a node");
        self.to = To::Node(NodeName::parse(pod_node).with_context(not_a_node)?);
        Ok(self)
    }

    /// Returns the decision of the rules on this request by this client.
    fn decide(
        &self,
        rules: &Rules,
        method: &Method,
        client: &Subject<'_>,
        node: &Node,
    ) -> Decision {
        let (name, direct) = match &self.to {
            To::Node(name) => (Some(name), None),
            To::Direct(address) => (None, Some(*address)),
        };
        rules.decide(&PolicyInput {
            user: client.user.unwrap_or_default(),
            groups: client.groups,
            uris: client.uris,
            is_authenticated: client.user.is_some(),
            client_address: client.source,
            node: name,
            direct_address: direct,
            pool: node.pool.as_deref(),
            labels: &node.labels,
            service: self.service.as_deref(),
            pod: self
                .pod_namespace
                .as_deref()
                .map_or(PodInput::None, PodInput::Namespace),
            port: self.port,
            action: self.action,
            method: method.as_str(),
            path: &self.path,
        })
    }
}

/// Client that makes the request.
#[derive(Clone, Copy, Debug)]
struct Subject<'a> {
    user: Option<&'a str>,
    groups: &'a [String],
    uris: &'a [String],
    source: Option<IpAddr>,
}

fn check(args: &PolicyCheck) -> anyhow::Result<()> {
    let file = &args.file.policy;
    let rules = read(file)?;
    let mut request = RequestSpec::parse(
        &args.method,
        (&args.url, args.service.as_deref()),
        args.upgrade,
    )?
    .with_pod(args.pod_namespace.as_deref())?
    .with_pod_node(args.pod_node.as_deref())?;
    let (node, is_known) = confirmed_node(args, &mut request.to)?;
    let client = Subject {
        user: args.user.as_deref(),
        groups: &args.groups,
        uris: &args.uris,
        source: args.from,
    };
    let decision = request.decide(&rules, &args.method, &client, &node);
    note_possible_pod(&rules, &request, |request| {
        request.decide(&rules, &args.method, &client, &node).allow != decision.allow
    });
    let differs =
        |node: &Node| request.decide(&rules, &args.method, &client, node).allow != decision.allow;
    let label = deciding_label(&rules, &node, differs).filter(|_| args.labels.is_empty());
    if let Some(label) = label {
        if config::is_restricted(label) {
            bail!(
                "the decision depends on the label {label} of the Node object, which this command does not read; give all labels that the policy uses with --label"
            );
        }
        errln!(
            "note: the decision depends on the label {label}, which no token confirms; if kubernetes.policy_labels lists it, give the label of the Node object with --label"
        );
    }
    // An address without an edge has no pool, and rules with pools do not match it.
    if let To::Node(name) = &request.to
        && args.pool.is_none()
        && node.pool.is_none()
        && depends_on_pool(&rules, &node, args.labels.is_empty(), differs)
    {
        if !is_known {
            let data_dir = args.data.data_dir.display();
            bail!(
                "the decision depends on the pool of {name}, which is not in {data_dir}, and this command does not read the cluster; give the pool with --pool, or --pool \"\" for none"
            );
        }
        errln!(
            "note: the decision depends on the pool of {name}, which no token confirms; if the policy uses kubernetes.pool_label, give the pool of the Node object with --pool"
        );
    }
    outln!("{}", format_decision(&decision, file))?;
    if !decision.allow {
        return Err(Denied("the policy denies the request".into()).into());
    }
    Ok(())
}

/// Prints a note if the request is for an address without an edge, and the decision depends on the pod that has the address.
fn note_possible_pod(rules: &Rules, request: &RequestSpec, differs: impl Fn(&RequestSpec) -> bool) {
    let To::Direct(address) = &request.to else {
        return;
    };
    if request.pod_namespace.is_some() {
        return;
    }
    let to_pod = |namespace| RequestSpec {
        to: To::Direct(*address),
        service: None,
        pod_namespace: Some(namespace),
        port: request.port,
        path: request.path.clone(),
        action: request.action,
    };
    if rules
        .sample_pod_namespaces()
        .any(|namespace| differs(&to_pod(namespace)))
    {
        errln!(
            "note: the decision depends on the pod that has the address {address}, and this command does not read the cluster; give the pod's namespace with --pod-namespace, if it is a pod"
        );
    }
}

/// Returns the first label that a token has not given and that would change the decision.
fn deciding_label<'a>(
    rules: &'a Rules,
    node: &Node,
    differs: impl Fn(&Node) -> bool,
) -> Option<&'a str> {
    // Other labels do not matter: the first matching rule then matches by its own labels.
    rules.rules_by_labels().find_map(|(_, labels)| {
        let is_missing = |(key, _): &&(String, String)| !node.labels.contains_key(key);
        let (key, _) = labels.iter().find(is_missing)?;
        let mut other = node.clone();
        other
            .labels
            .extend(labels.iter().filter(is_missing).cloned());
        differs(&other).then_some(key.as_str())
    })
}

/// Whether the decision would differ for a node that has a pool. Labels are varied, too, if they are not given.
fn depends_on_pool(
    rules: &Rules,
    node: &Node,
    lacks_labels: bool,
    differs: impl Fn(&Node) -> bool,
) -> bool {
    rules.sample_pools().any(|pool| {
        let mut other = node.clone();
        other.pool = Some(pool);
        differs(&other)
            || lacks_labels
                && deciding_label(rules, node, &differs).is_none()
                && deciding_label(rules, &other, &differs).is_some()
    })
}

/// Returns the confirmed attributes of the node, and whether the data directory knows the node. The attributes come from the
/// arguments, or else from the data directory. An address that a token confirmed is replaced with its node.
fn confirmed_node(args: &PolicyCheck, to: &mut To) -> anyhow::Result<(Node, bool)> {
    let nodes = match Store::open(&args.data.data_dir, OpenMode::Existing) {
        // The command also runs on machines without a data directory.
        Err(StoreError::Missing { .. }) => Vec::new(),
        store => store?.nodes().all()?,
    };
    let found = nodes.into_iter().find(|record| match &*to {
        To::Node(node) => record.node == *node,
        To::Direct(address) => record.addresses.contains(address),
    });
    if args.pod_namespace.is_some() {
        check_pod_address(to, found.as_ref().map(|record| &record.node))?;
    }
    if let Some(record) = &found {
        *to = To::Node(record.node.clone());
    }
    if let To::Node(node) = &*to
        && found.is_none()
        && let Some(namespace) = pods::namespace_of_host(node.as_str())
    {
        bail!(
            "{node} is the name of a pod, and this command does not read the cluster; give the pod's node with --pod-node. For a pod that a listener dials itself, write CONNECT, the pod's address and --pod-namespace {namespace}"
        );
    }
    let data_dir = args.data.data_dir.display();
    match &*to {
        To::Direct(address) if args.pod_namespace.is_some() => {
            errln!(
                "note: {address} is treated as a pod without an edge, which a listener dials itself (direct)"
            );
            return Ok((Node::default(), false));
        }
        To::Direct(address) => {
            errln!(
                "note: no node in {data_dir} has the address {address}, so it is treated as an address without an edge (direct); for a node with an edge, give its name"
            );
            return Ok((Node::default(), false));
        }
        To::Node(node) if found.is_none() && (args.pool.is_none() || args.labels.is_empty()) => {
            errln!(
                "note: {data_dir} has no node {node}; only --pool and --label determine its pool and labels"
            );
        }
        To::Node(_) => {}
    }
    if args.from.is_none() {
        errln!("note: without --from the client has no source address, as on a unix socket");
    }
    let is_known = found.is_some();
    let (pool, labels) = found.map_or_else(Default::default, |record| (record.pool, record.labels));
    let node = Node {
        pool: args.pool.clone().or(pool).filter(|pool| !pool.is_empty()),
        labels: if args.labels.is_empty() {
            labels
        } else {
            args.labels.iter().cloned().collect()
        },
        ..Node::default()
    };
    Ok((node, is_known))
}

/// Checks that a request to a pod names the pod's node, or an address that a listener may dial itself. `node` is the known node.
fn check_pod_address(to: &To, node: Option<&NodeName>) -> anyhow::Result<()> {
    match (to, node) {
        (To::Direct(address), Some(node)) => bail!(
            "{address} is a confirmed address of the node {node}, and not that of a pod; for a pod at the edge write its node"
        ),
        (To::Node(name), _) if name.as_str().parse::<IpAddr>().is_ok() => bail!(
            "{name} is an address; for a pod at the edge write its node, and for a pod that a listener dials itself write CONNECT and the pod's address"
        ),
        _ => Ok(()),
    }
}

/// Returns a decision with the line of the rule that made it.
fn format_decision(decision: &Decision, file: &Path) -> String {
    let verdict = if decision.allow { "allow" } else { "deny" };
    match &decision.matched {
        Some(by) => format!("{verdict}: {} ({}:{})", by.rule, file.display(), by.line),
        None => format!("{verdict}: no rule of {} matches", file.display()),
    }
}

#[cfg(test)]
mod tests;
