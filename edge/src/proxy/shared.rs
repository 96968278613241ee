//! An app's HTTP/2 connections, which streams share.
//!
//! A connection takes as many streams as the app allows at once. One more goes to the next connection, or has a
//! further one dialled: streams that last (a watch, a subscription) hold up nobody else. One stream dials at a time
//! and the others wait for it, since most find a place on what it brings. Whoever waits has a bound, and
//! is not let into the engine, which would queue it out of sight.
//! A request that failed is repeated on a connection younger than the failure, and not on any that was there
//! before: whoever closed one of them may have closed them all.

use super::{
    Failed,
    app::{App, Connection},
    body::Outgoing,
    broken,
    forward::{self, Unanswered},
    target,
};
use causeway_tunnel::{
    heard::{Allowed, heard},
    task::Tasks,
};
use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::TokioIo;
use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};
use tracing::info_span;

/// Connections for each app at most. Servers allow 100 streams or more on each.
pub(super) const MOST: usize = 64;
/// What an app may send ahead on one stream. The window of the whole connection is the largest that
/// there is, so that readers that stall do not hold up the others.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// What is known of an app's HTTP/2.
#[derive(Default)]
pub(super) struct Shared {
    known: Mutex<Known>,
    /// Held by the stream that dials.
    dialling: tokio::sync::Mutex<()>,
    /// A stream has ended.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Known {
    /// It chose HTTP/1.1.
    http1: bool,
    /// The first with a place gets the next stream, so the last ones come to rest.
    lines: Vec<Line>,
    /// The number of the last that was dialled; they count from 1.
    newest: u64,
}

struct Line {
    number: u64,
    sender: http2::SendRequest<Outgoing>,
    allowed: Allowed,
    open: Arc<AtomicUsize>,
    used: Instant,
}

/// A place for one stream on a connection, until whatever is sent or received on it is over.
pub(super) struct Place {
    open: Arc<AtomicUsize>,
    freed: Arc<Notify>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Relaxed);
        self.freed.notify_one();
    }
}

/// A stream that may be opened.
pub(super) struct Stream {
    sender: http2::SendRequest<Outgoing>,
    place: Arc<Place>,
    newest: u64,
}

/// Whose turn it is.
pub(super) enum Turn<'a> {
    /// The app speaks HTTP/1.1.
    Http1,
    /// There is a place.
    Open(Stream),
    /// This stream's, to dial.
    Dial(Dialling<'a>),
}

/// The turn to dial.
pub(super) struct Dialling<'a> {
    shared: &'a Shared,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

impl Shared {
    /// Waits for a place on a connection with a number above `after`, or for the turn to dial one.
    pub(super) async fn turn(&self, after: u64) -> Turn<'_> {
        loop {
            let mut freed = pin!(self.freed.notified());
            if let Some(turn) = self.at_once(after) {
                return turn;
            }
            tokio::select! {
                biased;
                () = &mut freed => continue,
                turn = self.dialling.lock() => {
                    // What the last one dialled may have a place.
                    if let Some(turn) = self.at_once(after) {
                        return turn;
                    }
                    if !self.is_full() {
                        return Turn::Dial(Dialling { shared: self, _turn: turn });
                    }
                }
            }
            freed.await;
        }
    }

    fn at_once(&self, after: u64) -> Option<Turn<'static>> {
        let mut known = self.known();
        if known.http1 {
            return Some(Turn::Http1);
        }
        known.lines.retain(|line| !line.sender.is_closed());
        let newest = known.newest;
        let mut younger = known.lines.iter_mut().filter(|line| line.number > after);
        let line = younger.find(|line| line.has_place())?;
        Some(Turn::Open(line.open(newest, &self.freed)))
    }

    /// Whether no further connection may be dialled.
    pub(super) fn is_full(&self) -> bool {
        self.known().lines.len() >= MOST
    }

    /// Closes what was closed by the app, and what no stream has needed for `bound`. False: nothing is known.
    pub(super) fn sweep(&self, bound: Duration) -> bool {
        let mut known = self.known();
        known.lines.retain(|line| !line.sender.is_closed());
        let mut first = true;
        known.lines.retain(|line| {
            let needed = line.open.load(Relaxed) > 0 || line.used.elapsed() < bound;
            std::mem::take(&mut first) || needed
        });
        known.http1 || !known.lines.is_empty()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn has_place(&self) -> bool {
        let allowed = self.allowed.borrow().unwrap_or_default();
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        self.open.load(Relaxed) < allowed && self.sender.is_ready()
    }

    fn open(&mut self, newest: u64, freed: &Arc<Notify>) -> Stream {
        self.open.fetch_add(1, Relaxed);
        self.used = Instant::now();
        let place = Place {
            open: self.open.clone(),
            freed: freed.clone(),
        };
        Stream {
            sender: self.sender.clone(),
            place: Arc::new(place),
            newest,
        }
    }
}

impl Stream {
    /// Asks, and waits for the answer's head.
    pub(super) async fn ask(
        &mut self,
        mut request: Request<Outgoing>,
    ) -> Result<Response<Incoming>, Unanswered> {
        // The app may answer before it has read the body, which goes on being sent.
        request.body_mut().hold(self.place.clone());
        self.sender.try_send_request(request).await
    }

    /// The youngest connection that there was.
    pub(super) fn newest(&self) -> u64 {
        self.newest
    }

    pub(super) fn into_place(self) -> Arc<Place> {
        self.place
    }
}

impl Dialling<'_> {
    /// The app chose HTTP/1.1.
    pub(super) fn chose_http1(self) {
        self.shared.known().http1 = true;
    }

    /// Begins HTTP/2 on a connection, which a task of `tasks` drives, and opens the first stream.
    pub(super) async fn begin(
        self,
        app: &App,
        connection: Connection,
        (tasks, deadline): (&Arc<Tasks>, Instant),
    ) -> Result<Stream, Failed> {
        let (heard, mut allowed) = heard(connection);
        let (sender, connection) = http2::Builder::new(On(tasks.clone()))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake(TokioIo::new(heard))
            .await
            .map_err(|error| forward::failed(app, &error))?;
        tasks.spawn(info_span!("app"), async move {
            // How it ended reaches each of its streams.
            let _ = connection.await;
        });
        // An app's SETTINGS are the first that it says (RFC 9113 §3.4).
        match timeout_at(deadline, allowed.wait_for(Option::is_some)).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return Err(broken(app, "ended the connection or does not speak HTTP/2")),
            Err(_) => return Err(target::slow(app, "did not begin HTTP/2 in time").into()),
        }
        let mut known = self.shared.known();
        known.newest += 1;
        let newest = known.newest;
        let mut line = Line {
            number: newest,
            sender,
            allowed,
            open: Arc::default(),
            used: Instant::now(),
        };
        let stream = line.open(newest, &self.shared.freed);
        known.lines.push(line);
        Ok(stream)
    }
}

/// The engine's way to spawn.
#[derive(Clone)]
struct On(Arc<Tasks>);

impl<F> hyper::rt::Executor<F> for On
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(info_span!("app"), task);
    }
}
