//! Clients that authenticate by JWT, and the identity of clients that upstreams receive, for each authentication method.

use crate::forwarding_headers::script;
use crate::hostile::one_chunked_request;
use crate::world::{
    GATEWAY_NAME, World,
    app::App,
    client::{Client, assert_problem, exchange, whole},
    gateway::{Build, fixed, listener},
    issuer::{Issuer, Key, claims, now},
    tool::{Tool, ToolOutput, need},
    until,
};
use causeway_gateway::config::{
    ClientAuth, IdentityHeaders, Jwks, Jwt, Listener, ListenerProtocol,
};
use hyper::Request;
use serde_json::json;
use std::fs;
use tokio::net::TcpListener;

const URL: &str = "https://edge-1:9100/";

/// An `https` listener for JWTs of this issuer, with further keys of `client_auth`.
fn jwts(jwt: Jwt, clients: ClientAuth) -> Listener {
    Listener {
        client_auth: ClientAuth {
            own_ca: false,
            jwt: vec![jwt],
            ..clients
        },
        ..listener("jwt", ListenerProtocol::Https)
    }
}

fn told() -> IdentityHeaders {
    IdentityHeaders {
        user: Some("X-Remote-User".to_owned()),
        groups: Some("X-Remote-Group".to_owned()),
        ..IdentityHeaders::default()
    }
}

/// Checks that no line of any log, including the audit log, contains a part of these tokens.
fn assert_untold(world: &World, tokens: &[&str]) {
    let log = world.log().text();
    assert!(log.contains("\"access\""), "there is a log: {log}");
    for token in tokens {
        for part in token.split('.') {
            assert!(part.len() > 20 && !log.contains(part), "{part}: {log}");
        }
    }
}

/// curl that shows this token to the listener `jwt`.
async fn curl(world: &World, token: &str) -> ToolOutput {
    let to = format!("::{}", world.listener("jwt"));
    let bearer = format!("Authorization: Bearer {token}");
    let curl = Tool::curl()
        .args(["--cacert".into(), world.root_path()])
        .args(["--connect-to", &to, "-H", &bearer])
        .args(["-w", "\n%{http_code}", URL]);
    curl.run().await.ok()
}

/// Returns its status and its body.
fn status_and_body(ran: &ToolOutput) -> (u16, String) {
    let text = ran.text();
    let (body, status) = text.rsplit_once('\n').unwrap();
    (status.parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn rotated_keys_are_loaded_and_outlast_their_issuer() {
    need!("curl");
    let (old, new) = (Key::new("old"), Key::new("new"));
    let mut issuer = Issuer::start(&old);
    let build = World::build();
    let jwt = issuer.jwt(build.folder());
    let mut world = build
        .listener(jwts(jwt, ClientAuth::default()))
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let (by_old, by_new) = (old.sign(&claims(&json!({}))), new.sign(&claims(&json!({}))));
    assert_eq!(
        status_and_body(&curl(&world, &by_old).await),
        (200, "it".to_owned())
    );
    assert_eq!(app.head().await.value("authorization"), None);
    let record = world.log().records().pop().unwrap();
    assert_eq!(
        (&record["client"], &record["by"]),
        (&json!("ann"), &json!("jwt"))
    );

    issuer.rotate(&new);
    until("the new key counts", async || {
        status_and_body(&curl(&world, &by_new).await).0 == 200
    })
    .await;
    assert_eq!(issuer.asked(), 2, "for a flood of unknown keys as for one");
    let (status, body) = status_and_body(&curl(&world, &by_old).await);
    assert!(
        status == 401 && body.contains("jwt: its issuer has no key with this id"),
        "{body}"
    );

    issuer.stop().await;
    assert_eq!(
        status_and_body(&curl(&world, &by_new).await),
        (200, "it".to_owned())
    );
    let metrics = world.metrics().await;
    assert_eq!(metrics.sum("jwks_fetches_total", &[("outcome", "ok")]), 2);
    // A new listener has the present keys, and may pass a token on.
    let changed = world.reload(|config| config.listeners[1].forward_authorization = true);
    assert_eq!(changed.unwrap().listeners.replaced, ["jwt"]);
    assert_eq!(status_and_body(&curl(&world, &by_new).await).0, 200);
    // A test above covers one of them.
    for _ in 1..app.requests() - 1 {
        app.head().await;
    }
    let passed = app.head().await.value("authorization");
    assert_eq!(passed, Some(format!("Bearer {by_new}")));
    assert_untold(&world, &[&by_old, &by_new]);
}

/// Checks that curl and a client of the tests are refused with this sentence.
async fn assert_refused(world: &World, token: &str, says: &str) {
    let (status, body) = status_and_body(&curl(world, token).await);
    let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, &problem["reason"]),
        (401, &json!("unauthenticated"))
    );
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.starts_with(says), "{says}: {detail}");
    for secret in ["elsewhere", "causeway\"", "else.test", "id.test", "masters"] {
        assert!(!detail.contains(secret), "{detail}");
    }
    let answer = world.client_at("jwt").only_bearer(token).get(URL).await;
    assert_problem(&answer, 401, "unauthenticated", says);
    let challenge = "Bearer realm=\"causeway\", error=\"invalid_token\"";
    assert_eq!(answer.field("www-authenticate"), challenge);
}

#[tokio::test]
async fn each_refusal_names_method_and_reason_without_token_content() {
    need!("curl");
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let build = World::build();
    let opaque = build.token("bob");
    let clients = ClientAuth {
        tokens: Some(build.tokens()),
        ..ClientAuth::default()
    };
    let jwt = issuer.jwt(build.folder());
    let world = build.listener(jwts(jwt, clients)).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let signed = |more| key.sign(&claims(&more));
    let good = signed(json!({}));
    let forged = Key::new("key").sign(&claims(&json!({})));
    let mut tokens = vec![good.clone(), forged.clone()];
    for (token, says) in [
        (signed(json!({ "exp": now() - 100 })), "jwt: expired at 20"),
        (
            signed(json!({ "nbf": now() + 1000 })),
            "jwt: not valid before 20",
        ),
        (
            signed(json!({ "aud": "elsewhere" })),
            "jwt: not for this audience",
        ),
        (
            signed(json!({ "iss": "https://else.test" })),
            "jwt: its issuer is not configured for this listener",
        ),
        (
            signed(json!({ "groups": ["system:masters"] })),
            "jwt: one of its names or groups",
        ),
        (
            Key::new("other").sign(&claims(&json!({}))),
            "jwt: its issuer has no key with this id",
        ),
        (forged, "jwt: its signature is not valid"),
        (format!("{opaque}x"), "token: not known to this listener"),
    ] {
        assert_refused(&world, &token, says).await;
        if token.matches('.').count() == 2 {
            tokens.push(token);
        }
    }
    // Each is recognised by its form.
    assert_eq!(status_and_body(&curl(&world, &good).await).0, 200);
    assert_eq!(status_and_body(&curl(&world, &opaque).await).0, 200);
    assert_eq!(app.requests(), 2, "nothing else has passed");
    let tokens: Vec<_> = tokens.iter().map(String::as_str).collect();
    assert_untold(&world, &tokens);
    assert!(!world.log().text().contains(&opaque));
    let audited = world.log().text().matches("\"event\":\"refused\"").count();
    assert_eq!(audited, 16);
}

#[tokio::test]
async fn a_gateway_starts_without_keys_and_loads_them_later() {
    let key = Key::new("key");
    let mut issuer = Issuer::silent(&key);
    let build = World::build();
    let jwt = issuer.jwt(build.folder());
    let world = build
        .listener(jwts(jwt, ClientAuth::default()))
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let client = world
        .client_at("jwt")
        .only_bearer(&key.sign(&claims(&json!({}))));
    let refused = client.get(URL).await;
    assert_problem(
        &refused,
        503,
        "dependency_unavailable",
        "jwt: the keys of its issuer have not been loaded yet",
    );
    let log = world.log().text();
    assert!(
        log.contains("the keys of a JWT issuer cannot be fetched"),
        "{log}"
    );
    let failed = world.metrics().await;
    assert!(failed.sum("jwks_fetches_total", &[("outcome", "failed")]) > 0);
    issuer.answer();
    until("the keys are loaded", async || {
        client.get(URL).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn a_server_in_an_issuers_place_provides_no_keys() {
    let key = Key::new("key");
    let (there, meant) = (Issuer::start(&key), Issuer::silent(&key));
    let build = World::build();
    let jwt = Jwt {
        jwks_ca: meant.jwt(build.folder()).jwks_ca,
        ..there.jwt(&build.folder().join("there"))
    };
    let world = build
        .listener(jwts(jwt, ClientAuth::default()))
        .start()
        .await;
    let token = key.sign(&claims(&json!({})));
    let answer = world.client_at("jwt").sni(GATEWAY_NAME).only_bearer(&token);
    let refused = answer.get(URL).await;
    let says = "jwt: the keys of its issuer have not been loaded yet";
    assert_problem(&refused, 503, "dependency_unavailable", says);
    assert!(there.asked() > 0);
    let log = world.log().text();
    assert!(log.contains("TLS: invalid peer certificate"), "{log}");
}

/// The connection remembers the token, but not beyond the end of the token or of its key.
#[tokio::test]
async fn a_kept_connection_is_admitted_while_its_token_is_valid() {
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let build = World::build();
    let jwt = issuer.jwt(build.folder());
    let world = build
        .listener(jwts(jwt, ClientAuth::default()))
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for http2 in [false, true] {
        // A minute beyond its end is allowed for different clocks.
        let token = key.sign(&claims(&json!({ "exp": now() - 50 })));
        let client = world.client_at("jwt").only_bearer(&token);
        let client = if http2 { client.http2() } else { client };
        let mut kept = client.connect("edge-1").await.unwrap();
        let mut last = kept.get(URL).await.unwrap();
        assert_eq!(last.status, 200);
        until("the token has expired", async || {
            last = kept.get(URL).await.unwrap();
            last.status != 200
        })
        .await;
        assert_problem(&last, 401, "unauthenticated", "jwt: expired at ");
    }
}

#[tokio::test]
async fn key_files_are_reloaded_and_old_keys_are_rejected() {
    let (old, new) = (Key::new("key"), Key::new("key"));
    let build = World::build();
    let file = build.folder().join("keys.json");
    fs::write(&file, old.set()).unwrap();
    let jwt = Jwt::new("https://id.test", "causeway", Jwks::File(file.clone()));
    let mut world = build
        .listener(jwts(jwt, ClientAuth::default()))
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let client = |key: &Key| {
        let token = key.sign(&claims(&json!({})));
        world.client_at("jwt").only_bearer(&token)
    };
    let (by_old, by_new) = (client(&old), client(&new));
    let mut kept = by_old.connect("edge-1").await.unwrap();
    assert_eq!(kept.get(URL).await.unwrap().status, 200);
    assert_eq!(by_new.get(URL).await.status, 401);
    fs::write(&file, "{ \"keys\": [] }").unwrap();
    let refused = world.reload(|_| {}).unwrap_err().to_string();
    assert!(
        refused.contains("keys.json") && refused.contains("contains no key"),
        "{refused}"
    );
    assert_eq!(
        kept.get(URL).await.unwrap().status,
        200,
        "the state is as before"
    );
    fs::write(&file, new.set()).unwrap();
    world.reload(|_| {}).unwrap();
    assert_eq!(by_new.get(URL).await.status, 200);
    assert_eq!(by_old.get(URL).await.status, 401);
    until(
        "the connection with the old key accepts no new request",
        async || kept.get(URL).await.is_err(),
    )
    .await;
}

/// Listener that accepts all three, and sends the client's identity to the upstream.
fn telling(build: &Build, jwt: Jwt) -> Listener {
    let clients = ClientAuth {
        tokens: Some(build.tokens()),
        ..ClientAuth::default()
    };
    let mut listener = jwts(jwt, clients);
    listener.client_auth.own_ca = true;
    listener.identity_headers = told();
    listener
}

/// Adds the identity fields that a client could set to deceive an upstream.
fn lying(client: Client) -> Client {
    client
        .field("x-remote-user", "root")
        .field("X_Remote_User", "root")
        .field("x-remote-group", "admins")
        .field("x-remote_group", "admins")
        .field("x-remote-uid", "root")
        .field("x_remote_extra-scopes", "admins")
        .field("connection", "x-remote-user, x-remote-group")
}

#[tokio::test]
async fn an_upstream_gets_unforgeable_identity_and_no_credential() {
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let build = World::build();
    let opaque = build.token("bob");
    let listener = telling(&build, issuer.jwt(build.folder()));
    let world = build.listener(listener).start().await;
    let app = App::http(script).await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let token = key.sign(&claims(&json!({})));
    let at = || lying(world.client_at("jwt"));
    let own = |name: &str| world.client_leaf(name);
    let certified = at().certificate(&own("alice"));
    for (client, credential, user, groups) in [
        (
            at().only_bearer(&token),
            &token,
            "ann",
            vec!["ops", "on%20call"],
        ),
        (at().only_bearer(&opaque), &opaque, "bob", vec![]),
        // The gateway ignores the other fields of a client with a certificate, and does not pass them on.
        (
            certified.bearer("besides"),
            &"besides".to_owned(),
            "alice",
            vec![],
        ),
    ] {
        let assert_told = async |what: &str| {
            let head = app.head().await;
            assert_eq!(head.value("authorization"), None, "{what}");
            assert_eq!(head.values("x-remote-user"), [user], "{what}");
            assert_eq!(head.values("x-remote-group"), groups, "{what}");
            let text = String::from_utf8_lossy(&head.bytes).to_lowercase();
            assert!(
                !text.contains("_user") && !text.contains("_group"),
                "{text}"
            );
            assert!(!text.contains("root") && !text.contains("admins"), "{text}");
        };
        assert_eq!(client.get(URL).await.text(), "it");
        assert_told("a request").await;

        let mut wire = client.wire("edge-1", &["http/1.1"]).await.unwrap();
        let upgrade = format!(
            "GET /socket HTTP/1.1\r\nHost: edge-1:9100\r\nAuthorization: Bearer {credential}\r\n\
             X-Remote-User: root\r\nX_Remote_Group: admins\r\nX-Remote-Extra-Scopes: admins\r\nConnection: Upgrade, X-Remote-User\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        let head = exchange(&mut *wire, upgrade).await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert_told("an upgrade").await;
    }
    world.until_idle().await;
    assert_untold(&world, &[&token]);
    assert!(!world.log().text().contains(&opaque));
}

#[tokio::test]
async fn trailers_do_not_carry_client_identity() {
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let build = World::build();
    let listener = Listener {
        identity_headers: told(),
        ..jwts(issuer.jwt(build.folder()), ClientAuth::default())
    };
    let world = build.listener(listener).start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let app = listener.local_addr().unwrap();
    let _edge = world.edge("edge-1").port(9100, app).join().await;
    let token = key.sign(&claims(&json!({})));
    let request = format!(
        "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nAuthorization: Bearer {token}\r\n\
         Transfer-Encoding: chunked\r\nTrailer: x-remote-user, x-remote-group, x-remote-uid, x-forwarded-for, x-sum\r\n\r\n2\r\nab\r\n0\r\n\
         X-Remote-User: root\r\nX_Remote_User: root\r\nX-Remote-Group: admins\r\nX-Remote-Uid: 0\r\n\
         X-Forwarded-For: 192.0.2.1\r\nX-Sum: 7\r\n\r\n"
    );
    let client = world.client_at("jwt").nobody();
    let (answer, seen) = tokio::join!(client.raw("edge-1", request), one_chunked_request(listener));
    assert_eq!(answer.status, 200, "{answer}");
    let (_, trailers) = seen.split_once("\r\n0\r\n").unwrap();
    assert_eq!(trailers.to_lowercase(), "x-sum: 7\r\n\r\n");
}

#[tokio::test]
async fn a_connect_listener_accepts_a_jwt_like_a_token() {
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let build = World::build();
    let connect = Listener {
        protocol: ListenerProtocol::Connect,
        ..jwts(issuer.jwt(build.folder()), ClientAuth::default())
    };
    let bytes = fixed("bytes", ListenerProtocol::Tcp, "edge-1", 9100);
    let world = build.listener(connect).listener(bytes).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let token = key.sign(&claims(&json!({})));
    for (token, status) in [(token.as_str(), "200 "), ("a.b.c", "407 jwt: not readable")] {
        let client = world.client_at("jwt").nobody();
        let mut wire = client.wire("gateway.test", &[]).await.unwrap();
        let head = format!(
            "CONNECT edge-1:9100 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        let head = exchange(&mut *wire, head).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
    }
    let post = Request::post(URL).body(whole("")).unwrap();
    let wrong = world.client_at("jwt").only_bearer(&token).send(post).await;
    assert_eq!(wrong.status, 405);
}
