//! Leader election among several gateways: the leader holds a Lease (`coordination.k8s.io/v1`).
//!
//! 1. A candidate takes a Lease that has no holder, or that has not changed for its duration; the API lets one writer win.
//! 2. The holder renews the Lease. It loses the Lease if no renewal succeeds for two thirds of the duration, or if another
//!    candidate holds it.
//! 3. A gateway that has lost the Lease stands by. At shutdown the Lease is released, so that no other gateway has to wait.
//!
//! The age of a Lease is measured here, from the time when a change was seen: clocks of other machines are never compared, as in
//! client-go. Libraries for this on top of kube compare clocks, or spawn tasks without an owner.

use crate::{client::error_message, log_throttle::LogThrottle};
use k8s_openapi::{
    api::coordination::v1,
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Time limit of one request, if the Lease itself leaves more time.
const BOUND: Duration = Duration::from_secs(5);
/// Time limit for the release of the Lease at shutdown.
const FAREWELL: Duration = Duration::from_secs(2);

/// Elector with one Lease, and whether this candidate holds it.
pub(crate) struct LeaderElector {
    api: Api<v1::Lease>,
    name: String,
    /// Identity of this candidate, different for each process.
    identity: String,
    lasts: Duration,
    seen: Option<ObservedLease>,
    /// Start of the last successful renewal, while this candidate holds the Lease.
    renewed: Option<Instant>,
    trouble: LogThrottle,
}

/// A Lease as it was seen.
struct ObservedLease {
    lease: v1::Lease,
    /// Time of the last change that was seen, by the local clock.
    since: Instant,
}

impl LeaderElector {
    /// Returns an elector that does not hold the Lease. Sends no request.
    pub(crate) fn new(
        client: Client,
        (namespace, name): (&str, &str),
        identity: String,
        lasts: Duration,
    ) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity,
            lasts,
            seen: None,
            renewed: None,
            trouble: LogThrottle::new("acquiring the lease of the hosts file"),
        }
    }

    /// Waits until this candidate holds the Lease.
    pub(crate) async fn acquire(&mut self) {
        loop {
            let asked = timeout(BOUND.min(self.lasts), self.attempt()).await;
            match asked.map_err(|_| LeaseError::Silent).flatten() {
                Ok(true) => return self.trouble.over(),
                Ok(false) => self.trouble.over(),
                // Two have tried at once.
                Err(LeaseError::Beaten) => {}
                Err(failure) => self.trouble.say(&failure.to_string()),
            }
            // Candidates that wait must not send their requests at the same time.
            sleep(self.pause().mul_f64(1.0 + rand::random::<f64>() / 5.0)).await;
        }
    }

    /// Renews the Lease. Returns the reason when the Lease is lost.
    pub(crate) async fn keep(&mut self) -> String {
        loop {
            sleep(self.pause()).await;
            let renewed = self.renewed.unwrap_or_else(Instant::now);
            let end = renewed + self.lasts * 2 / 3;
            let bound = end.min(Instant::now() + BOUND);
            let failure = match timeout_at(bound, self.attempt()).await {
                Ok(Ok(true)) => {
                    self.trouble.over();
                    continue;
                }
                Ok(Ok(false)) => {
                    self.renewed = None;
                    return format!("{} holds it now", self.holder().unwrap_or("no gateway"));
                }
                Ok(Err(failure)) => failure,
                Err(_) => LeaseError::Silent,
            };
            if Instant::now() >= end {
                self.renewed = None;
                return failure.to_string();
            }
            self.trouble.say(&failure.to_string());
        }
    }

    /// Releases the Lease, if this candidate holds it.
    pub(crate) async fn release(&mut self) {
        let (Some(_), Some(seen)) = (self.renewed.take(), &self.seen) else {
            return;
        };
        let mut lease = seen.lease.clone();
        let spec = lease.spec.get_or_insert_default();
        // The default of client-go.
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(now());
        let parameters = PostParams::default();
        let put = self.api.replace(&self.name, &parameters, &lease);
        match timeout(FAREWELL, put).await {
            Ok(Ok(_)) => tracing::info!("the lease of the hosts file was released"),
            Ok(Err(error)) => tracing::warn!(
                why = error_message(&error),
                "the lease of the hosts file was not released"
            ),
            Err(_) => tracing::warn!("the lease of the hosts file was not released in time"),
        }
    }

    /// Returns the holder, as far as it is known.
    pub(crate) fn holder(&self) -> Option<&str> {
        let spec = self.seen.as_ref()?.lease.spec.as_ref()?;
        spec.holder_identity
            .as_deref()
            .filter(|name| !name.is_empty())
    }

    /// 2 s of 15, as client-go has it.
    fn pause(&self) -> Duration {
        self.lasts * 2 / 15
    }

    /// Takes or renews the Lease. Returns whether this candidate holds it then.
    async fn attempt(&mut self) -> Result<bool, LeaseError> {
        let begun = Instant::now();
        if self.renewed.is_some()
            && let Some(seen) = &self.seen
        {
            // No other gateway writes the lease while this gateway holds it: one request is enough.
            match self.write(Some(seen.lease.clone())).await {
                Err(LeaseError::Beaten) => {}
                written => {
                    let written = written?;
                    return Ok(self.own(begun, written));
                }
            }
        }
        let found = self.api.get_opt(&self.name).await?;
        let Some(found) = found else {
            let written = self.write(None).await?;
            return Ok(self.own(begun, written));
        };
        self.see(&found);
        if !self.is_free(Instant::now()) {
            return Ok(false);
        }
        let written = self.write(Some(found)).await?;
        Ok(self.own(begun, written))
    }

    /// Notes when it changed.
    fn see(&mut self, found: &v1::Lease) {
        let known = self.seen.as_ref();
        if known.is_none_or(|seen| seen.lease.spec != found.spec) {
            self.seen = Some(ObservedLease {
                lease: found.clone(),
                since: Instant::now(),
            });
        }
    }

    /// Records a successful attempt that began at this time.
    fn own(&mut self, begun: Instant, written: v1::Lease) -> bool {
        self.see(&written);
        // Replaced even if only the version has changed.
        if let Some(seen) = &mut self.seen {
            seen.lease = written;
        }
        self.renewed = Some(begun);
        true
    }

    /// Whether the Lease can be taken: it is ours, has no holder, or has not changed for its duration.
    fn is_free(&self, now: Instant) -> bool {
        let Some(holder) = self.holder() else {
            return true;
        };
        let Some(seen) = &self.seen else {
            return true;
        };
        let spec = seen.lease.spec.as_ref();
        let lasts = spec.and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok());
        let lasts = lasts.map_or(self.lasts, Duration::from_secs);
        holder == self.identity || now.duration_since(seen.since) >= lasts
    }

    async fn write(&self, before: Option<v1::Lease>) -> Result<v1::Lease, LeaseError> {
        let parameters = PostParams::default();
        let lease = self.ours(before);
        let written = if lease.metadata.resource_version.is_some() {
            self.api.replace(&self.name, &parameters, &lease).await
        } else {
            self.api.create(&parameters, &lease).await
        };
        Ok(written?)
    }

    /// Returns the Lease as this candidate would hold it.
    fn ours(&self, before: Option<v1::Lease>) -> v1::Lease {
        let mut lease = before.unwrap_or_else(|| v1::Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let (new, now) = (lease.spec.is_none(), now());
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            let transitions = spec.lease_transitions.unwrap_or_default();
            spec.lease_transitions = Some(transitions.saturating_add(i32::from(!new)));
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(self.lasts.as_secs()).ok();
        spec.renew_time = Some(now);
        lease
    }
}

/// Returns the time for the Lease. Other machines display it, but do not calculate with it.
fn now() -> MicroTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let micros = since.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or_default()
    });
    MicroTime(Timestamp::from_microsecond(micros).unwrap_or_default())
}

/// Error of a request for the Lease.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    /// Another candidate has written or deleted the Lease meanwhile.
    #[error("another process has changed it in the meantime")]
    Beaten,
    #[error("{}", error_message(.0))]
    Asked(kube::Error),
    #[error("the cluster's API did not answer in time")]
    Silent,
}

impl From<kube::Error> for LeaseError {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status)
                if status.is_conflict() || status.is_already_exists() || status.is_not_found() =>
            {
                Self::Beaten
            }
            _ => Self::Asked(error),
        }
    }
}

#[cfg(test)]
mod tests;
