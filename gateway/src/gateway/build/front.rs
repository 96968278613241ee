//! Builds one front: whom it trusts, what it shows, who is let in.
//!
//! Reads the files that its configuration names; each fault says which front and which file.

use super::names;
use crate::{
    config::{self, Kind, Listen},
    gateway::BindError,
    proxy::{Shared, caller::Authentication, front::Front},
    state::Nodes,
};
use causeway_certs::{Ca, CallerTokens, FrontResolver, FrontTrust, Leaf, NodeName, Trust, verify};
use causeway_tunnel::wire;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, pem::PemObject},
    server::ResolvesServerCert,
};
use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::Arc,
};

pub(super) fn build(
    front: &config::Front,
    ca: &Arc<Ca>,
    shared: &Shared,
    listens: Option<u16>,
) -> Result<Front, BindError> {
    let node = match &front.node {
        Some(name) => Some(
            NodeName::parse(name)
                .map_err(|error| BindError::Name(format!("front {:?}: {error}", front.name)))?,
        ),
        None => None,
    };
    let trust = trust_of(front)?;
    let tls = if front.has_tls() {
        Some(tls(front, ca, &shared.nodes, &trust)?)
    } else {
        None
    };
    let tokens = match &front.callers.tokens {
        Some(path) => Some(tokens(&front.name, path)?),
        None => None,
    };
    Ok(Front {
        name: front.name.clone(),
        kind: front.kind,
        node,
        port: front.node_port(),
        listens,
        authentication: Authentication {
            tokens,
            certificates: tls.is_some() && (trust.own || !trust.client_roots.is_empty()),
            anonymous: front.anonymous,
            anonymous_from: front.anonymous_from.clone(),
            anonymous_ports: front.anonymous_ports.clone(),
        },
        tls,
        forward_authorization: front.forward_authorization,
        errors: front.errors,
        original_destination: front.original_destination,
        metrics: shared.metrics.front(&front.name),
    })
}

fn trust_of(front: &config::Front) -> Result<FrontTrust, BindError> {
    let mut client_roots = Vec::new();
    for path in &front.callers.client_ca {
        let fault = |why: String| file(&front.name, path, why);
        let roots =
            CertificateDer::pem_file_iter(path).map_err(|error| fault(error.to_string()))?;
        let before = client_roots.len();
        for root in roots {
            client_roots.push(root.map_err(|error| fault(error.to_string()))?);
        }
        if client_roots.len() == before {
            return Err(fault("there is no certificate in it".to_owned()));
        }
    }
    // Whoever may come with a token, or as nobody, shows no certificate: the refusal is then ours, in words.
    Ok(FrontTrust {
        own: front.callers.own_ca,
        client_roots,
        require: false,
    })
}

fn file(front: &str, path: &Path, why: String) -> BindError {
    BindError::File {
        what: format!("front {front:?}"),
        path: path.to_owned(),
        why,
    }
}

fn tokens(front: &str, path: &Path) -> Result<CallerTokens, BindError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| file(front, path, error.to_string()))?;
    CallerTokens::parse(&text).map_err(|error| file(front, path, error.to_string()))
}

fn tls(
    front: &config::Front,
    ca: &Arc<Ca>,
    nodes: &Nodes,
    trust: &FrontTrust,
) -> Result<(Arc<ServerConfig>, Trust), BindError> {
    let fault = |cause| BindError::Trust {
        what: format!("front {:?}", front.name),
        cause,
    };
    let leaves = leaves(front, ca, nodes)?;
    // A TCP front speaks the app's protocol and names none; kube-apiserver offers none on CONNECT.
    let alpn: &[&[u8]] = match front.kind {
        Kind::Https => &[wire::ALPN_H2, wire::ALPN_HTTP11],
        Kind::Connect | Kind::Http => &[wire::ALPN_HTTP11],
        Kind::Tcp => &[],
    };
    let config = verify::front_server(leaves, ca.root(), trust, alpn).map_err(fault)?;
    let trust = Trust::front(ca.root(), ca.trust_domain(), trust).map_err(fault)?;
    Ok((config, trust))
}

/// What the front shows: the configured leaf, or one for each node from our own CA.
fn leaves(
    front: &config::Front,
    ca: &Arc<Ca>,
    nodes: &Nodes,
) -> Result<Arc<dyn ResolvesServerCert>, BindError> {
    if let Some(files) = &front.certificate {
        let read = |path: &Path| {
            std::fs::read_to_string(path)
                .map_err(|error| file(&front.name, path, error.to_string()))
        };
        let leaf = Leaf::load(&read(&files.chain)?, &read(&files.key)?);
        let leaf = leaf.map_err(|error| file(&front.name, &files.chain, error.to_string()))?;
        return Ok(leaf.resolver());
    }
    let nodes = nodes.clone();
    let known = Arc::new(move |name: &str| nodes.by_name(name).is_some());
    let listen = match front.listen {
        Listen::Tcp(address) => address.ip(),
        Listen::Unix(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let names = names(&front.names, listen)?;
    Ok(Arc::new(FrontResolver::new(ca.clone(), names, known)?))
}
