//! `causeway health`: whether a running gateway or edge is well, as an exit code.
//!
//! For containers without a shell, where a probe has nothing else to run.

use anyhow::bail;

use super::admin;
use crate::cli::Health;

/// Asks `/healthz`.
pub(crate) async fn run(health: Health) -> anyhow::Result<()> {
    let (address, _) = admin::address(health.admin, &health.data.data_dir)?;
    let (status, body) = admin::get(&address, "/healthz").await?;
    let said = String::from_utf8_lossy(&body);
    if !status.is_success() {
        bail!("{address} is not well: {status} {}", said.trim());
    }
    println!("{}", said.trim());
    Ok(())
}
