//! Questions over TCP, each with its length before it (RFC 7766).
//!
//! A connection costs a permit, and its waits are bounded: for the next question, for the whole of it, for the answer to be
//! taken. When half of the permits are out, connections that rest are closed sooner, and beyond the last one new ones at
//! once: whoever holds them keeps nobody from asking by datagram.

use super::{Names, Over, QUESTION};
use causeway_tunnel::{listener::Bound, socket::Socket, task::Tasks};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::Semaphore,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// Connections at once, at less than 10 KiB each.
const CONNECTIONS: usize = 256;
/// What a forwarder keeps a connection for, commonly.
const IDLE: Duration = Duration::from_secs(10);
/// The same where many are here.
const HURRY: Duration = Duration::from_secs(1);
/// The rest of a question has to come, and an answer to go, within this time.
const TRANSFER: Duration = Duration::from_secs(2);
/// After this time a connection ends with its next answer.
const LIFE: Duration = Duration::from_mins(2);
/// What an answer that is being written gets when the server stops.
const GRACE: Duration = Duration::from_millis(500);

pub(super) async fn run(listener: Bound, names: &Names, stop: &CancellationToken) {
    let listener = match listener.attach() {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "cannot answer DNS over TCP: the system does not take the listener");
            return;
        }
    };
    let connections = Tasks::new(&CancellationToken::new());
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let (socket, from) = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            names.metrics.limit("dns_connections");
            continue;
        };
        let crowded = permits.available_permits() < CONNECTIONS / 2;
        let idle = if crowded { HURRY } else { IDLE };
        let (names, stop) = (names.clone(), stop.clone());
        connections.spawn(info_span!("dns", %from), async move {
            if let Err(error) = serve(socket, &names, (idle, &stop)).await {
                tracing::debug!(%error, "a connection for DNS ended out of order");
            }
            drop(permit);
        });
    }
    connections.drain(GRACE).await;
}

async fn serve(
    mut socket: Socket,
    names: &Names,
    (idle, stop): (Duration, &CancellationToken),
) -> io::Result<()> {
    let until = Instant::now() + LIFE;
    while Instant::now() < until {
        let length = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            length = timeout(idle, socket.read_u16()) => length,
        };
        let length = match length {
            // Nothing more to ask, or nothing for too long.
            Err(_) => return Ok(()),
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Ok(length) => usize::from(length?),
        };
        if length > QUESTION {
            return Ok(());
        }
        let mut question = vec![0; length];
        timeout(TRANSFER, socket.read_exact(&mut question)).await??;
        let Some(answer) = names.answer(&question, Over::Tcp) else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        // One segment: some clients take the length alone for an answer.
        let whole = [&length.to_be_bytes()[..], &answer].concat();
        timeout(TRANSFER, socket.write_all(&whole)).await??;
    }
    Ok(())
}
