//! Controller of a gateway's own certificates by `certificates.k8s.io`, from external signers: that of its tunnel port
//! (`tunnel.identity.signer`), and the client certificates that it presents to upstreams (`upstream_tls.*.signer`).
//!
//! For the tunnel port it requests a server certificate with the URI of a gateway and the names under which edges reach this
//! gateway. For upstreams it requests a client certificate that names a user. Each is stored in the data directory, key and
//! chain in one file. The gateway loads the file like any other file. A new certificate is requested after two thirds of the
//! old certificate's lifetime, or when the names change. The old certificate stays in use meanwhile.

use crate::{
    csr_client::{self, CsrSpec},
    log_throttle::LogThrottle,
};
use causeway_certs::{
    Certificate, CsrError, HostName, LeafCertificate, PendingCsr, PrivateKey, Requested, Store,
    StoreError, TrustDomain, external,
};
use causeway_edge::{CsrRequestError, CsrStatus};
use causeway_gateway::control::drain::ReadinessBlock;
use causeway_rt::backoff::Backoff;
use kube::Client;
use rustls_pki_types::UnixTime;
use std::{
    convert::Infallible,
    fmt::Display,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// Usages of a server and of a client, which sign their handshakes.
const SERVER_USAGES: [&str; 2] = ["server auth", "digital signature"];
const CLIENT_USAGES: [&str; 2] = ["client auth", "digital signature"];
/// Interval of the checks whether a certificate is due, and of the polls of a request.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit of one request for a certificate.
const REQUEST_LIFETIME: Duration = Duration::from_hours(1);
/// Maximum pauses between requests: while the API does not respond, and while requests fail.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));
/// Minimum time between two certificates, however short their lifetime.
const MIN_RENEWAL_INTERVAL: Duration = Duration::from_mins(1);
/// Time limit of a disk operation.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);
/// Prefixes of lines in the stored file: of the names, and of the time of issue.
const NAMES_PREFIX: &str = "names: ";
const ISSUED_PREFIX: &str = "made: ";

/// Controller that requests the certificate and stores it.
pub(crate) struct GatewayCertificate {
    /// The cluster's API.
    pub client: Client,
    /// Name of the signer.
    pub signer: String,
    /// Purpose of the certificate.
    pub purpose: Purpose,
    /// Whether this gateway approves the request itself.
    pub approve: bool,
    /// Store of the certificate.
    pub store: Store,
    /// Name of this gateway, in the request's name.
    pub gateway: String,
}

/// Purpose of a certificate.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    /// The tunnel port of a gateway of this trust domain.
    TunnelPort(TrustDomain),
    /// A client of the upstreams of a port, as this user.
    AppClient(u16, String),
}

impl Purpose {
    fn request_kind(&self) -> Requested {
        match self {
            Self::TunnelPort(_) => Requested::Identity,
            Self::AppClient(port, _) => Requested::AppClient(*port),
        }
    }

    fn usages(&self) -> [&'static str; 2] {
        match self {
            Self::TunnelPort(_) => SERVER_USAGES,
            Self::AppClient(..) => CLIENT_USAGES,
        }
    }

    /// Returns a description of the request, in the format of the data directory.
    fn describe_subject(&self, names: &[HostName]) -> String {
        match self {
            Self::TunnelPort(domain) => format!("{} of {domain}", join_names(names)),
            Self::AppClient(_, user) => format!("user {user}"),
        }
    }

    fn build_request(&self, key: &PrivateKey, names: &[HostName]) -> Result<String, CsrError> {
        match self {
            Self::TunnelPort(domain) => key.gateway_request(domain, names),
            Self::AppClient(_, user) => key.user_request(user),
        }
    }

    /// Parses a certificate with its key, if it is for this purpose.
    fn parse_certificate(&self, text: &str) -> Result<LeafCertificate, String> {
        match self {
            Self::TunnelPort(domain) => {
                let (leaf, domain_found) =
                    external::load_gateway(text, text).map_err(error_text)?;
                if domain_found != *domain {
                    return Err(format!(
                        "it has trust domain {domain_found} instead of {domain}"
                    ));
                }
                Ok(leaf)
            }
            Self::AppClient(_, user) => {
                let leaf = LeafCertificate::load(text, text).map_err(error_text)?;
                let details = leaf.chain().first().map(Certificate::parse);
                let details = details.and_then(Result::ok).unwrap_or_default();
                if details.common_name.as_deref() != Some(user) || !details.client_auth {
                    return Err(format!("it is not a client certificate of user {user}"));
                }
                Ok(leaf)
            }
        }
    }
}

/// Reason for which there is no new certificate now.
enum NotRenewed {
    /// The certificate was requested and is pending.
    Pending(String),
    /// The request has failed.
    Failed(String),
}

impl GatewayCertificate {
    /// Waits for the first certificate. `report` receives a description of the state meanwhile.
    pub(crate) async fn wait_for_first(&self, names: &[HostName], report: &(dyn Fn(&str) + Sync)) {
        let is_valid = |stored: &StoredCertificate| stored.not_after > SystemTime::now();
        self.renew_until(|| names.to_vec(), report, Some(&is_valid))
            .await;
    }

    /// Maintains a valid certificate for the present names in the store. Never returns.
    pub(crate) async fn run(self, names: impl Fn() -> Vec<HostName>) -> Infallible {
        self.renew_until(names, &|_| {}, None).await;
        std::future::pending().await
    }

    /// Runs the controller for a client certificate for upstreams. Clients of the gateway wait until there is a certificate.
    pub(crate) async fn run_with_readiness_block(
        self,
        readiness_block: ReadinessBlock,
    ) -> Infallible {
        self.wait_for_first(&[], &|why| readiness_block.set_reason(why))
            .await;
        drop(readiness_block);
        self.run(Vec::new).await
    }

    /// Requests a certificate whenever one is due. Returns once there is a certificate that is `is_sufficient`, if that is
    /// given.
    async fn renew_until(
        &self,
        names: impl Fn() -> Vec<HostName>,
        report: &(dyn Fn(&str) + Sync),
        is_sufficient: Option<&(dyn Fn(&StoredCertificate) -> bool + Sync)>,
    ) {
        let mut failure_log = LogThrottle::new(match self.purpose {
            Purpose::TunnelPort(_) => "getting this gateway's certificate from the cluster",
            Purpose::AppClient(..) => "getting the client certificate for apps from the cluster",
        });
        let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
        let mut stored = self.load_stored().await;
        loop {
            if let (Some(is_sufficient), Some(stored)) = (is_sufficient, &stored)
                && is_sufficient(stored)
            {
                return;
            }
            let wanted_names = names();
            let is_due =
                |stored: &StoredCertificate| stored.is_due(&wanted_names, SystemTime::now());
            let mut pause = POLL_INTERVAL;
            if stored.as_ref().is_none_or(is_due) {
                match self.request_certificate(&wanted_names).await {
                    Ok(issued) => {
                        stored = Some(issued);
                        backoff.reset();
                        failure_log.log_recovery();
                        continue;
                    }
                    Err(NotRenewed::Pending(why)) => {
                        failure_log.log_failure(&why);
                        report(&why);
                    }
                    Err(NotRenewed::Failed(why)) => {
                        failure_log.log_failure(&why);
                        report(&why);
                        pause = backoff.refused(None, rand::random());
                    }
                }
            }
            sleep(pause).await;
        }
    }

    /// Returns the stored certificate, if it is usable.
    async fn load_stored(&self) -> Option<StoredCertificate> {
        let kind = self.purpose.request_kind();
        let text = self
            .on_disk(move |store| store.issued_certificate(kind))
            .await;
        StoredCertificate::read(&text.ok().flatten()?, &self.purpose).ok()
    }

    /// Submits a request if there is none for these names yet, and checks its outcome.
    async fn request_certificate(
        &self,
        names: &[HostName],
    ) -> Result<StoredCertificate, NotRenewed> {
        let pending = self
            .load_or_create_pending(names)
            .await
            .map_err(NotRenewed::Failed)?;
        let key = pending.key().map_err(failed)?;
        let request = self.purpose.build_request(&key, names).map_err(failed)?;
        let spec = CsrSpec {
            name: &pending.name,
            signer: &self.signer,
            usages: self.purpose.usages(),
            expiration_seconds: None,
            request_pem: &request,
        };
        let submitted = csr_client::submit(self.client.clone(), &spec).await;
        submitted.map_err(|why| NotRenewed::Pending(csr_error_text(why)))?;
        if self.approve {
            self.approve(&spec).await?;
        }
        let chain = self.fetch_chain(&pending).await?;
        let text = StoredCertificate::encode(names, &chain, key.key_pem().expose());
        let issued = StoredCertificate::read(&text, &self.purpose);
        let issued = issued.and_then(|certificate| {
            let is_valid = certificate.not_after > SystemTime::now();
            is_valid
                .then_some(certificate)
                .ok_or_else(|| "it has expired already".to_owned())
        });
        if issued.is_ok() {
            let kind = self.purpose.request_kind();
            let saved = self
                .on_disk(move |store| store.save_issued_certificate(kind, &text))
                .await;
            // The certificate can still be fetched when the disk works again.
            saved.map_err(NotRenewed::Pending)?;
        }
        self.forget_pending().await?;
        let name = pending.name;
        let issued = issued.map_err(|why| {
            NotRenewed::Failed(format!(
                "the certificate issued for the request {name} cannot be used: {why}"
            ))
        })?;
        let ends = humantime::format_rfc3339_seconds(issued.not_after);
        tracing::info!(request = name, %ends, purpose = ?self.purpose, "this gateway has a new certificate from its cluster");
        Ok(issued)
    }

    /// Returns the certificate chain that the cluster has issued for a request. Forgets a request that is refused or too old.
    async fn fetch_chain(&self, pending: &PendingCsr) -> Result<String, NotRenewed> {
        match csr_client::poll_status(self.client.clone(), &pending.name).await {
            Ok(CsrStatus::Signed(chain)) => Ok(chain),
            Ok(CsrStatus::Pending(_))
                if pending.since + REQUEST_LIFETIME.as_secs() > unix_now() =>
            {
                Err(NotRenewed::Pending(format!(
                    "the request {} is not approved and signed yet: this is the task of {}",
                    pending.name, self.signer
                )))
            }
            Ok(CsrStatus::Refused(why) | CsrStatus::Pending(why)) => {
                self.forget_pending().await?;
                Err(NotRenewed::Failed(why))
            }
            Err(why) => Err(NotRenewed::Pending(csr_error_text(why))),
        }
    }

    /// Approves our own request. If the request with its name in the cluster is not ours, forgets the name, and the next
    /// request gets another name.
    async fn approve(&self, spec: &CsrSpec<'_>) -> Result<(), NotRenewed> {
        let approved = csr_client::approve(self.client.clone(), spec).await;
        if approved.map_err(|why| NotRenewed::Pending(csr_error_text(why)))? {
            return Ok(());
        }
        self.forget_pending().await?;
        Err(NotRenewed::Failed(format!(
            "the request {} in the cluster was not created by this gateway and is not approved",
            spec.name
        )))
    }

    async fn forget_pending(&self) -> Result<(), NotRenewed> {
        let kind = self.purpose.request_kind();
        let forgotten = self.on_disk(move |store| store.remove_pending(kind));
        forgotten.await.map_err(NotRenewed::Pending)
    }

    /// Returns the pending request, or a new one that is stored before it is submitted.
    async fn load_or_create_pending(&self, names: &[HostName]) -> Result<PendingCsr, String> {
        let subject = format!("{}: {}", self.signer, self.purpose.describe_subject(names));
        let kind = self.purpose.request_kind();
        let stored = self.on_disk(move |store| store.pending(kind)).await?;
        if let Some(stored) = stored.filter(|certificate| certificate.asks == subject) {
            return Ok(stored);
        }
        self.on_disk(move |store| store.check_issued_certificate_space(kind))
            .await?;
        let key = PrivateKey::generate().map_err(error_text)?;
        let host = object_name(&self.gateway);
        let name = format!("causeway-gateway-{host}-{:08x}", rand::random::<u32>());
        let pending = PendingCsr::new(name, subject, unix_now(), &key);
        let to_save = pending.clone();
        self.on_disk(move |store| store.save_pending(kind, &to_save))
            .await?;
        Ok(pending)
    }

    /// Runs a disk operation on another thread than the one that receives signals.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, String> {
        let store = self.store.clone();
        match timeout(DISK_TIMEOUT, spawn_blocking(move || work(&store))).await {
            Ok(Ok(result)) => result.map_err(error_text),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the data directory does not answer".to_owned()),
        }
    }
}

/// Contents of the stored file.
struct StoredCertificate {
    /// Names that were requested. The signer may have left some out.
    names: String,
    /// Beginning of the validity. A signer may set it long before the time of issue.
    valid_from: SystemTime,
    not_after: SystemTime,
}

impl StoredCertificate {
    fn encode(names: &[HostName], chain: &str, key: &str) -> String {
        format!(
            "{NAMES_PREFIX}{}\n{ISSUED_PREFIX}{}\n{chain}\n{key}",
            join_names(names),
            unix_now()
        )
    }

    fn read(text: &str, purpose: &Purpose) -> Result<Self, String> {
        let leaf = purpose.parse_certificate(text)?;
        let (not_before, not_after) = validity(&leaf);
        let field = |key| text.lines().find_map(|line| line.strip_prefix(key));
        let issued_at = field(ISSUED_PREFIX).and_then(|made| made.parse().ok());
        Ok(Self {
            names: field(NAMES_PREFIX).unwrap_or_default().to_owned(),
            valid_from: not_before
                .max(UNIX_EPOCH + Duration::from_secs(issued_at.unwrap_or_default())),
            not_after,
        })
    }

    fn is_due(&self, names: &[HostName], now: SystemTime) -> bool {
        let lifetime = self.not_after.duration_since(self.valid_from);
        let renew_at = self.valid_from + lifetime.unwrap_or_default().mul_f64(2.0 / 3.0);
        now >= renew_at.max(self.valid_from + MIN_RENEWAL_INTERVAL)
            || self.names != join_names(names)
    }
}

fn validity(leaf: &LeafCertificate) -> (SystemTime, SystemTime) {
    let details = leaf.chain().first().map(Certificate::parse);
    // The certificate was already parsed when the leaf was loaded.
    let details = details.and_then(Result::ok).unwrap_or_default();
    let to_system_time = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    (
        to_system_time(details.not_before),
        to_system_time(details.not_after),
    )
}

/// Returns a name as a part of an object's name (RFC 1123).
fn object_name(name: &str) -> String {
    let sanitize = |char: char| match char.to_ascii_lowercase() {
        char if char.is_ascii_alphanumeric() => char,
        _ => '-',
    };
    name.chars().take(63).map(sanitize).collect()
}

fn join_names(names: &[HostName]) -> String {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    names.join(" ")
}

fn unix_now() -> u64 {
    UnixTime::now().as_secs()
}

fn failed(error: impl Display) -> NotRenewed {
    NotRenewed::Failed(error_text(error))
}

fn error_text(error: impl Display) -> String {
    error.to_string()
}

fn csr_error_text(why: CsrRequestError) -> String {
    match why {
        CsrRequestError::Silent(why) | CsrRequestError::Refused(why) => why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::Ca;

    fn kept(names: &[HostName]) -> String {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let leaf = ca.issue_gateway(names, Duration::from_hours(3)).unwrap();
        StoredCertificate::encode(names, &leaf.chain_pem(), leaf.key_pem().expose())
    }

    fn domain(name: &str) -> Purpose {
        Purpose::TunnelPort(TrustDomain::parse(name).unwrap())
    }

    #[test]
    fn renewal_is_due_at_two_thirds_of_life_or_for_changed_names() {
        let names = [
            HostName::parse("gw.example").unwrap(),
            HostName::parse("192.0.2.1").unwrap(),
        ];
        let text = kept(&names);
        let kept = StoredCertificate::read(&text, &domain("td")).unwrap();
        let later = SystemTime::now() + MIN_RENEWAL_INTERVAL;
        assert!(!kept.is_due(&names, later));
        assert!(kept.is_due(&names[..1], later));
        assert!(kept.is_due(&names, kept.not_after - Duration::from_mins(50)));
        // Requests do not follow one after the other, however far back the validity begins and whatever the clock shows.
        let hour = Duration::from_hours(1);
        let backdated = StoredCertificate {
            valid_from: SystemTime::now(),
            not_after: SystemTime::now() + hour / 6,
            ..kept
        };
        assert!(!backdated.is_due(&names, later));
        assert!(backdated.is_due(&names, later + hour / 6));
        assert!(StoredCertificate::read(&text, &domain("other")).is_err());
        assert!(StoredCertificate::read("names: gw.example", &domain("td")).is_err());
    }

    #[test]
    fn a_client_certificate_counts_for_its_user_alone() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let leaf = ca
            .issue_client("ann", &[], Duration::from_hours(3))
            .unwrap();
        let text = StoredCertificate::encode(&[], &leaf.chain_pem(), leaf.key_pem().expose());
        let read = |user: &str| {
            let purpose = Purpose::AppClient(10250, user.to_owned());
            StoredCertificate::read(&text, &purpose)
        };
        assert!(
            !read("ann")
                .unwrap()
                .is_due(&[], SystemTime::now() + MIN_RENEWAL_INTERVAL)
        );
        assert!(read("bob").is_err());
        let server = ca.issue_listener(&[], Duration::from_hours(3)).unwrap();
        let text = StoredCertificate::encode(&[], &server.chain_pem(), server.key_pem().expose());
        let purpose = Purpose::AppClient(10250, "causeway listener".to_owned());
        assert!(StoredCertificate::read(&text, &purpose).is_err());
    }
}
