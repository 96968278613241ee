use super::*;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use kube::client::Body;
use serde_json::json;
use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};

type Answered = Response<Body>;

fn answer(status: u16, value: &serde_json::Value) -> Answered {
    // An event ends with a newline.
    let body = Body::from(format!("{value}\n").into_bytes());
    Response::builder().status(status).body(body).unwrap()
}

/// Returns a source of an API that gives these responses to the requested path and query.
fn follower(
    resource: &str,
    answered: impl Fn(&str) -> Answered + Clone + Send + Sync + 'static,
) -> ApiCacheSource {
    let api = tower::service_fn(move |asked: Request<Body>| {
        let answer = answered(asked.uri().path_and_query().unwrap().as_str());
        async move { Ok::<_, kube::Error>(answer) }
    });
    let limits = causeway_watch_cache::CacheLimits {
        response_bytes: 1 << 20,
        event_buffer_bytes: 1 << 20,
    };
    ApiCacheSource {
        client: Client::new(api, "it"),
        cache: WatchCache::new(&[resource.parse().unwrap()], &limits),
    }
}

fn list() -> serde_json::Value {
    let object = json!({ "metadata": { "name": "a", "namespace": "shop", "uid": "u", "resourceVersion": "5" } });
    json!({ "kind": "ServiceList", "metadata": { "resourceVersion": "7" }, "items": [object] })
}

#[tokio::test(start_paused = true)]
async fn a_failed_api_request_is_retried_and_cached_objects_stay() {
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
    let pool = follower.cache.clone();
    let store = pool.stores()[0].clone();
    let mut changes = store.subscribe();
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
    let message = pool.handle_request(&head, None).await.into_body();
    let message = message.collect().await.unwrap().to_bytes();
    assert!(message.windows(7).any(|part| part == b"v1.36.3"));
}

/// State of the API.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Is {
    Well,
    /// The API refuses every request, and open watches continue.
    Refusing,
    Hung,
}

/// Returns an API of one list whose watch has no events. It counts the probes.
fn quiet(is: watch::Receiver<Is>, asked: watch::Sender<usize>) -> Client {
    let api = tower::service_fn(move |request: Request<Body>| {
        let (mut is, asked) = (is.clone(), asked.clone());
        async move {
            let uri = request.uri();
            asked.send_modify(|asked| *asked += usize::from(uri.path() == "/livez"));
            let is = *is.wait_for(|is| *is != Is::Hung).await.unwrap();
            if is == Is::Refusing {
                return Err(kube::Error::TlsRequired);
            }
            let is_watch = uri
                .query()
                .is_some_and(|query| query.contains("watch=true"));
            let message = (!is_watch).then(|| Frame::data(Bytes::from(list().to_string())));
            let message = stream::iter(message.map(Ok::<_, Infallible>));
            let body = if is_watch {
                message.chain(stream::pending()).boxed()
            } else {
                message.boxed()
            };
            Ok(Response::new(StreamBody::new(body)))
        }
    });
    Client::new(api, "it")
}

#[tokio::test(start_paused = true)]
async fn a_silent_api_is_lost_since_its_last_byte_and_a_quiet_one_not() {
    let (make, is) = watch::channel(Is::Well);
    let asked = watch::Sender::new(0);
    let mut follower = follower("v1/services", |_| unreachable!());
    follower.client = quiet(is, asked.clone());
    let store = follower.cache.stores()[0].clone();
    let mut running = JoinSet::new();
    running.spawn(follower.run());
    let mut changes = store.subscribe();
    let mut until = async |lost: bool| {
        let seen = async {
            while !store.status().synced || store.status().lost.is_some() != lost {
                changes.changed().await.unwrap();
            }
        };
        timeout(Duration::from_mins(10), seen).await.unwrap();
    };
    until(false).await;
    // Time is the subject: a minute without changes.
    sleep(Duration::from_mins(1)).await;
    assert_eq!(store.status().lost, None);
    assert!((11..=12).contains(&*asked.borrow()), "{asked:?}");

    // Requests that fail immediately for some time do not end an open watch.
    make.send_replace(Is::Refusing);
    let until_asked = *asked.borrow() + 3;
    let mut asks = asked.subscribe();
    asks.wait_for(|asked| *asked >= until_asked).await.unwrap();
    make.send_replace(Is::Well);
    // Paused time: long enough for each loss to be noticed.
    sleep(Duration::from_mins(1)).await;
    assert_eq!(store.status().lost, None);

    // The clock of the machine goes on while time is paused.
    let wall_clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let (begun, hung) = (Instant::now(), wall_clock());
    make.send_replace(Is::Hung);
    until(true).await;
    assert!(begun.elapsed() <= Duration::from_secs(10));
    let lost = Duration::from_millis(store.status().lost.unwrap());
    let ages = [hung, wall_clock()].map(|now| now.saturating_sub(lost));
    assert!(ages[0] < Duration::from_secs(15), "{ages:?}");
    assert!(ages[1] >= Duration::from_secs(9), "{ages:?}");

    make.send_replace(Is::Well);
    until(false).await;
    assert_eq!(store.status().version, 7);

    // Long pauses end as soon as the API responds to any request.
    make.send_replace(Is::Hung);
    until(true).await;
    make.send_replace(Is::Refusing);
    // Paused time during which the pauses between attempts grow.
    sleep(Duration::from_mins(10)).await;
    make.send_replace(Is::Well);
    let back = Instant::now();
    until(false).await;
    assert!(
        back.elapsed() <= Duration::from_secs(2),
        "{:?}",
        back.elapsed()
    );
}

#[test]
fn a_missing_permission_or_resource_error_states_the_remedy() {
    let resource: GroupVersionResource = "v1/services".parse().unwrap();
    let refused = |status, why: &str| {
        describe_error(
            &resource,
            ReflectorError::Refused(status, why.to_owned(), None),
        )
        .0
    };
    let why = "services is forbidden: User \"x\" cannot watch resource";
    let forbidden = refused(StatusCode::FORBIDDEN, why);
    for part in ["v1/services", "cannot watch", "ClusterRole"] {
        assert!(forbidden.contains(part), "{forbidden}");
    }
    let unknown = refused(StatusCode::NOT_FOUND, "not found");
    assert!(unknown.contains("api_cache.resources"), "{unknown}");
    let broken = describe_error(&resource, ReflectorError::Broken("reset".to_owned())).0;
    assert_eq!(broken, "v1/services: reset");
}
