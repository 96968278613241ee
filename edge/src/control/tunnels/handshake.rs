//! The hello of one tunnel, from the edge's end: until it is over the tunnel takes no streams.
//!
//! The tunnel's connection moves only while this polls it. What the gateway says of itself is checked; what this edge
//! says of itself is data.

use super::{
    super::{api_cache::membership::MembershipUpdater, connect_error::ConnectError, trust_roots},
    connected_gateways::{GatewayLease, TunnelGroup},
    context::{TunnelContext, TunnelUnavailable},
    tls_error::{TlsErrorSlot, TunnelIo},
};
use crate::config::{self, TunnelMode};
use causeway_tunnel::{
    RejectCode, TunnelEnd,
    control_stream::{
        ControlStream, ControlStreamError, EdgeHello, EdgeMessage, GatewayHello, GatewayMessage,
    },
    edge_side::{EdgeSide, IncomingStream, StreamRequest},
    wire,
};
use std::{future::Future, pin::pin, time::Duration};
use tracing::{debug, info};

/// Parts of a tunnel once it is registered.
pub(super) struct EstablishedTunnel {
    pub(super) control: ControlStream,
    /// Identifies the gateway's process.
    pub(super) gateway: String,
    /// Lease of the gateway, if the edge has tunnels at all gateways.
    pub(super) claim: Option<GatewayLease>,
    /// Handle for the gateway's announcements of the node's pool, if this node has an API cache.
    pub(super) voice: Option<MembershipUpdater>,
}

/// A tunnel before it is registered.
pub(super) struct TunnelHandshake {
    pub(super) server: EdgeSide<TunnelIo>,
    /// Streams that came with the registration, before it was read.
    pub(super) early: Vec<StreamRequest>,
    pub(super) fault: TlsErrorSlot,
}

impl TunnelHandshake {
    /// Waits for `future`, while the tunnel moves.
    async fn drive<T>(
        &mut self,
        future: impl Future<Output = Result<T, ControlStreamError>>,
    ) -> Result<T, ConnectError> {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                done = &mut future => return done.map_err(|error| self.trouble(&error)),
                next = self.server.next() => match next {
                    Ok(IncomingStream::Stream(asked)) => self.early.push(*asked),
                    Ok(IncomingStream::Control(_)) => debug!("the gateway opened a second control stream"),
                    Err(ended) => return Err(self.fault.trouble(&ended)),
                },
            }
        }
    }

    async fn control(&mut self) -> Result<ControlStream, ConnectError> {
        loop {
            match self.server.next().await {
                Ok(IncomingStream::Control(control)) => return Ok(*control),
                Ok(IncomingStream::Stream(asked)) => {
                    let refused = RejectCode::Malformed
                        .because("the gateway opened a stream before its hello");
                    asked.reply.refuse(&refused);
                }
                Err(ended) => return Err(self.fault.trouble(&ended)),
            }
        }
    }

    fn trouble(&self, error: &ControlStreamError) -> ConnectError {
        match error {
            // The error of the tunnel has more detail than the error of the stream.
            ControlStreamError::Stream(_) | ControlStreamError::Closed => self.fault.trouble(
                &TunnelEnd::Failed(format!("the tunnel ended during the hello: {error}")),
            ),
            _ => ConnectError::refused(error.to_string()),
        }
    }

    /// Hears who the gateway is, says who this edge is, and is registered.
    pub(super) async fn greet(
        &mut self,
        links: &TunnelContext,
        party: TunnelGroup,
        (slot, keeps): (u32, bool),
    ) -> Result<EstablishedTunnel, TunnelUnavailable> {
        let mut control = self.control().await?;
        let hello = match self.drive(control.hear()).await? {
            GatewayMessage::Hello(hello) => hello,
            other => return Err(unexpected(&other).into()),
        };
        check(&hello, links)?;
        let claim = claim(links, &hello, (party, slot > 0 || keeps))?;
        info!(
            gateway = hello.gateway,
            version = hello.version,
            "received the gateway's hello"
        );
        let welcome = EdgeMessage::Welcome(Box::new(EdgeHello {
            // This session must not end the streams of the earlier session of this slot.
            takes_over: links.newest.stands(process(&hello), slot),
            ..welcome(links, slot, &hello.gateways)
        }));
        self.drive(control.tell(&welcome)).await?;
        loop {
            match self.drive(control.hear()).await? {
                GatewayMessage::Registered => break,
                GatewayMessage::Gateways { gateways, replicas } => {
                    if let Some(claim) = &claim {
                        claim.says(replicas);
                    }
                    links.gateways.learn(gateways).await;
                }
                other => return Err(unexpected(&other).into()),
            }
        }
        let told = links.members.as_ref();
        let voice = told.map(|told| told.voice(process(&hello)));
        let gateway = process(&hello).to_owned();
        links.gateways.learn(hello.gateways).await;
        Ok(EstablishedTunnel {
            control,
            gateway,
            claim,
            voice,
        })
    }
}

/// Returns the name of the gateway's process. An older gateway only has its own name. Two that send the same name count as
/// one, so that they do not end each other's tunnels.
fn process(hello: &GatewayHello) -> &str {
    hello.instance.as_ref().unwrap_or(&hello.gateway)
}

/// Takes the gateway for this party, where all gateways are reached.
fn claim(
    links: &TunnelContext,
    hello: &GatewayHello,
    (party, keeps): (TunnelGroup, bool),
) -> Result<Option<GatewayLease>, TunnelUnavailable> {
    if links.config.tunnels.gateways == TunnelMode::One {
        return Ok(None);
    }
    let Some(claim) = links.reached.claim(process(hello), party, keeps) else {
        return Err(TunnelUnavailable::Reached(process(hello).to_owned()));
    };
    claim.says(hello.replicas);
    Ok(Some(claim))
}

fn check(hello: &GatewayHello, links: &TunnelContext) -> Result<(), ConnectError> {
    if hello.protocol != wire::VERSION {
        return Err(ConnectError::unwelcome(format!(
            "the gateway {} (version {}) uses protocol {}, but this edge uses {}",
            hello.gateway,
            hello.version,
            hello.protocol,
            wire::VERSION,
        )));
    }
    if hello.node != links.node {
        return Err(ConnectError::unwelcome(format!(
            "the gateway identifies this edge as {}, but its certificate is for {}",
            hello.node, links.node,
        )));
    }
    Ok(())
}

fn welcome(links: &TunnelContext, slot: u32, told: &[String]) -> EdgeHello {
    let config = &links.config;
    // Addresses from the hello are stored at registration, and count as known already here.
    let mut known = links.gateways.all();
    known.extend_from_slice(told);
    known.sort_unstable();
    known.dedup();
    EdgeHello {
        protocol: wire::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        instance: links.instance.clone(),
        started: links.state.started(),
        slot,
        addresses: config.addresses.clone(),
        labels: config.labels.clone(),
        pool: config.pool.clone(),
        ports: links.ports.load().to_vec(),
        turns: true,
        // With tunnels to every gateway there is no other gateway to move to.
        elsewhere: config.tunnels.gateways == TunnelMode::One && known.len() > 1,
        listed: true,
        long_targets: true,
        upgrade_bodies: true,
        takes_over: false,
        bulk_after: u64::try_from(config.tunnels.bulk_after).ok(),
        roots: Some(trust_roots::roots_from_message(&links.held)),
        site: config.api_cache.as_ref().map(config::ApiCache::neighbours),
        hubs: config
            .api_cache
            .as_ref()
            .and_then(config::ApiCache::for_hubs)
            .map(Box::new),
    }
}

/// A dismissal, or what has no place here.
pub(super) fn unexpected(line: &GatewayMessage) -> ConnectError {
    match line {
        GatewayMessage::Dismiss {
            why,
            detail,
            retry_after_ms,
        } => ConnectError::dismissed(*why, detail, Duration::from_millis(*retry_after_ms)),
        GatewayMessage::Drain { .. } => ConnectError::silent("the gateway is draining"),
        _ => ConnectError::refused("the gateway sent an unexpected message during the hello"),
    }
}
