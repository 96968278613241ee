//! `causeway ca`: the CA of a data directory, and certificates for callers.
//!
//! Keys are written with mode 0600, whole or not at all, and never printed. An existing
//! CA is never replaced: every edge that trusts it would be lost.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use causeway_certs::{Access, Ca as Authority, Store};

use super::data;
use crate::cli::{Ca, CaCaller, CaInit};

/// Makes what was asked for.
pub(crate) fn run(ca: Ca) -> anyhow::Result<()> {
    match ca {
        Ca::Init(ask) => init(&ask),
        Ca::Caller(ask) => caller(&ask),
    }
}

fn init(ask: &CaInit) -> anyhow::Result<()> {
    let store = Store::open(&ask.data.data_dir, Access::Create)?;
    let known = store.ca()?;
    let (ca, news) = if let Some(ca) = known {
        (ca, "there is a CA already, and it stays")
    } else {
        let ca = Authority::create(&ask.trust_domain)?;
        store.save_ca(&ca)?;
        (ca, "made a CA")
    };
    println!("{news}: {}", store.root_path().display());
    println!(
        "trust domain {}, fingerprint {}",
        ca.trust_domain(),
        ca.fingerprint()
    );
    Ok(())
}

fn caller(ask: &CaCaller) -> anyhow::Result<()> {
    let (store, ca) = data::with_ca(&ask.data.data_dir)?;
    let leaf = ca.issue_caller(&ask.name, &ask.groups, ask.ttl)?;
    let chain = ask.out.join(format!("{}.pem", ask.name));
    let key = ask.out.join(format!("{}-key.pem", ask.name));
    write(&key, leaf.key_pem().expose())?;
    write(&chain, &leaf.chain_pem())?;
    println!("certificate {}", chain.display());
    println!("key         {}", key.display());
    println!(
        "use them as: curl --cacert {} --cert {} --key {} https://…",
        store.root_path().display(),
        chain.display(),
        key.display()
    );
    Ok(())
}

/// A new private file in place of the old: written beside it, brought to disk, renamed.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let attempt = || {
        let directory = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        anyhow::Ok(())
    };
    attempt().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::DataDir;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    #[test]
    fn a_second_init_keeps_the_ca_and_callers_get_private_keys() {
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

        let out = folder.path().to_owned();
        let groups = vec!["admins".into()];
        let ttl = Duration::from_hours(1);
        run(Ca::Caller(CaCaller {
            name: "curl".into(),
            groups,
            ttl,
            out,
            data: data(),
        }))
        .unwrap();
        let key = std::fs::metadata(folder.path().join("curl-key.pem")).unwrap();
        assert_eq!(key.permissions().mode() & 0o777, 0o600);
        let chain = std::fs::read_to_string(folder.path().join("curl.pem")).unwrap();
        assert!(chain.starts_with("-----BEGIN CERTIFICATE-----"));
    }
}
