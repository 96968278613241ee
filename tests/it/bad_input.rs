//! Bad input to the built binary: error messages name the fault and its remedy, and no work is half done.
//!
//! Exit 2 for arguments and configuration, with all faults at once; exit 78 for faults that an operator has to correct
//! before another attempt can succeed; exit 1 for everything else. A permanent refusal ends an edge that joins. An edge
//! that already runs backs off and logs the refusal.

use crate::world::{
    PATIENCE, admin,
    app::App,
    process::{
        Causeway, ExitedProcess, GatewayProcess, Output, Process, am_root, causeway,
        causeway_on_a_full_disk, causeway_under_modes,
    },
    tool::{Tool, need},
    until,
};
use serde_json::Value;
use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// A mixture of faults; each expected line is one fault.
const GATEWAY: &str = "\
colour: blue
tunnel:
  listen: 127.0.0.1:7000
admin:
  listen: 127.0.0.1:70000
listeners:
  - name: web
    protocol: https
    listen: 0.0.0.0:7000
    certificate: { chain: none/chain.pem, key: none/key.pem }
  - name: web
    protocol: https
    listen: 127.0.0.1:7001
";
const GATEWAY_FAULTS: [&str; 6] = [
    "gateway.yaml:1:1: colour: unknown key; the keys allowed here are ",
    "gateway.yaml:5:11: admin.listen: \"127.0.0.1:70000\" is not a listen address; write IP:PORT ",
    "gateway.yaml:9:13: listeners[0].listen: 0.0.0.0:7000 overlaps with tunnel.listen (127.0.0.1:7000); give ",
    "gateway.yaml:10:27: listeners[0].certificate.chain: cannot read none/chain.pem: No such file",
    "gateway.yaml:10:48: listeners[0].certificate.key: cannot read none/key.pem: No such file",
    "gateway.yaml:11:11: listeners[1].name: the name \"web\" is used by an earlier listener",
];

#[tokio::test]
async fn all_configuration_faults_are_listed_with_place_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("gateway.yaml"), GATEWAY).unwrap();
    for line in [
        "gateway --config gateway.yaml",
        "gateway --config gateway.yaml --check-config",
    ] {
        let message = causeway(line)
            .within(folder.path())
            .run()
            .await
            .with_code(2);
        let faults: Vec<&str> = message.stderr.lines().collect();
        assert_eq!(faults.len(), GATEWAY_FAULTS.len(), "{}", message.stderr);
        for (fault, expected) in faults.iter().zip(GATEWAY_FAULTS) {
            assert!(fault.starts_with(expected), "{fault}\n{expected}");
        }
        assert_eq!(message.stdout, "");
    }
}

#[tokio::test]
async fn bad_configurations_get_their_messages_and_good_ones_pass() {
    let fixtures = |kind: &str| {
        let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests/fixtures/config", kind]
            .iter()
            .collect();
        let files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap());
        let names = files.map(|file| PathBuf::from(file.file_name()));
        let yaml = |name: &PathBuf| name.extension().is_some_and(|kind| kind == "yaml");
        let names: Vec<PathBuf> = names.filter(yaml).collect();
        assert!(!names.is_empty());
        (folder, names)
    };
    let check = |folder: &Path, name: &Path| {
        let (side, _) = name.to_str().unwrap().split_once('-').unwrap();
        let check = causeway(side).args(["--check-config"]);
        check.flag("--config", name).within(folder).run()
    };
    let (folder, names) = fixtures("invalid");
    for name in names {
        let message = check(&folder, &name).await.with_code(2);
        let expected = folder.join(&name).with_extension("expected");
        assert_eq!(message.stderr, fs::read_to_string(expected).unwrap());
    }
    let (folder, names) = fixtures("valid");
    for name in names {
        check(&folder, &name).await.ok();
    }
}

#[tokio::test]
async fn packaged_configurations_are_valid() {
    for side in ["gateway", "edge"] {
        let shipped = format!("{}/packaging/{side}.yaml", env!("CARGO_MANIFEST_DIR"));
        let check = causeway(side).args(["--check-config"]);
        check.flag("--config", shipped).run().await.ok();
    }
}

#[tokio::test]
async fn permanent_failures_exit_with_the_supervisors_code() {
    let folder = tempfile::tempdir().unwrap();
    let run = |line: &str| causeway(line).within(folder.path()).run();
    for line in [
        "gateway --data-dir none",
        "edge --data-dir edge --gateway 127.0.0.1:9",
        "edge --data-dir edge --gateway 127.0.0.1:9 --join no-token",
    ] {
        run(line).await.with_code(78);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = taken.local_addr().unwrap().to_string();
    run("ca init --data-dir data").await.ok();
    let gateway = causeway("gateway --data-dir data --tunnel-listen 127.0.0.1:0 --listeners []");
    let busy = gateway.flag("--admin-listen", admin).within(folder.path());
    busy.run().await.with_code(1);
}

#[tokio::test]
async fn faults_in_flags_and_variables_name_the_flag_and_the_variable() {
    for side in ["gateway", "edge"] {
        let message = causeway(side)
            .env("CAUSEWAY_LOG_FORMAT", "xml")
            .args(["--admin-listen", "5"]);
        let message = message
            .args(["--config", "none.yaml"])
            .run()
            .await
            .with_code(2)
            .stderr;
        for part in [
            "environment CAUSEWAY_LOG_FORMAT: log.format: \"xml\" is not one of text, json",
            "flag --admin-listen: admin.listen: ",
            "none.yaml: cannot be read: No such file",
        ] {
            assert!(message.contains(part), "{part}\n{message}");
        }
    }
    for line in [
        "gateway --frob",
        "frob",
        "",
        "status -o xml",
        "token create",
    ] {
        let message = causeway(line).run().await.with_code(2);
        assert!(
            message.stderr.contains("Usage") || message.stderr.contains("--help"),
            "{line}: {message:?}"
        );
    }
}

#[tokio::test]
async fn an_address_in_use_is_reported_with_its_listener() {
    let site = GatewayProcess::start().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let listener =
        |listen: &str| format!("[{{name: metrics, protocol: https, listen: \"{listen}\"}}]");
    let free = "127.0.0.1:0";
    for (tunnel, admin, listen, named) in [
        (free, free, taken.as_str(), "listener \"metrics\""),
        (&taken, free, free, "tunnel"),
        (free, &taken, free, "admin"),
    ] {
        let second = causeway("gateway").flag("--data-dir", site.data());
        let second = second
            .flag("--listeners", listener(listen))
            .flag("--admin-listen", admin);
        let message = second.flag("--tunnel-listen", tunnel).run().await;
        message.failed(&[named, &taken, "in use"]);
    }
    // The first gateway is not affected.
    let admin = fs::read_to_string(site.data().join("run-admin")).unwrap();
    assert_eq!(admin.trim(), site.admin);

    let edge = site.join("edge-1", 1).await;
    edge.stop().await.ok();
    let edge = causeway("edge").flag("--data-dir", site.edge_data("edge-1"));
    let edge = edge
        .flag("--gateway", &site.tunnel)
        .flag("--admin-listen", &taken)
        .run()
        .await;
    edge.failed(&["admin.listen", &taken, "in use"]);
}

#[tokio::test]
async fn a_token_that_cannot_be_used_ends_the_edge_with_the_reason() {
    let site = GatewayProcess::start().await;
    let used = site.token("--node edge-1").await;
    let mut first = site.edge("edge-1", 1).flag("--join", &used).start();
    first.wait_for_line("joined").await;
    let expired = site.token("--node edge-2 --ttl 1ms").await;
    let other = site.token("--node edge-3").await;
    let secret = |token: &str| token.split('.').nth(2).unwrap().to_owned();
    let foreign = other.replace(&secret(&other), &secret(&expired));

    for (token, node, words, logged) in [
        (&used, "edge-1", "already used", "token_used"),
        (
            &expired,
            "edge-2",
            "the join token expired at ",
            "token_expired",
        ),
        (
            &other,
            "edge-9",
            "for node edge-3, not for node edge-9",
            "token_other_node",
        ),
        (
            &foreign,
            "edge-3",
            "the join token is unknown to this gateway",
            "token_unknown",
        ),
    ] {
        let refused = site
            .edge("fresh", 1)
            .args(["--node", node])
            .flag("--join", token);
        let message = at_once(refused).await.failed(&[words]);
        assert!(!message.contains(&secret(token)), "{message}");
        assert!(!site.edge_data("fresh").join("edge.json").exists());
        // Another gateway behind the same address may know a token that this one does not know.
        let tries = if logged == "token_unknown" { 6 } else { 1 };
        site.gateway.wrote(logged, tries, PATIENCE).await;
        let log = site.gateway.written();
        assert_eq!(log.count(logged), tries, "{log:#?}");
        assert!(!log.stderr.contains(&secret(token)));
    }
    // A refused token is not used up.
    let mut meant = site.edge("edge-3", 1).flag("--join", &other).start();
    meant.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn a_damaged_token_is_refused_without_a_request() {
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    let parts: Vec<&str> = token.split('.').collect();
    let [prefix, id, secret, hash] = parts[..] else {
        panic!("{token}")
    };
    for (damaged, words) in [
        (format!("x{token}"), "not a join token"),
        (
            format!("{prefix}.{id}.{secret}"),
            "incomplete: it has 3 of 4 parts",
        ),
        (format!("{token}.more"), "more than 4 parts"),
        (
            format!("{prefix}.{id}.{}.{hash}", &secret[1..]),
            "secret is damaged",
        ),
        (
            format!("{prefix}.{id}.{secret}.{}", &hash[1..]),
            "CA hash is damaged",
        ),
        (
            format!("{prefix}.{id}.{secret}.{}*", &hash[1..]),
            "CA hash is damaged",
        ),
    ] {
        let refused = site.edge("edge-1", 1).flag("--join", &damaged);
        at_once(refused).await.failed(&[words]);
    }
    assert_eq!(site.gateway.written().count("WARN"), 0);
    let mut edge = site
        .edge("edge-1", 1)
        .flag("--join", format!(" {token}\n"))
        .start();
    edge.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn a_gateway_of_another_ca_never_hears_the_token() {
    let (site, other) = (GatewayProcess::start().await, GatewayProcess::start().await);
    let token = other.token("--node edge-1").await;
    let refused = site.edge("edge-1", 1).flag("--join", &token);
    at_once(refused)
        .await
        .failed(&["the gateway's CA is", "the token expects"]);
    assert_eq!(
        site.gateway
            .written()
            .count("refused an edge's certificate"),
        0
    );
    let hash = token.rsplit('.').next().unwrap();
    // The token is still valid at its own gateway.
    assert_eq!(hash.len(), 43);
    let mut edge = other.edge("edge-1", 1).flag("--join", &token).start();
    edge.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn an_edge_without_identity_or_gateway_names_the_missing_part() {
    let site = GatewayProcess::start().await;
    at_once(site.edge("edge-1", 1))
        .await
        .failed(&["no identity in", "causeway token create"]);
    let lonely =
        causeway("edge --admin-listen 127.0.0.1:0").flag("--data-dir", site.path("lonely"));
    let lonely = lonely.flag("--join", site.token("--node edge-1").await);
    at_once(lonely)
        .await
        .failed(&["no gateway is configured", "HOST:PORT"]);
}

#[tokio::test]
async fn an_edge_with_another_nodes_certificate_does_not_start() {
    let site = GatewayProcess::start().await;
    site.join("edge-1", 1).await.stop().await.ok();
    let renamed = site.edge("edge-1", 1).args(["--node", "edge-2"]);
    at_once(renamed)
        .await
        .failed(&["for node edge-1", "names edge-2"]);
    fs::write(site.edge_data("edge-1").join("edge.json"), "{").unwrap();
    let message = at_once(site.edge("edge-1", 1))
        .await
        .failed(&["edge.json is damaged", "causeway edge leave"]);
    assert!(!message.contains("panicked"));
}

#[tokio::test]
async fn a_removed_node_is_refused_and_backs_off_at_the_maximum() {
    need!("curl");
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let mut site = site
        .restart(|data| fs::write(data.join("nodes.json"), "{}").unwrap())
        .await;
    let logged = site.gateway.wait_for_line("refused an edge").await;
    assert!(
        logged.contains("edge-1") && logged.contains("not enrolled"),
        "{logged}"
    );
    unwelcome(edge, "not enrolled").await;
}

#[tokio::test]
async fn an_expired_certificate_is_named_and_backs_off_at_the_maximum() {
    need!("curl");
    let site = GatewayProcess::with("tunnel: { edge_certificate_lifetime: 1s }").await;
    let token = site.token("--node edge-1").await;
    let mut first = site.edge("edge-1", 1).flag("--join", token).start();
    first.wait_for_line("joined").await;
    first.stop().await.ok();
    let joined = SystemTime::now();
    until("the certificate has ended", async || {
        joined.elapsed().unwrap() > Duration::from_secs(3)
    })
    .await;
    let mut edge = site.edge("edge-1", 1).start();
    edge.wait_for_line("has expired, unless this machine's clock is wrong")
        .await;
    // The first edge may have left in the middle of a handshake.
    let expired = |line: &str| {
        line.contains("refused a connection to the tunnel port") && line.contains("xpired")
    };
    let mut gateway = site.gateway;
    gateway.line("the certificate has expired", expired).await;
    unwelcome(edge, "CertificateExpired").await;
}

#[tokio::test]
async fn a_replaced_gateway_ca_is_refused_and_both_ends_log_it() {
    need!("curl");
    let site = GatewayProcess::start().await;
    let mut edge = site.join("edge-1", 1).await;
    let mut site = site
        .restart(|data| {
            for name in ["ca.pem", "ca.json", "tokens.json"] {
                fs::remove_file(data.join(name)).unwrap();
            }
            let init = std::process::Command::new(crate::world::process::binary())
                .args(["ca", "init", "--data-dir"])
                .arg(data)
                .output();
            assert!(init.unwrap().status.success());
        })
        .await;
    let message = edge.wait_for_line("UnknownIssuer").await;
    assert!(
        message.contains("cannot open a tunnel") && message.contains("retry_in"),
        "{message}"
    );
    let logged = site
        .gateway
        .wait_for_line("the peer ended the TLS handshake with an alert")
        .await;
    for part in ["UnknownCA", "an edge refuses", "causeway token create"] {
        assert!(logged.contains(part), "{logged}");
    }
    let refused = "refused a connection to the tunnel port";
    assert_eq!(site.gateway.written().count(refused), 0);
    let trouble = edge_status(&edge).await["trouble"].clone();
    assert_eq!(trouble["refused"], true, "{trouble}");
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_logged_and_refused() {
    need!("openssl");
    let (site, other) = (GatewayProcess::start().await, GatewayProcess::start().await);
    let client = Tool::new("openssl")
        .args(["s_client", "-alpn", "rh2", "-connect", &site.tunnel])
        .args([Path::new("-cert"), &other.path("alice.pem")])
        .args([Path::new("-key"), &other.path("alice-key.pem")])
        .args(["-ign_eof"])
        .run()
        .await;
    assert!(
        client.stderr.contains("alert unknown ca"),
        "{}",
        client.stderr
    );
    let mut gateway = site.gateway;
    let logged = gateway
        .wait_for_line("refused a connection to the tunnel port")
        .await;
    assert!(logged.contains("UnknownIssuer"), "{logged}");
}

#[tokio::test]
async fn an_unwritable_data_directory_is_reported_and_uses_no_token() {
    if am_root() {
        // Root may write everywhere, so the process drops that right.
        need!("setpriv");
    }
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    let data = site.edge_data("edge-1");
    fs::create_dir(&data).unwrap();
    // Once without any file, and once with the file that is made first.
    for version in [None, Some("1\n")] {
        if let Some(version) = version {
            fs::write(data.join("version"), version).unwrap();
        }
        read_only(&data, true);
        let edge = site.edge_of(causeway_under_modes(), "edge-1", 1);
        let refused = at_once(edge.flag("--join", &token)).await;
        refused.failed(&["cannot ", data.to_str().unwrap(), "Permission denied"]);
        read_only(&data, false);
    }
    let mut edge = site.edge("edge-1", 1).flag("--join", &token).start();
    edge.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn a_second_process_on_one_data_directory_is_refused() {
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let again =
        causeway("gateway --tunnel-listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --listeners []");
    let again = again.flag("--data-dir", site.data()).run().await;
    again.failed(&["in use by another causeway process"]);
    let clone = site.edge("edge-1", 1).run().await;
    clone.failed(&["in use by another causeway process"]);
    let status = causeway("status").flag("--data-dir", site.data());
    assert!(status.run().await.ok().stdout.contains("connected"));
    edge.stop().await;
}

#[tokio::test]
async fn commands_on_an_unwritable_data_directory_change_no_state() {
    if am_root() {
        // Root may write everywhere, so the process drops that right.
        need!("setpriv");
    }
    let site = GatewayProcess::start().await;
    let folder = tempfile::tempdir().unwrap();
    site.token("--node edge-1").await;
    let resting = folder.path().join("resting");
    let init = causeway("ca init").flag("--data-dir", &resting);
    init.run().await.ok();
    let before = (files(&site.data()), files(&resting));
    read_only(&site.data(), true);
    read_only(&resting, true);
    let denied = |line: &str| causeway_under_modes().args(line.split(' '));
    let create = denied("token create --node edge-2").flag("--data-dir", site.data());
    let create = create.run().await;
    let gateway =
        denied("gateway --tunnel-listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --listeners []");
    let gateway = gateway.flag("--data-dir", &resting).run().await;
    read_only(&site.data(), false);
    read_only(&resting, false);
    assert_eq!(create.stdout, "");
    create.failed(&["tokens.json", "Permission denied"]);
    gateway.failed(&["resting/.in-use", "Permission denied"]);
    assert_eq!((files(&site.data()), files(&resting)), before);

    read_only(folder.path(), true);
    let init = denied("ca init --data-dir data")
        .within(folder.path())
        .run()
        .await;
    let client = denied("client certificate --name bob --out .").flag("--data-dir", site.data());
    let client = client.within(folder.path()).run().await;
    let token = denied("client token --name bob --file tokens")
        .within(folder.path())
        .run()
        .await;
    let demo = denied("demo --data-dir data")
        .within(folder.path())
        .run()
        .await;
    read_only(folder.path(), false);
    init.failed(&["cannot make data", "Permission denied"]);
    client.failed(&["cannot write", "bob-key.pem", "Permission denied"]);
    token.failed(&["tokens", "Permission denied"]);
    demo.failed(&["data", "Permission denied"]);
    assert_eq!(files(folder.path()), []);
}

#[tokio::test]
async fn a_full_disk_at_the_edge_costs_no_token() {
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    let edge = site.edge_of(causeway_on_a_full_disk(1), "edge-1", 1);
    let message = at_once(edge.flag("--join", &token)).await;
    message.failed(&[
        "cannot write",
        site.edge_data("edge-1").to_str().unwrap(),
        "File too large",
    ]);
    let left = files(&site.edge_data("edge-1"));
    assert!(
        left.iter()
            .all(|(name, _)| !name.starts_with(".new-") && name != "edge.json")
    );

    let mut edge = site.edge("edge-1", 1).flag("--join", &token).start();
    edge.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn a_full_disk_at_a_running_edge_leaves_its_identity_as_it_was() {
    let app = App::saying("").await;
    let site = GatewayProcess::start().await;
    site.join("edge-1", app.port()).await.stop().await.ok();
    let kept = site.edge_data("edge-1").join("edge.json");
    let before = fs::read_to_string(&kept).unwrap();
    let site = site.advertising("[\"127.0.0.1:1\"]").await;
    let mut edge = site
        .edge_of(causeway_on_a_full_disk(1), "edge-1", app.port())
        .start();
    let message = edge
        .wait_for_line("cannot save the gateway's addresses")
        .await;
    assert!(
        message.contains("edge.json") && message.contains("File too large"),
        "{message}"
    );
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(fs::read_to_string(&kept).unwrap(), before);
    edge.stop().await.ok();
    site.edge("edge-1", app.port())
        .start()
        .wait_for_line("tunnel registered")
        .await;
}

#[tokio::test]
async fn a_full_gateway_disk_uses_no_token_and_the_edge_retries() {
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    for more in 0..8 {
        site.token(&format!("--node edge-{more}")).await;
    }
    let before = files(&site.data());
    let mut site = site.on_a_full_disk(1).await;
    let mut edge = site.edge("edge-1", 1).flag("--join", &token).start();
    let message = edge.wait_for_line("not joined yet").await;
    assert!(
        message.contains("the gateway cannot ") && message.contains("see its log for the cause"),
        "{message}"
    );
    let logged = site
        .gateway
        .wait_for_line("cannot issue an edge's certificate")
        .await;
    assert!(
        logged.contains("tokens.json") && logged.contains("File too large"),
        "{logged}"
    );
    let kept = |all: &[(String, Vec<u8>)]| -> Vec<_> {
        let lasting = |name: &str| name != "run-admin" && name != ".lock";
        all.iter()
            .filter(|(name, _)| lasting(name))
            .cloned()
            .collect()
    };
    // The edge tries again, and during each attempt there is a file that cannot be completed.
    until("the files are as before", async || {
        kept(&files(&site.data())) == kept(&before)
    })
    .await;

    let _site = site.restart(|_| {}).await;
    edge.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn a_full_disk_under_token_create_leaves_the_old_tokens_usable() {
    let site = GatewayProcess::start().await;
    let good = site.token("--node edge-1").await;
    for more in 0..4 {
        site.token(&format!("--node edge-{more}")).await;
    }
    let before = files(&site.data());
    let full = causeway_on_a_full_disk(1).args(["token", "create", "--node", "edge-9"]);
    let full = full.flag("--data-dir", site.data()).run().await;
    assert_eq!(full.stdout, "");
    full.failed(&["cannot write", "tokens.json", "File too large"]);
    assert_eq!(files(&site.data()), before);
    let mut edge = site.edge("edge-1", 1).flag("--join", good).start();
    edge.wait_for_line("tunnel registered").await;
}

#[tokio::test]
async fn a_full_disk_under_client_token_leaves_the_file_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens");
    for number in 0..6 {
        let made = causeway("client token --name").args([format!("client-{number}")]);
        made.flag("--file", &file).run().await.ok();
    }
    let before = fs::read(&file).unwrap();
    assert!((450..512).contains(&before.len()), "{}", before.len());
    let full = causeway_on_a_full_disk(1).args(["client", "token", "--name", "one-too-many"]);
    let full = full.flag("--file", &file).run().await;
    assert_eq!(full.stdout, "");
    full.failed(&["tokens", "File too large"]);
    assert_eq!(fs::read(&file).unwrap(), before);
}

/// Runs a command that must end by itself.
async fn at_once(edge: Causeway) -> ExitedProcess {
    edge.run().await
}

/// Checks that an edge logs that it is refused, the reason and the time of the next attempt, and that the next attempt is
/// late.
async fn unwelcome(mut edge: Process, why: &str) {
    let refused =
        |line: &str| line.contains("cannot open a tunnel") && line.contains("refused_permanently");
    let message = edge.line("no tunnel: refused permanently", refused).await;
    assert!(message.contains(why), "{message}");
    let delay = message.split_once("retry_in=").unwrap().1;
    let delay: f64 = delay.trim_end_matches('s').parse().unwrap();
    assert!((30.0..=60.0).contains(&delay), "{message}");

    let status = edge_status(&edge).await;
    assert_eq!(status["state"], "refused", "{status}");
    let trouble = &status["trouble"];
    assert!(trouble["what"].as_str().unwrap().contains(why), "{trouble}");
    let (at, again) = (
        trouble["at"].as_u64().unwrap(),
        trouble["retry_at"].as_u64().unwrap(),
    );
    assert!((30_000..=60_000).contains(&(again - at)), "{trouble}");
    let health = causeway("health")
        .flag("--admin", admin_of(&edge.written()))
        .run()
        .await;
    health.failed(&["503", "refused", why]);
    // It has not connected again meanwhile; while its gateway was down it may have dialled in vain.
    let log = edge.written().stderr;
    assert_eq!(log.lines().filter(|line| refused(line)).count(), 1, "{log}");
    edge.stop().await.ok();
}

fn admin_of(output: &Output) -> String {
    let runs = output
        .line(|line| line.contains("edge is running"))
        .expect("the edge runs");
    crate::world::process::address_after(runs, "admin=")
}

async fn edge_status(edge: &Process) -> Value {
    admin::json(&admin_of(&edge.written()), "/status").await
}

/// Returns all files of a directory with names and content, except the lock.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let all = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    let all = all.filter(|file| file.file_type().is_ok_and(|kind| kind.is_file()));
    // A running process may remove a file meanwhile.
    let read = all.filter_map(|file| {
        let name = file.file_name().into_string().unwrap();
        Some((name, fs::read(file.path()).ok()?))
    });
    let mut all: Vec<_> = read.filter(|(name, _)| name != ".lock").collect();
    all.sort();
    all
}

fn read_only(folder: &Path, yes: bool) {
    let mode = if yes { 0o500 } else { 0o700 };
    fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
}
