//! `causeway reload`: has a running gateway or edge reload its configuration, as SIGHUP and a changed file do.
//!
//! Prints the result, or all faults of the configuration. In the second case the previous configuration stays in force (exit
//! code 2).

use anyhow::bail;
use hyper::{Method, StatusCode};

use super::{admin_client, health};
use crate::cli::operator::Reload;
use crate::operator::config_loader::RejectedConfig;
use crate::output::outln;

/// Requests the reload, and waits for the outcome.
pub(crate) async fn run(reload: Reload) -> anyhow::Result<()> {
    for address in health::addresses(reload.admin, reload.data_dir)? {
        let (status, body) =
            admin_client::request(Method::POST, &address, "/api/v1/reload").await?;
        let message = String::from_utf8_lossy(&body);
        let message = message.trim();
        match status {
            StatusCode::OK => outln!("{message}")?,
            StatusCode::UNPROCESSABLE_ENTITY => {
                return Err(RejectedConfig::from(vec![message.to_owned()]).into());
            }
            _ => bail!("{address} did not reload its configuration: {status} {message}"),
        }
    }
    Ok(())
}
