//! Replacement of an identity that gateways refuse, by a join token or by the node's cluster.
//!
//! An identity that a gateway accepts is never replaced, unless the owner asks for that (`--rejoin`). One that gateways refuse
//! is replaced by a token that has not brought it: the token is shown only to a gateway of the CA whose fingerprint it
//! carries, and that fingerprint alone decides which CA is trusted from then on. A gateway whose certificate is of an
//! unknown CA may be an impostor, so that a token of a CA that is trusted already is not spent for it. The identity before
//! is kept aside in the data directory.

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

/// Why an identity is to be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RejoinReason {
    /// The owner asks for it.
    Asked,
    /// Gateways refuse the identity.
    Refused(IdentityRefusal),
}

/// Why the configured token is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenUnusable {
    /// It has brought the identity that this node has.
    JoinedBy,
    /// It is of a CA that the identity trusts, and the gateway is of another.
    OtherServer,
}

impl fmt::Display for TokenUnusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::JoinedBy => "the configured join token was already used for this identity",
            Self::OtherServer => {
                "the configured join token is of the CA that this node already trusts, but the gateway has another CA: \
                 another server answers at its address, or the token is older than the gateway's CA"
            }
        })
    }
}

/// Decides whether a token replaces an identity that trusts these roots and was `joined_by` the token of this id.
fn check_token(
    token: &JoinToken,
    joined_by: Option<&str>,
    roots: &[Fingerprint],
    reason: RejoinReason,
) -> Result<(), TokenUnusable> {
    if joined_by == Some(token.id.as_str()) {
        return Err(TokenUnusable::JoinedBy);
    }
    let stranger = reason == RejoinReason::Refused(IdentityRefusal::UnknownCa);
    if stranger && roots.contains(&token.root) {
        return Err(TokenUnusable::OtherServer);
    }
    Ok(())
}

/// The outcome of one attempt to replace the identity.
pub(super) enum RejoinOutcome {
    /// Tunnels are dialled with another identity from now on.
    Replaced,
    /// The identity stays; nothing that is configured replaces it.
    Kept,
    /// A later attempt may succeed.
    Failed(ConnectError),
}

/// Replaces the identity of an edge that runs.
pub(super) struct Rejoin<'a> {
    links: &'a TunnelContext,
    held: &'a IdentityStore,
    /// The token that a gateway has refused for good, and how.
    refused: Option<(String, String)>,
}

impl<'a> Rejoin<'a> {
    pub(super) fn new(links: &'a TunnelContext, held: &'a IdentityStore) -> Self {
        Self {
            links,
            held,
            refused: None,
        }
    }

    /// Makes one attempt, and logs the command that helps if the attempt fails.
    pub(super) async fn attempt(&mut self, reason: RejoinReason) -> RejoinOutcome {
        if self.held.identity().given {
            return RejoinOutcome::Kept;
        }
        if reason != RejoinReason::Asked && self.is_accepted().await {
            return RejoinOutcome::Kept;
        }
        let attempted = match &self.links.cluster {
            Some(cluster) => self.by_cluster(&**cluster, reason).await,
            None => self.by_token(reason).await,
        };
        match attempted {
            Ok(()) => RejoinOutcome::Replaced,
            Err(RejoinError::Trouble(trouble)) => {
                self.log_outcome(trouble.what());
                RejoinOutcome::Failed(trouble)
            }
            Err(RejoinError::Unusable(why)) => {
                self.log_outcome(&why);
                RejoinOutcome::Kept
            }
        }
    }

    /// Whether some gateway accepts the identity. Gateways are dialled at the same time, and one that refuses may be the
    /// first to answer: the others have as long as a dial may take.
    async fn is_accepted(&self) -> bool {
        let timeouts = &self.links.config.timeouts;
        let dial = timeouts.tcp + timeouts.tls + timeouts.hello;
        let connected = self.links.state.connected();
        timeout(dial, connected).await.is_ok()
    }

    async fn by_token(&mut self, reason: RejoinReason) -> Result<(), RejoinError> {
        let old = self.held.identity();
        let command = format!(
            "to replace this node's identity, create a token with `causeway token create --node {}` at the gateway and give \
             it to this edge with --join or join_file",
            old.node
        );
        let unusable = |why: &dyn fmt::Display| RejoinError::Unusable(format!("{why}; {command}"));
        let token = self.token(&old, reason).await;
        let Some(token) = token.map_err(|why| unusable(&why))? else {
            return Err(RejoinError::Unusable(command));
        };
        let gateways = self.links.gateways.all();
        let request = JoinRequest::new(&token, Some(old.node.as_str()), &self.links.config);
        let request = request.map_err(|error| unusable(&error))?;
        let error = match request.send(&gateways).await {
            Ok(new) if new.node == old.node => return self.replace(new, Some(token.id)).await,
            Ok(new) => {
                return Err(unusable(&format_args!(
                    "the gateway issued a certificate for node {}",
                    new.node
                )));
            }
            Err(NotJoined::Trouble(trouble)) => {
                return Err(match trouble.wrong_ca() {
                    Some(wrong) => unusable(&wrong),
                    None => RejoinError::Trouble(trouble),
                });
            }
            Err(NotJoined::Refused(error)) => error,
        };
        if error.is_of_token() {
            self.refused = Some((token.id, error.to_string()));
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

    /// Returns the configured token if it may replace this identity, or why it may not.
    async fn token(
        &self,
        old: &EdgeIdentity,
        reason: RejoinReason,
    ) -> Result<Option<JoinToken>, String> {
        let source = self.links.rejoin.token.load_full();
        let store = self.held.store().clone();
        let read = spawn_blocking(move || {
            let token = source.read().map_err(|error| error.to_string())?;
            // The token is not spent if the identity could not be stored.
            store.prepare_edge().map_err(|error| error.to_string())?;
            // If the record is unreadable, the gateway refuses a used token.
            Ok((token, store.joined_by().ok().flatten()))
        });
        let read: Result<_, String> = read.await.map_err(|error| error.to_string())?;
        let (Some(token), joined_by) = read? else {
            return Ok(None);
        };
        check_token(&token, joined_by.as_deref(), &old.fingerprints(), reason)
            .map_err(|why| why.to_string())?;
        match &self.refused {
            Some((id, why)) if *id == token.id => Err(why.clone()),
            _ => Ok(Some(token)),
        }
    }

    async fn by_cluster(
        &self,
        cluster: &dyn CsrClient,
        reason: RejoinReason,
    ) -> Result<(), RejoinError> {
        let old = self.held.identity();
        if reason == RejoinReason::Refused(IdentityRefusal::UnknownCa) {
            let roots = cluster.roots().await.map_err(ConnectError::from)?;
            if old.trusts_all(&roots) {
                let why = "the gateway has another CA than the one that the cluster publishes (kubernetes.name), which \
                           this node already trusts: another server answers at its address, or the gateway has not \
                           published its CA";
                return Err(RejoinError::Unusable(why.to_owned()));
            }
        }
        let tell = |why: &str| self.log_outcome(why);
        let asked =
            csr_bootstrap::submit_and_wait(cluster, (&self.links.config, self.held.store()), &tell);
        let new = asked.await?;
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
        let local = |why: &dyn fmt::Display| {
            ConnectError::unwelcome(format!("the new identity cannot be used: {why}"))
        };
        let tls = tunnel_client(&new).map_err(|error| local(&error))?;
        let kept = self.held.replace(new, token).await;
        let kept = kept.map_err(|error| local(&error))?;
        self.links.dialler.identify(tls);
        self.links.anew.send_replace(());
        let kept = kept.map(|path| path.display().to_string());
        warn!(
            node,
            ?roots,
            token = by,
            kept,
            "this node's identity is replaced; the old identity is kept as a copy"
        );
        self.links.state.identity_hint(None);
        self.links.gateways.learn(gateways).await;
        Ok(())
    }

    /// Logs the instruction for the operator. Repeated words are not logged again.
    fn log_outcome(&self, what: &str) {
        if self.links.state.identity_hint(Some(what)) {
            warn!(what, "this node's identity is not replaced");
        }
    }
}

enum RejoinError {
    /// A later attempt may succeed.
    Trouble(ConnectError),
    /// The operator has to do something first.
    Unusable(String),
}

impl From<ConnectError> for RejoinError {
    fn from(trouble: ConnectError) -> Self {
        Self::Trouble(trouble)
    }
}

#[cfg(test)]
mod tests;
