//! First request of the demo itself: HTTPS through the listener, verified, with the client's certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use causeway_certs::verify::provider;
use causeway_rt::http_client;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::files::{DemoFiles, PORT};

/// Sends GET `/` to a node once its edge is connected. Returns the duration of that request, and the first line of the
/// response.
pub(super) async fn probe_node(
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
