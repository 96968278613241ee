//! An app's HTTP/2 connections, which requests share: one as a rule, within the app's streams at once.
//!
//! A connection is a tunnel within the node's tunnel: the same engine drives it, with the same budget for what is left unread,
//! the same bounds on floods and the same resets. One more request than the app takes has a further one dialled; one
//! request dials at a time and the others wait for it, since most find a place on what it brings. An app that chose HTTP/1.1
//! last time makes nobody wait: each dials for itself. Whoever waits has a bound.

use super::{
    dialled::Dialled,
    failure,
    kept::{Kept, Key},
    line::FAREWELL,
    pin,
    tls::AppTls,
};
use crate::{error::Error, proxy::Way};
use causeway_certs::Fingerprint;
use causeway_tunnel::{
    Tunnel,
    client::{self, Settings},
    heard::{Allowed, heard},
    load::Load,
    socket::Counted,
};
use std::{
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Connections to one app of one tunnel, at most. Servers allow 100 streams or more on each.
const MOST: usize = 64;

/// What is known of the HTTP/2 of an app of one tunnel.
#[derive(Default)]
pub(super) struct Shared {
    known: Mutex<Known>,
    /// Held by the request that dials.
    dialling: tokio::sync::Mutex<()>,
    /// A stream has ended.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Known {
    /// It chose HTTP/1.1 last.
    http1: bool,
    /// The first with a place gets the next stream, so the last ones come to rest.
    lines: Vec<Line>,
    /// The number of the last that was dialled; they count from 1.
    newest: u64,
}

struct Line {
    number: u64,
    tunnel: Tunnel,
    allowed: Allowed,
    taken: Arc<AtomicUsize>,
    /// By which the app was believed, where it is known by its key.
    key: Option<Fingerprint>,
}

/// A place for one stream on a connection, until its answer is over.
#[derive(Debug)]
pub(super) struct Place {
    taken: Arc<AtomicUsize>,
    freed: Arc<Notify>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Relaxed);
        self.freed.notify_one();
    }
}

/// A stream that may be opened.
pub(super) struct Stream {
    pub(super) tunnel: Tunnel,
    pub(super) place: Place,
    /// The youngest connection that there was.
    pub(super) newest: u64,
}

/// Whose turn it is.
pub(super) enum Turn<'a> {
    /// There is a place.
    Open(Stream),
    /// This request's, to dial. It holds the turn, unless nobody has to wait for it.
    Dial(Option<tokio::sync::MutexGuard<'a, ()>>),
}

impl Shared {
    /// A place on a connection with a number above `after`, or the turn to dial one.
    ///
    /// # Errors
    /// If neither comes in time.
    pub(super) async fn turn(
        &self,
        way: Way<'_>,
        app: &AppTls,
        after: u64,
    ) -> Result<Turn<'_>, Error> {
        let bound = way.proxy.shared.timeouts.open;
        let waiting = async {
            loop {
                let mut freed = pin!(self.freed.notified());
                if let Some(turn) = self.at_once(way, app, after) {
                    return turn;
                }
                tokio::select! {
                    biased;
                    () = &mut freed => continue,
                    turn = self.dialling.lock() => {
                        // What the last one dialled may have a place.
                        if let Some(found) = self.at_once(way, app, after) {
                            return found;
                        }
                        if self.known().lines.len() < MOST {
                            return Turn::Dial(Some(turn));
                        }
                    }
                }
                freed.await;
            }
        };
        let turn = timeout(bound, waiting).await;
        turn.map_err(|_| {
            let what = if self.known().lines.len() < MOST {
                "did not take a connection in time"
            } else {
                "has as many streams as it allows, and none ended in time"
            };
            failure::slow(way.route, what)
        })
    }

    fn at_once(&self, way: Way<'_>, app: &AppTls, after: u64) -> Option<Turn<'static>> {
        let mut known = self.known();
        known.lines.retain(|line| {
            let holds = pin::holds(app, way.route, line.key);
            if !holds {
                // Its app is to be met anew.
                line.tunnel.close();
            }
            holds && !line.tunnel.leaving().is_cancelled()
        });
        let newest = known.newest;
        let mut younger = known.lines.iter().filter(|line| line.number > after);
        if let Some(line) = younger.find(|line| line.has_place()) {
            return Some(Turn::Open(line.open(newest, &self.freed)));
        }
        known.http1.then_some(Turn::Dial(None))
    }

    /// The app has chosen HTTP/1.1.
    pub(super) fn chose_http1(&self) {
        self.known().http1 = true;
    }

    /// Begins HTTP/2 on a connection, and gives a place on it.
    ///
    /// # Errors
    /// If the app does not begin it in time.
    pub(super) async fn begin(
        &self,
        way: Way<'_>,
        app: &Arc<AppTls>,
        Dialled { guarded, life }: Dialled,
    ) -> Result<Stream, Error> {
        let shared = &way.proxy.shared;
        let deadline = Instant::now() + shared.timeouts.open;
        let counted = Counted::new(guarded);
        let traffic = counted.traffic();
        let (heard, mut allowed) = heard(counted);
        let settings = Settings {
            max_streams: usize::MAX,
            round_trip: way.tunnel.round_trip(),
            ..way.tunnel.within()
        };
        let connected = client::connect(heard, traffic, settings).await;
        let (tunnel, driver) =
            connected.map_err(|ended| failure::broken(way.route, &format!("failed: {ended}")))?;
        let kept = shared.apps.kept();
        let number = self.next();
        let watched = Watched {
            number,
            load: tunnel.load().clone(),
            leaving: [
                tunnel.leaving().clone(),
                way.tunnel.leaving().clone(),
                app.retired().clone(),
            ],
            key: Key::of(way, app),
        };
        let task = drive(driver.run(), watched, Arc::downgrade(kept));
        kept.spawn(debug_span!("app"), task);
        // An app's SETTINGS are the first that it says (RFC 9113 §3.4).
        let takes = allowed.wait_for(|allowed| allowed.is_some_and(|streams| streams > 0));
        let settled = timeout_at(deadline, takes).await;
        if !matches!(settled, Ok(Ok(_))) {
            tunnel.close();
            let what = "chose HTTP/2, and did not begin it in time, or takes no request";
            return Err(failure::broken(way.route, what));
        }
        drop(settled);
        let line = Line {
            number,
            tunnel,
            allowed,
            taken: Arc::default(),
            key: life.key,
        };
        let mut known = self.known();
        known.http1 = false;
        let stream = line.open(number, &self.freed);
        known.lines.push(line);
        drop(known);
        self.freed.notify_waiters();
        Ok(stream)
    }

    /// The number of a new connection.
    fn next(&self) -> u64 {
        let mut known = self.known();
        known.newest += 1;
        known.newest
    }

    /// Lets no further stream onto this connection.
    pub(super) fn forget(&self, number: u64) {
        self.known().lines.retain(|line| line.number != number);
    }

    /// Whether there is nothing to be known here.
    pub(super) fn is_empty(&self) -> bool {
        self.known().lines.is_empty()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn has_place(&self) -> bool {
        let allowed = self.allowed.borrow().unwrap_or_default();
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        // A request's body may go on behind its answer.
        let open = self.tunnel.load().streams();
        self.taken.load(Relaxed).max(open) < allowed
    }

    fn open(&self, newest: u64, freed: &Arc<Notify>) -> Stream {
        self.taken.fetch_add(1, Relaxed);
        Stream {
            tunnel: self.tunnel.clone(),
            place: Place {
                taken: self.taken.clone(),
                freed: freed.clone(),
            },
            newest,
        }
    }
}

/// What the task of a connection goes by. It holds no handle: without one, and without streams, the engine ends in order.
struct Watched {
    number: u64,
    load: Arc<Load>,
    /// Of itself, of the tunnel below, of its credentials.
    leaving: [CancellationToken; 3],
    key: Key,
}

/// Drives a connection to its end, which is in order where nothing is under way.
async fn drive<E: std::fmt::Display>(
    run: impl Future<Output = E>,
    watched: Watched,
    kept: Weak<Kept>,
) {
    let Watched {
        number,
        load,
        leaving: [own, tunnel, retired],
        key,
    } = watched;
    let Some(bound) = kept.upgrade().map(|kept| kept.bound()) else {
        return;
    };
    let forget = || {
        if let Some(kept) = kept.upgrade() {
            kept.forget(&key, number);
        }
    };
    let mut run = pin!(run);
    let unwanted = async {
        tokio::select! {
            () = own.cancelled() => {}
            () = tunnel.cancelled() => {}
            () = retired.cancelled() => {}
            () = rests(&load, bound) => {}
        }
    };
    tokio::select! {
        biased;
        ended = &mut run => {
            tracing::debug!(%ended, "a connection to an app ended");
            return forget();
        }
        () = unwanted => forget(),
    }
    // What is open goes on; what then does not end is reset.
    while timeout(FAREWELL, &mut run).await.is_err() && load.streams() > 0 {}
}

/// Returns when nothing was asked for `bound`, or for twice that.
async fn rests(load: &Load, bound: Duration) {
    let mut before = load.opened();
    loop {
        sleep(bound).await;
        let opened = load.opened();
        if opened == before && load.streams() == 0 {
            return;
        }
        before = opened;
    }
}
