//! Whether this caller may do this on this node: decided at every stream, before the edge hears of it.
//!
//! The decision is somebody's who implements [`Authorize`]; the default lets every identified caller pass.
//! It answers at once wherever it can. Where somebody else must be asked, it hands back a question, which is
//! awaited here within a bound: one of the two waits that the way of a request permits.

use crate::{
    error::{Error, Reason},
    proxy::{caller::Caller, route::Route},
};
use futures_util::future::BoxFuture;
use http::Method;
use std::{borrow::Cow, fmt::Debug, time::Duration};

/// What a stream does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A plain request.
    Request,
    /// A request that switches protocols.
    Upgrade,
    /// A TCP session.
    Connect,
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Who.
    pub caller: &'a Caller,
    /// Where.
    pub route: &'a Route,
    /// What kind of stream.
    pub act: Act,
    /// The method (CONNECT for a TCP session).
    pub method: &'a Method,
    /// The path as it will be sent, without the query.
    pub path: &'a str,
}

/// The decision.
pub enum Verdict {
    /// Allowed.
    Allow,
    /// Not allowed; the sentence is for the caller.
    Deny(Cow<'static, str>),
    /// Somebody else has to be asked.
    Ask(BoxFuture<'static, Result<(), Cow<'static, str>>>),
}

/// Who may do what.
pub trait Authorize: Debug + Send + Sync + 'static {
    /// Decides, without waiting.
    fn authorize(&self, ask: &Ask<'_>) -> Verdict;
}

/// Whoever a front lets in may reach every node; what is served there is the edge's own decision.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnyCaller;

impl Authorize for AnyCaller {
    fn authorize(&self, _: &Ask<'_>) -> Verdict {
        Verdict::Allow
    }
}

/// Asks, and waits for no longer than `bound`.
///
/// # Errors
/// [`Reason::Forbidden`], or [`Reason::TargetTimeout`] if no decision came in time.
pub async fn check(
    authorizer: &dyn Authorize,
    ask: &Ask<'_>,
    bound: Duration,
) -> Result<(), Error> {
    let denied = match authorizer.authorize(ask) {
        Verdict::Allow => return Ok(()),
        Verdict::Deny(detail) => detail,
        Verdict::Ask(question) => match tokio::time::timeout(bound, question).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(detail)) => detail,
            Err(_) => {
                let detail = format!("whether you may do this was not decided within {bound:?}");
                return Err(Reason::TargetTimeout.says(detail));
            }
        },
    };
    Err(Reason::Forbidden.says(denied))
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::NodeName;
    use causeway_tunnel::Target;

    #[derive(Debug)]
    struct Slow;

    impl Authorize for Slow {
        fn authorize(&self, _: &Ask<'_>) -> Verdict {
            Verdict::Ask(Box::pin(std::future::pending()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_decision_that_does_not_come_is_a_refusal_in_time() {
        let node = NodeName::parse("edge-1").unwrap();
        let route = Route {
            target: Target::new("edge-1", 80),
            node,
        };
        let caller = Caller::for_test("alice");
        let ask = Ask {
            caller: &caller,
            route: &route,
            act: Act::Request,
            method: &Method::GET,
            path: "/",
        };
        let bound = Duration::from_secs(3);
        let error = check(&Slow, &ask, bound).await.unwrap_err();
        assert_eq!(error.reason, Reason::TargetTimeout);
        assert!(check(&AnyCaller, &ask, bound).await.is_ok());
    }
}
