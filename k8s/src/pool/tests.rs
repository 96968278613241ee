use super::*;
use http::Response;
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

type Answered = Response<Body>;

fn answer(status: u16, value: &serde_json::Value) -> Answered {
    // An event ends with its line.
    let body = Body::from(format!("{value}\n").into_bytes());
    Response::builder().status(status).body(body).unwrap()
}

/// What follows an API that answers like this to the path and query that it is asked for.
fn follower(
    resource: &str,
    answered: impl Fn(&str) -> Answered + Clone + Send + Sync + 'static,
) -> Follower {
    let api = tower::service_fn(move |asked: Request<Body>| {
        let answer = answered(asked.uri().path_and_query().unwrap().as_str());
        async move { Ok::<_, kube::Error>(answer) }
    });
    let limits = causeway_pool::Limits {
        cache: 1 << 20,
        window: 1 << 20,
    };
    Follower {
        client: Client::new(api, "it"),
        pool: Pool::new(&[resource.parse().unwrap()], &limits),
    }
}

fn list() -> serde_json::Value {
    let object = json!({ "metadata": { "name": "a", "namespace": "shop", "uid": "u", "resourceVersion": "5" } });
    json!({ "kind": "ServiceList", "metadata": { "resourceVersion": "7" }, "items": [object] })
}

#[tokio::test(start_paused = true)]
async fn an_api_that_breaks_off_is_asked_again_and_what_was_read_stays() {
    let lists = Arc::new(AtomicUsize::new(0));
    let counted = lists.clone();
    let follower = follower("v1/services", move |asked| {
        if asked == "/version" {
            return answer(200, &json!({ "gitVersion": "v1.36.3" }));
        }
        if !asked.contains("watch=true") {
            counted.fetch_add(1, Relaxed);
            return answer(200, &list());
        }
        let event = json!({ "type": "DELETED", "object": {
            "metadata": { "name": "a", "namespace": "shop", "uid": "u", "resourceVersion": "9" } } });
        if asked.contains("resourceVersion=7&") {
            return answer(200, &event);
        }
        answer(500, &json!({}))
    });
    let pool = follower.pool.clone();
    let store = pool.stores()[0].clone();
    let mut changes = store.changed();
    let seen = async {
        while store.status().version != 9 || store.status().lost.is_none() {
            changes.changed().await.unwrap();
        }
    };
    tokio::select! {
        never = follower.run() => match never {},
        seen = timeout(Duration::from_mins(10), seen) => seen.unwrap(),
    }
    assert_eq!((store.status().objects, lists.load(Relaxed)), (0, 1));
    let head = Request::get("/version").body(()).unwrap().into_parts().0;
    let said = pool.answer(&head, None).await.into_body();
    let said = said.collect().await.unwrap().to_bytes();
    assert!(said.windows(7).any(|part| part == b"v1.36.3"));
}

#[test]
fn a_right_that_is_missing_and_a_resource_that_is_not_served_say_what_to_do() {
    let resource: Resource = "v1/services".parse().unwrap();
    let refused =
        |status, why: &str| explained(&resource, Ended::Refused(status, why.to_owned(), None)).0;
    let why = "services is forbidden: User \"x\" cannot watch resource";
    let forbidden = refused(StatusCode::FORBIDDEN, why);
    for part in ["v1/services", "cannot watch", "ClusterRole"] {
        assert!(forbidden.contains(part), "{forbidden}");
    }
    let unknown = refused(StatusCode::NOT_FOUND, "not found");
    assert!(unknown.contains("readers.resources"), "{unknown}");
    let broken = explained(&resource, Ended::Broken("reset".to_owned())).0;
    assert_eq!(broken, "v1/services: reset");
}
