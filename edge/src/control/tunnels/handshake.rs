//! Handshake of one tunnel, on the edge side. Before its end the edge accepts no streams.
//!
//! The tunnel's connection makes progress only while this module polls it. The edge checks the gateway's hello. The hello of
//! the edge is built from its configuration and its state.

use super::{
    connected_gateways::{GatewayLease, TunnelGroup},
    context::{TunnelContext, TunnelUnavailable, UnhealthyPorts},
};
use crate::{
    config::{self, TunnelMode},
    control::{
        api_cache::membership::MembershipUpdater,
        connect_error::{self, ConnectError},
        gateway_list::{AnnouncementSource, Announcer},
        identity_store::IdentityStore,
    },
};
use causeway_certs::{EdgeIdentity, Fingerprint, verify::tunnel_client, verify_crls};
use causeway_rt::socket::CountedIo;
use causeway_tunnel::{
    RejectCode, TunnelEnd,
    control_stream::{
        ControlStream, ControlStreamError, EdgeHello, EdgeMessage, GatewayHello, GatewayMessage,
    },
    edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream, StreamRequest},
    io_observer::{IoObserver, ObservedIo},
    wire,
};
use rustls_pki_types::UnixTime;
use std::{
    collections::BTreeMap,
    future::Future,
    io,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{net::TcpStream, sync::watch};
use tokio_rustls::client::TlsStream;
use tracing::{debug, info, warn};

/// Parts of a tunnel once it is registered.
pub(super) struct EstablishedTunnel {
    pub(super) control_stream: ControlStream,
    /// Instance name of the gateway's process.
    pub(super) gateway_instance: String,
    /// Handle for the gateway addresses that the gateway announces.
    pub(super) announcer: Announcer,
    /// Lease of the gateway, if the edge has tunnels at several gateways.
    pub(super) lease: Option<GatewayLease>,
    /// Handle for the gateway's announcements of the node's pool, if this node has an API cache.
    pub(super) membership_updater: Option<MembershipUpdater>,
    /// Results of the health checks of upstreams, which has seen those of the hello.
    pub(super) unhealthy_ports: watch::Receiver<UnhealthyPorts>,
}

/// Tunnel that is not registered yet.
pub(super) struct TunnelHandshake {
    pub(super) edge_side: EdgeSide<TunnelIo>,
    /// Streams that arrived with the registration, before the edge has read the registration.
    pub(super) early_streams: Vec<StreamRequest>,
    pub(super) tls_error: TlsErrorSlot,
}

impl TunnelHandshake {
    /// Begins HTTP/2 on a connection to a gateway.
    pub(super) async fn begin(
        context: &TunnelContext,
        io: TlsStream<CountedIo<TcpStream>>,
        round_trip: Duration,
    ) -> Result<Self, ConnectError> {
        let config = EdgeSideConfig {
            read_timeout: context.config.timeouts.silence,
            round_trip,
            bulk_threshold: u64::try_from(context.config.tunnels.bulk_after).unwrap_or(u64::MAX),
            memory_budget: context.memory_budget.clone(),
            ..EdgeSideConfig::default()
        };
        let traffic = io.get_ref().0.traffic();
        let tls_error = TlsErrorSlot::default();
        let io = ObservedIo::new(io, tls_error.clone());
        let edge_side = edge_side::accept(io, traffic, config)
            .await
            .map_err(|ended| tls_error.to_connect_error(&ended))?;
        Ok(Self {
            edge_side,
            early_streams: Vec::new(),
            tls_error,
        })
    }

    /// Waits for `future` while it drives the tunnel's connection.
    async fn drive<T>(
        &mut self,
        future: impl Future<Output = Result<T, ControlStreamError>>,
    ) -> Result<T, ConnectError> {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                done = &mut future => return done.map_err(|error| self.to_connect_error(&error)),
                next = self.edge_side.next_stream() => match next {
                    Ok(IncomingStream::Stream(stream)) => self.early_streams.push(*stream),
                    Ok(IncomingStream::Control(_)) => debug!("the gateway opened a second control stream"),
                    Err(ended) => return Err(self.tls_error.to_connect_error(&ended)),
                },
            }
        }
    }

    async fn accept_control_stream(&mut self) -> Result<ControlStream, ConnectError> {
        loop {
            match self.edge_side.next_stream().await {
                Ok(IncomingStream::Control(control)) => return Ok(*control),
                Ok(IncomingStream::Stream(stream)) => {
                    let rejection = RejectCode::Malformed
                        .with_detail("the gateway opened a stream before its hello");
                    stream.responder.reject(&rejection);
                }
                Err(ended) => return Err(self.tls_error.to_connect_error(&ended)),
            }
        }
    }

    fn to_connect_error(&self, error: &ControlStreamError) -> ConnectError {
        match error {
            // The error of the tunnel has more detail than the error of the stream.
            ControlStreamError::Stream(_) | ControlStreamError::Closed => {
                self.tls_error.to_connect_error(&TunnelEnd::Failed(format!(
                    "the tunnel ended during the hello: {error}"
                )))
            }
            _ => ConnectError::refused(error.to_string()),
        }
    }

    /// Receives the gateway's hello, sends the hello of this edge, and waits for the registration.
    pub(super) async fn exchange_hello(
        &mut self,
        context: &TunnelContext,
        (group, is_discovered): (TunnelGroup, bool),
        (slot, only_held): (u32, bool),
    ) -> Result<EstablishedTunnel, TunnelUnavailable> {
        let mut control_stream = self.accept_control_stream().await?;
        let hello = match self.drive(control_stream.receive()).await? {
            GatewayMessage::Hello(hello) => hello,
            other => return Err(unexpected_message(&other).into()),
        };
        check_hello(&hello, context)?;
        let only_held = slot > 0 || only_held;
        let lease = claim_gateway(context, &hello, (group, is_discovered), only_held)?;
        info!(
            gateway = hello.gateway,
            version = hello.version,
            "received the gateway's hello"
        );
        let mut unhealthy_ports = context.unhealthy_ports.clone();
        let unhealthy = unhealthy_ports
            .borrow_and_update()
            .iter()
            .copied()
            .collect();
        let welcome = EdgeMessage::Welcome(Box::new(EdgeHello {
            unhealthy,
            // This session must not end the streams of the earlier session of this slot.
            takes_over: context.newest_sessions.is_open(instance_of(&hello), slot),
            movable: is_discovered && context.config.tunnels.gateways.count().is_some(),
            ..build_hello(context, slot, &hello.gateways)
        }));
        self.drive(control_stream.send(&welcome)).await?;
        let instance = instance_of(&hello).to_owned();
        let announcer = context.gateways.announcer(AnnouncementSource {
            gateway: hello.gateway,
            instance: instance.clone(),
        });
        loop {
            match self.drive(control_stream.receive()).await? {
                GatewayMessage::Registered => break,
                GatewayMessage::Gateways { gateways, replicas } => {
                    if let Some(lease) = &lease {
                        lease.set_replicas(replicas);
                    }
                    announcer.update(gateways).await;
                }
                other => return Err(unexpected_message(&other).into()),
            }
        }
        if let Some(lease) = &lease {
            lease.mark_registered();
        }
        let membership = context.membership.as_ref();
        let membership_updater = membership.map(|membership| membership.updater(&instance));
        announcer.update(hello.gateways).await;
        Ok(EstablishedTunnel {
            control_stream,
            gateway_instance: instance,
            announcer,
            lease,
            membership_updater,
            unhealthy_ports,
        })
    }
}

/// Returns the instance name of the gateway's process. An older gateway only has a gateway name. Two gateways with the same
/// name count as one, so that they do not close each other's tunnels.
fn instance_of(hello: &GatewayHello) -> &str {
    hello.instance.as_ref().unwrap_or(&hello.gateway)
}

/// Takes a lease of the gateway, if the edge connects to several gateways. A crowded gateway is of no use in place of another one.
fn claim_gateway(
    context: &TunnelContext,
    hello: &GatewayHello,
    (group, is_discovered): (TunnelGroup, bool),
    only_held: bool,
) -> Result<Option<GatewayLease>, TunnelUnavailable> {
    if context.config.tunnels.gateways == TunnelMode::One {
        return Ok(None);
    }
    let connected_gateways = &context.connected_gateways;
    let is_useless =
        hello.crowded && is_discovered && !only_held && connected_gateways.count().replaces_only;
    let lease = (!is_useless)
        .then(|| connected_gateways.claim(instance_of(hello), group, only_held))
        .flatten();
    let Some(lease) = lease else {
        return Err(TunnelUnavailable::AlreadyConnected(
            instance_of(hello).to_owned(),
        ));
    };
    lease.set_replicas(hello.replicas);
    Ok(Some(lease))
}

fn check_hello(hello: &GatewayHello, context: &TunnelContext) -> Result<(), ConnectError> {
    if hello.protocol != wire::VERSION {
        return Err(ConnectError::unwelcome(format!(
            "the gateway {} (version {}) uses protocol {}, but this edge uses {}",
            hello.gateway,
            hello.version,
            hello.protocol,
            wire::VERSION,
        )));
    }
    if hello.node != context.node {
        return Err(ConnectError::unwelcome(format!(
            "the gateway identifies this edge as {}, but its certificate is for {}",
            hello.node, context.node,
        )));
    }
    Ok(())
}

fn build_hello(context: &TunnelContext, slot: u32, announced: &[String]) -> EdgeHello {
    let config = &context.config;
    // Addresses from the hello are stored at registration, and count as known already here.
    let mut gateways = context.gateways.all();
    gateways.extend_from_slice(announced);
    gateways.sort_unstable();
    gateways.dedup();
    EdgeHello {
        protocol: wire::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        instance: context.instance.clone(),
        started: context.status.started(),
        slot,
        addresses: config.addresses.clone(),
        labels: config.labels.clone(),
        pool: config.pool.clone(),
        ports: context.ports.load().to_vec(),
        service_ports: Some(BTreeMap::clone(&context.services.load())),
        elsewhere: gateways.len() > 1,
        listed: true,
        long_targets: true,
        upgrade_bodies: true,
        takes_over: false,
        bulk_after: u64::try_from(config.tunnels.bulk_after).ok(),
        roots: Some(trusted_fingerprints(&context.identity_store)),
        crls: true,
        site: config
            .api_cache
            .as_ref()
            .map(config::ApiCache::member_addresses),
        hubs: config
            .api_cache
            .as_ref()
            .and_then(config::ApiCache::yurthub_addr)
            .map(Box::new),
        heartbeats: context.heartbeats.is_some(),
        movable: false,
        unhealthy: Vec::new(),
    }
}

/// Returns the error of a dismissal, or of a message that is not allowed during the hello.
pub(super) fn unexpected_message(message: &GatewayMessage) -> ConnectError {
    match message {
        GatewayMessage::Dismiss {
            why,
            detail,
            retry_after_ms,
        } => ConnectError::dismissed(*why, detail, Duration::from_millis(*retry_after_ms)),
        GatewayMessage::Drain { .. } => ConnectError::silent("the gateway is draining"),
        _ => ConnectError::refused("the gateway sent an unexpected message during the hello"),
    }
}

/// Replaces the roots by these, if they are valid. They arrive over a tunnel, whose gateway was verified when it was dialled.
/// New roots are on the disk before they are used to dial. Returns the fingerprints of the roots that are trusted now.
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
    check_tls(&EdgeIdentity {
        roots: roots.clone(),
        ..current
    })?;
    let update = context
        .identity_store
        .update(|identity| identity.roots = roots);
    update.await.map_err(|error| error.to_string())?;
    context.update_tls().map_err(|error| error.to_string())?;
    let updated = context.identity_store.identity();
    info!(roots = ?updated.fingerprints(), "trusted CA roots were replaced");
    Ok(())
}

/// Checks that TLS can be set up with an identity before it is stored. A stored identity counts as in use, and is confirmed to the
/// gateway.
fn check_tls(identity: &EdgeIdentity) -> Result<(), String> {
    tunnel_client(identity)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// Adds the revocations in these CRLs, as far as they are valid, to those of before. Returns the digest of the CRLs once they are in
/// force and one of them is valid, because each CRL of a gateway has all revocations.
pub(super) async fn update_crls(context: &TunnelContext, pem: &str) -> Option<Fingerprint> {
    match install_crls(context, pem).await {
        Ok(is_valid) => is_valid.then(|| Fingerprint::digest(pem.as_bytes())),
        Err(why) => {
            warn!(
                why,
                "the revocations of gateways that the gateway announced were not installed"
            );
            None
        }
    }
}

/// Installs these CRLs. Returns whether one of them is valid.
async fn install_crls(context: &TunnelContext, pem: &str) -> Result<bool, String> {
    let current = context.identity_store.identity();
    if current.is_external {
        return Err("the CA of the gateways is configured (identity.ca)".to_owned());
    }
    let verified = verify_crls(pem, &current.roots, &current.trust_domain);
    let (received, errors) = verified.map_err(|error| error.to_string())?;
    for error in errors {
        warn!(%error, "a revocation list that the gateway announced was ignored");
    }
    let now = UnixTime::now().as_secs();
    let is_valid = !received.serials().is_empty();
    let next = current.revoked_gateways.merged(received.clone(), now);
    if next == current.revoked_gateways {
        debug!("the gateway announced no further revocation");
        return Ok(is_valid);
    }
    check_tls(&EdgeIdentity {
        revoked_gateways: next,
        ..current
    })?;
    let update = context.identity_store.update(move |identity| {
        identity.revoked_gateways = identity.revoked_gateways.merged(received, now);
    });
    update.await.map_err(|error| error.to_string())?;
    // The new configuration of TLS resumes no earlier session.
    context.update_tls().map_err(|error| error.to_string())?;
    let serials = context.identity_store.identity().revoked_gateways.serials();
    warn!(
        ?serials,
        "certificates of gateways are revoked: this node does not connect to gateways that present them"
    );
    Ok(is_valid)
}

/// Connection of a tunnel.
pub(super) type TunnelIo = ObservedIo<TlsStream<CountedIo<TcpStream>>, TlsErrorSlot>;

/// TLS error that ended a connection, if there was one.
///
/// HTTP/2 only gets a failed read and no TLS alert. The alert determines how long an edge waits: it must not dial a gateway
/// that does not know its certificate every two seconds. With TLS 1.3 the gateway sends the alert only after the edge has
/// completed its handshake.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsErrorSlot(Arc<Mutex<Option<rustls::Error>>>);

impl TlsErrorSlot {
    pub(super) fn to_connect_error(&self, ended: &TunnelEnd) -> ConnectError {
        let tls_error = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ConnectError::tunnel_ended(ended, tls_error.as_ref())
    }
}

impl IoObserver for TlsErrorSlot {
    fn on_read_failed(&mut self, error: &io::Error) {
        if let Some(error) = connect_error::find_tls_error(error) {
            let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *slot = Some(error.clone());
        }
    }
}
