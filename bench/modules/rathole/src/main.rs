//! rathole's command line over rathole's library: `rathole --server FILE` or `rathole --client FILE`.

use clap::Parser;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::from("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .init();
    // Kept until the end: rathole stops when it is dropped.
    let (_stop, stopped) = tokio::sync::broadcast::channel(1);
    rathole::run(rathole::Cli::parse(), stopped).await
}
