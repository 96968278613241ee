//! `causeway forward`: local ports that lead to ports of a node.
//!
//! A local port stays open while the node is away. A connection then waits for a bounded time. If it cannot be served, it is reset,
//! and the reason is printed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use causeway_rt::backoff::Backoff;
use causeway_rt::socket::ResetOnClose;
use causeway_rt::task::TaskGroup;
use futures_util::future::join_all;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};
use tracing::debug_span;

use super::nodes::open_client;
use crate::access::events::Events;
use crate::access::gateway_client::{GatewayClient, RequestError, Session};
use crate::access::relay::relay_socket;
use crate::cli::Forward;
use crate::signal::Signals;

/// Maximum number of open connections of a local port.
const MAX_CONNECTIONS: usize = 1024;
/// Pause after a failed accept, which lasts until other files are closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum delay between two attempts to reach a node that is away.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Sessions to one node.
struct Forwarder {
    client: GatewayClient,
    node: String,
    wait: Duration,
    events: Events,
}

/// Runs the command until a signal.
pub(crate) async fn run(args: Forward) -> anyhow::Result<()> {
    let pairs = args.pairs();
    let (_, client) = open_client(&args.profile)?;
    // Before the lines that say that it is ready.
    let signals = Signals::listen()?;
    let forwarder = Arc::new(Forwarder {
        client,
        node: args.node.host,
        wait: args.wait,
        events: Events::new(args.json),
    });
    let mut accepting = Vec::new();
    for pair in pairs {
        let (listener, local) = listen(SocketAddr::new(args.address, pair.local)).await?;
        let target = forwarder.target(pair.remote);
        let text = format!("Forwarding from {local} -> {}", pair.remote);
        forwarder.events.listening(local, &target, &text)?;
        let (forwarder, local_port) = (forwarder.clone(), local.port());
        accepting.push(serve(listener, move |local, peer| {
            let forwarder = forwarder.clone();
            async move {
                let ports = (local_port, pair.remote);
                forwarder.handle(local, peer, ports).await;
            }
        }));
    }
    until_signal(signals, join_all(accepting)).await;
    Ok(())
}

/// Opens a local port. Returns its address as well.
pub(super) async fn listen(address: SocketAddr) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address}"))?;
    let local = listener.local_addr()?;
    Ok((listener, local))
}

/// Runs a future that does not end until the process receives SIGINT or SIGTERM, or its terminal is closed. Dropping it resets its
/// connections.
pub(super) async fn until_signal(mut signals: Signals, future: impl Future) {
    let stop = signals.stop.clone();
    let hangup = signals.hangup.take();
    let hung_up = async {
        match hangup {
            Some(mut hangup) => drop(hangup.recv().await),
            None => std::future::pending().await,
        }
    };
    let running = async {
        tokio::select! {
            _ = future => {}
            () = stop.cancelled() => {}
            () = hung_up => {}
        }
    };
    signals.run(running).await;
}

/// Accepts connections, and handles each of them in a task.
pub(super) async fn serve<F>(listener: TcpListener, handle: impl Fn(TcpStream, SocketAddr) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let tasks = TaskGroup::default();
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let slot = slots.clone().acquire_owned().await;
        match listener.accept().await {
            Ok((local, peer)) => {
                let _ = local.set_nodelay(true);
                let handling = handle(local, peer);
                tasks.spawn(debug_span!("connection"), async move {
                    handling.await;
                    drop(slot);
                });
            }
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

impl Forwarder {
    fn target(&self, port: u16) -> String {
        format!("{}:{port}", self.node)
    }

    async fn handle(
        &self,
        local: TcpStream,
        peer: SocketAddr,
        (local_port, remote_port): (u16, u16),
    ) {
        let target = self.target(remote_port);
        match self.open(remote_port).await {
            Ok(session) => {
                // The words of `kubectl port-forward`.
                let text = format!("Handling connection for {local_port}");
                self.events.connection(peer, &target, &text);
                if let Err(error) = relay_socket(local, session).await {
                    self.events.broken(&target, &error);
                }
            }
            Err(error) => {
                local.abort();
                self.events.refused(&target, &error);
            }
        }
    }

    /// Opens a session. Tries again while the node or the gateway is away.
    async fn open(&self, port: u16) -> Result<Session, RequestError> {
        let mut backoff = Backoff::new(RETRY_MAX, RETRY_MAX);
        let deadline = Instant::now() + self.wait;
        // One attempt without a limit of its own if the user does not want to wait.
        let mut limit = Some(self.wait).filter(|wait| !wait.is_zero());
        let mut refusal = None;
        loop {
            let delay = backoff.silent(rand::random());
            match self.client.connect_within(&self.node, port, limit).await {
                Err(error) if error.is_temporary() && Instant::now() + delay < deadline => {
                    if matches!(error, RequestError::Refused(_)) {
                        refusal = Some(error);
                    }
                    sleep(delay).await;
                    limit = Some(deadline - Instant::now());
                }
                // The last attempt may have had too little time for an answer.
                Err(error @ RequestError::Unreachable(_)) if Instant::now() >= deadline => {
                    return Err(refusal.unwrap_or(error));
                }
                result => return result,
            }
        }
    }
}
