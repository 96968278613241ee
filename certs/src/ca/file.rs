//! File format of a CA in the data directory: one file, so that each change is one rename.

use causeway_tls::pem;
use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize, de::IgnoredAny};

use super::listener_ca::{FormerRoot, ListenerCa, ListenerChain};
use super::root::{Intermediate, Root};
use super::{Ca, CaError, RootStage};

/// Version of this format. The first version was a certificate and a key in two files. Optional fields (`crossed`, `issuers`,
/// `listeners`) may be missing. A program that is older than such a field refuses a file with it.
const VERSION: u32 = 2;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaFile {
    version: u32,
    /// Roots, the active one first.
    roots: Vec<RootFile>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listeners: Option<ListenersFile>,
}

/// The intermediate for listeners' certificates that another CA signs.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListenersFile {
    generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request_key: Option<String>,
    /// `certificate` is the chain up to the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chain: Option<KeyPairFile>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    former_roots: Vec<FormerRootFile>,
}

/// Root of a chain that was replaced.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FormerRootFile {
    certificate: String,
    /// Expiry of the replaced chain, in Unix seconds.
    until: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootFile {
    stage: RootStage,
    certificate: String,
    key: String,
    /// Cross certificate of this root, signed by the root before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    crossed: Option<String>,
    /// Cross certificate of this root, signed by an operator's CA, in a file of an earlier version. Ignored.
    #[expect(dead_code, reason = "the field is only permitted")]
    #[serde(default, skip_serializing)]
    above: Option<IgnoredAny>,
    /// Intermediates, one per purpose. Without them the root signs leaves itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    issuers: Option<IntermediatesFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IntermediatesFile {
    edges: KeyPairFile,
    listeners: KeyPairFile,
    replicas: KeyPairFile,
    clients: KeyPairFile,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyPairFile {
    certificate: String,
    key: String,
}

impl CaFile {
    pub(crate) fn from_ca(ca: &Ca) -> Self {
        let roots = ca
            .all_roots()
            .map(|(stage, root)| RootFile::from_root(stage, root));
        Self {
            version: VERSION,
            roots: roots.collect(),
            listeners: ListenersFile::from_listener_ca(&ca.listeners),
        }
    }

    pub(crate) fn into_ca(self) -> Result<Ca, CaError> {
        let bad = |why: &str| CaError::Unusable {
            part: "file",
            why: why.to_owned(),
        };
        if self.version != VERSION {
            let found = self.version;
            return Err(bad(&format!(
                "the file has version {found}, but this program reads version {VERSION}"
            )));
        }
        let mut roots = Vec::new();
        for file in self.roots {
            roots.push((file.stage, file.into_root()?));
        }
        let mut roots = roots.into_iter();
        let (Some((RootStage::Active, active)), other, None) =
            (roots.next(), roots.next(), roots.next())
        else {
            return Err(bad(
                "the file must contain an active root first, and at most one other root",
            ));
        };
        if let Some((stage, other)) = &other
            && (*stage == RootStage::Active || other.domain != active.domain)
        {
            return Err(bad(
                "the second root is also active, or has another trust domain",
            ));
        }
        let is_placeholder = false;
        let listeners = self.listeners.map(ListenersFile::into_listener_ca);
        let listeners = listeners.transpose()?.unwrap_or_default();
        Ok(Ca {
            active,
            other,
            is_placeholder,
            listeners,
        })
    }
}

fn parse_certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, CaError> {
    pem::parse_certificates(text).map_err(|why| CaError::Unusable {
        part: "certificate",
        why,
    })
}

impl RootFile {
    fn from_root(stage: RootStage, root: &Root) -> Self {
        let crossed = root.cross_certificate.as_ref();
        Self {
            stage,
            certificate: root.signer.certificate_pem(),
            key: root.signer.key_pem().expose().to_owned(),
            crossed: crossed.map(|crossed| pem::encode_chain(std::slice::from_ref(crossed))),
            above: None,
            issuers: root
                .issuers()
                .and_then(IntermediatesFile::from_intermediates),
        }
    }

    fn into_root(self) -> Result<Root, CaError> {
        let root = Root::load(&self.certificate, &self.key)?;
        let load_pair = |pair: KeyPairFile| Intermediate::load(&pair.certificate, &pair.key);
        let issuers = self.issuers.map(|issuers| {
            let pairs = [
                issuers.edges,
                issuers.listeners,
                issuers.replicas,
                issuers.clients,
            ];
            pairs
                .map(load_pair)
                .into_iter()
                .collect::<Result<Vec<_>, _>>()
        });
        let crossed = self
            .crossed
            .as_deref()
            .map(parse_certificates)
            .transpose()?;
        let crossed = crossed.map(|mut found| found.swap_remove(0));
        root.with_intermediates(issuers.transpose()?, crossed)
    }
}

impl ListenersFile {
    fn from_listener_ca(of: &ListenerCa) -> Option<Self> {
        let chain = of.chain.as_ref().map(|chain| KeyPairFile {
            certificate: pem::encode_chain(&chain.certificates),
            key: chain.signer.key_pem().expose().to_owned(),
        });
        (of.generation > 0).then(|| Self {
            generation: of.generation,
            request_key: of.request_key.as_ref().map(KeyPair::serialize_pem),
            chain,
            former_roots: of
                .former_roots
                .iter()
                .map(FormerRootFile::from_former_root)
                .collect(),
        })
    }

    fn into_listener_ca(self) -> Result<ListenerCa, CaError> {
        let former = self
            .former_roots
            .into_iter()
            .map(FormerRootFile::into_former_root);
        let key = self.request_key.map(|key| KeyPair::from_pem(&key));
        let chain = self
            .chain
            .map(|pair| ListenerChain::load(&pair.certificate, &pair.key));
        Ok(ListenerCa {
            generation: self.generation,
            request_key: key.transpose()?,
            chain: chain.transpose()?,
            former_roots: former.collect::<Result<_, _>>()?,
        })
    }
}

impl FormerRootFile {
    fn from_former_root(root: &FormerRoot) -> Self {
        Self {
            certificate: pem::encode_chain(std::slice::from_ref(&root.certificate)),
            until: root.expires,
        }
    }

    fn into_former_root(self) -> Result<FormerRoot, CaError> {
        Ok(FormerRoot {
            certificate: parse_certificates(&self.certificate)?.swap_remove(0),
            expires: self.until,
        })
    }
}

impl IntermediatesFile {
    /// Returns the intermediates in the order of [`crate::identity::IssuerPurpose::ALL`].
    fn from_intermediates(signers: &[Intermediate]) -> Option<Self> {
        let mut pairs = signers.iter().map(|signer| KeyPairFile {
            certificate: signer.certificate_pem(),
            key: signer.key_pem().expose().to_owned(),
        });
        Some(Self {
            edges: pairs.next()?,
            listeners: pairs.next()?,
            replicas: pairs.next()?,
            clients: pairs.next()?,
        })
    }
}
