//! The form of a CA in the data directory: one file, so that every change of it is one rename.

use serde::{Deserialize, Serialize};

use super::root::{Intermediate, Root};
use super::{Ca, CaError, RootStage};
use crate::pem;

/// The version of this form. The first was a certificate and a key in two files. What may be absent (`crossed`, `issuers`,
/// `above`) is read as absent where it is; a program from before it refuses a file that has it.
const VERSION: u32 = 2;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaFile {
    version: u32,
    /// Roots, the active one first.
    roots: Vec<RootFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootFile {
    stage: RootStage,
    certificate: String,
    key: String,
    /// This root, signed by the one before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    crossed: Option<String>,
    /// This root as signed by an operator's CA, and the chain of that CA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    above: Option<String>,
    /// Intermediates by purpose. A root without intermediates signs leaves itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    issuers: Option<IntermediatesFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IntermediatesFile {
    edges: KeyPairFile,
    fronts: KeyPairFile,
    replicas: KeyPairFile,
    callers: KeyPairFile,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyPairFile {
    certificate: String,
    key: String,
}

impl CaFile {
    pub(crate) fn of(ca: &Ca) -> Self {
        let roots = ca.all().map(|(stage, root)| RootFile::of(stage, root));
        Self {
            version: VERSION,
            roots: roots.collect(),
        }
    }

    pub(crate) fn read(self) -> Result<Ca, CaError> {
        let bad = |why: &str| CaError::Unusable {
            part: "file",
            why: why.to_owned(),
        };
        if self.version != VERSION {
            let found = self.version;
            return Err(bad(&format!(
                "it says version {found} and this program reads {VERSION}"
            )));
        }
        let mut roots = Vec::new();
        for file in self.roots {
            roots.push((file.stage, file.read()?));
        }
        let mut roots = roots.into_iter();
        let (Some((RootStage::Active, active)), other, None) =
            (roots.next(), roots.next(), roots.next())
        else {
            return Err(bad("it wants an active root first, and one other at most"));
        };
        if let Some((stage, other)) = &other
            && (*stage == RootStage::Active || other.domain != active.domain)
        {
            return Err(bad(
                "its second root is active too, or of another trust domain",
            ));
        }
        let unbelieved = false;
        Ok(Ca {
            active,
            other,
            unbelieved,
        })
    }
}

impl RootFile {
    fn of(stage: RootStage, root: &Root) -> Self {
        let crossed = root.crossed.as_ref();
        let above = Some(root.above()).filter(|above| !above.is_empty());
        Self {
            stage,
            certificate: root.own.certificate_pem(),
            key: root.own.key_pem().expose().to_owned(),
            crossed: crossed.map(|crossed| pem::encode_chain(std::slice::from_ref(crossed))),
            above: above.map(pem::encode_chain),
            issuers: root.issuers().and_then(IntermediatesFile::of),
        }
    }

    fn read(self) -> Result<Root, CaError> {
        let root = Root::load(&self.certificate, &self.key)?;
        let read = |pair: KeyPairFile| Intermediate::load(&pair.certificate, &pair.key);
        let issuers = self.issuers.map(|issuers| {
            let pairs = [
                issuers.edges,
                issuers.fronts,
                issuers.replicas,
                issuers.callers,
            ];
            pairs.map(read).into_iter().collect::<Result<Vec<_>, _>>()
        });
        let certificates = |text: Option<String>| {
            let found = text.map(|text| pem::certificates(&text));
            found.transpose().map_err(|why| CaError::Unusable {
                part: "certificate",
                why,
            })
        };
        let crossed = certificates(self.crossed)?.map(|mut found| found.swap_remove(0));
        let above = certificates(self.above)?.unwrap_or_default();
        root.with(issuers.transpose()?, crossed, above)
    }
}

impl IntermediatesFile {
    /// Returns the intermediates in the order of [`crate::identity::IssuerPurpose::ALL`].
    fn of(signers: &[Intermediate]) -> Option<Self> {
        let mut pairs = signers.iter().map(|signer| KeyPairFile {
            certificate: signer.certificate_pem(),
            key: signer.key_pem().expose().to_owned(),
        });
        Some(Self {
            edges: pairs.next()?,
            fronts: pairs.next()?,
            replicas: pairs.next()?,
            callers: pairs.next()?,
        })
    }
}
