use super::*;
use crate::{
    object::Object,
    store::tests::{labelled, object},
};
use http::{Request, header::ALLOW};
use http_body_util::BodyExt;
use std::{io::Read, time::SystemTime};
use tokio::time::Instant;

/// A watch cache as its clients see it.
pub(crate) struct Served(pub(crate) Arc<WatchCache>);

impl Served {
    pub(crate) fn new(window: usize, cache: u64) -> Self {
        let names = ["v1/services", "discovery.k8s.io/v1/endpointslices"];
        let resources = names.map(|name| name.parse().unwrap());
        Self(WatchCache::new(
            &resources,
            &CacheLimits {
                response_bytes: cache,
                event_buffer_bytes: window,
            },
        ))
    }

    /// Creates a cache of services at a version.
    pub(crate) fn of(version: u64, objects: Vec<Object>) -> Self {
        let served = Self::new(1 << 20, 1 << 20);
        served.store().replace(version, objects);
        served.store().mark_connected(None);
        served
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.0.stores()[0]
    }

    pub(crate) async fn ask(
        &self,
        method: &str,
        asked: &str,
        headers: &[(&str, &str)],
    ) -> Response<ResponseBody> {
        let mut request = Request::builder().method(method).uri(asked);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let head = request.body(()).unwrap().into_parts().0;
        self.0.handle_request(&head, None).await
    }

    async fn json(&self, asked: &str) -> (u16, Value) {
        let answer = self.ask("GET", asked, &[]).await;
        let status = answer.status().as_u16();
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    /// Returns a list of services for a query, which may be empty.
    async fn list(&self, query: &str) -> Value {
        let (status, list) = self.json(&format!("/api/v1/services?{query}")).await;
        assert_eq!(status, 200, "{query}: {list}");
        list
    }

    async fn status(&self, query: &str) -> u16 {
        self.json(&format!("/api/v1/services?{query}")).await.0
    }
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().unwrap().iter();
    items
        .map(|item| item["metadata"]["name"].as_str().unwrap())
        .collect()
}

fn version(list: &Value) -> &str {
    list["metadata"]["resourceVersion"].as_str().unwrap()
}

fn several(count: u64) -> Vec<Object> {
    let each = |number| object("n", &format!("s{number:04}"), number + 1);
    (0..count).map(each).collect()
}

#[tokio::test]
async fn a_paged_list_keeps_the_version_of_its_first_page() {
    let served = Served::of(100, several(7));
    let store = served.store();
    let mut page = served.list("limit=3").await;
    let mut seen: Vec<String> = Vec::new();
    let mut at = 100;
    loop {
        assert_eq!(version(&page), "100");
        seen.extend(names(&page).iter().map(ToString::to_string));
        // One that the client has received, one that it has not, and one that is new; each deleted, changed or added.
        store.apply(object("n", &format!("s000{}", 7 - at % 7), at + 1), true);
        store.apply(labelled("n", "s0006", at + 2, "new"), false);
        store.apply(object("n", &format!("s0003x{at}"), at + 3), false);
        at += 3;
        let Some(next) = page["metadata"]["continue"].as_str() else {
            break;
        };
        let remaining = page["metadata"]["remainingItemCount"].as_u64().unwrap();
        assert_eq!(usize::try_from(remaining).unwrap(), 7 - seen.len());
        page = served.list(&format!("limit=3&continue={next}")).await;
    }
    let expected: Vec<_> = (0..7).map(|number| format!("s{number:04}")).collect();
    assert_eq!(seen, expected);
    assert_eq!(version(&served.list("").await), at.to_string());
}

#[tokio::test]
async fn a_list_can_continue_until_its_version_leaves_the_window() {
    let served = Served::new(20_000, 1 << 20);
    served.store().replace(100, several(7));
    let page = served.list("limit=3").await;
    let next = page["metadata"]["continue"].as_str().unwrap();
    for at in 101..400 {
        served.store().apply(labelled("n", "s0006", at, "x"), false);
    }
    let asked = format!("/api/v1/services?limit=3&continue={next}");
    let (status, message) = served.json(&asked).await;
    assert_eq!((status, &message["reason"]), (410, &"Expired".into()));
    assert!(
        message["message"]
            .as_str()
            .unwrap()
            .contains("continue parameter is too old")
    );
    for (query, status) in [
        ("limit=3&continue=nonsense", 400),
        ("limit=3&continue=e30", 400),
        ("resourceVersion=120&resourceVersionMatch=Exact", 410),
    ] {
        assert_eq!(served.status(query).await, status, "{query}");
    }
}

#[tokio::test]
async fn each_resource_version_match_behaves_as_in_kubernetes() {
    let served = Served::of(100, several(7));
    served.store().apply(object("n", "s0000", 110), true);
    for (query, at, count) in [
        ("", "110", 6),
        ("resourceVersion=", "110", 6),
        ("resourceVersion=0", "110", 6),
        // As in kube-apiserver, all existing objects are sent at once.
        ("resourceVersion=0&limit=2", "110", 6),
        ("limit=2", "110", 2),
        ("resourceVersion=105", "110", 6),
        (
            "resourceVersion=105&resourceVersionMatch=NotOlderThan",
            "110",
            6,
        ),
        ("resourceVersion=105&resourceVersionMatch=Exact", "105", 7),
        ("resourceVersion=110&resourceVersionMatch=Exact", "110", 6),
        ("fieldSelector=metadata.name%3Ds0003", "110", 1),
        ("limit=18446744073709551615", "110", 6),
    ] {
        let list = served.list(query).await;
        assert_eq!((version(&list), names(&list).len()), (at, count), "{query}");
        assert_eq!(list["kind"], "ServiceList");
    }
    for query in [
        "resourceVersion=x",
        "resourceVersionMatch=Exact",
        "resourceVersion=0&resourceVersionMatch=Exact",
        "labelSelector=a%20b",
        "fieldSelector=spec.nonsense%3D1",
        "limit=99999999999999999999",
    ] {
        assert_eq!(served.status(query).await, 400, "{query}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_future_version_is_waited_for_then_refused_as_too_large() {
    let served = Served::of(100, several(1));
    for query in [
        "resourceVersion=200",
        "resourceVersion=200&resourceVersionMatch=Exact",
    ] {
        let begun = Instant::now();
        let asked = format!("/api/v1/services?{query}");
        let answer = served.ask("GET", &asked, &[]).await;
        assert_eq!(begun.elapsed().as_secs(), 3);
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()[RETRY_AFTER]),
            (504, &"1".parse().unwrap())
        );
        let (_, message) = served.json(&asked).await;
        assert_eq!(
            message["details"]["causes"][0]["reason"],
            "ResourceVersionTooLarge"
        );
        assert_eq!(
            (&message["reason"], &message["details"]["retryAfterSeconds"]),
            (&"Timeout".into(), &1.into())
        );
    }
    let (list, ()) = tokio::join!(served.list("resourceVersion=101"), async {
        served.store().apply(object("n", "new", 101), false);
    });
    assert_eq!(version(&list), "101");
}

#[tokio::test]
async fn an_unfilled_store_asks_clients_to_retry() {
    let served = Served::new(1 << 20, 1 << 20);
    for asked in [
        "/api/v1/services",
        "/api/v1/services?watch=true",
        "/api/v1/namespaces/n/services/a",
        "/readyz",
    ] {
        let answer = served.ask("GET", asked, &[]).await;
        assert_eq!(answer.status().as_u16(), 429, "{asked}");
        assert_eq!(answer.headers()[RETRY_AFTER], "1", "{asked}");
        // There is no data that could be old.
        let dated = [AGE, WARNING].map(|name| answer.headers().get(name));
        assert_eq!(dated, [None, None], "{asked}");
        assert_eq!(served.json(asked).await.1["reason"], "TooManyRequests");
    }
    for store in served.0.stores() {
        store.replace(5, Vec::new());
    }
    assert_eq!(
        served.ask("GET", "/readyz", &[]).await.status().as_u16(),
        200
    );
}

#[tokio::test]
async fn gzip_is_used_for_large_answers_if_the_client_accepts_it() {
    let served = Served::of(1000, several(500));
    let plain = served.list("").await;
    for round in 0..2 {
        let gzip = [("accept-encoding", "deflate, gzip")];
        let answer = served.ask("GET", "/api/v1/services", &gzip).await;
        assert_eq!(answer.headers()[CONTENT_ENCODING], "gzip", "{round}");
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let mut unpacked = String::new();
        flate2::read::GzDecoder::new(&*bytes)
            .read_to_string(&mut unpacked)
            .unwrap();
        assert_eq!(serde_json::from_str::<Value>(&unpacked).unwrap(), plain);
        let one = served
            .ask("GET", "/api/v1/namespaces/n/services/s0001", &gzip)
            .await;
        assert!(one.headers().get(CONTENT_ENCODING).is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn only_an_old_view_reports_its_age() {
    let served = Served::of(100, several(1));
    served.store().mark_lost(Duration::from_secs(9));
    assert!(
        served
            .ask("GET", "/api/v1/services", &[])
            .await
            .headers()
            .get(AGE)
            .is_none()
    );
    let begun = SystemTime::now();
    served.store().mark_lost(Duration::from_secs(75));
    // An age that was just noticed is reported some time later.
    tokio::time::advance(Duration::from_secs(3)).await;
    for (asked, status) in [
        ("/api/v1/services", 200),
        ("/api/v1/services?watch=true", 200),
        ("/api/v1/namespaces/n/services/s0000", 200),
        ("/api/v1/namespaces/n/services/none", 404),
    ] {
        let answer = served.ask("GET", asked, &[]).await;
        assert_eq!(answer.status().as_u16(), status, "{asked}");
        let age: u64 = answer.headers()[AGE].to_str().unwrap().parse().unwrap();
        let oldest = 75 + begun.elapsed().unwrap().as_secs();
        assert!((75..=oldest).contains(&age), "{asked}: {age}");
        let warning = answer.headers()[WARNING].to_str().unwrap();
        assert!(
            warning.starts_with("299 causeway \"") && warning.ends_with('"'),
            "{warning}"
        );
    }
    served.store().mark_connected(None);
    assert!(
        served
            .ask("GET", "/api/v1/services", &[])
            .await
            .headers()
            .get(WARNING)
            .is_none()
    );
}

#[tokio::test]
async fn unsupported_and_missing_resources_are_answered_by_a_status() {
    let served = Served::of(100, several(1));
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let answer = served
            .ask(method, "/api/v1/namespaces/n/services/s0000", &[])
            .await;
        assert_eq!(answer.status().as_u16(), 405, "{method}");
        assert_eq!(answer.headers()[ALLOW], "GET, HEAD");
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let message: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(
            (&message["kind"], &message["reason"]),
            (&"Status".into(), &"MethodNotAllowed".into())
        );
    }
    for asked in [
        "/",
        "/metrics",
        "/api/v1/pods",
        "/apis/nonsense",
        "/api/v2",
        "/api/v1/namespaces/n/services/s0000/status",
        "/openapi/v3",
    ] {
        let (status, message) = served.json(asked).await;
        assert_eq!(
            (status, &message["kind"], &message["reason"]),
            (404, &"Status".into(), &"NotFound".into()),
            "{asked}"
        );
    }
    let (status, message) = served.json("/api/v1/namespaces/n/services/none").await;
    assert_eq!(
        (status, &message["message"]),
        (404, &"services \"none\" not found".into())
    );
    let answer = served
        .ask("GET", "/api/v1/services", &[("accept", "text/html")])
        .await;
    assert_eq!(answer.status().as_u16(), 406);
}

#[tokio::test]
async fn head_is_get_without_its_body_and_never_a_watch() {
    let served = Served::of(100, several(1));
    for asked in [
        "/api/v1/services",
        "/api/v1/services?watch=true",
        "/nowhere",
    ] {
        let got = served.ask("GET", asked, &[]).await;
        let head = served.ask("HEAD", asked, &[]).await;
        assert_eq!(
            (head.status(), head.headers()),
            (got.status(), got.headers()),
            "{asked}"
        );
        assert!(!head.body().is_watch());
        assert!(
            head.into_body()
                .collect()
                .await
                .unwrap()
                .to_bytes()
                .is_empty()
        );
        drop(got);
        assert_eq!(served.store().status().watchers, 0, "{asked}");
    }
}

#[tokio::test]
async fn metadata_is_served_on_request_and_kubectl_gets_no_table() {
    let served = Served::of(100, several(2));
    let ask = async |accept: &str| {
        let answer = served
            .ask(
                "GET",
                "/api/v1/services?limit=1&includeObject=Object",
                &[("accept", accept)],
            )
            .await;
        assert_eq!(answer.status().as_u16(), 200, "{accept}");
        let kind = answer.headers()[CONTENT_TYPE].to_str().unwrap().to_owned();
        (kind, answer.into_body().collect().await.unwrap().to_bytes())
    };
    let (_, bytes) = ask("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").await;
    let list: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(list["kind"], "PartialObjectMetadataList");
    assert_eq!(list["items"][0]["kind"], "PartialObjectMetadata");
    assert!(list["items"][0].get("spec").is_none() && list["metadata"]["continue"].is_string());
    // The request of kubectl; `includeObject` applies only to tables.
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io";
    let (kind, bytes) = ask(&format!("{table},application/json")).await;
    assert_eq!(kind, "application/json");
    let list: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(
        (&list["kind"], &list["items"][0]["metadata"]["name"]),
        (&"ServiceList".into(), &"s0000".into())
    );
    assert_eq!(list["metadata"]["remainingItemCount"], 1);
    let accept = [("accept", table)];
    let only = served.ask("GET", "/api/v1/services", &accept).await;
    assert_eq!(only.status().as_u16(), 406);
    let (kind, bytes) = ask("application/vnd.kubernetes.protobuf,application/json").await;
    assert_eq!(kind, "application/vnd.kubernetes.protobuf");
    assert!(bytes.starts_with(b"k8s\0"));
    // Its envelope has kind and version; each of its objects is in it by name.
    for part in ["v1", "ServiceList", "s0000", "100"] {
        assert!(
            bytes.windows(part.len()).any(|at| at == part.as_bytes()),
            "{part}"
        );
    }
}

#[tokio::test]
async fn discovery_matches_the_needs_of_kubectl() {
    let served = Served::of(100, several(1));
    let v2 =
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let answer = served
        .ask("GET", "/apis?timeout=32s", &[("accept", v2)])
        .await;
    // Without parameters of a type: kubectl takes the answer for the discovery by separate paths.
    assert_eq!(answer.headers()[CONTENT_TYPE], "application/json");
    let (_, core) = served.json("/api?timeout=32s").await;
    assert_eq!(
        (&core["kind"], &core["versions"]),
        (&"APIVersions".into(), &json!(["v1"]))
    );
    let (_, groups) = served.json("/apis").await;
    assert_eq!(groups["kind"], "APIGroupList");
    let group = &groups["groups"][0];
    assert_eq!(group["name"], "discovery.k8s.io");
    assert_eq!(
        group["preferredVersion"]["groupVersion"],
        "discovery.k8s.io/v1"
    );
    let (_, one) = served.json("/apis/discovery.k8s.io").await;
    assert_eq!(
        (&one["kind"], &one["versions"]),
        (&"APIGroup".into(), &group["versions"])
    );
    let (_, v1) = served.json("/api/v1").await;
    assert_eq!(v1["kind"], "APIResourceList");
    assert_eq!(v1["groupVersion"], "v1");
    let services = &v1["resources"][0];
    assert_eq!(
        (
            &services["name"],
            &services["kind"],
            &services["namespaced"]
        ),
        (&"services".into(), &"Service".into(), &true.into())
    );
    assert_eq!(
        (&services["shortNames"], &services["verbs"]),
        (&json!(["svc"]), &json!(["get", "list", "watch"]))
    );
    assert_eq!(served.json("/version").await.1["major"], "1");
    served
        .0
        .set_version_info(Bytes::from_static(br#"{"major":"1","minor":"36"}"#));
    assert_eq!(served.json("/version").await.1["minor"], "36");
}

#[tokio::test]
async fn a_small_cache_under_many_queries_stays_small_and_correct() {
    let served = Served::new(1 << 20, 1 << 20);
    let filler = "x".repeat(1000);
    let each = |number: u64| {
        labelled(
            "n",
            &format!("s{number:04}"),
            number + 1,
            &format!("a{}-{filler}", number % 200),
        )
    };
    served
        .store()
        .replace(10_000, (0..5000).map(each).collect());
    assert!(served.store().status().bytes > 5_000_000);
    for round in 0..2 {
        for number in 0..200 {
            let list = served
                .list(&format!("labelSelector=app%3Da{number}-{filler}"))
                .await;
            assert_eq!(names(&list).len(), 25, "{round}: {number}");
            assert_eq!(names(&list)[0], format!("s{number:04}"));
        }
        assert_eq!(names(&served.list("").await).len(), 5000);
        let held = served.0.response_cache.cached_bytes();
        assert!((100_000..=1 << 20).contains(&held), "{held}");
    }
}

#[tokio::test]
async fn a_repeated_version_of_another_history_misses_the_cache() {
    let served = Served::of(100, several(2));
    assert_eq!(names(&served.list("").await).len(), 2);
    // The cloud's etcd was restored, and then reached exactly the same version again.
    served.store().replace(90, several(1));
    served.store().advance_version(100);
    let list = served.list("").await;
    assert_eq!((version(&list), names(&list).len()), ("100", 1));
}
