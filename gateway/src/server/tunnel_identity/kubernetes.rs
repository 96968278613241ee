//! CA of the cluster's signers, read from its files. Edges join by client certificates of these signers (`control/enrol.rs`).

use super::{file, text};
use crate::{
    config::CsrSigning, control::certificate_expiry::CertificateInUse, server::error::BindError,
};
use causeway_certs::{ClusterCa, SignerProfile, external};
use std::sync::{Mutex, PoisonError};
use std::{path::PathBuf, sync::Arc};

/// Trust in the certificates of the cluster's signers. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct KubernetesIdentity {
    subject: SignerProfile,
    files: Vec<PathBuf>,
    trust: Arc<Mutex<ClusterCa>>,
}

impl KubernetesIdentity {
    /// Reads the files, if the configuration names one of the cluster's own signers.
    pub(super) fn read(rules: Option<&CsrSigning>) -> Result<Option<Self>, BindError> {
        let Some((rules, subject)) = rules.and_then(|rules| Some((rules, rules.subject()?))) else {
            return Ok(None);
        };
        let trust = trust(&rules.client_ca, subject)?;
        Ok(Some(Self {
            subject,
            files: rules.client_ca.clone(),
            trust: Arc::new(Mutex::new(trust)),
        }))
    }

    /// Returns the CA that is currently trusted.
    pub(super) fn trust(&self) -> ClusterCa {
        let trust = self.trust.lock().unwrap_or_else(PoisonError::into_inner);
        trust.clone()
    }

    /// Returns the certificates of this CA.
    pub(super) fn certificates(&self) -> Vec<CertificateInUse> {
        let trust = self.trust();
        let read = |root| CertificateInUse::read("cluster_client_ca", root, None);
        trust.roots().iter().filter_map(read).collect()
    }

    /// Reads the files again, and returns the CA if it has changed.
    pub(super) fn reload_if_changed(&self) -> Result<Option<ClusterCa>, BindError> {
        let next = trust(&self.files, self.subject)?;
        Ok((next != self.trust()).then_some(next))
    }

    /// Replaces the trusted CA.
    pub(super) fn replace_trust(&self, next: ClusterCa) {
        *self.trust.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }
}

fn trust(files: &[PathBuf], subject: SignerProfile) -> Result<ClusterCa, BindError> {
    const WHAT: &str = "kubernetes.certificates.client_ca";
    let mut roots = Vec::new();
    for path in files {
        let found = external::parse_roots(&text(WHAT, path)?);
        roots.extend(found.map_err(|error| file(WHAT, path, error.to_string()))?);
    }
    ClusterCa::new(roots, subject).map_err(|cause| BindError::Trust {
        what: WHAT.to_owned(),
        cause,
    })
}
