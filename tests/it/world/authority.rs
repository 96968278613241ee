//! A CA of a third party, such as a cluster's, and its certificates: those of apps and of their clients.

use causeway_certs::LeafCertificate;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use std::sync::Arc;

/// A CA.
pub(crate) struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "an authority of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// Its own certificate.
    pub(crate) fn pem(&self) -> &str {
        &self.pem
    }

    /// An app's certificate for these names and addresses.
    pub(crate) fn app(&self, names: &[&str]) -> LeafCertificate {
        self.sign(names, ExtendedKeyUsagePurpose::ServerAuth, false)
    }

    /// The same, years after the end of its validity.
    pub(crate) fn expired_app(&self, names: &[&str]) -> LeafCertificate {
        self.sign(names, ExtendedKeyUsagePurpose::ServerAuth, true)
    }

    /// A certificate by which apps authenticate their client.
    pub(crate) fn client(&self, name: &str) -> LeafCertificate {
        self.sign(&[name], ExtendedKeyUsagePurpose::ClientAuth, false)
    }

    fn sign(
        &self,
        names: &[&str],
        usage: ExtendedKeyUsagePurpose,
        expired: bool,
    ) -> LeafCertificate {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![usage];
        if expired {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        LeafCertificate::load(&certificate.pem(), &key.serialize_pem()).unwrap()
    }

    /// TLS of an app that shows `leaf`. With `demands` it admits only clients with a certificate of this CA.
    pub(crate) fn serve(&self, leaf: &LeafCertificate, demands: bool) -> Arc<ServerConfig> {
        let builder = ServerConfig::builder();
        let builder = if demands {
            let mut roots = RootCertStore::empty();
            let root = CertificateDer::from_pem_slice(self.pem.as_bytes());
            roots.add(root.unwrap()).unwrap();
            let known = WebPkiClientVerifier::builder(Arc::new(roots)).build();
            builder.with_client_cert_verifier(known.unwrap())
        } else {
            builder.with_no_client_auth()
        };
        let key = PrivateKeyDer::from_pem_slice(leaf.key_pem().expose().as_bytes()).unwrap();
        let config = builder.with_single_cert(leaf.chain().to_vec(), key);
        Arc::new(config.unwrap())
    }
}
