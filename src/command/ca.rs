//! `causeway ca`: the CA of a data directory.
//!
//! Keys are written with mode 0600, whole or not at all, and never printed. An existing
//! CA is never replaced: every edge that trusts it would be lost.

use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use causeway_certs::{
    Backup, Ca as Authority, HostName, ImportOutcome, OpenMode, RotationStep, SharedCa, Store,
    StoreError, TrustDomain,
};

use super::{ca_rotate, data_dir};
use crate::cli::{Ca, CaBackup, CaCsr, CaImport, CaInit};
use crate::output::{self, outln};

/// Makes what was asked for.
pub(crate) async fn run(ca: Ca) -> anyhow::Result<()> {
    match ca {
        Ca::Init(ask) => init(&ask),
        Ca::Rotate(order) => ca_rotate::run(order).await,
        Ca::Backup(ask) => backup(&ask),
        Ca::Restore(ask) => restore(&ask),
        Ca::Csr(ask) => csr(&ask),
        Ca::Import(ask) => import(&ask).await,
    }
}

/// Returns the CA of the directory, and its store; both are made if they are not there.
pub(super) fn ensure(
    data_dir: &Path,
    trust_domain: &TrustDomain,
) -> anyhow::Result<(Store, Authority)> {
    let store = Store::open(data_dir, OpenMode::Create)?;
    let (ca, news) = if let Some(ca) = store.ca()? {
        (ca, "there is a CA already, and it stays")
    } else {
        let ca = Authority::create(trust_domain)?;
        store.save_ca(&ca)?;
        (ca, "made a CA")
    };
    outln!("{news}: {}", store.root_path().display())?;
    Ok((store, ca))
}

fn init(ask: &CaInit) -> anyhow::Result<()> {
    let (_, ca) = ensure(&ask.data.data_dir, &ask.trust_domain)?;
    outln!(
        "trust domain {}, fingerprint {}",
        ca.trust_domain(),
        ca.fingerprint()
    )?;
    Ok(())
}

/// Prints the pending request, which is made if there is none.
fn csr(ask: &CaCsr) -> anyhow::Result<()> {
    let (store, _) = data_dir::with_ca(&ask.data.data_dir)?;
    let (ca, _) = store.change_ca(|ca| anyhow::Ok(ca.request_listener_ca()?))?;
    let request = ca.listener_request_pem()?.unwrap_or_default();
    output::write(format_args!("{request}"))?;
    Ok(())
}

fn backup(ask: &CaBackup) -> anyhow::Result<()> {
    let (store, ca) = data_dir::with_ca(&ask.data.data_dir)?;
    store.backup()?.save(&ask.file)?;
    outln!(
        "CA {} with tickets, tokens and nodes: {}; keep it as you keep the CA itself",
        ca.fingerprint(),
        ask.file.display()
    )?;
    Ok(())
}

fn restore(ask: &CaBackup) -> anyhow::Result<()> {
    let backup = Backup::read(&ask.file)?;
    let directory = &ask.data.data_dir;
    let store = Store::open(directory, OpenMode::Create)?;
    store.restore(&backup).map_err(|error| match error {
        StoreError::Exists { .. } => anyhow!(
            "there is another CA in {}, and it is not overwritten; restore into an empty directory",
            directory.display()
        ),
        StoreError::InUse { .. } => anyhow!("{error} (stop the gateway that runs there first)"),
        error => error.into(),
    })?;
    let made = UNIX_EPOCH + Duration::from_secs(backup.made_at());
    outln!(
        "{} is what it was at {}: nodes that were revoked or removed since are welcome again, and tokens that were used since are good again",
        directory.display(),
        humantime::format_rfc3339_seconds(made)
    )?;
    Ok(())
}

async fn import(ask: &CaImport) -> anyhow::Result<()> {
    if ask.from.is_dir() {
        import_shared(ask)?;
    } else {
        import_chain(ask)?;
    }
    ca_rotate::notify_gateway(&ask.data.data_dir).await?;
    Ok(())
}

/// Installs the chain of listeners, if it permits all nodes that have joined.
fn import_chain(ask: &CaImport) -> anyhow::Result<()> {
    let file = ask.from.display();
    let bytes = fs::read(&ask.from).with_context(|| format!("cannot read {file}"))?;
    let chain = String::from_utf8_lossy(&bytes);
    let (store, _) = data_dir::with_ca(&ask.data.data_dir)?;
    let nodes = store.nodes().all()?;
    let names: Vec<_> = nodes.iter().map(|it| HostName::from(&it.node)).collect();
    let (ca, step) = store.change_ca(|ca| {
        let imported = ca.import_listener_chain(&chain, &names);
        imported.with_context(|| format!("{file} is not imported"))
    })?;
    let info = ca.listener_ca().context("the chain is gone again")?;
    let ends = UNIX_EPOCH + Duration::from_secs(info.not_after.as_secs());
    outln!(
        "{}, until {}: clients verify listeners by {}; {} has its root too",
        if step == RotationStep::Made {
            "imported"
        } else {
            "imported before"
        },
        humantime::format_rfc3339_seconds(ends),
        info.root,
        store.root_path().display()
    )?;
    if info.limits_names {
        outln!(
            "it has name constraints: clients verify no listener by a name that these do not permit"
        )?;
    }
    Ok(())
}

fn import_shared(ask: &CaImport) -> anyhow::Result<()> {
    let shared = SharedCa::read(&ask.from)?;
    let directory = &ask.data.data_dir;
    let store = Store::open(directory, OpenMode::Create)?;
    let taken = store.take_up(&shared).map_err(|error| match error {
        StoreError::Exists { .. } => anyhow!(
            "there is another CA in {}, and its edges would be lost; take up the one that it has (causeway k8s ca-secret --data-dir {} makes the Secret), or empty the directory",
            directory.display(),
            directory.display()
        ),
        error => error.into(),
    })?;
    outln!("{}", news(taken, shared.ca(), directory))?;
    Ok(())
}

/// Describes the outcome of importing the shared CA.
fn news(taken: ImportOutcome, shared: &Authority, directory: &Path) -> String {
    let ca = shared.fingerprint();
    match taken {
        ImportOutcome::Now => format!("CA {ca} taken up"),
        ImportOutcome::Before => format!("CA {ca} is there already"),
        ImportOutcome::Behind => format!(
            "CA {ca} is not taken up: {directory} is ahead of it by a step of `causeway ca rotate`, a request or an imported chain, and stays as it is; let the Secret follow: `causeway k8s ca-secret --data-dir {directory} | kubectl replace -f -`",
            directory = directory.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::DataDir;

    #[tokio::test]
    async fn a_leftover_secret_is_not_used_and_the_remedy_is_stated() {
        let folder = tempfile::tempdir().unwrap();
        let data_dir = folder.path().join("data");
        let domain = TrustDomain::parse("causeway.test").unwrap();
        let (store, _) = ensure(&data_dir, &domain).unwrap();
        for (name, text) in store.shared().unwrap().files().unwrap() {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        store.change_ca(|ca| anyhow::Ok(ca.prepare()?)).unwrap();
        let ahead = std::fs::read(data_dir.join("ca.json")).unwrap();
        let ask = CaImport {
            from: folder.path().to_owned(),
            data: DataDir {
                data_dir: data_dir.clone(),
            },
        };
        import(&ask).await.unwrap();
        assert_eq!(std::fs::read(data_dir.join("ca.json")).unwrap(), ahead);
        let shared = SharedCa::read(folder.path()).unwrap();
        let said = news(
            store.take_up(&shared).unwrap(),
            shared.ca(),
            Path::new("/data"),
        );
        let command = "`causeway k8s ca-secret --data-dir /data | kubectl replace -f -`";
        assert!(
            said.contains("is ahead") && said.contains(command),
            "{said}"
        );
    }

    #[test]
    fn a_second_init_keeps_the_ca() {
        let folder = tempfile::tempdir().unwrap();
        let data = || DataDir {
            data_dir: folder.path().join("data"),
        };
        let ask = || CaInit {
            trust_domain: "causeway.test".parse().unwrap(),
            data: data(),
        };
        init(&ask()).unwrap();
        let root = std::fs::read(folder.path().join("data/ca.pem")).unwrap();
        init(&ask()).unwrap();
        assert_eq!(
            std::fs::read(folder.path().join("data/ca.pem")).unwrap(),
            root
        );
    }
}
