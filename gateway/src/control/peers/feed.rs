//! Answers of this gateway to a peer: its nodes and its reports about node pools, all of them and then each change, and the progress
//! of a rotation and of revocations.

use super::message::{MAX_NODES, NodeEntry, PROTOCOL, PeerHello, PeerMessage, next_pool_message};
use crate::{
    control::{ca_rotation::rotation_progress, gateway_revocation::GatewayRevocation},
    state::{
        Registry,
        directory::{HeldState, MAX_POOL_NAME_LEN},
        pool_reports::PoolReports,
    },
};
use causeway_certs::{LiveCa, NodeName};
use causeway_tunnel::control_stream::{ControlStream, ControlStreamError};
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio::{
    sync::{
        broadcast::{Receiver, error::RecvError},
        watch,
    },
    time::Instant,
};
use tracing::{debug, warn};

/// Reports about node pools, as this gateway has them now and as the peer has received them.
struct PoolFeed {
    current: watch::Receiver<PoolReports>,
    sent: PoolReports,
}

impl PoolFeed {
    /// Sends the reports that differ from those that the peer has.
    async fn send_changes(
        &mut self,
        control: &mut ControlStream,
    ) -> Result<(), ControlStreamError> {
        let current = self.current.borrow_and_update().clone();
        let is_sent = |pool: &String, report| {
            let sent = self.sent.get(pool);
            sent.is_some_and(|sent| Arc::ptr_eq(sent, report))
        };
        let changed = current
            .iter()
            .filter(|(pool, report)| !is_sent(pool, *report))
            .map(|(pool, report)| (pool.clone(), Some(report.clone())));
        let removed = self
            .sent
            .keys()
            .filter(|pool| !current.contains_key(*pool))
            .map(|pool| (pool.clone(), None));
        // Peers refuse longer names.
        let unsent = changed
            .chain(removed)
            .filter(|(pool, _)| pool.len() <= MAX_POOL_NAME_LEN);
        let mut unsent = unsent.collect();
        // Durations count up to the sending of a message, which waits while the peer is slow.
        while let Some(message) = next_pool_message(&mut unsent, Instant::now()) {
            control.send(&message).await?;
        }
        self.sent = current;
        Ok(())
    }
}

/// Source of the messages to one peer, on one control stream.
#[derive(Clone, Debug)]
pub(crate) struct NodeFeed {
    /// The tunnels of this gateway.
    pub(crate) registry: Registry,
    /// The CA that signs.
    pub(crate) ca: LiveCa,
    /// The revocations of gateways' certificates, if peers may ask for their progress.
    pub(crate) revocation: Option<GatewayRevocation>,
    /// Random identifier of this process.
    pub(crate) instance: String,
    /// Time limit of the peer's hello.
    pub(crate) hello_timeout: Duration,
}

/// State that the peer has received, without nodes.
struct Announced {
    is_draining: bool,
    /// Receiver of the addresses at which clients reach this gateway. It has seen those that were sent.
    addresses: watch::Receiver<Arc<[IpAddr]>>,
    pools: PoolFeed,
}

impl NodeFeed {
    /// Sends messages until the stream ends.
    pub(crate) async fn run(self, mut control: ControlStream) {
        match self.send_all(&mut control).await {
            Err(error @ ControlStreamError::TooLong) => {
                warn!(%error, "closed the control stream of another gateway");
            }
            Err(error) => debug!(%error, "the control connection of another gateway ended"),
            Ok(()) => {}
        }
    }

    async fn send_all(&self, control: &mut ControlStream) -> Result<(), ControlStreamError> {
        let hello: PeerMessage = control.receive_within(self.hello_timeout).await?;
        if hello == PeerMessage::RotationRequest {
            return self.send_rotation(control).await;
        }
        if hello == PeerMessage::RevocationsRequest
            && let Some(revocation) = &self.revocation
        {
            return self.send_revocations(control, revocation).await;
        }
        control
            .send(&PeerMessage::Hello(own_hello(&self.instance, false)))
            .await?;
        match hello {
            PeerMessage::Hello(hello) if hello.protocol == PROTOCOL && hello.wants_nodes => {}
            // A gateway of another version, or one that only identifies this process, closes the stream after this hello.
            _ => return control.receive().await.map(|_: PeerMessage| ()),
        }
        let directory = self.registry.directory();
        let mut announced = Announced {
            is_draining: false,
            addresses: directory.watch_own_addresses(),
            pools: PoolFeed {
                current: directory.pool_exchange().subscribe(),
                sent: PoolReports::new(),
            },
        };
        announced.addresses.mark_changed();
        loop {
            // Changes from here on are in the snapshot or follow it.
            let mut changes = self.registry.watch_changes();
            self.send_snapshot(control, &mut announced.pools).await?;
            self.send_changes(control, &mut changes, &mut announced)
                .await?;
        }
    }

    /// Sends the progress of a rotation at this gateway.
    async fn send_rotation(&self, control: &mut ControlStream) -> Result<(), ControlStreamError> {
        let parts = rotation_progress(&self.ca, &self.registry).into_parts(MAX_NODES);
        let message = |part, is_last| PeerMessage::Rotation { part, is_last };
        self.send_parts(control, parts, message).await
    }

    /// Sends the nodes at this gateway that do not know its revocations.
    async fn send_revocations(
        &self,
        control: &mut ControlStream,
        revocation: &GatewayRevocation,
    ) -> Result<(), ControlStreamError> {
        let parts = revocation.progress(&self.registry).into_parts(MAX_NODES);
        let message = |part, is_last| PeerMessage::Revocations { part, is_last };
        self.send_parts(control, parts, message).await
    }

    /// Sends the parts of an answer, and waits until the peer has read them.
    async fn send_parts<T>(
        &self,
        control: &mut ControlStream,
        parts: Vec<T>,
        message: impl Fn(T, bool) -> PeerMessage,
    ) -> Result<(), ControlStreamError> {
        let mut parts = parts.into_iter().peekable();
        while let Some(part) = parts.next() {
            let is_last = parts.peek().is_none();
            control.send(&message(part, is_last)).await?;
        }
        // The peer closes the stream when it has read the answer.
        let closed = control.receive_within(self.hello_timeout).await;
        closed.map(|_: PeerMessage| ())
    }

    async fn send_snapshot(
        &self,
        control: &mut ControlStream,
        pools: &mut PoolFeed,
    ) -> Result<(), ControlStreamError> {
        control.send(&PeerMessage::Snapshot).await?;
        let held = self.registry.held_nodes();
        for chunk in held.chunks(MAX_NODES) {
            let entries = chunk
                .iter()
                .map(|(node, state)| self.node_entry(node.clone(), Some(*state)));
            let nodes = entries.collect();
            control.send(&PeerMessage::Nodes { nodes }).await?;
        }
        pools.send_changes(control).await?;
        control.send(&PeerMessage::Synchronized).await
    }

    /// Returns the entry of a node with this state.
    fn node_entry(&self, node: NodeName, state: Option<HeldState>) -> NodeEntry {
        let unhealthy = self.registry.unhealthy_ports(&node);
        NodeEntry::new(node, state, unhealthy)
    }

    /// Sends changes until the peer was too slow for them. It then needs all nodes again.
    async fn send_changes(
        &self,
        control: &mut ControlStream,
        changes: &mut Receiver<NodeName>,
        announced: &mut Announced,
    ) -> Result<(), ControlStreamError> {
        loop {
            let received = tokio::select! {
                biased;
                () = self.registry.drain_started(), if !announced.is_draining => {
                    announced.is_draining = true;
                    control.send(&PeerMessage::Draining).await?;
                    continue;
                }
                // The registry owns the sender.
                Ok(()) = announced.addresses.changed() => {
                    let addresses = announced.addresses.borrow_and_update().to_vec();
                    control.send(&PeerMessage::Addresses { addresses }).await?;
                    continue;
                }
                // The sender lives as long as the registry.
                Ok(()) = announced.pools.current.changed() => {
                    announced.pools.send_changes(control).await?;
                    continue;
                }
                received = changes.recv() => received,
            };
            let mut nodes = match received {
                Ok(node) => vec![node],
                Err(RecvError::Lagged(_)) => return Ok(()),
                Err(RecvError::Closed) => return Err(ControlStreamError::Closed),
            };
            // Changes that wait already go into the same message.
            while nodes.len() < MAX_NODES
                && let Ok(node) = changes.try_recv()
            {
                nodes.push(node);
            }
            // The state is read now, so several changes of a node are one.
            nodes.sort_unstable();
            nodes.dedup();
            let entries = nodes.into_iter().map(|node| {
                let state = self.registry.held_state(&node);
                self.node_entry(node, state)
            });
            let nodes = entries.collect();
            control.send(&PeerMessage::Nodes { nodes }).await?;
        }
    }
}

/// Returns the hello of a process.
pub(super) fn own_hello(instance: &str, wants_nodes: bool) -> PeerHello {
    PeerHello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        instance: instance.to_owned(),
        wants_nodes,
    }
}
