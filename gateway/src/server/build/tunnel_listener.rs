//! Builds the tunnel listener, which admits edges.

use crate::{
    config::{self, Config},
    control::{
        api_cache::ApiCacheServer,
        enrol,
        heartbeat::HeartbeatVerifier,
        node_records::NodeRecordWriter,
        peers::ForwardHandler,
        tunnel_listener::{
            EgressEdge, EgressHandler, EgressLink, TunnelListener, TunnelPortLimits, edge_verifier,
        },
    },
    proxy::{ProxyState, egress::Egress, peer},
    server::{data_dir::DataDirState, error::BindError, tunnel_identity::TunnelIdentity},
    state::{AdvertisedGateways, AnnouncedPortsCell},
    worker::Workers,
};
use arc_swap::ArcSwap;
use causeway_certs::TrustDomain;
use causeway_rt::task::TaskGroup;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

pub(super) fn build_tunnel_listener(
    config: &Config,
    base: &DataDirState,
    shared: &Arc<ProxyState>,
    (workers, identity, tasks): (
        &Workers,
        &TunnelIdentity,
        (&Arc<TaskGroup>, &CancellationToken),
    ),
    (advertised, announced_ports): &(AdvertisedGateways, AnnouncedPortsCell),
) -> Result<TunnelListener, BindError> {
    let settings = config.tunnel.clone();
    let record_writer = NodeRecordWriter::new(&base.store, &base.nodes);
    let cluster_subject = config.signer().and_then(config::CsrSigning::subject);
    let enrolment = enrol::Enrolment {
        ca: base.ca.clone(),
        store: base.store.clone(),
        nodes: base.nodes.clone(),
        shared_state: base.shared_state.clone(),
        record_writer: record_writer.clone(),
        metrics: shared.metrics.clone(),
        lifetime: settings.edge_certificate_lifetime,
        advertised: advertised.clone(),
        accepts_cluster_identity: config.signer().is_some(),
        accepts_cluster_certificates: cluster_subject.is_some(),
    };
    let tls = identity.tls(&base.ca.get())?;
    let enrol = match base.external_identity {
        Some(_) => enrol::disabled_router(shared.metrics.clone()),
        None => enrol::router(enrolment),
    };
    let tls = Arc::new(ArcSwap::from_pointee(tls));
    let rules = config.kubernetes.as_ref();
    let heartbeats = rules.is_some_and(|rules| rules.heartbeats.enabled);
    let heartbeats = heartbeats
        .then(|| HeartbeatVerifier::new(&shared.nodes, edge_verifier(&tls), &shared.metrics));
    Ok(TunnelListener {
        instance: format!("{:032x}", rand::random::<u128>()).into(),
        workers: workers.clone(),
        registry: shared.registry.clone(),
        nodes: shared.nodes.clone(),
        shared_state: base.shared_state.clone(),
        cluster: config.kubernetes.is_some().then(|| base.nodes.subscribe()),
        metrics: shared.metrics.clone(),
        tls,
        record_writer,
        ca: base.ca.clone(),
        limits: TunnelPortLimits {
            arriving: settings.max_handshakes,
            ..TunnelPortLimits::default()
        },
        settings,
        memory_budget: shared.limits.memory_budget().clone(),
        drain: config.timeouts.drain,
        advertised: advertised.clone(),
        announced_ports: announced_ports.clone(),
        gateway_revocation: base.gateway_revocation.clone(),
        enrol,
        api_cache: config
            .api_cache
            .as_ref()
            .map(|rules| ApiCacheServer::new(rules, &shared.nodes, &shared.metrics)),
        peer_streams: config.peers.is_some().then(|| forward_handler(shared)),
        egress: egress_handler(shared, base.ca.get().trust_domain(), tasks),
        heartbeats,
        early_throttle: Arc::default(),
    })
}

/// Returns the handler of requests that other gateways forward.
fn forward_handler(shared: &Arc<ProxyState>) -> ForwardHandler {
    let shared = shared.clone();
    ForwardHandler(Arc::new(move |request, from| {
        let shared = shared.clone();
        Box::pin(async move { peer::serve(&shared, request, from).await })
    }))
}

/// Returns the handler of streams that edges open.
fn egress_handler(
    shared: &Arc<ProxyState>,
    trust_domain: &TrustDomain,
    tasks: (&Arc<TaskGroup>, &CancellationToken),
) -> EgressHandler {
    let egress = Egress::new(shared, trust_domain.clone(), tasks);
    EgressHandler(Arc::new(move |edge| {
        let EgressEdge {
            node,
            address,
            worker,
        } = edge;
        let connection = Arc::new(egress.connect(node, address, worker)?);
        let of_drain = connection.clone();
        Some(EgressLink {
            usage: connection.usage(),
            replaced: connection.replaced(),
            must_leave: Box::new(move || of_drain.must_leave()),
            serve_stream: Arc::new(move |request| {
                let connection = connection.clone();
                Box::pin(async move { connection.serve(request).await })
            }),
        })
    }))
}
