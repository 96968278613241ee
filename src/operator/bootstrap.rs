//! `causeway bootstrap`: creates all that a first gateway, its nodes and its clients need, in one run.
//!
//! It is for environments without a shell, such as a container that runs once before all others. A second run creates only
//! what is missing: it keeps the CA and all valid tokens, and creates no token for a node that has joined.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use causeway_certs::{Ca, JoinToken, NodeAttributes, NodeName, Store};

use super::{ca, client};
use crate::cli::operator::Bootstrap;
use crate::output::{outln, write_private_file};

/// Minimum remaining validity of a token that is kept, so that its node has time to start.
const MIN_VALIDITY: Duration = Duration::from_mins(1);

/// Creates what is missing, and prints what it created.
pub(crate) fn run(args: &Bootstrap) -> anyhow::Result<()> {
    let nodes: Vec<NodeName> = args
        .nodes
        .iter()
        .map(|node| NodeName::parse(node).with_context(|| format!("--node {node}")))
        .collect::<anyhow::Result<_>>()?;
    if args.clients.iter().any(|name| name == "ca") {
        bail!("--client ca: ca.pem is the file of the root certificate; choose another name");
    }
    let (store, authority) = ca::ensure_ca(&args.data.data_dir, &args.trust_domain)?;
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create the directory {}", args.out.display()))?;
    write_private_file(&args.out.join("ca.pem"), &authority.client_bundle_pem())?;
    for node in &nodes {
        let file = args.out.join(format!("{node}.token"));
        outln!(
            "{node}: {}",
            ensure_token(&store, node, &file, args.token_ttl)?
        )?;
    }
    for name in &args.clients {
        outln!(
            "{name}: {}",
            write_client_certificate(&authority, name, args)?
        )?;
    }
    Ok(())
}

/// Ensures that a node has a token, and returns a description of the outcome.
fn ensure_token(
    store: &Store,
    node: &NodeName,
    file: &Path,
    ttl: Duration,
) -> anyhow::Result<String> {
    let path = file.display();
    if store
        .nodes()
        .all()?
        .iter()
        .any(|existing| existing.node == *node)
    {
        return Ok(format!(
            "has already joined and needs no token (if its data is lost: causeway token create --node {node})"
        ));
    }
    if has_valid_token(store, node, file)? {
        return Ok(format!("the token in {path} is still valid"));
    }
    let token = store
        .tokens()?
        .create(node, ttl, NodeAttributes::default())?;
    write_private_file(file, &format!("{}\n", token.text().expose()))?;
    let ttl = humantime::format_duration(ttl);
    Ok(format!("token in {path}, valid for {ttl}, used once"))
}

/// Whether the file has an unused token of this data directory for the node.
fn has_valid_token(store: &Store, node: &NodeName, file: &Path) -> anyhow::Result<bool> {
    let Ok(text) = fs::read_to_string(file) else {
        return Ok(false);
    };
    let Ok(stored) = JoinToken::parse(text.trim()) else {
        return Ok(false);
    };
    let min_expiry = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)? + MIN_VALIDITY;
    let records = store.tokens()?.all()?;
    Ok(records.iter().any(|record| {
        record.id == stored.id
            && record.nodes.node().as_ref() == Some(node)
            && record.used.is_empty()
            && record.revoked.is_none()
            && record.expires > min_expiry.as_secs()
    }))
}

/// Makes a new certificate for a client. Earlier certificates stay valid.
fn write_client_certificate(
    authority: &Ca,
    name: &str,
    args: &Bootstrap,
) -> anyhow::Result<String> {
    let leaf = authority.issue_client(name, &[], args.client_ttl)?;
    let (chain, key) = client::write_certificate(&args.out, name, &leaf)?;
    Ok(format!(
        "certificate in {}, key in {}",
        chain.display(),
        key.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::operator::DataDir;
    use causeway_certs::{NodeRecord, NodeStatus};
    use rustls::pki_types::UnixTime;

    fn ask(folder: &Path) -> Bootstrap {
        Bootstrap {
            nodes: vec!["edge-1".into(), "edge-2".into()],
            clients: vec!["client".into()],
            out: folder.join("out"),
            token_ttl: Duration::from_hours(1),
            client_ttl: Duration::from_hours(1),
            trust_domain: "causeway.test".parse().unwrap(),
            data: DataDir {
                data_dir: folder.join("data"),
            },
        }
    }

    #[test]
    fn a_second_run_creates_only_missing_files() {
        let folder = tempfile::tempdir().unwrap();
        let ask = ask(folder.path());
        let read = |name: &str| fs::read_to_string(ask.out.join(name)).unwrap();
        run(&ask).unwrap();
        let first = [read("ca.pem"), read("edge-1.token"), read("edge-2.token")];
        assert!(read("client.pem").contains("BEGIN CERTIFICATE"));

        let store = Store::open(&ask.data.data_dir, causeway_certs::OpenMode::Existing).unwrap();
        let spent = JoinToken::parse(first[1].trim()).unwrap();
        let node = NodeName::parse("edge-1").unwrap();
        store
            .tokens()
            .unwrap()
            .redeem(&spent, (&node, NodeStatus::New), UnixTime::now())
            .unwrap();
        run(&ask).unwrap();
        assert_eq!(read("ca.pem"), first[0]);
        assert_ne!(read("edge-1.token"), first[1], "the token was used up");
        assert_eq!(read("edge-2.token"), first[2], "the token was not used");

        let joined = NodeRecord {
            node: NodeName::parse("edge-2").unwrap(),
            addresses: Vec::new(),
            pool: None,
            labels: std::collections::BTreeMap::new(),
            enrolled_at: 0,
            order: None,
            serial: "1".into(),
            root: None,
            not_after: None,
            revoked: None,
            follows_cluster: false,
            join_key: None,
            other: causeway_certs::OtherFields::new(),
        };
        store.nodes().put(joined).unwrap();
        fs::remove_file(ask.out.join("edge-2.token")).unwrap();
        run(&ask).unwrap();
        assert!(
            !ask.out.join("edge-2.token").exists(),
            "it has an identity already"
        );
    }

    #[test]
    fn an_invalid_node_name_creates_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut ask = ask(folder.path());
        ask.nodes.push("not a name".into());
        let error = format!("{:#}", run(&ask).unwrap_err());
        assert!(error.contains("--node not a name"), "{error}");
        assert!(!ask.data.data_dir.exists() && !ask.out.exists());
    }
}
