//! Reviews by the cluster's API: authentication of tokens (`TokenReview`) and authorization at kubelets (`SubjectAccessReview`).
//!
//! 1. A request to a kubelet gets the same attributes that the kubelet itself gives it (`kubelet_attributes`).
//! 2. A [`ReviewClient`] sends one review for all requests that wait for it, and the answer is cached (`cache`).
//!
//! This is one of the two waits that the request path permits. Without an answer no client is admitted. The review follows the
//! policy and never replaces it: both must allow the request.

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

/// Checks whether the client may access a kubelet port through this listener.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::DependencyUnavailable`] if there is no answer.
pub(super) async fn check(
    kubelets: &[u16],
    reviews: Option<&ReviewCache>,
    authz_request: &AuthzRequest<'_>,
) -> Result<(), Error> {
    let port = authz_request.destination.port();
    // The check covers every address of the node, because a kubelet listens on all of them, including those on the pod network.
    if !port.is_some_and(|port| kubelets.contains(&port)) {
        return Ok(());
    }
    let subject = "your permission for this request";
    let Some(review_cache) = reviews else {
        return Err(Reason::DependencyUnavailable.error(format!(
            "{subject} cannot be reviewed: this gateway has no API of a cluster"
        )));
    };
    let account = account(authz_request.client);
    // For the cluster, an empty name means every node. An address that no edge serves may belong to any other kubelet.
    let node = authz_request
        .destination
        .node()
        .map_or("", NodeName::as_str);
    let (verb, subresources) = (
        kubelet_attributes::verb(authz_request),
        kubelet_attributes::subresources(authz_request),
    );
    for subresource in subresources {
        let access = ReviewAttributes {
            account: account.clone(),
            verb,
            node: node.to_owned(),
            subresource,
        };
        let allowed = review_cache
            .review_access(access, authz_request.remote_address)
            .await;
        if allowed.map_err(|review_error| review_error.into_error(subject))? {
            return Ok(());
        }
    }
    let node = authz_request
        .destination
        .node()
        .map_or("any node", NodeName::as_str);
    let client = authz_request.client;
    Err(Reason::Forbidden.error(format!(
        "the cluster does not allow {client} to {verb} nodes/{} of {node}",
        subresources.join(" or nodes/")
    )))
}

/// Returns the user as which the kubelet would identify this client.
fn account(client: &ClientIdentity) -> Arc<UserInfo> {
    if let Some(account) = &client.account {
        return account.clone();
    }
    let (user, groups) = if client.method == AuthMethod::Anonymous {
        (ANONYMOUS, vec![UNAUTHENTICATED.to_owned()])
    } else {
        // A client's own claim that it is authenticated or anonymous is ignored.
        let claimed_groups = client.groups.iter();
        let message = claimed_groups
            .filter(|group| ![AUTHENTICATED, UNAUTHENTICATED].contains(&group.as_str()));
        let implied_groups = [AUTHENTICATED.to_owned()];
        (
            &*client.name,
            message.cloned().chain(implied_groups).collect(),
        )
    };
    Arc::new(UserInfo {
        user: user.to_owned(),
        groups,
        ..UserInfo::default()
    })
}
