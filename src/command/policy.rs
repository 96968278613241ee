//! `causeway policy`: what the rules decide, asked without a gateway.
//!
//! The same code decides here and at every stream. Pool and labels of a node are those of the gateway's data
//! directory, or given; a table that is tested brings its own, so that it can be run anywhere.

mod table;

use std::path::Path;

use anyhow::{Context, anyhow};
use causeway_certs::{Access, NodeName, Store, StoreError};
use causeway_gateway::{
    config::policy::{self, Act},
    state::{
        Node, Policy as Rules,
        policy::{Decision, Question},
    },
};
use causeway_tunnel::target;
use hyper::{Method, Uri};

use crate::cli::{Policy, PolicyCheck};
use crate::output::{errln, outln};
use crate::settings;

/// Answers what was asked.
pub(crate) fn run(policy: Policy) -> anyhow::Result<()> {
    let answered = match policy {
        Policy::Check(ask) => check(&ask),
        Policy::Test(ask) => table::run(&ask),
    };
    // A script that asks whether something is refused must not take a slip of the pen for a yes.
    answered.map_err(|error| {
        if error.is::<No>() || error.is::<settings::Refused>() {
            return error;
        }
        settings::Refused::from(vec![format!("causeway: {}", super::explain(&error))]).into()
    })
}

/// It is refused, or an expectation is not met: the answer was given, and it is no.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct No(String);

/// The rules of a file, compiled.
pub(crate) fn read(file: &Path) -> anyhow::Result<Rules> {
    let (mut policy, lines) = settings::document::<policy::Policy>(file)?;
    for (index, rule) in policy.rules.iter_mut().enumerate() {
        rule.line = lines.of(&format!("rules[{index}]"));
    }
    Rules::compile(&policy).map_err(|faults| {
        let said = faults
            .iter()
            .map(|fault| format!("{}: {}", fault.path, fault.message));
        settings::Refused::from(said.collect::<Vec<_>>()).into()
    })
}

/// A request as it is written down.
#[derive(Debug)]
struct Written {
    node: NodeName,
    port: u16,
    path: String,
    act: Act,
}

impl Written {
    /// Of `https://edge-1:10250/exec/…`, or of `edge-1:22` where it is a CONNECT.
    fn of(method: &Method, url: &str, upgrade: bool) -> anyhow::Result<Self> {
        let says = || format!("\"{url}\" is no request's URL; write https://edge-1:10250/metrics");
        let (authority, path, act) = if method == Method::CONNECT {
            (url.to_owned(), String::new(), Act::Connect)
        } else {
            let uri: Uri = url.parse().with_context(says)?;
            // `edge-1:9100` alone is read as an authority without a path, which no rule for paths matches.
            let http = matches!(uri.scheme_str(), Some("http" | "https"));
            let authority = uri.authority().filter(|_| http);
            let authority = authority.ok_or_else(|| anyhow!(says()))?;
            let act = if upgrade { Act::Upgrade } else { Act::Request };
            (authority.to_string(), uri.path().to_owned(), act)
        };
        let (host, port) = target::split(&authority)
            .map_err(|why| anyhow!("\"{authority}\" names no port of a node: {why}"))?;
        let node = NodeName::parse(host)
            .with_context(|| format!("\"{host}\" is not the name of a node"))?;
        let port = port.ok_or_else(|| {
            anyhow!(
                "\"{url}\" names no port of {node}; write it behind the name, as in {node}:10250"
            )
        })?;
        Ok(Self {
            node,
            port,
            path,
            act,
        })
    }

    /// What the rules say of this request by such a caller.
    fn decide(&self, rules: &Rules, method: &Method, caller: &Who<'_>, node: &Node) -> Decision {
        rules.decide(&Question {
            user: caller.user.unwrap_or_default(),
            groups: caller.groups,
            uris: caller.uris,
            known: caller.user.is_some(),
            from: caller.from,
            node: &self.node,
            pool: node.pool.as_deref(),
            labels: &node.labels,
            port: self.port,
            act: self.act,
            method: method.as_str(),
            path: &self.path,
        })
    }
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
struct Who<'a> {
    user: Option<&'a str>,
    groups: &'a [String],
    uris: &'a [String],
    from: Option<std::net::IpAddr>,
}

fn check(ask: &PolicyCheck) -> anyhow::Result<()> {
    let file = &ask.file.policy;
    let rules = read(file)?;
    let written = Written::of(&ask.method, &ask.url, ask.upgrade)?;
    let node = confirmed(ask, &written.node)?;
    let caller = Who {
        user: ask.user.as_deref(),
        groups: &ask.groups,
        uris: &ask.uris,
        from: ask.from,
    };
    let decision = written.decide(&rules, &ask.method, &caller, &node);
    outln!("{}", said(&decision, file))?;
    if !decision.allow {
        return Err(No("it is refused".into()).into());
    }
    Ok(())
}

/// What is confirmed of the node: as given, else as its gateway knows it.
fn confirmed(ask: &PolicyCheck, node: &NodeName) -> anyhow::Result<Node> {
    let nodes = match Store::open(&ask.data.data_dir, Access::Existing) {
        // Rules are judged on other machines too.
        Err(StoreError::Missing { .. }) => Vec::new(),
        store => store?.nodes().all()?,
    };
    let found = nodes.into_iter().find(|record| record.node == *node);
    if found.is_none() && (ask.pool.is_none() || ask.labels.is_empty()) {
        let data = ask.data.data_dir.display();
        errln!(
            "note: {data} knows nothing of {node}; its pool and labels are what --pool and --label say"
        );
    }
    if ask.from.is_none() {
        errln!("note: without --from the caller comes from no network, as through a unix socket");
    }
    let (pool, labels) = found.map_or_else(Default::default, |record| (record.pool, record.labels));
    Ok(Node {
        pool: ask.pool.clone().or(pool),
        labels: if ask.labels.is_empty() {
            labels
        } else {
            ask.labels.iter().cloned().collect()
        },
        ..Node::default()
    })
}

/// A decision, with the line that made it.
fn said(decision: &Decision, file: &Path) -> String {
    let word = if decision.allow { "allow" } else { "deny" };
    match &decision.by {
        Some(by) => format!("{word}: {} ({}:{})", by.rule, file.display(), by.line),
        None => format!("{word}: no rule of {} matches", file.display()),
    }
}

#[cfg(test)]
mod tests;
