//! A TCP session: bytes both ways between a stream and an app.
//!
//! The app is dialled before the stream is answered, else a refused port would look like success (design trap
//! 4). The bytes are raw, whatever the port's scheme: the caller speaks TLS itself if the app does.
//! A reset on either side becomes a reset on the other.

use super::{
    Answer, Failed, Then, Way,
    app::{App, Connection, Replayed},
    relayed,
    target::{self, Connected},
};
use crate::metrics::Ending;
use bytes::Bytes;
use causeway_tunnel::{Receive, Send, copy};
use http::Response;
use std::sync::Arc;

/// Dials the app.
pub(super) async fn ask(
    way: &Way,
    app: &App,
    body: Receive,
    connected: &Connected,
) -> Result<Answer, Failed> {
    let deadline = target::deadline(way.timeouts.dial);
    let (tcp, address) = app.dial(way, deadline).await?;
    connected.set(address);
    let socket = Replayed::new(Bytes::new(), Connection::Plain(tcp));
    Ok(Answer {
        head: Response::new(()),
        then: Then::Bytes(Box::new(socket), body),
    })
}

/// Passes bytes until both directions have ended. Serves upgrades too.
pub(super) async fn pass(socket: Replayed, send: Send, receive: Receive) -> Ending {
    let passed = Arc::new(copy::Passed::default());
    relayed(&copy::relay(socket, send, receive, passed, false).await)
}
