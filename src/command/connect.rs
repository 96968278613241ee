//! `causeway connect`: one session, with standard input and output as its two directions.

use anyhow::{Context, anyhow};
use causeway_config::host_port;

use super::nodes::open_client;
use crate::access::relay::relay_stdio;
use crate::cli::Connect;

/// Runs the command.
pub(crate) async fn run(args: Connect) -> anyhow::Result<()> {
    let target = &args.target;
    let (host, port) =
        host_port(target).map_err(|_| anyhow!("{target:?} is not HOST:PORT, such as edge-1:22"))?;
    let (_, client) = open_client(&args.profile)?;
    let session = client.connect(host, port).await?;
    relay_stdio(session)
        .await
        .with_context(|| format!("the session to {target} broke"))
}
