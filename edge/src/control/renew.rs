//! Renewal: before this node's certificate ends, a new one for a new key.
//!
//! 1. wait until two thirds of the certificate's life are over, by the wall clock, which is looked at anew each
//!    hour: a machine may sleep, or get its time late; or until a gateway asks, since another root signs now;
//! 2. ask a gateway over a connection of its own, on which the certificate before says who asks;
//! 3. check the answer, store it, and only then dial with it: whenever this process is killed, what is
//!    on the disk is good;
//! 4. on trouble wait as for a tunnel, and ask again with another key; once the certificate has ended, ask the cluster, where
//!    that says who this node is (`vouch`).
//!
//! Standing tunnels are dialled anew then, and keep their streams until these end (`link`).

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
use schedule::{LOOK, RenewalSchedule, dates};
use std::{
    fmt::Display,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

/// Between two renewals, however short a life the gateway grants: one costs it a signature and two writes.
const APART: Duration = Duration::from_secs(10);

/// Renews the certificate for as long as it is polled; or takes up the one that an external CA has `made`.
pub(crate) async fn run(
    links: Arc<TunnelContext>,
    held: IdentityStore,
    made: watch::Receiver<Option<EdgeIdentity>>,
) {
    if held.identity().given {
        return external_certificate::run(links, held, made).await;
    }
    let mut schedule = RenewalSchedule::of(&held.identity(), UNIX_EPOCH, rand::random());
    schedule.tell(&links);
    let mut asked = links.renewal.subscribe();
    let mut refusals = links.rejoin.refusals.subscribe();
    let mut rejoin = Rejoin::new(&links, &held);
    if links.rejoin.asked && !rejoined(&mut rejoin, links.backoff()).await {
        info!("--rejoin failed: keeping the current identity of this node");
    }
    loop {
        tokio::select! {
            () = schedule.wait(SystemTime::now) => {
                until_renewed(&links, &held, (&schedule, &mut rejoin)).await;
            }
            () = asked_for(&mut asked) => {
                until_renewed(&links, &held, (&schedule, &mut rejoin)).await;
            }
            refusal = refused(&mut refusals) => {
                let attempt = rejoin.attempt(RejoinReason::Refused(refusal)).await;
                if !matches!(attempt, RejoinOutcome::Replaced) {
                    continue;
                }
            }
        }
        schedule = RenewalSchedule::of(&held.identity(), SystemTime::now(), rand::random());
        schedule.tell(&links);
        info!(
            not_after = %humantime::format_rfc3339_seconds(schedule.not_after),
            "this node's certificate is renewed"
        );
        // Requests from before this renewal are fulfilled.
        asked.mark_unchanged();
        sleep(APART).await;
    }
}

/// Replaces the identity, since the owner asks for that. Returns false if nothing that is configured replaces it.
async fn rejoined(rejoin: &mut Rejoin<'_>, mut backoff: Backoff) -> bool {
    loop {
        match rejoin.attempt(RejoinReason::Asked).await {
            RejoinOutcome::Replaced => return true,
            RejoinOutcome::Kept => return false,
            RejoinOutcome::Failed(trouble) => {
                sleep(trouble.delay(&mut backoff, rand::random())).await;
            }
        }
    }
}

/// Returns once gateways have refused the identity.
async fn refused(refusals: &mut watch::Receiver<Option<IdentityRefusal>>) -> IdentityRefusal {
    loop {
        // The sender lives at least as long as the tunnels.
        let _ = refusals.changed().await;
        if let Some(refusal) = *refusals.borrow_and_update() {
            return refusal;
        }
    }
}

/// Returns at some moment within the time in which a gateway wants a new certificate to be had.
async fn asked_for(asked: &mut watch::Receiver<Duration>) {
    // The sender lives at least as long as the tunnels.
    let _ = asked.changed().await;
    let within = *asked.borrow_and_update();
    sleep(within.min(LOOK).mul_f64(rand::random())).await;
}

/// Asks until there is a new certificate and all further dials show it.
async fn until_renewed(
    links: &TunnelContext,
    held: &IdentityStore,
    (schedule, rejoin): (&RenewalSchedule, &mut Rejoin<'_>),
) {
    let bounds = &links.config.backoff;
    let mut backoff = Backoff::new(bounds.silent_max, bounds.refused_max);
    loop {
        let renewed = renew(links, held, rejoin).await;
        let outcome = renewed
            .as_ref()
            .map_or_else(ConnectError::word, |()| "renewed");
        links.metrics.renewal(outcome);
        let Err(trouble) = renewed else {
            return;
        };
        let trouble = match links.cluster {
            // After expiry the cluster issues a new certificate.
            Some(_) => trouble,
            None => schedule.weigh(trouble, SystemTime::now()),
        };
        let delay = trouble.delay(&mut backoff, rand::random());
        warn!(
            reason = trouble.word(),
            what = trouble.what(),
            retry_in = ?delay,
            "this node's certificate is not renewed"
        );
        links
            .state
            .not_renewed(trouble.what(), trouble.is_refusal(), delay);
        sleep(delay).await;
    }
}

async fn renew(
    links: &TunnelContext,
    held: &IdentityStore,
    rejoin: &mut Rejoin<'_>,
) -> Result<(), ConnectError> {
    let old = held.identity();
    let asked = match &links.cluster {
        // Gateways do not renew expired certificates.
        Some(cluster) if dates(&old).1 < SystemTime::now() => {
            let tell = |why: &str| links.state.not_renewed(why, true, Duration::ZERO);
            csr_bootstrap::submit_and_wait(&**cluster, (&links.config, held.store()), &tell).await
        }
        _ => ask(links, &old).await,
    };
    let new = match asked {
        Ok(new) => new,
        Err(trouble) => {
            let Some(refusal) = trouble.identity_refusal() else {
                return Err(trouble);
            };
            return match rejoin.attempt(RejoinReason::Refused(refusal)).await {
                RejoinOutcome::Replaced => Ok(()),
                RejoinOutcome::Kept | RejoinOutcome::Failed(_) => Err(trouble),
            };
        }
    };
    let tls = tunnel_client(&new).map_err(local)?;
    // The gateway's own certificate was verified with a root trusted before.
    let (leaf, roots) = (new.leaf, new.roots);
    held.change(|identity| (identity.leaf, identity.roots) = (leaf, roots))
        .await
        .map_err(local)?;
    links.dialler.identify(tls);
    links.anew.send_replace(());
    Ok(())
}

async fn ask(links: &TunnelContext, old: &EdgeIdentity) -> Result<EdgeIdentity, ConnectError> {
    let key = PrivateKey::generate().map_err(local)?;
    let asking = EnrolRequest::new(&key).map_err(local)?;
    let tls = control_client(old).map_err(local)?;
    let dialler = GatewayConnector::new(enrol_client::http1(&tls), &links.config);
    let gateways = links.gateways.all();
    let asked = asking.ask(&dialler, &gateways, "/v1/renew").await;
    let unsound = |why: &dyn Display| {
        ConnectError::unwelcome(format!(
            "the gateway's response is not a certificate: {why}"
        ))
    };
    let granted = asked.map_err(|failed| match failed {
        EnrolRequestError::Trouble(trouble) => trouble,
        EnrolRequestError::Answer(why) => unsound(&why),
        EnrolRequestError::Refused { reason, detail } => ConnectError::not_accepted(format!(
            "the gateway refuses to renew this node's certificate ({reason}): {detail}"
        )),
    })?;
    let new = EdgeIdentity::new(&granted.root, &granted.certificate, &key.key_pem());
    let new = new.map_err(|error| unsound(&error))?;
    if new.node != old.node {
        return Err(unsound(&format_args!("it is for node {}", new.node)));
    }
    // A rotation trusts the new root in addition to the old one first.
    if !new.roots.iter().any(|root| old.roots.contains(root)) {
        return Err(unsound(&"it is of another CA"));
    }
    Ok(new)
}

/// Returns the error of this machine's own fault: the gateway is not asked for certificates that cannot be stored.
fn local(why: impl Display) -> ConnectError {
    ConnectError::unwelcome(format!("a new certificate cannot be used: {why}"))
}

#[cfg(test)]
mod tests;
