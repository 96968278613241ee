//! Queries over TCP, each with a length prefix (RFC 7766).
//!
//! Connections are limited, with a share for each source (`ConnectionLimit`): at the limit, an idle connection is closed for a
//! new one. Every wait has a timeout: for the start of the next query, for the rest of it, and for the client to read the answer.

use super::{
    handler::Transport,
    names::{MAX_QUERY_SIZE, NodeNames},
};
use causeway_rt::{connection_limit::Slot, listener::BoundSocket, socket::Socket, task::TaskGroup};
use std::{io, pin::pin, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// Maximum number of connections, at less than 10 KiB each.
const MAX_CONNECTIONS: usize = 256;
/// Idle timeout, which equals the time for which forwarders commonly keep a connection open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the rest of a query, and of sending an answer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum lifetime: after this time a connection ends with its next answer.
const MAX_LIFETIME: Duration = Duration::from_mins(2);
/// Time for an answer that is being written when the server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

pub(super) async fn run(listener: BoundSocket, names: &NodeNames, stop: &CancellationToken) {
    let listener = match listener.attach() {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "cannot answer DNS over TCP: the listener cannot be registered with the runtime");
            return;
        }
    };
    let connections = TaskGroup::new(&CancellationToken::new());
    let limit = names
        .metrics
        .connection_limit("dns_connections", MAX_CONNECTIONS);
    loop {
        let (socket, from) = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let Ok(slot) = limit.admit(from) else {
            continue;
        };
        let (names, stop) = (names.clone(), stop.clone());
        connections.spawn(info_span!("dns", %from), async move {
            let serving = pin!(serve(socket, &names, &slot, &stop));
            let ended = slot.run(serving).await;
            if let Some(Err(error)) = ended {
                tracing::debug!(%error, "a DNS connection ended with an error");
            }
        });
    }
    connections.drain(SHUTDOWN_GRACE).await;
}

async fn serve(
    mut socket: Socket,
    names: &NodeNames,
    slot: &Slot,
    stop: &CancellationToken,
) -> io::Result<()> {
    let lifetime_end = Instant::now() + MAX_LIFETIME;
    while Instant::now() < lifetime_end {
        let length = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            length = timeout(IDLE_TIMEOUT, socket.read_u16()) => length,
        };
        let length = match length {
            // The client has no further query, or was idle for too long.
            Err(_) => return Ok(()),
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Ok(length) => usize::from(length?),
        };
        if length > MAX_QUERY_SIZE {
            return Ok(());
        }
        let mut question = vec![0; length];
        timeout(TRANSFER_TIMEOUT, socket.read_exact(&mut question)).await??;
        let _busy_guard = slot.busy();
        let Some(answer) = names.answer(&question, Transport::Tcp) else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        // Sent as one segment, because some clients treat a segment with only the length as an answer.
        let message = [&length.to_be_bytes()[..], &answer].concat();
        timeout(TRANSFER_TIMEOUT, socket.write_all(&message)).await??;
    }
    Ok(())
}
