//! `causeway health`: returns the health of a running gateway or edge as an exit code.
//!
//! It is for containers without a shell, where a probe has no other program to run. One image is gateway or edge. So without
//! an address the command sends its request to the process that runs on one of the default data directories.

use std::path::{Path, PathBuf};

use anyhow::bail;

use super::admin_client::{self, AdminAddress};
use crate::cli::operator::Health;
use crate::output::{errln, outln};

/// Default data directories of gateway and edge.
pub(super) const DEFAULT_DATA_DIRS: [&str; 2] = ["/var/lib/causeway", "/var/lib/causeway-edge"];

/// Requests `/healthz` or `/readyz`.
pub(crate) async fn run(health: Health) -> anyhow::Result<()> {
    let path = if health.ready { "/readyz" } else { "/healthz" };
    for address in addresses(health.admin, health.data_dir)? {
        let (status, body) = if health.same_container {
            admin_client::get_from_same_container(&address, path).await?
        } else {
            admin_client::get(&address, path).await?
        };
        let message = String::from_utf8_lossy(&body);
        let message = message.trim();
        if !status.is_success() {
            let expected_state = if health.ready { "ready" } else { "healthy" };
            bail!("{address} is not {expected_state}: {status} {message}");
        }
        outln!("{message}")?;
    }
    Ok(())
}

/// Returns the admin addresses to query: the given one, or those of the processes that run on the given or the default data
/// directories.
pub(super) fn addresses(
    admin: Option<String>,
    data_dir: Option<PathBuf>,
) -> anyhow::Result<Vec<AdminAddress>> {
    match (admin, data_dir) {
        (Some(address), _) => Ok(vec![address.into()]),
        (None, Some(directory)) => Ok(vec![admin_client::find_address(None, &directory)?.0]),
        (None, None) => find_running(&DEFAULT_DATA_DIRS.map(Path::new)),
    }
}

/// Returns the admin addresses of the processes that run on these data directories, at least one. A directory that this user
/// may not read is skipped with a warning if another one has a process.
pub(super) fn find_running(directories: &[&Path]) -> anyhow::Result<Vec<AdminAddress>> {
    let (mut found, mut denied) = (Vec::new(), None);
    for directory in directories {
        match admin_client::address_from_data_dir(directory) {
            Ok(address) => found.extend(address),
            Err(error) if admin_client::is_denied(&error) => denied = Some(error),
            Err(error) => return Err(error),
        }
    }
    match denied {
        Some(error) if found.is_empty() => return Err(error),
        Some(error) => errln!("warning: {error:#}"),
        None => {}
    }
    if found.is_empty() {
        let paths: Vec<_> = directories
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        bail!(
            "no gateway or edge is running here, or the edge has not joined yet: found no admin address in {}; \
             give its admin address with --admin HOST:PORT, or its data directory with --data-dir DIR",
            paths.join(" or ")
        );
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::{OpenMode, Store};

    #[test]
    fn the_process_in_any_data_directory_is_queried() {
        let folder = tempfile::tempdir().unwrap();
        let [gateway, edge] = ["gateway", "edge"].map(|name| folder.path().join(name));
        let places = [gateway.as_path(), edge.as_path()];
        let error = find_running(&places).unwrap_err().to_string();
        assert!(
            error.contains("has not joined yet") && error.contains("gateway or "),
            "{error}"
        );

        let store = Store::open(&edge, OpenMode::Create).unwrap();
        assert!(
            find_running(&places).is_err(),
            "it has not stored its address yet"
        );
        store
            .write_runtime(admin_client::ADMIN_ADDRESS_FILE, "127.0.0.1:1\n")
            .unwrap();
        assert_eq!(find_running(&places).unwrap()[0].to_string(), "127.0.0.1:1");

        Store::open(&gateway, OpenMode::Create).unwrap();
        std::fs::write(gateway.join("version"), "99").unwrap();
        assert!(
            find_running(&places).is_err(),
            "an unreadable file is not skipped"
        );
    }
}
