//! The engine with a real etcd server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod server;

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use causeway_certs::{Entries, EntryChange};
use causeway_gateway::{
    config,
    shared_state::{EtcdEngine, StateEngine},
};
use server::{Authority, Etcd, full, need_etcd, run, until, until_loaded};
use test_summary::unused_port;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Command,
    task::JoinSet,
};

fn change(key: &str, expected: Option<&str>, value: Option<&str>) -> EntryChange {
    EntryChange {
        key: key.to_owned(),
        expected: expected.map(str::to_owned),
        value: value.map(str::to_owned),
    }
}

/// Writes one change, which must take place.
async fn write(engine: &EtcdEngine, key: &str, expected: Option<&str>, value: Option<&str>) {
    let conflicts = engine.write(vec![change(key, expected, value)]).await;
    assert_eq!(conflicts, Ok(Vec::new()), "{key}");
}

/// Writes this value once the members have a leader. On a busy machine they may lose it at any time.
async fn write_to_cluster(engine: &EtcdEngine, key: &str, value: &str) {
    until("the members write", async || {
        let Ok(entry) = engine.get(key).await else {
            return false;
        };
        let change = change(key, entry.as_deref(), Some(value));
        engine.write(vec![change]).await == Ok(Vec::new())
    })
    .await;
}

fn has(entries: &Entries, key: &str, value: &str) -> bool {
    entries.get(key).is_some_and(|text| text == value)
}

/// Returns the error of a load.
async fn load_error(engine: &EtcdEngine) -> String {
    engine.load().await.unwrap_err().to_string()
}

#[tokio::test]
async fn one_of_two_concurrent_writes_wins() {
    need_etcd!();
    let etcd = Etcd::start().await;
    let engines = [etcd.engine(), etcd.engine()];
    until_loaded(&engines[0], Entries::is_empty).await;
    let mut current: Option<String> = None;
    for round in 0..50 {
        let write = |index: usize| {
            let value = format!("{round} {index}");
            let change = change("token/a", current.as_deref(), Some(&value));
            engines[index].write(vec![change])
        };
        let (first, second) = tokio::join!(write(0), write(1));
        let lost = vec!["token/a".to_owned()];
        let winner = match (first.unwrap(), second.unwrap()) {
            (won, conflicts) if won.is_empty() && conflicts == lost => 0,
            (conflicts, won) if won.is_empty() && conflicts == lost => 1,
            both => panic!("{both:?}"),
        };
        let value = format!("{round} {winner}");
        for engine in &engines {
            // Neither the winner nor the loser loads an older value than that which the answer to its write implies.
            assert!(has(&engine.load().await.unwrap(), "token/a", &value));
            assert_eq!(engine.get("token/a").await, Ok(Some(value.clone())));
        }
        current = Some(value);
    }
}

#[tokio::test]
async fn changes_whose_expected_value_is_current_do_not_wait_for_others() {
    need_etcd!();
    let etcd = Etcd::start().await;
    let engine = etcd.engine();
    until_loaded(&engine, Entries::is_empty).await;
    write(&engine, "a", None, Some("1")).await;
    write(&engine, "b", None, Some("1")).await;
    let changes = vec![
        change("a", None, Some("2")),
        change("b", Some("1"), Some("2")),
        change("c", None, Some("2")),
        change("d", Some("1"), None),
    ];
    let mut conflicts = engine.write(changes).await.unwrap();
    conflicts.sort();
    assert_eq!(conflicts, ["a", "d"]);
    write(&engine, "b", Some("2"), None).await;
    let entries = [("a", "1"), ("c", "2")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(engine.load().await, Ok(Entries::from(entries)));
    assert_eq!(engine.get("b").await, Ok(None));
}

#[tokio::test]
async fn a_watch_applies_changes_without_another_load_of_all_entries() {
    need_etcd!();
    let etcd = Etcd::start().await;
    let (one, two) = (etcd.engine(), etcd.engine());
    until_loaded(&one, Entries::is_empty).await;
    // A key with the same beginning, beside the prefix.
    etcd.etcdctl("put /causeway0 x").await;
    let range_count = r#"grpc_server_started_total{grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"}"#;
    let before = etcd.metric(range_count).await;
    write(&two, "node/a", None, Some("1")).await;
    until_loaded(&one, |entries| has(entries, "node/a", "1")).await;
    write(&two, "node/a", Some("1"), Some("2")).await;
    until_loaded(&one, |entries| has(entries, "node/a", "2")).await;
    write(&two, "node/a", Some("2"), None).await;
    until_loaded(&one, Entries::is_empty).await;
    let after = etcd.metric(range_count).await;
    assert!((after - before).abs() < 0.5, "{before} {after}");
}

#[tokio::test]
async fn an_engine_reconnects_to_a_restarted_server() {
    need_etcd!();
    let mut etcd = Etcd::start().await;
    let (one, two) = (etcd.engine(), etcd.engine());
    until_loaded(&one, Entries::is_empty).await;
    write(&two, "ca", None, Some("1")).await;
    until_loaded(&one, |entries| has(entries, "ca", "1")).await;
    etcd.kill().await;
    one.changed().await;
    let error = load_error(&one).await;
    let expected = format!("etcd at {}: cannot connect: ", etcd.url());
    assert!(error.starts_with(&expected), "{error}");
    let refused = two.write(vec![change("ca", Some("1"), Some("2"))]).await;
    assert!(refused.unwrap_err().to_string().starts_with(&expected));
    etcd.restart().await;
    until_loaded(&one, |entries| has(entries, "ca", "1")).await;
    until("the other engine writes", async || {
        let change = change("ca", Some("1"), Some("2"));
        two.write(vec![change]).await.is_ok()
    })
    .await;
    until_loaded(&one, |entries| has(entries, "ca", "2")).await;
}

#[tokio::test]
async fn an_engine_loads_the_entries_of_a_restored_server() {
    need_etcd!();
    let mut etcd = Etcd::start().await;
    let (one, two) = (etcd.engine(), etcd.engine());
    until_loaded(&one, Entries::is_empty).await;
    write(&one, "node/a", None, Some("1")).await;
    let (snapshot, data) = (etcd.path("snapshot"), etcd.data());
    etcd.etcdctl(&format!("snapshot save {}", snapshot.display()))
        .await;
    for value in 2..9 {
        let expected = (value - 1).to_string();
        write(&one, "node/a", Some(&expected), Some(&value.to_string())).await;
    }
    write(&one, "node/b", None, Some("1")).await;
    assert_eq!(one.load().await.unwrap().len(), 2);

    etcd.kill().await;
    etcd.remove_data();
    let restore = ["snapshot", "restore", "--data-dir"];
    let members = ["--initial-cluster", "default=http://127.0.0.1:1"];
    let own_url = ["--initial-advertise-peer-urls", "http://127.0.0.1:1"];
    run(Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(restore)
        .args([&data, &snapshot])
        .args(members)
        .args(own_url))
    .await;
    etcd.restart().await;
    let is_old = |entries: &Entries| entries.len() == 1 && has(entries, "node/a", "1");
    until_loaded(&one, is_old).await;
    write(&two, "node/a", Some("1"), Some("x")).await;
    until_loaded(&one, |entries| has(entries, "node/a", "x")).await;

    etcd.kill().await;
    etcd.remove_data();
    etcd.restart().await;
    until_loaded(&one, Entries::is_empty).await;
    write(&one, "node/a", None, Some("y")).await;
    assert!(has(&one.load().await.unwrap(), "node/a", "y"));
}

#[tokio::test]
async fn errors_of_tls_say_what_to_correct() {
    need_etcd!();
    let (authority, other) = (Authority::new(), Authority::new());
    let etcd = Etcd::start_with(authority.flags(false)).await;
    let config = config::Etcd {
        ca: Some(authority.ca()),
        ..etcd.config()
    };
    until_loaded(&EtcdEngine::new(&config).unwrap(), Entries::is_empty).await;

    let wrong_ca = config::Etcd {
        ca: Some(other.ca()),
        ..config.clone()
    };
    let error = load_error(&EtcdEngine::new(&wrong_ca).unwrap()).await;
    let path = other.ca().display().to_string();
    assert!(
        error.contains("not signed by a CA of") && error.contains(&path),
        "{error}"
    );

    let wrong_name = config::Etcd {
        endpoints: vec![format!("https://localhost:{}", etcd.port())],
        ..config.clone()
    };
    let error = load_error(&EtcdEngine::new(&wrong_name).unwrap()).await;
    assert!(error.contains("does not contain the host"), "{error}");

    let without_tls = config::Etcd {
        endpoints: vec![format!("http://127.0.0.1:{}", etcd.port())],
        ..config.clone()
    };
    let error = load_error(&EtcdEngine::new(&without_tls).unwrap()).await;
    assert!(error.starts_with("etcd at http://127.0.0.1"), "{error}");

    fs::write(other.ca(), "none").unwrap();
    let error = EtcdEngine::new(&wrong_ca).unwrap_err().to_string();
    assert!(error.contains("holds no certificate"), "{error}");
}

#[tokio::test]
async fn a_server_may_require_a_certificate() {
    need_etcd!();
    let authority = Authority::new();
    let etcd = Etcd::start_with(authority.flags(true)).await;
    let without = config::Etcd {
        ca: Some(authority.ca()),
        ..etcd.config()
    };
    let config = config::Etcd {
        certificate: Some(authority.issue("gateway-1")),
        ..without.clone()
    };
    let engine = EtcdEngine::new(&config).unwrap();
    until_loaded(&engine, Entries::is_empty).await;
    write(&engine, "ca", None, Some("1")).await;
    until_loaded(&engine, |entries| has(entries, "ca", "1")).await;
    let error = load_error(&EtcdEngine::new(&without).unwrap()).await;
    assert!(error.contains("state.etcd.certificate"), "{error}");

    // The files are read for each connection.
    let files = config.certificate.clone().unwrap();
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let key = read(&files.key);
    let engine = EtcdEngine::new(&config).unwrap();
    fs::write(&files.key, "none").unwrap();
    let error = load_error(&engine).await;
    assert!(error.contains(&files.key.display().to_string()), "{error}");
    fs::write(&files.key, key).unwrap();
    assert!(engine.load().await.is_ok());
}

fn password_file(etcd: &Etcd, password: &str) -> std::path::PathBuf {
    let path = etcd.path(&format!("password-of-{}", password.len()));
    fs::write(&path, format!("{password}\n")).unwrap();
    path
}

#[tokio::test]
async fn a_user_with_a_role_for_the_prefix_suffices() {
    need_etcd!();
    let mut etcd = Etcd::start().await;
    until_loaded(&etcd.engine(), Entries::is_empty).await;
    etcd.etcdctl("user add root:top-secret").await;
    etcd.etcdctl("user grant-role root root").await;
    etcd.etcdctl("role add causeway").await;
    etcd.etcdctl("role grant-permission causeway --prefix=true readwrite /causeway/")
        .await;
    etcd.etcdctl("user add gw:hunter2").await;
    etcd.etcdctl("user grant-role gw causeway").await;
    let config = config::Etcd {
        user: Some("gw".to_owned()),
        password_file: Some(password_file(&etcd, "hunter2")),
        ..etcd.config()
    };
    let error = load_error(&EtcdEngine::new(&config).unwrap()).await;
    assert!(error.contains("etcdctl auth enable"), "{error}");
    etcd.etcdctl("auth enable").await;

    let engine = EtcdEngine::new(&config).unwrap();
    let other = EtcdEngine::new(&config).unwrap();
    until_loaded(&engine, Entries::is_empty).await;
    write(&other, "ca", None, Some("1")).await;
    until_loaded(&engine, |entries| has(entries, "ca", "1")).await;
    assert_eq!(engine.get("node/a").await, Ok(None));

    let anonymous = load_error(&etcd.engine()).await;
    assert!(anonymous.contains("requires a user"), "{anonymous}");
    let wrong_password = config::Etcd {
        password_file: Some(password_file(&etcd, "wrong")),
        ..config.clone()
    };
    let error = load_error(&EtcdEngine::new(&wrong_password).unwrap()).await;
    assert!(
        error.contains("refuses the password of the user gw"),
        "{error}"
    );
    assert!(!error.contains("hunter2"), "{error}");
    let other_prefix = config::Etcd {
        prefix: "/other/".to_owned(),
        ..config.clone()
    };
    let error = load_error(&EtcdEngine::new(&other_prefix).unwrap()).await;
    assert!(
        error.contains("the user gw may not use these keys"),
        "{error}"
    );

    // Tokens are in the memory of the server: those of before are not valid.
    etcd.kill().await;
    etcd.restart().await;
    until_loaded(&engine, |entries| has(entries, "ca", "1")).await;
    until("the other engine has a new token", async || {
        other.get("ca").await == Ok(Some("1".to_owned()))
    })
    .await;
    let shown = format!("{engine:?} {engine}");
    assert!(
        shown.contains("gw") && !shown.contains("hunter2"),
        "{shown}"
    );
}

/// Entries of nodes, with values of the size that those of nodes have.
fn node_entries(count: usize) -> Vec<EntryChange> {
    let changes = (0..count).map(|index| {
        let value = format!("{index:0>380}");
        change(&format!("node/n{index}"), None, Some(&value))
    });
    changes.collect()
}

#[tokio::test]
async fn many_entries_are_written_and_loaded_in_pages() {
    need_etcd!();
    let count = if full() { 40_000 } else { 5_000 };
    let etcd = Etcd::start().await;
    let engine = etcd.engine();
    until_loaded(&engine, Entries::is_empty).await;
    let began = Instant::now();
    assert_eq!(engine.write(node_entries(count)).await, Ok(Vec::new()));
    let written = began.elapsed();
    assert_eq!(engine.load().await.unwrap().len(), count);

    for part in [count / 2, count] {
        // The second half is removed for the first measurement.
        if part < count {
            let entries = node_entries(count).split_off(part);
            let removed = entries.into_iter().map(|entry| EntryChange {
                expected: entry.value,
                value: None,
                ..entry
            });
            let removed = removed.collect();
            assert_eq!(engine.write(removed).await, Ok(Vec::new()));
        } else {
            let added = node_entries(count).split_off(count / 2);
            assert_eq!(engine.write(added).await, Ok(Vec::new()));
        }
        let sent = "etcd_network_client_grpc_sent_bytes_total";
        let before = etcd.metric(sent).await;
        let other = etcd.engine();
        let began = Instant::now();
        let entries = other.load().await.unwrap();
        let took = began.elapsed();
        let bytes = etcd.metric(sent).await - before;
        assert_eq!(entries.len(), part);
        let again = Instant::now();
        assert_eq!(other.load().await.unwrap().len(), part);
        println!(
            "{part} entries: loaded in {took:?}, {bytes} bytes of gRPC; from the cache in {:?}; all written in {written:?}",
            again.elapsed()
        );
    }
    until_loaded(&engine, |entries| entries.len() == count).await;
}

#[tokio::test]
async fn the_next_member_is_used_if_one_does_not_answer() {
    need_etcd!();
    let etcd = Etcd::start().await;
    until_loaded(&etcd.engine(), Entries::is_empty).await;
    // One accepts connections and never answers, one is closed.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_url = format!("http://{}", silent.local_addr().unwrap());
    let closed_url = format!("http://127.0.0.1:{}", unused_port());
    let config = config::Etcd {
        endpoints: vec![closed_url.clone(), silent_url.clone(), etcd.url()],
        ..etcd.config()
    };
    let engine = EtcdEngine::new(&config).unwrap();
    assert_eq!(engine.load().await, Ok(Entries::new()));
    write(&engine, "a", None, Some("1")).await;

    // A write is repeated only if it was not sent.
    let config = config::Etcd {
        endpoints: vec![closed_url.clone(), etcd.url()],
        ..etcd.config()
    };
    write(&EtcdEngine::new(&config).unwrap(), "b", None, Some("1")).await;
    let config = config::Etcd {
        endpoints: vec![silent_url.clone(), etcd.url()],
        ..etcd.config()
    };
    let engine = EtcdEngine::new(&config).unwrap();
    let unsure = engine.write(vec![change("c", None, Some("1"))]).await;
    let error = unsure.unwrap_err().to_string();
    let expected = format!("etcd at {silent_url}: no answer within 5s");
    assert!(error.starts_with(&expected), "{error}");
    write(&engine, "c", None, Some("1")).await;

    let config = config::Etcd {
        endpoints: vec![closed_url.clone(), format!("{closed_url}/")],
        ..etcd.config()
    };
    let error = load_error(&EtcdEngine::new(&config).unwrap()).await;
    assert_eq!(error.matches(&closed_url).count(), 2, "{error}");
}

#[tokio::test]
async fn a_cluster_survives_the_loss_of_the_member_in_use() {
    need_etcd!();
    let [mut first, second, third] = Etcd::start_cluster().await;
    let config = config::Etcd {
        endpoints: vec![first.url(), second.url(), third.url()],
        ..first.config()
    };
    let (one, two) = (
        EtcdEngine::new(&config).unwrap(),
        EtcdEngine::new(&config).unwrap(),
    );
    until_loaded(&one, Entries::is_empty).await;
    write_to_cluster(&two, "a", "1").await;
    until_loaded(&one, |entries| has(entries, "a", "1")).await;
    first.kill().await;
    write_to_cluster(&two, "a", "2").await;
    until_loaded(&one, |entries| has(entries, "a", "2")).await;

    // A member without the others reports no changes. Its watch ends, although its connection is alive.
    let at_second = EtcdEngine::new(&second.config()).unwrap();
    until_loaded(&at_second, |entries| has(entries, "a", "2")).await;
    third.signal("STOP").await;
    // Earlier than the engine's own check of an idle watch.
    let ended = tokio::time::timeout(Duration::from_secs(30), at_second.changed()).await;
    assert!(ended.is_ok());
    assert!(at_second.load().await.is_err());
    third.signal("CONT").await;
    until_loaded(&at_second, |entries| has(entries, "a", "2")).await;
}

/// Proxy in front of a server, which can stop to forward what the server sends over the connections of that time.
struct StallingProxy {
    port: u16,
    /// Number of connections, and number of those that are stalled.
    counts: Arc<(AtomicUsize, AtomicUsize)>,
    _tasks: JoinSet<()>,
}

impl StallingProxy {
    async fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let counts = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let shared = Arc::clone(&counts);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let number = shared.0.fetch_add(1, Ordering::SeqCst);
                let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                let shared = Arc::clone(&shared);
                connections.spawn(async move {
                    let is_stalled = || number < shared.1.load(Ordering::SeqCst);
                    forward(client, server, is_stalled).await;
                });
            }
        });
        Self {
            port,
            counts,
            _tasks: tasks,
        }
    }

    fn stall(&self) {
        let count = self.counts.0.load(Ordering::SeqCst);
        self.counts.1.store(count, Ordering::SeqCst);
    }
}

async fn forward(client: TcpStream, server: TcpStream, is_stalled: impl Fn() -> bool) {
    let (mut client_reader, mut client_writer) = client.into_split();
    let (mut server_reader, mut server_writer) = server.into_split();
    let requests = tokio::io::copy(&mut client_reader, &mut server_writer);
    let responses = async {
        let mut buffer = [0; 8192];
        while let Ok(length @ 1..) = server_reader.read(&mut buffer).await {
            if !is_stalled() && client_writer.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = requests => {}
        () = responses => {}
    }
}

#[tokio::test]
async fn a_silent_watch_is_noticed() {
    need_etcd!();
    let etcd = Etcd::start().await;
    let proxy = StallingProxy::start(etcd.port()).await;
    let config = config::Etcd {
        endpoints: vec![format!("http://127.0.0.1:{}", proxy.port)],
        ..etcd.config()
    };
    let (watcher, writer) = (EtcdEngine::new(&config).unwrap(), etcd.engine());
    until_loaded(&watcher, Entries::is_empty).await;
    proxy.stall();
    write(&writer, "a", None, Some("1")).await;
    assert_eq!(watcher.load().await, Ok(Entries::new()));
    // The clock of the engine goes on by the interval of the check.
    tokio::time::pause();
    tokio::time::advance(Duration::from_mins(2)).await;
    tokio::time::resume();
    until_loaded(&watcher, |entries| has(entries, "a", "1")).await;

    // A stopped server neither sends changes nor answers.
    etcd.signal("STOP").await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_mins(2)).await;
    tokio::time::resume();
    watcher.changed().await;
    let error = load_error(&watcher).await;
    assert!(error.contains("no answer within 5s"), "{error}");
    etcd.signal("CONT").await;
    until_loaded(&watcher, |entries| has(entries, "a", "1")).await;
}
