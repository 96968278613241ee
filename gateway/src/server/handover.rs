//! Handover of a gateway to another process on the same data directory, so that a restart refuses no connection.
//!
//! The running process listens on a unix socket in its data directory, which only its user can open. The next process connects
//! before it binds a socket. Lines of JSON follow:
//! 1. [`Offer`]: the sockets of the running process, then each as a descriptor, then its claim of the directory.
//! 2. `"ready"`: the next process has bound everything. Until here nothing has changed for the running process. It then waits
//!    for the edges for which requests wait: these edges would connect to the next process, and the requests would fail.
//! 3. [`Released`]: the running process accepts no tunnel and no command any more, and enrols no edge. The next process reads
//!    the data directory again, and accepts tunnels and commands. The running process asks its edges to connect.
//! 4. `"serving"`: the edges have connected, and the next process accepts clients. The running process closes its listeners,
//!    drains (`control::drain`), and ends.
//!
//! If the next process ends before `"ready"`, the running process continues. After that it drains in any case, and serves until
//! another process takes over or the drain time ends.

use super::{
    control_servers::EndTokens,
    reload::{Reloadable, Reloader},
    sockets::{DNS_SERVER, InheritedSockets, OpenSockets, SocketName, TUNNEL_PORT},
};
use crate::{
    control::{drain, nat, successor::Successor},
    state::{Nodes, Registry},
};
use causeway_certs::{DirLock, NodeName, Store, StoreError};
use causeway_rt::{
    descriptor_passing::{receive_descriptor, send_descriptor},
    listener::BoundSocket,
    socket::DetachedSocket,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    net::SocketAddr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Time for one message of a process that responds.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a successor to bind its sockets, and to serve clients after that.
const BIND_TIMEOUT: Duration = Duration::from_mins(1);
/// Time in which a running process that cannot be reached may end, so that this process starts in the ordinary way.
const PREDECESSOR_WAIT: Duration = Duration::from_secs(15);
/// Interval of attempts to reach a running process.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time for which a running process accepts edges for requests that wait for one.
const WAITING_REQUESTS_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to wait for a running process to stop accepting, longer than it waits for edges and enrolments.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time to wait for the next edge, while all edges are served by the running process.
const EDGES_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to wait for all edges, shorter than [`BIND_TIMEOUT`]: 20,000 edges need about 10 s.
const ALL_EDGES_TIMEOUT: Duration = Duration::from_secs(45);
/// Interval of checks for edges, and of checks for changes of the data directory.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of checks for waiting requests, shorter than the time between two edges that are replaced one after the other.
const WAITING_REQUESTS_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum length of a line in bytes, before the descriptors.
const MAX_OFFER: usize = 1 << 20;
/// Message of a successor that has bound its sockets.
const READY: &str = "\"ready\"";
/// Message of a successor that accepts clients.
const SERVING: &str = "\"serving\"";

/// Sockets of the running process, in the order of their descriptors.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    version: u32,
    /// Inode of the network namespace, if the system reports it.
    network_namespace: Option<u64>,
    sockets: Vec<SocketName>,
}

/// Version of the messages.
const VERSION: u32 = 1;

/// Returns the inode of the network namespace of this process.
fn network_namespace() -> Option<u64> {
    Some(std::fs::metadata("/proc/self/ns/net").ok()?.ino())
}

/// Message that the running process enrols no edge any more.
#[derive(Debug, Serialize, Deserialize)]
struct Released {
    /// Nodes with a tunnel.
    nodes: BTreeSet<NodeName>,
}

/// Running process that this process takes over.
#[derive(Debug)]
pub(super) struct Predecessor(UnixStream);

/// Error of a takeover: the running process did not wait for this one, and continues.
#[derive(Debug)]
pub(super) struct StillRunning;

/// Connection to a predecessor that accepts neither tunnels nor commands any more.
pub(super) struct ReleasedPredecessor {
    stream: tokio::net::UnixStream,
    nodes: BTreeSet<NodeName>,
}

/// Claim of the data directory, and the process and sockets from which it was taken over.
type Claim = (DirLock, Option<(Predecessor, InheritedSockets)>);

/// Claims the data directory, or connects to the process that uses it and takes over its claim and its sockets. Blocks.
///
/// # Errors
/// If the directory is in use by a process that hands nothing over.
pub(super) fn claim_or_take_over(store: &Store) -> Result<Claim, StoreError> {
    let end = Instant::now() + PREDECESSOR_WAIT;
    loop {
        let in_use = match store.claim() {
            Ok(claim) => return Ok((claim, None)),
            Err(error @ StoreError::InUse { .. }) => error,
            Err(error) => return Err(error),
        };
        match receive_offer(store) {
            Ok((claim, predecessor, sockets)) => return Ok((claim, Some((predecessor, sockets)))),
            // A process that is starting or ending does not respond.
            Err(error) if error.kind() == io::ErrorKind::Unsupported || Instant::now() >= end => {
                tracing::warn!(%error, "the running gateway does not hand over its sockets");
                return Err(in_use);
            }
            Err(_) => std::thread::sleep(RETRY_INTERVAL),
        }
    }
}

fn receive_offer(store: &Store) -> io::Result<(DirLock, Predecessor, InheritedSockets)> {
    let mut stream = UnixStream::connect(store.handover_socket())?;
    stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
    // The line is read byte by byte, because the descriptors follow it.
    let mut line = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
        if line.len() > MAX_OFFER {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    let offer: Offer = serde_json::from_slice(&line)?;
    if offer.version != VERSION || offer.network_namespace != network_namespace() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "it has another version of the handover, or runs in another network namespace",
        ));
    }
    let mut sockets = Vec::with_capacity(offer.sockets.len());
    for name in offer.sockets {
        sockets.push((name, receive_descriptor(&stream)?));
    }
    let claim = store.adopt_claim(receive_descriptor(&stream)?);
    Ok((claim, Predecessor(stream), sockets.into()))
}

impl Predecessor {
    /// Makes the running process stop accepting tunnels and commands, and waits until it has. Returns `None` if it has ended.
    ///
    /// # Errors
    /// If it is running and does not respond in time.
    async fn release(self, store: &Store) -> Result<Option<ReleasedPredecessor>, StillRunning> {
        let releasing = async {
            self.0.set_nonblocking(true)?;
            let mut stream = tokio::net::UnixStream::from_std(self.0)?;
            write_line(&mut stream, READY).await?;
            let mut lines = BufReader::new(stream).lines();
            let line = timeout(RELEASE_TIMEOUT, lines.next_line()).await??;
            let line = line.ok_or(io::ErrorKind::UnexpectedEof)?;
            let released: Released = serde_json::from_str(&line)?;
            Ok::<_, io::Error>(ReleasedPredecessor {
                stream: lines.into_inner().into_inner(),
                nodes: released.nodes,
            })
        };
        match releasing.await {
            Ok(released) => {
                tracing::info!(
                    nodes = released.nodes.len(),
                    "taking over from the running gateway"
                );
                Ok(Some(released))
            }
            Err(error) if UnixStream::connect(store.handover_socket()).is_ok() => {
                tracing::error!(%error, "the running gateway does not respond, and continues");
                Err(StillRunning)
            }
            Err(error) => {
                tracing::warn!(%error, "the running gateway ended during the handover");
                Ok(None)
            }
        }
    }
}

impl ReleasedPredecessor {
    /// Waits until the edges of the predecessor have connected, the nodes of the cluster are loaded, and `redirects` lead to
    /// them. Gives up if no further edge connects for [`EDGES_TIMEOUT`], or after [`ALL_EDGES_TIMEOUT`]. Revoked nodes are not
    /// awaited.
    pub(super) async fn wait_until_complete(
        &self,
        registry: &Registry,
        nodes: &Nodes,
        redirects: Option<&nat::Takeover>,
    ) {
        let missing = || {
            let missing = self.nodes.iter().filter(|node| !registry.has_tunnel(node));
            let is_admitted = |node: &&NodeName| nodes.revocation_reason(node).is_none();
            missing.filter(is_admitted).count()
        };
        // The rules of the predecessor end when this process serves clients.
        let is_redirected = || redirects.is_none_or(|redirects| redirects.complete.is_cancelled());
        let last_end = Instant::now() + ALL_EDGES_TIMEOUT;
        let (mut fewest, mut end) = (usize::MAX, last_end);
        loop {
            let (missing, now) = (missing(), Instant::now());
            if missing == 0 && nodes.pending_reason().is_none() && is_redirected() {
                return;
            }
            if missing < fewest {
                (fewest, end) = (missing, last_end.min(now + EDGES_TIMEOUT));
            }
            if now >= end {
                break;
            }
            sleep(POLL_INTERVAL).await;
        }
        if let Some(reason) = nodes.pending_reason() {
            tracing::warn!(%reason, "taking over without the nodes of the cluster");
        }
        let missing = missing();
        if missing > 0 {
            tracing::warn!(
                missing,
                "edges of the running gateway have not connected to this process"
            );
        }
    }

    /// Reports that this process accepts clients.
    pub(super) async fn report_serving(mut self) {
        if let Err(error) = write_line(&mut self.stream, SERVING).await {
            tracing::debug!(%error, "the previous process has ended");
        }
    }
}

async fn write_line(stream: &mut tokio::net::UnixStream, line: &str) -> io::Result<()> {
    stream.write_all(format!("{line}\n").as_bytes()).await
}

/// Claim of the data directory with everything that a handover needs, from the predecessor and to a successor.
#[derive(Debug)]
pub(super) struct Handover {
    claim: DirLock,
    /// Running process whose sockets this gateway has, and which it takes over when it runs.
    predecessor: Option<Predecessor>,
    sockets: OpenSockets,
    successor: Successor,
}

impl Handover {
    pub(super) fn new(
        claim: DirLock,
        predecessor: Option<Predecessor>,
        sockets: OpenSockets,
        successor: Successor,
    ) -> Self {
        Self {
            claim,
            predecessor,
            sockets,
            successor,
        }
    }

    /// Returns the progress of the handover to a successor.
    pub(super) fn successor(&self) -> Successor {
        self.successor.clone()
    }

    /// Takes over from the running process, if there is one, and reads the data directory again: that process may have enrolled
    /// edges or revoked nodes since this one has read it.
    ///
    /// # Errors
    /// If the running process does not hand over.
    pub(super) async fn take_over(
        &mut self,
        store: &Store,
        reloader: &Reloader,
    ) -> Result<Option<ReleasedPredecessor>, StillRunning> {
        let Some(predecessor) = self.predecessor.take() else {
            return Ok(None);
        };
        let released = predecessor.release(store).await?;
        refresh(reloader.parts()).await;
        Ok(released)
    }

    /// Returns the claim, and the server of handovers to successors. Open streams get `grace`.
    pub(super) fn server(
        self,
        store: &Store,
        reloader: &Reloader,
        grace: Duration,
    ) -> (DirLock, HandoverServer) {
        let server = HandoverServer {
            store: store.clone(),
            sockets: self.sockets,
            successor: self.successor,
            reloader: reloader.clone(),
            grace,
        };
        (self.claim, server)
    }
}

/// Server of handovers of a running gateway.
pub(super) struct HandoverServer {
    store: Store,
    sockets: OpenSockets,
    successor: Successor,
    reloader: Reloader,
    grace: Duration,
}

impl HandoverServer {
    /// Hands over to another process, then releases the data directory and follows its changes until the gateway ends. When the
    /// gateway drains, the next process binds the tunnel port itself, because edges must be refused until then.
    pub(super) async fn run(self, claim: DirLock, tokens: EndTokens) {
        let following = async {
            tokens.accept.cancelled().await;
            self.sockets.close(|name| name.is_for(TUNNEL_PORT));
            self.successor.ready.cancelled().await;
            // Commands go to the successor from now on.
            tokens.admin.cancel();
            self.sockets.close(|name| !name.is_for(DNS_SERVER));
            follow_data_dir(&self.store, self.reloader.parts()).await;
        };
        let serving = async {
            self.accept(claim, &tokens.accept).await;
            self.sockets.close(|_| true);
            tokens.names.cancel();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = tokens.close.cancelled() => {}
            () = serving => {}
            () = following => {}
        }
    }

    /// Accepts processes until one has taken over. Then only that process has the claim. From `stop` on no edge connects.
    async fn accept(&self, claim: DirLock, stop: &CancellationToken) {
        let claim = Arc::new(claim);
        let path = self.store.handover_socket();
        let bound = BoundSocket::unix_replacing(&path).and_then(BoundSocket::attach);
        let listener = match bound {
            Ok(listener) => listener,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "the next process cannot take over the sockets of this one (gateway --take-over)");
                return std::future::pending().await;
            }
        };
        let _file = SocketFile(path, self.successor.clone());
        // Nodes that have connected to a successor that has failed count as well.
        let mut nodes = BTreeSet::new();
        loop {
            let (socket, _) = listener.accept().await;
            let handover = async {
                match socket.detach()? {
                    DetachedSocket::Unix(stream) => {
                        self.hand_over((stream, claim.clone()), &mut nodes, stop)
                            .await
                    }
                    DetachedSocket::Tcp(_) => Err(io::ErrorKind::InvalidInput.into()),
                }
            };
            match handover.await {
                // Other processes in the queue find the socket of the successor.
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(%error, "the handover to another process has failed");
                    self.successor.connected.send_replace(false);
                }
            }
        }
    }

    async fn hand_over(
        &self,
        (stream, claim): (UnixStream, Arc<DirLock>),
        nodes: &mut BTreeSet<NodeName>,
        stop: &CancellationToken,
    ) -> io::Result<()> {
        let offered = self.open_sockets();
        let stream = spawn_blocking(move || send_offer(stream, &offered, &claim)).await??;
        let mut lines = BufReader::new(tokio::net::UnixStream::from_std(stream)?).lines();
        if next_line(&mut lines, BIND_TIMEOUT).await?.as_deref() != Some(READY) {
            return Err(io::Error::other("it ended before it was ready"));
        }
        tracing::info!("another process takes over");
        self.successor.connected.send_replace(true);
        let registry = &self.reloader.parts().shared.registry;
        tokio::select! {
            () = wait_for_requests(registry) => {}
            () = stop.cancelled() => {}
            // The successor sends nothing before it is released.
            _ = lines.next_line() => return Err(io::Error::other("it ended before it was released")),
        }
        self.successor.ready.cancel();
        self.successor.released.cancelled().await;
        let all = registry.all();
        let connected = all.into_iter().filter(|(_, edge)| !edge.is_leaving());
        nodes.extend(connected.map(|(node, _)| node));
        let released = serde_json::to_string(&Released {
            nodes: nodes.clone(),
        })?;
        let stream = lines.get_mut().get_mut();
        timeout(MESSAGE_TIMEOUT, write_line(stream, &released)).await??;
        let serving = async {
            match next_line(&mut lines, BIND_TIMEOUT).await? {
                Some(line) if line == SERVING => Ok(()),
                _ => Err(io::Error::other("it ended before it served clients")),
            }
        };
        // The edges serve this process until it closes their tunnels.
        let announced = drain::announce_drain(registry, self.grace + ALL_EDGES_TIMEOUT, true);
        let (serving, ()) = tokio::join!(serving, announced);
        serving?;
        tracing::info!("another process serves clients now");
        self.successor.serving.cancel();
        // Edges whose hello was not finished before.
        drain::announce_drain(registry, self.grace, true).await;
        Ok(())
    }

    /// Returns handles of the open sockets.
    fn open_sockets(&self) -> Vec<(SocketName, OwnedFd)> {
        let mut all = self.reloader.parts().listeners.sockets();
        all.extend(self.sockets.handles());
        all
    }
}

/// Waits until no request waits for an edge, at most [`WAITING_REQUESTS_TIMEOUT`].
async fn wait_for_requests(registry: &Registry) {
    let none_waits = async {
        while registry.has_waiting_requests() {
            sleep(WAITING_REQUESTS_INTERVAL).await;
        }
    };
    if timeout(WAITING_REQUESTS_TIMEOUT, none_waits).await.is_err() {
        tracing::warn!("requests wait for edges that may connect only to the next process");
    }
}

/// Sends the offer and its descriptors. Blocks.
fn send_offer(
    mut stream: UnixStream,
    sockets: &[(SocketName, OwnedFd)],
    claim: &DirLock,
) -> io::Result<UnixStream> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
    let names = sockets.iter().map(|(name, _)| name.clone()).collect();
    let mut line = serde_json::to_vec(&Offer {
        version: VERSION,
        network_namespace: network_namespace(),
        sockets: names,
    })?;
    line.push(b'\n');
    stream.write_all(&line)?;
    for (_, descriptor) in sockets {
        send_descriptor(&stream, descriptor.as_fd())?;
    }
    send_descriptor(&stream, claim.as_fd())?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

async fn next_line(
    lines: &mut Lines<BufReader<tokio::net::UnixStream>>,
    wait: Duration,
) -> io::Result<Option<String>> {
    timeout(wait, lines.next_line()).await?
}

/// Applies changes of the data directory by the successor: streams of revoked nodes end here too. Runs until dropped.
async fn follow_data_dir(store: &Store, parts: &Reloadable) {
    let mut seen = store.last_changes();
    refresh(parts).await;
    loop {
        sleep(POLL_INTERVAL).await;
        let changes = store.last_changes();
        if changes != seen {
            seen = changes;
            refresh(parts).await;
        }
    }
}

/// Reads the CA, the nodes and the pinned keys of the data directory again. Errors are logged.
async fn refresh(parts: &Reloadable) {
    let authority = parts.authority.clone();
    let reloaded = spawn_blocking(move || authority.reload_ca()).await;
    if let Ok(Err(error)) = reloaded {
        tracing::error!(%error, "the CA could not be reloaded");
    }
    if let Some(Err(error)) = parts.authority.node_sync.refresh_detached().await {
        tracing::error!(%error, "the records of admitted nodes could not be reloaded");
    }
}

/// Files in the data directory by which commands find the running process. They are removed when the value is dropped, unless
/// they belong to a successor by then.
pub(super) struct RuntimeFiles {
    store: Store,
    successor: Successor,
}

impl RuntimeFiles {
    /// Writes the admin address.
    pub(super) fn new(store: &Store, admin: SocketAddr, successor: &Successor) -> Self {
        if let Err(error) = store.write_runtime(Store::ADMIN_ADDRESS, &admin.to_string()) {
            tracing::error!(%error, "commands do not find this gateway without --admin");
        }
        Self {
            store: store.clone(),
            successor: successor.clone(),
        }
    }
}

impl Drop for RuntimeFiles {
    fn drop(&mut self) {
        if self.successor.ready.is_cancelled() {
            return;
        }
        if let Err(error) = self.store.remove_runtime(Store::ADMIN_ADDRESS) {
            tracing::warn!(%error, "the admin address could not be removed");
        }
        // A leftover socket does no harm; the next process replaces it.
        let _ = std::fs::remove_file(self.store.admin_socket());
    }
}

/// File of the handover socket, which is removed when the value is dropped, unless it belongs to a successor by then.
struct SocketFile(PathBuf, Successor);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.1.ready.is_cancelled() {
            // A leftover socket does no harm; the next process replaces it.
            let _ = std::fs::remove_file(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{
        NodesWriter,
        registry::{NodeUnavailable, tests::World},
    };

    fn node(number: usize) -> NodeName {
        NodeName::parse(&format!("edge-{number}")).unwrap()
    }

    fn predecessor(nodes: usize) -> (ReleasedPredecessor, tokio::net::UnixStream) {
        let (stream, other) = tokio::net::UnixStream::pair().unwrap();
        let nodes = (0..nodes).map(node).collect();
        (ReleasedPredecessor { stream, nodes }, other)
    }

    #[tokio::test(start_paused = true)]
    async fn a_successor_waits_while_further_edges_connect() {
        let (predecessor, _stream) = predecessor(4);
        let (world, nodes) = (World::new(), NodesWriter::default().reader());
        let began = Instant::now();
        let arriving = async {
            for number in 0..4 {
                sleep(EDGES_TIMEOUT.saturating_sub(POLL_INTERVAL)).await;
                world.register_node(&node(number)).await;
            }
        };
        let waiting = predecessor.wait_until_complete(&world.registry, &nodes, None);
        tokio::join!(arriving, waiting);
        let waited = began.elapsed();
        let arrived = 4 * EDGES_TIMEOUT.saturating_sub(POLL_INTERVAL);
        assert!((arrived..arrived + 3 * POLL_INTERVAL).contains(&waited));
    }

    #[tokio::test(start_paused = true)]
    async fn a_successor_awaits_edges_that_were_late_for_the_takeover() {
        let (predecessor, _stream) = predecessor(1);
        let (world, nodes) = (World::new(), NodesWriter::default().reader());
        let registry = &world.registry;
        let began = Instant::now();
        (predecessor.wait_until_complete(registry, &nodes, None)).await;
        assert!(began.elapsed() >= EDGES_TIMEOUT);
        registry.record_serving();
        let limit = Duration::from_secs(5);
        let (node, began) = (node(0), Instant::now());
        let arriving = async {
            sleep(limit / 2).await;
            world.register_node(&node).await;
        };
        let (selected, ()) = tokio::join!(registry.select_tunnel_within(&node, limit), arriving);
        assert!(selected.is_ok());
        assert!(began.elapsed() < limit);
        sleep(limit).await;
        let other = registry.select_tunnel_within(&self::node(1), limit).await;
        assert_eq!(other.unwrap_err(), NodeUnavailable::NeverSeen);
    }
}
