//! Controller of a gateway's own certificates by `certificates.k8s.io`, from external signers: that of its tunnel port
//! (`tunnel.identity.signer`), and the client certificates that it shows to upstreams (`upstream_tls.*.signer`).
//!
//! For the tunnel port it requests a server certificate with the URI of a gateway and the names under which edges reach this one.
//! For upstreams it requests a client certificate that names a user. Each is stored in the data directory, key and chain in one
//! file. The gateway loads the file from there as it loads any file. A new certificate is requested after two thirds of the old
//! one's life, or when the names change. The old one serves meanwhile.

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

/// A server's and a client's, which sign their handshakes.
const SERVER: [&str; 2] = ["server auth", "digital signature"];
const CLIENT: [&str; 2] = ["client auth", "digital signature"];
/// Interval of the checks whether a certificate is due, and of the polls of a request.
const LOOK: Duration = Duration::from_secs(5);
/// Time limit of one request for a certificate.
const PATIENCE: Duration = Duration::from_hours(1);
/// Longest pauses between requests: while the API does not respond, and while requests fail.
const PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));
/// Minimum time between two certificates, however short their lifetime.
const APART: Duration = Duration::from_mins(1);
/// Time limit of a disk operation.
const DISK: Duration = Duration::from_secs(30);
/// Prefixes in the file: before the names, and before the time when it was made.
const NAMES: &str = "names: ";
const MADE: &str = "made: ";

/// Controller that requests the certificate and stores it.
pub struct GatewayCertificate {
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
pub enum Purpose {
    /// The tunnel port of a gateway of this trust domain.
    TunnelPort(TrustDomain),
    /// A client of the upstreams of a port, as this user.
    AppClient(u16, String),
}

impl Purpose {
    fn stored(&self) -> Requested {
        match self {
            Self::TunnelPort(_) => Requested::Identity,
            Self::AppClient(port, _) => Requested::AppClient(*port),
        }
    }

    fn usages(&self) -> [&'static str; 2] {
        match self {
            Self::TunnelPort(_) => SERVER,
            Self::AppClient(..) => CLIENT,
        }
    }

    /// Returns a description of the request, in the format of the data directory.
    fn subject(&self, names: &[HostName]) -> String {
        match self {
            Self::TunnelPort(domain) => format!("{} of {domain}", listed(names)),
            Self::AppClient(_, user) => format!("user {user}"),
        }
    }

    fn request(&self, key: &PrivateKey, names: &[HostName]) -> Result<String, CsrError> {
        match self {
            Self::TunnelPort(domain) => key.request_of_gateway(domain, names),
            Self::AppClient(_, user) => key.request_of_user(user),
        }
    }

    /// Reads a certificate with its key, if it is one for this purpose.
    fn read(&self, text: &str) -> Result<LeafCertificate, String> {
        match self {
            Self::TunnelPort(domain) => {
                let (leaf, found) = external::gateway(text, text).map_err(said)?;
                if found != *domain {
                    return Err(format!("it has trust domain {found} instead of {domain}"));
                }
                Ok(leaf)
            }
            Self::AppClient(_, user) => {
                let leaf = LeafCertificate::load(text, text).map_err(said)?;
                let facts = leaf.chain().first().map(Certificate::read);
                let facts = facts.and_then(Result::ok).unwrap_or_default();
                if facts.common_name.as_deref() != Some(user) || !facts.client_auth {
                    return Err(format!("it is not a client certificate of user {user}"));
                }
                Ok(leaf)
            }
        }
    }
}

/// Reason why there is no new certificate now.
enum NotRenewed {
    /// The certificate was requested and is pending.
    Yet(String),
    /// The request has failed.
    Made(String),
}

impl GatewayCertificate {
    /// Returns once there is one to begin with. `tell` hears what is waited for.
    pub async fn first(&self, names: &[HostName], tell: &(dyn Fn(&str) + Sync)) {
        let holds = |kept: &StoredCertificate| kept.not_after > SystemTime::now();
        self.keep(|| names.to_vec(), tell, Some(&holds)).await;
    }

    /// Keeps a valid certificate for the present names in the store. Never returns.
    pub async fn run(self, names: impl Fn() -> Vec<HostName>) -> Infallible {
        self.keep(names, &|_| {}, None).await;
        std::future::pending().await
    }

    /// Runs the controller for a client certificate for upstreams. Clients of the gateway wait until there is one.
    pub async fn run_holding(self, hold: ReadinessBlock) -> Infallible {
        self.first(&[], &|why| hold.says(why)).await;
        drop(hold);
        self.run(Vec::new).await
    }

    /// Requests a certificate whenever one is due. Returns once there is one that is `enough`, if that is given.
    async fn keep(
        &self,
        names: impl Fn() -> Vec<HostName>,
        tell: &(dyn Fn(&str) + Sync),
        enough: Option<&(dyn Fn(&StoredCertificate) -> bool + Sync)>,
    ) {
        let mut trouble = LogThrottle::new(match self.purpose {
            Purpose::TunnelPort(_) => "getting this gateway's certificate from the cluster",
            Purpose::AppClient(..) => "getting the client certificate for apps from the cluster",
        });
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut kept = self.kept().await;
        loop {
            if let (Some(enough), Some(kept)) = (enough, &kept)
                && enough(kept)
            {
                return;
            }
            let wanted = names();
            let due = |kept: &StoredCertificate| kept.is_due(&wanted, SystemTime::now());
            let mut pause = LOOK;
            if kept.as_ref().is_none_or(due) {
                match self.attempt(&wanted).await {
                    Ok(made) => {
                        kept = Some(made);
                        backoff.reset();
                        trouble.over();
                        continue;
                    }
                    Err(NotRenewed::Yet(why)) => {
                        trouble.say(&why);
                        tell(&why);
                    }
                    Err(NotRenewed::Made(why)) => {
                        trouble.say(&why);
                        tell(&why);
                        pause = backoff.refused(None, rand::random());
                    }
                }
            }
            sleep(pause).await;
        }
    }

    /// Returns the stored certificate, if it can be used.
    async fn kept(&self) -> Option<StoredCertificate> {
        let what = self.purpose.stored();
        let text = self.on_disk(move |store| store.made(what)).await;
        StoredCertificate::read(&text.ok().flatten()?, &self.purpose).ok()
    }

    /// Submits a request if there is none for these names yet, and checks its outcome.
    async fn attempt(&self, names: &[HostName]) -> Result<StoredCertificate, NotRenewed> {
        let pending = self.pending(names).await.map_err(NotRenewed::Made)?;
        let key = pending.key().map_err(made)?;
        let request = self.purpose.request(&key, names).map_err(made)?;
        let wanted = CsrSpec {
            name: &pending.name,
            signer: &self.signer,
            usages: self.purpose.usages(),
            seconds: None,
            request: &request,
        };
        let asked = csr_client::submit(self.client.clone(), &wanted).await;
        asked.map_err(|why| NotRenewed::Yet(words(why)))?;
        if self.approve {
            self.approve(&wanted).await?;
        }
        let chain = match csr_client::status(self.client.clone(), &pending.name).await {
            Ok(CsrStatus::Signed(chain)) => chain,
            Ok(CsrStatus::Waiting(_)) if pending.since + PATIENCE.as_secs() > now() => {
                return Err(NotRenewed::Yet(format!(
                    "the request {} is not approved and signed yet: this is the task of {}",
                    pending.name, self.signer
                )));
            }
            Ok(CsrStatus::Refused(why) | CsrStatus::Waiting(why)) => {
                self.forget().await?;
                return Err(NotRenewed::Made(why));
            }
            Err(why) => return Err(NotRenewed::Yet(words(why))),
        };
        let text = StoredCertificate::text(names, &chain, key.key_pem().expose());
        let kept = StoredCertificate::read(&text, &self.purpose);
        let kept = kept.and_then(|kept| {
            let holds = kept.not_after > SystemTime::now();
            holds
                .then_some(kept)
                .ok_or_else(|| "it has expired already".to_owned())
        });
        if kept.is_ok() {
            let what = self.purpose.stored();
            let saved = self
                .on_disk(move |store| store.save_made(what, &text))
                .await;
            // The certificate can still be fetched when the disk works again.
            saved.map_err(NotRenewed::Yet)?;
        }
        self.forget().await?;
        let name = pending.name;
        let kept = kept.map_err(|why| {
            NotRenewed::Made(format!(
                "the certificate issued for the request {name} cannot be used: {why}"
            ))
        })?;
        let ends = humantime::format_rfc3339_seconds(kept.not_after);
        tracing::info!(request = name, %ends, purpose = ?self.purpose, "this gateway has a new certificate from its cluster");
        Ok(kept)
    }

    /// Approves the own request. If the request of its name in the cluster is not the own one, forgets the name; the next request
    /// has another.
    async fn approve(&self, wanted: &CsrSpec<'_>) -> Result<(), NotRenewed> {
        let approved = csr_client::approve(self.client.clone(), wanted).await;
        if approved.map_err(|why| NotRenewed::Yet(words(why)))? {
            return Ok(());
        }
        self.forget().await?;
        Err(NotRenewed::Made(format!(
            "the request {} in the cluster was not created by this gateway and is not approved",
            wanted.name
        )))
    }

    async fn forget(&self) -> Result<(), NotRenewed> {
        let what = self.purpose.stored();
        let forgotten = self.on_disk(move |store| store.forget_pending(what));
        forgotten.await.map_err(NotRenewed::Yet)
    }

    /// Returns the pending request, or a new one that is stored before it is submitted.
    async fn pending(&self, names: &[HostName]) -> Result<PendingCsr, String> {
        let asks = format!("{}: {}", self.signer, self.purpose.subject(names));
        let what = self.purpose.stored();
        let kept = self.on_disk(move |store| store.pending(what)).await?;
        if let Some(kept) = kept.filter(|kept| kept.asks == asks) {
            return Ok(kept);
        }
        self.on_disk(move |store| store.prepare_made(what)).await?;
        let key = PrivateKey::generate().map_err(said)?;
        let host = object_name(&self.gateway);
        let name = format!("causeway-gateway-{host}-{:08x}", rand::random::<u32>());
        let pending = PendingCsr::new(name, asks, now(), &key);
        let kept = pending.clone();
        self.on_disk(move |store| store.save_pending(what, &kept))
            .await?;
        Ok(pending)
    }

    /// Runs disk work off the thread that receives signals.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, String> {
        let store = self.store.clone();
        match timeout(DISK, spawn_blocking(move || work(&store))).await {
            Ok(Ok(done)) => done.map_err(said),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the data directory does not answer".to_owned()),
        }
    }
}

/// Contents of the stored file.
struct StoredCertificate {
    /// Names that were requested: the signer may have left some out.
    names: String,
    /// A signer may let it begin long before it makes it.
    since: SystemTime,
    not_after: SystemTime,
}

impl StoredCertificate {
    fn text(names: &[HostName], chain: &str, key: &str) -> String {
        format!("{NAMES}{}\n{MADE}{}\n{chain}\n{key}", listed(names), now())
    }

    fn read(text: &str, purpose: &Purpose) -> Result<Self, String> {
        let leaf = purpose.read(text)?;
        let (begins, not_after) = dates(&leaf);
        let line = |key| text.lines().find_map(|line| line.strip_prefix(key));
        let since = line(MADE).and_then(|made| made.parse().ok());
        Ok(Self {
            names: line(NAMES).unwrap_or_default().to_owned(),
            since: begins.max(UNIX_EPOCH + Duration::from_secs(since.unwrap_or_default())),
            not_after,
        })
    }

    fn is_due(&self, names: &[HostName], now: SystemTime) -> bool {
        let life = self.not_after.duration_since(self.since);
        let renew = self.since + life.unwrap_or_default().mul_f64(2.0 / 3.0);
        now >= renew.max(self.since + APART) || self.names != listed(names)
    }
}

fn dates(leaf: &LeafCertificate) -> (SystemTime, SystemTime) {
    let facts = leaf.chain().first().map(Certificate::read);
    // It was read when the leaf was made.
    let facts = facts.and_then(Result::ok).unwrap_or_default();
    let moment = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    (moment(facts.not_before), moment(facts.not_after))
}

/// Returns a name as a part of an object's name (RFC 1123).
fn object_name(name: &str) -> String {
    let fits = |char: char| match char.to_ascii_lowercase() {
        char if char.is_ascii_alphanumeric() => char,
        _ => '-',
    };
    name.chars().take(63).map(fits).collect()
}

fn listed(names: &[HostName]) -> String {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    names.join(" ")
}

fn now() -> u64 {
    UnixTime::now().as_secs()
}

fn made(error: impl Display) -> NotRenewed {
    NotRenewed::Made(said(error))
}

fn said(error: impl Display) -> String {
    error.to_string()
}

fn words(why: CsrRequestError) -> String {
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
        StoredCertificate::text(names, &leaf.chain_pem(), leaf.key_pem().expose())
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
        let later = SystemTime::now() + APART;
        assert!(!kept.is_due(&names, later));
        assert!(kept.is_due(&names[..1], later));
        assert!(kept.is_due(&names, kept.not_after - Duration::from_mins(50)));
        // However far back it begins, and whatever is wrong with the clock: not one after the other.
        let hour = Duration::from_hours(1);
        let backdated = StoredCertificate {
            since: SystemTime::now(),
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
        let text = StoredCertificate::text(&[], &leaf.chain_pem(), leaf.key_pem().expose());
        let read = |user: &str| {
            let purpose = Purpose::AppClient(10250, user.to_owned());
            StoredCertificate::read(&text, &purpose)
        };
        assert!(!read("ann").unwrap().is_due(&[], SystemTime::now() + APART));
        assert!(read("bob").is_err());
        let server = ca.issue_gateway(&[], Duration::from_hours(3)).unwrap();
        let text = StoredCertificate::text(&[], &server.chain_pem(), server.key_pem().expose());
        let purpose = Purpose::AppClient(10250, "causeway gateway".to_owned());
        assert!(StoredCertificate::read(&text, &purpose).is_err());
    }
}
