//! Keys of session tickets that outlive a process, and that gateways can share.
//!
//! A ticket (RFC 5077 §4, RFC 8446 §4.6.1) is encrypted under a key that is derived from a secret of the data directory and
//! the day. So edges resume at a gateway that has restarted, and at each replica that has the same secret. This is limited to
//! TLS 1.3, in which the secrecy of a resumed connection comes from its own key exchange. So an attacker who steals the
//! secret later cannot read past connections. It is also limited to tunnels: on a port that issues certificates, a forged
//! session would be as valuable as a certificate.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::hkdf::{self, HKDF_SHA256, Prk, Salt};
use rustls::server::ProducesTickets;
use rustls_pki_types::UnixTime;

use crate::secret::{base64url, from_base64url, random_bytes};

/// Period for which one key encrypts, in seconds. A nonce is random, and a key is safe for 2^32 of them (NIST SP 800-38D
/// §8.3).
const PERIOD_SECS: u64 = 24 * 60 * 60;
/// Number of periods for which a ticket can be decrypted, the maximum of RFC 8446 §4.6.1. An edge gets a ticket only when it
/// dials, and may dial again after days.
const MAX_AGE_PERIODS: u64 = 7;
/// Number of bytes of the period's number, at the beginning of a ticket.
const PERIOD_NUMBER_LEN: usize = 8;
const SALT: &[u8] = b"causeway session tickets";
/// Version of the encrypted format. Another version of rustls may interpret it differently. A ticket that cannot be decrypted
/// only costs a full handshake.
const FORMAT_VERSION: &[u8] = b"rustls 0.23";

/// Secret from which the keys of tickets are derived: 32 random bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketSecret([u8; 32]);

impl TicketSecret {
    /// Returns a new random secret.
    pub fn random() -> Self {
        Self(random_bytes())
    }

    /// Parses the output of [`TicketSecret::text`]. Returns `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = from_base64url(text.trim())?;
        bytes.try_into().ok().map(Self)
    }

    /// Returns the secret as base64url, for its file.
    pub fn text(&self) -> String {
        base64url(&self.0)
    }
}

impl fmt::Debug for TicketSecret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("***")
    }
}

/// Ticketer that encrypts and decrypts tickets.
#[derive(Debug)]
pub(super) struct SharedTicketer {
    secret: Prk,
}

impl SharedTicketer {
    pub(super) fn new(secret: &TicketSecret) -> Self {
        Self {
            secret: Salt::new(HKDF_SHA256, SALT).extract(&secret.0),
        }
    }

    /// Derives the key of a period. The derivation takes microseconds of a handshake's hundreds, and so no key has to be
    /// replaced on time.
    fn key(&self, period: u64) -> Option<RandomizedNonceKey> {
        let info = [FORMAT_VERSION, &period.to_be_bytes()];
        let mut key = [0; 32];
        let derived = self.secret.expand(&info, Key32).ok()?;
        derived.fill(&mut key).ok()?;
        RandomizedNonceKey::new(&AES_256_GCM, &key).ok()
    }

    fn seal(&self, session: &[u8], period: u64) -> Option<Vec<u8>> {
        let period_bytes = period.to_be_bytes();
        let mut sealed = session.to_vec();
        let nonce = self.key(period)?;
        let nonce = nonce.seal_in_place_append_tag(Aad::from(period_bytes), &mut sealed);
        Some([&period_bytes[..], nonce.ok()?.as_ref(), &sealed].concat())
    }

    fn open(&self, ticket: &[u8], now: u64) -> Option<Vec<u8>> {
        let (period_bytes, remainder) = ticket.split_at_checked(PERIOD_NUMBER_LEN)?;
        let (nonce, sealed) = remainder.split_at_checked(NONCE_LEN)?;
        let period_bytes: [u8; PERIOD_NUMBER_LEN] = period_bytes.try_into().ok()?;
        let period = u64::from_be_bytes(period_bytes);
        // One period ahead is accepted, because the replicas' clocks differ.
        if period > now + 1 || now.saturating_sub(period) > MAX_AGE_PERIODS {
            return None;
        }
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut session = sealed.to_vec();
        let plaintext =
            self.key(period)?
                .open_in_place(nonce, Aad::from(period_bytes), &mut session);
        let length = plaintext.ok()?.len();
        session.truncate(length);
        Some(session)
    }
}

impl ProducesTickets for SharedTicketer {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        u32::try_from(MAX_AGE_PERIODS * PERIOD_SECS).unwrap_or(u32::MAX)
    }

    fn encrypt(&self, session: &[u8]) -> Option<Vec<u8>> {
        self.seal(session, current_period())
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        self.open(ticket, current_period())
    }
}

/// Returns the number of the current period.
fn current_period() -> u64 {
    UnixTime::now().as_secs() / PERIOD_SECS
}

/// Length of a key, in the form that HKDF requires.
struct Key32;

impl hkdf::KeyType for Key32 {
    fn len(&self) -> usize {
        32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_opens_only_for_holders_of_the_secret() {
        let secret = TicketSecret::random();
        let copied = TicketSecret::parse(&format!("{}\n", secret.text())).unwrap();
        let ticket = SharedTicketer::new(&secret).encrypt(b"session").unwrap();
        let replica = SharedTicketer::new(&copied);
        assert_eq!(replica.decrypt(&ticket).as_deref(), Some(&b"session"[..]));
        let stranger = SharedTicketer::new(&TicketSecret::random());
        assert_eq!(stranger.decrypt(&ticket), None);
    }

    #[test]
    fn a_ticket_is_valid_for_a_week_and_clients_get_that_lifetime() {
        let tickets = SharedTicketer::new(&TicketSecret::random());
        assert_eq!(tickets.lifetime(), 604_800);
        let ticket = tickets.seal(b"session", 100).unwrap();
        for (now, opens) in [
            (98, false),
            (99, true),
            (100, true),
            (107, true),
            (108, false),
        ] {
            assert_eq!(tickets.open(&ticket, now).is_some(), opens, "{now}");
        }
        // The number is authenticated, so an old ticket cannot be made newer.
        let mut younger = ticket.clone();
        younger[PERIOD_NUMBER_LEN - 1] += 1;
        assert_eq!(tickets.open(&younger, 101), None);
    }

    #[test]
    fn malformed_tickets_are_refused() {
        let tickets = SharedTicketer::new(&TicketSecret::random());
        let ticket = tickets.encrypt(b"session").unwrap();
        for length in 0..ticket.len() {
            assert_eq!(tickets.decrypt(&ticket[..length]), None, "{length}");
        }
        for index in 0..ticket.len() {
            let mut other = ticket.clone();
            other[index] ^= 1;
            assert_eq!(tickets.decrypt(&other), None, "{index}");
        }
        assert_ne!(ticket, tickets.encrypt(b"session").unwrap());
    }

    #[test]
    fn a_secret_is_32_bytes_and_does_not_print() {
        assert_eq!(format!("{:?}", TicketSecret::random()), "***");
        for bad in ["", "abc", &"A".repeat(44), "*"] {
            assert_eq!(TicketSecret::parse(bad), None, "{bad}");
        }
    }
}
