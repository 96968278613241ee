//! Identity of the tunnel port: the certificate that it presents to edges, and the CAs that it trusts.
//!
//! With the own CA, the gateway issues and renews a certificate for the names by which edges reach it. With an external CA, the
//! gateway reads the files at each reload, so a renewal of the files has to cause a reload. The choice between the two is fixed
//! while the gateway runs.

mod kubernetes;

use super::error::BindError;
use crate::{
    config,
    control::{
        certificate_expiry::CertificateInUse,
        gateway_revocation::GatewayRevocation,
        peers::{PeerTls, PeerTlsFn},
        tunnel_listener::{LiveTls, Tls},
    },
};
use arc_swap::ArcSwap;
use causeway_certs::{
    Ca, CaError, Certificate, ClusterCa, GATEWAY_LIFETIME, HostName, LeafCertificate, LiveCa,
    ReloadableCert, Store, TrustDomain, TrustStore, external, verify,
};
use causeway_tunnel::target;
use kubernetes::KubernetesIdentity;
use rustls::{
    pki_types::{CertificateDer, UnixTime},
    server::ResolvesServerCert,
};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, UNIX_EPOCH},
};
use tokio::{sync::watch, time::sleep};

/// Time until the next attempt after a certificate could not be issued.
const RENEWAL_RETRY: Duration = Duration::from_secs(10);
/// Interval at which the wall clock is checked. It may be corrected, and a timer does not advance while a machine is suspended.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Divisor of a certificate's lifetime. The renewal of an external certificate is late if less than this part remains. Vault's
/// agent renews at a tenth.
const LATE_DIVISOR: u64 = 20;
/// Configuration key of the external identity.
const CONFIG_KEY: &str = "tunnel.identity";
/// Maximum time between checks of the certificate. A timer does not advance while a machine is suspended.
const CHECK_INTERVAL: Duration = Duration::from_hours(1);

/// Current certificate and trust of the tunnel port. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct TunnelIdentity {
    ca: LiveCa,
    store: Store,
    names: Arc<ArcSwap<Vec<HostName>>>,
    leaf: Arc<ReloadableCert>,
    /// Notifies of each change of `leaf`.
    leaf_changes: watch::Sender<()>,
    external: Option<Arc<Mutex<ExternalIdentity>>>,
    cluster: Option<KubernetesIdentity>,
    revocation: GatewayRevocation,
}

/// Certificates of an external CA.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ExternalIdentity {
    leaf: LeafCertificate,
    chain: PathBuf,
    roots: Vec<CertificateDer<'static>>,
    pub(super) domain: TrustDomain,
    any_node: bool,
}

/// Identity of a new configuration, built and not yet in force.
#[derive(Debug)]
pub(super) struct PendingIdentity {
    names: Vec<HostName>,
    leaf: Option<LeafCertificate>,
    external: Option<(ExternalIdentity, Tls)>,
    cluster: Option<(ClusterCa, Tls)>,
}

/// Reads the files of external certificates.
pub(super) fn check(config: &config::Config) -> Result<(), BindError> {
    if let Some(identity) = &config.tunnel.identity {
        // A signer issues the certificate only after the start.
        match &identity.signer {
            Some(_) => drop(roots(identity)?),
            None => drop(ExternalIdentity::read(identity)?),
        }
    }
    KubernetesIdentity::read(config.signer())?;
    Ok(())
}

/// Reads the CAs that sign the certificates of edges.
fn roots(files: &config::Identity) -> Result<Vec<CertificateDer<'static>>, BindError> {
    let mut roots = Vec::new();
    for path in &files.client_ca {
        let found = external::parse_roots(&text(CONFIG_KEY, path)?);
        roots.extend(found.map_err(|error| file(CONFIG_KEY, path, error.to_string()))?);
    }
    Ok(roots)
}

impl ExternalIdentity {
    /// Reads the files.
    pub(super) fn read(files: &config::Identity) -> Result<Self, BindError> {
        // Both paths are set, which the validation of the configuration ensures.
        let path = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
        let (chain_path, key) = (path(&files.chain), path(&files.key));
        let read =
            external::load_gateway(&text(CONFIG_KEY, &chain_path)?, &text(CONFIG_KEY, &key)?);
        let (leaf, domain) =
            read.map_err(|error| file(CONFIG_KEY, &chain_path, error.to_string()))?;
        Ok(Self {
            leaf,
            chain: chain_path,
            roots: roots(files)?,
            domain,
            any_node: files.any_node,
        })
    }

    fn tls(&self, resolver: Arc<dyn ResolvesServerCert>, store: &Store) -> Result<Tls, BindError> {
        let trust = TrustStore::external(&self.roots, &self.domain).map_err(trust_error)?;
        let tickets = store.ticket_secret()?;
        let tls = Tls::new(resolver, trust, &tickets).map_err(trust_error)?;
        Ok(tls.any_node(self.any_node))
    }

    /// Logs a certificate that has expired or should have been renewed. Returns the time until the next check.
    fn check_expiry(&self) -> Duration {
        let facts = self.leaf.chain().first().map(Certificate::parse);
        let Some(Ok(facts)) = facts else {
            return CHECK_INTERVAL;
        };
        let (now, not_after) = (UnixTime::now().as_secs(), facts.not_after);
        let late_before = not_after.saturating_sub(facts.not_before) / LATE_DIVISOR;
        let (chain, left) = (self.chain.display(), not_after.saturating_sub(now));
        let next = if now > not_after {
            tracing::error!(%chain, "the certificate of the tunnel port has expired: edges refuse it");
            CHECK_INTERVAL.as_secs()
        } else if left <= late_before {
            let left = humantime::format_duration(Duration::from_secs(left));
            tracing::warn!(%chain, %left, "the certificate of the tunnel port expires soon, and no new one was loaded: renew the certificate, or check whether the last reload was refused");
            // Logs again at the expiry.
            not_after - now + 1
        } else {
            left - late_before
        };
        CHECK_INTERVAL.min(Duration::from_secs(next))
    }
}

impl TunnelIdentity {
    pub(super) fn new(
        ca: &LiveCa,
        store: &Store,
        config: &config::Config,
        (given, revocation): (Option<ExternalIdentity>, &GatewayRevocation),
    ) -> Result<Self, BindError> {
        let cluster = KubernetesIdentity::read(config.signer())?;
        let names = host_names(&config.tunnel.advertise, config.tunnel.listen.ip())?;
        let leaf = match &given {
            Some(given) => given.leaf.clone(),
            None => ca.get().issue_gateway(&names, GATEWAY_LIFETIME)?,
        };
        Ok(Self {
            ca: ca.clone(),
            store: store.clone(),
            names: Arc::new(ArcSwap::from_pointee(names)),
            leaf: Arc::new(ReloadableCert::new(leaf)),
            leaf_changes: watch::Sender::new(()),
            external: given.map(|given| Arc::new(Mutex::new(given))),
            cluster,
            revocation: revocation.clone(),
        })
    }

    /// Returns a function that builds the configuration with which this gateway dials other gateways.
    pub(super) fn peer_tls(&self, tls: &LiveTls) -> PeerTlsFn {
        let (leaf, tls) = (self.leaf.clone(), tls.clone());
        Arc::new(move || {
            let leaf = leaf.get();
            let config = verify::peer_client(&leaf, tls.load().trust());
            let not_after = Duration::from_secs(leaf.not_after().as_secs());
            Ok(PeerTls {
                config: config.map_err(|error| error.to_string())?,
                not_after: UNIX_EPOCH + not_after,
            })
        })
    }

    /// Returns a receiver that is notified of each change of the certificate.
    pub(super) fn certificate_changes(&self) -> watch::Receiver<()> {
        self.leaf_changes.subscribe()
    }

    fn external_identity(&self) -> Option<ExternalIdentity> {
        let given = self.external.as_ref()?;
        let given = given.lock().unwrap_or_else(PoisonError::into_inner);
        Some(given.clone())
    }

    /// Returns the tunnel port's TLS, with `ca` as the signer unless an external CA is configured.
    pub(super) fn tls(&self, ca: &Ca) -> Result<Tls, BindError> {
        if let Some(given) = self.external_identity() {
            return given.tls(self.leaf.clone(), &self.store);
        }
        self.tls_for_own_ca(ca, self.cluster.as_ref().map(KubernetesIdentity::trust))
    }

    fn tls_for_own_ca(&self, ca: &Ca, cluster: Option<ClusterCa>) -> Result<Tls, BindError> {
        let trust = TrustStore::from_ca(ca).map_err(trust_error)?;
        let trust = trust.with_revoked_gateways(self.revocation.revoked());
        let tickets = self.store.ticket_secret()?;
        let tls = Tls::new(self.leaf.clone(), trust, &tickets).map_err(trust_error)?;
        tls.with_cluster_ca(self.leaf.clone(), cluster)
            .map_err(trust_error)
    }

    /// Builds the identity of a new configuration.
    pub(super) fn prepare(&self, config: &config::Tunnel) -> Result<PendingIdentity, BindError> {
        let names = host_names(&config.advertise, config.listen.ip())?;
        match (&config.identity, self.external_identity()) {
            (Some(files), Some(now)) => {
                let mut next = ExternalIdentity::read(files)?;
                let leaf = next.leaf.replacing(Some(&now.leaf), UnixTime::now());
                next.leaf =
                    leaf.map_err(|error| file(CONFIG_KEY, &next.chain, error.to_string()))?;
                if next.domain != now.domain {
                    let (next, now) = (next.domain, now.domain);
                    return Err(file(
                        CONFIG_KEY,
                        &files.chain.clone().unwrap_or_default(),
                        format!(
                            "it has trust domain {next}, but this gateway has trust domain {now} until its next start"
                        ),
                    ));
                }
                let given = (next != now).then(|| {
                    let tls = next.tls(self.leaf.clone(), &self.store)?;
                    Ok::<_, BindError>((next, tls))
                });
                Ok(PendingIdentity {
                    names,
                    leaf: None,
                    external: given.transpose()?,
                    cluster: None,
                })
            }
            // This change takes effect at the next start.
            (None, Some(_)) => Ok(PendingIdentity {
                names,
                leaf: None,
                external: None,
                cluster: None,
            }),
            (_, None) => {
                let same_names = **self.names.load() == names;
                let leaf =
                    (!same_names).then(|| self.ca.get().issue_gateway(&names, GATEWAY_LIFETIME));
                Ok(PendingIdentity {
                    leaf: leaf.transpose()?,
                    names,
                    external: None,
                    cluster: self.reload_cluster_ca()?,
                })
            }
        }
    }

    /// Returns the cluster's CA, if its files differ from the CA that is trusted now.
    fn reload_cluster_ca(&self) -> Result<Option<(ClusterCa, Tls)>, BindError> {
        let next = self
            .cluster
            .as_ref()
            .map(KubernetesIdentity::reload_if_changed)
            .transpose()?;
        let Some(next) = next.flatten() else {
            return Ok(None);
        };
        let tls = self.tls_for_own_ca(&self.ca.get(), Some(next.clone()))?;
        Ok(Some((next, tls)))
    }

    /// Installs the identity, and renews it from now on under the new names. Returns the tunnel port's TLS if it has changed.
    pub(super) fn apply(&self, next: PendingIdentity) -> Option<Tls> {
        self.names.store(Arc::new(next.names));
        if let Some(leaf) = next.leaf {
            self.replace_certificate(leaf);
        }
        if let (Some(cluster), Some((next, tls))) = (&self.cluster, next.cluster) {
            cluster.replace_trust(next);
            return Some(tls);
        }
        let (next, tls) = next.external?;
        self.replace_certificate(next.leaf.clone());
        if let Some(given) = &self.external {
            *given.lock().unwrap_or_else(PoisonError::into_inner) = next;
        }
        Some(tls)
    }

    /// Returns TLS and certificate of the tunnel port for this CA, or `None` with an external CA.
    pub(super) fn prepare_ca(&self, ca: &Ca) -> Result<Option<(Tls, LeafCertificate)>, BindError> {
        if self.external.is_some() {
            return Ok(None);
        }
        Ok(Some((self.tls(ca)?, self.issue_certificate(ca)?)))
    }

    fn issue_certificate(&self, ca: &Ca) -> Result<LeafCertificate, CaError> {
        let leaf = ca.issue_gateway(&self.names.load(), GATEWAY_LIFETIME)?;
        log_issued(&leaf);
        Ok(leaf)
    }

    /// Returns the certificates of the tunnel port, presented and trusted.
    pub(super) fn certificates(&self) -> Vec<CertificateInUse> {
        let leaf = self.leaf.get();
        let Some(given) = self.external_identity() else {
            let presented = leaf.chain().first();
            let own = presented.and_then(|own| CertificateInUse::read("tunnel", own, None));
            let own = own.map(CertificateInUse::issued_by_us).into_iter();
            let cluster = self.cluster.as_ref().map(KubernetesIdentity::certificates);
            return own.chain(cluster.into_iter().flatten()).collect();
        };
        let presented = leaf.chain().first();
        let shown = presented
            .and_then(|shown| CertificateInUse::read("tunnel", shown, Some(given.chain.clone())));
        let roots = given.roots.iter();
        let roots = roots.filter_map(|root| CertificateInUse::read("tunnel_client_ca", root, None));
        shown.into_iter().chain(roots).collect()
    }

    /// Returns the names by which edges reach this gateway.
    pub(super) fn names(&self) -> Vec<HostName> {
        self.names.load().to_vec()
    }

    /// Replaces the certificate that is presented.
    pub(super) fn replace_certificate(&self, leaf: LeafCertificate) {
        self.leaf.swap(leaf);
        self.leaf_changes.send_replace(());
    }

    /// Waits until the certificate that this gateway presents is revoked.
    async fn wait_revoked(&self, changes: &mut watch::Receiver<()>) {
        let revoked = self.revocation.revoked();
        let is_revoked = |own: &CertificateDer<'_>| {
            Certificate::parse(own).is_ok_and(|own| revoked.contains(&own.serial_hex()))
        };
        while !self.leaf.get().chain().first().is_some_and(is_revoked) {
            // The sender lives as long as this value.
            let _ = changes.changed().await;
        }
    }

    /// Waits until half of the remaining validity of the certificate has passed by the wall clock.
    async fn wait_half_expired(&self) {
        let now = || UnixTime::now().as_secs();
        let remaining = self.leaf.get().not_after().as_secs().saturating_sub(now());
        let renews_at = now() + remaining / 2;
        loop {
            // First, so that renewals of a CA that expires do not follow one after the other.
            sleep(CLOCK_CHECK_INTERVAL).await;
            if now() >= renews_at {
                return;
            }
        }
    }

    /// Issues a new certificate whenever half of the old one's lifetime has passed by any clock or the old one is revoked, or logs
    /// that an external certificate was not renewed. Never ends.
    pub(super) async fn renew(self) {
        let mut changes = self.revocation.subscribe();
        loop {
            if let Some(given) = self.external_identity() {
                sleep(given.check_expiry()).await;
                continue;
            }
            tokio::select! {
                () = sleep(GATEWAY_LIFETIME / 2) => {}
                () = self.wait_half_expired() => {}
                () = self.wait_revoked(&mut changes) => {
                    tracing::warn!("this gateway's certificate is revoked, and a new one replaces it");
                }
            }
            match self.issue_certificate(&self.ca.get()) {
                Ok(leaf) => self.replace_certificate(leaf),
                Err(error) => {
                    tracing::error!(%error, "the gateway's certificate cannot be renewed");
                    sleep(RENEWAL_RETRY).await;
                }
            }
        }
    }
}

/// Logs the serial number of a new certificate, by which it can be revoked later (`causeway ca revoke-gateway`).
fn log_issued(leaf: &LeafCertificate) {
    let own = leaf.chain().first();
    if let Some(own) = own.and_then(|own| Certificate::parse(own).ok()) {
        tracing::info!(
            serial = own.serial_hex(),
            "issued a certificate for this gateway"
        );
    }
}

/// Returns the host names of the `host:port` texts. Without any text, returns the listen address and loopback.
pub(super) fn host_names(texts: &[String], listen: IpAddr) -> Result<Vec<HostName>, BindError> {
    let mut names = Vec::new();
    for text in texts {
        let host = target::split_host_port(text).map_or(text.as_str(), |(host, _)| host);
        let name =
            HostName::parse(host).map_err(|error| BindError::Name(format!("{text:?}: {error}")))?;
        names.push(name);
    }
    if names.is_empty() {
        let loopback = [
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ];
        names.extend(
            loopback
                .into_iter()
                .chain((!listen.is_unspecified()).then_some(listen))
                .map(HostName::from),
        );
    }
    Ok(names)
}

fn text(what: &str, path: &Path) -> Result<String, BindError> {
    std::fs::read_to_string(path).map_err(|error| file(what, path, error.to_string()))
}

fn file(what: &str, path: &Path, why: String) -> BindError {
    BindError::File {
        what: what.to_owned(),
        path: path.to_owned(),
        why,
    }
}

fn trust_error(cause: causeway_certs::verify::TrustError) -> BindError {
    BindError::Trust {
        what: "the tunnel port".to_owned(),
        cause,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{state::Registry, worker::Workers};
    use causeway_certs::OpenMode;
    use tokio::time::timeout;
    use verify::{Purpose, none_revoked, verify_peer};

    /// Identity of a gateway with its own CA.
    struct World {
        identity: TunnelIdentity,
        registry: Registry,
        _folder: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            verify::install_provider();
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(folder.path(), OpenMode::Create).unwrap();
            let domain = TrustDomain::parse("td").unwrap();
            store.save_ca(&Ca::create(&domain).unwrap()).unwrap();
            let ca = LiveCa::new(store.ca().unwrap().unwrap());
            let revocation = GatewayRevocation::load(&store, &ca, false).unwrap();
            let from = (None, &revocation);
            let config = config::Config::default();
            Self {
                identity: TunnelIdentity::new(&ca, &store, &config, from).unwrap(),
                registry: Registry::new(&Workers::on_current_runtime()),
                _folder: folder,
            }
        }

        /// Returns the serial number of the certificate that this gateway presents.
        fn serial(&self) -> String {
            let leaf = self.identity.leaf.get();
            Certificate::parse(&leaf.chain()[0]).unwrap().serial_hex()
        }

        fn revoke(&self, serial: &str) {
            let store = &self.identity.store;
            store.revoke_gateway(serial, "stolen").unwrap();
            let revocation = &self.identity.revocation;
            revocation.reload_and_announce(&self.registry).unwrap();
        }
    }

    #[tokio::test]
    async fn only_the_revocation_of_its_own_certificate_renews_it() {
        let world = World::new();
        let (first, mut changes) = (world.serial(), world.identity.certificate_changes());
        let mut renewing = Box::pin(world.identity.clone().renew());
        world.revoke("40aa");
        tokio::select! {
            biased;
            () = &mut renewing => unreachable!("it never ends"),
            () = tokio::task::yield_now() => {}
        }
        assert_eq!(world.serial(), first);
        world.revoke(&first);
        tokio::select! {
            () = &mut renewing => unreachable!("it never ends"),
            renewed = timeout(Duration::from_mins(1), changes.changed()) => renewed.unwrap().unwrap(),
        }
        assert_ne!(world.serial(), first);
    }

    #[tokio::test]
    async fn the_tunnel_port_rejects_a_gateway_from_its_revocation_on() {
        let world = World::new();
        let tls = world.identity.tls(&world.identity.ca.get()).unwrap();
        let leaf = world.identity.leaf.get();
        let check = || {
            let (now, trust) = (UnixTime::now(), tls.trust());
            verify_peer(Some(leaf.chain()), Purpose::Peer, now, trust, &none_revoked)
        };
        check().unwrap();
        world.revoke(&world.serial());
        check().unwrap_err();
    }
}
