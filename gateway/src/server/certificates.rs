//! Collects the certificates that a running gateway presents or trusts.

use super::reload::Reloadable;
use crate::{control::certificate_expiry::CertificateInUse, proxy::upstream::CertificateUse};
use causeway_certs::{Ca, Certificate, Fingerprint, RootStage};

/// Returns all certificates in use, of the tunnel port, the listeners, the upstreams and the CA; or `None` while a reload reads
/// files.
pub(super) fn certificates_in_use(parts: &Reloadable) -> Option<Vec<CertificateInUse>> {
    let mut all = ca_certificates(&parts.authority.ca.get());
    all.extend(parts.identity.certificates());
    all.extend(parts.fronts.certificates()?);
    let apps = parts.shared.apps.certificates().into_iter();
    all.extend(apps.filter_map(|(port, shown, certificate)| {
        let used_for = match shown {
            CertificateUse::Client => format!("app:{port}"),
            CertificateUse::Ca => format!("app_ca:{port}"),
        };
        CertificateInUse::read(used_for, &certificate, None)
    }));
    Some(all)
}

/// Returns the roots of the own CA, and the certificates that an operator's CA has issued for them.
fn ca_certificates(ca: &Ca) -> Vec<CertificateInUse> {
    if !ca.is_believed() {
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
    let above = ca.above().into_iter().map(|above| CertificateInUse {
        used_for: "operator_ca".to_owned(),
        subject: above.by,
        not_before: issued_at(ca, above.root),
        not_after: above.not_after.as_secs(),
        file: None,
        own: false,
    });
    roots.chain(above).collect()
}

/// Returns the start of a root's validity, in Unix time.
fn issued_at(ca: &Ca, root: Fingerprint) -> u64 {
    let roots = ca.roots();
    let found = roots.iter().find(|(_, each)| Fingerprint::of(each) == root);
    let facts = found.and_then(|(_, root)| Certificate::read(root).ok());
    facts.unwrap_or_default().not_before
}
