//! Objects from a source and requests of a client. Whatever both send, nothing panics, and the response can be parsed.
//!
//! The input has three parts, each behind a byte 0xFF: a request (path, blank, `Accept`), a list, and a watch that follows
//! the list.

#![no_main]

use bytes::Bytes;
use causeway_watch_cache::{
    CacheLimits, GroupVersionResource, ListWatch, SourceResponse, WatchCache, reflect,
};
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use libfuzzer_sys::fuzz_target;
use std::sync::{
    LazyLock,
    atomic::{AtomicUsize, Ordering::Relaxed},
};
use tokio::runtime::{Builder, Runtime};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime")
});

/// Source that returns each of these once, and is unavailable afterwards.
struct Says {
    all: [Bytes; 2],
    asked: AtomicUsize,
}

impl ListWatch for Says {
    fn get(&self, _path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        let message = self.all.get(self.asked.fetch_add(1, Relaxed)).cloned();
        let answer = message
            .ok_or_else(|| "away".to_owned())
            .map(|message| SourceResponse {
                status: StatusCode::OK,
                headers: HeaderMap::new(),
                body: stream::iter([Ok(message)]).boxed(),
            });
        Box::pin(async { answer })
    }
}

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(3, |byte| *byte == 0xff);
    let mut part = || parts.next().unwrap_or_default();
    let (question, list, watch) = (part(), part(), part());
    let resource: GroupVersionResource = "v1/services".parse().expect("a resource");
    let limits = CacheLimits {
        response_bytes: 1 << 16,
        event_buffer_bytes: 1 << 16,
    };
    RUNTIME.block_on(async {
        let pool = WatchCache::new(&[resource], &limits);
        let store = &pool.stores()[0];
        let says = Says {
            all: [list, watch].map(Bytes::copy_from_slice),
            asked: AtomicUsize::default(),
        };
        drop(reflect(store, &says).await);
        let synced = store.status().synced;
        let (path, accept) = asked(question);
        for (ours, path, accept) in [
            (false, path, accept),
            (true, "/api/v1/services".into(), "application/json".into()),
            (
                true,
                "/api/v1/services".into(),
                "application/vnd.kubernetes.protobuf".into(),
            ),
            (
                true,
                "/api/v1/services".into(),
                "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1".into(),
            ),
        ] {
            let request = Request::get(&path).header("accept", &accept).body(());
            let Ok(request) = request else { continue };
            let answer = pool.handle_request(&request.into_parts().0, None).await;
            if answer.body().is_watch() {
                // The watch continues for as long as the client reads.
                let mut body = answer.into_body();
                for _ in 0..4 {
                    // The client requests nothing after the end of the watch.
                    if let Some(None) = body.frame().now_or_never() {
                        break;
                    }
                }
                continue;
            }
            let status = answer.status();
            let body = answer.into_body().collect().await;
            let bytes = body.expect("a list does not fail").to_bytes();
            // Requests of other clients may be refused.
            if !ours {
                continue;
            }
            // Objects of an unknown kind have no protobuf form.
            if accept == "application/json" {
                assert_eq!(status.is_success(), synced, "{status}");
            }
            if accept.starts_with("application/json") {
                serde_json::from_slice::<serde_json::Value>(&bytes).expect("JSON");
            }
        }
    });
});

/// Path of a request, and its `Accept` header.
fn asked(question: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(question);
    let (path, accept) = text.split_once(' ').unwrap_or((&text, "*/*"));
    (path.to_owned(), accept.to_owned())
}
