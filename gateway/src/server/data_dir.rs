//! Data directory of a gateway at its start.

use super::{error::BindError, tunnel_identity::ExternalIdentity};
use crate::{
    config::Config,
    control::{gateway_revocation::GatewayRevocation, node_sync, pin_writer::PinWriter},
    shared_state::{SharedState, StateEngine},
    state::{
        NodesWriter, Pins,
        pins::{NewPin, pins},
    },
};
use causeway_certs::{Ca, LiveCa, OpenMode, Store, StoreError};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Reason for refusals until the cluster's nodes have been loaded.
const NODES_PENDING: &str = "the nodes of the cluster have not been loaded yet";

/// Contents of a data directory (the CA and the nodes that have joined), and the external CA that replaces that CA.
pub(super) struct DataDirState {
    pub(super) store: Store,
    pub(super) ca: LiveCa,
    pub(super) nodes: NodesWriter,
    pub(super) pins: Pins,
    pub(super) pin_writer: PinWriter,
    pub(super) new_pins: mpsc::Receiver<NewPin>,
    pub(super) external_identity: Option<ExternalIdentity>,
    pub(super) shared_state: Option<SharedState>,
    pub(super) gateway_revocation: GatewayRevocation,
}

impl DataDirState {
    pub(super) fn open(
        config: &Config,
        engine: Option<Arc<dyn StateEngine>>,
    ) -> Result<Self, BindError> {
        let given = config.tunnel.identity.as_ref().map(ExternalIdentity::read);
        let given = given.transpose()?;
        let no_ca = || BindError::NoCa(config.data_dir.clone());
        // With an external CA for edges, the data directory may not exist yet.
        let access = given
            .as_ref()
            .map_or(OpenMode::Existing, |_| OpenMode::Create);
        let existed = config.data_dir.exists();
        let store = match Store::open(&config.data_dir, access) {
            Err(StoreError::Missing { .. }) => return Err(no_ca()),
            opened => opened?,
        };
        let ca = match (store.ca()?, &given) {
            (Some(ca), Some(given)) if *ca.trust_domain() != given.domain => {
                let (own, given) = (ca.trust_domain(), &given.domain);
                return Err(BindError::Name(format!(
                    "tunnel.identity has trust domain {given}, but the CA in {} has trust domain {own}, and both must be equal; remove that CA's ca.json, or create a CA with `causeway ca init --trust-domain {given}`",
                    config.data_dir.display()
                )));
            }
            (Some(ca), _) => ca,
            (None, Some(given)) => Ca::placeholder(&given.domain)?,
            (None, None) => return Err(no_ca()),
        };
        if !existed {
            let data_dir = config.data_dir.display();
            tracing::warn!(%data_dir, "the data directory was created now, so it contains no nodes and no revocations");
        }
        let nodes = load_nodes(config, &store)?;
        let (pins, writer, meetings) = pins(store.pins().all()?);
        let shared_state =
            engine.map(|engine| SharedState::new(engine, store.clone(), given.is_none()));
        let keeper = PinWriter {
            store: store.clone(),
            shared_state: shared_state.clone(),
            nodes: nodes.reader(),
            follows_cluster: config.kubernetes.is_some(),
            writer,
        };
        let ca = LiveCa::new(ca);
        Ok(Self {
            gateway_revocation: GatewayRevocation::load(&store, &ca, given.is_some())?,
            nodes,
            pins,
            pin_writer: keeper,
            new_pins: meetings,
            ca,
            store,
            external_identity: given,
            shared_state,
        })
    }
}

fn load_nodes(config: &Config, store: &Store) -> Result<NodesWriter, BindError> {
    let nodes = NodesWriter::default();
    nodes.replace(node_sync::read_records(store)?);
    nodes.replace_zones(&config.zones());
    nodes.replace_revoked(config.tunnel.revoked_nodes());
    if let Some(cluster) = &config.kubernetes {
        nodes.set_pending(NODES_PENDING);
        if cluster.pods.is_some() {
            nodes.follow_pods(&cluster.pod_networks);
        }
    }
    Ok(nodes)
}
