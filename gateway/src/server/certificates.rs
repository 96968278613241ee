//! Collects the certificates that a running gateway presents or trusts.

use super::reload::Reloadable;
use crate::{control::certificate_expiry::CertificateInUse, proxy::upstream::CertificateUse};
use causeway_certs::{Ca, RootStage};

/// Returns all certificates in use: of the tunnel port, the listeners, the upstreams and the CA. Returns `None` while a reload
/// reads files.
pub(super) fn certificates_in_use(parts: &Reloadable) -> Option<Vec<CertificateInUse>> {
    let mut all = ca_certificates(&parts.authority.ca.get());
    all.extend(parts.identity.certificates());
    all.extend(parts.listeners.certificates()?);
    let apps = parts.shared.upstream_tls_ports.certificates().into_iter();
    all.extend(apps.filter_map(|(port, certificate_use, certificate)| {
        let used_for = match certificate_use {
            CertificateUse::Client => format!("app:{port}"),
            CertificateUse::Ca => format!("app_ca:{port}"),
        };
        CertificateInUse::read(used_for, &certificate, None)
    }));
    Some(all)
}

/// Returns the roots of the own CA, and the first certificate to expire in an imported chain of listeners.
fn ca_certificates(ca: &Ca) -> Vec<CertificateInUse> {
    if !ca.is_trusted() {
        return Vec::new();
    }
    let roots = ca.roots().into_iter().filter_map(|(stage, root)| {
        let used_for = match stage {
            RootStage::Active => "ca",
            RootStage::Prepared => "ca_prepared",
            RootStage::Retiring => "ca_retiring",
        };
        CertificateInUse::read(used_for, root, None)
    });
    let listener_ca = ca.listener_ca().and_then(|info| {
        let first = info.first_to_expire;
        let read = CertificateInUse::read("listener_ca", &first.certificate, None)?;
        let subject = first.subject;
        Some(CertificateInUse { subject, ..read })
    });
    roots.chain(listener_ca).collect()
}
