//! `causeway token create`: a token by which one node joins, once.
//!
//! The token alone goes to standard output, so that scripts can take it; what to do with
//! it goes to standard error.

use causeway_certs::{Confirmed, NodeName};

use super::data;
use crate::cli::{Token, TokenCreate};

/// Makes what was asked for.
pub(crate) fn run(token: Token) -> anyhow::Result<()> {
    let Token::Create(ask) = token;
    let ttl = humantime::format_duration(ask.ttl);
    let token = create(&ask)?;
    eprintln!(
        "for node {}, good for {ttl}, once; on that node run:",
        ask.node
    );
    eprintln!("  causeway edge --join TOKEN --gateway HOST:10262 --ports '{{9100: {{}}}}'");
    eprintln!("with the gateway's address, and the node's ports that callers may reach");
    println!("{token}");
    Ok(())
}

fn create(ask: &TokenCreate) -> anyhow::Result<String> {
    let node = NodeName::parse(&ask.node)?;
    let (store, _) = data::with_ca(&ask.data.data_dir)?;
    let confirmed = Confirmed {
        addresses: ask.addresses.clone(),
        pool: ask.pool.clone(),
        labels: ask.labels.iter().cloned().collect(),
    };
    let mut nodes = store.nodes().all()?.into_iter();
    if let Some(known) = nodes.find(|known| known.node == node)
        && (&known.pool, &known.labels) != (&confirmed.pool, &confirmed.labels)
    {
        let labels = known
            .labels
            .iter()
            .map(|(key, value)| format!(" {key}={value}"));
        eprintln!(
            "note: {node} has joined before, with pool {} and labels{}; joining with this token, it has what this one says",
            known.pool.as_deref().unwrap_or("(none)"),
            labels
                .reduce(|all, one| all + &one)
                .unwrap_or_else(|| " (none)".into())
        );
    }
    let token = store.tokens()?.create(&node, ask.ttl, confirmed)?;
    Ok(token.text().expose().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::DataDir;
    use causeway_certs::{Access, Ca, JoinToken, Store};
    use std::path::Path;
    use std::time::Duration;

    fn ask(directory: &Path, node: &str) -> TokenCreate {
        TokenCreate {
            node: node.into(),
            ttl: Duration::from_hours(1),
            addresses: vec!["10.0.0.7".parse().unwrap()],
            pool: Some("north".into()),
            labels: vec![("tier".into(), "gold".into())],
            data: DataDir {
                data_dir: directory.to_owned(),
            },
        }
    }

    #[test]
    fn a_token_is_noted_with_what_it_confirms() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), Access::Create).unwrap();
        store
            .save_ca(&Ca::create(&"causeway.test".parse().unwrap()).unwrap())
            .unwrap();
        let token = JoinToken::parse(&create(&ask(folder.path(), "edge-1")).unwrap()).unwrap();
        let noted = store.tokens().unwrap().all().unwrap();
        assert_eq!((noted.len(), &noted[0].id), (1, &token.id));
        assert_eq!(noted[0].pool.as_deref(), Some("north"));
        assert_eq!(noted[0].labels["tier"], "gold");
        assert!(create(&ask(folder.path(), "edge_1")).is_err());
    }

    #[test]
    fn without_a_ca_the_remedy_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("none");
        let error = format!("{:#}", create(&ask(&missing, "edge-1")).unwrap_err());
        assert!(error.contains("causeway ca init --data-dir"), "{error}");
        assert!(!missing.exists());
    }
}
