//! Builds one listener: its trusted CAs, its certificate, and the authentication of its clients.
//!
//! The build reads the files that the configuration names. Each error names the listener and the file.

use crate::{
    config::{self, Jwks, ListenAddr, ListenerProtocol},
    control::{certificate_expiry::CertificateInUse, jwks::JwksFetchers},
    proxy::{
        ProxyState,
        authn::{
            Authenticator,
            jwt::{ClaimMappings, Issuer, JwtAuthenticator},
            token_review::TokenReview,
        },
        forwarding_headers::ForwardingHeaders,
        identity_headers::IdentityHeaderFields,
        listener::{Listener, ListenerTls},
    },
    server::{error::BindError, tunnel_identity::host_names},
    state::{JwksCache, KeySet, NodeSelector, NodeSet, Nodes},
};
use arc_swap::ArcSwap;
use causeway_certs::{
    Ca, KnownName, LeafCertificate, ListenerClientTrust, LiveCa, NodeName, Role, SniCertResolver,
    StaticTokens, TrustStore,
    verify::{self, CertificateRequirement},
};
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::wire;
use causeway_watch_cache::LabelSelector;
use rustls::{
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::ResolvesServerCert,
};
use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::{Arc, OnceLock},
};

/// Source of a listener: its configuration, and the contents of the files that it names. Listeners with equal sources behave
/// alike.
#[derive(Debug, PartialEq)]
pub(crate) struct ListenerSource {
    pub(crate) listener: config::Listener,
    client_roots: Vec<CertificateDer<'static>>,
    /// Text of the token file, which contains only hashes.
    tokens: Option<String>,
    /// Files of the issuers, in the order of the configuration.
    issuers: Vec<JwtIssuerFiles>,
    certificate: Option<LeafCertificate>,
}

/// Contents of the files of an issuer of JWTs.
#[derive(Debug, PartialEq)]
struct JwtIssuerFiles {
    keys: Option<KeySet>,
    /// CAs for the URL of its keys.
    roots: Option<String>,
}

impl ListenerSource {
    /// Reads the files that the listener names.
    pub(crate) fn read(listener: &config::Listener) -> Result<Self, BindError> {
        let tokens = listener.client_auth.tokens.as_deref();
        Ok(Self {
            client_roots: client_roots(listener)?,
            tokens: tokens.map(|path| text(&listener.name, path)).transpose()?,
            issuers: issuers(listener)?,
            certificate: leaf(listener)?,
            listener: listener.clone(),
        })
    }

    /// Reads the files that the listener names, to replace the source `current`.
    pub(crate) fn read_replacing(
        listener: &config::Listener,
        current: Option<&Self>,
    ) -> Result<Self, BindError> {
        let mut read = Self::read(listener)?;
        if let (Some(leaf), Some(files)) = (read.certificate.take(), &listener.certificate) {
            let current = current.and_then(|current| current.certificate.as_ref());
            let leaf = leaf.replacing(current, UnixTime::now());
            let leaf =
                leaf.map_err(|error| file(&listener.name, &files.chain, error.to_string()))?;
            read.certificate = Some(leaf);
        }
        Ok(read)
    }

    /// Reads the files that the listener names, and checks those that are parsed later.
    pub(crate) fn check(listener: &config::Listener) -> Result<(), BindError> {
        let read = Self::read(listener)?;
        read.static_tokens()?;
        for (jwt, files) in listener.client_auth.jwt.iter().zip(&read.issuers) {
            if let (Some(path), Some(roots)) = (&jwt.jwks_ca, &files.roots) {
                let found = causeway_certs::parse_certificates(roots);
                found.map_err(|why| file(&listener.name, path, why))?;
            }
        }
        Ok(())
    }

    /// Whether a client certificate may be valid at both listeners.
    pub(crate) fn shares_ca(&self, other: &Self) -> bool {
        let share_own_ca = self.listener.client_auth.own_ca && other.listener.client_auth.own_ca;
        let has = |root: &_| other.client_roots.contains(root);
        share_own_ca || self.client_roots.iter().any(has)
    }

    /// Returns the certificates in the files that the listener names.
    pub(crate) fn certificates(&self) -> Vec<CertificateInUse> {
        let listener = &self.listener;
        let file = listener
            .certificate
            .as_ref()
            .map(|files| files.chain.clone());
        let presented = self
            .certificate
            .as_ref()
            .and_then(|leaf| leaf.chain().first());
        let shown = presented.and_then(|shown| {
            CertificateInUse::read(format!("listener:{}", listener.name), shown, file)
        });
        let client_ca_use = format!("listener_client_ca:{}", listener.name);
        let roots = self.client_roots.iter();
        let roots =
            roots.filter_map(|root| CertificateInUse::read(client_ca_use.clone(), root, None));
        let jwks = self
            .issuers
            .iter()
            .filter_map(|issuer| issuer.roots.as_deref());
        let jwks = jwks.filter_map(|roots| causeway_certs::parse_certificates(roots).ok());
        let jwks_ca_use = format!("listener_jwks_ca:{}", listener.name);
        let jwks = jwks.flatten();
        let jwks = jwks.filter_map(|root| CertificateInUse::read(jwks_ca_use.clone(), &root, None));
        shown.into_iter().chain(roots).chain(jwks).collect()
    }

    /// Builds the listener, whose socket listens on the port `bound_port`.
    pub(crate) fn build(
        &self,
        (ca, issuers): (&LiveCa, &JwksFetchers),
        shared: &ProxyState,
        bound_port: Option<u16>,
    ) -> Result<Listener, BindError> {
        let listener = &self.listener;
        self.check_ca_available(&ca.get())?;
        let tls = self.tls(&ca.get(), (ca, &shared.nodes))?;
        let requests_certificates = listener.client_auth.own_ca || !self.client_roots.is_empty();
        Ok(Listener {
            name: listener.name.clone(),
            protocol: listener.protocol,
            node: listener
                .node
                .as_ref()
                .map(|name| self.parse_name(name))
                .transpose()?,
            node_set: self.node_set()?.map(Arc::new),
            port: listener.node_port(),
            has_node_list: listener.node_list,
            names: self.listener.names.clone(),
            bound_port,
            authentication: Authenticator {
                tokens: self.static_tokens()?,
                jwts: self.jwts(&ca.get(), issuers)?,
                review: self.review(&ca.get(), shared)?,
                accepts_basic: listener.protocol == ListenerProtocol::Connect,
                accepts_certificates: tls.is_some() && requests_certificates,
                allows_anonymous: listener.anonymous,
                anonymous_from: listener.anonymous_from.clone(),
                anonymous_ports: listener.anonymous_ports.clone(),
            },
            tls: tls.map(ArcSwap::from_pointee),
            kubelets: listener.subject_access_review.clone(),
            revoked: listener.client_auth.revoked.iter().cloned().collect(),
            disconnect_expired: listener.disconnect_expired,
            forward_authorization: listener.forward_authorization,
            identity_headers: IdentityHeaderFields::from_config(&listener.identity_headers)
                .map_err(BindError::Name)?,
            forwarding: ForwardingHeaders::new(listener),
            error_format: listener.errors,
            plaintext_networks: listener.plaintext_networks.clone(),
            original_destination: listener.original_destination,
            direct_networks: listener.direct_networks.clone(),
            proxy_protocol: listener.proxy_protocol.clone(),
            metrics: shared.metrics.listener(&listener.name),
            tls_refusal_throttle: LogThrottle::default(),
            exhaustion_throttle: LogThrottle::default(),
            retired_at: OnceLock::new(),
            successor: OnceLock::new(),
        })
    }

    fn parse_name(&self, name: &str) -> Result<NodeName, BindError> {
        let parsed = NodeName::parse(name);
        parsed
            .map_err(|error| BindError::Name(format!("listener {:?}: {error}", self.listener.name)))
    }

    /// Returns the set of nodes that the listener serves, if it serves one.
    fn node_set(&self) -> Result<Option<NodeSet>, BindError> {
        let listener = &self.listener;
        let selector =
            if let Some(names) = &listener.nodes {
                let names = names.iter().map(|name| self.parse_name(name));
                NodeSelector::Names(names.collect::<Result<_, _>>()?)
            } else if let Some(pool) = &listener.pool {
                NodeSelector::Pool(pool.clone())
            } else if let Some(text) = &listener.node_selector {
                let selector = LabelSelector::parse(text);
                NodeSelector::Labels(selector.map_err(|why| {
                    BindError::Name(format!("listener {:?}: {why}", listener.name))
                })?)
            } else {
                return Ok(None);
            };
        Ok(Some(NodeSet::new(selector)))
    }

    /// Returns an error if a listener needs a CA and there is none, because such a listener would admit no client.
    fn check_ca_available(&self, ca: &Ca) -> Result<(), BindError> {
        let (listener, client_auth) = (&self.listener, &self.listener.client_auth);
        if ca.is_trusted() || !listener.has_tls() {
            return Ok(());
        }
        let has_other_auth = client_auth.accepts_bearer_tokens() || listener.anonymous;
        let missing = if self.certificate.is_none() {
            "certificate: there is no CA that can issue one"
        } else if self.client_roots.is_empty() && !has_other_auth {
            "client_auth: there is no CA that issues client certificates; set client_ca, tokens, jwt or token_review"
        } else {
            return Ok(());
        };
        Err(BindError::Name(format!(
            "listener {:?} lacks {missing}",
            listener.name
        )))
    }

    fn static_tokens(&self) -> Result<Option<StaticTokens>, BindError> {
        let (Some(text), Some(path)) = (&self.tokens, &self.listener.client_auth.tokens) else {
            return Ok(None);
        };
        let tokens = StaticTokens::parse(text);
        let tokens = tokens.map_err(|error| file(&self.listener.name, path, error.to_string()))?;
        Ok(Some(tokens))
    }

    /// Returns the authenticator of JWTs. Keys behind a URL may not be fetched yet.
    fn jwts(&self, ca: &Ca, issuers: &JwksFetchers) -> Result<Option<JwtAuthenticator>, BindError> {
        let configured = &self.listener.client_auth.jwt;
        let mut all = Vec::with_capacity(configured.len());
        for (jwt, files) in configured.iter().zip(&self.issuers) {
            let keys = match &files.keys {
                Some(set) => JwksCache::fixed(set.clone()),
                None => issuers.keys(jwt, files.roots.as_deref()).map_err(|why| {
                    let named = jwt.jwks_ca.clone();
                    let path = named.unwrap_or_else(|| jwt.jwks.to_string().into());
                    file(&self.listener.name, &path, why)
                })?,
            };
            let claim_mappings = ClaimMappings {
                username_claim: jwt.username_claim.clone(),
                username_prefix: jwt.username_prefix.clone(),
                groups_claim: jwt.groups_claim.clone(),
                groups_prefix: jwt.groups_prefix.clone(),
                trust_domain: ca.trust_domain().clone(),
            };
            let named = (jwt.issuer.as_str(), jwt.audiences.as_slice());
            all.push(Issuer::new(named, &jwt.algorithms, claim_mappings, keys));
        }
        Ok((!all.is_empty()).then(|| JwtAuthenticator::new(all)))
    }

    /// Returns the token review by the cluster's API. Fails if the listener requires reviews and there is no cluster.
    fn review(&self, ca: &Ca, shared: &ProxyState) -> Result<Option<TokenReview>, BindError> {
        let (listener, review) = (&self.listener, &self.listener.client_auth.token_review);
        let needs_reviews = review.is_some() || !listener.subject_access_review.is_empty();
        if needs_reviews && shared.reviews.is_none() {
            return Err(BindError::Name(format!(
                "listener {:?} needs the API of a cluster to review clients, but this gateway was started without one (kubernetes)",
                listener.name
            )));
        }
        Ok(review.as_ref().map(|review| TokenReview {
            audiences: review.audiences.as_slice().into(),
            trust_domain: ca.trust_domain().clone(),
        }))
    }

    /// Returns the listener's TLS with `ca` as the signer, if the listener uses TLS.
    pub(crate) fn tls(
        &self,
        ca: &Ca,
        (live, nodes): (&LiveCa, &Nodes),
    ) -> Result<Option<ListenerTls>, BindError> {
        if !self.listener.has_tls() {
            return Ok(None);
        }
        // Clients with a token and anonymous clients send no certificate. The gateway refuses them over HTTP with a message.
        let trust = ListenerClientTrust {
            accepts_own: self.listener.client_auth.own_ca && ca.is_trusted(),
            client_roots: self.client_roots.clone(),
        };
        let fault = |cause| BindError::Trust {
            what: format!("listener {:?}", self.listener.name),
            cause,
        };
        let (resolver, leaves): (Arc<dyn ResolvesServerCert>, _) =
            if let Some(leaf) = &self.certificate {
                (leaf.resolver(), None)
            } else {
                let leaves = self.leaves(live, nodes)?;
                (leaves.clone(), Some(leaves))
            };
        // A TCP listener forwards the app's protocol and offers no ALPN. kube-apiserver offers no ALPN for CONNECT. Clients in Go
        // negotiate h2 with a proxy, and then send an HTTP/1.1 CONNECT, which is served as well.
        let alpn: &[&[u8]] = match self.listener.protocol {
            ListenerProtocol::Https | ListenerProtocol::Connect => {
                &[wire::ALPN_H2, wire::ALPN_HTTP11, wire::ALPN_HTTP10]
            }
            ListenerProtocol::Http => &[wire::ALPN_HTTP11, wire::ALPN_HTTP10],
            ListenerProtocol::Tcp | ListenerProtocol::Passthrough => &[],
        };
        let requirement = if self.listener.client_auth.accepts_bearer_tokens() {
            CertificateRequirement::Deferred
        } else {
            CertificateRequirement::Optional
        };
        let trust = TrustStore::listener(ca, &trust).map_err(fault)?;
        let config = verify::listener_server(resolver, &trust, requirement, alpn).map_err(fault)?;
        Ok(Some(ListenerTls {
            server_config: config,
            trust,
            client_roots: leaves.as_ref().map(|_| ca.client_bundle_pem().into()),
            leaves,
        }))
    }

    /// Returns the certificate resolver of a listener without a configured certificate. It issues one certificate per node from
    /// our own CA.
    fn leaves(&self, ca: &LiveCa, nodes: &Nodes) -> Result<Arc<SniCertResolver>, BindError> {
        let nodes = nodes.clone();
        let serves_all_nodes = self.listener.node_keys().is_empty();
        let find_name = Arc::new(move |name: &str| {
            // The names of all pods are alike, so that a client without credentials does not learn which pods exist.
            let is_pod = || serves_all_nodes && nodes.is_pod_name(name);
            let is_service = || is_pod() || nodes.service_by_name(name).is_some();
            if nodes.by_name(name).is_some() {
                Some(KnownName::Node)
            } else {
                is_service().then_some(KnownName::Service)
            }
        });
        let listen = match self.listener.listen {
            ListenAddr::Tcp(address) => address.ip(),
            ListenAddr::Unix(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        };
        let names = host_names(&self.listener.names, listen)?;
        Ok(Arc::new(SniCertResolver::new(
            ca.clone(),
            names,
            find_name,
        )?))
    }
}

fn client_roots(listener: &config::Listener) -> Result<Vec<CertificateDer<'static>>, BindError> {
    let mut client_roots = Vec::new();
    for path in &listener.client_auth.client_ca {
        let fault = |why: String| file(&listener.name, path, why);
        let roots =
            CertificateDer::pem_file_iter(path).map_err(|error| fault(error.to_string()))?;
        let before = client_roots.len();
        for root in roots {
            client_roots.push(root.map_err(|error| fault(error.to_string()))?);
        }
        if client_roots.len() == before {
            return Err(fault("it contains no certificate".to_owned()));
        }
    }
    Ok(client_roots)
}

/// Reads the files of a listener's issuers.
fn issuers(listener: &config::Listener) -> Result<Vec<JwtIssuerFiles>, BindError> {
    let read = |jwt: &config::Jwt| {
        let keys = match &jwt.jwks {
            Jwks::File(path) => {
                let keys = KeySet::parse(text(&listener.name, path)?.as_bytes());
                Some(keys.map_err(|why| file(&listener.name, path, why))?)
            }
            Jwks::Url(_) => None,
        };
        let roots = jwt.jwks_ca.as_deref();
        let roots = roots.map(|path| text(&listener.name, path)).transpose()?;
        Ok(JwtIssuerFiles { keys, roots })
    };
    listener.client_auth.jwt.iter().map(read).collect()
}

fn leaf(listener: &config::Listener) -> Result<Option<LeafCertificate>, BindError> {
    let Some(files) = &listener.certificate else {
        return Ok(None);
    };
    let chain = text(&listener.name, &files.chain)?;
    let key = text(&listener.name, &files.key)?;
    let leaf = LeafCertificate::load_for(Role::Server, &chain, &key);
    let leaf = leaf.map_err(|error| file(&listener.name, &files.chain, error.to_string()))?;
    Ok(Some(leaf))
}

fn text(listener: &str, path: &Path) -> Result<String, BindError> {
    std::fs::read_to_string(path).map_err(|error| file(listener, path, error.to_string()))
}

fn file(listener: &str, path: &Path, why: String) -> BindError {
    BindError::File {
        what: format!("listener {listener:?}"),
        path: path.to_owned(),
        why,
    }
}
