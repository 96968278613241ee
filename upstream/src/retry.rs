//! Second attempt for a request that a pooled connection did not accept or did not answer.
//!
//! A request that the connection did not accept is sent again. So is a request that can be repeated (RFC 9110 §9.2.2) and has
//! no body, if the upstream closed the pooled connection without a byte of a response. After a reset or an invalid response a
//! request is not sent again, since that may be an effect of the request on the upstream.

use http::{Method, Request};
use hyper::client::conn::TrySendError;

/// The right to send a request once more.
pub struct Retry<B> {
    was_reused: bool,
    copy: Option<Request<B>>,
}

impl<B: Default> Retry<B> {
    /// Records a request that is about to be sent. `was_reused` is true if other requests have used its connection before.
    pub fn new<A>(request: &Request<A>, was_reused: bool, has_body: bool) -> Self {
        let is_repeatable = was_reused && !has_body && is_idempotent(request);
        Self {
            was_reused,
            copy: is_repeatable.then(|| clone_request(request)),
        }
    }

    /// Returns the request to send on a new connection, if it may be sent again. It may lack the extensions of the first
    /// request, which most requests would copy in vain. `closed_unanswered` states whether the upstream closed the
    /// connection without a response.
    pub fn request(
        self,
        error: &mut TrySendError<Request<B>>,
        closed_unanswered: impl FnOnce(&hyper::Error) -> bool,
    ) -> Option<Request<B>> {
        let unsent = error.take_message().filter(|_| self.was_reused);
        unsent.or_else(|| self.copy.filter(|_| closed_unanswered(error.error())))
    }
}

/// Whether a request without a body can be repeated.
pub fn is_idempotent<B>(request: &Request<B>) -> bool {
    matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    )
}

fn clone_request<A, B: Default>(request: &Request<A>) -> Request<B> {
    let mut copy = Request::new(B::default());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    copy.headers_mut().clone_from(request.headers());
    copy
}
