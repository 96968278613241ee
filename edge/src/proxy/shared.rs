//! An app's HTTP/2 connections, which streams share ([`places`](causeway_tunnel::places)).
//!
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
    heard::heard,
    places::{self, Place, Places},
    task::Tasks,
};
use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::TokioIo;
use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::MutexGuard,
    time::{Instant, timeout_at},
};
use tracing::info_span;

/// Largest head of an answer, in bytes.
const MOST_HEAD: u32 = 256 << 10;
/// What an app may send ahead on one stream. The window of the whole connection is the largest that
/// there is, so that readers that stall do not hold up the others.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// What is known of an app's HTTP/2.
#[derive(Default)]
pub(super) struct Shared(Places<Sender>);

#[derive(Clone)]
struct Sender(http2::SendRequest<Outgoing>, SocketAddr);

impl places::Shared for Sender {
    fn has_place(&self, taken: usize, allowed: usize) -> bool {
        taken < allowed && self.0.is_ready()
    }
}

impl Sender {
    fn is_alive(&self) -> bool {
        !self.0.is_closed()
    }
}

/// A stream that may be opened.
pub(super) struct Stream {
    sender: http2::SendRequest<Outgoing>,
    address: SocketAddr,
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
    _turn: MutexGuard<'a, ()>,
}

impl Shared {
    /// Waits for a place on a connection with a number above `after`, or for the turn to dial one.
    pub(super) async fn turn(&self, after: u64) -> Turn<'_> {
        match self.0.turn(after, Sender::is_alive).await {
            places::Turn::Http1 => Turn::Http1,
            places::Turn::Open(stream) => Turn::Open(stream.into()),
            places::Turn::Dial(turn) => Turn::Dial(Dialling {
                shared: self,
                _turn: turn,
            }),
        }
    }

    /// Whether no further connection may be dialled.
    pub(super) fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// Closes what was closed by the app, and what no stream has needed for `bound`. False: nothing is known.
    pub(super) fn sweep(&self, bound: Duration) -> bool {
        self.0.sweep(bound, Sender::is_alive)
    }
}

impl From<places::Stream<Sender>> for Stream {
    fn from(stream: places::Stream<Sender>) -> Self {
        Self {
            sender: stream.connection.0,
            address: stream.connection.1,
            place: Arc::new(stream.place),
            newest: stream.newest,
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

    /// Returns the address that the connection was dialled to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
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
        self.shared.0.chose_http1();
    }

    /// Begins HTTP/2 on a connection, which a task of `tasks` drives, and opens the first stream.
    pub(super) async fn begin(
        self,
        app: &App,
        (connection, address): (Connection, SocketAddr),
        (tasks, deadline): (&Arc<Tasks>, Instant),
    ) -> Result<Stream, Failed> {
        let (heard, mut allowed) = heard(connection);
        let (sender, connection) = http2::Builder::new(On(tasks.clone()))
            .initial_stream_window_size(STREAM_WINDOW)
            // As much as a tunnel carries; the engine's own limit is 16 KiB.
            .max_header_list_size(MOST_HEAD)
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
        let places = &self.shared.0;
        Ok(places
            .add(places.next(), Sender(sender, address), allowed)
            .into())
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
