//! Renewal: replaces this node's certificate before it expires, with a new key.
//!
//! 1. Wait until two thirds of the certificate's lifetime are over, by the wall clock. The clock is checked each hour,
//!    because a machine may be suspended or get its time late. A gateway may also request a renewal, because another root
//!    signs now.
//! 2. Send a request to a gateway on a separate connection, which the current certificate authenticates.
//! 3. Check the response and store it, and only then dial with it. The certificate on the disk is valid whenever this process
//!    is killed.
//! 4. After an error, wait as for a tunnel, and send a request with another key. Once the certificate has expired, request
//!    one from the cluster, if the cluster authenticates this node (`csr_bootstrap`).
//!
//! Then new tunnels replace the open ones, which keep their streams until these end (`tunnels`).

pub(super) mod schedule;

use super::{
    connect_error::{ConnectError, IdentityRefusal},
    csr_bootstrap,
    dial::GatewayConnector,
    enrol_client::{self, EnrolRequest, EnrolRequestError},
    external_certificate,
    identity_store::IdentityStore,
    rejoin::{Rejoin, RejoinOutcome, RejoinReason},
    tunnels::context::TunnelContext,
};
use causeway_certs::{
    EdgeIdentity, PrivateKey,
    verify::{control_client, tunnel_client},
};
use causeway_rt::backoff::Backoff;
use schedule::{CLOCK_CHECK_INTERVAL, RenewalSchedule, lifetime, validity};
use std::{
    fmt::Display,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{info, warn};

/// Minimum time between two renewals, however short the lifetime of the certificates is. Each costs the gateway a signature
/// and two writes.
const MIN_RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

/// Renews the certificate for as long as it is polled. With an external CA, applies the certificates of `external_identity`
/// instead.
pub(crate) async fn run(
    context: Arc<TunnelContext>,
    identity_store: IdentityStore,
    external_identity: watch::Receiver<Option<EdgeIdentity>>,
) {
    if identity_store.identity().is_external {
        return external_certificate::run(context, identity_store, external_identity).await;
    }
    let mut schedule =
        RenewalSchedule::for_identity(&identity_store.identity(), UNIX_EPOCH, rand::random());
    schedule.publish(&context);
    let mut renewal_requests = context.renewal_requests.subscribe();
    let mut refusals = context.rejoin.refusals.subscribe();
    let mut rejoin = Rejoin::new(&context, &identity_store);
    let mut earliest = Instant::now();
    if context.rejoin.is_requested && !rejoin_on_request(&mut rejoin, context.backoff()).await {
        info!("--rejoin failed: keeping the current identity of this node");
    }
    loop {
        tokio::select! {
            () = async {
                sleep_until(earliest).await;
                schedule.wait(SystemTime::now).await;
            } => {
                renew_until_success(&context, &identity_store, (&schedule, &mut rejoin)).await;
            }
            () = wait_for_renewal_request(&mut renewal_requests) => {
                renew_until_success(&context, &identity_store, (&schedule, &mut rejoin)).await;
            }
            refusal = wait_for_refusal(&mut refusals) => {
                let attempt = rejoin.attempt(RejoinReason::Refused(refusal)).await;
                if !matches!(attempt, RejoinOutcome::Replaced) {
                    continue;
                }
            }
        }
        let (identity, now) = (identity_store.identity(), SystemTime::now());
        schedule = RenewalSchedule::for_identity(&identity, now, rand::random());
        schedule.publish(&context);
        earliest = Instant::now();
        if let Some(pause) = schedule.pause_after_issue(lifetime(&identity), now) {
            earliest += pause;
            warn!(
                now = %humantime::format_rfc3339_seconds(now),
                "the new certificate is due for renewal already, because this machine's clock is ahead of the gateway's; check the clock"
            );
        }
        info!(
            not_after = %humantime::format_rfc3339_seconds(schedule.not_after),
            "this node's certificate is renewed"
        );
        // Requests from before this renewal are fulfilled.
        renewal_requests.mark_unchanged();
        sleep(MIN_RENEWAL_INTERVAL).await;
    }
}

/// Replaces the identity because the owner requests it. Returns false if nothing in the configuration can replace it.
async fn rejoin_on_request(rejoin: &mut Rejoin<'_>, mut backoff: Backoff) -> bool {
    loop {
        match rejoin.attempt(RejoinReason::Requested).await {
            RejoinOutcome::Replaced => return true,
            RejoinOutcome::Unchanged => return false,
            RejoinOutcome::Failed(error) => {
                sleep(error.delay(&mut backoff, rand::random())).await;
            }
        }
    }
}

/// Waits until gateways refuse the identity, and returns the kind of the refusal.
async fn wait_for_refusal(
    refusals: &mut watch::Receiver<Option<IdentityRefusal>>,
) -> IdentityRefusal {
    loop {
        // The sender lives at least as long as the tunnels.
        let _ = refusals.changed().await;
        if let Some(refusal) = *refusals.borrow_and_update() {
            return refusal;
        }
    }
}

/// Waits for a gateway's request for a renewal, and then for a random part of the time that the gateway allows.
async fn wait_for_renewal_request(renewal_requests: &mut watch::Receiver<Duration>) {
    // The sender lives at least as long as the tunnels.
    let _ = renewal_requests.changed().await;
    let within = *renewal_requests.borrow_and_update();
    sleep(within.min(CLOCK_CHECK_INTERVAL).mul_f64(rand::random())).await;
}

/// Requests a certificate until the request succeeds and all later dials use the new certificate.
async fn renew_until_success(
    context: &TunnelContext,
    identity_store: &IdentityStore,
    (schedule, rejoin): (&RenewalSchedule, &mut Rejoin<'_>),
) {
    let backoff_config = &context.config.backoff;
    let mut backoff = Backoff::new(backoff_config.silent_max, backoff_config.refused_max);
    loop {
        let result = renew(context, identity_store, rejoin).await;
        let outcome = result
            .as_ref()
            .map_or_else(ConnectError::label, |()| "renewed");
        context.metrics.count_renewal(outcome);
        let Err(error) = result else {
            return;
        };
        let error = match context.csr_client {
            // After expiry the cluster issues a new certificate.
            Some(_) => error,
            None => schedule.error_to_report(error, SystemTime::now()),
        };
        let delay = error.delay(&mut backoff, rand::random());
        warn!(
            reason = error.label(),
            what = error.detail(),
            retry_in = ?delay,
            "this node's certificate is not renewed"
        );
        context
            .status
            .set_renewal_error(error.detail(), error.is_refusal(), delay);
        sleep(delay).await;
    }
}

async fn renew(
    context: &TunnelContext,
    identity_store: &IdentityStore,
    rejoin: &mut Rejoin<'_>,
) -> Result<(), ConnectError> {
    let old = identity_store.identity();
    let result = match &context.csr_client {
        // Gateways do not renew expired certificates.
        Some(cluster) if validity(&old).1 < SystemTime::now() => {
            let on_progress =
                |why: &str| context.status.set_renewal_error(why, true, Duration::ZERO);
            csr_bootstrap::submit_and_wait(
                &**cluster,
                (&context.config, identity_store.store()),
                &on_progress,
            )
            .await
        }
        _ => request_renewal(context, &old).await,
    };
    let new = match result {
        Ok(new) => new,
        Err(error) => {
            let Some(refusal) = error.identity_refusal() else {
                return Err(error);
            };
            return match rejoin.attempt(RejoinReason::Refused(refusal)).await {
                RejoinOutcome::Replaced => Ok(()),
                RejoinOutcome::Unchanged | RejoinOutcome::Failed(_) => Err(error),
            };
        }
    };
    // Nothing is stored that cannot be used.
    tunnel_client(&new).map_err(local_error)?;
    // The gateway's own certificate was verified with a root trusted before.
    let (leaf, roots) = (new.leaf, new.roots);
    identity_store
        .update(|identity| (identity.leaf, identity.roots) = (leaf, roots))
        .await
        .map_err(local_error)?;
    context.update_tls().map_err(local_error)?;
    context.reconnect.send_replace(());
    Ok(())
}

async fn request_renewal(
    context: &TunnelContext,
    old: &EdgeIdentity,
) -> Result<EdgeIdentity, ConnectError> {
    let key = PrivateKey::generate().map_err(local_error)?;
    let request = EnrolRequest::new(&key).map_err(local_error)?;
    let tls = control_client(old).map_err(local_error)?;
    let connector = GatewayConnector::new(enrol_client::http1(&tls), &context.config);
    let gateways = context.gateways.all();
    let response = request.send(&connector, &gateways, "/v1/renew").await;
    let invalid_response = |why: &dyn Display| {
        ConnectError::unwelcome(format!(
            "the gateway's response is not a certificate: {why}"
        ))
    };
    let granted = response.map_err(|error| match error {
        EnrolRequestError::Retryable(error) => error,
        EnrolRequestError::MalformedResponse(why) => invalid_response(&why),
        EnrolRequestError::Refused { reason, detail } => ConnectError::not_accepted(format!(
            "the gateway refuses to renew this node's certificate ({reason}): {detail}"
        )),
    })?;
    let new = EdgeIdentity::new(&granted.root, &granted.certificate, &key.key_pem());
    let new = new.map_err(|error| invalid_response(&error))?;
    if new.node != old.node {
        return Err(invalid_response(&format_args!(
            "it is for node {}",
            new.node
        )));
    }
    // A rotation trusts the new root in addition to the old one first.
    if !new.roots.iter().any(|root| old.roots.contains(root)) {
        return Err(invalid_response(&"it is of another CA"));
    }
    Ok(new)
}

/// Returns an error whose cause is this machine. It backs off at the maximum, because certificates that cannot be stored must
/// not be requested often.
fn local_error(why: impl Display) -> ConnectError {
    ConnectError::unwelcome(format!("a new certificate cannot be used: {why}"))
}

#[cfg(test)]
mod tests;
