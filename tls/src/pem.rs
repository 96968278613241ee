//! PEM encoding and decoding: the form of certificates and keys in files and messages.
//!
//! This module encodes; rustls' own parser decodes. A text with no certificate in it is an error, never an empty chain.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Number of characters in a line (RFC 7468, section 2).
const LINE_LENGTH: usize = 64;

/// Encodes one block of PEM, with its line ends.
pub fn encode(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    let mut remaining = text.as_str();
    while !remaining.is_empty() {
        let (line, next) = remaining.split_at(remaining.len().min(LINE_LENGTH));
        out.push_str(line);
        out.push('\n');
        remaining = next;
    }
    out.push_str("-----END ");
    out.push_str(label);
    out.push_str("-----\n");
    out
}

/// Encodes certificates, one block after the other.
pub fn encode_chain(chain: &[CertificateDer<'_>]) -> String {
    chain
        .iter()
        .map(|certificate| encode("CERTIFICATE", certificate))
        .collect()
}

/// Returns all certificates of a text, at least one.
pub fn parse_certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates = CertificateDer::pem_slice_iter(text.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("no certificate (BEGIN CERTIFICATE) in it".into());
    }
    Ok(certificates)
}

/// Returns the first private key of a text.
pub fn private_key(text: &str) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_chain_parses_back() {
        let chain = vec![
            CertificateDer::from(vec![7; 100]),
            CertificateDer::from(vec![9; 48]),
        ];
        let text = encode_chain(&chain);
        assert!(text.lines().all(|line| line.len() <= LINE_LENGTH));
        assert_eq!(parse_certificates(&text).unwrap(), chain);
    }

    #[test]
    fn a_text_without_certificates_is_an_error() {
        assert!(parse_certificates("").is_err());
        assert!(private_key("nothing").is_err());
    }
}
