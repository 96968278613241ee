//! Files and constants that the parts of the demo share.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use causeway_certs::{Ca, OpenMode, Store, TrustDomain};

/// The node port at which each app is reachable.
pub(super) const PORT: u16 = 9100;
/// Name of the client in the printed commands.
pub(super) const CLIENT_NAME: &str = "demo";
/// Maximum time for the start. Edges and their first requests take milliseconds, but more on a loaded machine.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time for the drain. It is short, so that Ctrl-C seems immediate.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// Files in the data directory that the demo and its user need.
pub(super) struct DemoFiles {
    pub(super) dir: PathBuf,
    pub(super) store: Store,
    pub(super) root: PathBuf,
    /// Certificate and key of the client in one file, as curl's `--cert` takes them.
    pub(super) client: PathBuf,
}

impl DemoFiles {
    pub(super) fn create(dir: &Path) -> anyhow::Result<Self> {
        let store = Store::open(dir, OpenMode::Create)?;
        let ca = if let Some(ca) = store.ca()? {
            ca
        } else {
            let ca = Ca::create(&TrustDomain::parse("demo.causeway")?)?;
            store.save_ca(&ca)?;
            ca
        };
        let leaf = ca.issue_client(CLIENT_NAME, &[], Duration::from_hours(24))?;
        let (root, client) = (dir.join("demo-ca.pem"), dir.join("demo-client.pem"));
        write(&root, &ca.root_pem())?;
        write(
            &client,
            &format!("{}{}", leaf.chain_pem(), leaf.key_pem().expose()),
        )?;
        Ok(Self {
            dir: dir.to_owned(),
            store,
            root,
            client,
        })
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options
        .open(path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))
}
