//! An answer as a client sees it, and the required form of a failure.

use crate::world::log::Log;
use hyper::{HeaderMap, body::Bytes};

/// A complete answer.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// The reason phrase, if it is not the usual one.
    pub(crate) phrase: Option<String>,
    pub(crate) fields: HeaderMap,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) body: Bytes,
    pub(super) log: Log,
}

impl Answer {
    /// The body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self}"))
    }

    /// Returns the reason of a failure.
    pub(crate) fn reason(&self) -> String {
        self.json()["reason"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    /// A field's value; empty if there is none.
    pub(crate) fn field(&self, name: &str) -> &str {
        let value = self.fields.get(name).map(|value| value.to_str().unwrap());
        value.unwrap_or_default()
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}\n{}", self.status, self.fields, self.text())
    }
}

/// Checks a failure in all its forms: status and problem, `Proxy-Status`, Retry-After where it helps, access record.
#[track_caller]
pub(crate) fn assert_problem(answer: &Answer, status: u16, reason: &str, says: &str) {
    assert_eq!(answer.status, status, "{answer}");
    assert_eq!(
        answer.field("content-type"),
        "application/problem+json",
        "{answer}"
    );
    let problem = answer.json();
    assert_eq!(problem["status"], status, "{answer}");
    assert_eq!(problem["reason"], reason, "{answer}");
    assert_eq!(
        problem["type"],
        format!("urn:causeway:problem:{reason}"),
        "{answer}"
    );
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains(says), "{says:?} is not in {detail:?}");
    let proxy = answer.field("proxy-status");
    assert!(proxy.starts_with("causeway; error="), "{answer}");
    assert!(proxy.contains(&format!("details=\"{reason}: ")), "{answer}");
    assert_eq!(
        !answer.field("retry-after").is_empty(),
        status == 503,
        "{answer}"
    );
    let trace = problem["trace"].as_str().unwrap();
    // A gateway with threads of its own logs elsewhere.
    if !answer.log.records().is_empty() {
        let record = answer.log.record(trace).expect("the stream has a record");
        assert_eq!(record["status"], status, "{record}");
        assert_eq!(record["reason"], reason, "{record}");
    }
}
