//! Streams to apps to which the gateway itself connects end when their client may no longer have them.

use crate::{
    recheck::{app_of, compiled, echoes, is_reset, refused, session},
    testbed::{TestBed, URL},
    world::{
        app::{End, Script},
        client::{Answer, Body, Client, Connection, assert_problem, whole},
        until,
    },
};
use causeway_gateway::state::PolicyWriter;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame, Incoming},
};
use serde_json::{Value, json};
use std::{task::Poll, time::Duration};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A body that begins and does not end, and the token that is cancelled when its sender has dropped it.
pub(crate) fn unending() -> (Body, CancellationToken) {
    let dropped = CancellationToken::new();
    let guard = dropped.clone().drop_guard();
    let rest = stream::poll_fn(move |_| {
        let _kept = &guard;
        Poll::Pending
    });
    let begun = stream::iter([Ok(Frame::data(Bytes::from_static(b"begun")))]);
    (BodyExt::boxed(StreamBody::new(begun.chain(rest))), dropped)
}

pub(crate) async fn open(
    client: &Client,
    method: &str,
    path: &str,
    body: Body,
) -> (Connection, Response<Incoming>) {
    let mut connection = client.connect("edge-1").await.unwrap();
    let request = Request::builder()
        .method(method)
        .uri(format!("{URL}{path}"));
    let answer = connection.open(request.body(body).unwrap()).await;
    (connection, answer.unwrap())
}

/// The streams of a client over HTTP/1.1 and of one over HTTP/2, of each kind of request.
#[derive(Default)]
pub(crate) struct Streams {
    uploads: Vec<(Connection, CancellationToken)>,
    downloads: Vec<(Connection, Response<Incoming>)>,
    unread: Vec<(Connection, Response<Incoming>)>,
    unanswered: JoinSet<Answer>,
}

impl Streams {
    /// Opens an upload that was answered (at `answered`), two downloads and a request that waits for its answer (at
    /// `waits`) for each client.
    pub(crate) async fn open(testbed: &TestBed, answered: &str, waits: &str) -> Self {
        let mut streams = Self::default();
        for client in [testbed.client(), testbed.http2()] {
            let (body, dropped) = unending();
            let (connection, answer) = open(&client, "POST", answered, body).await;
            let answer = answer.into_body().collect().await.unwrap();
            assert_eq!(answer.to_bytes(), "well");
            streams.uploads.push((connection, dropped));
            let download = open(&client, "GET", "endless", whole("")).await;
            streams.downloads.push(download);
            let unread = open(&client, "GET", "endless", whole("")).await;
            streams.unread.push(unread);
            let (body, _) = unending();
            let request = Request::post(format!("{URL}{waits}")).body(body).unwrap();
            let unanswered = async move { client.send(request).await };
            streams.unanswered.spawn(unanswered);
        }
        streams
    }

    /// Waits until each has ended, like a stream that is refused after it began. The second downloads are not read.
    pub(crate) async fn are_refused(&mut self) {
        for (_connection, dropped) in &self.uploads {
            until("the upload has ended", async || dropped.is_cancelled()).await;
        }
        for (_connection, answer) in self.downloads.drain(..) {
            assert!(answer.into_body().collect().await.is_err());
        }
        while let Some(refused) = self.unanswered.join_next().await {
            assert_problem(&refused.unwrap(), 403, "forbidden", "the policy does not");
        }
    }
}

/// Has the policy deny everything to the client `tester`.
pub(crate) fn but_tester() -> Value {
    json!([{ "who": { "users": ["tester"] }, "then": "deny" }, { "then": "allow" }])
}

#[tokio::test]
async fn http1_upstream_streams_end_in_both_directions() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    // Nothing else ends a connection that has answered.
    let idle = Duration::from_hours(1);
    let build = TestBed::build().config(|config| config.timeouts.idle_keepalive = idle);
    let build = build.policy(rules.reader());
    let (app, testbed) = TestBed::secured_by(build, |head| match head.path().as_str() {
        // It has answered, and continues to read.
        "/early" => Script::new()
            .write("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell")
            .silence(),
        _ => app_of(head),
    })
    .await;
    let other = testbed.client().certificate(&testbed.client_leaf("other"));
    let mut stays = session(&other, "").await;
    let mut ended = session(&testbed.client(), "").await;
    let mut streams = Streams::open(&testbed, "early", "").await;
    until("all are open", async || {
        testbed.metrics().await.sum("open_streams", &[]) == 10
    })
    .await;
    rules.replace(Some(compiled(&but_tester())));
    is_reset(&mut ended).await;
    streams.are_refused().await;
    until("only permitted streams are open", async || {
        testbed.metrics().await.sum("open_streams", &[]) == 1
    })
    .await;
    refused(&testbed, "forbidden").await;
    for _ in 0..9 {
        assert_eq!(
            app.end().await,
            End::Reset,
            "a part does not count as the whole"
        );
    }
    echoes(&mut stays).await;
    drop(streams);
}
