//! Checks of the reviews that a cluster's API makes of clients.
//!
//! A key without effect, or one that makes all clients wait for an answer that cannot come, is a fault.

use causeway_config::ConfigErrors;

use crate::config::{Config, ListenAddr, Listener, ListenerProtocol};

impl Config {
    pub(super) fn reviews(&self, faults: &mut ConfigErrors) {
        if let Some(kubernetes) = &self.kubernetes {
            faults.not_zero(
                "kubernetes",
                &[
                    ("review_allowed_for", kubernetes.review_allowed_for),
                    ("review_refused_for", kubernetes.review_refused_for),
                    ("token_allowed_for", kubernetes.token_allowed_for),
                    ("token_refused_for", kubernetes.token_refused_for),
                ],
            );
        }
        for (index, listener) in self.listeners.iter().enumerate() {
            self.reviews_of(listener, &format!("listeners[{index}]"), faults);
        }
    }

    fn reviews_of(&self, listener: &Listener, path: &str, faults: &mut ConfigErrors) {
        let (token, access) = (
            format!("{path}.client_auth.token_review"),
            format!("{path}.subject_access_review"),
        );
        let tokens = listener.client_auth.token_review.as_ref();
        for (key, given) in [
            (&token, tokens.is_some()),
            (&access, !listener.subject_access_review.is_empty()),
        ] {
            if given && self.kubernetes.is_none() {
                let message = "needs the API of a cluster; add the section \"kubernetes\"";
                faults.add(key.as_str(), message);
            }
        }
        if tokens.is_some() && listener.protocol == ListenerProtocol::Tcp {
            let message = "a plain TCP connection cannot carry a token; use client_auth.client_ca";
            faults.add(token.as_str(), message);
        }
        if tokens.is_some() && matches!(listener.listen, ListenAddr::Unix(_)) {
            let message = "clients of a Unix socket are identified by the kernel and send no token; remove this key";
            faults.add(token.as_str(), message);
        }
        let audiences = tokens.map_or(&[][..], |review| &review.audiences);
        if let Some(empty) = audiences.iter().position(String::is_empty) {
            let message = "is empty; write an audience, or remove the key to use the audience of the API server";
            faults.add(format!("{token}.audiences[{empty}]"), message);
        }
        if let Some(zero) = listener
            .subject_access_review
            .iter()
            .position(|port| *port == 0)
        {
            let message = "0 is not a valid node port; use a port from 1 to 65535";
            faults.add(format!("{access}[{zero}]"), message);
        }
    }
}
