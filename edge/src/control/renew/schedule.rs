//! Times at which a certificate is renewed.

use crate::control::{connect_error::ConnectError, tunnels::context::TunnelContext};
use causeway_certs::{Certificate, EdgeIdentity};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::sleep;

/// Interval at which the wall clock is checked. Timers stand still while a machine is suspended.
pub(super) const CLOCK_CHECK_INTERVAL: Duration = Duration::from_hours(1);

/// Times at which a certificate is renewed and expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::control) struct RenewalSchedule {
    pub(in crate::control) renews_at: SystemTime,
    pub(in crate::control) not_after: SystemTime,
}

impl RenewalSchedule {
    /// Returns the schedule of a certificate that was issued at `since`, if that is later than the start of its validity,
    /// which is before its issue. `random`, from 0 to 1, spreads the renewals of edges that joined together. It moves them
    /// only to an earlier time.
    pub(in crate::control) fn for_identity(
        identity: &EdgeIdentity,
        since: SystemTime,
        random: f64,
    ) -> Self {
        let (not_before, not_after) = validity(identity);
        Self::new(not_before.max(since), not_after, random)
    }

    /// Returns the schedule of a certificate of an external CA. The renewal time is the time after which the CA is late:
    /// cert-manager renews after two thirds of the lifetime, and Vault's agent after nine tenths.
    pub(in crate::control) fn for_external_ca(identity: &EdgeIdentity) -> Self {
        let (not_before, not_after) = validity(identity);
        let lifetime = not_after.duration_since(not_before).unwrap_or_default();
        Self {
            renews_at: not_after - lifetime / 20,
            not_after,
        }
    }

    pub(in crate::control) fn new(
        not_before: SystemTime,
        not_after: SystemTime,
        random: f64,
    ) -> Self {
        let lifetime = not_after.duration_since(not_before).unwrap_or_default();
        let share = 2.0 / 3.0 - random.clamp(0.0, 1.0) / 15.0;
        Self {
            renews_at: not_before.min(not_after) + lifetime.mul_f64(share),
            not_after,
        }
    }

    pub(in crate::control) fn publish(&self, context: &TunnelContext) {
        let expiry_seconds = self.not_after.duration_since(UNIX_EPOCH);
        let expiry_seconds = expiry_seconds.unwrap_or_default().as_secs();
        context.metrics.set_certificate_expiry(expiry_seconds);
        context
            .status
            .set_certificate(self.not_after, self.renews_at);
    }

    /// Waits until the certificate must be renewed by this clock.
    pub(in crate::control) async fn wait(&self, clock: impl Fn() -> SystemTime) {
        loop {
            let remaining = self.renews_at.duration_since(clock()).unwrap_or_default();
            if remaining.is_zero() {
                return;
            }
            sleep(remaining.min(CLOCK_CHECK_INTERVAL)).await;
        }
    }

    /// Returns the minimum time until the next renewal of a certificate that has just been issued with this lifetime, if its renewal
    /// is due again by this machine's clock. That clock is ahead, and would cause one renewal after the other.
    pub(super) fn pause_after_issue(
        &self,
        lifetime: Duration,
        now: SystemTime,
    ) -> Option<Duration> {
        (self.renews_at <= now).then(|| (lifetime / 2).min(CLOCK_CHECK_INTERVAL))
    }

    /// Returns the error to report. An expired certificate is never renewed later, whatever error the gateway returned.
    pub(in crate::control) fn error_to_report(
        &self,
        error: ConnectError,
        now: SystemTime,
    ) -> ConnectError {
        if now <= self.not_after {
            return error;
        }
        ConnectError::unwelcome(format!(
            "this node's certificate expired at {}, unless this machine's clock is wrong (it is {}): rejoin \
             with a new token of `causeway token create`, with --join or join_file ({})",
            humantime::format_rfc3339_seconds(self.not_after),
            humantime::format_rfc3339_seconds(now),
            error.detail(),
        ))
    }
}

fn certificate(identity: &EdgeIdentity) -> Certificate {
    let leaf = identity.leaf.chain().first();
    // The certificate was already parsed when the leaf was created.
    let leaf = leaf.and_then(|leaf| Certificate::parse(leaf).ok());
    leaf.unwrap_or_default()
}

/// Returns the time from the certificate's issue by its gateway to the end of its validity.
pub(super) fn lifetime(identity: &EdgeIdentity) -> Duration {
    let leaf = certificate(identity);
    Duration::from_secs(leaf.not_after.saturating_sub(leaf.issued_at()))
}

/// Returns the first and the last second of the certificate's validity.
pub(super) fn validity(identity: &EdgeIdentity) -> (SystemTime, SystemTime) {
    let leaf = certificate(identity);
    let to_system_time = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    (
        to_system_time(leaf.not_before),
        to_system_time(leaf.not_after),
    )
}
