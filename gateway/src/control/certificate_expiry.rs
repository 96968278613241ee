//! Certificates in use: the expiry metric, and warnings before the expiry.
//!
//! Certificates that this gateway issues and renews itself cause a warning only if their renewal has failed.

use crate::metrics::Metrics;
use causeway_certs::Certificate;
use rustls_pki_types::{CertificateDer, UnixTime};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};
use tokio::time::sleep;

/// Time between two checks. A timer does not advance while a machine is suspended.
const CHECK_INTERVAL: Duration = Duration::from_hours(1);
/// Time between two warnings about one certificate, in seconds.
const REPEAT_AFTER: u64 = 24 * 3600;
/// Time before the expiry at which warnings about a certificate begin, in seconds.
const WARN_BEFORE: u64 = 30 * 24 * 3600;
/// Time before the expiry at which warnings about a certificate that this gateway renews begin, in seconds. A certificate of
/// seven days is normally renewed long before.
const OWN_WARN_BEFORE: u64 = 24 * 3600;

/// Certificate that the gateway presents or trusts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CertificateInUse {
    /// Use of the certificate, such as `tunnel` or `listener_client_ca:NAME`.
    pub used_for: String,
    /// Its common name, or else its first URI.
    pub subject: String,
    /// Serial number, in hexadecimal.
    pub serial: String,
    /// Start of its validity, in Unix time.
    #[serde(skip)]
    pub not_before: u64,
    /// End of its validity (RFC 3339).
    #[serde(serialize_with = "rfc3339")]
    #[schemars(with = "String")]
    pub not_after: u64,
    /// Its file, if an operator or an external CA provides it.
    pub file: Option<PathBuf>,
    /// Whether this gateway issues and renews it.
    pub own: bool,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes the field by reference"
)]
fn rfc3339<S: Serializer>(seconds: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&date(*seconds))
}

fn date(seconds: u64) -> impl fmt::Display {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds))
}

impl CertificateInUse {
    /// Reads a certificate; returns `None` if it cannot be parsed.
    pub fn read(
        used_for: impl Into<String>,
        certificate: &CertificateDer<'_>,
        file: Option<PathBuf>,
    ) -> Option<Self> {
        let facts = Certificate::parse(certificate).ok()?;
        let serial = facts.serial_hex();
        let subject = facts.common_name.or_else(|| facts.uris.into_iter().next());
        Some(Self {
            used_for: used_for.into(),
            subject: subject.unwrap_or_default(),
            serial,
            not_before: facts.not_before,
            not_after: facts.not_after,
            file,
            own: false,
        })
    }

    /// Returns this entry, marked as a certificate that this gateway issues and renews.
    #[must_use]
    pub fn issued_by_us(self) -> Self {
        Self { own: true, ..self }
    }

    /// Returns the remaining seconds if the certificate expires soon enough for a warning.
    fn ends_soon(&self, now: u64) -> Option<u64> {
        let left = self.not_after.saturating_sub(now);
        // A short-lived certificate (one day) must not cause a warning from its start.
        let life = self.not_after.saturating_sub(self.not_before);
        let warn_within = if self.own {
            OWN_WARN_BEFORE
        } else {
            WARN_BEFORE.min(life / 4)
        };
        (left <= warn_within).then_some(left)
    }
}

/// Function that lists the certificates in use, unless a reload is under way.
type ListFn = dyn Fn() -> Option<Vec<CertificateInUse>> + Send + Sync;

/// Inventory of the certificates in use.
#[derive(Clone)]
pub struct CertificateInventory(pub Arc<ListFn>);

impl fmt::Debug for CertificateInventory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inventory")
    }
}

impl CertificateInventory {
    /// Returns all certificates in use, or `None` while a reload is under way. Never waits for a disk.
    pub fn list(&self) -> Option<Vec<CertificateInUse>> {
        (self.0)()
    }

    /// Sets the metric to the current expiry times. Of several certificates with one use, the earliest expiry counts.
    pub fn update_metrics(&self, metrics: &Metrics) {
        let Some(all) = self.list() else { return };
        let mut first_expiry: BTreeMap<String, u64> = BTreeMap::new();
        for certificate in all {
            let ends = first_expiry.entry(certificate.used_for).or_insert(u64::MAX);
            *ends = certificate.not_after.min(*ends);
        }
        metrics.set_certificate_expiries(first_expiry);
    }

    /// Logs warnings about certificates that expire soon. Never ends.
    pub(crate) async fn watch(self) {
        let mut warned = BTreeMap::new();
        loop {
            let now = UnixTime::now().as_secs();
            for certificate in select_expiring(&self.list().unwrap_or_default(), &mut warned, now) {
                let CertificateInUse {
                    used_for,
                    subject,
                    not_after,
                    file,
                    ..
                } = certificate;
                let (ends, file) = (date(*not_after), file.as_deref().and_then(Path::to_str));
                if *not_after < now {
                    tracing::error!(used_for, subject, %ends, file, "a certificate has expired");
                } else {
                    let left = Duration::from_secs(not_after.saturating_sub(now) / 60 * 60);
                    let left = humantime::format_duration(left);
                    tracing::warn!(used_for, subject, %ends, %left, file, "a certificate expires soon");
                }
            }
            sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Returns the certificates to warn about now, and records the warnings.
fn select_expiring<'a>(
    all: &'a [CertificateInUse],
    warned: &mut BTreeMap<(String, String, u64), u64>,
    now: u64,
) -> Vec<&'a CertificateInUse> {
    let is_due = |certificate: &&CertificateInUse| {
        if certificate.ends_soon(now).is_none() {
            return false;
        }
        let key = (
            certificate.used_for.clone(),
            certificate.subject.clone(),
            certificate.not_after,
        );
        let has_ended = certificate.not_after < now;
        let last_warning = warned.get(&key).copied();
        let repeat_after =
            if has_ended && last_warning.is_some_and(|last| last <= certificate.not_after) {
                // The end of the validity causes a warning immediately.
                0
            } else {
                REPEAT_AFTER
            };
        if last_warning.is_some_and(|last| now < last.saturating_add(repeat_after)) {
            return false;
        }
        warned.insert(key, now);
        true
    };
    all.iter().filter(is_due).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 24 * 3600;

    fn certificate(life: u64, own: bool) -> CertificateInUse {
        CertificateInUse {
            used_for: "app:10250".to_owned(),
            subject: "causeway-gateway".to_owned(),
            serial: "4f0a".to_owned(),
            not_before: 1000 * DAY,
            not_after: 1000 * DAY + life,
            file: None,
            own,
        }
    }

    #[test]
    fn warnings_begin_thirty_days_before_expiry_and_repeat_daily() {
        let mut warned = BTreeMap::new();
        let all = [certificate(365 * DAY, false)];
        let end = all[0].not_after;
        let mut at = |now: u64| select_expiring(&all, &mut warned, now).len();
        assert_eq!(at(end - 31 * DAY), 0);
        assert_eq!(at(end - 30 * DAY), 1);
        assert_eq!(at(end - 30 * DAY + 3600), 0);
        assert_eq!(at(end - 29 * DAY), 1);
        assert_eq!(at(end - 3600), 1);
        assert_eq!(at(end + 1), 1);
        assert_eq!(at(end + 3600), 0);
        assert_eq!(at(end + 2 * DAY), 1);
    }

    #[test]
    fn short_lifetimes_warn_in_the_last_quarter_own_ones_last_day() {
        let short = certificate(DAY, false);
        assert_eq!(short.ends_soon(short.not_after - DAY / 3), None);
        assert!(short.ends_soon(short.not_after - DAY / 5).is_some());
        let own = certificate(7 * DAY, true);
        assert_eq!(own.ends_soon(own.not_after - 3 * DAY), None);
        assert!(own.ends_soon(own.not_after - DAY / 2).is_some());
    }
}
