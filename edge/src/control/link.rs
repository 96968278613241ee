//! The tunnels of an edge: dialled, kept, replaced, and left in order.
//!
//! Each slot is one task that goes through the states of a tunnel:
//! 1. dial the gateways in turn; on trouble wait (`trouble`, `changes`) and dial again;
//! 2. say hello (`session`); what the gateway refuses is trouble like any other;
//! 3. serve streams until the tunnel ends, which is trouble, or the gateway drains;
//! 4. on a drain, or with a new certificate, first go back to 1, and leave the old one when the new one stands: its
//!    streams go on there until they end.
//!
//! Slot 0 always has a tunnel; a further one has it while the one before moves bulk.

mod bulk;
mod greeting;
mod heard;
mod session;

use super::{
    changes::Changes,
    dial::{Dialler, Place},
    gateways::Gateways,
    held::Held,
    trouble::Trouble,
};
use crate::{config::Config, metrics::Metrics, state::Writer};
use arc_swap::ArcSwap;
pub(crate) use bulk::Bulk;
use causeway_tunnel::{backoff::Backoff, hello::Listed, server::Asked, task::Tasks};
use futures_util::future::BoxFuture;
use rustls_pki_types::CertificateDer;
use session::{Finish, Session};
use std::{sync::Arc, time::Duration};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, info_span, warn};

/// How much longer than its streams a tunnel may take to leave.
const LEAVING: Duration = Duration::from_secs(2);

/// What a stream is handed to: the way, of which nothing is known here.
pub(crate) type Serve = Arc<dyn Fn(Asked) -> BoxFuture<'static, ()> + Send + Sync>;

/// Takes up which node ports a gateway lists.
pub(crate) type List = Arc<dyn Fn(Listed) + Send + Sync>;

/// What all tunnels of an edge share.
pub(crate) struct Links {
    pub(crate) config: Config,
    pub(crate) node: String,
    pub(crate) instance: String,
    /// The node's ports that are served now.
    pub(crate) ports: Arc<ArcSwap<Vec<u16>>>,
    pub(crate) dialler: Dialler,
    pub(crate) gateways: Gateways,
    pub(crate) serve: Serve,
    pub(crate) list: List,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) state: Arc<Writer>,
    pub(crate) bulk: Bulk,
    /// Changes whenever tunnels are to be dialled anew, since what they would be dialled with is another.
    pub(crate) anew: watch::Sender<()>,
    /// The identity by which tunnels are dialled.
    pub(crate) held: Held,
    /// A gateway asks for a new certificate to be had within this time.
    pub(crate) renewal: watch::Sender<Duration>,
    /// The edge stops.
    pub(crate) stop: CancellationToken,
}

/// A tunnel that is served by a task of its own.
struct Served {
    place: Place,
    /// Its gateway drains.
    drains: bool,
    /// Asks it to leave.
    leave: CancellationToken,
    /// It is over.
    over: CancellationToken,
}

/// Why a slot looks at its tunnel again.
enum Event {
    Ended(Trouble),
    Draining,
    Renewed,
    Stopped,
}

impl Links {
    /// Keeps the tunnels until the edge stops, then leaves in order.
    pub(crate) async fn run(self: Arc<Self>, changes: Changes) {
        let stop = self.stop.clone();
        let tasks = Arc::new(Tasks::default());
        let slots = Tasks::default();
        let most = u32::try_from(self.config.tunnels.max).unwrap_or(u32::MAX);
        for slot in 0..most {
            let (links, stop, changes, tasks) =
                (self.clone(), stop.clone(), changes.clone(), tasks.clone());
            slots.spawn(info_span!("tunnel", slot), async move {
                match slot {
                    0 => Box::pin(links.hold(0, &stop, changes, &tasks)).await,
                    _ => Box::pin(links.hold_while_bulky(slot, &stop, changes, &tasks)).await,
                }
            });
        }
        stop.cancelled().await;
        let grace = self.config.timeouts.drain + LEAVING;
        slots.drain(grace).await;
        if let Some(tasks) = Arc::into_inner(tasks) {
            let left = tasks.drain(grace).await;
            if left > 0 {
                info!(
                    left,
                    "tunnels were closed with streams that had not ended in time"
                );
            }
        }
    }

    /// A further tunnel, for as long as there is bulk.
    async fn hold_while_bulky(
        self: &Arc<Self>,
        slot: u32,
        stop: &CancellationToken,
        changes: Changes,
        tasks: &Arc<Tasks>,
    ) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.bulk.wait(slot - 1) => {}
            }
            let enough = stop.child_token();
            let idle = async {
                self.bulk.idle(self.config.tunnels.bulk_idle).await;
                info!("no bulk any more: the further tunnel leaves");
                enough.cancel();
            };
            tokio::join!(
                enough.run_until_cancelled(idle),
                self.hold(slot, &enough, changes.clone(), tasks),
            );
        }
    }

    /// Keeps one slot's tunnel until `stop`.
    async fn hold(
        self: &Arc<Self>,
        slot: u32,
        stop: &CancellationToken,
        mut changes: Changes,
        tasks: &Arc<Tasks>,
    ) {
        let bounds = &self.config.backoff;
        let mut backoff = Backoff::new(bounds.silent_max, bounds.refused_max);
        let mut old: Option<Served> = None;
        let mut anew = self.anew.subscribe();
        loop {
            // What changes during an attempt is tried again at once.
            changes.forget();
            anew.mark_unchanged();
            let connected = self.connect(slot, old.as_ref());
            let Some(connected) = stop.run_until_cancelled(connected).await else {
                break;
            };
            let (event, served) = match connected {
                Err(trouble) => (Event::Ended(trouble), None),
                Ok(session) => {
                    backoff.reset();
                    leave(old.take());
                    self.stand(session, (stop, &mut anew), tasks).await
                }
            };
            match event {
                Event::Stopped => {
                    leave(served);
                    break;
                }
                Event::Draining => {
                    info!("the gateway drains: connecting elsewhere");
                    old = served.map(|served| Served {
                        drains: true,
                        ..served
                    });
                }
                Event::Renewed => {
                    info!("connecting anew with this node's new certificate");
                    old = served;
                }
                Event::Ended(trouble) => {
                    let woken = (&mut changes, &mut anew, stop);
                    self.pause(&trouble, &mut backoff, woken, old.as_ref())
                        .await;
                    old = old.filter(|old| !old.over.is_cancelled());
                }
            }
        }
        leave(old);
    }

    /// Dials, and says hello.
    async fn connect(
        self: &Arc<Self>,
        slot: u32,
        old: Option<&Served>,
    ) -> Result<Session, Trouble> {
        let gateways = self.gateways.all();
        let avoid = old.filter(|old| old.drains).map(|old| &old.place);
        let attempt = async {
            let dialled = self.dialler.dial(&gateways, avoid).await?;
            let takes_over = old.is_some_and(|old| !old.over.is_cancelled());
            Session::register(self, dialled, (slot, takes_over)).await
        };
        let attempted = attempt.await;
        let outcome = attempted
            .as_ref()
            .map_or_else(Trouble::word, |_| "registered");
        self.metrics.attempted(outcome);
        attempted
    }

    /// Serves a tunnel with a task of its own, since it may outlive its slot's interest in it, until there is
    /// something to do for the slot.
    async fn stand(
        &self,
        mut session: Session,
        (stop, anew): (&CancellationToken, &mut watch::Receiver<()>),
        tasks: &Arc<Tasks>,
    ) -> (Event, Option<Served>) {
        let served = Served {
            place: session.place().clone(),
            drains: false,
            leave: CancellationToken::new(),
            over: CancellationToken::new(),
        };
        self.gateways.stood(&served.place.gateway);
        let (leave, over) = (served.leave.clone(), served.over.clone().drop_guard());
        let (told, ended) = oneshot::channel();
        let gateway = served.place.gateway.clone();
        let disbelieved = disbelieved(self.held.clone(), session.shown(), self.anew.subscribe());
        tasks.spawn(info_span!("session"), async move {
            tokio::select! {
                () = session.serve(leave, told) => {}
                () = disbelieved => {
                    warn!(gateway, "its CA is not believed any more (identity.ca): left at once");
                }
            }
            drop(over);
        });
        let event = tokio::select! {
            () = stop.cancelled() => Event::Stopped,
            // The sender lives as long as this.
            _ = anew.changed() => Event::Renewed,
            finish = ended => match finish {
                Ok(Finish::Draining) => Event::Draining,
                Ok(Finish::Ended(trouble)) => Event::Ended(trouble),
                Err(_) => Event::Ended(Trouble::silent("the tunnel was closed")),
            },
        };
        (event, Some(served))
    }

    /// Waits as long as the trouble asks for, or until there is something else to dial with.
    async fn pause(
        &self,
        trouble: &Trouble,
        backoff: &mut Backoff,
        (changes, anew, stop): (&mut Changes, &mut watch::Receiver<()>, &CancellationToken),
        old: Option<&Served>,
    ) {
        let delay = trouble.delay(backoff, rand::random());
        warn!(reason = trouble.word(), what = trouble.what(), retry_in = ?delay, "no tunnel");
        self.state
            .trouble(trouble.what(), trouble.is_refusal(), delay);
        let wait = async {
            if trouble.may_be_the_network() {
                changes.wait(delay).await;
            } else {
                tokio::time::sleep(delay).await;
            }
        };
        let old_is_over = async {
            match old {
                Some(old) => old.over.cancelled().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = wait => {}
            // The sender lives as long as this.
            _ = anew.changed() => backoff.reset(),
            () = stop.cancelled() => {}
            () = old_is_over => {}
        }
    }
}

/// Returns once the CA of a gateway, which has `shown` this, is not believed any more. What is open there ends at once: its
/// gateway gets no stream more to answer.
async fn disbelieved(
    held: Held,
    shown: Vec<CertificateDer<'static>>,
    mut anew: watch::Receiver<()>,
) {
    while held.identity().given {
        // What is believed may have changed since it was dialled.
        if !held.identity().believes(&shown) {
            return;
        }
        if anew.changed().await.is_err() {
            break;
        }
    }
    std::future::pending::<()>().await;
}

/// Asks a tunnel to leave, if there is one.
fn leave(served: Option<Served>) {
    if let Some(served) = served {
        served.leave.cancel();
    }
}

#[cfg(test)]
mod tests;
