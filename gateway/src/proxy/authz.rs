//! Authorization of a client on a node: decided for every stream, before the edge learns of it.
//!
//! An implementation of [`Authorize`] decides; the default allows every identified client. It answers at once if it can. If
//! another service must be asked, it returns a question, which is awaited here within a bound: one of the two waits that the
//! request path permits.

pub use crate::config::policy::Action;

use crate::{
    error::{Error, Reason},
    proxy::{
        authn::identity::{AuthMethod, ClientIdentity},
        route::Route,
    },
    state::{
        Node, Nodes, PolicyReader,
        policy::{Decision, MatchedRule, PolicyInput},
    },
};
use causeway_certs::NodeName;
use causeway_rt::listener::RemoteAddr;
use futures_util::future::BoxFuture;
use http::Method;
use std::{
    borrow::Cow,
    fmt::{self, Debug},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

/// Request to the authorizer.
#[derive(Clone, Copy, Debug)]
pub struct AuthzRequest<'a> {
    /// Identity of the client.
    pub client: &'a ClientIdentity,
    /// Address of the client.
    pub from: RemoteAddr,
    /// The node or address that the stream goes to.
    pub destination: Destination<'a>,
    /// Kind of stream.
    pub act: Action,
    /// The method (CONNECT for a TCP session).
    pub method: &'a Method,
    /// The path as it will be sent, without the query.
    pub path: &'a str,
}

/// The destination of a stream.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a> {
    /// To a node at the edge, through its tunnel.
    Node(&'a Route),
    /// To an address at no edge, which the gateway dials itself (`direct`).
    Direct(SocketAddr),
}

impl Destination<'_> {
    /// The port.
    pub fn port(&self) -> u16 {
        match self {
            Self::Node(route) => route.target.port,
            Self::Direct(address) => address.port(),
        }
    }

    /// The node, if there is one.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Node(route) => Some(&route.node),
            Self::Direct(_) => None,
        }
    }
}

impl fmt::Display for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(route) => write!(f, "port {} of {}", route.target.port, route.node),
            Self::Direct(address) => write!(f, "{address}, which belongs to no edge"),
        }
    }
}

/// The decision.
pub enum AuthzDecision {
    /// Allowed.
    Allow,
    /// Not allowed; the sentence is for the client.
    Deny(Cow<'static, str>),
    /// Decision of the policy.
    Policy(Decision),
    /// It cannot be decided yet; the sentence is for the client.
    DependencyUnavailable(Cow<'static, str>),
    /// Another service must be asked.
    Ask(BoxFuture<'static, Result<(), Cow<'static, str>>>),
}

/// Authorizer of streams.
pub trait Authorize: Debug + Send + Sync + 'static {
    /// Decides, without waiting.
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision;

    /// Returns a number that rises when a granted access may be denied now: open streams are then decided again.
    fn changes(&self) -> u64 {
        0
    }
}

/// Authorizer that allows every client which a listener admits to reach every node. The edge decides which targets it serves.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowAuthenticated;

impl Authorize for AllowAuthenticated {
    fn authorize(&self, _: &AuthzRequest<'_>) -> AuthzDecision {
        AuthzDecision::Allow
    }
}

/// By the rules of a policy file.
#[derive(Clone, Debug)]
pub struct PolicyAuthorizer {
    /// The rules.
    pub policy: PolicyReader,
    /// Confirmed data of nodes.
    pub nodes: Nodes,
}

impl Authorize for PolicyAuthorizer {
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision {
        if self.policy.is_open() {
            return AuthzDecision::Allow;
        }
        let decide = |direct, node: &Node| {
            AuthzDecision::Policy(self.policy.decide(&question(ask, direct, node)))
        };
        let route = match &ask.destination {
            Destination::Node(route) => route,
            Destination::Direct(address) => return decide(Some(address.ip()), &Node::default()),
        };
        // A rule that denies by a label matches no node whose labels are missing.
        if self.policy.reads_nodes()
            && let Some(reason) = self.nodes.pending()
        {
            return AuthzDecision::DependencyUnavailable(reason.to_string().into());
        }
        self.nodes.with(&route.node, |node| decide(None, node))
    }

    fn changes(&self) -> u64 {
        self.policy.replaced()
    }
}

/// Returns the input of the rules, with the address that is dialled `direct` or the confirmed data of the node.
fn question<'a>(ask: &AuthzRequest<'a>, direct: Option<IpAddr>, node: &'a Node) -> PolicyInput<'a> {
    let AuthzRequest { client, .. } = ask;
    PolicyInput {
        user: &client.name,
        groups: &client.groups,
        uris: &client.uris,
        known: client.method != AuthMethod::Anonymous,
        from: ask.from.ip(),
        node: match ask.destination {
            Destination::Node(route) => Some(&route.node),
            Destination::Direct(_) => None,
        },
        direct,
        pool: node.policy_pool.as_deref(),
        labels: &node.labels,
        port: ask.destination.port(),
        act: ask.act,
        method: ask.method.as_str(),
        path: ask.path,
    }
}

/// Asks, and waits for no longer than `bound`. Also says by which rule it was decided, if by one.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::DependencyUnavailable`] if no decision came in time.
pub async fn check(
    authorizer: &dyn Authorize,
    ask: &AuthzRequest<'_>,
    bound: Duration,
) -> (Option<MatchedRule>, Result<(), Error>) {
    let forbidden = |why| Err(Reason::Forbidden.error(why));
    match authorizer.authorize(ask) {
        AuthzDecision::Allow => (None, Ok(())),
        AuthzDecision::Deny(why) => (None, forbidden(why)),
        AuthzDecision::Policy(Decision { allow: true, by }) => (by, Ok(())),
        AuthzDecision::Policy(Decision { by, .. }) => (by, forbidden(refusal(ask).into())),
        AuthzDecision::DependencyUnavailable(why) => {
            (None, Err(Reason::DependencyUnavailable.error(why)))
        }
        AuthzDecision::Ask(question) => {
            let decided = match tokio::time::timeout(bound, question).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(why)) => forbidden(why),
                Err(_) => {
                    let detail = format!(
                        "your permission for this request was not decided within {bound:?}"
                    );
                    Err(Reason::DependencyUnavailable.error(detail))
                }
            };
            (None, decided)
        }
    }
}

/// As much of a path as a refusal repeats, in bytes.
const LONGEST: usize = 256;

/// Returns the sentence for the client; the rule is for the log.
fn refusal(ask: &AuthzRequest<'_>) -> String {
    let AuthzRequest {
        client,
        destination,
        ..
    } = ask;
    match ask.act {
        Action::Connect => {
            format!("the policy does not allow {client} to connect to {destination}")
        }
        Action::Request | Action::Upgrade => format!(
            "the policy does not allow {client} to {} {} at {destination}",
            ask.method,
            ask.path.get(..LONGEST).unwrap_or(ask.path)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_tunnel::Target;

    #[derive(Debug)]
    struct Slow;

    impl Authorize for Slow {
        fn authorize(&self, _: &AuthzRequest<'_>) -> AuthzDecision {
            AuthzDecision::Ask(Box::pin(std::future::pending()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_decision_that_does_not_come_is_a_refusal_in_time() {
        let node = NodeName::parse("edge-1").unwrap();
        let route = Route {
            target: Target::new("edge-1", 80),
            node,
        };
        let client = ClientIdentity::for_test("alice");
        let ask = AuthzRequest {
            client: &client,
            from: RemoteAddr::Unix(0),
            destination: Destination::Node(&route),
            act: Action::Request,
            method: &Method::GET,
            path: "/",
        };
        let bound = Duration::from_secs(3);
        let (_, decided) = check(&Slow, &ask, bound).await;
        assert_eq!(decided.unwrap_err().reason, Reason::DependencyUnavailable);
        assert!(check(&AllowAuthenticated, &ask, bound).await.1.is_ok());
    }
}
