//! A gateway's own certificate by `certificates.k8s.io`, from a signer that is somebody else's (`tunnel.identity.signer`).
//!
//! What is asked for is a server's certificate with the URI of a gateway and the names under which edges reach this one.
//! It is kept in the data directory, key and chain in one file, from where the gateway takes it up as it takes up any file.
//! Another is asked for when two thirds of its life are over, or when the names are others; the old one serves meanwhile.

use crate::{
    asking::{self, Wanted},
    trouble::Trouble,
};
use causeway_certs::{Certificate, EdgeKey, HostName, Leaf, Store, TrustDomain, given};
use causeway_edge::{Answer, NoAnswer};
use causeway_tunnel::backoff::Backoff;
use kube::Client;
use std::{
    convert::Infallible,
    fmt::Display,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::{Instant, sleep};

/// A server's, which signs its handshakes.
const USAGES: [&str; 2] = ["server auth", "digital signature"];
/// How often it is looked at whether it is time.
const LOOK: Duration = Duration::from_secs(5);
/// So long is one request waited for.
const PATIENCE: Duration = Duration::from_hours(1);
/// The longest pauses between questions: while nobody answers, and while it is denied.
const PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));
/// Before the names in the file.
const NAMES: &str = "names: ";

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

impl OwnCertificate {
    /// Returns once there is one to begin with. `tell` hears what is waited for.
    pub async fn first(&self, names: &[HostName], tell: &(dyn Fn(&str) + Sync)) {
        let kept = self.kept();
        if kept.is_none_or(|kept| kept.not_after <= SystemTime::now()) {
            self.until_made(names, tell).await;
        }
    }

    /// Keeps one that holds, under the names that there are. Never ends.
    pub async fn run(self, names: impl Fn() -> Vec<HostName>) -> Infallible {
        loop {
            let wanted = names();
            let kept = self.kept();
            if kept.is_none_or(|kept| kept.is_due(&wanted, SystemTime::now())) {
                self.until_made(&wanted, &|_| {}).await;
            }
            sleep(LOOK).await;
        }
    }

    /// What is kept, if it can be used.
    fn kept(&self) -> Option<Kept> {
        let text = self.store.made().ok().flatten()?;
        Kept::read(&text, &self.domain).ok()
    }

    async fn until_made(&self, names: &[HostName], tell: &(dyn Fn(&str) + Sync)) {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut trouble = Trouble::new("asking the cluster for this gateway's certificate");
        while let Err(why) = self.made(names, tell).await {
            trouble.say(&why);
            tell(&why);
            sleep(backoff.refused(None, rand::random())).await;
        }
        trouble.over();
    }

    /// One request, and what comes of it.
    async fn made(&self, names: &[HostName], tell: &(dyn Fn(&str) + Sync)) -> Result<(), String> {
        self.store.prepare_made().map_err(said)?;
        let key = EdgeKey::generate().map_err(said)?;
        let request = key.request_of_gateway(&self.domain, names).map_err(said)?;
        let wanted = Wanted {
            name: format!("causeway-gateway-{}-", object_name(&self.gateway)),
            signer: &self.signer,
            usages: USAGES,
            seconds: None,
            request: &request,
        };
        let asked = asking::ask(self.client.clone(), wanted).await;
        let name = asked.map_err(words)?;
        tracing::info!(
            request = name,
            signer = self.signer,
            "asked the cluster for this gateway's certificate"
        );
        let chain = self.answered(&name, tell).await?;
        let text = Kept::text(names, &chain, key.key_pem().expose());
        let kept = Kept::read(&text, &self.domain);
        let kept = kept
            .map_err(|why| format!("what was made for the request {name} cannot be used: {why}"))?;
        if kept.not_after <= SystemTime::now() {
            return Err(format!(
                "what was made for the request {name} has ended already"
            ));
        }
        self.store.save_made(&text).map_err(said)?;
        let ends = humantime::format_rfc3339_seconds(kept.not_after);
        tracing::info!(request = name, %ends, "this gateway has another certificate by its cluster");
        Ok(())
    }

    async fn answered(&self, name: &str, tell: &(dyn Fn(&str) + Sync)) -> Result<String, String> {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.0);
        let mut trouble = Trouble::new("waiting for this gateway's certificate");
        let until = Instant::now() + PATIENCE;
        loop {
            let why = match asking::answer(self.client.clone(), name).await {
                Ok(Answer::Signed(chain)) => return Ok(chain),
                Ok(Answer::Refused(why)) => return Err(why),
                Ok(Answer::Waiting(_)) => {
                    format!(
                        "the request {name} is not approved and signed yet: {} is to do that",
                        self.signer
                    )
                }
                Err(why) => words(why),
            };
            if Instant::now() >= until {
                return Err(why);
            }
            trouble.say(&why);
            tell(&why);
            sleep(backoff.refused(None, rand::random())).await;
        }
    }
}

/// What the file says.
struct Kept {
    /// The names that were asked for: the signer may have left some out.
    names: String,
    begins: SystemTime,
    not_after: SystemTime,
}

impl Kept {
    fn text(names: &[HostName], chain: &str, key: &str) -> String {
        format!("{NAMES}{}\n{chain}\n{key}", listed(names))
    }

    fn read(text: &str, domain: &TrustDomain) -> Result<Self, String> {
        let (leaf, found) = given::gateway(text, text).map_err(said)?;
        if found != *domain {
            return Err(format!(
                "it is of trust domain {found}, and not of {domain}"
            ));
        }
        let (begins, not_after) = dates(&leaf);
        let names = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix(NAMES));
        Ok(Self {
            names: names.unwrap_or_default().to_owned(),
            begins,
            not_after,
        })
    }

    fn is_due(&self, names: &[HostName], now: SystemTime) -> bool {
        let life = self.not_after.duration_since(self.begins);
        let renew = self.begins + life.unwrap_or_default().mul_f64(2.0 / 3.0);
        now >= renew || self.names != listed(names)
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
        assert!(!kept.is_due(&names, SystemTime::now()));
        assert!(kept.is_due(&names[..1], SystemTime::now()));
        assert!(kept.is_due(&names, kept.not_after - Duration::from_hours(1)));
        assert!(Kept::read(&text, &domain("other")).is_err());
        assert!(Kept::read("names: gw.example", &domain("td")).is_err());
    }
}
