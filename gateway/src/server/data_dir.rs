//! Data directory of a gateway, as it is when the gateway starts.

use super::{error::BindError, tunnel_identity::ExternalIdentity};
use crate::{
    config::Config,
    control::{node_sync, pin_writer::PinWriter},
    state::{
        NodesWriter, Pins,
        pins::{NewPin, pins},
    },
};
use causeway_certs::{Ca, LiveCa, OpenMode, Store, StoreError};
use tokio::sync::mpsc;

/// Reason for refusals until the cluster's nodes have been loaded.
const NODES_PENDING: &str = "the nodes of the cluster have not been loaded yet";

/// Contents of a data directory, the CA and the nodes that have joined, and the external CA that replaces that CA.
pub(super) struct DataDirState {
    pub(super) store: Store,
    pub(super) ca: LiveCa,
    pub(super) nodes: NodesWriter,
    pub(super) pins: Pins,
    pub(super) keeper: PinWriter,
    pub(super) meetings: mpsc::Receiver<NewPin>,
    pub(super) given: Option<ExternalIdentity>,
}

impl DataDirState {
    pub(super) fn open(config: &Config) -> Result<Self, BindError> {
        let given = config.tunnel.identity.as_ref().map(ExternalIdentity::read);
        let given = given.transpose()?;
        let no_ca = || BindError::NoCa(config.data_dir.clone());
        // With an external CA for edges, the data directory may not exist yet.
        let access = given
            .as_ref()
            .map_or(OpenMode::Existing, |_| OpenMode::Create);
        let there = config.data_dir.exists();
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
            (None, Some(given)) => Ca::unbelieved(&given.domain)?,
            (None, None) => return Err(no_ca()),
        };
        if !there {
            let data_dir = config.data_dir.display();
            tracing::warn!(%data_dir, "the data directory was created now, so it contains no nodes and no revocations");
        }
        let nodes = known(config, &store)?;
        let (pins, writer, meetings) = pins(store.pins().all()?);
        let keeper = PinWriter {
            store: store.clone(),
            nodes: nodes.reader(),
            cluster: config.kubernetes.is_some(),
            writer,
        };
        Ok(Self {
            nodes,
            pins,
            keeper,
            meetings,
            ca: LiveCa::new(ca),
            store,
            given,
        })
    }
}

fn known(config: &Config, store: &Store) -> Result<NodesWriter, BindError> {
    let nodes = NodesWriter::default();
    nodes.replace(node_sync::records(store)?);
    nodes.zones(&config.zones());
    nodes.revoke(config.tunnel.unwelcome());
    if config.kubernetes.is_some() {
        nodes.pending(NODES_PENDING);
    }
    Ok(nodes)
}
