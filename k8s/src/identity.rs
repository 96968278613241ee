//! A gateway's own certificate by `certificates.k8s.io`, from a signer that is somebody else's (`tunnel.identity.signer`).
//!
//! What is asked for is a server's certificate with the URI of a gateway and the names under which edges reach this one.
//! It is kept in the data directory, key and chain in one file, from where the gateway takes it up as it takes up any file.
//! Another is asked for when two thirds of its life are over, or when the names are others; the old one serves meanwhile.

use crate::{
    asking::{self, Wanted},
    trouble::Trouble,
};
use causeway_certs::{
    Certificate, EdgeKey, HostName, Leaf, Pending, Store, StoreError, TrustDomain, given,
};
use causeway_edge::{Answer, NoAnswer};
use causeway_tunnel::backoff::Backoff;
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

/// A server's, which signs its handshakes.
const USAGES: [&str; 2] = ["server auth", "digital signature"];
/// How often it is looked at whether it is time, and what has become of a request.
const LOOK: Duration = Duration::from_secs(5);
/// So long is one request waited for.
const PATIENCE: Duration = Duration::from_hours(1);
/// The longest pauses between requests: while nobody answers, and while they come to nothing.
const PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));
/// Between two certificates, however short a life the signer gives them.
const APART: Duration = Duration::from_mins(1);
/// What the disk may take.
const DISK: Duration = Duration::from_secs(30);
/// Before the names in the file, and the moment when it was made.
const NAMES: &str = "names: ";
const MADE: &str = "made: ";

/// Asks for it, and keeps it.
pub struct OwnCertificate {
    /// The cluster's API.
    pub client: Client,
    /// Who is asked.
    pub signer: String,
    /// What the certificate has to name.
    pub domain: TrustDomain,
    /// Where it is kept.
    pub store: Store,
    /// Who this gateway is, in the request's name.
    pub gateway: String,
}

/// Why there is no other certificate now.
enum Not {
    /// It is asked for, and waited for.
    Yet(String),
    /// Nothing has come of it.
    Made(String),
}

impl OwnCertificate {
    /// Returns once there is one to begin with. `tell` hears what is waited for.
    pub async fn first(&self, names: &[HostName], tell: &(dyn Fn(&str) + Sync)) {
        let holds = |kept: &Kept| kept.not_after > SystemTime::now();
        self.keep(|| names.to_vec(), tell, Some(&holds)).await;
    }

    /// Keeps one that holds, under the names that there are. Never ends.
    pub async fn run(self, names: impl Fn() -> Vec<HostName>) -> Infallible {
        self.keep(names, &|_| {}, None).await;
        std::future::pending().await
    }

    /// Asks for another whenever that is due; until there is one that is `enough`, if that is said.
    async fn keep(
        &self,
        names: impl Fn() -> Vec<HostName>,
        tell: &(dyn Fn(&str) + Sync),
        enough: Option<&(dyn Fn(&Kept) -> bool + Sync)>,
    ) {
        let mut trouble = Trouble::new("getting this gateway's certificate from the cluster");
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut kept = self.kept().await;
        loop {
            if let (Some(enough), Some(kept)) = (enough, &kept)
                && enough(kept)
            {
                return;
            }
            let wanted = names();
            let due = |kept: &Kept| kept.is_due(&wanted, SystemTime::now());
            let mut pause = LOOK;
            if kept.as_ref().is_none_or(due) {
                match self.attempt(&wanted).await {
                    Ok(made) => {
                        kept = Some(made);
                        backoff.reset();
                        trouble.over();
                        continue;
                    }
                    Err(Not::Yet(why)) => {
                        trouble.say(&why);
                        tell(&why);
                    }
                    Err(Not::Made(why)) => {
                        trouble.say(&why);
                        tell(&why);
                        pause = backoff.refused(None, rand::random());
                    }
                }
            }
            sleep(pause).await;
        }
    }

    /// What is kept, if it can be used.
    async fn kept(&self) -> Option<Kept> {
        let text = self.on_disk(Store::made).await.ok().flatten()?;
        Kept::read(&text, &self.domain).ok()
    }

    /// Asks, if nothing was asked for these names yet, and looks at what has come of it.
    async fn attempt(&self, names: &[HostName]) -> Result<Kept, Not> {
        let pending = self.pending(names).await.map_err(Not::Made)?;
        let key = pending.key().map_err(made)?;
        let request = key.request_of_gateway(&self.domain, names).map_err(made)?;
        let wanted = Wanted {
            name: &pending.name,
            signer: &self.signer,
            usages: USAGES,
            seconds: None,
            request: &request,
        };
        let asked = asking::ask(self.client.clone(), wanted).await;
        asked.map_err(|why| Not::Yet(words(why)))?;
        let chain = match asking::answer(self.client.clone(), &pending.name).await {
            Ok(Answer::Signed(chain)) => chain,
            Ok(Answer::Waiting(_)) if pending.since + PATIENCE.as_secs() > now() => {
                return Err(Not::Yet(format!(
                    "the request {} is not approved and signed yet: {} is to do that",
                    pending.name, self.signer
                )));
            }
            Ok(Answer::Refused(why) | Answer::Waiting(why)) => {
                self.forget().await?;
                return Err(Not::Made(why));
            }
            Err(why) => return Err(Not::Yet(words(why))),
        };
        let text = Kept::text(names, &chain, key.key_pem().expose());
        let kept = Kept::read(&text, &self.domain);
        let kept = kept.and_then(|kept| {
            let holds = kept.not_after > SystemTime::now();
            holds
                .then_some(kept)
                .ok_or_else(|| "it has ended already".to_owned())
        });
        if kept.is_ok() {
            let saved = self.on_disk(move |store| store.save_made(&text)).await;
            // It is there to be taken when the disk is well again.
            saved.map_err(Not::Yet)?;
        }
        self.forget().await?;
        let name = pending.name;
        let kept = kept.map_err(|why| {
            Not::Made(format!(
                "what was made for the request {name} cannot be used: {why}"
            ))
        })?;
        let ends = humantime::format_rfc3339_seconds(kept.not_after);
        tracing::info!(request = name, %ends, "this gateway has another certificate by its cluster");
        Ok(kept)
    }

    async fn forget(&self) -> Result<(), Not> {
        self.on_disk(Store::forget_pending).await.map_err(Not::Yet)
    }

    /// The request that waits, or a new one, kept before anybody is asked.
    async fn pending(&self, names: &[HostName]) -> Result<Pending, String> {
        let asks = format!("{}: {} of {}", self.signer, listed(names), self.domain);
        let kept = self.on_disk(Store::pending).await?;
        if let Some(kept) = kept.filter(|kept| kept.asks == asks) {
            return Ok(kept);
        }
        self.on_disk(Store::prepare_made).await?;
        let key = EdgeKey::generate().map_err(said)?;
        let host = object_name(&self.gateway);
        let name = format!("causeway-gateway-{host}-{:08x}", rand::random::<u32>());
        let pending = Pending::new(name, asks, now(), &key);
        let kept = pending.clone();
        self.on_disk(move |store| store.save_pending(&kept)).await?;
        Ok(pending)
    }

    /// Never on the thread that hears signals.
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

/// What the file says.
struct Kept {
    /// The names that were asked for: the signer may have left some out.
    names: String,
    /// A signer may let it begin long before it makes it.
    since: SystemTime,
    not_after: SystemTime,
}

impl Kept {
    fn text(names: &[HostName], chain: &str, key: &str) -> String {
        format!("{NAMES}{}\n{MADE}{}\n{chain}\n{key}", listed(names), now())
    }

    fn read(text: &str, domain: &TrustDomain) -> Result<Self, String> {
        let (leaf, found) = given::gateway(text, text).map_err(said)?;
        if found != *domain {
            return Err(format!(
                "it is of trust domain {found}, and not of {domain}"
            ));
        }
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

fn dates(leaf: &Leaf) -> (SystemTime, SystemTime) {
    let facts = leaf.chain().first().map(Certificate::read);
    // It was read when the leaf was made.
    let facts = facts.and_then(Result::ok).unwrap_or_default();
    let moment = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    (moment(facts.not_before), moment(facts.not_after))
}

/// As a part of an object's name (RFC 1123).
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

fn made(error: impl Display) -> Not {
    Not::Made(said(error))
}

fn said(error: impl Display) -> String {
    error.to_string()
}

fn words(why: NoAnswer) -> String {
    match why {
        NoAnswer::Silent(why) | NoAnswer::Refused(why) => why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::Ca;

    fn kept(names: &[HostName]) -> String {
        let ca = Ca::create(&domain("td")).unwrap();
        let leaf = ca.issue_gateway(names, Duration::from_hours(3)).unwrap();
        Kept::text(names, &leaf.chain_pem(), leaf.key_pem().expose())
    }

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).unwrap()
    }

    #[test]
    fn another_is_due_after_two_thirds_of_its_life_or_when_the_names_are_others() {
        let names = [
            HostName::parse("gw.example").unwrap(),
            HostName::parse("192.0.2.1").unwrap(),
        ];
        let text = kept(&names);
        let kept = Kept::read(&text, &domain("td")).unwrap();
        let later = SystemTime::now() + APART;
        assert!(!kept.is_due(&names, later));
        assert!(kept.is_due(&names[..1], later));
        assert!(kept.is_due(&names, kept.not_after - Duration::from_mins(50)));
        // However far back it begins, and whatever is wrong with the clock: not one after the other.
        let hour = Duration::from_hours(1);
        let backdated = Kept {
            since: SystemTime::now(),
            not_after: SystemTime::now() + hour / 6,
            ..kept
        };
        assert!(!backdated.is_due(&names, later));
        assert!(backdated.is_due(&names, later + hour / 6));
        assert!(Kept::read(&text, &domain("other")).is_err());
        assert!(Kept::read("names: gw.example", &domain("td")).is_err());
    }
}
