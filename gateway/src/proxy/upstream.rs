//! Step 6e: an upstream with which the gateway itself speaks TLS, through a CONNECT stream of the node's tunnel.
//!
//! If the port is one of `upstream_tls`, the edge passes bytes and sees neither the request nor the gateway's credential. First,
//! `forward` or `upgrade` sends the request on an idle connection of the `pool` or on a new one. `connect` opens a new connection
//! with CONNECT and TLS (`tls`, which may verify a pinned key by `pin`), and `http1` or `http2` runs on it. Then `response_body`
//! returns the response. The bytes of a client's own CONNECT stay unchanged from end to end. An HTTP/1.1 connection is used again
//! only if its last response was complete; otherwise it is reset.

mod connect;
mod error;
pub(super) mod forward;
mod http1;
mod http2;
mod pin;
mod pool;
mod request_body;
mod response_body;
mod tls;
pub(super) mod upgrade;

pub(crate) use pool::ConnectionPool;
pub(crate) use response_body::UpstreamResponseBody;
pub(crate) use tls::{ServerTrust, UpstreamTls, UpstreamTlsSource};

use super::route::Route;
use crate::state::Pins;
use arc_swap::ArcSwap;
use causeway_certs::LeafCertificate;
use rustls_pki_types::CertificateDer;
use std::{collections::BTreeMap, sync::Arc};

/// Upstreams by node port, and the connection pool to them.
#[derive(Debug)]
pub struct UpstreamTlsPorts {
    by_port: ArcSwap<ByPort>,
    pool: Arc<ConnectionPool>,
    pins: Pins,
}

/// Use of a certificate in an upstream's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CertificateUse {
    /// The gateway presents the certificate to the upstream.
    Client,
    /// The certificate signs the certificates of upstreams.
    Ca,
}

/// Upstreams of a configuration, by node port.
pub(crate) type ByPort = BTreeMap<u16, Arc<UpstreamTls>>;

impl UpstreamTlsPorts {
    pub(crate) fn new(by_port: ByPort, pool: ConnectionPool, pins: Pins) -> Self {
        Self {
            by_port: ArcSwap::from_pointee(by_port),
            pool: Arc::new(pool),
            pins,
        }
    }

    /// Returns the pinned keys of upstreams.
    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    pub(super) fn pool(&self) -> &Arc<ConnectionPool> {
        &self.pool
    }

    /// Returns the upstream of a route, if one is configured: the route must lead to a port of the node itself, not of a pod.
    pub(super) fn find_upstream(&self, route: &Route) -> Option<Arc<UpstreamTls>> {
        let by_port = self.by_port.load();
        if by_port.is_empty() || *route.target.host != *route.node.as_str() {
            return None;
        }
        by_port.get(&route.target.port).cloned()
    }

    /// Returns the current upstream of a port, if it has this source.
    pub(crate) fn reuse_if_same_source(
        &self,
        port: u16,
        source: &UpstreamTlsSource,
    ) -> Option<Arc<UpstreamTls>> {
        let by_port = self.by_port.load();
        let upstream_tls = by_port.get(&port)?;
        (upstream_tls.source() == source).then(|| upstream_tls.clone())
    }

    /// Returns the client certificate that the gateway presents to the upstream of this port.
    pub(crate) fn client_certificate(&self, port: u16) -> Option<LeafCertificate> {
        self.by_port
            .load()
            .get(&port)?
            .source()
            .client_certificate
            .clone()
    }

    /// Returns the client certificates and the CA certificates of all upstreams, by port.
    pub(crate) fn certificates(&self) -> Vec<(u16, CertificateUse, CertificateDer<'static>)> {
        let certificates_of_port = |(port, app): (&u16, &Arc<UpstreamTls>)| {
            let material = app.source();
            let leaf = material
                .client_certificate
                .as_ref()
                .and_then(|leaf| leaf.chain().first());
            let leaf = leaf.map(|leaf| (*port, CertificateUse::Client, leaf.clone()));
            let roots = match &material.trust {
                ServerTrust::Signed(roots) => roots.as_slice(),
                ServerTrust::Pinned | ServerTrust::Any => &[],
            };
            let roots = roots
                .iter()
                .map(|root| (*port, CertificateUse::Ca, root.clone()));
            leaf.into_iter().chain(roots).collect::<Vec<_>>()
        };
        self.by_port
            .load()
            .iter()
            .flat_map(certificates_of_port)
            .collect()
    }

    /// Replaces the upstreams. Connections to removed upstreams end when they become idle. Returns whether anything changed.
    pub(crate) fn replace(&self, by_port: ByPort) -> bool {
        let is_same = |(port, old): (&u16, &Arc<UpstreamTls>), new: &ByPort| {
            new.get(port).is_some_and(|app| Arc::ptr_eq(app, old))
        };
        let old = self.by_port.load_full();
        let unchanged =
            old.len() == by_port.len() && old.iter().all(|each| is_same(each, &by_port));
        if unchanged {
            return false;
        }
        self.by_port.store(Arc::new(by_port));
        let current = self.by_port.load();
        for (port, app) in old.iter() {
            if !is_same((port, app), &current) {
                app.retire();
            }
        }
        true
    }
}
