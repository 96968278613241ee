//! Replacement of an identity that gateways refuse, by a join token or by the node's cluster.
//!
//! An identity that a gateway accepts is never replaced, unless the owner requests that (`--rejoin`). An identity that
//! gateways refuse is replaced with a token that was not used for it. The token is sent only to a gateway of the CA whose
//! fingerprint the token contains, and the edge then trusts only that CA. A gateway whose CA is unknown may be an impostor,
//! so a token of an already trusted CA is not spent on it. The previous identity is saved in the data directory.

use super::{
    connect_error::{ConnectError, IdentityRefusal},
    csr_bootstrap::{self, CsrClient},
    enrol::{EnrolError, JoinRequest, NotJoined},
    identity_store::IdentityStore,
    tunnels::context::TunnelContext,
};
use causeway_certs::{EdgeIdentity, Fingerprint, JoinToken, verify::tunnel_client};
use std::fmt;
use tokio::{task::spawn_blocking, time::timeout};
use tracing::warn;

/// Reason why the identity should be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RejoinReason {
    /// The owner requests it.
    Requested,
    /// Gateways refuse the identity.
    Refused(IdentityRefusal),
}

/// Reason why the configured token is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenUnusable {
    /// The token was already used for the identity of this node.
    AlreadyUsed,
    /// The identity already trusts the CA of the token, and the gateway has another CA.
    CaMismatch,
}

impl fmt::Display for TokenUnusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AlreadyUsed => "the configured join token was already used for this identity",
            Self::CaMismatch => {
                "the configured join token is of the CA that this node already trusts, but the gateway has another CA: \
                 another server answers at its address, or the token is older than the gateway's CA"
            }
        })
    }
}

/// Checks whether a token may replace an identity that trusts `roots` and was obtained with the token `joined_by`.
fn check_token(
    token: &JoinToken,
    joined_by: Option<&str>,
    roots: &[Fingerprint],
    reason: RejoinReason,
) -> Result<(), TokenUnusable> {
    if joined_by == Some(token.id.as_str()) {
        return Err(TokenUnusable::AlreadyUsed);
    }
    let is_unknown_ca = reason == RejoinReason::Refused(IdentityRefusal::UnknownCa);
    if is_unknown_ca && roots.contains(&token.root) {
        return Err(TokenUnusable::CaMismatch);
    }
    Ok(())
}

/// Result of one attempt to replace the identity.
pub(super) enum RejoinOutcome {
    /// New tunnels use another identity from now on.
    Replaced,
    /// The identity stays, because nothing in the configuration can replace it.
    Unchanged,
    /// A later attempt may succeed.
    Failed(ConnectError),
}

/// Replacement of the identity of a running edge.
pub(super) struct Rejoin<'a> {
    context: &'a TunnelContext,
    identity_store: &'a IdentityStore,
    /// Id of the token that a gateway has finally refused, and the reason.
    refused_token: Option<(String, String)>,
}

impl<'a> Rejoin<'a> {
    pub(super) fn new(context: &'a TunnelContext, identity_store: &'a IdentityStore) -> Self {
        Self {
            context,
            identity_store,
            refused_token: None,
        }
    }

    /// Makes one attempt, and logs the command that helps if the attempt fails.
    pub(super) async fn attempt(&mut self, reason: RejoinReason) -> RejoinOutcome {
        if self.identity_store.identity().is_external {
            return RejoinOutcome::Unchanged;
        }
        if reason != RejoinReason::Requested && self.is_accepted().await {
            return RejoinOutcome::Unchanged;
        }
        let attempted = match &self.context.csr_client {
            Some(cluster) => self.rejoin_with_csr(&**cluster, reason).await,
            None => self.rejoin_with_token(reason).await,
        };
        match attempted {
            Ok(()) => RejoinOutcome::Replaced,
            Err(RejoinError::Retryable(error)) => {
                self.log_outcome(error.detail());
                RejoinOutcome::Failed(error)
            }
            Err(RejoinError::Unusable(why)) => {
                self.log_outcome(&why);
                RejoinOutcome::Unchanged
            }
        }
    }

    /// Whether some gateway accepts the identity. Gateways are dialled at the same time, and one that refuses may answer
    /// first. So this waits for the others as long as a dial may take.
    async fn is_accepted(&self) -> bool {
        let timeouts = &self.context.config.timeouts;
        let dial_timeout = timeouts.tcp + timeouts.tls + timeouts.hello;
        let connected = self.context.status.wait_until_connected();
        timeout(dial_timeout, connected).await.is_ok()
    }

    async fn rejoin_with_token(&mut self, reason: RejoinReason) -> Result<(), RejoinError> {
        let old = self.identity_store.identity();
        let command = format!(
            "to replace this node's identity, create a token with `causeway token create --node {}` at the gateway and give \
             it to this edge with --join or join_file",
            old.node
        );
        let unusable = |why: &dyn fmt::Display| RejoinError::Unusable(format!("{why}; {command}"));
        let token = self.usable_token(&old, reason).await;
        let Some(token) = token.map_err(|why| unusable(&why))? else {
            return Err(RejoinError::Unusable(command));
        };
        let gateways = self.context.gateways.all();
        let request = JoinRequest::new(
            &token,
            Some(old.node.as_str()),
            (&self.context.config, &old.revoked_gateways),
        );
        let request = request.map_err(|error| unusable(&error))?;
        let error = match request.send(&gateways).await {
            Ok(new) if new.node == old.node => return self.replace(new, Some(token.id)).await,
            Ok(new) => {
                return Err(unusable(&format_args!(
                    "the gateway issued a certificate for node {}",
                    new.node
                )));
            }
            Err(NotJoined::Retryable(error)) => {
                return Err(match error.wrong_ca() {
                    Some(wrong) => unusable(&wrong),
                    None => RejoinError::Retryable(error),
                });
            }
            Err(NotJoined::Refused(error)) => error,
        };
        if error.is_token_error() {
            self.refused_token = Some((token.id, error.to_string()));
        }
        Err(match error {
            // A revoked node cannot join with any token.
            EnrolError::NodeRevoked(_) => RejoinError::Unusable(error.to_string()),
            EnrolError::OtherNode(_) => unusable(&format_args!(
                "{error}; to give this node another name, start it with --node"
            )),
            _ => unusable(&error),
        })
    }

    /// Returns the configured token if it may replace this identity. Returns an error with the reason if it may not.
    async fn usable_token(
        &self,
        old: &EdgeIdentity,
        reason: RejoinReason,
    ) -> Result<Option<JoinToken>, String> {
        let source = self.context.rejoin.token.load_full();
        let store = self.identity_store.store().clone();
        let loaded = spawn_blocking(move || {
            let token = source.read().map_err(|error| error.to_string())?;
            // The token is not spent if the identity could not be stored.
            store
                .check_edge_space()
                .map_err(|error| error.to_string())?;
            // If the record is unreadable, the gateway refuses a used token.
            Ok((token, store.joined_by().ok().flatten()))
        });
        let loaded: Result<_, String> = loaded.await.map_err(|error| error.to_string())?;
        let (Some(token), joined_by) = loaded? else {
            return Ok(None);
        };
        check_token(&token, joined_by.as_deref(), &old.fingerprints(), reason)
            .map_err(|why| why.to_string())?;
        match &self.refused_token {
            Some((id, why)) if *id == token.id => Err(why.clone()),
            _ => Ok(Some(token)),
        }
    }

    async fn rejoin_with_csr(
        &self,
        cluster: &dyn CsrClient,
        reason: RejoinReason,
    ) -> Result<(), RejoinError> {
        let old = self.identity_store.identity();
        if reason == RejoinReason::Refused(IdentityRefusal::UnknownCa) {
            let roots = cluster.roots().await.map_err(ConnectError::from)?;
            if old.trusts_all(&roots) {
                let why = "the gateway has another CA than the one that the cluster publishes (kubernetes.name), which \
                           this node already trusts: another server answers at its address, or the gateway has not \
                           published its CA";
                return Err(RejoinError::Unusable(why.to_owned()));
            }
        }
        let on_progress = |why: &str| self.log_outcome(why);
        let request = csr_bootstrap::submit_and_wait(
            cluster,
            (&self.context.config, self.identity_store.store()),
            &on_progress,
        );
        let new = request.await?;
        if new.node != old.node {
            let why = format!(
                "the cluster names this node {}: restart this edge to join with that name",
                new.node
            );
            return Err(RejoinError::Unusable(why));
        }
        self.replace(new, None).await
    }

    async fn replace(&self, new: EdgeIdentity, token: Option<String>) -> Result<(), RejoinError> {
        let gateways = new.gateways.clone();
        let (node, roots) = (new.node.to_string(), new.fingerprints());
        let by = token.clone();
        let local_error = |why: &dyn fmt::Display| {
            ConnectError::unwelcome(format!("the new identity cannot be used: {why}"))
        };
        // Nothing is stored that cannot be used.
        tunnel_client(&new).map_err(|error| local_error(&error))?;
        let kept = self.identity_store.replace(new, token).await;
        let kept = kept.map_err(|error| local_error(&error))?;
        self.context
            .update_tls()
            .map_err(|error| local_error(&error))?;
        self.context.reconnect.send_replace(());
        let kept = kept.map(|path| path.display().to_string());
        warn!(
            node,
            ?roots,
            token = by,
            kept,
            "this node's identity is replaced; the old identity is kept as a copy"
        );
        self.context.status.set_identity_hint(None);
        self.context.gateways.add(gateways).await;
        Ok(())
    }

    /// Logs the instruction for the operator, unless it has not changed.
    fn log_outcome(&self, what: &str) {
        if self.context.status.set_identity_hint(Some(what)) {
            warn!(what, "this node's identity is not replaced");
        }
    }
}

enum RejoinError {
    /// A later attempt may succeed.
    Retryable(ConnectError),
    /// The operator has to do something first.
    Unusable(String),
}

impl From<ConnectError> for RejoinError {
    fn from(error: ConnectError) -> Self {
        Self::Retryable(error)
    }
}

#[cfg(test)]
mod tests;
