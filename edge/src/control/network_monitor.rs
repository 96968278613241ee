//! Monitor of changes of the machine's links, addresses or routes (rtnetlink's multicast groups).
//!
//! An edge that waits for its network tries again at once when the network changes. Changes come in bursts, so they are
//! reported once the burst is over. Without netlink the edge relies on the ordinary back-off.

use causeway_rt::task::TaskGroup;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use std::{io, time::Duration};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, info_span};

/// Time without changes after which a burst is over. DHCP sets the address and the route separately.
const BURST_END: Duration = Duration::from_millis(100);
/// Maximum time between a change and its report, for a network that changes continuously.
const MAX_BURST: Duration = Duration::from_millis(500);

/// Links, and addresses and routes of both families (RTMGRP_…, rtnetlink(7)).
const NETLINK_GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;
/// Value of `ENOBUFS` on Linux for x86 and ARM.
const ENOBUFS: i32 = 105;
/// Number of bytes that are read of each message. The content of a change does not matter, so the rest of a longer message is
/// dropped.
const READ_BYTES: usize = 64;

fn open_netlink_socket() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket
        .socket_mut()
        .bind(&SocketAddr::new(0, NETLINK_GROUPS))?;
    Ok(socket)
}

/// Waits for a message. Returns false if no message will arrive any more.
async fn wait_for_message(socket: &TokioSocket) -> bool {
    let mut buffer = [0; READ_BYTES];
    match socket.recv(&mut &mut buffer[..]).await {
        Ok(()) => true,
        // The kernel's buffer overflowed (ENOBUFS), so there were changes.
        Err(error) if error.raw_os_error() == Some(ENOBUFS) => true,
        Err(error) => {
            debug!(%error, "the network is no longer monitored for changes");
            false
        }
    }
}

/// Counter of the changes of the machine's network.
#[derive(Clone, Debug)]
pub(crate) struct NetworkMonitor(watch::Receiver<u64>);

impl NetworkMonitor {
    /// Starts the monitor, with a task of `tasks`.
    pub(crate) fn start(tasks: &TaskGroup) -> Self {
        let (change_counter, changes) = watch::channel(0);
        let socket = match open_netlink_socket() {
            Ok(socket) => socket,
            Err(error) => {
                debug!(%error, "netlink is not available; the network is not monitored for changes");
                return Self(changes);
            }
        };
        tasks.spawn(info_span!("changes"), async move {
            while wait_for_message(&socket).await {
                let burst = async {
                    while let Ok(true) = timeout(BURST_END, wait_for_message(&socket)).await {}
                };
                let _ = timeout(MAX_BURST, burst).await;
                change_counter.send_modify(|count| *count = count.wrapping_add(1));
            }
        });
        Self(changes)
    }

    /// Waits for the next change, or for ever if the network is not monitored.
    pub(crate) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Marks all changes until now as seen.
    pub(crate) fn mark_seen(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for `delay`, or until the network changes.
    pub(crate) async fn sleep_unless_changed(&mut self, delay: Duration) {
        tokio::select! {
            () = sleep(delay) => {}
            () = self.changed() => debug!("the network changed"),
        }
    }
}
