//! Hears when the machine's links, addresses or routes change (rtnetlink's multicast groups).
//!
//! An edge that waits for its network tries at once when something of it changed. Changes come in bursts, so
//! they are told once the burst is over. A machine without netlink has no such hint, and the ordinary
//! back-off does.

use causeway_tunnel::task::Tasks;
use futures_util::StreamExt;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use std::time::Duration;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, info_span};

/// A burst is over when nothing has changed for this long: DHCP sets address and route apart.
const QUIET: Duration = Duration::from_millis(100);
/// A network that never rests is told of this often.
const BURST: Duration = Duration::from_millis(500);

const GROUPS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv6Route,
];

/// Counts the changes of the machine's network.
#[derive(Clone, Debug)]
pub(crate) struct Changes(watch::Receiver<u64>);

impl Changes {
    /// Begins to listen, with tasks of `tasks`.
    pub(crate) fn listen(tasks: &Tasks) -> Self {
        let (told, changes) = watch::channel(0);
        let (connection, handle, mut messages) = match new_multicast_connection(&GROUPS) {
            Ok(opened) => opened,
            Err(error) => {
                debug!(%error, "netlink is not to be had; changes of the network are not heard");
                return Self(changes);
            }
        };
        tasks.spawn(info_span!("netlink"), connection);
        tasks.spawn(info_span!("changes"), async move {
            let _listening = handle;
            while messages.next().await.is_some() {
                let burst =
                    async { while let Ok(Some(_)) = timeout(QUIET, messages.next()).await {} };
                let _ = timeout(BURST, burst).await;
                told.send_modify(|count| *count = count.wrapping_add(1));
            }
        });
        Self(changes)
    }

    /// Waits for the next change, or for ever where none can be heard.
    pub(crate) async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// What changed until now is known.
    pub(crate) fn forget(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for `delay`, or less if the network has changed since it was last known.
    pub(crate) async fn wait(&mut self, delay: Duration) {
        tokio::select! {
            () = sleep(delay) => {}
            () = self.next() => debug!("the network changed"),
        }
    }
}
