//! Requests that two parsers could read differently: tests their results, and that no other request arrives.
//!
//! The cases are data (`tests/fixtures/hostile`, one file for each protocol). Each is sent over a connection of its own to
//! a real listener, followed, if the connection is still open, by an ordinary request whose head a leftover byte would
//! spoil. Then three records must agree: the answers to the client, the requests that the policy saw, and the bytes that an
//! app got which reads as strictly as the RFC allows (`world::recorder`).

mod http1;
mod http2;

use crate::{
    testbed::TestBed,
    world::{
        app::{App, Script},
        recorder::{ReceivedRequest, Recorder},
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::proxy::authz::{Authorize, AuthzDecision, AuthzRequest};
use serde::{Deserialize, de::DeserializeOwned};
use std::{
    fmt::Write as _,
    path::Path,
    sync::{Arc, Mutex},
};

/// The path of the ordinary request.
const AFTER: &str = "/after";
/// Path of a request whose body breaks off: the app never gets its end.
const BROKEN: &str = "/broken";

/// Expected result of a case.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Expect {
    /// This answer to the first request.
    status: Option<u16>,
    /// On HTTP/2 instead of an answer: `reset` or `goaway`; on HTTP/1.1: `closed`.
    end: Option<String>,
    /// Requests that reach the upstream, in order.
    requests: Vec<ExpectedRequest>,
    /// The connection takes no further request.
    closes: bool,
}

/// A request as the app must receive it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpectedRequest {
    /// Method and target.
    line: String,
    #[serde(default = "host")]
    host: String,
    /// Bytes as characters; none: the body never came to its end.
    #[serde(default = "whole")]
    body: Option<String>,
    /// Values of fields, in order.
    #[serde(default)]
    fields: Vec<(String, Vec<String>)>,
    #[serde(default)]
    absent: Vec<String>,
}

fn host() -> String {
    "edge-1:9100".into()
}

#[expect(clippy::unnecessary_wraps, reason = "serde wants the field's type")]
fn whole() -> Option<String> {
    Some(String::new())
}

/// Course of a connection, as its client saw it.
#[derive(Debug, PartialEq, Eq)]
struct SeenRequest {
    first: FirstRequest,
    /// Whether the ordinary request behind it was answered, by 200.
    after: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum FirstRequest {
    Status(u16),
    ExitedProcess(&'static str),
}

/// Policy that records the requests for port 9100 of edge-1, which are the only ones that an upstream may get: method and
/// path.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordingUpstream(Arc<Mutex<Vec<(String, String)>>>);

impl RecordingUpstream {
    /// Returns the paths of its requests since the last call.
    pub(crate) fn paths(&self) -> Vec<String> {
        let judged = std::mem::take(&mut *self.0.lock().unwrap());
        judged.into_iter().map(|(_, path)| path).collect()
    }
}

impl Authorize for RecordingUpstream {
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision {
        let node = ask.destination.node().expect("a node");
        let place = (node.as_str(), ask.destination.port());
        if place == ("edge-1", Some(9100)) {
            let judged = (ask.method.to_string(), ask.path.to_owned());
            self.0.lock().unwrap().push(judged);
        }
        AuthzDecision::Allow
    }
}

/// Gateway, edge and app, and their records.
struct TestSetup {
    testbed: TestBed,
    app: Recorder,
    judge: RecordingUpstream,
}

impl TestSetup {
    async fn new() -> Self {
        let (app, judge) = (Recorder::start().await, RecordingUpstream::default());
        let build = TestBed::build().authorizer(judge.clone());
        let testbed = Box::pin(TestBed::along(build, Protocol::Http, app.address())).await;
        Self {
            testbed,
            app,
            judge,
        }
    }

    /// Compares the records with the expectation; returns the faults.
    async fn check(&self, expect: &Expect, seen: &SeenRequest) -> Result<(), String> {
        self.testbed.until_idle().await;
        let mut judged = std::mem::take(&mut *self.judge.0.lock().unwrap());
        let mut arrived = self.app.take().into_iter().collect::<Result<Vec<_>, _>>()?;
        // How much of a broken-off request an app has seen depends on timing, but it never sees the end.
        arrived.retain(|request| request.body.is_some() || request.target != BROKEN);
        judged.retain(|(_, path)| path != BROKEN);
        let mut faults = String::new();
        let mut say = |what: &str, found: &dyn std::fmt::Debug| {
            writeln!(faults, "    {what}: {found:?}").unwrap();
        };
        let first = match (&expect.end, expect.status) {
            (Some(end), _) => seen.first == FirstRequest::ExitedProcess(end.clone().leak()),
            (None, status) => seen.first == FirstRequest::Status(status.unwrap_or(200)),
        };
        if !first {
            say("the client saw", seen);
        }
        if expect.closes == seen.after {
            say("behind it", seen);
        }
        let asked = arrived.iter().map(|request| {
            let path = request.target.split('?').next().unwrap_or_default();
            (request.method.clone(), path.to_owned())
        });
        if asked.collect::<Vec<_>>() != judged {
            say("the policy was asked for", &judged);
        }
        if seen.after && arrived.pop().is_none_or(|last| last.target != AFTER) {
            say("the last request is not the ordinary one", &arrived);
        }
        let same = arrived.len() == expect.requests.len()
            && arrived
                .iter()
                .zip(&expect.requests)
                .all(|(got, want)| want.is(got));
        if !same {
            say("the app got", &arrived);
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(faults)
        }
    }
}

impl ExpectedRequest {
    fn is(&self, got: &ReceivedRequest) -> bool {
        let named = |(name, values): &(String, Vec<String>)| got.values(name) == *values;
        self.line == format!("{} {}", got.method, got.target)
            && got.values("host") == [&self.host]
            && got.body == self.body
            && self.fields.iter().all(named)
            && self.absent.iter().all(|name| got.values(name).is_empty())
    }
}

/// The cases of a file.
fn cases<C: DeserializeOwned>(file: &str) -> Vec<C> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hostile");
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Characters as bytes of the same number.
fn bytes(text: &str) -> Vec<u8> {
    let byte = |c| u8::try_from(c).expect("a case has bytes only, as characters up to U+00FF");
    text.chars().map(byte).collect()
}

/// Fails with all faults at once.
fn report(name: &str, at_least: usize, played: usize, faults: &[String]) {
    assert!(faults.is_empty(), "{name}:\n{}", faults.join("\n"));
    assert!(played >= at_least, "{played} of {at_least} cases of {name}");
}

#[tokio::test]
async fn a_connect_target_reaches_one_address_or_none() {
    /// A CONNECT, and the bytes that the app gets from its session.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Case {
        name: String,
        send: String,
        status: u16,
        #[serde(default)]
        session: Option<String>,
    }
    let app = App::tcp(Script::new().read_to_end().close()).await;
    let judge = RecordingUpstream::default();
    let build = TestBed::build().authorizer(judge.clone());
    let testbed = TestBed::along(build, Protocol::Tcp, app.address()).await;
    let (mut faults, mut sessions) = (Vec::new(), 0);
    let cases = cases::<Case>("connect.json");
    for case in &cases {
        let status = http1::connect(&testbed, &bytes(&case.send)).await;
        sessions += usize::from(case.session.is_some());
        if status != case.status || app.connections() != sessions {
            faults.push(format!("  {}: {status}", case.name));
            sessions = app.connections();
        } else if let Some(session) = &case.session
            && app.body().await != bytes(session)
        {
            faults.push(format!("  {}: another session", case.name));
        }
        let judged = std::mem::take(&mut *judge.0.lock().unwrap());
        let wanted = [("CONNECT".to_owned(), String::new())];
        if judged != wanted[..usize::from(case.session.is_some())] {
            faults.push(format!("  {}: judged {judged:?}", case.name));
        }
    }
    report("connect", 15, cases.len(), &faults);
}
