//! Failures between an edge and a gateway, and their consequence for the next attempt.
//!
//! A silent network is tried again soon. A refusal backs off. A refusal that does not go away by itself (another process with
//! the same certificate, an unknown certificate) backs off at the maximum. A wrong clock looks like an invalid certificate,
//! so the error message mentions the clock.

use causeway_certs::{NotAGateway, UnexpectedCa};
use causeway_rt::backoff::Backoff;
use causeway_tunnel::{TunnelEnd, control_stream::GoAway};
use rustls::{AlertDescription as Alert, CertificateError, Error as TlsError};
use std::{
    io,
    time::{Duration, SystemTime},
};

/// Shortest delay after an attempt that has itself waited for an answer. It has jitter like every delay.
const MIN_DELAY: Duration = Duration::from_millis(250);

/// Failure of a connection to a gateway.
#[derive(Clone, Debug)]
pub(crate) struct ConnectError {
    retry_class: RetryClass,
    detail: String,
    wrong_ca: Option<UnexpectedCa>,
    refusal: Option<IdentityRefusal>,
}

/// Reason why this edge's identity is not usable for a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdentityRefusal {
    /// No CA that the identity trusts has issued the gateway's certificate. Any machine on the network path can cause this.
    UnknownCa,
    /// The gateway does not accept the identity.
    NotAccepted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RetryClass {
    /// A TCP handshake received no answer for this long.
    Silent(Duration),
    /// The peer refused. The duration is the delay that the peer requested, if any.
    Refused(Option<Duration>),
    /// The peer refused, and will refuse again. The duration is the minimum delay that the peer requested.
    RefusedPermanently(Duration),
}

impl ConnectError {
    /// Creates the error of a peer that did not answer.
    pub(crate) fn silent(what: impl Into<String>) -> Self {
        Self {
            retry_class: RetryClass::Silent(Duration::ZERO),
            detail: what.into(),
            wrong_ca: None,
            refusal: None,
        }
    }

    /// Creates the error of a TCP handshake that received no answer for this long.
    pub(crate) fn unanswered(what: impl Into<String>, waited: Duration) -> Self {
        Self {
            retry_class: RetryClass::Silent(waited),
            ..Self::silent(what)
        }
    }

    /// Creates the error of a peer that refused.
    pub(crate) fn refused(what: impl Into<String>) -> Self {
        Self {
            retry_class: RetryClass::Refused(None),
            detail: what.into(),
            wrong_ca: None,
            refusal: None,
        }
    }

    /// Creates the error of a peer that refused and will refuse again.
    pub(crate) fn unwelcome(what: impl Into<String>) -> Self {
        Self {
            retry_class: RetryClass::RefusedPermanently(Duration::ZERO),
            detail: what.into(),
            wrong_ca: None,
            refusal: None,
        }
    }

    /// Creates the error of a tunnel that the gateway dismissed.
    pub(crate) fn dismissed(why: GoAway, detail: &str, retry_after: Duration) -> Self {
        let detail = format!("the gateway refused this edge ({}): {detail}", why.as_str());
        let retry_class = match why {
            GoAway::Superseded | GoAway::NotAdmitted => RetryClass::RefusedPermanently(retry_after),
            GoAway::Malformed | GoAway::Full => RetryClass::Refused(Some(retry_after)),
        };
        // The gateway accepts two processes with one identity, so this is not an identity error.
        let refusal = (why == GoAway::NotAdmitted).then_some(IdentityRefusal::NotAccepted);
        Self {
            retry_class,
            detail,
            wrong_ca: None,
            refusal,
        }
    }

    /// Creates the error of a gateway that does not accept this edge's identity, now or later.
    pub(crate) fn not_accepted(what: impl Into<String>) -> Self {
        Self {
            refusal: Some(IdentityRefusal::NotAccepted),
            ..Self::unwelcome(what)
        }
    }

    /// Creates the error of a tunnel that ended. `tls` is the TLS error, if there was one.
    pub(crate) fn tunnel_ended(ended: &TunnelEnd, tls: Option<&TlsError>) -> Self {
        match tls {
            Some(error) => Self::tls(error),
            None => Self::silent(ended.to_string()),
        }
    }

    /// Creates the error of a failed TLS handshake with `gateway`, which is named as it was dialled.
    pub(crate) fn handshake(gateway: &str, error: &io::Error) -> Self {
        if let Some(wrong) = UnexpectedCa::find(error) {
            return Self {
                wrong_ca: Some(*wrong),
                ..Self::unwelcome(wrong.to_string())
            };
        }
        if NotAGateway::is_in(error) {
            return Self::refused(not_a_tunnel_port(gateway, &NotAGateway));
        }
        match find_tls_error(error) {
            Some(error) if is_other_protocol(error) => {
                Self::refused(not_a_tunnel_port(gateway, error))
            }
            Some(error) => Self {
                // In TLS 1.3 a gateway sees this edge's certificate only after this edge has completed the handshake
                // (RFC 8446, section 2). Anybody on the network path can send an alert before that.
                refusal:
                    matches!(error, TlsError::InvalidCertificate(why) if !is_validity_error(why) && *why != CertificateError::Revoked)
                        .then_some(IdentityRefusal::UnknownCa),
                ..Self::tls(error)
            },
            None => Self::silent(format!(
                "{gateway} closed the connection during the TLS handshake ({error}): no gateway runs behind it, too many \
                 edges connect at once, or it is not a gateway's tunnel port, which is 10262 by default"
            )),
        }
    }

    /// Creates the error of a TLS handshake with `gateway` that took too long.
    pub(crate) fn slow_handshake(gateway: &str) -> Self {
        Self::silent(format!(
            "{gateway} did not complete TLS in time: the network or the gateway is slow, or it is not a gateway's tunnel \
             port, which is 10262 by default"
        ))
    }

    /// Creates the error of a TLS failure.
    pub(crate) fn tls(error: &TlsError) -> Self {
        match error {
            TlsError::InvalidCertificate(why) if is_validity_error(why) => Self::refused(format!(
                "the gateway's certificate is not valid at this machine's time, {}; check the clock ({error})",
                humantime::format_rfc3339_seconds(SystemTime::now()),
            )),
            TlsError::InvalidCertificate(CertificateError::Revoked) => Self::refused(
                "the gateway's certificate is revoked: it was stolen, or the gateway has not replaced it; restart the gateway if it is yours",
            ),
            TlsError::InvalidCertificate(_) => Self {
                refusal: Some(IdentityRefusal::UnknownCa),
                ..Self::refused(format!(
                    "no CA that this node trusts issued the gateway's certificate ({error}): the gateway has another \
                     CA now, or another server answers at its address"
                ))
            },
            // The alert also stands for a certificate that is not valid yet.
            TlsError::AlertReceived(Alert::CertificateExpired) => Self::not_accepted(
                "the gateway does not accept this node's certificate (CertificateExpired): by the gateway's clock it has expired or is not valid yet; \
                 check the clocks of both machines",
            ),
            TlsError::AlertReceived(alert) if is_certificate_alert(*alert) => {
                Self::not_accepted(format!(
                    "the gateway does not accept this node's certificate ({alert:?}): it is revoked, or of another gateway's CA"
                ))
            }
            _ => Self::refused(format!("TLS with the gateway failed: {error}")),
        }
    }

    /// Returns the delay before the next attempt. `random` is from 0 to 1.
    pub(crate) fn delay(&self, backoff: &mut Backoff, random: f64) -> Duration {
        match self.retry_class {
            // A network that returns is noticed by the next attempt: they begin a delay apart, however long each
            // waits. Such attempts cost no peer anything, because no peer responds.
            RetryClass::Silent(waited) => {
                let delay = backoff.silent(random);
                let min_delay = MIN_DELAY.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0);
                delay.saturating_sub(waited).max(min_delay.min(delay))
            }
            RetryClass::Refused(requested) => backoff.refused(requested, random),
            // Jitter for edges that were dismissed at the same time.
            RetryClass::RefusedPermanently(requested) => {
                let min_requested = requested.mul_f64(1.0 + random.clamp(0.0, 1.0) / 2.0);
                backoff.max_delay(random).max(min_requested)
            }
        }
    }

    /// Returns the delay before the next attempt at an address, while the edge has a tunnel through another address. The
    /// network works then, so a silent address is not expected back soon, and the delays grow to the longest.
    pub(crate) fn delay_while_connected(&self, backoff: &mut Backoff, random: f64) -> Duration {
        match self.retry_class {
            RetryClass::Silent(_) => backoff.refused(None, random),
            RetryClass::Refused(_) | RetryClass::RefusedPermanently(_) => {
                self.delay(backoff, random)
            }
        }
    }

    /// Whether the peer refused.
    pub(crate) fn is_refusal(&self) -> bool {
        !matches!(self.retry_class, RetryClass::Silent(_))
    }

    /// Whether the cause may be the network, so that a network change is a reason to try again.
    pub(crate) fn may_be_network_error(&self) -> bool {
        !matches!(self.retry_class, RetryClass::RefusedPermanently(_))
    }

    /// Returns the description of the failure, for people.
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// Returns the CA mismatch if the gateway's CA is not the CA that the token names.
    pub(crate) fn wrong_ca(&self) -> Option<UnexpectedCa> {
        self.wrong_ca
    }

    /// Returns the kind of the refusal, if the identity of this edge is the cause.
    pub(crate) fn identity_refusal(&self) -> Option<IdentityRefusal> {
        self.refusal
    }

    /// Returns the class of the error, for metric labels.
    pub(crate) fn label(&self) -> &'static str {
        match self.retry_class {
            RetryClass::Silent(_) => "silent",
            RetryClass::Refused(_) => "refused",
            RetryClass::RefusedPermanently(_) => "refused_permanently",
        }
    }

    /// Returns the more informative of the two errors. A refusal is more informative than silence, because a peer answered.
    pub(crate) fn or_worse(self, other: Option<Self>) -> Self {
        match other {
            Some(other) if other.rank() > self.rank() => other,
            _ => self,
        }
    }

    fn rank(&self) -> u8 {
        match self.retry_class {
            RetryClass::Silent(_) => 0,
            RetryClass::Refused(_) => 1,
            RetryClass::RefusedPermanently(_) => 2,
        }
    }
}

/// Returns the TLS error inside an I/O error.
pub(crate) fn find_tls_error(error: &io::Error) -> Option<&TlsError> {
    error.get_ref()?.downcast_ref()
}

/// Returns the message for an address that is not a tunnel port.
fn not_a_tunnel_port(gateway: &str, error: &dyn std::error::Error) -> String {
    format!(
        "{gateway} does not speak the tunnel protocol; the tunnel port is 10262 by default ({error})"
    )
}

/// Whether the server does not speak TLS, or does not offer the tunnel protocol over TLS.
fn is_other_protocol(error: &TlsError) -> bool {
    matches!(
        error,
        TlsError::InvalidMessage(_)
            | TlsError::PeerIncompatible(_)
            | TlsError::NoApplicationProtocol
            | TlsError::AlertReceived(
                Alert::NoApplicationProtocol
                    | Alert::ProtocolVersion
                    | Alert::HandshakeFailure
                    | Alert::UnrecognisedName
            )
    )
}

fn is_validity_error(why: &CertificateError) -> bool {
    matches!(
        why,
        CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. }
    )
}

fn is_certificate_alert(alert: Alert) -> bool {
    matches!(
        alert,
        Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            // Error of a signature by a CA with the same name but another key.
            | Alert::DecryptError
            | Alert::AccessDenied
            | Alert::CertificateRequired
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backoff() -> Backoff {
        Backoff::new(Duration::from_secs(2), Duration::from_mins(1))
    }

    #[test]
    fn a_dismissal_backs_off_at_the_maximum_or_longer_if_asked() {
        let asked = |seconds| {
            let trouble = ConnectError::dismissed(
                GoAway::Superseded,
                "by another",
                Duration::from_secs(seconds),
            );
            trouble.delay(&mut backoff(), 0.0)
        };
        assert_eq!(asked(0), Duration::from_secs(30));
        assert_eq!(asked(90), Duration::from_secs(90));
        let full = ConnectError::dismissed(GoAway::Full, "full", Duration::from_secs(5));
        assert_eq!(full.delay(&mut backoff(), 0.0), Duration::from_secs(5));
    }

    #[test]
    fn an_unanswered_attempt_needs_no_further_delay() {
        let delay = |waited, random| {
            let mut backoff = backoff();
            for _ in 0..8 {
                backoff.silent(random);
            }
            let trouble = ConnectError::unanswered("", Duration::from_millis(waited));
            trouble.delay(&mut backoff, random).as_millis()
        };
        assert_eq!((delay(0, 1.0), delay(500, 1.0)), (2_000, 1_500));
        assert_eq!((delay(2_000, 1.0), delay(2_000, 0.0)), (250, 125));
    }

    #[test]
    fn an_address_that_alone_does_not_answer_is_tried_less_and_less() {
        let mut backoff = backoff();
        let trouble = ConnectError::unanswered("", Duration::from_secs(2));
        let delays = (0..12).map(|_| trouble.delay_while_connected(&mut backoff, 1.0));
        let delays: Vec<_> = delays.collect();
        assert!(delays.is_sorted() && delays[0] < Duration::from_secs(1));
        assert_eq!(delays[11], Duration::from_mins(1));
        backoff.reset();
        assert_eq!(trouble.delay_while_connected(&mut backoff, 1.0), delays[0]);
    }

    #[test]
    fn unknown_certificates_back_off_fully_and_clock_is_named() {
        let alert = io::Error::other(TlsError::AlertReceived(Alert::UnknownCA));
        let trouble = ConnectError::handshake("gw:10262", &alert);
        assert_eq!(trouble.delay(&mut backoff(), 1.0), Duration::from_mins(1));
        let early = io::Error::other(TlsError::InvalidCertificate(CertificateError::NotValidYet));
        let trouble = ConnectError::handshake("gw:10262", &early);
        assert!(trouble.detail().contains("clock"), "{}", trouble.detail());
        assert!(
            trouble.is_refusal() && trouble.delay(&mut backoff(), 1.0) < Duration::from_secs(1)
        );
    }

    #[test]
    fn a_refusal_because_of_dates_names_the_clocks() {
        let trouble = ConnectError::tls(&TlsError::AlertReceived(Alert::CertificateExpired));
        assert!(
            trouble
                .detail()
                .contains("check the clocks of both machines")
        );
        assert_eq!(
            trouble.identity_refusal(),
            Some(IdentityRefusal::NotAccepted)
        );
    }

    #[test]
    fn an_alert_from_an_unauthenticated_gateway_is_no_refusal() {
        let alert = TlsError::AlertReceived(Alert::CertificateRevoked);
        let refusal = ConnectError::tls(&alert).identity_refusal();
        assert_eq!(refusal, Some(IdentityRefusal::NotAccepted));
        let before = |error: TlsError| {
            ConnectError::handshake("gw:10262", &io::Error::other(error)).identity_refusal()
        };
        assert_eq!(before(alert), None);
        let early = TlsError::InvalidCertificate(CertificateError::NotValidYet);
        assert_eq!(before(early), None);
        let unknown = TlsError::InvalidCertificate(CertificateError::UnknownIssuer);
        assert_eq!(before(unknown), Some(IdentityRefusal::UnknownCa));
    }
}
