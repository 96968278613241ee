//! A TCP relay with a delay and a rate in each direction, for machines that have no TUN.
//!
//! 1. What is read enters the way, and is written when it is due, in order; an end travels like a byte.
//! 2. While the queue in front of the way is full, or more is under way than it can hold, nothing is read: then
//!    the sender's own window closes, as it would.
//!
//! What it cannot imitate: it ends TCP on both sides. Each half has loopback's round trip, so slow start,
//! congestion control and the growth of windows are loopback's too, loss does not exist, and a sender's
//! handshake does not wait for the far end. A TLS handshake, a request and its answer, and the windows of HTTP/2
//! meet the full delay. `link` has none of these limits.

use super::way::Way;
use crate::{cli, files, report, stop::Stop};
use anyhow::Context;
use bytes::{Bytes, BytesMut};
use causeway_tunnel::{
    listener::{Bound, Listener},
    socket::{Abort, Detached, tune},
    task::Tasks,
};
use serde_json::json;
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, mpsc},
    time::{Instant, sleep_until},
};
use tracing::Span;

/// What is read at once.
const READ: usize = 64 << 10;
/// What may be under way in one direction where no rate says so.
const MOST: u64 = 64 << 20;

/// Relays until it is told to stop.
pub(crate) async fn run(asked: &cli::Relay, stop: Stop) -> anyhow::Result<()> {
    let bound = Bound::tcp(asked.listen).with_context(|| format!("{}", asked.listen))?;
    let address = bound.local_addr().context("the listener has no address")?;
    let listener = bound.attach()?;
    report::say(&json!({"event": "ready", "listen": address}));
    let connections = Tasks::default();
    stop.token
        .run_until_cancelled(accept(listener, (asked.to, asked.way), &connections))
        .await;
    connections.drain(Duration::ZERO).await;
    Ok(())
}

async fn accept(listener: Listener, (to, way): (SocketAddr, cli::Way), connections: &Tasks) {
    loop {
        let (near, _) = listener.accept().await;
        if let Ok(Detached::Tcp(near)) = near.detach()
            && let Ok(near) = TcpStream::from_std(near)
        {
            connections.spawn(Span::none(), connection(near, to, way));
        }
    }
}

async fn connection(near: TcpStream, to: SocketAddr, way: cli::Way) {
    let far = match TcpStream::connect(to).await {
        Ok(far) => far,
        Err(error) => {
            if files::ran_out(&error) {
                eprintln!("causeway-bench-load: the relay has no files left: {error}");
            }
            near.abort();
            return;
        }
    };
    tune(&far);
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::join!(pass(near_in, far_out, way), pass(far_in, near_out, way));
}

/// One direction, to its end. A failure on either side is a reset on the other.
async fn pass(from: OwnedReadHalf, mut to: OwnedWriteHalf, way: cli::Way) {
    let most = way.rate.map_or(MOST, |rate| {
        let held = way.delay + way.queue;
        let bytes = u128::from(rate) * held.as_millis() / 1000;
        u64::try_from(bytes)
            .unwrap_or(MOST)
            .clamp(READ as u64, MOST)
    });
    let room = Arc::new(Semaphore::new(usize::try_from(most).unwrap_or(READ)));
    let (sent, under_way) = mpsc::unbounded_channel();
    let passed = tokio::try_join!(
        enter(from, sent, &room, way),
        arrive(&mut to, under_way, &room),
    );
    if passed.is_err() {
        to.as_ref().abort();
    }
}

/// Bytes, and when they are due; none is the end.
type Due = (Instant, Bytes);

async fn enter(
    mut from: OwnedReadHalf,
    sent: mpsc::UnboundedSender<Due>,
    room: &Semaphore,
    way: cli::Way,
) -> io::Result<()> {
    let mut way = Way::new(way, Instant::now());
    let mut buffer = BytesMut::new();
    loop {
        sleep_until(way.room(Instant::now())).await;
        buffer.reserve(READ);
        let read = from.read_buf(&mut buffer).await?;
        let bytes = buffer.split().freeze();
        let length = u32::try_from(read).unwrap_or(u32::MAX);
        if let Ok(permits) = room.acquire_many(length).await {
            permits.forget();
        }
        let due = way.enter(read, Instant::now());
        if sent.send((due, bytes)).is_err() || read == 0 {
            return Ok(());
        }
    }
}

async fn arrive(
    to: &mut OwnedWriteHalf,
    mut under_way: mpsc::UnboundedReceiver<Due>,
    room: &Semaphore,
) -> io::Result<()> {
    while let Some((due, bytes)) = under_way.recv().await {
        sleep_until(due).await;
        if bytes.is_empty() {
            return to.shutdown().await;
        }
        to.write_all(&bytes).await?;
        room.add_permits(bytes.len());
    }
    Ok(())
}
