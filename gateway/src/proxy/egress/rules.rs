//! Decisions by the rules of the configuration. The functions are pure, and a connection that no rule allows is denied.

use crate::{
    config::{Egress, EgressRule, matches_any},
    error::{Error, Reason},
    proxy::{direct::special_addresses, route::Route},
    state::{
        pods::DestinationPod,
        policy::{MatchedRule, PodInput},
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::Target;
use std::{collections::BTreeMap, fmt, net::SocketAddr};

/// Destination outside of tunnels that an edge asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EgressTarget {
    /// Key of `egress.destinations`, if the edge asks for one.
    destination: Option<String>,
    /// Host and port to which the gateway connects, in lower case.
    pub(super) host_port: Target,
}

/// Node that asks, with its confirmed properties.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) node: &'a NodeName,
    pub(super) pool: Option<&'a str>,
    pub(super) labels: &'a BTreeMap<String, String>,
}

impl EgressTarget {
    /// Returns the destination of a request. A destination with a name of its own has one port, whatever port the request names.
    pub(super) fn new(requested: &Target, egress: &Egress) -> Result<Self, Error> {
        let host = requested.host.to_ascii_lowercase();
        let host = host.strip_suffix('.').unwrap_or(&host);
        let Some(address) = egress.destinations.get(host) else {
            if requested.port == 0 {
                return Err(Reason::Malformed.error(format!("the destination {host} has no port")));
            }
            return Ok(Self {
                destination: None,
                host_port: Target::new(host, requested.port),
            });
        };
        let host_port = address.parse().map_err(|error| {
            let detail = format!("the gateway's address of the destination {host} is not usable");
            Reason::TargetUnresolved.with_source(detail, error)
        })?;
        Ok(Self {
            destination: Some(host.to_owned()),
            host_port,
        })
    }

    /// Whether the name of the destination still stands for the same address in the configuration.
    pub(super) fn is_current(&self, egress: &Egress) -> bool {
        let Some(name) = &self.destination else {
            return true;
        };
        let address = egress.destinations.get(name);
        let address = address.and_then(|address| address.parse::<Target>().ok());
        address.as_ref() == Some(&self.host_port)
    }

    /// Whether this is a key of `egress.destinations`.
    pub(super) fn is_named_destination(&self) -> bool {
        self.destination.is_some()
    }

    /// Whether the rule lists this destination by its name.
    fn is_listed_by_name(&self, rule: &EgressRule) -> bool {
        match &self.destination {
            Some(name) => rule.to.destinations.contains(name),
            None => {
                self.host_port.ip().is_none() && matches_any(&rule.to.names, &self.host_port.host)
            }
        }
    }
}

impl fmt::Display for EgressTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.destination {
            Some(name) => f.write_str(name),
            None => self.host_port.fmt(f),
        }
    }
}

impl Subject<'_> {
    /// Whether any rule can allow the destination, depending on its addresses. Otherwise its name must not be resolved. `namespace` is
    /// that in the name of a pod.
    pub(super) fn may_reach(
        self,
        (target, namespace): (&EgressTarget, Option<&str>),
        egress: &Egress,
    ) -> bool {
        let is_address = target.host_port.ip().is_some();
        let may_be_pod = |rule: &EgressRule| match namespace {
            Some(namespace) => matches_any(&rule.to.pod_namespaces, namespace),
            None => is_address && !rule.to.pod_namespaces.is_empty(),
        };
        let mut rules = self.rules(egress, target.host_port.port);
        rules.any(|(_, rule)| {
            target.is_listed_by_name(rule) || !rule.to.networks.0.is_empty() || may_be_pod(rule)
        })
    }

    /// Returns the first rule that allows a connection to an address of the destination. `is_own` is whether the address belongs to
    /// the gateway's machine, and `pod` is the pod that has the address.
    ///
    /// A rule that lists a name, or the namespace of the pod, allows ordinary addresses. An address that is special is allowed only by a
    /// network, or by a named destination that is this address.
    pub(super) fn address_rule(
        self,
        target: &EgressTarget,
        (address, is_own, pod): (SocketAddr, bool, &DestinationPod),
        egress: &Egress,
    ) -> Option<MatchedRule> {
        let ip = address.ip();
        let is_explicit = target.destination.is_some() && target.host_port.ip().is_some();
        let is_usable = is_explicit || special_addresses::is_ordinary(ip, is_own);
        let is_allowed = |rule: &EgressRule| {
            let mut networks = rule.to.networks.0.iter();
            (is_usable && (target.is_listed_by_name(rule) || is_in_namespaces(pod, rule)))
                || networks.any(|net| special_addresses::is_allowed_in(ip, net, is_own))
        };
        let mut rules = self.rules(egress, address.port());
        rules
            .find(|(_, rule)| is_allowed(rule))
            .map(|(index, rule)| matched(index, rule))
    }

    /// Returns the first rule that allows connections to a port of another node, or of a pod there.
    pub(super) fn node_rule(self, route: &Route, egress: &Egress) -> Option<MatchedRule> {
        let mut rules = self.rules(egress, route.target.port);
        rules
            .find(|(_, rule)| {
                matches_any(&rule.to.nodes, route.node.as_str())
                    || is_in_namespaces(&route.pod, rule)
            })
            .map(|(index, rule)| matched(index, rule))
    }

    /// Returns the rules for this node and port.
    fn rules(self, egress: &Egress, port: u16) -> impl Iterator<Item = (usize, &EgressRule)> {
        egress.rules.iter().enumerate().filter(move |(_, rule)| {
            let who = rule.who.0.as_ref();
            let has_subject = who.is_none_or(|who| who.includes(self.node, self.pool, self.labels));
            let ports = rule.to.ports.0.as_ref();
            let has_port =
                ports.is_none_or(|ports| ports.iter().any(|range| range.0.contains(&port)));
            has_subject && has_port
        })
    }
}

/// Whether a rule lists the namespace of a pod.
fn is_in_namespaces(pod: &DestinationPod, rule: &EgressRule) -> bool {
    match pod.policy_input() {
        PodInput::Namespace(namespace) => matches_any(&rule.to.pod_namespaces, namespace),
        PodInput::None | PodInput::Unknown => false,
    }
}

fn matched(index: usize, rule: &EgressRule) -> MatchedRule {
    MatchedRule {
        rule: rule.label(index).into(),
        line: 0,
    }
}
