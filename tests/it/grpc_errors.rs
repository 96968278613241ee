//! Errors of the gateway and of edges as gRPC clients get them: `grpc-status` and `grpc-message` in the head.

use crate::{
    testbed::{TestBed, URL},
    world::{
        GATEWAY_NAME, World,
        app::{App, answer},
        client::{Answer, Client, assert_problem, whole},
        gateway::listener,
        tool::need,
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{ErrorFormat, Listener, ListenerProtocol},
    proxy::authz::{Authorize, AuthzDecision, AuthzRequest},
};
use hyper::Request;

async fn call(client: &Client, url: &str) -> Answer {
    let request = Request::post(url)
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers");
    client.send(request.body(whole("call")).unwrap()).await
}

/// A response of the kind "Trailers-Only", and its access record.
#[track_caller]
fn assert_grpc(answer: &Answer, code: &str, reason: &str, says: &str) {
    assert_eq!(answer.status, 200, "{answer}");
    assert_eq!(answer.field("content-type"), "application/grpc", "{answer}");
    assert_eq!(answer.field("grpc-status"), code, "{answer}");
    let message = answer.field("grpc-message");
    assert!(message.contains(says), "{says:?} is not in {message:?}");
    assert!(
        answer.body.is_empty() && answer.trailers.is_none(),
        "{answer}"
    );
    let details = format!("details=\"{reason}: ");
    assert!(answer.field("proxy-status").contains(&details), "{answer}");
    for name in ["retry-after", "www-authenticate", "allow"] {
        assert_eq!(answer.field(name), "", "{answer}");
    }
}

/// Denies one path, and cannot decide about another.
#[derive(Debug)]
struct StatusByPath;

impl Authorize for StatusByPath {
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision {
        match ask.path {
            "/denied" => AuthzDecision::Deny("100 % no, señor".into()),
            "/dependency_unavailable" => {
                AuthzDecision::DependencyUnavailable("nobody is there".into())
            }
            _ => AuthzDecision::Allow,
        }
    }
}

#[tokio::test]
async fn a_grpc_client_gets_status_and_message_of_each_error() {
    let broken = App::http(|_| answer::garbage()).await;
    let kubernetes = Listener {
        errors: ErrorFormat::Kubernetes,
        ..listener("kubernetes", ListenerProtocol::Https)
    };
    let build = World::build().listener(kubernetes).authorizer(StatusByPath);
    let world = build.start().await;
    let edge = world.edge("edge-1").port(9100, broken.address());
    let edge = edge.port(9102, App::refusing().address());
    let _edge = edge.join().await;
    let _other = world.edge("edge-2").join().await;
    for client in [
        world.client().http2(),
        world.client(),
        world.client_at("kubernetes").http2(),
    ] {
        for (url, code, reason, says) in [
            (URL, "14", "target_broken", "edge-1"),
            ("https://edge-1:9101/", "7", "edge_policy", "edge-1"),
            ("https://edge-1:9102/", "14", "target_refused", "refused"),
            (
                "https://edge-1:9100/dependency_unavailable",
                "14",
                "dependency_unavailable",
                "nobody",
            ),
            (
                "https://edge-1:9100/denied",
                "7",
                "forbidden",
                "100 %25 no, se%C3%B1or",
            ),
        ] {
            assert_grpc(&call(&client, url).await, code, reason, says);
        }
        let elsewhere = client.clone().sni(GATEWAY_NAME);
        let answer = call(&elsewhere, "https://edge-9:9100/").await;
        // Not UNIMPLEMENTED: the application has the method.
        assert_grpc(&answer, "14", "node_unknown", "edge-9");
        let answer = call(&client.clone().host("edge-2:9100"), URL).await;
        assert_grpc(&answer, "2", "misdirected", "edge-2");
        let answer = call(&client.clone().nobody(), URL).await;
        assert_grpc(&answer, "16", "unauthenticated", "");
        let twice = Request::post(URL)
            .header("content-type", "application/grpc")
            .header("authorization", "Bearer one")
            .header("authorization", "Bearer two");
        let answer = client.send(twice.body(whole("")).unwrap()).await;
        assert_grpc(&answer, "13", "malformed", "Authorization");
    }
    world.until_idle().await;
    let records = world.log().records();
    let refused = |record: &&serde_json::Value| record["reason"] == "target_refused";
    let record = records.iter().find(refused).unwrap();
    assert_eq!(record["status"], 200, "as it was sent: {record}");
}

#[tokio::test]
async fn upstream_tls_errors_are_grpc_errors_for_grpc_clients() {
    let (_app, testbed) = TestBed::secured(|_| answer::garbage()).await;
    for client in [testbed.http2(), testbed.client()] {
        assert_grpc(&call(&client, URL).await, "14", "target_broken", "edge-1");
    }
}

#[tokio::test]
async fn an_apps_own_answer_to_a_grpc_client_passes_as_it_is() {
    let (_app, testbed) =
        TestBed::secured(|_| answer::status("502 Bad Gateway", [("x-own", "1")], "no")).await;
    let answer = call(&testbed.http2(), URL).await;
    assert_eq!(answer.status, 502, "{answer}");
    assert_eq!(answer.text(), "no");
    assert_eq!(answer.field("grpc-status"), "");
}

#[tokio::test]
async fn grpc_web_goes_by_http_1_and_its_client_gets_a_problem() {
    let app = App::saying("answer").await;
    let testbed = TestBed::to(&app).await;
    let client = testbed
        .http2()
        .field("content-type", "application/grpc-web");
    assert_eq!(client.ask("POST", URL, "call").await.text(), "answer");
    let answer = client.ask("POST", "https://edge-1:9101/", "call").await;
    assert_problem(&answer, 403, "edge_policy", "edge-1");
}

#[tokio::test]
async fn a_real_grpc_client_reads_code_and_message() {
    need!("python:grpc");
    let testbed = TestBed::to_as(Protocol::H2c, App::refusing().address()).await;
    let error = async |name: &str, port: &str| {
        let client = testbed.python("grpc_client.py").args(["--error"]);
        let client = client.args(["--name", name, "--port", port]);
        client.run().await.json()
    };
    let refused = error("edge-1", "9100").await;
    assert_eq!(refused["code"], "UNAVAILABLE", "{refused}");
    let message = refused["message"].as_str().unwrap();
    assert!(message.contains("connection refused"), "{refused}");
    let not_served = error("edge-1", "9101").await;
    assert_eq!(not_served["code"], "PERMISSION_DENIED", "{not_served}");
}
