//! Roots that this edge trusts: announced by a gateway that chains to one of the roots before.
//!
//! The announcement comes over a tunnel, whose gateway was trusted when it was dialled. New roots are on the disk before
//! they are used to dial. They replace the roots that were trusted before: that is how a root goes out of use.

use super::{identity_store::IdentityStore, tunnels::context::TunnelContext};
use causeway_certs::verify::tunnel_client;
use tracing::{info, warn};

/// Takes up these roots; returns those that are believed now.
pub(super) async fn update_roots(links: &TunnelContext, pem: &str) -> Vec<String> {
    if let Err(why) = take_up(links, pem).await {
        warn!(
            why,
            "the CA roots announced by the gateway were not installed"
        );
    }
    roots_from_message(&links.held)
}

/// Returns the fingerprints of the roots, as a gateway receives them.
pub(super) fn roots_from_message(held: &IdentityStore) -> Vec<String> {
    let roots = held.identity().fingerprints();
    roots.iter().map(ToString::to_string).collect()
}

async fn take_up(links: &TunnelContext, pem: &str) -> Result<(), String> {
    let before = links.held.identity();
    if before.given {
        return Err("the trusted CAs are configured (identity.ca)".to_owned());
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
    info!(roots = ?now.fingerprints(), "trusted CA roots were replaced");
    Ok(())
}
