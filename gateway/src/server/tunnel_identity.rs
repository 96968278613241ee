//! Identity of the tunnel port: the certificate that it presents to edges, and the CAs that it trusts.
//!
//! With the own CA, the gateway issues and renews a certificate for the names by which edges reach it. With an external CA, the
//! gateway reads the CA's files at each reload, and the renewal of the files has to cause a reload. The choice between the two is
//! fixed as long as the gateway runs.

mod kubernetes;

use super::error::BindError;
use crate::{
    config,
    control::{certificate_expiry::CertificateInUse, tunnel_listener::Tls},
};
use arc_swap::ArcSwap;
use causeway_certs::{
    Ca, CaError, Certificate, ClusterCa, HostName, LeafCertificate, LiveCa, ReloadableCert, Store,
    TrustDomain, TrustStore, external,
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
    time::Duration,
};
use tokio::time::sleep;

/// Lifetime of a certificate that the gateway issues itself; it is renewed at half of that.
const LIFETIME: Duration = Duration::from_hours(7 * 24);
/// Divisor of a certificate's lifetime: an external certificate with less than this part left is late. Vault's agent renews at a
/// tenth.
const LATE: u64 = 20;
/// Configuration key of the external identity.
const WHAT: &str = "tunnel.identity";
/// Maximum time between checks of the certificate. A timer stands still while a machine is suspended.
const LOOK: Duration = Duration::from_hours(1);

/// Current certificate and trust of the tunnel port. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct TunnelIdentity {
    ca: LiveCa,
    store: Store,
    names: Arc<ArcSwap<Vec<HostName>>>,
    leaf: Arc<ReloadableCert>,
    given: Option<Arc<Mutex<ExternalIdentity>>>,
    cluster: Option<KubernetesIdentity>,
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

/// Identity of a new configuration, built and not in force.
#[derive(Debug)]
pub(super) struct PendingIdentity {
    names: Vec<HostName>,
    leaf: Option<LeafCertificate>,
    given: Option<(ExternalIdentity, Tls)>,
    cluster: Option<(ClusterCa, Tls)>,
}

/// Reads the files of external certificates.
pub(super) fn check(config: &config::Config) -> Result<(), BindError> {
    if let Some(identity) = &config.tunnel.identity {
        // A signer issues the certificate after the start.
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
        let found = external::roots(&text(WHAT, path)?);
        roots.extend(found.map_err(|error| file(WHAT, path, error.to_string()))?);
    }
    Ok(roots)
}

impl ExternalIdentity {
    /// Reads the files.
    pub(super) fn read(files: &config::Identity) -> Result<Self, BindError> {
        // Both are set: the validation of the configuration ensures it.
        let path = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
        let (shown, key) = (path(&files.chain), path(&files.key));
        let read = external::gateway(&text(WHAT, &shown)?, &text(WHAT, &key)?);
        let (leaf, domain) = read.map_err(|error| file(WHAT, &shown, error.to_string()))?;
        Ok(Self {
            leaf,
            chain: shown,
            roots: roots(files)?,
            domain,
            any_node: files.any_node,
        })
    }

    fn tls(&self, shows: Arc<dyn ResolvesServerCert>, store: &Store) -> Result<Tls, BindError> {
        let trust = TrustStore::given(&self.roots, &self.domain).map_err(unbuilt)?;
        let tickets = store.ticket_secret()?;
        let tls = Tls::new(shows, trust, &tickets).map_err(unbuilt)?;
        Ok(tls.any_node(self.any_node))
    }

    /// Logs if the certificate has expired or should have been renewed. Returns the time until the next check.
    fn look(&self) -> Duration {
        let facts = self.leaf.chain().first().map(Certificate::read);
        let Some(Ok(facts)) = facts else { return LOOK };
        let (now, ends) = (UnixTime::now().as_secs(), facts.not_after);
        let late = ends.saturating_sub(facts.not_before) / LATE;
        let (chain, left) = (self.chain.display(), ends.saturating_sub(now));
        let next = if now > ends {
            tracing::error!(%chain, "the certificate of the tunnel port has expired: edges refuse it");
            LOOK.as_secs()
        } else if left <= late {
            let left = humantime::format_duration(Duration::from_secs(left));
            tracing::warn!(%chain, %left, "the certificate of the tunnel port expires soon, and no new one was loaded: renew the certificate, or check whether the last reload was refused");
            // It is logged again at the expiry.
            ends - now + 1
        } else {
            left - late
        };
        LOOK.min(Duration::from_secs(next))
    }
}

impl TunnelIdentity {
    pub(super) fn new(
        ca: &LiveCa,
        store: &Store,
        (config, given): (&config::Config, Option<ExternalIdentity>),
    ) -> Result<Self, BindError> {
        let cluster = KubernetesIdentity::read(config.signer())?;
        let config = &config.tunnel;
        let names = names(&config.advertise, config.listen.ip())?;
        let leaf = match &given {
            Some(given) => given.leaf.clone(),
            None => ca.get().issue_gateway(&names, LIFETIME)?,
        };
        Ok(Self {
            ca: ca.clone(),
            store: store.clone(),
            names: Arc::new(ArcSwap::from_pointee(names)),
            leaf: Arc::new(ReloadableCert::new(leaf)),
            given: given.map(|given| Arc::new(Mutex::new(given))),
            cluster,
        })
    }

    fn given(&self) -> Option<ExternalIdentity> {
        let given = self.given.as_ref()?;
        let given = given.lock().unwrap_or_else(PoisonError::into_inner);
        Some(given.clone())
    }

    /// Returns the tunnel port's TLS, with `ca` as the signer unless an external CA is configured.
    pub(super) fn tls(&self, ca: &Ca) -> Result<Tls, BindError> {
        if let Some(given) = self.given() {
            return given.tls(self.leaf.clone(), &self.store);
        }
        self.signing(ca, self.cluster.as_ref().map(KubernetesIdentity::trust))
    }

    fn signing(&self, ca: &Ca, cluster: Option<ClusterCa>) -> Result<Tls, BindError> {
        let trust = TrustStore::of(ca).map_err(unbuilt)?;
        let tickets = self.store.ticket_secret()?;
        let tls = Tls::new(self.leaf.clone(), trust, &tickets).map_err(unbuilt)?;
        tls.vouched(self.leaf.clone(), cluster).map_err(unbuilt)
    }

    /// Builds the identity of a new configuration.
    pub(super) fn prepare(&self, config: &config::Tunnel) -> Result<PendingIdentity, BindError> {
        let names = names(&config.advertise, config.listen.ip())?;
        match (&config.identity, self.given()) {
            (Some(files), Some(now)) => {
                let mut next = ExternalIdentity::read(files)?;
                let leaf = next.leaf.replacing(Some(&now.leaf), UnixTime::now());
                next.leaf = leaf.map_err(|error| file(WHAT, &next.chain, error.to_string()))?;
                if next.domain != now.domain {
                    let (next, now) = (next.domain, now.domain);
                    return Err(file(
                        WHAT,
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
                    given: given.transpose()?,
                    cluster: None,
                })
            }
            // That waits for the next start.
            (None, Some(_)) => Ok(PendingIdentity {
                names,
                leaf: None,
                given: None,
                cluster: None,
            }),
            (_, None) => {
                let same = **self.names.load() == names;
                let leaf = (!same).then(|| self.ca.get().issue_gateway(&names, LIFETIME));
                Ok(PendingIdentity {
                    leaf: leaf.transpose()?,
                    names,
                    given: None,
                    cluster: self.another_cluster()?,
                })
            }
        }
    }

    /// Returns the cluster's CA, if its files differ from the CA that is trusted now.
    fn another_cluster(&self) -> Result<Option<(ClusterCa, Tls)>, BindError> {
        let next = self
            .cluster
            .as_ref()
            .map(KubernetesIdentity::again)
            .transpose()?;
        let Some(next) = next.flatten() else {
            return Ok(None);
        };
        let tls = self.signing(&self.ca.get(), Some(next.clone()))?;
        Ok(Some((next, tls)))
    }

    /// Installs the identity, and renews it under its names from now on. Returns the tunnel port's TLS, if it has changed.
    pub(super) fn apply(&self, next: PendingIdentity) -> Option<Tls> {
        self.names.store(Arc::new(next.names));
        if let Some(leaf) = next.leaf {
            self.show(leaf);
        }
        if let (Some(cluster), Some((next, tls))) = (&self.cluster, next.cluster) {
            cluster.turn(next);
            return Some(tls);
        }
        let (next, tls) = next.given?;
        self.show(next.leaf.clone());
        if let Some(given) = &self.given {
            *given.lock().unwrap_or_else(PoisonError::into_inner) = next;
        }
        Some(tls)
    }

    /// Returns TLS and certificate of the tunnel port for this CA, or `None` with an external CA.
    pub(super) fn turn_to(&self, ca: &Ca) -> Result<Option<(Tls, LeafCertificate)>, BindError> {
        if self.given.is_some() {
            return Ok(None);
        }
        Ok(Some((self.tls(ca)?, self.leaf_of(ca)?)))
    }

    fn leaf_of(&self, ca: &Ca) -> Result<LeafCertificate, CaError> {
        ca.issue_gateway(&self.names.load(), LIFETIME)
    }

    /// Returns the certificates of the tunnel port, presented and trusted.
    pub(super) fn certificates(&self) -> Vec<CertificateInUse> {
        let leaf = self.leaf.get();
        let Some(given) = self.given() else {
            let own = leaf.chain().first();
            let own = own.and_then(|own| CertificateInUse::read("tunnel", own, None));
            let own = own.map(CertificateInUse::issued_by_us).into_iter();
            let cluster = self.cluster.as_ref().map(KubernetesIdentity::certificates);
            return own.chain(cluster.into_iter().flatten()).collect();
        };
        let shown = leaf.chain().first();
        let shown = shown
            .and_then(|shown| CertificateInUse::read("tunnel", shown, Some(given.chain.clone())));
        let roots = given.roots.iter();
        let roots = roots.filter_map(|root| CertificateInUse::read("tunnel_client_ca", root, None));
        shown.into_iter().chain(roots).collect()
    }

    /// Returns the names under which edges reach this gateway.
    pub(super) fn names(&self) -> Vec<HostName> {
        self.names.load().to_vec()
    }

    /// Presents this certificate from now on.
    pub(super) fn show(&self, leaf: LeafCertificate) {
        self.leaf.swap(leaf);
    }

    /// Issues a new certificate whenever half of the old one's lifetime is over, or logs that an external one was not renewed.
    /// Never ends.
    pub(super) async fn renew(self) {
        loop {
            if let Some(given) = self.given() {
                sleep(given.look()).await;
                continue;
            }
            sleep(LIFETIME / 2).await;
            match self.leaf_of(&self.ca.get()) {
                Ok(leaf) => self.show(leaf),
                Err(error) => {
                    tracing::error!(%error, "the gateway's certificate cannot be renewed");
                }
            }
        }
    }
}

/// Returns the names in `host:port` texts; without any, the address itself and the loopback.
pub(super) fn names(texts: &[String], listen: IpAddr) -> Result<Vec<HostName>, BindError> {
    let mut names = Vec::new();
    for text in texts {
        let host = target::split(text).map_or(text.as_str(), |(host, _)| host);
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

fn unbuilt(cause: causeway_certs::verify::TrustError) -> BindError {
    BindError::Trust {
        what: "the tunnel port".to_owned(),
        cause,
    }
}
