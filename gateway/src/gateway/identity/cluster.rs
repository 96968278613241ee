//! The CA of a cluster's own signers, as its files say: by what these make for nodes, edges join (`control/enrol.rs`).

use super::{file, text};
use crate::{
    config::Certificates, control::certificate_expiry::CertificateInUse, gateway::BindError,
};
use causeway_certs::{ClusterSubject, ClusterTrust, given};
use std::sync::{Mutex, PoisonError};
use std::{path::PathBuf, sync::Arc};

/// Whom the cluster's signers have named. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Cluster {
    subject: ClusterSubject,
    files: Vec<PathBuf>,
    trust: Arc<Mutex<ClusterTrust>>,
}

impl Cluster {
    /// Reads the files, where the cluster's own signer is named.
    pub(super) fn read(rules: Option<&Certificates>) -> Result<Option<Self>, BindError> {
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

    /// Who is believed now.
    pub(super) fn trust(&self) -> ClusterTrust {
        let trust = self.trust.lock().unwrap_or_else(PoisonError::into_inner);
        trust.clone()
    }

    /// The CA certificates of these signers.
    pub(super) fn certificates(&self) -> Vec<CertificateInUse> {
        let trust = self.trust();
        let read = |root| CertificateInUse::read("cluster_client_ca", root, None);
        trust.roots().iter().filter_map(read).collect()
    }

    /// What the files say, if that is another.
    pub(super) fn again(&self) -> Result<Option<ClusterTrust>, BindError> {
        let next = trust(&self.files, self.subject)?;
        Ok((next != self.trust()).then_some(next))
    }

    /// Believes these from now on.
    pub(super) fn turn(&self, next: ClusterTrust) {
        *self.trust.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }
}

fn trust(files: &[PathBuf], subject: ClusterSubject) -> Result<ClusterTrust, BindError> {
    const WHAT: &str = "kubernetes.certificates.client_ca";
    let mut roots = Vec::new();
    for path in files {
        let found = given::roots(&text(WHAT, path)?);
        roots.extend(found.map_err(|error| file(WHAT, path, error.to_string()))?);
    }
    ClusterTrust::new(roots, subject).map_err(|cause| BindError::Trust {
        what: WHAT.to_owned(),
        cause,
    })
}
