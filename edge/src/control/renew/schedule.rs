//! Times at which a certificate is renewed.

use crate::control::{connect_error::ConnectError, tunnels::context::TunnelContext};
use causeway_certs::{Certificate, EdgeIdentity};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::sleep;

/// The wall clock is looked at this often: timers stand still while a machine is suspended.
pub(super) const LOOK: Duration = Duration::from_hours(1);

/// When a certificate is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::control) struct RenewalSchedule {
    pub(in crate::control) renews_at: SystemTime,
    pub(in crate::control) not_after: SystemTime,
}

impl RenewalSchedule {
    /// For a certificate that came at `since`, if that is known better than from the certificate, whose life
    /// begins before it was issued. `random`, from 0 to 1, spreads a fleet that joined at once: earlier only.
    pub(in crate::control) fn of(identity: &EdgeIdentity, since: SystemTime, random: f64) -> Self {
        let (begins, not_after) = dates(identity);
        Self::new(begins.max(since), not_after, random)
    }

    /// Returns the time by which an external CA should have renewed the certificate: cert-manager does so after two thirds,
    /// Vault's agent after nine tenths.
    pub(in crate::control) fn given(identity: &EdgeIdentity) -> Self {
        let (begins, not_after) = dates(identity);
        let life = not_after.duration_since(begins).unwrap_or_default();
        Self {
            renews_at: not_after - life / 20,
            not_after,
        }
    }

    pub(in crate::control) fn new(begins: SystemTime, not_after: SystemTime, random: f64) -> Self {
        let life = not_after.duration_since(begins).unwrap_or_default();
        let share = 2.0 / 3.0 - random.clamp(0.0, 1.0) / 15.0;
        Self {
            renews_at: begins.min(not_after) + life.mul_f64(share),
            not_after,
        }
    }

    pub(in crate::control) fn tell(&self, links: &TunnelContext) {
        let ends = self.not_after.duration_since(UNIX_EPOCH);
        let ends = ends.unwrap_or_default().as_secs();
        links.metrics.certificate_ends(ends);
        links.state.certificate(self.not_after, self.renews_at);
    }

    /// Returns when the certificate is to be renewed by this clock.
    pub(in crate::control) async fn wait(&self, clock: impl Fn() -> SystemTime) {
        loop {
            let left = self.renews_at.duration_since(clock()).unwrap_or_default();
            if left.is_zero() {
                return;
            }
            sleep(left.min(LOOK)).await;
        }
    }

    /// Returns the error to report: time does not mend a certificate that has ended, whatever error the gateway returned.
    pub(in crate::control) fn weigh(&self, trouble: ConnectError, now: SystemTime) -> ConnectError {
        if now <= self.not_after {
            return trouble;
        }
        ConnectError::unwelcome(format!(
            "this node's certificate expired at {}, unless this machine's clock is wrong (it is {}): rejoin \
             with a new token of `causeway token create`, with --join or join_file ({})",
            humantime::format_rfc3339_seconds(self.not_after),
            humantime::format_rfc3339_seconds(now),
            trouble.what(),
        ))
    }
}

/// First and last second of the certificate.
pub(super) fn dates(identity: &EdgeIdentity) -> (SystemTime, SystemTime) {
    let leaf = identity.leaf.chain().first();
    // The certificate was already parsed when the leaf was created.
    let leaf = leaf.and_then(|leaf| Certificate::read(leaf).ok());
    let leaf = leaf.unwrap_or_default();
    let moment = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    (moment(leaf.not_before), moment(leaf.not_after))
}
