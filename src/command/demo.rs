//! `causeway demo`: CA, gateway, two edges and their apps in one process.
//!
//! Everything is real but the distance: the edges join with tokens, dial the gateway over loopback, and serve
//! one app each as port 9100 of their node. The demo makes one HTTPS request to each node through the
//! road before it says `ready`, and prints commands that do the same. What programs on the nodes read of their cluster comes
//! from manifests here; SIGUSR1 stops the gateway, so that a user can see that clients continue to read.

mod app;
mod files;
mod gateway;
mod probe;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use causeway_certs::{NodeAttributes, NodeName};
use causeway_edge::Edge;
use causeway_gateway::server::BoundAddresses;
use causeway_rt::task::TaskGroup;
use gateway::DemoGateway;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::info_span;

use super::admin_client;
use crate::cli;
use crate::output::outln;
use crate::signal::Signals;
use files::{DRAIN, DemoFiles, PATIENCE, PORT};

/// The nodes of the demo.
const NODES: [&str; 2] = ["edge-1", "edge-2"];
/// Runs the demo until Ctrl-C.
pub(crate) async fn run(args: cli::Demo) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let live = Box::pin(live(args, stop));
    signals.run(live).await.unwrap_or(Ok(()))
}

async fn live(args: cli::Demo, stop: CancellationToken) -> anyhow::Result<()> {
    let temporary = tempfile::Builder::new()
        .prefix("causeway-demo-")
        .tempdir()?;
    // The printed commands are run from other directories.
    let dir = match &args.data_dir {
        Some(dir) => std::path::absolute(dir)?,
        None => temporary.path().to_owned(),
    };
    let files = DemoFiles::make(&dir)?;
    let cloud = DemoGateway::bind(&dir, args.listen)?;
    let (addresses, listener) = (cloud.addresses.clone(), cloud.listener);
    files
        .store
        .write_runtime(admin_client::NAME, &addresses.admin.to_string())?;
    outln!("causeway demo: a gateway and two edges in one process\n")?;
    outln!(
        "data directory  {}{}",
        dir.display(),
        if args.data_dir.is_some() {
            ""
        } else {
            " (removed at the end)"
        }
    )?;
    outln!(
        "gateway         tunnels {}, https listener {listener}, admin {}",
        addresses.tunnel,
        addresses.admin
    )?;

    let tasks = TaskGroup::default();
    let (ask, demo) = (CancellationToken::new(), stop.clone());
    let serving = cloud.run(ask.clone());
    let running = async {
        let ready = begin(&files, (&addresses, listener), &tasks, &ask).await;
        if ready.is_ok() {
            demo.cancelled().await;
        }
        ask.cancel();
        ready.and_then(|()| outln!("\nstopping"))
    };
    let (outcome, served) = tokio::join!(running, serving);
    tasks.drain(DRAIN).await;
    admin_client::forget(&files.store)?;
    outcome.and(served)
}

/// Starts the edges and shows that they can be reached.
async fn begin(
    files: &DemoFiles,
    (addresses, listener): (&BoundAddresses, SocketAddr),
    tasks: &TaskGroup,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut readers = Vec::new();
    for node in NODES {
        let began = Instant::now();
        let (app, reader) = edge(files, node, addresses.tunnel, tasks, stop).await?;
        outln!(
            "{node}          joined with a token in {} ms; its port {PORT} leads to the app at {app}",
            began.elapsed().as_millis()
        )?;
        readers.push(reader);
    }
    outln!("")?;
    for node in NODES {
        let began = Instant::now();
        let patience = tokio::time::timeout(PATIENCE, probe::get(files, listener, node));
        let (took, line) = patience
            .await
            .with_context(|| format!("{node} could not be reached within {PATIENCE:?}"))??;
        outln!(
            "GET https://{node}:{PORT}/  200 in {took:.1?} ({:.1?} after its edge had joined): {line}",
            began.elapsed()
        )?;
    }
    for (node, reader) in NODES.iter().zip(&readers) {
        let patience = tokio::time::timeout(PATIENCE, gateway::read_at(*reader));
        let count = patience
            .await
            .with_context(|| format!("{node} did not fill its API cache within {PATIENCE:?}"))??;
        outln!(
            "GET http://{reader}{SLICES}  200: {count} EndpointSlices in the API cache of {node}",
            SLICES = gateway::SLICES
        )?;
    }
    print_commands(files, listener)?;
    if let Some(reader) = readers.first() {
        print_reading(*reader)?;
    }
    outln!("\nready")
}

fn print_commands(files: &DemoFiles, listener: SocketAddr) -> anyhow::Result<()> {
    let curl = |node: &str, rest: &str| {
        let to = if listener.port() == PORT {
            format!("--resolve {node}:{PORT}:{}", listener.ip())
        } else {
            format!("--connect-to {node}:{PORT}:{listener}")
        };
        let (ca, client) = (quoted(&files.root), quoted(&files.client));
        outln!("curl -sS --cacert {ca} --cert {client} {to} {rest}")
    };
    outln!("\nTry it from another terminal:\n")?;
    for node in NODES {
        curl(node, &format!("https://{node}:{PORT}/"))?;
    }
    curl(
        "edge-1",
        &format!("-N 'https://edge-1:{PORT}/stream?ticks=3'"),
    )?;
    curl(
        "edge-2",
        &format!(
            "--data-binary @{} https://edge-2:{PORT}/upload",
            quoted(&files.root)
        ),
    )?;
    curl(
        "edge-2",
        &format!(
            "-o /dev/null -w '%{{size_download}} bytes at %{{speed_download}} B/s\\n' 'https://edge-2:{PORT}/download?bytes=100000000'"
        ),
    )?;
    let program = std::env::current_exe().ok();
    let program = program.as_deref().unwrap_or(Path::new("causeway"));
    outln!(
        "{} status --data-dir {}",
        quoted(program),
        quoted(&files.dir)
    )
}

fn print_reading(reader: SocketAddr) -> anyhow::Result<()> {
    let (node, slices, id) = (NODES[0], gateway::SLICES, std::process::id());
    outln!("\nRead cluster objects from the API cache of {node}, as programs on the node do:\n")?;
    outln!("curl -sS http://{reader}{slices}")?;
    outln!(
        "\nTry the same without the cloud: the first signal stops the gateway, the second one starts it again.\n"
    )?;
    outln!("kill -USR1 {id}")
}

/// A path as a shell reads it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |char: char| char.is_ascii_alphanumeric() || "/.-_+:,@%".contains(char);
    if text.chars().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Starts one edge and its app; returns the app's address, and where programs read, when the edge has joined.
async fn edge(
    files: &DemoFiles,
    node: &str,
    gateway: SocketAddr,
    tasks: &TaskGroup,
    stop: &CancellationToken,
) -> anyhow::Result<(SocketAddr, SocketAddr)> {
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = TcpListener::bind(loopback)
        .await
        .context("no free port on loopback")?;
    let app = listener.local_addr()?;
    tasks.spawn(
        info_span!("app", node),
        app::serve(listener, node.to_owned(), stop.clone()),
    );

    let name = NodeName::parse(node)?;
    let token =
        files
            .store
            .tokens()?
            .create(&name, Duration::from_mins(10), NodeAttributes::default())?;
    let mut config = causeway_edge::Config {
        data_dir: files.dir.join(node),
        gateways: vec![gateway.to_string()],
        join: Some(token.text()),
        ..Default::default()
    };
    config.admin.listen = loopback;
    config.timeouts.drain = DRAIN;
    config.api_cache = Some(causeway_edge::config::ApiCache {
        listen: loopback,
        ..Default::default()
    });
    let target = causeway_edge::config::Port {
        target: Some(app.to_string()),
        ..Default::default()
    };
    config.ports.insert(PORT, target);
    let edge = Edge::open(config, stop)
        .await
        .with_context(|| format!("{node} cannot start"))?;
    if edge.node() != node {
        bail!(
            "{} contains the identity of another node",
            files.dir.join(node).display()
        );
    }
    let bound = edge.bind().await?;
    let reader = bound.reader_addr();
    let reader = reader.context("an edge with a reader has an address for it")?;
    let stop = stop.clone();
    tasks.spawn(info_span!("edge", node), async move {
        if let Err(error) = bound.run(stop).await {
            tracing::error!(%error, "an edge of the demo stopped");
        }
    });
    Ok((app, reader))
}
