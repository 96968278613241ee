//! HTTP versions that a TLS connection to an upstream offers.

use causeway_tunnel::wire;
use rustls::ClientConfig;
use std::sync::Arc;

/// HTTP versions that a new connection may negotiate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpn {
    /// HTTP/2 or HTTP/1.1, as the upstream chooses.
    Any,
    /// HTTP/1.1 only, for upgrades.
    Http1,
}

/// A TLS configuration for each [`Alpn`].
#[derive(Clone, Debug)]
pub struct AlpnConfigs {
    any: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
}

impl AlpnConfigs {
    /// Creates the configurations from one without ALPN.
    pub fn new(mut config: ClientConfig) -> Self {
        config.alpn_protocols = vec![wire::ALPN_HTTP11.to_vec()];
        let http1 = Arc::new(config.clone());
        config.alpn_protocols.insert(0, wire::ALPN_H2.to_vec());
        Self {
            any: Arc::new(config),
            http1,
        }
    }

    /// Returns the configuration that offers these versions.
    pub fn config_for(&self, alpn: Alpn) -> Arc<ClientConfig> {
        match alpn {
            Alpn::Any => self.any.clone(),
            Alpn::Http1 => self.http1.clone(),
        }
    }
}
