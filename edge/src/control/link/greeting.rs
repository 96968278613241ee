//! The hello of one tunnel, from the edge's end: until it is over the tunnel takes no streams.
//!
//! The tunnel's connection moves only while this polls it. What the gateway says of itself is checked; what this edge
//! says of itself is data.

use super::{
    super::{reader::Voice, roots, trouble::Trouble},
    Links, Missed,
    heard::Fault,
    reached::{Claim, Party},
    session::Io,
};
use crate::config::{self, AtGateways};
use causeway_tunnel::{
    Ended, Refusal,
    hello::{Control, ControlError, Hello, ToEdge, ToGateway, Welcome},
    server::{Asked, Incoming, Server},
    wire,
};
use std::{future::Future, pin::pin, time::Duration};
use tracing::{debug, info};

/// What a tunnel has once it is registered.
pub(super) struct Greeted {
    pub(super) control: Control,
    /// Identifies the gateway's process.
    pub(super) gateway: String,
    /// Where all gateways are reached.
    pub(super) claim: Option<Claim>,
    /// What its gateway tells of the node's pool, where this node reads.
    pub(super) voice: Option<Voice>,
}

/// A tunnel before it is registered.
pub(super) struct Greeting {
    pub(super) server: Server<Io>,
    /// Streams that came with the registration, before it was read.
    pub(super) early: Vec<Asked>,
    pub(super) fault: Fault,
}

impl Greeting {
    /// Waits for `future`, while the tunnel moves.
    async fn drive<T>(
        &mut self,
        future: impl Future<Output = Result<T, ControlError>>,
    ) -> Result<T, Trouble> {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                done = &mut future => return done.map_err(|error| self.trouble(&error)),
                next = self.server.next() => match next {
                    Ok(Incoming::Stream(asked)) => self.early.push(*asked),
                    Ok(Incoming::Control(_)) => debug!("a second control stream was opened"),
                    Err(ended) => return Err(self.fault.trouble(&ended)),
                },
            }
        }
    }

    async fn control(&mut self) -> Result<Control, Trouble> {
        loop {
            match self.server.next().await {
                Ok(Incoming::Control(control)) => return Ok(*control),
                Ok(Incoming::Stream(asked)) => {
                    let refused = Refusal::Malformed.because("a stream before the hello");
                    asked.reply.refuse(&refused);
                }
                Err(ended) => return Err(self.fault.trouble(&ended)),
            }
        }
    }

    fn trouble(&self, error: &ControlError) -> Trouble {
        match error {
            // The tunnel's own end says more than the stream's.
            ControlError::Stream(_) | ControlError::Closed => self.fault.trouble(&Ended::Failed(
                format!("the tunnel ended during the hello: {error}"),
            )),
            _ => Trouble::refused(error.to_string()),
        }
    }

    /// Hears who the gateway is, says who this edge is, and is registered.
    pub(super) async fn greet(
        &mut self,
        links: &Links,
        party: Party,
        (slot, keeps): (u32, bool),
    ) -> Result<Greeted, Missed> {
        let mut control = self.control().await?;
        let hello = match self.drive(control.hear()).await? {
            ToEdge::Hello(hello) => hello,
            other => return Err(unexpected(&other).into()),
        };
        check(&hello, links)?;
        let claim = claim(links, &hello, (party, slot > 0 || keeps))?;
        info!(
            gateway = hello.gateway,
            version = hello.version,
            "the gateway said hello"
        );
        let welcome = ToGateway::Welcome(Box::new(Welcome {
            // Whichever way the earlier session of this slot ends, this one must not end its streams.
            takes_over: links.newest.stands(process(&hello), slot),
            ..welcome(links, slot, &hello.gateways)
        }));
        self.drive(control.tell(&welcome)).await?;
        loop {
            match self.drive(control.hear()).await? {
                ToEdge::Registered => break,
                ToEdge::Gateways { gateways, replicas } => {
                    if let Some(claim) = &claim {
                        claim.says(replicas);
                    }
                    links.gateways.learn(gateways).await;
                }
                other => return Err(unexpected(&other).into()),
            }
        }
        let told = links.members.as_ref();
        let voice = told.map(|told| told.voice(process(&hello)));
        let gateway = process(&hello).to_owned();
        links.gateways.learn(hello.gateways).await;
        Ok(Greeted {
            control,
            gateway,
            claim,
            voice,
        })
    }
}

/// Which gateway's process it is. An older one says no more than its name; two that say the same are one, rather than to end each
/// other's tunnels.
fn process(hello: &Hello) -> &str {
    hello.instance.as_ref().unwrap_or(&hello.gateway)
}

/// Takes the gateway for this party, where all gateways are reached.
fn claim(
    links: &Links,
    hello: &Hello,
    (party, keeps): (Party, bool),
) -> Result<Option<Claim>, Missed> {
    if links.config.tunnels.gateways == AtGateways::One {
        return Ok(None);
    }
    let Some(claim) = links.reached.claim(process(hello), party, keeps) else {
        return Err(Missed::Reached(process(hello).to_owned()));
    };
    claim.says(hello.replicas);
    Ok(Some(claim))
}

fn check(hello: &Hello, links: &Links) -> Result<(), Trouble> {
    if hello.protocol != wire::VERSION {
        return Err(Trouble::unwelcome(format!(
            "the gateway {} (version {}) speaks protocol {}, this edge {}",
            hello.gateway,
            hello.version,
            hello.protocol,
            wire::VERSION,
        )));
    }
    if hello.node != links.node {
        return Err(Trouble::unwelcome(format!(
            "the gateway takes this edge for {}, its certificate is for {}",
            hello.node, links.node,
        )));
    }
    Ok(())
}

fn welcome(links: &Links, slot: u32, told: &[String]) -> Welcome {
    let config = &links.config;
    // What the hello tells is learnt with the registration, and counts from there on.
    let mut known = links.gateways.all();
    known.extend_from_slice(told);
    known.sort_unstable();
    known.dedup();
    Welcome {
        protocol: wire::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        instance: links.instance.clone(),
        started: links.state.started(),
        slot,
        addresses: config.addresses.clone(),
        labels: config.labels.clone(),
        pool: config.pool.clone(),
        ports: links.ports.load().to_vec(),
        turns: true,
        // With tunnels at every gateway it has no other one to go to.
        elsewhere: config.tunnels.gateways == AtGateways::One && known.len() > 1,
        listed: true,
        long_targets: true,
        upgrade_bodies: true,
        takes_over: false,
        bulk_after: u64::try_from(config.tunnels.bulk_after).ok(),
        roots: Some(roots::told(&links.held)),
        site: config.reader.as_ref().map(config::Reader::neighbours),
        hubs: config
            .reader
            .as_ref()
            .and_then(config::Reader::for_hubs)
            .map(Box::new),
    }
}

/// A dismissal, or what has no place here.
pub(super) fn unexpected(line: &ToEdge) -> Trouble {
    match line {
        ToEdge::Dismiss {
            why,
            detail,
            retry_after_ms,
        } => Trouble::dismissed(*why, detail, Duration::from_millis(*retry_after_ms)),
        ToEdge::Drain { .. } => Trouble::silent("the gateway drains"),
        _ => Trouble::refused("the gateway said something that has no place in a hello"),
    }
}
