//! The built binary in the order of the README: CA, tokens, clients, two processes, signals.

use crate::world::{
    app::{App, PauseGate, answer},
    process::{ExitedProcess, GatewayProcess, Process, causeway},
    tool::{Running, need},
};
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

#[tokio::test]
async fn two_processes_a_token_and_curl_are_all_it_takes() {
    need!("curl");
    let app = App::saying("hello from behind NAT").await;
    let site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", app.port()).await;

    let message = site.curl("edge-1", "").run().await.ok();
    assert_eq!(message.text(), "hello from behind NAT");
    let nobody = site
        .curl_as_nobody("edge-1", "")
        .args(["-w", "%{http_code}"]);
    assert!(nobody.run().await.ok().text().ends_with("401"));
    assert_eq!(app.requests(), 1);
}

#[tokio::test]
async fn an_edge_restarts_from_its_data_with_a_used_or_no_token() {
    need!("curl");
    let app = App::saying("still here").await;
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    for restart in 0..3 {
        let edge = match restart {
            1 => site.edge("edge-1", app.port()),
            // The command line of a service unit stays the same.
            _ => site.edge("edge-1", app.port()).flag("--join", &token),
        };
        let mut edge = edge.start();
        edge.wait_for_line("tunnel registered").await;
        assert_eq!(
            site.curl("edge-1", "").run().await.ok().text(),
            "still here"
        );
        edge.stop().await.ok();
    }
    let kept = site.edge_data("edge-1").join("edge.json");
    assert_eq!(mode(&kept), 0o600);
    assert_eq!(mode(&site.edge_data("edge-1")), 0o700);
}

#[tokio::test]
async fn an_edge_reconnects_after_its_gateway_was_killed() {
    need!("curl");
    let app = App::saying("back").await;
    let site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", app.port()).await;
    let mut site = site.restart(|_| {}).await;
    site.gateway.wait_for_line("edge-1 connected").await;
    assert_eq!(site.curl("edge-1", "").run().await.ok().text(), "back");
}

#[tokio::test]
async fn ca_init_is_done_once() {
    let folder = tempfile::tempdir().unwrap();
    let init = || {
        causeway("ca init --data-dir data")
            .within(folder.path())
            .run()
    };
    let read = |name: &str| fs::read(folder.path().join("data").join(name)).unwrap();

    assert!(init().await.ok().stdout.contains("created a CA"));
    let before = (read("ca.pem"), read("ca.json"));
    let again = init().await.ok();
    assert!(again.stdout.contains("a CA exists already"), "{again:?}");
    assert_eq!((read("ca.pem"), read("ca.json")), before);
    assert_eq!(mode(&folder.path().join("data/ca.json")), 0o600);
}

#[tokio::test]
async fn without_a_ca_tokens_clients_and_gateways_say_how_to_make_one() {
    let folder = tempfile::tempdir().unwrap();
    for line in [
        "token create --node edge-1",
        "client certificate --name alice",
        "gateway",
    ] {
        let missing = causeway(line).args(["--data-dir", "none"]);
        let message = missing.within(folder.path()).run().await;
        assert_eq!(message.stdout, "", "{line}");
        message.failed(&["none", "causeway ca init --data-dir none"]);
        assert!(!folder.path().join("none").exists(), "{line}");
    }
    // A directory with all files except a CA, such as that of an edge.
    fs::create_dir(folder.path().join("bare")).unwrap();
    fs::write(folder.path().join("bare/version"), "1\n").unwrap();
    for line in ["token create --node edge-1", "gateway"] {
        let missing = causeway(line).args(["--data-dir", "bare"]);
        let message = missing.within(folder.path()).run().await;
        message.failed(&["causeway ca init --data-dir bare"]);
    }
}

#[tokio::test]
async fn token_create_puts_the_token_alone_on_standard_output() {
    let site = GatewayProcess::start().await;
    let made = causeway("token create --node edge-1 --ttl 5m --pool north --address 10.0.0.7");
    let made = made.flag("--data-dir", site.data()).run().await.ok();
    let token = made.stdout.strip_suffix('\n').unwrap();
    assert!(token.starts_with("cwj1.") && !token.contains(char::is_whitespace));
    assert!(
        made.stderr.contains("causeway edge --join TOKEN"),
        "{}",
        made.stderr
    );
    assert!(!made.stderr.contains(token));
    let secret = token.split('.').nth(2).unwrap();
    let kept = fs::read_to_string(site.data().join("tokens.json")).unwrap();
    assert!(kept.contains("north") && !kept.contains(secret));

    for (arguments, wrong) in [
        ("--node edge_1", "edge_1"),
        ("--node edge-1 --ttl soon", "soon"),
    ] {
        let refused = causeway("token create").args(arguments.split(' '));
        let refused = refused.flag("--data-dir", site.data()).run().await;
        assert_ne!(refused.code, Some(0));
        assert!(
            refused.stdout.is_empty() && refused.stderr.contains(wrong),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn a_bearer_token_opens_a_listener_and_is_stored_as_a_hash() {
    need!("curl");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("clients");
    let made = causeway("client token --name prometheus --group monitoring");
    let made = made.flag("--file", &file).run().await.ok();
    let token = made.stdout.trim();
    assert!(!fs::read_to_string(&file).unwrap().contains(token));
    assert_eq!(mode(&file), 0o600);

    let app = App::saying("metrics").await;
    let tokens = format!(
        "client_auth: {{ own_ca: false, tokens: {} }}",
        file.display()
    );
    let listener =
        "listeners: [{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100, ";
    let site = GatewayProcess::with_listeners(&format!("{listener}{tokens} }}]")).await;
    let _edge = site.join("edge-1", app.port()).await;
    let with = |token: &str| {
        let header = format!("authorization: Bearer {token}");
        let curl = site.curl_as_nobody("edge-1", "").args(["-H", &header]);
        curl.args(["-w", "%{http_code}"]).run()
    };
    assert_eq!(with(token).await.ok().text(), "metrics200");
    assert!(
        with(&token.to_ascii_lowercase())
            .await
            .ok()
            .text()
            .ends_with("401")
    );
    assert_eq!(app.requests(), 1);
}

#[tokio::test]
async fn ca_client_writes_private_files_and_refuses_path_names() {
    let site = GatewayProcess::start().await;
    assert_eq!(mode(&site.path("alice-key.pem")), 0o600);
    let refused = causeway("client certificate --name ../mallory").flag("--out", site.path(""));
    let refused = refused.flag("--data-dir", site.data()).run().await;
    refused.failed(&["../mallory"]);
    let nowhere =
        causeway("client certificate --name bob").flag("--out", site.path("no/such/place"));
    let nowhere = nowhere.flag("--data-dir", site.data()).run().await;
    nowhere.failed(&["cannot write", "no/such/place/bob"]);
}

#[tokio::test]
async fn sigterm_gives_a_slow_download_its_time_at_the_gateway() {
    need!("curl");
    let mut slow = Slow::begin("timeouts: { drain: 1h }").await;
    slow.site.gateway.signal("TERM").await;
    slow.site.gateway.wait_for_line("draining").await;
    slow.gate.open();
    slow.gate.open();
    assert_eq!(slow.rest().await, Ok("two\n".into()));
    slow.site.gateway.ended().await.ok();
}

#[tokio::test]
async fn sigterm_gives_a_slow_download_its_time_at_the_edge() {
    need!("curl");
    let mut slow = Slow::begin("").await;
    slow.edge.signal("TERM").await;
    slow.edge.wait_for_line("SIGTERM: draining").await;
    slow.gate.open();
    slow.gate.open();
    assert_eq!(slow.rest().await, Ok("two\n".into()));
    slow.edge.ended().await.ok();
}

#[tokio::test]
async fn streams_cut_by_the_drain_timeout_do_not_look_complete() {
    need!("curl");
    let mut slow = Slow::begin("timeouts: { drain: 500ms }").await;
    slow.site.gateway.signal("INT").await;
    let cut = slow.rest().await.unwrap_err();
    assert!(!cut.is_empty());
    let ExitedProcess { stderr, .. } = slow.site.gateway.ended().await.ok();
    let cut = stderr.contains("gateway stopped cut=") && !stderr.contains("cut=0");
    assert!(cut, "{stderr}");
    slow.app.end().await;
}

#[tokio::test]
async fn a_second_sigterm_ends_a_gateway_at_once() {
    need!("curl");
    let mut slow = Slow::begin("timeouts: { drain: 1h }").await;
    slow.site.gateway.signal("TERM").await;
    slow.site
        .gateway
        .wait_for_line("SIGTERM: draining; a second signal stops at once")
        .await;
    slow.site.gateway.signal("TERM").await;
    assert!(slow.rest().await.is_err());
    slow.site.gateway.ended().await.failed(&["second signal"]);
}

#[tokio::test]
async fn a_second_sigterm_ends_an_edge_at_once() {
    need!("curl");
    let mut slow = Slow::begin("").await;
    slow.edge.signal("TERM").await;
    slow.edge
        .wait_for_line("SIGTERM: draining; a second signal stops at once")
        .await;
    slow.edge.signal("INT").await;
    assert!(slow.rest().await.is_err());
    slow.edge.ended().await.failed(&["second signal"]);
}

#[tokio::test]
async fn sighup_ends_no_stream() {
    let mut site = GatewayProcess::start().await;
    site.gateway.signal("HUP").await;
    site.gateway.wait_for_line("SIGHUP").await;
    site.gateway.stop().await.ok();
}

#[tokio::test]
async fn an_edge_without_a_gateway_to_join_stops_when_it_is_asked() {
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    let mut edge = causeway("edge --gateway 127.0.0.1:1 --admin-listen 127.0.0.1:0")
        .flag("--data-dir", site.edge_data("edge-1"))
        .flag("--join", token)
        .start();
    // A silent network is not a refusal: the edge retries.
    edge.wait_for_line("not joined yet").await;
    edge.stop().await.ok();
}

/// A download through gateway and edge that has begun and waits for its gate.
struct Slow {
    site: GatewayProcess,
    edge: Process,
    app: App,
    gate: PauseGate,
    curl: Option<Running>,
}

impl Slow {
    async fn begin(configuration: &str) -> Self {
        let gate = PauseGate::new();
        let held = gate.clone();
        let app = App::http(move |head| match head.path().as_str() {
            "/slow" => answer::parts("text/plain", &["one\n", "two\n"], &held),
            _ => answer::ok("new"),
        });
        let app = app.await;
        let site = GatewayProcess::with(configuration).await;
        let edge = site.join("edge-1", app.port()).await;
        let mut curl = site.curl("edge-1", "slow").args(["-N"]).start();
        gate.open();
        assert_eq!(curl.line().await, "one");
        Self {
            site,
            edge,
            app,
            gate,
            curl: Some(curl),
        }
    }

    /// Returns the rest of the response: all of it, or curl's error.
    async fn rest(&mut self) -> Result<String, String> {
        let ended = self.curl.take().unwrap().finish().await;
        if ended.status.success() {
            Ok(ended.text())
        } else {
            Err(ended.stderr)
        }
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}
