//! Load of a client, the same over every route: through a CONNECT, as kube-apiserver reaches a kubelet through
//! Konnectivity; directly to a listener; or directly to an upstream.
//!
//! Closed loops: each client has one request, or one transfer, in flight. Loads that a ready-made generator could make over
//! plain HTTPS are here as well, so that the same client measures both routes.

mod requests;
mod transfers;

use crate::{
    cli, files,
    route::{Route, Tls},
    stop::Stop,
};
use anyhow::Context;
use causeway_config::{ListenAddr, host_port};
use rustls_pki_types::ServerName;
use std::sync::Arc;

/// The token that upgrades ask for.
const TOKEN: &str = "bench";

/// Runs the load until its time, or its bytes, are over.
pub(crate) async fn run(asked: cli::Connect, stop: Stop) -> anyhow::Result<()> {
    anyhow::ensure!(asked.clients > 0, "--clients 0 would be no load");
    files::enough(asked.clients)?;
    let route = Arc::new(route(&asked)?);
    let work = async {
        match (asked.download, asked.upload) {
            (None, None) => requests::run(&asked, route).await,
            (Some(bytes), _) => transfers::run(&asked, route, transfers::Kind::Down(bytes)).await,
            (None, Some(bytes)) => transfers::run(&asked, route, transfers::Kind::Up(bytes)).await,
        }
    };
    stop.token
        .run_until_cancelled(work)
        .await
        .unwrap_or_else(|| anyhow::bail!("stopped before it was done"))
}

fn route(asked: &cli::Connect) -> anyhow::Result<Route> {
    let (host, _) = host_port(&asked.target).map_err(|why| anyhow::anyhow!("--target: {why}"))?;
    let place = asked.proxy.as_ref().or(asked.listener.as_ref());
    let place = place.context("--proxy or --listener is required")?.clone();
    let through = asked.proxy.is_some();
    let name = match (&asked.server_name, &place) {
        (Some(name), _) => name.clone(),
        (None, ListenAddr::Tcp(address)) if through => address.ip().into(),
        _ => ServerName::try_from(host.to_owned())?,
    };
    let tls = if asked.tls {
        // kube-apiserver offers no protocol when it sends a CONNECT.
        let alpn: &[&[u8]] = if through { &[] } else { &[b"http/1.1"] };
        let tls = Tls::new(name, asked.ca.as_deref(), &asked.caller, alpn)?;
        Some(if asked.resume { tls } else { tls.forgetful() })
    } else {
        None
    };
    Ok(Route {
        place,
        tls,
        connect: through.then(|| asked.target.clone()),
    })
}

/// Returns the bytes of a request for a protocol upgrade.
pub(super) fn upgrade(path: &str, host: &str) -> Vec<u8> {
    format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: {TOKEN}\r\n\r\n"
    )
    .into_bytes()
}
