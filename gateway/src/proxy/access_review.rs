//! Authentication of tokens and authorization at kubelets by the cluster's API (`TokenReview`, `SubjectAccessReview`).
//!
//! 1. A request to a kubelet gets the attributes that the kubelet itself gives it (`kubelet_attributes`).
//! 2. A [`ReviewClient`] asks the API once for all requests that wait, and the answer is cached (`cache`).
//!
//! This is one of the two waits that the request path permits. Without an answer no client is admitted. The review follows the
//! policy and never replaces it: each of the two must allow.

mod cache;
mod kubelet_attributes;

pub use cache::ReviewCache;

use super::{Proxy, authn, authz::AuthzRequest};
use crate::{
    error::{Error, Reason},
    state::policy::{ANONYMOUS, AUTHENTICATED, UNAUTHENTICATED},
};
use causeway_certs::NodeName;
use futures_util::future::BoxFuture;
use std::{borrow::Cow, collections::BTreeMap, fmt::Debug, sync::Arc};

/// Client of the cluster's review API.
pub trait ReviewClient: Debug + Send + Sync + 'static {
    /// Returns the user of this token, if the token is valid for one of these audiences. Without audiences the token must be for
    /// the API server itself.
    fn token(
        &self,
        token: &str,
        audiences: &[String],
    ) -> BoxFuture<'static, Result<Option<UserInfo>, ReviewError>>;

    /// Returns whether the access is allowed.
    fn access(&self, access: &ReviewAttributes) -> BoxFuture<'static, Result<bool, ReviewError>>;
}

/// User, as Kubernetes describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserInfo {
    /// The name.
    pub user: String,
    /// Unique identifier, which distinguishes users of the same name.
    pub uid: String,
    /// The groups.
    pub groups: Vec<String>,
    /// Additional attributes of the user, such as the pod that a token is bound to.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Access to a node that is to be reviewed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewAttributes {
    /// The user.
    pub account: Arc<UserInfo>,
    /// The verb, such as `get`.
    pub verb: &'static str,
    /// The name of the `nodes` object.
    pub node: String,
    /// The subresource, such as `metrics`.
    pub subresource: &'static str,
}

/// Reason why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewError {
    /// Description for the client.
    pub says: Cow<'static, str>,
    /// For the log.
    pub cause: Arc<str>,
}

impl ReviewError {
    /// Returns the error of a stream that needed a decision about `what`.
    pub(super) fn of(self, what: &str) -> Error {
        let detail = format!("{what} was not decided: {}", self.says);
        Reason::Undecided.with_source(detail, &*self.cause)
    }
}

/// Checks whether the client may access a kubelet's port of this listener.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::Undecided`] if there is no answer.
pub(super) async fn check(proxy: &Proxy, ask: &AuthzRequest<'_>) -> Result<(), Error> {
    let port = ask.destination.port();
    // Whatever host of the node is meant: a kubelet listens on all of its addresses, those towards pods too.
    if !proxy.listener.kubelets.contains(&port) {
        return Ok(());
    }
    let what = "whether you may do this";
    let Some(answers) = &proxy.shared.reviews else {
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
fn account(client: &authn::ClientIdentity) -> Arc<UserInfo> {
    if let Some(account) = &client.account {
        return account.clone();
    }
    let (user, groups) = if client.method == authn::AuthMethod::Anonymous {
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
