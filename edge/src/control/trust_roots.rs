//! Roots that this edge trusts: a gateway that chains to one of the current roots announces them.
//!
//! The announcement arrives over a tunnel, whose gateway was verified when it was dialled. New roots are on the disk before
//! they are used to dial. They replace the previous roots, so a root is removed in the same way.

use super::{identity_store::IdentityStore, tunnels::context::TunnelContext};
use causeway_certs::verify::tunnel_client;
use tracing::{info, warn};

/// Replaces the roots by these, if they are valid. Returns the fingerprints of the roots that are trusted now.
pub(super) async fn update_roots(context: &TunnelContext, pem: &str) -> Vec<String> {
    if let Err(why) = install_roots(context, pem).await {
        warn!(
            why,
            "the CA roots announced by the gateway were not installed"
        );
    }
    trusted_fingerprints(&context.identity_store)
}

/// Returns the fingerprints of the trusted roots, in the form that gateways receive.
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
