//! The roots that this edge believes: told by a gateway that hangs on one of those before.
//!
//! What is told comes over a tunnel, whose gateway was believed when it was dialled. It is on the disk before anything
//! is dialled by it, and takes the place of what was believed before: that is how a root goes out of use.

use super::{identity_store::IdentityStore, tunnels::TunnelContext};
use causeway_certs::verify::tunnel_client;
use tracing::{info, warn};

/// Takes up these roots; returns those that are believed now.
pub(super) async fn update_roots(links: &TunnelContext, pem: &str) -> Vec<String> {
    if let Err(why) = take_up(links, pem).await {
        warn!(why, "the roots that the gateway told are not taken up");
    }
    roots_from_message(&links.held)
}

/// As a gateway is told.
pub(super) fn roots_from_message(held: &IdentityStore) -> Vec<String> {
    let roots = held.identity().fingerprints();
    roots.iter().map(ToString::to_string).collect()
}

async fn take_up(links: &TunnelContext, pem: &str) -> Result<(), String> {
    let before = links.held.identity();
    if before.given {
        return Err("another system says which they are (identity.ca)".to_owned());
    }
    let roots = before.read_roots(pem).map_err(|error| error.to_string())?;
    if roots == before.roots {
        return Ok(());
    }
    let changed = links.held.change(|identity| identity.roots = roots);
    changed.await.map_err(|error| error.to_string())?;
    let now = links.held.identity();
    links
        .dialler
        .identify(tunnel_client(&now).map_err(|error| error.to_string())?);
    info!(roots = ?now.fingerprints(), "believing other roots from now on");
    Ok(())
}
