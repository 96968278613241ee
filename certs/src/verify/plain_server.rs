//! TLS of a listener that presents a certificate and requests none from clients.

use std::fmt;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::WebPkiClientVerifier;
use rustls::{ServerConfig, version};
use rustls_pki_types::{CertificateDer, ServerName};
use webpki::EndEntityCert;

use super::roots::TrustError;
use super::server::ALPN_CONTROL;
use super::server::build_server_config;
use crate::leaf::LeafCertificate;

/// TLS configuration of a listener without client authentication.
#[derive(Clone)]
pub struct ServerOnlyTls {
    certificate: CertificateDer<'static>,
    server_config: Arc<ServerConfig>,
}

impl fmt::Debug for ServerOnlyTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerOnlyTls").finish_non_exhaustive()
    }
}

impl ServerOnlyTls {
    /// Returns a configuration that presents this certificate.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub fn new(leaf: &LeafCertificate) -> Result<Self, TrustError> {
        let certificate = leaf.certified_key().end_entity_cert()?.clone().into_owned();
        let versions = [&version::TLS13, &version::TLS12];
        let no_client_auth = WebPkiClientVerifier::no_client_auth();
        let tickets = Some(Ticketer::new()?);
        let server = build_server_config(
            &versions,
            no_client_auth,
            leaf.resolver(),
            &ALPN_CONTROL,
            tickets,
        )?;
        Ok(Self {
            certificate,
            server_config: server,
        })
    }

    /// Returns the configuration of the accepting end: TLS 1.2 and 1.3, `h2` or `http/1.1`.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server_config.clone()
    }

    /// Whether a client that connects to this name or IP address accepts the certificate for it (RFC 9525).
    pub fn matches_host(&self, host: &str) -> bool {
        let Ok(name) = ServerName::try_from(host) else {
            return false;
        };
        EndEntityCert::try_from(&self.certificate)
            .is_ok_and(|shown| shown.verify_is_valid_for_subject_name(&name).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};

    #[test]
    fn a_certificate_is_valid_only_for_its_names_and_addresses() {
        let names = ["kubernetes.default.svc", "*.example.com", "127.0.0.1"];
        let params = CertificateParams::new(names.map(str::to_owned)).unwrap();
        let key = KeyPair::generate().unwrap();
        let made = params.self_signed(&key).unwrap();
        let leaf = LeafCertificate::load(&made.pem(), &key.serialize_pem()).unwrap();
        let shown = ServerOnlyTls::new(&leaf).unwrap();
        for host in ["Kubernetes.default.svc", "a.example.com", "127.0.0.1"] {
            assert!(shown.matches_host(host), "{host}");
        }
        for host in [
            "kubernetes.default",
            "example.com",
            "a.b.example.com",
            "127.0.0.2",
            "::1",
            "",
            "a b",
        ] {
            assert!(!shown.matches_host(host), "{host}");
        }
    }
}
