//! Authorization of a client for a node: decided for every stream before the edge receives it.
//!
//! An implementation of [`Authorize`] decides; the default allows every identified client. It answers at once if it can. If
//! another service has to decide, it returns a future, which is awaited here with a timeout: one of the two waits that the
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
        pods::DestinationPod,
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
    pub remote_address: RemoteAddr,
    /// Node or address to which the stream goes.
    pub destination: Destination<'a>,
    /// Kind of stream.
    pub action: Action,
    /// The method (CONNECT for a TCP session).
    pub method: &'a Method,
    /// The path as it is sent upstream, without the query.
    pub path: &'a str,
}

impl<'a> AuthzRequest<'a> {
    /// Returns the same request for another route.
    pub(super) fn with_route<'b>(&self, route: &'b Route) -> AuthzRequest<'b>
    where
        'a: 'b,
    {
        AuthzRequest {
            destination: Destination::Node(route),
            ..*self
        }
    }
}

/// Destination of a stream.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a> {
    /// Node behind a tunnel.
    Node(&'a Route),
    /// Address that no edge serves, which the gateway dials itself (`direct`), with the pod that has the address.
    Direct(SocketAddr, &'a DestinationPod),
}

impl<'a> Destination<'a> {
    /// Returns the port; `None` for a service, of which only the edge knows the port.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Node(route) => route.port(),
            Self::Direct(address, _) => Some(address.port()),
        }
    }

    /// Returns the service of the node, if the stream goes to one.
    pub fn service(&self) -> Option<&'a str> {
        match self {
            Self::Node(route) => route.service(),
            Self::Direct(..) => None,
        }
    }

    /// Returns the node, if there is one.
    pub fn node(&self) -> Option<&'a NodeName> {
        match self {
            Self::Node(route) => Some(&route.node),
            Self::Direct(..) => None,
        }
    }

    /// Returns the pod.
    pub fn pod(&self) -> &'a DestinationPod {
        match self {
            Self::Node(route) => &route.pod,
            Self::Direct(_, pod) => pod,
        }
    }

    /// Whether a pod, rather than a node or a service of it, may have the address of the destination.
    fn may_be_pod(&self) -> bool {
        match self {
            Self::Node(route) => route.is_to_pod(),
            Self::Direct(..) => true,
        }
    }
}

impl fmt::Display for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(route) => match route.service() {
                Some(service) => write!(f, "the service {service} of {}", route.node),
                None => write!(f, "port {} of {}", route.target.port, route.node),
            },
            Self::Direct(address, _) => write!(f, "{address}, which belongs to no edge"),
        }
    }
}

/// Decision about a stream.
pub enum AuthzDecision {
    /// Allowed.
    Allow,
    /// Not allowed, with the message for the client.
    Deny(Cow<'static, str>),
    /// Decision of the policy.
    Policy(Decision),
    /// No decision is possible yet, with the message for the client.
    DependencyUnavailable(Cow<'static, str>),
    /// Another service has to decide.
    Pending(BoxFuture<'static, Result<(), Cow<'static, str>>>),
}

impl AuthzDecision {
    /// Whether the stream is allowed. A decision that another service makes is not.
    pub(super) fn is_allowed(&self) -> bool {
        matches!(
            self,
            Self::Allow | Self::Policy(Decision { allow: true, .. })
        )
    }
}

/// Authorizer of streams.
pub trait Authorize: Debug + Send + Sync + 'static {
    /// Decides without waiting.
    fn authorize(&self, authz_request: &AuthzRequest<'_>) -> AuthzDecision;

    /// Decides whether the client of a CONNECT may reach its destination by some request, whatever its kind, method and path. The
    /// lists of the nodes that a client may reach depend on this. Unless an implementation knows better, a client may if it may
    /// connect, or send `GET /`.
    fn authorize_destination(&self, connect: &AuthzRequest<'_>) -> AuthzDecision {
        let decision = self.authorize(connect);
        if decision.is_allowed() {
            return decision;
        }
        self.authorize(&AuthzRequest {
            action: Action::Request,
            method: &Method::GET,
            path: "/",
            ..*connect
        })
    }

    /// Returns ports such that a client that may reach any port of a node may reach one of these.
    fn sample_ports(&self) -> Vec<u16> {
        vec![1]
    }

    /// Returns names of services, of which a client may reach one if it may reach any service of a node. The lists of nodes lack
    /// a node without reported services of which the client may reach only services that no sample stands for.
    fn sample_services(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether a decision depends on the pod to which a stream goes.
    fn depends_on_pods(&self) -> bool {
        false
    }

    /// Returns a number that increases when a granted access may be denied now. Open streams are then checked again.
    fn generation(&self) -> u64 {
        0
    }
}

/// Authorizer that allows every client that a listener admits to reach every node. The edge decides which targets it serves.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowAuthenticated;

impl Authorize for AllowAuthenticated {
    fn authorize(&self, _: &AuthzRequest<'_>) -> AuthzDecision {
        AuthzDecision::Allow
    }
}

/// Authorizer that applies the rules of a policy file.
#[derive(Clone, Debug)]
pub struct PolicyAuthorizer {
    /// The rules.
    pub policy: PolicyReader,
    /// Confirmed data of nodes.
    pub nodes: Nodes,
}

/// Reason why rules about pods cannot decide.
const PODS_NOT_FOLLOWED: &str = "the policy depends on pods, and this gateway does not know which pods have which addresses (kubernetes.pods)";

impl PolicyAuthorizer {
    /// Decides by `decide`, unless the rules depend on objects of a cluster that are not known.
    fn decide_by(
        &self,
        ask: &AuthzRequest<'_>,
        decide: fn(&PolicyReader, &PolicyInput<'_>) -> Decision,
    ) -> AuthzDecision {
        if self.policy.allows_all() {
            return AuthzDecision::Allow;
        }
        let decide_for = |direct, node: &Node| {
            AuthzDecision::Policy(decide(&self.policy, &policy_input(ask, direct, node)))
        };
        // A rule that denies pods would not match while the pods are not known.
        if self.policy.depends_on_pods() {
            if let DestinationPod::Undecided(reason) = ask.destination.pod() {
                return AuthzDecision::DependencyUnavailable(reason.to_string().into());
            }
            if ask.destination.may_be_pod() && !self.nodes.follows_pods() {
                return AuthzDecision::DependencyUnavailable(PODS_NOT_FOLLOWED.into());
            }
        }
        let route = match &ask.destination {
            Destination::Node(route) => route,
            Destination::Direct(address, _) => {
                return decide_for(Some(address.ip()), &Node::default());
            }
        };
        // A rule that denies by a label would not match a node whose labels are missing.
        if self.policy.depends_on_nodes()
            && let Some(reason) = self.nodes.pending_reason()
        {
            return AuthzDecision::DependencyUnavailable(reason.to_string().into());
        }
        self.nodes.with(&route.node, |node| decide_for(None, node))
    }
}

impl Authorize for PolicyAuthorizer {
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision {
        self.decide_by(ask, PolicyReader::decide)
    }

    fn authorize_destination(&self, connect: &AuthzRequest<'_>) -> AuthzDecision {
        self.decide_by(connect, PolicyReader::decide_destination)
    }

    fn sample_ports(&self) -> Vec<u16> {
        let rules = self.policy.rules();
        rules.map_or_else(|| vec![1], |rules| rules.sample_ports().to_vec())
    }

    fn sample_services(&self) -> Vec<String> {
        let rules = self.policy.rules();
        rules.map_or_else(Vec::new, |rules| rules.sample_services().to_vec())
    }

    fn depends_on_pods(&self) -> bool {
        self.policy.depends_on_pods()
    }

    fn generation(&self) -> u64 {
        self.policy.generation()
    }
}

/// Returns the input of the rules, with the confirmed data of the node or the address that the gateway dials itself (`direct`).
fn policy_input<'a>(
    authz_request: &AuthzRequest<'a>,
    direct_address: Option<IpAddr>,
    node: &'a Node,
) -> PolicyInput<'a> {
    let AuthzRequest {
        client,
        destination,
        ..
    } = authz_request;
    PolicyInput {
        user: &client.name,
        groups: &client.groups,
        uris: &client.uris,
        is_authenticated: client.method != AuthMethod::Anonymous,
        client_address: authz_request.remote_address.ip(),
        node: destination.node(),
        direct_address,
        pool: node.policy_pool.as_deref(),
        labels: &node.labels,
        service: destination.service(),
        pod: destination.pod().policy_input(),
        port: destination.port(),
        action: authz_request.action,
        method: authz_request.method.as_str(),
        path: authz_request.path,
    }
}

/// Requests a decision, and waits for it at most `wait_limit`. Also returns the rule that decided, if there is one.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::DependencyUnavailable`] without a decision in time.
pub async fn check(
    authorizer: &dyn Authorize,
    authz_request: &AuthzRequest<'_>,
    wait_limit: Duration,
) -> (Option<MatchedRule>, Result<(), Error>) {
    let forbid = |why| Err(Reason::Forbidden.error(why));
    match authorizer.authorize(authz_request) {
        AuthzDecision::Allow => (None, Ok(())),
        AuthzDecision::Deny(why) => (None, forbid(why)),
        AuthzDecision::Policy(Decision {
            allow: true,
            matched: by,
        }) => (by, Ok(())),
        AuthzDecision::Policy(Decision { matched: by, .. }) => {
            (by, forbid(refusal_detail(authz_request).into()))
        }
        AuthzDecision::DependencyUnavailable(why) => {
            (None, Err(Reason::DependencyUnavailable.error(why)))
        }
        AuthzDecision::Pending(pending) => {
            let result = match tokio::time::timeout(wait_limit, pending).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(why)) => forbid(why),
                Err(_) => {
                    let detail = format!(
                        "your permission for this request was not decided within {wait_limit:?}"
                    );
                    Err(Reason::DependencyUnavailable.error(detail))
                }
            };
            (None, result)
        }
    }
}

/// Maximum number of bytes of a path in a refusal.
const MAX_DETAIL_PATH: usize = 256;

/// Returns the message for the client. The log contains the rule.
fn refusal_detail(authz_request: &AuthzRequest<'_>) -> String {
    let AuthzRequest {
        client,
        destination,
        ..
    } = authz_request;
    match authz_request.action {
        Action::Connect => {
            format!("the policy does not allow {client} to connect to {destination}")
        }
        Action::Request | Action::Upgrade => format!(
            "the policy does not allow {client} to {} {} at {destination}",
            authz_request.method,
            authz_request
                .path
                .get(..MAX_DETAIL_PATH)
                .unwrap_or(authz_request.path)
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
            AuthzDecision::Pending(Box::pin(std::future::pending()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_decision_that_does_not_come_is_a_refusal_in_time() {
        let node = NodeName::parse("edge-1").unwrap();
        let route = Route::new(node, Target::new("edge-1", 80));
        let client = ClientIdentity::for_test("alice");
        let ask = AuthzRequest {
            client: &client,
            remote_address: RemoteAddr::Unix(0),
            destination: Destination::Node(&route),
            action: Action::Request,
            method: &Method::GET,
            path: "/",
        };
        let bound = Duration::from_secs(3);
        let (_, decided) = check(&Slow, &ask, bound).await;
        assert_eq!(decided.unwrap_err().reason, Reason::DependencyUnavailable);
        assert!(check(&AllowAuthenticated, &ask, bound).await.1.is_ok());
    }
}
