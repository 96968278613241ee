//! A kube-apiserver that does not verify kubelets' certificates: the pod in its path is the only name of the node.

use crate::world::{
    GATEWAY_NAME, World,
    app::App,
    client::{Answer, Client, assert_problem},
    gateway::listener,
};
use causeway_certs::NodeName;
use causeway_gateway::{
    config::{ErrorFormat, Listener, ListenerProtocol},
    proxy::pod_route::PodLookup,
};
use futures_util::{FutureExt, future::BoxFuture};
use std::{borrow::Cow, time::Duration};

/// One pod on each node, and one for which no edge is connected.
#[derive(Debug)]
struct KnownPods;

impl PodLookup for KnownPods {
    fn find_node(
        &self,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<NodeName, Cow<'static, str>>> {
        let node = match (namespace, name) {
            ("a", "web") => "edge-1",
            ("b", "web") => "edge-2",
            ("c", "web") => "cloud-1",
            ("slow", _) => return std::future::pending().boxed(),
            _ => return async { Err("pods \"x\" not found".into()) }.boxed(),
        };
        let node = NodeName::parse(node).unwrap();
        async move { Ok(node) }.boxed()
    }
}

async fn world() -> World {
    let api = Listener {
        errors: ErrorFormat::Kubernetes,
        port: Some(10250),
        ..listener("api", ListenerProtocol::Https)
    };
    let open = Listener {
        anonymous: true,
        ..api.clone()
    };
    let open = Listener {
        name: "open".into(),
        ..open
    };
    let build = World::build().pods(KnownPods).listener(api).listener(open);
    let build = build.listener(Listener {
        port: Some(10250),
        ..listener("others", ListenerProtocol::Https)
    });
    let bound = Duration::from_millis(300);
    let build = build.config(|config| config.timeouts.authorize = bound);
    build.start().await
}

/// As kube-apiserver does: no name in the handshake, and its own Host.
fn apiserver(world: &World, listener: &str) -> Client {
    let client = world.client_at(listener).sni(GATEWAY_NAME);
    client.host("10.97.0.1:6443")
}

async fn ask(world: &World, listener: &str, path: &str) -> Answer {
    let url = format!("https://gateway{path}");
    apiserver(world, listener).get(&url).await
}

#[tokio::test]
async fn the_pod_in_the_path_selects_the_node_as_a_last_resort() {
    let world = world().await;
    let (one, two) = (App::saying("one").await, App::saying("two").await);
    let _one = world.edge("edge-1").port(10250, one.address()).join().await;
    let _two = world.edge("edge-2").port(10250, two.address()).join().await;
    for (path, text) in [
        ("/exec/a/web/app?command=true", "one"),
        ("/portForward/b/web", "two"),
        ("/containerLogs/a/web/app?follow=true", "one"),
        ("/attach/b/web/app", "two"),
    ] {
        assert_eq!(ask(&world, "api", path).await.text(), text, "{path}");
    }
    assert_eq!(one.head().await.value("host").unwrap(), "10.97.0.1:6443");
    // A name in the handshake takes precedence over the path.
    let named = apiserver(&world, "api").sni("edge-2");
    let answer = named.get("https://gateway/exec/a/web/app").await;
    assert_eq!(answer.text(), "two");
}

#[tokio::test]
async fn a_pod_that_is_nowhere_is_502_with_the_sentence_and_in_time() {
    let world = world().await;
    for (path, sentence) in [
        ("/exec/a/nobody/app", "pods \"x\" not found"),
        (
            "/exec/c/web/app",
            "pod c/web is on cloud-1, which is not an edge node",
        ),
        (
            "/exec/slow/web/app",
            "pod slow/web was not found within 300ms",
        ),
        ("/exec/a", "no node"),
        ("/pods", "no node"),
    ] {
        let answer = ask(&world, "api", path).await;
        assert_eq!(answer.status, 502, "{path}: {answer}");
        let text = answer.text();
        assert!(text.contains(sentence), "{path}: {text}");
    }
}

#[tokio::test]
async fn only_authenticated_kube_apiserver_clients_resolve_pods() {
    let world = world().await;
    let app = App::saying("one").await;
    let _edge = world.edge("edge-1").port(10250, app.address()).join().await;
    let path = "/exec/a/web/app";
    assert_problem(&ask(&world, "others", path).await, 404, "node_unknown", "");
    let nobody = apiserver(&world, "open").nobody();
    let answer = nobody.get(&format!("https://gateway{path}")).await;
    assert_eq!(answer.status, 502, "{answer}");
    assert_eq!(app.requests(), 0);
}
