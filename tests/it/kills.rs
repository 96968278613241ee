//! Commands that are killed at every write of a data directory: they start again with the old state or the new one, and
//! leave no files.
//!
//! Real processes, which strace kills at one system call after the other. With `CAUSEWAY_TEST_FULL=1` no call is left out.

use crate::world::{
    app::App,
    process::{Causeway, GatewayProcess, causeway, causeway_killed_at, causeway_killed_over},
    tool::{full, need},
    until,
};
use causeway_certs::{NodeName, NodeRecord, OpenMode, Pin, Store};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// All system calls that write to a disk or move a file into place. strace counts each separately; a slash begins a
/// pattern.
const CALLS: &[&str] = &[
    "write", "fsync", "/^rename", "/^link", "/^unlink", "/^mkdir", "/chmod",
];
/// System calls that open files, many of them outside the data directory.
const OPENS: &str = "openat";
/// More than any command makes.
const MOST: usize = 200;

/// A command, and its directory.
struct Order {
    line: &'static str,
    before: &'static [&'static str],
    /// Words in the output of its second run, which finds the first run's result or starts again.
    again: &'static [&'static str],
}

const ORDERS: &[Order] = &[
    Order {
        line: "ca init",
        before: &[],
        again: &["fingerprint"],
    },
    Order {
        line: "token create --node edge-9",
        before: &["ca init"],
        again: &["cwj1."],
    },
    Order {
        line: "node revoke edge-1 --reason stolen",
        before: &["ca init"],
        again: &["edge-1 is revoked"],
    },
    Order {
        line: "ca rotate prepare",
        before: &["ca init"],
        again: &["prepared"],
    },
    Order {
        line: "ca rotate activate",
        before: &["ca init", "ca rotate prepare"],
        again: &["the new root signs"],
    },
    Order {
        line: "ca rotate retire --force",
        before: &["ca init", "ca rotate prepare", "ca rotate activate"],
        again: &["signs"],
    },
];

/// A node that has joined.
fn join(data: &Path) {
    let store = Store::open(data, OpenMode::Existing).unwrap();
    let record = NodeRecord {
        node: NodeName::parse("edge-1").unwrap(),
        addresses: Vec::new(),
        pool: None,
        labels: BTreeMap::new(),
        enrolled_at: 1,
        order: None,
        serial: "01".into(),
        root: None,
        not_after: None,
        revoked: None,
        follows_cluster: false,
        join_key: None,
        other: causeway_certs::OtherFields::new(),
    };
    let node = record.node.clone();
    store.nodes().put(record).unwrap();
    let key = "a".repeat(64).parse().unwrap();
    let met = (node, 10250, Pin { key, since: 1 });
    store.pins().record_new(&[met]).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        // A process that was killed leaves its socket.
        if !entry.file_type().unwrap().is_file() {
            continue;
        }
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Runs a command until it succeeds for each of the calls, each time in a new copy of `template`, and runs `looks` after
/// each. Returns how often it was killed.
async fn killed_everywhere(
    folder: &Path,
    (line, template): (&str, Option<&Path>),
    looks: impl AsyncFn(&Path),
) -> usize {
    let mut killed = 0;
    let opens = full().then_some(&OPENS);
    for call in CALLS.iter().chain(opens) {
        let mut through = false;
        for nth in 1..MOST {
            let data = folder.join(format!("killed-{}-{nth}", call.trim_start_matches('/')));
            if let Some(template) = template {
                copy(template, &data);
            }
            let program = causeway_killed_at(call, nth).args(line.split_whitespace());
            let ended = program.flag("--data-dir", &data).run().await;
            looks(&data).await;
            fs::remove_dir_all(&data).unwrap();
            through = ended.code.is_some();
            if through {
                ended.ok();
                break;
            }
            killed += 1;
        }
        assert!(through, "{line} never came through {call}");
    }
    killed
}

/// Returns the temporary files that a killed command left behind.
fn left(data: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(data).unwrap().map(|entry| entry.unwrap());
    let new = entries.filter(|entry| {
        let name = entry.file_name().into_string().unwrap();
        name.starts_with(".new-") || name == ".restore.json"
    });
    new.map(|entry| entry.path()).collect()
}

#[tokio::test]
async fn a_command_killed_at_any_write_leaves_the_old_or_new_state() {
    need!("strace");
    for order in ORDERS {
        let folder = TempDir::new().unwrap();
        let template = folder.path().join("template");
        for line in order.before {
            let before = causeway("").args(line.split_whitespace());
            before.flag("--data-dir", &template).run().await.ok();
        }
        if !order.before.is_empty() {
            join(&template);
        }
        let again = async |data: &Path| {
            let again = causeway("").args(order.line.split_whitespace());
            let again = again.flag("--data-dir", data).run().await.ok().stdout;
            for word in order.again {
                assert!(again.contains(word), "{}: {again}", order.line);
            }
            let listed = causeway("token list").flag("--data-dir", data);
            listed.run().await.ok();
            assert_eq!(left(data), Vec::<PathBuf>::new());
        };
        let template = (!order.before.is_empty()).then_some(template.as_path());
        let killed = killed_everywhere(folder.path(), (order.line, template), again).await;
        assert!(killed >= 4, "{} was killed {killed} times only", order.line);
    }
}

#[tokio::test]
async fn a_restore_killed_at_any_write_restores_all_or_no_files() {
    need!("strace");
    let folder = TempDir::new().unwrap();
    let (template, file) = (folder.path().join("template"), folder.path().join("backup"));
    let order = async |line: &str, data: &Path| {
        let order = causeway("").args(line.split_whitespace());
        order.flag("--data-dir", data).run().await.ok();
    };
    order("ca init", &template).await;
    order("token create --node edge-1", &template).await;
    join(&template);
    order(&format!("ca backup {}", file.display()), &template).await;
    // The present state differs from the backup in each of its parts.
    order("token create --node edge-2", &template).await;
    order("ca rotate prepare", &template).await;
    order("node revoke edge-1 --reason stolen", &template).await;
    let restores = format!("ca restore {}", file.display());
    let whole = async |data: &Path| {
        let store = Store::open(data, OpenMode::Existing).unwrap();
        let roots = store.ca().unwrap().unwrap().fingerprints().len();
        let tokens = fs::read_to_string(data.join("tokens.json")).unwrap();
        let revoked = store.nodes().all().unwrap()[0].revoked.is_some();
        let found = (roots, tokens.matches("\"hash\"").count(), revoked);
        assert!(found == (1, 1, false) || found == (2, 2, true), "{found:?}");
        order(&restores, data).await;
        assert_eq!(left(data), Vec::<PathBuf>::new());
    };
    let killed = killed_everywhere(folder.path(), (&restores, Some(&template)), whole).await;
    assert!(killed >= 5, "{killed}");
}

/// Runs an edge that is killed by `program` unless it logs `through` before, and then runs it normally. Returns whether it
/// was killed.
async fn comes_back(site: &GatewayProcess, app: &App, program: Causeway, through: &str) -> bool {
    let (name, data) = ("edge-1", site.edge_data("edge-1"));
    let token = site.token(&format!("--node {name}")).await;
    let edge = site.edge_of(program, name, app.port());
    let mut edge = edge.flag("--join", token).start();
    let came = edge.says(through).await;
    if came {
        edge.kill_traced().await;
    }
    // A token may be used up before its certificate is on the disk: the edge then needs another token.
    let token = site.token(&format!("--node {name}")).await;
    let edge = site.edge(name, app.port()).flag("--join", token);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    // The gateway may be writing a file itself.
    until("no partial file is left", async || left(&data).is_empty()).await;
    edge.kill().await;
    !came
}

#[tokio::test]
async fn an_edge_killed_at_any_write_while_joining_recovers() {
    need!("strace");
    let app = App::saying("it").await;
    let site = GatewayProcess::start().await;
    let mut killed = 0;
    for call in ["write", "fsync", "/^rename"] {
        // The other calls only write to its sockets.
        for nth in 1..=6 {
            fs::remove_dir_all(site.edge_data("edge-1")).ok();
            let program = causeway_killed_at(call, nth);
            killed += usize::from(comes_back(&site, &app, program, "tunnel registered").await);
        }
    }
    assert!(killed >= 6, "{killed}");
}

#[tokio::test]
async fn an_edge_killed_during_renewal_recovers_with_the_old_identity() {
    need!("strace");
    let app = App::saying("it").await;
    // Certificates begin an hour before they are issued: this one is due for renewal at once.
    let site = GatewayProcess::with("tunnel: { edge_certificate_lifetime: 10m }").await;
    site.join("edge-1", app.port()).await.kill().await;
    let file = site.edge_data("edge-1").join("edge.json");
    let program = causeway_killed_over("/^rename", &file);
    assert!(comes_back(&site, &app, program, "certificate is renewed").await);
}

/// The identity of the edge with this data directory, and the identities that it has put aside.
fn identities(data: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(data).unwrap().map(|entry| entry.unwrap());
    let identities = entries.filter(|entry| {
        let name = entry.file_name().into_string().unwrap();
        name == "edge.json" || name.starts_with("edge-replaced-")
    });
    identities
        .map(|entry| fs::read(entry.path()).unwrap())
        .collect()
}

#[tokio::test]
async fn a_kill_at_any_write_while_leaving_loses_no_identity() {
    need!("strace");
    let app = App::saying("it").await;
    let site = GatewayProcess::start().await;
    site.join("edge-1", app.port()).await.kill().await;
    let (folder, template) = (TempDir::new().unwrap(), site.edge_data("edge-1"));
    let before = vec![fs::read(template.join("edge.json")).unwrap()];
    let again = async |data: &Path| {
        assert_eq!(identities(data), before);
        let there = data.join("edge.json").exists();
        let again = causeway("edge leave").flag("--data-dir", data).run().await;
        if there {
            again.ok();
        } else {
            again.failed(&["nothing to give up"]);
        }
        assert_eq!(identities(data), before);
        for name in ["edge.json", "joined-by"] {
            assert!(!data.join(name).exists(), "{name}");
        }
        assert_eq!(left(data), Vec::<PathBuf>::new());
    };
    let killed = killed_everywhere(folder.path(), ("edge leave", Some(&template)), again).await;
    assert!(killed >= 4, "{killed}");
}

#[tokio::test]
async fn an_identity_is_not_lost_by_a_kill_while_another_replaces_it() {
    need!("strace");
    let app = App::saying("it").await;
    let site = GatewayProcess::start().await;
    site.join("edge-1", app.port()).await.kill().await;
    let data = site.edge_data("edge-1");
    let rejoining = async |program: Causeway| {
        let token = site.token("--node edge-1").await;
        let edge = site.edge_of(program, "edge-1", app.port());
        edge.flag("--join", token).args(["--rejoin"]).start()
    };
    // Before the new identity is in place, and before its token is recorded.
    for (name, replaced) in [("edge.json", false), ("joined-by", true)] {
        let before = fs::read(data.join("edge.json")).unwrap();
        let mut edge = rejoining(causeway_killed_over("/^rename", &data.join(name))).await;
        assert!(!edge.says("identity is replaced").await, "{name}");
        let current = fs::read(data.join("edge.json")).unwrap();
        assert_eq!(current != before, replaced, "{name}");
        let is_aside = || {
            let entries = fs::read_dir(&data).unwrap().map(|entry| entry.unwrap());
            let mut others = entries.filter(|entry| entry.file_name() != "edge.json");
            others.any(|entry| fs::read(entry.path()).is_ok_and(|text| text == before))
        };
        assert!(is_aside(), "{name}");
        // The token may be used up: the next one replaces the identity in any case.
        let mut edge = rejoining(causeway("")).await;
        edge.wait_for_line("identity is replaced").await;
        edge.wait_for_line("tunnel registered").await;
        until("no partial file is left", async || left(&data).is_empty()).await;
        edge.kill().await;
        assert!(is_aside(), "{name}");
    }
}
