//! Who somebody is and what they may at a kubelet, as the cluster's API says (`TokenReview`, `SubjectAccessReview`).
//!
//! 1. What is asked of a kubelet is named as the kubelet itself names it (`kubelet`).
//! 2. The question goes to somebody who implements [`ReviewClient`], once for all who wait, and the answer is kept (`answers`).
//!
//! One of the two waits that the way of a request permits. Without an answer nobody is let in. This comes behind the
//! policy and never in its place: each of the two must allow.

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

/// Who can be asked.
pub trait ReviewClient: Debug + Send + Sync + 'static {
    /// Whose token this is, if it counts and is for one of these audiences; for whoever is asked, where there are none.
    fn token(
        &self,
        token: &str,
        audiences: &[String],
    ) -> BoxFuture<'static, Result<Option<UserInfo>, ReviewError>>;

    /// Whether they may.
    fn access(&self, access: &ReviewAttributes) -> BoxFuture<'static, Result<bool, ReviewError>>;
}

/// Somebody, as Kubernetes knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserInfo {
    /// The name.
    pub user: String,
    /// What tells two of one name apart.
    pub uid: String,
    /// The groups.
    pub groups: Vec<String>,
    /// What else is said of them, such as the pod that a token is bound to.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What somebody wants to do at a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewAttributes {
    /// Who.
    pub account: Arc<UserInfo>,
    /// What, such as `get`.
    pub verb: &'static str,
    /// Of `nodes` this one.
    pub node: String,
    /// With what of it, such as `metrics`.
    pub subresource: &'static str,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewError {
    /// For the caller.
    pub says: Cow<'static, str>,
    /// For the log.
    pub cause: Arc<str>,
}

impl ReviewError {
    /// The error of a stream for which `what` was to be known.
    pub(super) fn of(self, what: &str) -> Error {
        let detail = format!("{what} was not decided: {}", self.says);
        Reason::Undecided.with_source(detail, &*self.cause)
    }
}

/// Asks for what is at a kubelet's port of this front, whether they may.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::Undecided`] if there is no answer.
pub(super) async fn check(proxy: &Proxy, ask: &AuthzRequest<'_>) -> Result<(), Error> {
    let port = ask.destination.port();
    // Whatever host of the node is meant: a kubelet listens on all of its addresses, those towards pods too.
    if !proxy.front.kubelets.contains(&port) {
        return Ok(());
    }
    let what = "whether you may do this";
    let Some(answers) = &proxy.shared.reviews else {
        return Err(Reason::Undecided.error(format!("{what} can be asked of nobody")));
    };
    let account = account(ask.caller);
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
    let caller = ask.caller;
    Err(Reason::Forbidden.error(format!(
        "the cluster does not let {caller} {verb} nodes/{} of {node}",
        subresources.join(" or nodes/")
    )))
}

/// A caller as kubelet would know it.
fn account(caller: &authn::ClientIdentity) -> Arc<UserInfo> {
    if let Some(account) = &caller.account {
        return account.clone();
    }
    let (user, groups) = if caller.method == authn::AuthMethod::Anonymous {
        (ANONYMOUS, vec![UNAUTHENTICATED.to_owned()])
    } else {
        // Who says of himself that he is known, or is not, is not believed.
        let said = caller.groups.iter();
        let said = said.filter(|group| ![AUTHENTICATED, UNAUTHENTICATED].contains(&group.as_str()));
        let known = [AUTHENTICATED.to_owned()];
        (&*caller.name, said.cloned().chain(known).collect())
    };
    Arc::new(UserInfo {
        user: user.to_owned(),
        groups,
        ..UserInfo::default()
    })
}
