//! `causeway status` and `causeway health` against a live gateway, as a user and a script see them.

use crate::world::{
    app::App,
    client::ListenerAddress,
    cluster::Cluster,
    process::{Causeway, ExitedProcess, GatewayProcess, OPEN, address_after, causeway},
    tool::need,
};
use serde_json::Value;
use std::net::Ipv4Addr;

#[tokio::test]
async fn each_certificate_in_use_has_a_row() {
    let site = GatewayProcess::start().await;
    let table = status(&site, "").await.stdout;
    let rows = table.lines().skip_while(|line| !line.is_empty()).skip(1);
    let rows: Vec<&str> = rows.collect();
    assert!(
        rows[0].starts_with("CERTIFICATE") && rows[0].contains("EXPIRES"),
        "{table}"
    );
    for used_for in ["ca ", "tunnel ", "listener:"] {
        let shown = |line: &&str| line.starts_with(used_for);
        assert!(rows.iter().any(shown), "{used_for}: {table}");
    }
}

#[tokio::test]
async fn the_table_shows_connected_and_disconnected_nodes() {
    need!("curl");
    let app = App::saying("hello").await;
    let site = GatewayProcess::start().await;
    let empty = status(&site, "").await.stdout;
    let hint = "no edges; create a token with: causeway token create --node NODE\n";
    assert!(empty.starts_with(hint), "{empty}");

    let _here = site.join("edge-1", app.port()).await;
    let mut gone = site.edge("edge-2", app.port());
    gone = gone.flag("--join", site.token("--node edge-2 --pool north").await);
    let mut gone = gone.start();
    gone.wait_for_line("tunnel registered").await;
    site.curl("edge-1", "").run().await.ok();
    gone.stop().await.ok();
    crate::world::until("the gateway has noticed", async || {
        site.node("edge-2").await["state"] == "away"
    })
    .await;

    let table = status(&site, "").await.stdout;
    let lines: Vec<Vec<&str>> = table
        .lines()
        .take_while(|line| !line.is_empty())
        .map(|line| line.split_whitespace().collect())
        .collect();
    let header = "NODE STATE SINCE RTT STREAMS BYTES UP BYTES DOWN VERSION ADDRESS";
    assert_eq!(lines[0].join(" "), header);
    assert_eq!(lines.len(), 3, "{table}");
    assert_eq!(lines[1][..2], ["edge-1", "connected"]);
    assert!(
        table
            .lines()
            .nth(1)
            .unwrap()
            .contains(env!("CARGO_PKG_VERSION")),
        "{table}"
    );
    assert!(
        lines[1].contains(&"ms") && lines[1].last().unwrap().starts_with("127.0.0.1:"),
        "{table}"
    );
    assert_eq!(lines[2][..2], ["edge-2", "away"]);
    assert!(
        !table.contains(" \n") && !table.contains('\u{1b}'),
        "{table:?}"
    );

    let wide = status(&site, "-o wide").await.stdout;
    let header = wide.lines().next().unwrap();
    for column in ["TUNNELS", "POOL", "INSTANCE", "LAST SEEN"] {
        assert!(header.contains(column), "{wide}");
    }
    assert!(wide.lines().nth(2).unwrap().contains("north"), "{wide}");

    let json: Value = serde_json::from_str(&status(&site, "-o json").await.stdout).unwrap();
    assert_eq!(json[0]["node"], "edge-1");
    assert_eq!(json[0]["state"], "connected");
    assert_eq!(json[0]["ports"], serde_json::json!([9100]));
    assert!(json[0]["bytes_down"].as_u64().unwrap() > 0 && json[0]["rtt_ms"].as_f64().is_some());
    assert_eq!(
        (&json[1]["state"], &json[1]["pool"]),
        (&"away".into(), &"north".into())
    );
}

/// The API of its cluster lists nodes and nothing else.
#[tokio::test]
async fn a_gateway_that_is_not_ready_says_why() {
    let cluster = Cluster::at(Ipv4Addr::LOCALHOST).await;
    let text = format!(
        "{OPEN}\nkubernetes: {{ kubeconfig: {}, ports: {{ name: listed, http: web }} }}",
        cluster.kubeconfig().display()
    );
    let site = GatewayProcess::with_listeners(&text).await;
    let why = "not ready: the list of ports kube-system/listed (kubernetes.ports) has not been loaded yet";
    crate::world::until(why, async || status(&site, "").await.stdout.contains(why)).await;
}

#[tokio::test]
async fn the_gateway_is_found_by_flag_variable_and_data_directory() {
    let site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", 1).await;
    let by = |ask: Causeway| async move { assert!(ask.run().await.ok().stdout.contains("edge-1")) };
    by(causeway("status").flag("--admin", &site.admin)).await;
    by(causeway("status").env("CAUSEWAY_ADMIN", &site.admin)).await;
    by(causeway("status").flag("--data-dir", site.data())).await;
    by(causeway("status").env("CAUSEWAY_DATA_DIR", site.data())).await;
    // A flag takes precedence over a variable, and an address over a directory.
    let both = causeway("status").env("CAUSEWAY_ADMIN", "127.0.0.1:1");
    by(both
        .flag("--admin", &site.admin)
        .flag("--data-dir", "/nowhere"))
    .await;
}

#[tokio::test]
async fn where_no_gateway_answers_the_address_and_the_remedy_are_said() {
    let site = GatewayProcess::start().await;
    let ask = |line: &str| causeway("status").args(line.split(' ')).run();
    ask("--data-dir nowhere")
        .await
        .failed(&["no gateway or edge runs in nowhere", "--admin HOST:PORT"]);
    ask("--admin 127.0.0.1:1").await.failed(&[
        "127.0.0.1:1",
        "from --admin",
        "is the process running?",
    ]);
    let listener = ask(&format!("--admin {}", site.listener)).await;
    listener.failed(&[&site.listener, "is it the admin address of a gateway?"]);

    // A killed process could not remove its address.
    let data = site.data();
    let stale = causeway("status").flag("--data-dir", &data);
    let GatewayProcess { gateway, admin, .. } = &site;
    gateway.signal("KILL").await;
    crate::world::until("the gateway is gone", async || {
        std::net::TcpStream::connect(admin).is_err()
    })
    .await;
    stale
        .run()
        .await
        .failed(&[admin, "gateway", "is the process running?"]);
}

#[tokio::test]
async fn a_gateway_that_stopped_leaves_no_address_behind() {
    let site = GatewayProcess::with("timeouts: { drain: 100ms }").await;
    let data = site.data();
    site.gateway.signal("TERM").await;
    crate::world::until("the address is gone", async || {
        !data.join("run-admin").exists()
    })
    .await;
    let ask = causeway("status").flag("--data-dir", &data).run().await;
    ask.failed(&["no gateway or edge runs in", "--admin HOST:PORT"]);
}

#[tokio::test]
async fn health_is_an_exit_code_for_gateways_and_edges() {
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let of_edge = address_after(
        edge.written()
            .line(|line| line.contains("edge is running"))
            .unwrap(),
        "admin=",
    );
    let gateway = causeway("health")
        .flag("--data-dir", site.data())
        .run()
        .await;
    assert_eq!(gateway.ok().stdout, "ok\n");
    let ask = || causeway("health").env("CAUSEWAY_ADMIN", &of_edge).run();
    assert_eq!(ask().await.ok().stdout, "connected\n");
    edge.stop().await.ok();
    ask().await.failed(&[&of_edge, "is the process running?"]);
}

/// Each answer has a status, a media type and fields that the document lists, and lacks no required field.
#[tokio::test]
async fn admin_listeners_answer_as_their_openapi_documents_say() {
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let running = edge.written();
    let running = running.line(|line| line.contains("edge is running"));
    let of_edge = address_after(running.unwrap(), "admin=");
    for (side, admin, least) in [("gateway", &site.admin, 8), ("edge", &of_edge, 4)] {
        let printed = causeway("openapi").args([side]).run().await.ok().stdout;
        let mut document: Value = serde_json::from_str(&printed).unwrap();
        refuse_other_fields(&mut document);
        let client = site.nobody_at(ListenerAddress::Plain(admin.parse().unwrap()));
        let mut count = 0;
        for (path, item) in document["paths"].as_object().unwrap() {
            if item.get("get").is_none() {
                continue;
            }
            let asked = path.replace("{node}", "edge-1");
            let answer = client.get(&format!("http://{admin}{asked}")).await;
            let media_type = answer.field("content-type").split(';').next().unwrap();
            let at = ["", "paths", path, "get", "responses"]
                .map(escape)
                .join("/");
            let rest = ["content", media_type, "schema"].map(escape).join("/");
            let at = format!("{at}/{}/{rest}", answer.status);
            assert!(document.pointer(&at).is_some(), "{side}: {at}: {answer}");
            if media_type.ends_with("json") {
                validate(&document, &at, &answer.json());
            }
            count += 1;
        }
        assert!(count >= least, "{side}: {count}");
    }
}

/// Returns the text as a segment of a JSON pointer (RFC 6901).
fn escape(segment: &str) -> String {
    segment.replace('~', "~0").replace('/', "~1")
}

fn refuse_other_fields(document: &mut Value) {
    let schemas = document["components"]["schemas"].as_object_mut().unwrap();
    for schema in schemas.values_mut() {
        if schema.get("properties").is_some() {
            schema["additionalProperties"] = false.into();
        }
    }
}

fn validate(document: &Value, at: &str, value: &Value) {
    let mut compiler = boon::Compiler::new();
    compiler
        .add_resource("openapi.json", document.clone())
        .unwrap();
    let mut schemas = boon::Schemas::new();
    // A pointer in the fragment of a URL.
    let at = at.replace('{', "%7B").replace('}', "%7D");
    let index = compiler.compile(&format!("openapi.json#{at}"), &mut schemas);
    if let Err(error) = schemas.validate(value, index.unwrap()) {
        panic!("{at}: {error:#}\n{value:#}");
    }
}

async fn status(site: &GatewayProcess, line: &str) -> ExitedProcess {
    let ask = causeway("status").args(line.split_whitespace());
    ask.flag("--data-dir", site.data()).run().await.ok()
}
