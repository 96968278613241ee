//! Authentication of tokens and authorization at kubelets by the cluster's API (`TokenReview`, `SubjectAccessReview`).
//!
//! 1. A request to a kubelet gets the attributes that the kubelet itself gives it (`kubelet_attributes`).
//! 2. A [`ReviewClient`] asks the API once for all requests that wait, and the answer is cached (`cache`).
//!
//! This is one of the two waits that the request path permits. Without an answer no client is admitted. The review follows the
//! policy and never replaces it: each of the two must allow.

mod cache;
mod kubelet_attributes;
pub(crate) mod types;

pub use cache::ReviewCache;
pub use types::{ReviewAttributes, ReviewClient, ReviewError, UserInfo};

use super::{
    authn::identity::{AuthMethod, ClientIdentity},
    authz::AuthzRequest,
};
use crate::{
    error::{Error, Reason},
    state::policy::{ANONYMOUS, AUTHENTICATED, UNAUTHENTICATED},
};
use causeway_certs::NodeName;
use std::sync::Arc;

/// Checks whether the client may access a kubelet's port of this listener.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::DependencyUnavailable`] if there is no answer.
pub(super) async fn check(
    kubelets: &[u16],
    reviews: Option<&ReviewCache>,
    ask: &AuthzRequest<'_>,
) -> Result<(), Error> {
    let port = ask.destination.port();
    // For every address of the node: a kubelet listens on all of them, including those on the pod network.
    if !kubelets.contains(&port) {
        return Ok(());
    }
    let what = "your permission for this request";
    let Some(answers) = reviews else {
        return Err(Reason::DependencyUnavailable.error(format!(
            "{what} cannot be reviewed: this gateway has no API of a cluster"
        )));
    };
    let account = account(ask.client);
    // For the cluster, an empty name means every node: an address outside the edges may belong to any other kubelet.
    let node = ask.destination.node().map_or("", NodeName::as_str);
    let (verb, subresources) = (
        kubelet_attributes::verb(ask),
        kubelet_attributes::subresources(ask),
    );
    for subresource in subresources {
        let access = ReviewAttributes {
            account: account.clone(),
            verb,
            node: node.to_owned(),
            subresource,
        };
        let allowed = answers.access(access, ask.from).await;
        if allowed.map_err(|unanswered| unanswered.of(what))? {
            return Ok(());
        }
    }
    let node = ask.destination.node().map_or("any node", NodeName::as_str);
    let client = ask.client;
    Err(Reason::Forbidden.error(format!(
        "the cluster does not allow {client} to {verb} nodes/{} of {node}",
        subresources.join(" or nodes/")
    )))
}

/// Returns the user as which the kubelet would know this client.
fn account(client: &ClientIdentity) -> Arc<UserInfo> {
    if let Some(account) = &client.account {
        return account.clone();
    }
    let (user, groups) = if client.method == AuthMethod::Anonymous {
        (ANONYMOUS, vec![UNAUTHENTICATED.to_owned()])
    } else {
        // A client's own claim that it is authenticated or anonymous is ignored.
        let said = client.groups.iter();
        let said = said.filter(|group| ![AUTHENTICATED, UNAUTHENTICATED].contains(&group.as_str()));
        let known = [AUTHENTICATED.to_owned()];
        (&*client.name, said.cloned().chain(known).collect())
    };
    Arc::new(UserInfo {
        user: user.to_owned(),
        groups,
        ..UserInfo::default()
    })
}
