//! `causeway demo`: CA, gateway, two edges and their apps in one process.
//!
//! Everything except the distance is real: the edges join with tokens, dial the gateway over loopback, and each serve one app
//! as port 9100 of their node. The demo makes one HTTPS request to each node through its tunnel before it prints `ready`, and
//! prints commands that do the same. The cluster objects for programs on the nodes come from manifests. SIGUSR1 stops the
//! gateway, so that a user can see that these programs can still read.

mod app;
mod gateway;

use super::admin_client;
use crate::{cli::operator as cli, output::outln, signal::Signals};
use anyhow::{Context, bail};
use causeway_certs::{NodeAttributes, NodeName, verify::provider};
use causeway_edge::Edge;
use causeway_gateway::server::BoundAddresses;
use causeway_rt::{http_client, task::TaskGroup};
use gateway::DemoGateway;
use gateway::{DRAIN_TIMEOUT, DemoFiles, PORT, START_TIMEOUT};
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode, body::Bytes};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// The nodes of the demo.
const NODES: [&str; 2] = ["edge-1", "edge-2"];
/// Runs the demo until Ctrl-C.
pub(crate) async fn run(args: cli::Demo) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let live = Box::pin(run_demo(args, stop));
    signals.run(live).await.unwrap_or(Ok(()))
}

async fn run_demo(args: cli::Demo, stop: CancellationToken) -> anyhow::Result<()> {
    let temporary = tempfile::Builder::new()
        .prefix("causeway-demo-")
        .tempdir()?;
    // The printed commands are run from other directories.
    let dir = match &args.data_dir {
        Some(dir) => std::path::absolute(dir)?,
        None => temporary.path().to_owned(),
    };
    let files = DemoFiles::create(&dir)?;
    let demo_gateway = DemoGateway::bind(&dir, args.listen)?;
    let (addresses, listener) = (demo_gateway.addresses.clone(), demo_gateway.listener);
    files.store.write_runtime(
        admin_client::ADMIN_ADDRESS_FILE,
        &addresses.admin.to_string(),
    )?;
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
    let (gateway_stop, demo_stop) = (CancellationToken::new(), stop.clone());
    let gateway_task = demo_gateway.run(gateway_stop.clone());
    let demo_task = async {
        let ready = start_edges(&files, (&addresses, listener), &tasks, &gateway_stop).await;
        if ready.is_ok() {
            demo_stop.cancelled().await;
        }
        gateway_stop.cancel();
        ready.and_then(|()| outln!("\nstopping"))
    };
    let (outcome, served) = tokio::join!(demo_task, gateway_task);
    tasks.drain(DRAIN_TIMEOUT).await;
    admin_client::remove_address(&files.store)?;
    outcome.and(served)
}

/// Starts the edges and checks that they are reachable.
async fn start_edges(
    files: &DemoFiles,
    (addresses, listener): (&BoundAddresses, SocketAddr),
    tasks: &TaskGroup,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut cache_addresses = Vec::new();
    for node in NODES {
        let started = Instant::now();
        let (app, cache_address) = start_edge(files, node, addresses.tunnel, tasks, stop).await?;
        outln!(
            "{node}          joined with a token in {} ms; its port {PORT} leads to the app at {app}",
            started.elapsed().as_millis()
        )?;
        cache_addresses.push(cache_address);
    }
    outln!("")?;
    for node in NODES {
        let started = Instant::now();
        let attempt = tokio::time::timeout(START_TIMEOUT, probe_node(files, listener, node));
        let (elapsed, line) = attempt
            .await
            .with_context(|| format!("{node} could not be reached within {START_TIMEOUT:?}"))??;
        outln!(
            "GET https://{node}:{PORT}/  200 in {elapsed:.1?} ({:.1?} after its edge had joined): {line}",
            started.elapsed()
        )?;
    }
    for (node, cache_address) in NODES.iter().zip(&cache_addresses) {
        let attempt = tokio::time::timeout(START_TIMEOUT, gateway::count_slices(*cache_address));
        let count = attempt.await.with_context(|| {
            format!("{node} did not fill its API cache within {START_TIMEOUT:?}")
        })??;
        outln!(
            "GET http://{cache_address}{SLICES}  200: {count} EndpointSlices in the API cache of {node}",
            SLICES = gateway::SLICES_PATH
        )?;
    }
    print_commands(files, listener)?;
    if let Some(cache_address) = cache_addresses.first() {
        print_cache_commands(*cache_address)?;
    }
    outln!("\nready")
}

fn print_commands(files: &DemoFiles, listener: SocketAddr) -> anyhow::Result<()> {
    let curl = |node: &str, arguments: &str| {
        let resolve_option = if listener.port() == PORT {
            format!("--resolve {node}:{PORT}:{}", listener.ip())
        } else {
            format!("--connect-to {node}:{PORT}:{listener}")
        };
        let (ca, client) = (shell_quote(&files.root), shell_quote(&files.client));
        outln!("curl -sS --cacert {ca} --cert {client} {resolve_option} {arguments}")
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
            shell_quote(&files.root)
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
        shell_quote(program),
        shell_quote(&files.dir)
    )
}

fn print_cache_commands(cache_address: SocketAddr) -> anyhow::Result<()> {
    let (node, slices, id) = (NODES[0], gateway::SLICES_PATH, std::process::id());
    outln!("\nRead cluster objects from the API cache of {node}, as programs on the node do:\n")?;
    outln!("curl -sS http://{cache_address}{slices}")?;
    outln!(
        "\nTry the same without the cloud: the first signal stops the gateway, the second one starts it again.\n"
    )?;
    outln!("kill -USR1 {id}")
}

/// Quotes a path for a shell.
fn shell_quote(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/.-_+:,@%".contains(char);
    if text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Starts one edge and its app. Returns the app's address and the address of the API cache once the edge has joined.
async fn start_edge(
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
    config.timeouts.drain = DRAIN_TIMEOUT;
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
    let cache_address = bound.api_cache_addr();
    let cache_address = cache_address.context("an edge with a reader has an address for it")?;
    let stop = stop.clone();
    tasks.spawn(info_span!("edge", node), async move {
        if let Err(error) = bound.run(stop).await {
            tracing::error!(%error, "an edge of the demo stopped");
        }
    });
    Ok((app, cache_address))
}

/// Sends GET `/` to a node once its edge is connected. Returns the duration of that request, and the first line of the
/// response.
async fn probe_node(
    files: &DemoFiles,
    listener: SocketAddr,
    node: &str,
) -> anyhow::Result<(Duration, String)> {
    let tls = TlsConnector::from(Arc::new(client_config(files)?));
    loop {
        let started = Instant::now();
        let (status, body) = send_request(&tls, listener, node).await?;
        match status {
            StatusCode::OK => {
                let line = body.lines().next().unwrap_or_default().to_owned();
                return Ok((started.elapsed(), line));
            }
            // The edge has joined, but its tunnel is not open yet.
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::NOT_FOUND => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => bail!("{node} answered {other}: {body}"),
        }
    }
}

fn client_config(files: &DemoFiles) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&files.root)?)?;
    let chain = CertificateDer::pem_file_iter(&files.client)?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(&files.client)?;
    Ok(ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?)
}

async fn send_request(
    tls: &TlsConnector,
    listener: SocketAddr,
    node: &str,
) -> anyhow::Result<(StatusCode, String)> {
    let tcp = TcpStream::connect(listener)
        .await
        .context("the listener does not respond")?;
    let io = tls
        .connect(ServerName::try_from(node.to_owned())?, tcp)
        .await?;
    let request = Request::get("/")
        .header("host", format!("{node}:{PORT}"))
        .body(Full::<Bytes>::default())?;
    let (response, _connection) = http_client::send(io, request).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}
