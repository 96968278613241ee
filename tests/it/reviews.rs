//! Clients that a cluster's API authenticates, and their access to kubelets.

use crate::{
    recheck::{app_of, compiled, echoes, is_reset, session},
    world::{
        GATEWAY_NAME, World,
        app::{App, Script},
        authority::Authority,
        client::{Answer, Client, Wire, assert_problem, exchange},
        edge::Edge,
        gateway::{Build, listener},
        issuer::{Issuer, Key, claims, now},
        until,
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::{
    BindError,
    config::{
        self, ClientAuth, ErrorFormat, IdentityHeaders, Listener, ListenerProtocol, TokenReview,
    },
    proxy::access_review::{ReviewAttributes, ReviewClient, ReviewError, UserInfo},
    state::{Policy, PolicyWriter},
};
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use serde_json::json;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PROM: &str = "system:serviceaccount:mon:prom";

/// A cluster: `prom` may read metrics, `root` may do everything, `slow` gets no response, and all requests fail while it is
/// `away`.
#[derive(Debug, Default)]
struct Cluster {
    away: AtomicBool,
    /// Whether `root-token` is no longer valid.
    withdrawn: AtomicBool,
    tokens: AtomicUsize,
    accesses: AtomicUsize,
}

/// The review client of the gateway.
#[derive(Debug)]
struct Api(Arc<Cluster>);

fn away() -> ReviewError {
    ReviewError {
        detail: "the cluster's API does not answer".into(),
        cause: "connection refused".into(),
    }
}

impl ReviewClient for Api {
    fn review_token(
        &self,
        token: &str,
        audiences: &[String],
    ) -> BoxFuture<'static, Result<Option<UserInfo>, ReviewError>> {
        self.0.tokens.fetch_add(1, SeqCst);
        if self.0.away.load(SeqCst) {
            return async { Err(away()) }.boxed();
        }
        let user = match (token, audiences) {
            ("prom-token", [audience]) if audience == "causeway" => PROM,
            ("root-token", _) if !self.0.withdrawn.load(SeqCst) => "root",
            // A JWT without a known holder.
            (token, _) if token.starts_with("ey") => "root",
            ("kernel-token", _) => "uid:0",
            ("own-token", _) => "spiffe://world.test/client/alice",
            ("slow-token", _) => return std::future::pending().boxed(),
            _ => return async { Ok(None) }.boxed(),
        };
        let account = UserInfo {
            user: user.to_owned(),
            uid: "1234".to_owned(),
            groups: vec![
                "system:serviceaccounts".into(),
                "system:authenticated".into(),
            ],
            extra: BTreeMap::from([("pod".to_owned(), vec!["prom-0".to_owned()])]),
        };
        async { Ok(Some(account)) }.boxed()
    }

    fn review_access(
        &self,
        access: &ReviewAttributes,
    ) -> BoxFuture<'static, Result<bool, ReviewError>> {
        self.0.accesses.fetch_add(1, SeqCst);
        if self.0.away.load(SeqCst) {
            return async { Err(away()) }.boxed();
        }
        let account = &access.account;
        let known = account.groups.contains(&"system:authenticated".to_owned());
        let allowed = match account.user.as_str() {
            PROM => {
                assert_eq!(account.uid, "1234");
                assert_eq!(account.extra["pod"], ["prom-0"]);
                (access.verb, access.subresource) == ("get", "metrics") && access.node == "edge-1"
            }
            "tester" => access.subresource == "proxy",
            "system:anonymous" => access.subresource == "healthz" && !known,
            user => user == "root",
        };
        async move { Ok(allowed) }.boxed()
    }
}

/// A listener for tokens that the cluster knows, with kubelets as targets.
fn reviewed(name: &str, kind: ListenerProtocol) -> Listener {
    Listener {
        port: Some(10250),
        subject_access_review: vec![10250],
        client_auth: ClientAuth {
            own_ca: false,
            token_review: Some(TokenReview {
                audiences: vec!["causeway".to_owned()],
            }),
            ..ClientAuth::default()
        },
        ..listener(name, kind)
    }
}

fn building() -> (Build, Arc<Cluster>) {
    let cluster = Arc::new(Cluster::default());
    let build = World::build().reviews(Api(cluster.clone()));
    // On a busy machine the API may take longer than the default time limit.
    let build = build.config(|config| config.timeouts.authorize = Duration::from_mins(1));
    let build = build
        .listener(reviewed("reviewed", ListenerProtocol::Https))
        .listener(reviewed("clear", ListenerProtocol::Http));
    let build = build.listener(Listener {
        errors: ErrorFormat::Kubernetes,
        ..reviewed("kubernetes", ListenerProtocol::Https)
    });
    (build, cluster)
}

async fn world() -> (World, Arc<Cluster>) {
    let (build, cluster) = building();
    (build.start().await, cluster)
}

async fn kubelet(world: &World, app: &App) -> Edge {
    let edge = world.edge("edge-1").port(10250, app.address());
    edge.port(9100, app.address()).join().await
}

fn client(world: &World, token: &str) -> Client {
    world.client_at("reviewed").only_bearer(token)
}

async fn get(world: &World, token: &str, path: &str) -> Answer {
    let url = format!("https://edge-1:10250{path}");
    client(world, token).get(&url).await
}

#[tokio::test]
async fn an_authenticated_token_may_do_what_the_cluster_allows() {
    let (mut world, cluster) = world().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    assert_eq!(get(&world, "prom-token", "/metrics").await.text(), "it");
    assert_eq!(app.head().await.value("authorization"), None);
    let record = world.log().records().pop().unwrap();
    assert_eq!(
        (&record["client"], &record["by"]),
        (&json!(PROM), &json!("token_review"))
    );
    let refused = "does not allow system:serviceaccount:mon:prom";
    for path in ["/exec/a/web/app", "/stats/summary", "/pods", "/"] {
        let answer = get(&world, "prom-token", path).await;
        assert_problem(&answer, 403, "forbidden", refused);
    }
    let url = "https://edge-1:10250/metrics";
    let posted = client(&world, "prom-token").ask("POST", url, "").await;
    assert_problem(&posted, 403, "forbidden", "create nodes/metrics of edge-1");
    assert_eq!(get(&world, "root-token", "/exec/a/b/c").await.status, 200);
    let in_words = world.client_at("kubernetes").only_bearer("prom-token");
    let answer = in_words.get("https://edge-1:10250/exec/a/web/app").await;
    assert_eq!(answer.status, 502);
    assert!(answer.text().contains(refused), "{answer}");

    // With this setting a listener passes the token on, and names its holder; other ports are not reviewed.
    let told = world.reload(|config| {
        let listener = config
            .listeners
            .iter_mut()
            .find(|listener| listener.name == "reviewed");
        let listener = listener.unwrap();
        listener.forward_authorization = true;
        listener.identity_headers = IdentityHeaders {
            user: Some("X-Remote-User".to_owned()),
            groups: Some("X-Remote-Group".to_owned()),
            ..IdentityHeaders::default()
        };
    });
    assert_eq!(told.unwrap().listeners.replaced, ["reviewed"]);
    let (asked, of_access) = (cluster.tokens.load(SeqCst), cluster.accesses.load(SeqCst));
    let url = "https://edge-1:9100/exec";
    assert_eq!(client(&world, "prom-token").get(url).await.status, 200);
    assert_eq!(
        cluster.tokens.load(SeqCst),
        asked,
        "known answers stay valid"
    );
    assert_eq!(cluster.accesses.load(SeqCst), of_access);
    for _ in 1..app.requests() - 1 {
        app.head().await;
    }
    let head = app.head().await;
    let value = |name| head.value(name).unwrap();
    assert_eq!(value("authorization"), "Bearer prom-token");
    assert_eq!(value("x-remote-user"), PROM);
    assert_eq!(value("x-remote-group"), "system:serviceaccounts");
    let log = world.log().text();
    assert!(!log.contains("prom-token"), "{log}");
}

/// An address that no edge serves may belong to any node's kubelet, and is reviewed as such.
#[tokio::test]
async fn direct_dials_need_permission_from_the_cluster() {
    let cluster = Arc::new(Cluster::default());
    let app = App::tcp(Script::new().echo()).await;
    let port = app.port();
    let build = World::build().reviews(Api(cluster.clone()));
    let build = build.listener(Listener {
        port: None,
        direct_networks: vec!["127.0.0.0/8".parse().unwrap()],
        subject_access_review: vec![port],
        ..reviewed("direct", ListenerProtocol::Connect)
    });
    let world = build.start().await;
    let connect = async |token: &str, host: &str| {
        let head = format!(
            "CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        let client = world.client_at("direct").nobody();
        let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
        exchange(&mut wire, head).await
    };
    for host in ["127.0.0.1", "localhost"] {
        let answer = connect("prom-token", host).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{host}: {answer}");
        assert!(
            answer.contains("create nodes/proxy of any node"),
            "{answer}"
        );
    }
    assert_eq!(app.connections(), 0);
    for host in ["127.0.0.1", "localhost"] {
        let answer = connect("root-token", host).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{host}: {answer}");
    }
    cluster.away.store(true, SeqCst);
    let answer = connect("wrong-token", "127.0.0.1").await;
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
}

#[tokio::test]
async fn an_unknown_or_wrong_audience_token_is_401() {
    let (world, cluster) = world().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    let others = "token_review: one of its names or groups";
    for (token, says) in [
        (
            "wrong-token",
            "token_review: the cluster does not accept the token",
        ),
        ("kernel-token", others),
        ("own-token", others),
    ] {
        let answer = get(&world, token, "/metrics").await;
        assert_problem(&answer, 401, "unauthenticated", says);
        let challenge = "Bearer realm=\"causeway\", error=\"invalid_token\"";
        assert_eq!(answer.field("www-authenticate"), challenge);
    }
    let nobody = world.client_at("reviewed").nobody();
    let answer = nobody.get("https://edge-1:10250/metrics").await;
    assert_problem(&answer, 401, "unauthenticated", "requires a bearer token");
    assert_eq!(cluster.accesses.load(SeqCst), 0);
    assert_eq!(app.requests(), 0);
}

#[tokio::test]
async fn each_token_uses_one_method_and_the_cluster_is_asked_last() {
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let (build, cluster) = building();
    let opaque = build.token("bob");
    let all = reviewed("reviewed", ListenerProtocol::Https);
    let clients = ClientAuth {
        tokens: Some(build.tokens()),
        jwt: vec![issuer.jwt(build.folder())],
        ..all.client_auth.clone()
    };
    let build = build.listener(Listener {
        client_auth: clients,
        subject_access_review: Vec::new(),
        ..all
    });
    let world = build.start().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    let signed = |key: &Key, more| key.sign(&claims(&more));
    let forged = signed(&Key::new("key"), json!({}));
    for (token, status, by, asked) in [
        (signed(&key, json!({})), 200, "jwt", 0),
        (opaque.clone(), 200, "token", 0),
        (forged, 401, "-", 0),
        (
            signed(&key, json!({ "iss": "https://cluster.test" })),
            200,
            "token_review",
            1,
        ),
        ("prom-token".to_owned(), 200, "token_review", 2),
        (format!("{opaque}x"), 401, "-", 3),
    ] {
        let answer = get(&world, &token, "/").await;
        assert_eq!(answer.status, status, "{by}: {answer}");
        assert_eq!(world.log().records().pop().unwrap()["by"], by);
        assert_eq!(cluster.tokens.load(SeqCst), asked, "{by}");
    }
    let over = signed(
        &key,
        json!({ "iss": "https://cluster.test", "exp": now() - 1 }),
    );
    assert_eq!(get(&world, &over, "/").await.status, 401);
    assert_eq!(
        cluster.tokens.load(SeqCst),
        3,
        "the API got no request about it"
    );
}

#[tokio::test]
async fn of_a_thousand_clients_the_cluster_is_asked_once() {
    let (world, cluster) = world().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    let client = world.client_at("clear").nobody().bearer("prom-token");
    let asked = (0..1_000).map(|_| client.get("http://edge-1:10250/metrics"));
    let answers = join_all(asked).await;
    for answer in answers {
        assert_eq!(answer.status, 200, "{answer}");
    }
    assert_eq!(cluster.tokens.load(SeqCst), 1);
    assert_eq!(cluster.accesses.load(SeqCst), 1);
    let metrics = world.metrics().await;
    for question in ["token", "access"] {
        let labels = [("question", question), ("outcome", "allowed")];
        assert_eq!(metrics.sum("reviews_total", &labels), 1);
    }
}

#[tokio::test]
async fn no_new_client_is_admitted_while_the_api_is_away() {
    let (build, cluster) = building();
    let bound = Duration::from_millis(300);
    let build = build.config(|config| config.timeouts.authorize = bound);
    let world = build.start().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    let answer = get(&world, "slow-token", "/metrics").await;
    let says = "your identity could not be reviewed: the cluster's API did not answer within 300ms";
    assert_problem(&answer, 503, "dependency_unavailable", says);
    assert_eq!(get(&world, "prom-token", "/metrics").await.status, 200);
    cluster.away.store(true, SeqCst);
    let answer = get(&world, "root-token", "/metrics").await;
    let says = "your identity could not be reviewed: the cluster's API does not answer";
    assert_problem(&answer, 503, "dependency_unavailable", says);
    assert_eq!(
        get(&world, "prom-token", "/metrics").await.status,
        200,
        "the known state still counts"
    );
    let answer = get(&world, "prom-token", "/exec/a/b/c").await;
    let says = "your permission for this request could not be reviewed";
    assert_problem(&answer, 503, "dependency_unavailable", says);
    let log = world.log().text();
    assert!(log.contains("clients cannot be reviewed"), "{log}");
    assert!(log.contains("connection refused"), "{log}");
    assert_eq!(app.requests(), 2);
    cluster.away.store(false, SeqCst);
    until("the API gets another request", async || {
        get(&world, "root-token", "/metrics").await.status == 200
    })
    .await;
    assert!(world.log().text().contains("clients can be reviewed again"));
}

#[tokio::test]
async fn an_expired_permission_is_reviewed_again_on_a_kept_connection() {
    let (build, cluster) = building();
    let build = build.config(|config| {
        config.kubernetes = Some(config::Kubernetes {
            review_allowed_for: Duration::from_millis(100),
            token_allowed_for: Duration::from_millis(100),
            ..config::Kubernetes::default()
        });
    });
    let world = build.start().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    let mut kept = client(&world, "prom-token")
        .connect("edge-1")
        .await
        .unwrap();
    until("both are requested again", async || {
        let answer = kept.get("https://edge-1:10250/metrics").await.unwrap();
        assert_eq!(answer.status, 200);
        cluster.tokens.load(SeqCst) > 2 && cluster.accesses.load(SeqCst) > 2
    })
    .await;
}

#[tokio::test]
async fn no_spelling_of_a_path_gets_more_than_all_of_a_kubelet_would() {
    let (build, _) = building();
    let build = build.listener(Listener {
        port: Some(10250),
        subject_access_review: vec![10250],
        ..listener("certificates", ListenerProtocol::Https)
    });
    let world = build.start().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    for path in [
        "/metrics/../exec/a/b/c",
        "/metrics/%2e%2e/exec/a/b/c",
        "/metrics%2f..%2fexec/a/b/c",
        "//metrics",
        "/metrics//",
        "/./metrics",
        "/metrics;/../exec",
        "/metrics%5c..%5cexec",
        "/%256detrics",
    ] {
        let request =
            |bearer: &str| format!("GET {path} HTTP/1.1\r\nHost: edge-1:10250\r\n{bearer}\r\n");
        let reads_metrics = world.client_at("reviewed").nobody();
        let bearer = "Authorization: Bearer prom-token\r\n";
        let answer = reads_metrics.raw("edge-1", request(bearer)).await;
        assert_problem(&answer, 403, "forbidden", "get nodes/proxy of edge-1");
        // The cluster allows this client nodes/proxy, the resource of all paths that have no resource of their own.
        let all = world.client_at("certificates");
        let answer = all.raw("edge-1", request("")).await;
        assert_eq!(answer.status, 200, "{path}: {answer}");
    }
    let all = world.client_at("certificates");
    let answer = all.get("https://edge-1:10250/metrics").await;
    assert_problem(&answer, 403, "forbidden", "get nodes/metrics");
    assert_eq!(app.requests(), 9);
}

#[tokio::test]
async fn policy_and_cluster_must_both_allow_each_kind_of_stream() {
    let rules = json!({ "rules": [
        { "who": { "users": ["system:*"] }, "what": { "paths": ["/metrics/cadvisor"] }, "then": "allow" },
        { "who": { "users": ["root", "system:anonymous"] }, "then": "allow" },
    ] });
    let rules = Policy::compile(&serde_json::from_value(rules).unwrap()).unwrap();
    let policy = PolicyWriter::new(Some(rules));
    let (build, cluster) = building();
    let build = build
        .policy(policy.reader())
        .listener(reviewed("connect", ListenerProtocol::Connect));
    let build = build.listener(Listener {
        anonymous: true,
        ..reviewed("open", ListenerProtocol::Https)
    });
    let world = build.start().await;
    let app = App::saying("it").await;
    let _edge = kubelet(&world, &app).await;
    for (path, status) in [("/metrics", 403), ("/metrics/cadvisor", 200)] {
        let answer = get(&world, "prom-token", path).await;
        assert_eq!(answer.status, status, "{path}: {answer}");
    }
    assert_eq!(cluster.accesses.load(SeqCst), 1, "the policy comes first");
    assert_eq!(get(&world, "root-token", "/exec/a/b/c").await.status, 200);
    let upgrade = |token: &str| {
        format!(
            "GET /exec/a/b/c HTTP/1.1\r\nHost: edge-1:10250\r\nAuthorization: Bearer {token}\r\n\
             Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
    };
    let nobody = world.client_at("reviewed").nobody();
    let answer = nobody.raw("edge-1", upgrade("prom-token")).await;
    assert_eq!(answer.status, 403, "{answer}");
    let open = world.client_at("open").nobody();
    let answer = open.get("https://edge-1:10250/healthz").await;
    assert_eq!(answer.status, 200, "{answer}");
    let answer = open.get("https://edge-1:10250/metrics").await;
    assert_problem(&answer, 403, "forbidden", "nodes/metrics");
    let connect = |token: &str| {
        format!("CONNECT edge-1:10250 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n")
    };
    let client = world.client_at("connect").nobody();
    let answer = client.raw("gateway.test", connect("prom-token")).await;
    assert_eq!(answer.status, 403, "{answer}");
    let answer = client.raw("gateway.test", connect("root-token")).await;
    assert_eq!(answer.status, 200, "{answer}");
}

#[tokio::test]
async fn a_gateway_client_certificate_replaces_the_forwarded_token() {
    let authority = Authority::new();
    let client = authority.client("gateway");
    let (build, _) = building();
    let app_files = crate::apps::asked(build.folder(), &authority, Some(&client));
    let build = build.config(|config| drop(config.upstream_tls.insert(10250, app_files)));
    let build = build.listener(Listener {
        forward_authorization: true,
        ..reviewed("reviewed", ListenerProtocol::Https)
    });
    let world = build.start().await;
    let leaf = authority.app(&["edge-1"]);
    let app = App::https(authority.serve(&leaf, true), crate::apps::by_path).await;
    let edge = world.edge("edge-1");
    let edge = edge.port_as(10250, Protocol::Tcp, app.address());
    let _edge = edge.join().await;
    assert_eq!(get(&world, "prom-token", "/metrics").await.text(), "well");
    assert_eq!(app.head().await.value("authorization"), None);
}

#[tokio::test]
async fn a_reviewing_listener_needs_a_cluster() {
    let mut world = World::start().await;
    let refused = world.reload(|config| {
        config
            .listeners
            .push(reviewed("reviewed", ListenerProtocol::Https));
    });
    let Err(BindError::Name(why)) = refused else {
        panic!("{refused:?}");
    };
    assert!(
        why.contains("listener \"reviewed\" needs the API of a cluster"),
        "{why}"
    );
}

/// Begins a session with a token. Returns `None` if the token expires before the session has begun.
async fn begin_session(client: &Client, token: &str) -> Option<impl Wire + use<>> {
    let mut wire = client.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let head = format!(
        "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nAuthorization: Bearer {token}\r\n\
         Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n"
    );
    wire.write_all(head.as_bytes()).await.ok()?;
    wire.flush().await.ok()?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(wire.read_u8().await.ok()?);
    }
    if !answer.starts_with(b"HTTP/1.1 101 ") {
        return None;
    }
    let mut hello = [0; 5];
    wire.read_exact(&mut hello).await.ok()?;
    Some(wire)
}

/// Returns a token that expires soon, and sessions of it at the listeners `reviewed` and `keeps`.
async fn sessions_with_expiring_token(
    world: &World,
) -> (String, impl Wire + use<>, impl Wire + use<>) {
    let key = Key::new("cluster");
    // Time is the subject. A machine that needs longer to begin both sessions gets a token for longer.
    let mut lifetime = 4;
    loop {
        lifetime *= 2;
        let token = key.sign(&claims(&json!({ "exp": now() + lifetime })));
        let ends = begin_session(&world.client_at("reviewed").nobody(), &token).await;
        let keeps = begin_session(&world.client_at("keeps").nobody(), &token).await;
        if let (Some(ends), Some(keeps)) = (ends, keeps) {
            return (token, ends, keeps);
        }
        assert!(lifetime < 60, "no session begins");
    }
}

#[tokio::test]
async fn the_end_of_a_reviewed_token_ends_its_session_as_configured() {
    let (build, cluster) = building();
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let build = build.policy(rules.reader()).config(|config| {
        config.kubernetes = Some(config::Kubernetes {
            token_allowed_for: Duration::from_millis(100),
            ..config::Kubernetes::default()
        });
    });
    let mut world = build
        .listener(Listener {
            disconnect_expired: false,
            ..reviewed("keeps", ListenerProtocol::Https)
        })
        .start()
        .await;
    let app = App::http(app_of).await;
    let _edge = kubelet(&world, &app).await;
    let (token, mut ends, mut keeps) = sessions_with_expiring_token(&world).await;
    let fields = "Authorization: Bearer root-token\r\n";
    let mut withdrawn = session(&world.client_at("keeps").nobody(), fields).await;
    is_reset(&mut ends).await;
    let answer = world.client_at("keeps").only_bearer(&token);
    let answer = answer.get("https://edge-1:9100/").await;
    assert_problem(&answer, 401, "unauthenticated", "token_review: ");
    // Another reason to check all of them.
    cluster.withdrawn.store(true, SeqCst);
    rules.replace(Some(compiled(&json!([{ "then": "allow" }]))));
    is_reset(&mut withdrawn).await;
    echoes(&mut keeps).await;
    // The API has received no request about these audiences.
    let change = |config: &mut config::Config| {
        let mut listeners = config.listeners.iter_mut();
        let listener = listeners.find(|listener| listener.name == "keeps").unwrap();
        let review = listener.client_auth.token_review.as_mut().unwrap();
        review.audiences = vec!["others".to_owned()];
    };
    world.reload(change).unwrap();
    is_reset(&mut keeps).await;
}
