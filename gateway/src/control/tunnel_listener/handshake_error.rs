//! Errors of connections to the tunnel port before their sessions.

use crate::control::api_cache::AccessDenied;
use causeway_certs::PeerRejected;
use std::{io, time::Duration};

/// Error that ended a connection before its session.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("{}", tls_error_text(.0))]
    Tls(#[from] io::Error),
    #[error("no valid PROXY v2 header, although its address is in tunnel.proxy_protocol: {0}")]
    ProxyHeader(io::Error),
    #[error("no TLS handshake within {0:?}")]
    TooSlow(Duration),
    #[error("{0}")]
    Peer(#[from] PeerRejected),
    #[error("the gateway is stopping")]
    Stopping,
    #[error("too many edges are connecting at the same time")]
    Full,
    #[error("this gateway has no room for further egress connections")]
    EgressFull,
    #[error("too many edges are connecting: this connection waited for its handshake for {0:?}")]
    Overloaded(Duration),
    #[error(
        "the connection was closed before its first request to make room for another connection"
    )]
    Evicted,
    #[error("{0}")]
    NotAdmitted(String),
    #[error(transparent)]
    ApiCacheDenied(#[from] AccessDenied),
}

/// Returns the error text of rustls if there is one, otherwise that of the system.
fn tls_error_text(error: &io::Error) -> String {
    match tls_error(error) {
        Some(error) => error.to_string(),
        None => error.to_string(),
    }
}

/// Returns the error of rustls, if there is one.
pub(super) fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

impl HandshakeError {
    /// Returns the metric label of the error, and whether the error needs the operator's attention.
    pub(super) fn classify(&self) -> (&'static str, bool) {
        let error = match self {
            Self::ProxyHeader(_) => return ("proxy", true),
            Self::TooSlow(_) => return ("timeout", false),
            Self::Peer(_) => return ("certificate", true),
            Self::Stopping => return ("draining", false),
            // Eviction is counted and logged separately.
            Self::Evicted => return ("evicted", false),
            Self::Overloaded(_) => return ("overloaded", false),
            Self::Full | Self::EgressFull | Self::ApiCacheDenied(AccessDenied::Full) => {
                return ("full", true);
            }
            Self::NotAdmitted(_) | Self::ApiCacheDenied(AccessDenied::NotAdmitted(_)) => {
                return ("not_admitted", true);
            }
            Self::Tls(error) => tls_error(error),
        };
        match error {
            None => ("peer_gone", false),
            Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => {
                ("certificate", true)
            }
            Some(rustls::Error::NoApplicationProtocol) => ("alpn", true),
            Some(rustls::Error::AlertReceived(_)) => ("peer_alert", true),
            Some(_) => ("protocol", false),
        }
    }
}
