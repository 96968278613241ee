//! Leader election among several gateways: the leader holds a Lease (`coordination.k8s.io/v1`).
//!
//! 1. A candidate takes a Lease that has no holder, or that has not changed for its duration. The API lets only one writer
//!    succeed.
//! 2. The holder renews the Lease. It loses the Lease if no renewal succeeds for two thirds of the duration, or if another
//!    candidate holds it.
//! 3. A gateway that has lost the Lease is a candidate again. At shutdown the Lease is released, so that no other gateway has
//!    to wait.
//!
//! The age of a Lease is measured here, from the time when a change was observed. As in client-go, clocks of different
//! machines are never compared. Libraries for leader election on top of kube compare clocks, or spawn tasks without an owner.

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
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the release of the Lease at shutdown.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Elector for one Lease. It knows whether this candidate holds the Lease.
pub(crate) struct LeaderElector {
    api: Api<v1::Lease>,
    name: String,
    /// Identity of this candidate, different for each process.
    identity: String,
    lease_duration: Duration,
    observed: Option<ObservedLease>,
    /// Start of the last successful renewal, while this candidate holds the Lease.
    renewed_at: Option<Instant>,
    /// Subject of the Lease in the log.
    subject: &'static str,
    failure_log: LogThrottle,
}

/// A Lease as it was observed last.
struct ObservedLease {
    lease: v1::Lease,
    /// Local time when the last change was observed.
    changed_at: Instant,
}

impl LeaderElector {
    /// Returns an elector that does not hold the Lease. Sends no request. `subject` names in the log what the Lease is for.
    pub(crate) fn new(
        client: Client,
        subject: &'static str,
        (namespace, name): (&str, &str),
        identity: String,
        lease_duration: Duration,
    ) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity,
            lease_duration,
            observed: None,
            renewed_at: None,
            subject,
            failure_log: LogThrottle::new("acquiring a lease"),
        }
    }

    /// Waits until this candidate holds the Lease.
    pub(crate) async fn acquire(&mut self) {
        loop {
            let outcome = timeout(
                REQUEST_TIMEOUT.min(self.lease_duration),
                self.try_acquire_or_renew(),
            )
            .await;
            match outcome.map_err(|_| LeaseError::Timeout).flatten() {
                Ok(true) => return self.failure_log.log_recovery(),
                Ok(false) => self.failure_log.log_recovery(),
                // Two candidates have written at once.
                Err(LeaseError::Conflict) => {}
                Err(failure) => self.log_failure(&failure),
            }
            // Candidates that wait must not send their requests at the same time.
            sleep(
                self.retry_period()
                    .mul_f64(1.0 + rand::random::<f64>() / 5.0),
            )
            .await;
        }
    }

    /// Renews the Lease. Returns the reason when the Lease is lost.
    pub(crate) async fn renew_until_lost(&mut self) -> String {
        loop {
            sleep(self.retry_period()).await;
            let renewed_at = self.renewed_at.unwrap_or_else(Instant::now);
            let expiry = renewed_at + self.lease_duration * 2 / 3;
            let deadline = expiry.min(Instant::now() + REQUEST_TIMEOUT);
            let failure = match timeout_at(deadline, self.try_acquire_or_renew()).await {
                Ok(Ok(true)) => {
                    self.failure_log.log_recovery();
                    continue;
                }
                Ok(Ok(false)) => {
                    self.renewed_at = None;
                    return format!("{} holds it now", self.holder().unwrap_or("no gateway"));
                }
                Ok(Err(failure)) => failure,
                Err(_) => LeaseError::Timeout,
            };
            if Instant::now() >= expiry {
                self.renewed_at = None;
                return failure.to_string();
            }
            self.log_failure(&failure);
        }
    }

    fn log_failure(&mut self, failure: &LeaseError) {
        let why = format!("the lease of {}: {failure}", self.subject);
        self.failure_log.log_failure(&why);
    }

    /// Releases the Lease, if this candidate holds it.
    pub(crate) async fn release(&mut self) {
        let (Some(_), Some(observed)) = (self.renewed_at.take(), &self.observed) else {
            return;
        };
        let mut lease = observed.lease.clone();
        let spec = lease.spec.get_or_insert_default();
        // The value that client-go uses.
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(micro_time_now());
        let parameters = PostParams::default();
        let replace = self.api.replace(&self.name, &parameters, &lease);
        match timeout(RELEASE_TIMEOUT, replace).await {
            Ok(Ok(_)) => tracing::info!("the lease of {} was released", self.subject),
            Ok(Err(error)) => tracing::warn!(
                why = error_message(&error),
                "the lease of {} was not released",
                self.subject
            ),
            Err(_) => tracing::warn!("the lease of {} was not released in time", self.subject),
        }
    }

    /// Returns the holder, as far as it is known.
    pub(crate) fn holder(&self) -> Option<&str> {
        let spec = self.observed.as_ref()?.lease.spec.as_ref()?;
        spec.holder_identity
            .as_deref()
            .filter(|name| !name.is_empty())
    }

    /// Returns the interval of attempts: 2 s of a duration of 15 s, as in client-go.
    fn retry_period(&self) -> Duration {
        self.lease_duration * 2 / 15
    }

    /// Takes or renews the Lease. Returns whether this candidate holds it then.
    async fn try_acquire_or_renew(&mut self) -> Result<bool, LeaseError> {
        let started = Instant::now();
        if self.renewed_at.is_some()
            && let Some(observed) = &self.observed
        {
            // No other gateway writes the lease while this gateway holds it: one request is enough.
            match self.write(Some(observed.lease.clone())).await {
                Err(LeaseError::Conflict) => {}
                written => {
                    let written = written?;
                    return Ok(self.record_renewal(started, written));
                }
            }
        }
        let found = self.api.get_opt(&self.name).await?;
        let Some(found) = found else {
            let written = self.write(None).await?;
            return Ok(self.record_renewal(started, written));
        };
        self.observe(&found);
        if !self.is_free(Instant::now()) {
            return Ok(false);
        }
        let written = self.write(Some(found)).await?;
        Ok(self.record_renewal(started, written))
    }

    /// Records the time of a change of the Lease.
    fn observe(&mut self, found: &v1::Lease) {
        let observed = self.observed.as_ref();
        if observed.is_none_or(|seen| seen.lease.spec != found.spec) {
            self.observed = Some(ObservedLease {
                lease: found.clone(),
                changed_at: Instant::now(),
            });
        }
    }

    /// Records a successful attempt that began at `started`.
    fn record_renewal(&mut self, started: Instant, written: v1::Lease) -> bool {
        self.observe(&written);
        // Replaced even if only the version has changed.
        if let Some(observed) = &mut self.observed {
            observed.lease = written;
        }
        self.renewed_at = Some(started);
        true
    }

    /// Whether the Lease can be taken: it is ours, has no holder, or has not changed for its duration.
    fn is_free(&self, now: Instant) -> bool {
        let Some(holder) = self.holder() else {
            return true;
        };
        let Some(observed) = &self.observed else {
            return true;
        };
        let spec = observed.lease.spec.as_ref();
        let duration = spec.and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok());
        let duration = duration.map_or(self.lease_duration, Duration::from_secs);
        holder == self.identity || now.duration_since(observed.changed_at) >= duration
    }

    async fn write(&self, previous: Option<v1::Lease>) -> Result<v1::Lease, LeaseError> {
        let parameters = PostParams::default();
        let lease = self.owned_lease(previous);
        let written = if lease.metadata.resource_version.is_some() {
            self.api.replace(&self.name, &parameters, &lease).await
        } else {
            self.api.create(&parameters, &lease).await
        };
        Ok(written?)
    }

    /// Returns the Lease with this candidate as its holder.
    fn owned_lease(&self, previous: Option<v1::Lease>) -> v1::Lease {
        let mut lease = previous.unwrap_or_else(|| v1::Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let (is_new, now) = (lease.spec.is_none(), micro_time_now());
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            let transitions = spec.lease_transitions.unwrap_or_default();
            spec.lease_transitions = Some(transitions.saturating_add(i32::from(!is_new)));
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(self.lease_duration.as_secs()).ok();
        spec.renew_time = Some(now);
        lease
    }
}

/// Returns the time for the Lease. Other machines display it, but do not calculate with it.
fn micro_time_now() -> MicroTime {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    let micros = elapsed.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or_default()
    });
    MicroTime(Timestamp::from_microsecond(micros).unwrap_or_default())
}

/// Error of a request for the Lease.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    /// Another candidate has written or deleted the Lease meanwhile.
    #[error("another process has changed it in the meantime")]
    Conflict,
    #[error("{}", error_message(.0))]
    Api(kube::Error),
    #[error("the cluster's API did not answer in time")]
    Timeout,
}

impl From<kube::Error> for LeaseError {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status)
                if status.is_conflict() || status.is_already_exists() || status.is_not_found() =>
            {
                Self::Conflict
            }
            _ => Self::Api(error),
        }
    }
}

#[cfg(test)]
mod tests;
