//! Cases of HTTP/2: field lists and bodies that no library would send.

use super::{AFTER, Expect, FirstRequest, SeenRequest, TestSetup, bytes, cases, report};
use crate::world::{
    PATIENCE,
    client::Wire,
    frames::{self, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, RST_STREAM, SETTINGS},
};
use serde::Deserialize;
use tokio::time::timeout;

/// An empty table: no answer refers to an earlier one.
const HEADER_TABLE_SIZE: u16 = 1;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// The request's fields in order. With `base`, behind the four pseudo-fields of an ordinary GET.
    fields: Vec<(String, String)>,
    #[serde(default = "yes")]
    base: bool,
    /// Instead of `fields`: the field list as it is, in hexadecimal.
    #[serde(default)]
    block: Option<String>,
    #[serde(default)]
    body: Option<String>,
    #[serde(default)]
    trailers: Vec<(String, String)>,
    #[serde(default)]
    only: Option<String>,
    expect: Expect,
}

fn yes() -> bool {
    true
}

impl Case {
    fn block(&self, scheme: &str) -> Vec<u8> {
        if let Some(hex) = &self.block {
            let pairs = hex
                .as_bytes()
                .chunks(2)
                .map(|pair| std::str::from_utf8(pair).unwrap());
            return pairs
                .map(|pair| u8::from_str_radix(pair, 16).unwrap())
                .collect();
        }
        let mut list = if self.base {
            ordinary("/", scheme)
        } else {
            Vec::new()
        };
        list.extend(raw(&self.fields, scheme));
        frames::fields(&list)
    }

    fn frames(&self, scheme: &str) -> Vec<u8> {
        let (body, trailers) = (self.body.as_ref(), !self.trailers.is_empty());
        let end = |last: bool| if last { END_STREAM } else { 0 };
        let flags = END_HEADERS | end(body.is_none() && !trailers);
        let mut sent = frames::frame(HEADERS, flags, 1, &self.block(scheme));
        if let Some(body) = body {
            sent.extend(frames::frame(DATA, end(!trailers), 1, &bytes(body)));
        }
        if trailers {
            let block = frames::fields(&raw(&self.trailers, scheme));
            sent.extend(frames::frame(HEADERS, END_HEADERS | END_STREAM, 1, &block));
        }
        sent
    }
}

type RawHeaders = Vec<(Vec<u8>, Vec<u8>)>;

fn raw(list: &[(String, String)], scheme: &str) -> RawHeaders {
    let pair =
        |(name, value): &(String, String)| (bytes(name), bytes(&value.replace("{scheme}", scheme)));
    list.iter().map(pair).collect()
}

fn ordinary(path: &str, scheme: &str) -> RawHeaders {
    let list = [
        (":method", "GET"),
        (":scheme", scheme),
        (":authority", "edge-1:9100"),
        (":path", path),
    ];
    list.map(|(name, value)| (name.into(), value.into())).into()
}

#[tokio::test]
async fn http2_fields_without_http1_form_are_refused_or_one_request() {
    let ground = TestSetup::new().await;
    let cases = cases::<Case>("http2.json");
    let mut faults = Vec::new();
    for (listener, scheme) in [("https", "https"), ("plain", "http")] {
        for case in &cases {
            if case.only.as_ref().is_some_and(|only| only != listener) {
                continue;
            }
            let mut wire: Box<dyn Wire> = match listener {
                "https" => {
                    let client = ground.testbed.client();
                    Box::new(client.tls_stream("edge-1", &["h2"]).await.unwrap())
                }
                _ => Box::new(ground.testbed.tcp(listener).await),
            };
            let played = timeout(PATIENCE, play(&mut *wire, case, scheme)).await;
            let seen = played.unwrap_or_else(|_| panic!("{}: nothing came", case.name));
            drop(wire);
            if let Err(fault) = ground.check(&case.expect, &seen).await {
                faults.push(format!("  {listener}, {}:\n{fault}", case.name));
            }
        }
    }
    report("http2", 45, cases.len(), &faults);
}

async fn play(wire: &mut dyn Wire, case: &Case, scheme: &str) -> SeenRequest {
    let mut sent = frames::PREFACE.to_vec();
    sent.extend(frames::settings(&[(HEADER_TABLE_SIZE, 0)]));
    sent.extend(case.frames(scheme));
    let _ = frames::send(wire, &sent).await;
    let first = outcome(wire, 1).await;
    if first == FirstRequest::ExitedProcess("goaway") {
        return SeenRequest {
            first,
            after: false,
        };
    }
    let block = frames::fields(&ordinary(AFTER, scheme));
    let head = frames::frame(HEADERS, END_HEADERS | END_STREAM, 3, &block);
    let _ = frames::send(wire, &head).await;
    let after = outcome(wire, 3).await == FirstRequest::Status(200);
    SeenRequest { first, after }
}

/// The end of a stream.
async fn outcome(wire: &mut dyn Wire, stream: u32) -> FirstRequest {
    let mut status = None;
    loop {
        let Ok(frame) = frames::next(wire).await else {
            return FirstRequest::ExitedProcess("goaway");
        };
        match frame.kind {
            SETTINGS if frame.flags == 0 => {
                let _ = frames::send(wire, &frames::frame(SETTINGS, frames::ACK, 0, &[])).await;
            }
            GOAWAY if frame.payload[4..8] != [0; 4] => {
                return FirstRequest::ExitedProcess("goaway");
            }
            RST_STREAM if frame.stream == stream => {
                return status.unwrap_or(FirstRequest::ExitedProcess("reset"));
            }
            HEADERS if frame.stream == stream => {
                let found = FirstRequest::Status(frame.status());
                if frame.ends() {
                    return found;
                }
                status = Some(found);
            }
            DATA if frame.stream == stream && frame.ends() => {
                return status.expect("a head comes before a body");
            }
            _ => {}
        }
    }
}
