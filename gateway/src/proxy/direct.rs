//! Step 6d: a CONNECT to an address that no edge serves, dialled by the gateway.
//!
//! A kube-apiserver with an egress selector sends all traffic for its cluster. This includes traffic to pods and Services
//! elsewhere, webhooks and aggregated APIs beside kubelets. A listener dials only addresses in its networks (`direct_networks`).
//! The node of a name or an address is looked up first, so a target at an edge is never dialled directly. A name is resolved and
//! checked here, and the gateway dials exactly the checked address. `special_addresses` decides which addresses a network
//! includes, and the policy decides which clients may connect to an address.

pub(super) mod special_addresses;

use super::{
    access_log::AccessRecord,
    authn::{AuthMethod, ClientIdentity},
    authz::{Action, AuthzRequest, Destination},
    client_session::PendingSession,
    context::Proxy,
    listener::{ClientConnection, Listener},
    relay::RESET_BY_CLIENT,
    request_body::RequestBody,
    response_body::ResponseBody,
    route::{self, RouteInput},
};
use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    state::{
        NodeLocation, Nodes,
        pods::{DestinationPod, PodMatch},
    },
};
use causeway_rt::{host_addresses, log_throttle::LogThrottle, resolve, socket};
use causeway_tunnel::{
    RejectCode, Target,
    copy::{self, CopyOutcome},
};
use http::{Method, Request, Response, StatusCode};
use ipnet::IpNet;
use std::{
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};
use tracing::debug_span;

/// Minimum time between two log lines about exhausted resources of this process.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Context of a CONNECT that the gateway dials itself.
pub struct DirectConnect<'a> {
    /// The listener.
    pub proxy: &'a Proxy,
    /// The client's connection.
    pub connection: &'a Arc<ClientConnection>,
    /// Identity of the client.
    pub client: &'a ClientIdentity,
    /// Requested target.
    pub target: &'a Target,
    /// The record of this session.
    pub record: &'a Arc<AccessRecord>,
}

impl DirectConnect<'_> {
    /// Returns the error for the client. An anonymous client does not learn which pods exist.
    fn hide_pods(&self, error: Error) -> Error {
        let is_about_target = matches!(error.reason, Reason::Forbidden | Reason::NodeUnknown);
        if is_about_target
            && self.client.method == AuthMethod::Anonymous
            && self.proxy.shared.nodes.follows_pods()
        {
            return self.proxy.listener.authentication.missing_credentials();
        }
        error
    }
}

/// Returns the target of a CONNECT that this listener may dial itself, because no edge serves the target.
pub(crate) fn direct_target(
    networks: &[IpNet],
    route_input: &RouteInput<'_>,
    nodes: &Nodes,
) -> Option<Target> {
    if networks.is_empty() {
        return None;
    }
    let is_unknown_node = matches!(route::find_route(route_input, nodes), Err(error) if error.reason == Reason::NodeUnknown);
    let target: Target = route_input
        .authority
        .filter(|_| is_unknown_node)?
        .parse()
        .ok()?;
    (!is_unknown_pod(&target, nodes)).then_some(target)
}

/// Whether the target can only be a pod, and is not known to be one outside the edges.
fn is_unknown_pod(target: &Target, nodes: &Nodes) -> bool {
    match target.ip() {
        Some(address) => route::check_pod_elsewhere(address, nodes).is_err(),
        None => nodes
            .pod_by_name(&target.host)
            .is_some_and(|pod| !matches!(pod, PodMatch::Elsewhere(_))),
    }
}

/// Answers a CONNECT after the target was dialled, and relays bytes after the response.
///
/// # Errors
/// If the client has too many open streams, or the target is in no network of the listener, or cannot be dialled.
pub(super) async fn connect(
    direct: DirectConnect<'_>,
    mut request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let shared = &direct.proxy.shared;
    direct.proxy.admit_client(direct.client, direct.record)?;
    let permit = shared.limits.admit_node(&shared.direct_streams)?;
    direct.record.set_node_permit(permit);
    let session = PendingSession::take(&mut request);
    let deadline = Instant::now() + shared.timeouts.connect;
    let dialled = dial(&direct, deadline).await;
    let (tcp, address) = dialled.map_err(|error| direct.hide_pods(error))?;
    // A later reload finds the address in the record. This check covers an earlier reload.
    check(&direct.proxy.listener.latest(), &shared.nodes, address)?;
    direct.record.session_started(StatusCode::OK);
    spawn_session(&direct, session, tcp);
    Ok(Response::new(ResponseBody::empty()))
}

async fn dial(
    direct: &DirectConnect<'_>,
    deadline: Instant,
) -> Result<(TcpStream, SocketAddr), Error> {
    let target = direct.target;
    let nodes = &direct.proxy.shared.nodes;
    let addresses = resolve_target(nodes, target, deadline).await?;
    let is_inside =
        |address: &&SocketAddr| is_dialled_here(&direct.proxy.listener, nodes, address.ip());
    let candidates: Vec<_> = addresses.iter().filter(is_inside).collect();
    let mut last_error = None;
    for (attempts, address) in candidates.iter().enumerate() {
        let pod = nodes.destination_pod(address.ip(), None);
        match authorize_address(direct, **address, &pod).await {
            // For an anonymous client, a refused pod looks like an unknown one.
            Err(refusal)
                if matches!(refusal.reason, Reason::Forbidden | Reason::Unauthenticated) =>
            {
                last_error = Some(refusal);
                continue;
            }
            result => result?,
        }
        if let Err(unknown) = check_same_pod(nodes, address.ip(), &pod) {
            last_error = Some(unknown);
            continue;
        }
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        let attempt_timeout =
            remaining_time / u32::try_from(candidates.len() - attempts).unwrap_or(u32::MAX);
        let throttle = &direct.proxy.listener.exhaustion_throttle;
        match dial_address((target, **address), attempt_timeout, throttle).await {
            Ok(tcp) => return Ok((tcp, **address)),
            Err(error) => last_error = Some(error),
        }
    }
    Err(last_error.unwrap_or_else(|| {
        let listener = &direct.proxy.listener.name;
        Reason::Forbidden.error(format!(
            "{target} belongs to no edge, and is in no network that listener {listener:?} dials itself (direct)"
        ))
    }))
}

/// Checks that the gateway itself may dial this address, and that the address still belongs to the pod that was authorized.
///
/// # Errors
/// [`Reason::NodeUnknown`], or [`Reason::DependencyUnavailable`] while the pods are not known.
pub(super) fn check_same_pod(
    nodes: &Nodes,
    address: IpAddr,
    authorized: &DestinationPod,
) -> Result<(), Error> {
    route::check_pod_elsewhere(address, nodes)?;
    if nodes.destination_pod(address, None) == *authorized {
        return Ok(());
    }
    Err(route::changed_pod_error(address))
}

/// Dials one address of a target.
///
/// # Errors
/// If the address does not accept the connection within `attempt_timeout`.
pub(super) async fn dial_address(
    (target, address): (&Target, SocketAddr),
    attempt_timeout: Duration,
    exhaustion_throttle: &LogThrottle,
) -> Result<TcpStream, Error> {
    match timeout(attempt_timeout, TcpStream::connect(address)).await {
        Ok(Ok(tcp)) => {
            socket::set_tcp_options(&tcp);
            Ok(tcp)
        }
        Ok(Err(cause)) => {
            let detail = format!("this gateway could not dial {target}: {cause}");
            let reason = Reason::from(RejectCode::from_dial_error(&cause, address.ip()));
            if reason == Reason::Exhausted
                && let Some(count) = exhaustion_throttle.record_within(LOG_INTERVAL)
            {
                tracing::warn!(%target, error = %cause, count, "this gateway is out of file descriptors, local ports or memory");
            }
            Err(reason.with_source(detail, cause))
        }
        Err(_) => {
            let detail = format!("{target} did not accept this gateway's connection in time");
            Err(Reason::TargetTimeout.error(detail))
        }
    }
}

/// Checks that a listener may still dial an address directly.
///
/// # Errors
/// [`Reason::Forbidden`] if the address is no longer in any of the listener's networks.
pub(super) fn check(listener: &Listener, nodes: &Nodes, address: SocketAddr) -> Result<(), Error> {
    if is_dialled_here(listener, nodes, address.ip()) {
        return Ok(());
    }
    Err(Reason::Forbidden.error(format!(
        "{address} is no longer in a network that listener {:?} dials itself (direct)",
        listener.name
    )))
}

/// Whether a listener dials this address itself.
fn is_dialled_here(listener: &Listener, nodes: &Nodes, address: IpAddr) -> bool {
    let is_own = is_host_address(nodes, address);
    let mut networks = listener.direct_networks.iter();
    networks.any(|network| special_addresses::is_allowed_in(address, network, is_own))
}

/// Whether the address belongs to this host, and to no node of the cluster: a kubelet on this host is dialled like any other
/// kubelet.
pub(super) fn is_host_address(nodes: &Nodes, address: IpAddr) -> bool {
    host_addresses::is_own(address) && !nodes.is_elsewhere(address)
}

/// Checks whether the client may connect to this address.
async fn authorize_address(
    direct: &DirectConnect<'_>,
    address: SocketAddr,
    pod: &DestinationPod,
) -> Result<(), Error> {
    // Recorded first, so that a later change of the policy is checked against this address.
    direct.record.set_direct_address(address, pod.clone());
    let authz_request = AuthzRequest {
        client: direct.client,
        remote_address: direct.connection.peer,
        destination: Destination::Direct(address, pod),
        action: Action::Connect,
        method: &Method::CONNECT,
        path: "",
    };
    direct.proxy.authorize(&authz_request, direct.record).await
}

/// Resolves the target: the own addresses of a node of the cluster or of a pod, or else the result of name resolution.
///
/// # Errors
/// [`Reason::NodeUnknown`] if the name cannot be resolved, or [`Reason::ResolveTimeout`].
pub(super) async fn resolve_target(
    nodes: &Nodes,
    target: &Target,
    deadline: Instant,
) -> Result<Vec<SocketAddr>, Error> {
    let Target { host, port } = target;
    if let Some(NodeLocation::Elsewhere(addresses)) = nodes.location(host) {
        let addresses = addresses.into_iter();
        return Ok(addresses.map(|ip| SocketAddr::new(ip, *port)).collect());
    }
    match nodes.pod_by_name(host) {
        None => {}
        Some(PodMatch::Elsewhere(addresses)) => {
            let addresses = addresses.into_iter();
            return Ok(addresses.map(|ip| SocketAddr::new(ip, *port)).collect());
        }
        Some(PodMatch::Undecided(reason)) => {
            return Err(Reason::DependencyUnavailable.error(reason.to_string()));
        }
        Some(PodMatch::Pod(..) | PodMatch::Unknown) => {
            let detail = format!("no pod outside the edges has the name {host}");
            return Err(Reason::NodeUnknown.error(detail));
        }
    }
    match timeout_at(deadline, resolve(host, *port)).await {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(cause)) => {
            let detail =
                format!("no node has the name {host}, and the name cannot be resolved: {cause}");
            Err(Reason::NodeUnknown.with_source(detail, cause))
        }
        Err(_) => {
            let detail =
                format!("no node has the name {host}, and the name was not resolved in time");
            Err(Reason::ResolveTimeout.error(detail))
        }
    }
}

fn spawn_session(direct: &DirectConnect<'_>, session: PendingSession, tcp: TcpStream) {
    let starting = session.start(direct.connection.clone());
    let record = direct.record.clone();
    let client_speaks_first = direct.proxy.listener.error_format == ErrorFormat::Kubernetes;
    let work = async move {
        let Some(session) = starting.await else {
            return;
        };
        let reset = session.wait_reset();
        let relaying = copy::relay_connection(session, tcp, &record.bytes, client_speaks_first);
        let relaying = pin!(relaying);
        let outcome = tokio::select! {
            biased;
            outcome = record.run_unless_terminated(relaying) => outcome,
            () = reset => return record.record_abandoned(RESET_BY_CLIENT),
        };
        match outcome {
            Ok(CopyOutcome::Clean) => record.mark_session_ended(),
            Ok(CopyOutcome::Stream(error)) => {
                let detail = format!("the target aborted the session: {error}");
                record.record_failure(&Reason::TargetBroken.error(detail));
            }
            Ok(CopyOutcome::Socket(error)) => {
                record.record_abandoned(&format!("the client aborted its session: {error}"));
            }
            Err(_terminated) => {}
        }
    };
    direct.proxy.tasks.spawn(debug_span!("session"), work);
}
