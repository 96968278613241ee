//! Identity that an external CA issues. It is applied when it changes, and monitored so that it does not expire unnoticed.
//!
//! After a change new tunnels are opened, and the old tunnels keep their streams until these end, as after a renewal
//! (`tunnels`).

use super::{
    identity_store::IdentityStore, renew::schedule::RenewalSchedule,
    tunnels::context::TunnelContext,
};
use causeway_certs::{EdgeIdentity, verify::tunnel_client};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

/// Interval between two messages that the certificate is not renewed.
const WARN_INTERVAL: Duration = Duration::from_hours(1);

/// Applies each new `external_identity` for as long as it is polled.
pub(crate) async fn run(
    context: Arc<TunnelContext>,
    identity_store: IdentityStore,
    mut external_identity: watch::Receiver<Option<EdgeIdentity>>,
) {
    // Handles a certificate that arrived before this task started.
    external_identity.mark_changed();
    loop {
        let schedule = RenewalSchedule::for_external_ca(&identity_store.identity());
        schedule.publish(&context);
        tokio::select! {
            changed = external_identity.changed() => if changed.is_err() {
                return;
            },
            () = warn_if_not_renewed(&context, &schedule) => {}
        }
        let next = external_identity.borrow_and_update().clone();
        let Some(next) = next.filter(|next| is_different(&identity_store.identity(), next)) else {
            continue;
        };
        let result = apply_identity(&context, &identity_store, next).await;
        context
            .metrics
            .count_renewal(result.as_ref().map_or("failed", |()| "given"));
        if let Err(why) = result {
            warn!(why, "this node's new certificate cannot be used");
        }
    }
}

fn is_different(before: &EdgeIdentity, next: &EdgeIdentity) -> bool {
    before.leaf != next.leaf || before.roots != next.roots
}

async fn apply_identity(
    context: &TunnelContext,
    identity_store: &IdentityStore,
    next: EdgeIdentity,
) -> Result<(), String> {
    let tls = tunnel_client(&next).map_err(|error| error.to_string())?;
    let update = identity_store.update(move |identity| {
        let gateways = std::mem::take(&mut identity.gateways);
        *identity = EdgeIdentity { gateways, ..next };
    });
    update.await.map_err(|error| error.to_string())?;
    context.connector.set_tls(tls);
    context.reconnect.send_replace(());
    info!("this node's certificate or trusted CAs were replaced");
    Ok(())
}

/// Logs repeatedly that the certificate is not renewed, once the external CA should have renewed it.
async fn warn_if_not_renewed(context: &TunnelContext, schedule: &RenewalSchedule) {
    schedule.wait(SystemTime::now).await;
    loop {
        let expiry = humantime::format_rfc3339_seconds(schedule.not_after);
        let remaining = schedule.not_after.duration_since(SystemTime::now());
        let what = if remaining.is_ok() {
            format!("this node's certificate expires at {expiry}")
        } else {
            format!(
                "this node's certificate expired at {expiry}, unless this machine's clock is wrong"
            )
        };
        let what = format!(
            "{what}, and it has not been replaced: either the external CA has not issued a new one (identity), or the last reload was rejected"
        );
        // The warning is repeated at expiry.
        let next_warning = remaining.map_or(WARN_INTERVAL, |left| {
            WARN_INTERVAL.min(left + Duration::from_secs(1))
        });
        warn!(what);
        context.status.set_renewal_error(&what, false, next_warning);
        sleep(next_warning).await;
    }
}
