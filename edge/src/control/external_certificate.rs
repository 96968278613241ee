//! Identity that an external CA issues: taken up when it changes, and monitored so that it does not end unnoticed.
//!
//! Tunnels are dialled anew with it and keep their streams until these end, as after a renewal (`tunnels`).

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
const AGAIN: Duration = Duration::from_hours(1);

/// Takes up what is `made`, for as long as it is polled.
pub(crate) async fn run(
    links: Arc<TunnelContext>,
    held: IdentityStore,
    mut made: watch::Receiver<Option<EdgeIdentity>>,
) {
    // Handles a certificate that arrived before this task started.
    made.mark_changed();
    loop {
        let schedule = RenewalSchedule::given(&held.identity());
        schedule.tell(&links);
        tokio::select! {
            changed = made.changed() => if changed.is_err() {
                return;
            },
            () = nobody_renews(&links, &schedule) => {}
        }
        let next = made.borrow_and_update().clone();
        let Some(next) = next.filter(|next| is_another(&held.identity(), next)) else {
            continue;
        };
        let taken_up = take_up(&links, &held, next).await;
        links
            .metrics
            .renewal(taken_up.as_ref().map_or("failed", |()| "given"));
        if let Err(why) = taken_up {
            warn!(why, "this node's new certificate cannot be used");
        }
    }
}

fn is_another(before: &EdgeIdentity, next: &EdgeIdentity) -> bool {
    before.leaf != next.leaf || before.roots != next.roots
}

async fn take_up(
    links: &TunnelContext,
    held: &IdentityStore,
    next: EdgeIdentity,
) -> Result<(), String> {
    let tls = tunnel_client(&next).map_err(|error| error.to_string())?;
    let changed = held.change(move |identity| {
        let gateways = std::mem::take(&mut identity.gateways);
        *identity = EdgeIdentity { gateways, ..next };
    });
    changed.await.map_err(|error| error.to_string())?;
    links.dialler.identify(tls);
    links.anew.send_replace(());
    info!("this node's certificate or trusted CAs were replaced");
    Ok(())
}

/// Logs repeatedly that the certificate is not renewed, once the external CA should have renewed it.
async fn nobody_renews(links: &TunnelContext, schedule: &RenewalSchedule) {
    schedule.wait(SystemTime::now).await;
    loop {
        let ends = humantime::format_rfc3339_seconds(schedule.not_after);
        let left = schedule.not_after.duration_since(SystemTime::now());
        let what = if left.is_ok() {
            format!("this node's certificate expires at {ends}")
        } else {
            format!(
                "this node's certificate expired at {ends}, unless this machine's clock is wrong"
            )
        };
        let what = format!(
            "{what}, and it has not been replaced: either the external CA has not issued a new one (identity), or the last reload was rejected"
        );
        // The warning is repeated at expiry.
        let again = left.map_or(AGAIN, |left| AGAIN.min(left + Duration::from_secs(1)));
        warn!(what);
        links.state.not_renewed(&what, false, again);
        sleep(again).await;
    }
}
