//! `causeway token`: tokens by which nodes join, one node once or a limited number of new nodes of a pattern.
//!
//! A new token is the only output on standard output, so that scripts can read it. The instructions go to standard error. A
//! token is never printed again, because the gateway only stores a hash.

use anyhow::{Context, bail, ensure};
use causeway_certs::{NodeAttributes, NodePattern, NodeRecord, TokenRecord, TokenStore};
use comfy_table::{Table, presets};
use rustls::pki_types::UnixTime;
use serde_json::json;

use super::data_dir;
use crate::cli::operator::{ListFormat, Token, TokenCreate, TokenList, TokenRevoke};
use crate::output::{errln, outln};

/// Runs the command.
pub(crate) async fn run(token: Token) -> anyhow::Result<()> {
    match token {
        Token::Create(args) => {
            let token = create(&args)?;
            // Other gateways must know the token before an edge presents it there.
            data_dir::share(&args.data.data_dir, "the token is created").await;
            print_usage(&args);
            outln!("{token}")?;
            Ok(())
        }
        Token::List(args) => list(&args),
        Token::Revoke(args) => {
            let revoked = revoke(&args);
            data_dir::share(&args.data.data_dir, "the tokens are revoked").await;
            revoked
        }
    }
}

fn print_usage(args: &TokenCreate) {
    let ttl = humantime::format_duration(args.ttl);
    let (times, on_node, node_flag) = match (args.node.contains('*'), args.uses) {
        (false, _) => ("once".to_owned(), "this node", ""),
        (true, 1) => ("for one such node".to_owned(), "the node", " --node NAME"),
        (true, uses) => (
            format!("for {uses} such nodes"),
            "each node",
            " --node NAME",
        ),
    };
    errln!(
        "for node {}, valid for {ttl}, {times}; on {on_node} run:",
        args.node
    );
    errln!("  causeway edge --join TOKEN{node_flag} --gateway HOST:10262 --ports '{{9100: {{}}}}'");
    errln!("with the address of the gateway, and the ports of the node that clients may reach");
}

fn create(args: &TokenCreate) -> anyhow::Result<String> {
    let nodes = NodePattern::parse(&args.node)?;
    let node = nodes.node();
    ensure!(
        node.is_none() || args.uses == 1,
        "--uses {}: a token for one node is used once; name several nodes with a pattern, as in --node 'site-7-*'",
        args.uses
    );
    ensure!(
        node.is_some() || args.confirmed.addresses.is_empty(),
        "--address: only one node can have an address; create a token for that one node by its name"
    );
    let (store, _) = data_dir::open_with_ca(&args.data.data_dir)?;
    let confirmed = args.confirmed.to_attributes();
    let existing = store.nodes().all()?;
    if let Some(existing) = existing
        .iter()
        .find(|known| Some(&known.node) == node.as_ref())
    {
        let consequence = "joining with this token replaces them";
        warn_of_change(existing, &confirmed, consequence);
    }
    let token = store
        .tokens()?
        .create_for((&nodes, args.uses), args.ttl, confirmed)?;
    Ok(token.text().expose().to_owned())
}

/// Warns that joining again replaces the confirmed attributes of a known node.
pub(super) fn warn_of_change(existing: &NodeRecord, confirmed: &NodeAttributes, consequence: &str) {
    if (&existing.pool, &existing.labels) == (&confirmed.pool, &confirmed.labels) {
        return;
    }
    let labels = existing
        .labels
        .iter()
        .map(|(key, value)| format!(" {key}={value}"));
    errln!(
        "note: {} already exists with pool {} and labels{}; {consequence}",
        existing.node,
        existing.pool.as_deref().unwrap_or("(none)"),
        labels
            .reduce(|all, one| all + &one)
            .unwrap_or_else(|| " (none)".into())
    );
}

fn list(args: &TokenList) -> anyhow::Result<()> {
    let (store, _) = data_dir::open_with_ca(&args.data.data_dir)?;
    let tokens = store.tokens()?;
    let records = tokens.all()?;
    let context = (&tokens, UnixTime::now().as_secs());
    match args.output {
        ListFormat::Table => outln!("{}", table(&records, context))?,
        ListFormat::Json => {
            let all: Vec<_> = records
                .iter()
                .map(|record| json_row(record, context))
                .collect();
            outln!("{}", serde_json::to_string_pretty(&all)?)?;
        }
    }
    let with_retired_root = records
        .iter()
        .filter(|one| state(one, context) == ROOT_RETIRED);
    let with_retired_root = with_retired_root.count();
    if with_retired_root > 0 {
        errln!(
            "note: {with_retired_root} of these tokens contain a CA root that is no longer trusted, so no edge can join with them; create new \
             ones: causeway token create --node NODE"
        );
    }
    Ok(())
}

/// State of a token that carries a root which is not trusted, or not any more.
const ROOT_RETIRED: &str = "root_retired";

/// Returns the current state of a token.
fn state(record: &TokenRecord, (tokens, now): (&TokenStore, u64)) -> &'static str {
    if record.revoked.is_some() {
        "revoked"
    } else if record.used.len() >= record.uses as usize {
        "used"
    } else if now >= record.expires {
        "expired"
    } else if !tokens.trusts(record) {
        ROOT_RETIRED
    } else {
        "good"
    }
}

/// Returns all fields except the hash.
fn json_row(record: &TokenRecord, context: (&TokenStore, u64)) -> serde_json::Value {
    let used = record
        .used
        .iter()
        .map(|one| json!({ "node": one.node, "at": format_date(one.at) }));
    json!({
        "id": record.id,
        "nodes": record.nodes,
        "state": state(record, context),
        "uses": record.uses,
        "used": used.collect::<Vec<_>>(),
        "addresses": record.addresses,
        "pool": record.pool,
        "labels": record.labels,
        "created": format_date(record.created),
        "expires": format_date(record.expires),
        "revoked": record.revoked.map(format_date),
    })
}

fn table(records: &[TokenRecord], context: (&TokenStore, u64)) -> String {
    if records.is_empty() {
        return "no tokens; create one with: causeway token create --node NODE".into();
    }
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(["ID", "NODES", "STATE", "USED", "EXPIRES", "POOL", "LABELS"]);
    for record in records {
        let labels: Vec<_> = record
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        table.add_row([
            record.id.clone(),
            record.nodes.to_string(),
            state(record, context).to_owned(),
            format!("{}/{}", record.used.len(), record.uses),
            format_date(record.expires),
            record.pool.clone().unwrap_or_else(|| "-".into()),
            if labels.is_empty() {
                "-".into()
            } else {
                labels.join(",")
            },
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    // No trailing or leading blanks, so that lines can be pasted and compared.
    table.trim_fmt()
}

pub(super) fn format_date(seconds: u64) -> String {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}

fn revoke(args: &TokenRevoke) -> anyhow::Result<()> {
    let (store, _) = data_dir::open_with_ca(&args.data.data_dir)?;
    let tokens = store.tokens()?;
    let mut not_found = Vec::new();
    for id in &args.ids {
        let found = tokens
            .revoke(id, UnixTime::now())
            .with_context(|| format!("token {id} is not revoked"))?;
        if found {
            outln!("revoked {id}")?;
        } else {
            not_found.push(id.as_str());
        }
    }
    if !not_found.is_empty() {
        bail!(
            "there is no token {}; `causeway token list` shows the tokens",
            not_found.join(", ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::operator::{DataDir, token::NodeAttributeArgs};
    use causeway_certs::{Ca, JoinToken, OpenMode, Store};
    use std::path::Path;
    use std::time::Duration;

    fn ask(directory: &Path, node: &str) -> TokenCreate {
        TokenCreate {
            node: node.into(),
            uses: 1,
            ttl: Duration::from_hours(1),
            confirmed: NodeAttributeArgs {
                addresses: vec!["10.0.0.7".parse().unwrap()],
                pool: Some("north".into()),
                labels: vec![("tier".into(), "gold".into())],
            },
            data: DataDir {
                data_dir: directory.to_owned(),
            },
        }
    }

    #[test]
    fn a_token_is_recorded_with_its_confirmed_facts() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
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
    fn a_token_for_many_wants_a_pattern_and_has_no_address() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        store
            .save_ca(&Ca::create(&"causeway.test".parse().unwrap()).unwrap())
            .unwrap();
        let refused = |ask: TokenCreate| format!("{:#}", create(&ask).unwrap_err());
        let twice = TokenCreate {
            uses: 2,
            ..ask(folder.path(), "edge-1")
        };
        assert!(refused(twice).contains("with a pattern"));
        assert!(refused(ask(folder.path(), "edge-*")).contains("--address"));
        let mut many = ask(folder.path(), "edge-*");
        (many.uses, many.confirmed.addresses) = (3, Vec::new());
        create(&many).unwrap();
        let tokens = store.tokens().unwrap();
        let records = tokens.all().unwrap();
        let shown = table(&records, (&tokens, records[0].created));
        let line = shown.lines().nth(1).unwrap();
        for part in ["edge-*", "good", "0/3", "north", "tier=gold"] {
            assert!(line.contains(part), "{part}: {shown}");
        }
        assert!(table(&records, (&tokens, records[0].expires)).contains("expired"));
        let hash = serde_json::to_string(&records[0].hash).unwrap();
        assert!(
            !json_row(&records[0], (&tokens, 0))
                .to_string()
                .contains(hash.trim_matches('"'))
        );
    }

    #[test]
    fn a_token_of_a_retired_root_is_not_listed_as_good() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        store
            .save_ca(&Ca::create(&"causeway.test".parse().unwrap()).unwrap())
            .unwrap();
        create(&ask(folder.path(), "edge-1")).unwrap();
        let listed = || {
            let tokens = store.tokens().unwrap();
            let records = tokens.all().unwrap();
            state(&records[0], (&tokens, records[0].created))
        };
        let step = |step: fn(
            Ca,
        ) -> Result<
            (Ca, causeway_certs::RotationStep),
            causeway_certs::CaError,
        >| {
            store.change_ca(|ca| anyhow::Ok(step(ca)?)).unwrap();
            listed()
        };
        assert_eq!(step(Ca::prepare), "good");
        assert_eq!(step(Ca::activate), "good");
        assert_eq!(step(Ca::retire), ROOT_RETIRED);
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
