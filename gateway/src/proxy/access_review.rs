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
/// [`Reason::Forbidden`], or [`Reason::Undecided`] if there is no answer.
pub(super) async fn check(
    kubelets: &[u16],
    reviews: Option<&ReviewCache>,
    ask: &AuthzRequest<'_>,
) -> Result<(), Error> {
    let port = ask.destination.port();
    // Whatever host of the node is meant: a kubelet listens on all of its addresses, those towards pods too.
    if !kubelets.contains(&port) {
        return Ok(());
    }
    let what = "whether you may do this";
    let Some(answers) = reviews else {
        return Err(Reason::Undecided.error(format!("{what} can be asked of nobody")));
    };
    let account = account(ask.client);
    // To the cluster no name means every node: an address at no edge may be a kubelet's of any other.
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
        "the cluster does not let {client} {verb} nodes/{} of {node}",
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
        // Who says of himself that he is known, or is not, is not believed.
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
