//! Audit log: refused requests with their client, opened and closed sessions, and no secret in this or any other log.

use crate::world::{
    app::{App, answer},
    client::{exchange, whole},
    process::{GatewayProcess, causeway},
    until,
};
use hyper::Request;
use serde_json::Value;
use std::fs;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;

/// A gateway whose clients have tokens, with a policy and an audit log, in a folder of their own.
struct Audited {
    folder: TempDir,
    site: GatewayProcess,
    /// Token of the client alice.
    secret: String,
}

impl Audited {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let made = causeway("client token --name alice --group team");
        let made = made.flag("--file", path("tokens")).run().await.ok();
        let rules = "rules:\n  - { name: no-metrics, what: { paths: [/metrics] }, then: deny }\n  - { then: allow }\n";
        fs::write(path("policy"), rules).unwrap();
        let clients = format!("{{ own_ca: false, tokens: {} }}", path("tokens"));
        let configuration = format!(
            "listeners: [{{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, client_auth: {clients} }}]\n\
             policy: {}\naudit_log: {}\n",
            path("policy"),
            path("audit")
        );
        Self {
            site: GatewayProcess::with_listeners(&configuration).await,
            secret: made.stdout.trim().to_owned(),
            folder,
        }
    }

    fn text(&self) -> String {
        fs::read_to_string(self.folder.path().join("audit")).unwrap_or_default()
    }

    fn lines(&self) -> Vec<Value> {
        let text = self.text();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Waits until the log has lines of these events and no others.
    async fn until_told(&self, events: &[&str]) {
        until("the audit log has its lines", async || {
            let lines = self.lines();
            lines.iter().map(|line| &line["event"]).eq(events)
        })
        .await;
    }
}

fn url(rest: &str) -> String {
    format!("http://edge-1:9100{rest}")
}

async fn app() -> App {
    App::http(|head| match head.value("upgrade") {
        Some(_) => answer::switch("echo", b""),
        None => answer::ok("it"),
    })
    .await
}

#[tokio::test]
async fn refusals_leave_a_line_each_and_sessions_one_at_either_end() {
    let app = app().await;
    let audited = Audited::start().await;
    let _edge = audited.site.join("edge-1", app.port()).await;
    let client = audited.site.nobody();
    let wrong = client.clone().bearer("wrong").get(&url("/?q=1")).await;
    assert_eq!(wrong.status, 401);
    // The workers write their lines in any order.
    audited.until_told(&["refused"]).await;
    let alice = client.bearer(&audited.secret);
    assert_eq!(alice.get(&url("/metrics")).await.status, 403);
    audited.until_told(&["refused", "refused"]).await;
    assert_eq!(alice.get(&url("/fine")).await.status, 200);
    let mut wire = alice.wire("edge-1", &[]).await.unwrap();
    let upgrade = format!(
        "GET /shell HTTP/1.1\r\nHost: edge-1:9100\r\nAuthorization: Bearer {}\r\n\
         Connection: upgrade\r\nUpgrade: echo\r\n\r\n",
        audited.secret
    );
    let head = exchange(&mut *wire, upgrade).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    audited.until_told(&["refused", "refused", "opened"]).await;
    wire.write_all(b"five!").await.unwrap();
    wire.shutdown().await.unwrap();
    drop(wire);
    let all = ["refused", "refused", "opened", "closed"];
    audited.until_told(&all).await;

    let lines = audited.lines();
    assert_eq!(lines[0]["reason"], "unauthenticated");
    assert_eq!(lines[0]["path"], "/");
    assert_eq!(lines[1]["client"], "alice");
    assert_eq!(lines[1]["rule"], "no-metrics");
    assert_eq!(lines[1]["rule_line"], 2);
    for session in &lines[2..] {
        assert_eq!(session["path"], "/shell");
        assert_eq!(session["status"], 101);
        assert_eq!(session["groups"], "team");
        assert_eq!(session["trace"], lines[2]["trace"]);
    }
    assert_eq!(lines[3]["up"], 5);
}

#[tokio::test]
async fn no_log_holds_a_secret() {
    let app = app().await;
    let audited = Audited::start().await;
    let site = &audited.site;
    let token = site.token("--node edge-1").await;
    let edge = site.edge("edge-1", app.port()).flag("--join", &token);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    let wrong = "wrong-secret-5";
    let query = url("/?token=query-secret-7");
    let nobody = site.nobody().bearer(wrong).get(&query).await;
    assert_eq!(nobody.status, 401);
    let request = Request::post(query).body(whole("body-secret-9")).unwrap();
    let alice = site.nobody().bearer(&audited.secret);
    assert_eq!(alice.send(request).await.status, 200);
    audited.until_told(&["refused"]).await;

    let second_line = |text: &str| text.lines().nth(1).unwrap().to_owned();
    let ca: Value =
        serde_json::from_str(&fs::read_to_string(site.data().join("ca.json")).unwrap()).unwrap();
    let key = second_line(ca["roots"][0]["key"].as_str().unwrap());
    let identity = fs::read_to_string(site.edge_data("edge-1").join("edge.json")).unwrap();
    let identity: Value = serde_json::from_str(&identity).unwrap();
    let own = second_line(identity["key"].as_str().unwrap());
    let joined = token.split('.').nth(2).unwrap();
    let secrets = [
        &*audited.secret,
        wrong,
        "query-secret-7",
        "body-secret-9",
        joined,
        &key,
        &own,
    ];
    let audit = audited.text();
    let (gateway, edge) = (audited.site.gateway.stop().await, edge.stop().await);
    let logs = [
        gateway.stdout,
        gateway.stderr,
        edge.stdout,
        edge.stderr,
        audit,
    ];
    for secret in secrets {
        assert!(secret.len() > 8, "{secret}");
        for log in &logs {
            assert!(!log.contains(secret), "{secret} is in: {log}");
        }
    }
}

#[tokio::test]
async fn a_moved_log_is_reopened_at_each_reload_even_a_refused_one() {
    let audited = Audited::start().await;
    let path = |name: &str| audited.folder.path().join(name);
    let gateway = &audited.site.gateway;
    let refuse = async || {
        let wrong = audited.site.nobody().bearer("wrong");
        assert_eq!(wrong.get(&url("/")).await.status, 401);
    };
    let lines_of = |name: &str| fs::read_to_string(path(name)).unwrap().lines().count();
    refuse().await;
    audited.until_told(&["refused"]).await;
    fs::rename(path("audit"), path("audit.1")).unwrap();
    refuse().await;
    until("the line is there", async || lines_of("audit.1") == 2).await;
    assert!(!path("audit").exists());
    gateway.signal("HUP").await;
    let bound = Duration::from_mins(1);
    gateway.wrote("configuration was reloaded", 1, bound).await;
    refuse().await;
    audited.until_told(&["refused"]).await;

    fs::write(path("next"), "rules: [{ then: perhaps }]\n").unwrap();
    // In one step: an empty policy would be a rejected one as well.
    fs::rename(path("next"), path("policy")).unwrap();
    gateway.wrote("configuration was rejected", 1, bound).await;
    fs::rename(path("audit"), path("audit.2")).unwrap();
    gateway.signal("HUP").await;
    gateway.wrote("configuration was rejected", 2, bound).await;
    refuse().await;
    audited.until_told(&["refused"]).await;
    assert_eq!([lines_of("audit.1"), lines_of("audit.2")], [2, 1]);
}
