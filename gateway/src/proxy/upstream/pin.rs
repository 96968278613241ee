//! Pinning of an upstream's key: the key is recorded at the first connection, and no other key is trusted afterwards.
//!
//! 1. The handshake refuses a key that is not the pinned one (`PinVerifier`), before the gateway presents anything to the
//!    upstream.
//! 2. A complete handshake has proven that the upstream holds its key. If no key is pinned yet, this key is pinned.
//! 3. No request is sent before the pin on the disk equals this key (`ensure_pinned`).
//!
//! Names, dates and issuer of the certificate are ignored, because kubelets sign their own certificates for a year.

use super::error::{self, KeyMismatch};
use crate::{
    error::{Error, Reason},
    proxy::route::Route,
    state::Pins,
};
use causeway_certs::{Fingerprint, NodeName, verify::NoServerVerification};
use causeway_tunnel::stream_io::StreamIo;
use rustls::{
    CertificateError, DigitallySignedStruct, OtherError, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::sync::Arc;
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;

/// Waits until the key that the upstream proved in the handshake is pinned. Returns that key, if the upstream is verified by its
/// key.
///
/// # Errors
/// If another key is pinned, or this key is not recorded before `deadline`.
pub(super) async fn ensure_pinned(
    route: &Route,
    pins: Option<&Pins>,
    (tls, deadline): (&TlsStream<StreamIo>, Instant),
) -> Result<Option<Fingerprint>, Error> {
    let Some(pins) = pins else {
        return Ok(None);
    };
    let chain = tls.get_ref().1.peer_certificates();
    let presented = chain.and_then(|chain| Fingerprint::of_key(chain.first()?));
    let met = presented
        .ok_or_else(|| error::broken_upstream(route, "shows a certificate without a valid key"))?;
    let place = (&route.node, route.target.port);
    let pinned = if let Some(known) = pins.get(place.0, place.1) {
        known
    } else {
        let wait_limit = deadline.saturating_duration_since(Instant::now());
        let result = pins.pin_first_use(place, met, wait_limit).await;
        result.map_err(|why| {
            let what = "connects for the first time, but its key cannot be recorded";
            Reason::DependencyUnavailable.with_source(error::describe_upstream(route, what), why)
        })?
    };
    if pinned.key == met {
        return Ok(Some(met));
    }
    Err(KeyMismatch { known: pinned, met }.into_error(route))
}

/// Whether an upstream that was verified by this key is still trusted.
pub(super) fn holds(pins: Option<&Pins>, route: &Route, key: Option<Fingerprint>) -> bool {
    pins.is_none_or(|pins| {
        let pinned = pins.get(&route.node, route.target.port);
        pinned.map(|pin| pin.key) == key
    })
}

/// Verifier that accepts the pinned key of this port, or any key if none is pinned.
#[derive(Debug)]
pub(super) struct PinVerifier {
    pub(super) pins: Pins,
    pub(super) port: u16,
}

impl ServerCertVerifier for PinVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let presented = Fingerprint::of_key(leaf).ok_or(CertificateError::BadEncoding)?;
        let node = NodeName::parse(&name.to_str());
        let node = node.map_err(|_| CertificateError::NotValidForName)?;
        match self.pins.get(&node, self.port) {
            Some(pinned) if pinned.key != presented => {
                let mismatch = OtherError(Arc::new(KeyMismatch {
                    known: pinned,
                    met: presented,
                }));
                Err(CertificateError::Other(mismatch).into())
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        NoServerVerification.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        NoServerVerification.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        NoServerVerification.supported_verify_schemes()
    }
}
