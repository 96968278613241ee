//! Streams that are open end when their client may no longer have them, and others do not.

use crate::{
    road::URL,
    world::{
        LIFE, World,
        app::{App, Script, answer},
        caller::{Caller, Wire, exchange, read},
        gateway::{anonymous, front},
        until,
    },
};
use causeway_certs::{Ca, Certificate, Leaf};
use causeway_gateway::{
    config::{Callers, Front, Kind, Serial, policy},
    state::{Policy, PolicyWriter},
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const UPGRADE: &str =
    "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";

/// An app that echoes sessions, and sends downloads without an end.
async fn app() -> App {
    App::http(|head| match head.path().as_str() {
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        "/endless" => answer::endless(),
        _ => answer::ok("it"),
    })
    .await
}

/// Opens a session through an upgrade, with further `fields`.
async fn session(caller: &Caller, fields: &str) -> impl Wire + use<> {
    let mut wire = caller.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let head = exchange(&mut wire, &format!("{UPGRADE}{fields}\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut wire, 5).await, b"hello");
    wire
}

/// Checks that bytes go there and back.
async fn echoes(wire: &mut impl Wire) {
    wire.write_all(b"ping").await.unwrap();
    assert_eq!(read(wire, 4).await, b"ping");
}

/// Waits until the gateway has ended a connection, by a reset and not in order.
async fn is_reset(wire: &mut impl Wire) {
    let mut rest = [0; 4096];
    loop {
        match wire.read(&mut rest).await {
            Ok(0) => panic!("it ended in order"),
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

fn compiled(rules: &Value) -> Policy {
    let policy: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    Policy::compile(&policy).unwrap()
}

/// Returns the access record of a session that was refused afterwards.
async fn refused(world: &World, reason: &str) -> Value {
    let mut found = None;
    until("it is recorded why", async || {
        let records = world.log().records();
        let mut refused = records
            .into_iter()
            .filter(|record| record["reason"] == reason);
        found = refused.next_back();
        found.is_some()
    })
    .await;
    found.unwrap()
}

#[tokio::test]
async fn a_policy_that_denies_what_is_open_ends_it_with_the_reason_and_nothing_else() {
    let may = json!([{ "then": "allow" }]);
    let rules = PolicyWriter::new(Some(compiled(&may)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let denied = world.caller();
    let other = world.caller().certificate(&world.caller_leaf("other"));
    let (mut first, mut stays) = (session(&denied, "").await, session(&other, "").await);
    let mut download = denied.clone().http2().connect("edge-1").await.unwrap();
    let request = hyper::Request::get("https://edge-1:9100/endless");
    let request = request.body(crate::world::caller::whole("")).unwrap();
    let body = download.open(request).await.unwrap().into_body();
    echoes(&mut first).await;
    rules.replace(Some(compiled(&json!([
        { "who": { "users": ["tester"] }, "then": "deny" },
        { "then": "allow" },
    ]))));
    is_reset(&mut first).await;
    let cut = http_body_util::BodyExt::collect(body).await;
    assert!(cut.is_err(), "a download over HTTP/2 ends as well");
    echoes(&mut stays).await;
    let record = refused(&world, "forbidden").await;
    assert_eq!(
        (&record["caller"], &record["rule"]),
        (&json!("tester"), &json!("rules[0]"))
    );
    // Rules that allow it still end nothing.
    rules.replace(Some(compiled(&may)));
    let mut again = session(&denied, "").await;
    rules.replace(Some(compiled(
        &json!([{ "who": { "groups": ["system:authenticated"] }, "then": "allow" }]),
    )));
    until("the rules were looked at", async || {
        world.caller().get(URL).await.status == 200
    })
    .await;
    echoes(&mut again).await;
    echoes(&mut stays).await;
}

#[tokio::test]
async fn a_client_that_reads_nothing_loses_its_download_as_well() {
    let may = json!([{ "then": "allow" }]);
    let rules = PolicyWriter::new(Some(compiled(&may)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let caller = world.caller();
    let mut http1 = caller.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let request = "GET /endless HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    http1.write_all(request.as_bytes()).await.unwrap();
    let mut http2 = caller.clone().http2().connect("edge-1").await.unwrap();
    let request = hyper::Request::get("https://edge-1:9100/endless");
    let request = request.body(crate::world::caller::whole("")).unwrap();
    let unread = http2.open(request).await.unwrap();
    until("both stand still", async || {
        world.metrics().await.sum("stalled_streams", &[]) == 2
    })
    .await;
    rules.replace(Some(compiled(&json!([]))));
    world.until_idle().await;
    drop((http1, unread));
}

#[tokio::test]
async fn sessions_over_connect_and_tcp_end_as_well() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let tcp = Front {
        node: Some("edge-1".to_owned()),
        port: Some(22),
        ..anonymous("bytes", Kind::Tcp)
    };
    let build = World::build().policy(rules.reader()).front(tcp);
    let world = build.front(front("connect", Kind::Connect)).start().await;
    let app = App::tcp(Script::new().echo()).await;
    let _edge = world.edge("edge-1").port(22, app.address()).join().await;
    let mut bytes = tokio::net::TcpStream::connect(world.front("bytes"))
        .await
        .unwrap();
    echoes(&mut bytes).await;
    let connect = world.caller_at("connect");
    let mut through = connect.tls_stream("edge-1", &[]).await.unwrap();
    let head = exchange(
        &mut through,
        "CONNECT edge-1:22 HTTP/1.1\r\nHost: edge-1:22\r\n\r\n",
    )
    .await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    echoes(&mut through).await;
    rules.replace(Some(compiled(&json!([{ "then": "deny" }]))));
    is_reset(&mut bytes).await;
    is_reset(&mut through).await;
    world.until_idle().await;
}

/// A listener that takes certificates of another CA, and one of them.
fn of_another_ca(world: &std::path::Path, ca: &Ca) -> Front {
    let file = world.join("clients.pem");
    std::fs::write(&file, ca.root_pem()).unwrap();
    Front {
        callers: Callers {
            client_ca: vec![file],
            ..Callers::default()
        },
        ..front("clients", Kind::Https)
    }
}

fn serial(leaf: &Leaf) -> Serial {
    let certificate = Certificate::read(&leaf.chain()[0]).unwrap();
    Serial::try_from(certificate.serial_hex().to_uppercase()).unwrap()
}

#[tokio::test]
async fn a_certificate_that_is_revoked_ends_its_sessions_and_begins_nothing_new() {
    let build = World::build();
    let ca = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let listener = of_another_ca(build.folder(), &ca);
    let mut world = build.front(listener).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let leaves = ["ann", "bob"].map(|name| ca.issue_caller(name, &[], LIFE).unwrap());
    let [ann, bob] = [0, 1].map(|index| world.caller_at("clients").certificate(&leaves[index]));
    let (mut revoked, mut stays) = (session(&ann, "").await, session(&bob, "").await);
    let mut kept = ann.connect("edge-1").await.unwrap();
    assert_eq!(kept.get(URL).await.unwrap().status, 200);
    let listed = serial(&leaves[0]);
    let changed = world.reload(|config| {
        let listener = config
            .fronts
            .iter_mut()
            .find(|front| front.name == "clients");
        listener.unwrap().callers.revoked = vec![listed];
    });
    changed.unwrap();
    is_reset(&mut revoked).await;
    let answer = ann.get(URL).await;
    assert_eq!(answer.status, 401);
    assert!(
        answer.text().contains("certificate: revoked"),
        "{}",
        answer.text()
    );
    echoes(&mut stays).await;
    assert_eq!(bob.get(URL).await.status, 200);
    refused(&world, "unauthenticated").await;
    // The listener moves, and takes certificates of another CA there.
    let next = Ca::create(&"next.test".parse().unwrap()).unwrap();
    std::fs::write(world.folder().join("clients.pem"), next.root_pem()).unwrap();
    let changed = world.reload(|config| {
        let listener = config
            .fronts
            .iter_mut()
            .find(|front| front.name == "clients");
        listener.unwrap().listen = "127.0.0.2:0"
            .parse::<std::net::SocketAddr>()
            .unwrap()
            .into();
    });
    assert_eq!(changed.unwrap().fronts.opened, ["clients"]);
    is_reset(&mut stays).await;
}

#[tokio::test]
async fn a_certificate_that_expires_ends_its_sessions_where_the_listener_says_so() {
    let build = World::build();
    let ca = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let ends = of_another_ca(build.folder(), &ca);
    let keeps = Front {
        name: "keeps".to_owned(),
        disconnect_expired: false,
        ..ends.clone()
    };
    let world = build.front(ends).front(keeps).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    // Time is the subject: long enough for a slow machine to begin both sessions.
    let leaf = ca
        .issue_caller("ann", &[], Duration::from_secs(10))
        .unwrap();
    let [ends, keeps] = ["clients", "keeps"].map(|name| world.caller_at(name).certificate(&leaf));
    let (mut ended, mut kept) = (session(&ends, "").await, session(&keeps, "").await);
    let mut connection = ends.connect("edge-1").await.unwrap();
    assert_eq!(connection.get(URL).await.unwrap().status, 200);
    is_reset(&mut ended).await;
    let answer = connection.get(URL).await.unwrap();
    assert_eq!(answer.status, 401, "on a connection that is kept as well");
    assert!(
        answer.text().contains("certificate: expired at"),
        "{}",
        answer.text()
    );
    echoes(&mut kept).await;
    refused(&world, "unauthenticated").await;
}
