//! The network between an edge and its gateway, under a test's control: it can be cut, become silent, and have a delay.
//!
//! A relay on loopback. An edge is configured to dial the relay instead of the gateway. The relay does not examine the
//! bytes.

use super::gateway::loopback;
use std::{net::SocketAddr, ops::Range, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// Condition of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Passing,
    /// Nothing passes, and neither end is notified.
    Silent,
}

/// Delay of the bytes in each direction.
#[derive(Clone, Debug)]
struct Delay {
    time: Duration,
    /// Connections without delay, by the order in which they were opened.
    exempt: Range<usize>,
}

/// Maximum number of parts of 64 KiB in flight in one direction: 16 MiB, more than a window.
const UNDER_WAY: usize = 256;

/// A network; dropping it cuts it permanently.
pub(crate) struct Link {
    address: SocketAddr,
    condition: Arc<watch::Sender<Condition>>,
    cuts: Arc<watch::Sender<usize>>,
    delay: watch::Sender<Delay>,
    opened: watch::Receiver<usize>,
    _passing: JoinSet<()>,
}

impl Link {
    /// Creates a link to `to`.
    pub(crate) async fn to(to: SocketAddr) -> Self {
        Self::far(to, Duration::ZERO).await
    }

    /// The same, with this delay in each direction.
    pub(crate) async fn far(to: SocketAddr, delay: Duration) -> Self {
        let listener = TcpListener::bind(loopback()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let condition = Arc::new(watch::Sender::new(Condition::Passing));
        let cuts = Arc::new(watch::Sender::new(0));
        let (delay, delays) = watch::channel(Delay {
            time: delay,
            exempt: 0..0,
        });
        let (count, opened) = watch::channel(0);
        let mut passing = JoinSet::new();
        let (conditions, severed) = (condition.clone(), cuts.clone());
        passing.spawn(async move {
            let mut connections = JoinSet::new();
            for number in 0.. {
                let (near, _) = listener.accept().await.unwrap();
                count.send_replace(number + 1);
                connections.spawn(connection(
                    near,
                    to,
                    Control {
                        number,
                        delays: delays.clone(),
                        condition: conditions.subscribe(),
                    },
                    severed.subscribe(),
                ));
            }
        });
        Self {
            address,
            condition,
            cuts,
            delay,
            opened,
            _passing: passing,
        }
    }

    /// Returns the address to dial.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections that are open; new ones pass.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Returns the number of connections that were opened so far.
    pub(crate) fn opened(&self) -> usize {
        *self.opened.borrow()
    }

    /// Delays all bytes that arrive from now on, in each direction, except those of the connections with these numbers.
    pub(crate) fn delay(&self, time: Duration, exempt: Range<usize>) {
        self.delay.send_replace(Delay { time, exempt });
    }

    /// Passes nothing from now on, without notice to either end.
    pub(crate) fn silence(&self) {
        self.condition.send_replace(Condition::Silent);
    }

    /// Passes everything again, first the bytes that were held back.
    pub(crate) fn restore(&self) {
        self.condition.send_replace(Condition::Passing);
    }
}

/// State of the link, for one connection.
#[derive(Clone)]
struct Control {
    number: usize,
    delays: watch::Receiver<Delay>,
    condition: watch::Receiver<Condition>,
}

impl Control {
    /// Returns the time at which bytes that arrive now are delivered.
    fn due(&self) -> Instant {
        let delay = self.delays.borrow();
        let is_exempt = delay.exempt.contains(&self.number);
        Instant::now()
            + if is_exempt {
                Duration::ZERO
            } else {
                delay.time
            }
    }
}

async fn connection(
    near: TcpStream,
    to: SocketAddr,
    control: Control,
    mut cuts: watch::Receiver<usize>,
) {
    let Ok(far) = TcpStream::connect(to).await else {
        return;
    };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::select! {
        _ = cuts.changed() => {}
        _ = async {
            tokio::join!(
                pass(near_in, far_out, control.clone()),
                pass(far_in, near_out, control.clone()),
            )
        } => {}
    }
}

async fn pass(from: OwnedReadHalf, to: OwnedWriteHalf, control: Control) {
    let (send, under_way) = mpsc::channel(UNDER_WAY);
    let condition = control.condition.clone();
    tokio::join!(take(from, send, control), give(to, under_way, condition));
}

/// Takes the bytes that arrive, each with the time of its delivery at the other end.
async fn take(mut from: OwnedReadHalf, send: mpsc::Sender<(Instant, Vec<u8>)>, control: Control) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let part = (control.due(), buffer[..length].to_vec());
        if send.send(part).await.is_err() {
            return;
        }
    }
}

async fn give(
    mut to: OwnedWriteHalf,
    mut under_way: mpsc::Receiver<(Instant, Vec<u8>)>,
    mut condition: watch::Receiver<Condition>,
) {
    while let Some((due, part)) = under_way.recv().await {
        sleep_until(due).await;
        let passing = condition.wait_for(|now| *now == Condition::Passing).await;
        // Its return value contains a lock.
        let gone = passing.map(drop).is_err();
        if gone || to.write_all(&part).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
