//! Cross-signing by an operator's own CA: it signs our roots, so that clients that trust only that CA trust our listeners.
//!
//! Our root stays unchanged, and edges still trust it. The operator's CA makes one more certificate of the root's name and key.
//! This certificate is valid for servers only: where the operator's CA is trusted, our edges and clients have no identity. The
//! key of the operator's CA is used for this signature and is not stored.
//!
//! A listener sends the following certificates behind leaf and intermediate. A peer that trusts any one root can follow them in
//! order, without a step back (from several certificates of one name OpenSSL takes the first, and never another):
//! 1. while a root is retiring, the new root as signed by the old one;
//! 2. the old root, else the active root, as signed by the operator's CA;
//! 3. the chain of the operator's CA.
//!
//! If the operator's CA signed only the new root, no order would suit both the peers that trust only the old root *and* the peers
//! that trust only the operator's. Therefore the command that prepares a new root also has the old one signed. One known verifier
//! looks for a trusted name in the last certificate only, and so does not find our own root if a certificate follows it:
//! `GnuTLS`. Clients that use `GnuTLS` trust the operator's root, or both.

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

/// Certificates between a CA above and a leaf, at most: a root, its replacement, and the intermediate of listeners.
const BELOW: u32 = 3;

/// An operator's own CA, with its key, for as long as it signs. `Debug` shows no key.
pub struct OperatorCa {
    authority: CaConstraints,
    /// Chain of the operator's CA, its own certificate first. A root itself is not sent: a peer that trusts it has it.
    sent: Vec<CertificateDer<'static>>,
    /// Certificate that a peer trusts if it trusts the operator's CA.
    anchor: CertificateDer<'static>,
    /// Expiry of the certificate that expires first.
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

/// A cross certificate of one of our roots by an operator's CA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CrossCertificate {
    /// The root.
    pub root: Fingerprint,
    /// Common name of the CA that signed.
    pub by: String,
    /// Last second in which clients trust the cross certificate.
    pub not_after: UnixTime,
}

fn unusable(why: String) -> CaError {
    CaError::Unusable {
        part: "certificate",
        why,
    }
}

impl OperatorCa {
    /// Reads a CA's certificate, its chain to the root, and its key.
    ///
    /// # Errors
    /// If the chain is invalid, or does not permit the required certificates now, or the key does not match or cannot be used.
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

    /// Returns the common name of the CA, or the whole name if it has none.
    pub fn name(&self) -> &str {
        &self.authority.subject.common
    }

    /// Whether the CA constrains the names below it. Clients do not trust listeners with other names through this CA.
    pub fn limits_names(&self) -> bool {
        self.limits_names
    }

    /// Signs a root, and proves that the chain of a listener then leads to this CA.
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
    /// Has an operator's CA sign all roots, whether or not another CA has signed them before.
    ///
    /// # Errors
    /// If that CA cannot sign.
    pub fn signed_by(mut self, operator: &OperatorCa) -> Result<(Self, RotationStep), CaError> {
        operator.sign(&mut self.active)?;
        if let Some((_, other)) = &mut self.other {
            operator.sign(other)?;
        }
        Ok((self, RotationStep::Made))
    }

    /// Prepares a root as [`Ca::prepare`] does, and has an operator's CA sign it. The CA also signs the active root, if no
    /// operator's CA has yet.
    ///
    /// # Errors
    /// If it is too early, or that CA cannot sign.
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

    /// Returns the cross certificates of our roots, that of the active root first.
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

    /// Returns the last certificates that a listener sends, for peers that trust an operator's CA.
    pub(super) fn shown_above(&self) -> &[CertificateDer<'static>] {
        match &self.other {
            Some((RootStage::Retiring, goes)) if self.active.crossed.is_some() => goes.above(),
            _ => self.active.above(),
        }
    }
}

#[cfg(test)]
mod tests;
