//! Builds the tunnel listener, which admits edges.

use crate::{
    config::{self, Config},
    control::{
        api_cache::ApiCacheServer,
        enrol,
        node_records::NodeRecordWriter,
        tunnel_listener::{Places, TunnelListener},
    },
    proxy::ProxyState,
    server::{data_dir::DataDirState, error::BindError, tunnel_identity::TunnelIdentity},
    state::{AdvertisedGateways, AnnouncedPortsCell},
    worker::Workers,
};
use arc_swap::ArcSwap;
use std::sync::Arc;

pub(super) fn admission(
    config: &Config,
    base: &DataDirState,
    shared: &ProxyState,
    (workers, identity): (&Workers, &TunnelIdentity),
    (advertised, listed): &(AdvertisedGateways, AnnouncedPortsCell),
) -> Result<TunnelListener, BindError> {
    let settings = config.tunnel.clone();
    let ledger = NodeRecordWriter::new(&base.store, &base.nodes);
    let by_cluster = config.signer().and_then(config::CsrSigning::subject);
    let enrolment = enrol::Enrolment {
        ca: base.ca.clone(),
        store: base.store.clone(),
        nodes: base.nodes.clone(),
        ledger: ledger.clone(),
        metrics: shared.metrics.clone(),
        lifetime: settings.edge_certificate_lifetime,
        advertised: advertised.clone(),
        vouched: config.signer().is_some(),
        by_cluster: by_cluster.is_some(),
    };
    let tls = identity.tls(&base.ca.get())?;
    let enrol = match base.given {
        Some(_) => enrol::closed(shared.metrics.clone()),
        None => enrol::router(enrolment),
    };
    Ok(TunnelListener {
        instance: format!("{:032x}", rand::random::<u128>()).into(),
        workers: workers.clone(),
        registry: shared.registry.clone(),
        nodes: shared.nodes.clone(),
        cluster: config.kubernetes.is_some().then(|| base.nodes.changes()),
        metrics: shared.metrics.clone(),
        tls: Arc::new(ArcSwap::from_pointee(tls)),
        ledger,
        ca: base.ca.clone(),
        settings,
        places: Places::default(),
        pressure: shared.limits.pressure().clone(),
        drain: config.timeouts.drain,
        advertised: advertised.clone(),
        listed: listed.clone(),
        enrol,
        reading: config
            .api_cache
            .as_ref()
            .map(|rules| ApiCacheServer::new(rules, &shared.nodes, &shared.metrics)),
        early: Arc::default(),
    })
}
