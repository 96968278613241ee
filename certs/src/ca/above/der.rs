//! Replaces an issuer's name in a certificate, so that it is byte for byte as the issuer writes it.
//!
//! rcgen stores one value of each kind in a name. So it cannot write a name with several `DC=` or `OU=`, as directories have
//! them, nor one in an encoding that it would not choose. Verifiers compare bytes. So rcgen makes the certificate, and this
//! module takes it apart, inserts the name, and signs the whole again. The input is our own certificate: it is well-formed, and
//! lengths are read for that only.

use rcgen::{KeyPair, SigningKey};
use rustls_pki_types::CertificateDer;

const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 0x03;

/// Returns the certificate with another issuer name, signed by `key`, which signed it before.
pub(super) fn issued_by(
    name: &[u8],
    certificate: &CertificateDer<'_>,
    key: &KeyPair,
) -> Result<CertificateDer<'static>, rcgen::Error> {
    let taken_apart = || {
        let (to_sign, signed) = split(inside(certificate)?)?;
        let (algorithm, _signature) = split(signed)?;
        // Version, serial number, algorithm.
        let parts = inside(to_sign)?;
        let mut rest = parts;
        for _ in 0..3 {
            (_, rest) = split(rest)?;
        }
        let before = parts.get(..parts.len() - rest.len())?;
        let (_issuer, behind) = split(rest)?;
        Some((algorithm, before, behind))
    };
    let (algorithm, before, behind) =
        taken_apart().ok_or(rcgen::Error::CouldNotParseCertificate)?;
    let to_sign = element(SEQUENCE, &[before, name, behind]);
    let signature = key.sign(&to_sign)?;
    let signature = element(BIT_STRING, &[&[0], &signature]);
    Ok(element(SEQUENCE, &[&to_sign, algorithm, &signature]).into())
}

/// The first element, and what follows it.
fn split(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (header, length) = measure(der)?;
    der.split_at_checked(header.checked_add(length)?)
}

/// Returns the content of the first element.
fn inside(der: &[u8]) -> Option<&[u8]> {
    let (header, length) = measure(der)?;
    der.get(header..header.checked_add(length)?)
}

/// Returns the lengths of an element's header and of its content (X.690, 8.1.3).
fn measure(der: &[u8]) -> Option<(usize, usize)> {
    let first = usize::from(*der.get(1)?);
    if first < 0x80 {
        return Some((2, first));
    }
    let head = 2 + (first & 0x7f);
    let mut bytes = der.get(2..head)?.iter();
    let length = bytes.try_fold(0_usize, |length, byte| {
        Some(length.checked_mul(0x100)? | usize::from(*byte))
    });
    Some((head, length?))
}

fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let bytes = content.len().to_be_bytes();
    let length: Vec<_> = bytes.into_iter().skip_while(|byte| *byte == 0).collect();
    let mut out = vec![tag];
    if content.len() >= 0x80 {
        let count = u8::try_from(length.len()).expect("a length has eight bytes at most");
        out.push(0x80 | count);
    }
    out.extend(length);
    out.extend(content);
    out
}
