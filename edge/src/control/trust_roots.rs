//! Roots that this edge trusts: announced by a gateway that chains to one of the roots before.
//!
//! The announcement comes over a tunnel, whose gateway was trusted when it was dialled. New roots are on the disk before
//! they are used to dial. They replace the roots that were trusted before: that is how a root goes out of use.

use super::{identity_store::IdentityStore, tunnels::context::TunnelContext};
use causeway_certs::verify::tunnel_client;
use tracing::{info, warn};

/// Takes up these roots; returns those that are believed now.
pub(super) async fn update_roots(context: &TunnelContext, pem: &str) -> Vec<String> {
    if let Err(why) = install_roots(context, pem).await {
        warn!(
            why,
            "the CA roots announced by the gateway were not installed"
        );
    }
    trusted_fingerprints(&context.identity_store)
}

/// Returns the fingerprints of the roots, as a gateway receives them.
pub(super) fn trusted_fingerprints(identity_store: &IdentityStore) -> Vec<String> {
    let roots = identity_store.identity().fingerprints();
    roots.iter().map(ToString::to_string).collect()
}

async fn install_roots(context: &TunnelContext, pem: &str) -> Result<(), String> {
    let current = context.identity_store.identity();
    if current.is_external {
        return Err("the trusted CAs are configured (identity.ca)".to_owned());
    }
    let roots = current.read_roots(pem).map_err(|error| error.to_string())?;
    if roots == current.roots {
        return Ok(());
    }
    let update = context
        .identity_store
        .update(|identity| identity.roots = roots);
    update.await.map_err(|error| error.to_string())?;
    let updated = context.identity_store.identity();
    context
        .connector
        .set_tls(tunnel_client(&updated).map_err(|error| error.to_string())?);
    info!(roots = ?updated.fingerprints(), "trusted CA roots were replaced");
    Ok(())
}
