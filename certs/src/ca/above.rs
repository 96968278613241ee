//! A CA above ours: an operator's own, which signs our roots, so that whoever trusts it alone believes fronts.
//!
//! Our root stays what it is, and what edges know. The operator's CA makes one more certificate of its name and key, by
//! which servers are believed and nobody else: an edge or a caller of ours is nobody where that CA is trusted. Its own key
//! is used for this and forgotten.
//!
//! A front sends, behind leaf and intermediate, so that whoever trusts any one root finds its way without a step back (from
//! several certificates of one name OpenSSL takes the first, and never another):
//! 1. while a root is retiring, the new root as the old one has signed it;
//! 2. the old root, else the one that signs, as the operator's CA has signed it;
//! 3. what the operator's CA hangs by.
//!
//! Were the new root alone signed by the operator's CA, then no order would do for those who know only the old one *and*
//! for those who know only the operator's. Therefore what prepares a new root has the old one signed too. One verifier is
//! known that looks for a trusted name in the last certificate only, and so does not find our own root once something
//! stands behind it: `GnuTLS`. Its callers trust the operator's root, or both.

mod der;

use std::time::Duration;

use rcgen::{
    CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyIdMethod, KeyPair, PublicKeyData,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::root::{DEPTH, LeafProfile, Root, begin};
use super::{Ca, CaError, RootStage, RotationStep};
use crate::certificate::{CaConstraints, Certificate, date};
use crate::identity::IssuerPurpose;
use crate::pem;
use crate::secret::Fingerprint;
use crate::verify::provider;

/// What may come between a CA above and a leaf: a root, the one that takes its place, the intermediate of fronts.
const BELOW: u32 = 3;

/// An operator's own CA, with its key, for as long as it signs. `Debug` shows no key.
pub struct OperatorCa {
    authority: CaConstraints,
    /// By what it hangs on its root, itself first. A root itself is not sent: who trusts it has it.
    sent: Vec<CertificateDer<'static>>,
    /// What whoever believes it trusts.
    anchor: CertificateDer<'static>,
    /// When the first of them ends.
    ends: u64,
    limits_names: bool,
    key: KeyPair,
}

impl std::fmt::Debug for OperatorCa {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("OperatorCa")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// Who has signed a root of ours besides itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CrossCertificate {
    /// The root.
    pub root: Fingerprint,
    /// Whose CA that was, by its common name.
    pub by: String,
    /// The last second in which callers believe it.
    pub not_after: UnixTime,
}

fn unusable(why: String) -> CaError {
    CaError::Unusable {
        part: "certificate",
        why,
    }
}

impl OperatorCa {
    /// Reads a CA's certificate, those by which it hangs on its root, and its key.
    ///
    /// # Errors
    /// If the chain is none, or does not permit what is needed of it now, or the key is another's or cannot be used.
    pub fn load(certificates_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let chain = pem::certificates(certificates_pem).map_err(unusable)?;
        let authorities = chain.iter().map(CaConstraints::read);
        let authorities = authorities.collect::<Result<Vec<_>, _>>()?;
        let facts = chain.iter().map(Certificate::read);
        let facts = facts.collect::<Result<Vec<_>, _>>()?;
        for (below, above) in authorities.iter().zip(authorities.iter().skip(1)) {
            if below.issuer.der != above.subject.der {
                return Err(unusable(format!(
                    "{} is signed by {}, but {} stands behind it: each certificate stands before the one that has signed it, and no other is in the file",
                    below.subject.common, below.issuer.common, above.subject.common
                )));
            }
        }
        for (below, (authority, facts)) in (0..).zip(authorities.iter().zip(&facts)) {
            permits(authority, facts, below)?;
        }
        let key = key(key_pem)?;
        if facts.first().map(|facts| &facts.public_key) != Some(&key.subject_public_key_info()) {
            return Err(CaError::Unusable {
                part: "key",
                why: "it is not the key of the first certificate in the file".into(),
            });
        }
        let ends = facts.iter().map(|facts| facts.not_after).min();
        let limits_names = authorities.iter().any(|authority| authority.limits_names);
        let rooted = authorities.last().is_some_and(CaConstraints::is_root);
        let (mut sent, mut authorities) = (chain, authorities.into_iter());
        let (Some(authority), Some(anchor)) = (authorities.next(), sent.last().cloned()) else {
            return Err(unusable("there is none".into()));
        };
        sent.truncate(sent.len() - usize::from(rooted));
        Ok(Self {
            authority,
            sent,
            anchor,
            ends: ends.unwrap_or_default(),
            limits_names,
            key,
        })
    }

    /// Its common name, or all of its name where it has none.
    pub fn name(&self) -> &str {
        &self.authority.subject.common
    }

    /// Whether it says which names may stand in what hangs below it: fronts of others are not believed by it.
    pub fn limits_names(&self) -> bool {
        self.limits_names
    }

    /// Signs a root, and proves that what fronts show then leads up here.
    fn sign(&self, root: &mut Root) -> Result<(), CaError> {
        let mut params = root.again((begin(), self.ends), DEPTH)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let mut own = CertificateParams::default();
        if let Some(id) = &self.authority.key_id {
            own.key_identifier_method = KeyIdMethod::PreSpecified(id.clone());
            params.use_authority_key_identifier_extension = true;
        }
        let issuer = Issuer::new(own, &self.key);
        let made = params.signed_by(root.own.issuer.key(), &issuer)?;
        let made = der::issued_by(&self.authority.subject.der, made.der(), &self.key)?;
        let above: Vec<_> = [made].into_iter().chain(self.sent.clone()).collect();
        self.prove(root, &above)?;
        root.put_below(above);
        Ok(())
    }

    fn prove(&self, root: &Root, above: &[CertificateDer<'static>]) -> Result<(), CaError> {
        let kind = LeafProfile {
            common_name: "causeway front",
            groups: None,
            uri: None,
            names: &[],
            lifetime: Duration::from_mins(1),
        };
        let chain = root.sign(IssuerPurpose::Fronts, &KeyPair::generate()?, kind)?;
        let proven = || {
            let (leaf, behind) = chain.split_first().ok_or(webpki::Error::BadDer)?;
            let behind = [behind, above].concat();
            EndEntityCert::try_from(leaf)?.verify_for_usage(
                provider().signature_verification_algorithms.all,
                &[webpki::anchor_from_trusted_cert(&self.anchor)?],
                &behind,
                UnixTime::now(),
                KeyUsage::server_auth(),
                None,
                None,
            )?;
            Ok(())
        };
        proven().map_err(|error| {
            let (name, domain) = (self.name(), &root.domain);
            unusable(match error {
                webpki::Error::NameConstraintViolation => format!(
                    "{name} does not permit names that Causeway's own certificates bear (nameConstraints): a common name, and spiffe://{domain}, as --trust-domain has it"
                ),
                error => format!("what {name} signs does not lead up to it: {error}"),
            })
        })
    }
}

/// Whether it may do, now, what is asked of the one that has so many of the operator's below it.
fn permits(authority: &CaConstraints, facts: &Certificate, below: u32) -> Result<(), CaError> {
    let name = &authority.subject.common;
    let now = UnixTime::now().as_secs();
    let wanted = BELOW + below;
    let why = if !authority.signs {
        format!(
            "{name} may not sign certificates; it has to be a CA's (CA:TRUE, and keyCertSign if it says a key usage)"
        )
    } else if now > facts.not_after {
        format!("{name} ended at {}", date(facts.not_after))
    } else if now < facts.not_before {
        let begins = date(facts.not_before);
        format!("{name} is not valid before {begins}; check the clocks")
    } else if !authority.servers {
        format!("{name} is not for servers: its extended key usage has no serverAuth")
    } else if let Some(depth) = authority.depth.filter(|depth| *depth < wanted) {
        format!(
            "{name} permits {depth} CAs in a line below it (pathLenConstraint), and {wanted} are needed: {}Causeway's root, the one that takes its place one day, and the one that signs for fronts; have one made with pathlen:{wanted}, or without a limit",
            if below == 0 {
                ""
            } else {
                "those before it in the file, "
            }
        )
    } else {
        return Ok(());
    };
    Err(unusable(why))
}

fn key(text: &str) -> Result<KeyPair, CaError> {
    let bad = |why: &str| CaError::Unusable {
        part: "key",
        why: why.to_owned(),
    };
    // PKCS#8 says it in the label, and what OpenSSL wrote before in a line below it.
    let encrypted = ["BEGIN ENCRYPTED PRIVATE KEY", "Proc-Type: 4,ENCRYPTED"];
    if encrypted.iter().any(|mark| text.contains(mark)) {
        return Err(bad(
            "it is encrypted, and no password can be given here; decrypt it for this one step (openssl pkey -in FILE -out PLAIN), it is not kept",
        ));
    }
    let der = pem::private_key(text).map_err(|_| {
        bad("there is no private key in PEM in it (BEGIN PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY); what is in DER, PKCS#12 or a security module cannot be read")
    })?;
    KeyPair::try_from(&der).map_err(|_| {
        bad("it is of a kind that cannot be used; RSA of 2048 bits and more, ECDSA on P-256, P-384 and P-521, and Ed25519 can")
    })
}

impl Ca {
    /// Has an operator's CA sign all roots, whoever has signed them before.
    ///
    /// # Errors
    /// If that CA cannot.
    pub fn signed_by(mut self, operator: &OperatorCa) -> Result<(Self, RotationStep), CaError> {
        operator.sign(&mut self.active)?;
        if let Some((_, other)) = &mut self.other {
            operator.sign(other)?;
        }
        Ok((self, RotationStep::Made))
    }

    /// As [`Ca::prepare`], and has an operator's CA sign the prepared root; the one that signs too, if none has yet.
    ///
    /// # Errors
    /// If it is too early, or that CA cannot.
    pub fn prepare_signed_by(self, operator: &OperatorCa) -> Result<(Self, RotationStep), CaError> {
        let (mut ca, _) = self.prepare()?;
        if let Some((_, next)) = &mut ca.other {
            operator.sign(next)?;
        }
        if ca.active.above().is_empty() {
            operator.sign(&mut ca.active)?;
        }
        Ok((ca, RotationStep::Made))
    }

    /// Who has signed our roots besides, that of the root that signs first.
    pub fn above(&self) -> Vec<CrossCertificate> {
        let of = |(_, root): (RootStage, &Root)| {
            let facts = root.above().iter().map(Certificate::read);
            let ends = facts.flatten().map(|facts| facts.not_after).min()?;
            Some(CrossCertificate {
                root: root.fingerprint,
                by: CaConstraints::read(root.above().first()?)
                    .ok()?
                    .issuer
                    .common,
                not_after: UnixTime::since_unix_epoch(Duration::from_secs(ends)),
            })
        };
        self.all().filter_map(of).collect()
    }

    /// Whether the next step of a rotation leaves those behind who know an operator's CA alone: it has signed the root
    /// that goes and not the one that comes.
    pub fn leaves_operator(&self) -> bool {
        let above = |root: &Root| !root.above().is_empty();
        match &self.other {
            None => false,
            Some((RootStage::Retiring, goes)) => above(goes) && !above(&self.active),
            Some((_, comes)) => above(&self.active) && !above(comes),
        }
    }

    /// What a front sends at the end, for those who trust an operator's CA.
    pub(super) fn shown_above(&self) -> &[CertificateDer<'static>] {
        match &self.other {
            Some((RootStage::Retiring, goes)) if self.active.crossed.is_some() => goes.above(),
            _ => self.active.above(),
        }
    }
}

#[cfg(test)]
mod tests;
