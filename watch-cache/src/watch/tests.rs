use crate::{
    ResponseBody,
    object::Object,
    server::tests::Served,
    store::tests::{labelled, object},
};
use http::StatusCode;
use http_body_util::BodyExt;
use serde_json::Value;
use std::time::Duration;
use tokio::time::{Instant, advance, timeout};

/// A watch as a client reads it.
struct Reader(ResponseBody, Vec<u8>);

impl Reader {
    async fn of(served: &Served, query: &str, accept: &str) -> Self {
        let asked = format!("/api/v1/services?watch=true&{query}");
        let answer = served.ask("GET", &asked, &[("accept", accept)]).await;
        assert_eq!(answer.status(), StatusCode::OK, "{query}");
        let body = answer.into_body();
        assert!(body.is_watch());
        Self(body, Vec::new())
    }

    async fn json(served: &Served, query: &str) -> Self {
        Self::of(served, query, "application/json").await
    }

    /// Reads more bytes. Returns `false` at the end.
    async fn read(&mut self) -> bool {
        let Some(frame) = self.0.frame().await else {
            return false;
        };
        self.1
            .extend_from_slice(&frame.unwrap().into_data().unwrap());
        true
    }

    /// Returns the next event, or `None` at the end.
    async fn event(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.1.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.1.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            if !self.read().await {
                return None;
            }
        }
    }

    /// Returns type, name and version of the next event.
    async fn next(&mut self) -> (String, String, String) {
        told(&self.event().await.expect("an event"))
    }

    /// Whether no event arrives for a while.
    async fn is_quiet(&mut self) -> bool {
        timeout(Duration::from_secs(20), self.event())
            .await
            .is_err()
    }

    /// Counts the events until 410, which is the last.
    async fn until_gone(&mut self) -> usize {
        let mut count = 0;
        while let Some(event) = self.event().await {
            if event["type"] == "ERROR" {
                assert_eq!(
                    (&event["object"]["code"], &event["object"]["reason"]),
                    (&410.into(), &"Expired".into())
                );
                assert!(self.event().await.is_none());
                return count;
            }
            count += 1;
        }
        panic!("the watch ended without 410 after {count} events")
    }
}

fn told(event: &Value) -> (String, String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let meta = &event["object"]["metadata"];
    (
        text(&event["type"]),
        text(&meta["name"]),
        text(&meta["resourceVersion"]),
    )
}

fn of(word: &str, name: &str, version: u64) -> (String, String, String) {
    (word.to_owned(), name.to_owned(), version.to_string())
}

fn served() -> Served {
    Served::of(10, vec![object("n", "a", 3), object("n", "b", 10)])
}

#[tokio::test(start_paused = true)]
async fn a_watch_sends_events_after_a_version() {
    let served = served();
    served.store().apply(object("n", "c", 11), false);
    let mut from = Reader::json(&served, "resourceVersion=10").await;
    let mut now = Reader::json(&served, "resourceVersion=11").await;
    served.store().apply(labelled("n", "a", 12, "x"), false);
    served.store().apply(object("n", "b", 13), true);
    assert_eq!(from.next().await, of("ADDED", "c", 11));
    for reader in [&mut from, &mut now] {
        assert_eq!(reader.next().await, of("MODIFIED", "a", 12));
        assert_eq!(reader.next().await, of("DELETED", "b", 13));
        assert!(reader.is_quiet().await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_any_version_begins_with_the_current_objects() {
    let served = served();
    for query in ["", "resourceVersion=0"] {
        let mut reader = Reader::json(&served, query).await;
        assert_eq!(reader.next().await, of("ADDED", "a", 3));
        assert_eq!(reader.next().await, of("ADDED", "b", 10));
        assert!(reader.is_quiet().await, "{query}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_list_marks_the_end_of_the_initial_objects() {
    let served = served();
    let query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    for version in ["", "&resourceVersion=0", "&resourceVersion=10"] {
        let mut reader = Reader::json(&served, &format!("{query}{version}")).await;
        assert_eq!(reader.next().await.0, "ADDED");
        assert_eq!(reader.next().await.0, "ADDED");
        let mark = reader.event().await.unwrap();
        assert_eq!(told(&mark), of("BOOKMARK", "", 10));
        assert_eq!(mark["object"]["kind"], "Service");
        assert_eq!(
            mark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
            "true"
        );
    }
    let mut none = Reader::json(
        &served,
        "sendInitialEvents=false&resourceVersionMatch=NotOlderThan",
    )
    .await;
    served.store().apply(object("n", "c", 11), false);
    assert_eq!(none.next().await, of("ADDED", "c", 11));
    for (query, status) in [
        ("sendInitialEvents=true", 400),
        (
            "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=99",
            504,
        ),
    ] {
        let asked = format!("/api/v1/services?watch=true&{query}");
        assert_eq!(
            served.ask("GET", &asked, &[]).await.status().as_u16(),
            status,
            "{query}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_gets_a_bookmark_each_minute_until_its_timeout() {
    let served = served();
    let begun = Instant::now();
    let mut reader = Reader::json(
        &served,
        "resourceVersion=10&allowWatchBookmarks=true&timeoutSeconds=200",
    )
    .await;
    served.store().advance_version(15);
    let mut marks = 0;
    while let Some(event) = reader.event().await {
        assert_eq!(told(&event), of("BOOKMARK", "", 15));
        marks += 1;
    }
    assert_eq!((marks, begun.elapsed().as_secs()), (3, 200));
    let mut unmarked = Reader::json(&served, "resourceVersion=10&timeoutSeconds=200").await;
    assert_eq!(unmarked.event().await, None);
}

#[tokio::test(start_paused = true)]
async fn no_time_is_too_long_to_be_asked_for() {
    let served = served();
    for seconds in [u64::MAX, u64::MAX / 2, i64::MAX as u64, 1 << 40] {
        let mut reader = Reader::json(
            &served,
            &format!("resourceVersion=10&timeoutSeconds={seconds}"),
        )
        .await;
        assert!(reader.is_quiet().await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_selector_maps_changes_to_the_readers_event_types() {
    let served = served();
    let select = "resourceVersion=10&labelSelector=app%3Dred";
    let mut reader = Reader::json(&served, select).await;
    let store = served.store();
    store.apply(labelled("n", "a", 11, "red"), false);
    store.apply(labelled("n", "b", 12, "blue"), false);
    store.apply(labelled("n", "a", 13, "red"), false);
    store.apply(labelled("n", "a", 14, "blue"), false);
    store.apply(labelled("n", "b", 15, "red"), false);
    store.apply(labelled("n", "b", 16, "red"), true);
    store.apply(labelled("n", "a", 17, "blue"), true);
    assert_eq!(reader.next().await, of("ADDED", "a", 11));
    assert_eq!(reader.next().await, of("MODIFIED", "a", 13));
    // An object that leaves the selection is sent as deleted, in its last selected form, at the version at which it left.
    let left = reader.event().await.unwrap();
    assert_eq!(told(&left), of("DELETED", "a", 14));
    assert_eq!(left["object"]["metadata"]["labels"]["app"], "red");
    assert_eq!(reader.next().await, of("ADDED", "b", 15));
    assert_eq!(reader.next().await, of("DELETED", "b", 16));
    assert!(reader.is_quiet().await);
    let mut one = Reader::json(
        &served,
        "resourceVersion=10&fieldSelector=metadata.name%3Db",
    )
    .await;
    for version in [12, 15, 16] {
        assert_eq!(one.next().await.2, version.to_string());
    }
}

#[tokio::test(start_paused = true)]
async fn a_version_too_old_or_of_another_history_gets_410_in_a_watch() {
    let served = served();
    assert_eq!(
        Reader::json(&served, "resourceVersion=9")
            .await
            .until_gone()
            .await,
        0
    );
    let mut reader = Reader::json(&served, "resourceVersion=10").await;
    served.store().replace(7, vec![object("n", "b", 7)]);
    assert_eq!(reader.until_gone().await, 0);
    // A client that is ahead waits until its version is known.
    let mut ahead = Reader::json(&served, "resourceVersion=20").await;
    assert!(ahead.is_quiet().await);
    served.store().apply(object("n", "c", 19), false);
    assert!(ahead.is_quiet().await);
    served.store().apply(object("n", "d", 21), false);
    assert_eq!(ahead.next().await, of("ADDED", "d", 21));
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_does_not_read_is_dropped_and_frees_its_memory() {
    let filler = "x".repeat(1000);
    let each = |number: u64| labelled("n", &format!("s{number:04}"), number + 1, &filler);
    let served = Served::new(50_000, 1 << 20);
    served
        .store()
        .replace(1000, (0..500).map(each).collect::<Vec<Object>>());
    let mut initial = Reader::json(&served, "").await;
    let mut later = Reader::json(&served, "resourceVersion=1000").await;
    assert!(initial.read().await);
    let weak = served.store().list_state().unwrap();
    assert!(weak.upgrade().is_some());
    assert_eq!(served.store().status().watchers, 2);
    advance(Duration::from_secs(61)).await;
    for version in 1001..1100 {
        served
            .store()
            .apply(labelled("n", "s0007", version, &filler), false);
    }
    assert!(weak.upgrade().is_none(), "the state for the client is gone");
    assert!(initial.until_gone().await < 100);
    assert_eq!(later.until_gone().await, 0);
    drop((initial, later));
    assert_eq!(served.store().status().watchers, 0);
}

#[tokio::test(start_paused = true)]
async fn readers_that_begin_during_changes_hold_few_states() {
    let served = served();
    let mut states = Vec::new();
    for version in 11..1000 {
        served.store().apply(object("n", "a", version), false);
        states.push(served.store().list_state().unwrap());
    }
    let held = states
        .iter()
        .filter(|state| state.upgrade().is_some())
        .count();
    assert!((10..=61).contains(&held), "{held}");
}

#[tokio::test(start_paused = true)]
async fn only_followers_are_released_after_a_source_outage() {
    let served = served();
    let mut follower = Reader::json(&served, "resourceVersion=10&fresh=true").await;
    let mut reader = Reader::json(&served, "resourceVersion=10").await;
    served.store().mark_lost(Duration::from_mins(1));
    let begun = tokio::time::Instant::now();
    assert_eq!(follower.event().await, None);
    let let_go = begun.elapsed().as_secs();
    assert!((3..5).contains(&let_go), "after {let_go} s");
    assert!(
        timeout(Duration::from_millis(10), reader.event())
            .await
            .is_err()
    );
}

#[tokio::test(start_paused = true)]
async fn readers_cut_off_during_an_outage_miss_no_event_afterwards() {
    let served = Served::of(
        10,
        ["a", "b", "c", "d"]
            .map(|name| object("n", name, 5))
            .to_vec(),
    );
    let mut reader = Reader::json(&served, "resourceVersion=10").await;
    served
        .store()
        .replace(20, vec![object("n", "d", 15), object("n", "e", 17)]);
    let mut events = Vec::new();
    for _ in 0..5 {
        events.push(reader.next().await);
    }
    assert!(reader.is_quiet().await);
    for (at, event) in events.iter().enumerate() {
        // A client that received exactly this returns.
        let mut again = Reader::json(&served, &format!("resourceVersion={}", event.2)).await;
        if at + 1 == events.len() {
            assert_eq!(event.2, "20");
            assert!(again.is_quiet().await);
        } else {
            assert_eq!(again.until_gone().await, 0, "after {event:?}");
        }
    }
}

/// A follower forwards the events that it receives. A client that comes from another server may be at any version of an
/// outage, and know objects that existed only within it. So the derived events are no valid history for it.
#[tokio::test(start_paused = true)]
async fn a_follower_must_list_and_gets_no_guessed_events() {
    let served = served();
    let mut follower = Reader::json(&served, "resourceVersion=10&fresh=true").await;
    let mut reader = Reader::json(&served, "resourceVersion=10").await;
    served.store().replace(20, vec![object("n", "a", 15)]);
    assert_eq!(follower.until_gone().await, 0);
    assert_eq!(reader.next().await, of("MODIFIED", "a", 15));
    let mut again = Reader::json(&served, "resourceVersion=10&fresh=true").await;
    assert_eq!(again.until_gone().await, 0);
    let mut listed = Reader::json(&served, "resourceVersion=20&fresh=true").await;
    assert!(listed.is_quiet().await);
    // A single change is not derived.
    served.store().replace(21, vec![object("n", "a", 21)]);
    assert_eq!(listed.next().await, of("MODIFIED", "a", 21));
}

#[tokio::test(start_paused = true)]
async fn partial_metadata_is_sent_as_such() {
    let served = served();
    let accept = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io";
    let mut reader = Reader::of(&served, "allowWatchBookmarks=true", accept).await;
    for word in ["ADDED", "ADDED", "BOOKMARK"] {
        let event = reader.event().await.unwrap();
        assert_eq!(
            (&event["type"], &event["object"]["kind"]),
            (&word.into(), &"PartialObjectMetadata".into())
        );
        assert!(event["object"].get("spec").is_none());
    }
}

/// Returns the fields of a message: numbers and bytes. Integers are left out.
fn fields(mut bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = varint(&mut bytes);
        if key & 7 == 2 {
            let (field, rest) = bytes.split_at(usize::try_from(value).unwrap());
            fields.push((key >> 3, field));
            bytes = rest;
        }
    }
    fields
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            break;
        }
    }
    value
}

fn field(bytes: &[u8], number: u64) -> &[u8] {
    let mut fields = fields(bytes).into_iter();
    fields.find(|field| field.0 == number).unwrap().1
}

#[tokio::test(start_paused = true)]
async fn protobuf_comes_in_frames_that_decode() {
    let served = served();
    let accept = "application/vnd.kubernetes.protobuf;stream=watch";
    let mut readers = Vec::new();
    // The second of them is answered from the cache.
    for _ in 0..2 {
        readers.push(
            Reader::of(
                &served,
                "resourceVersion=10&allowWatchBookmarks=true",
                accept,
            )
            .await,
        );
    }
    served.store().apply(object("n", "c", 11), false);
    served.store().apply(object("n", "a", 12), true);
    for mut reader in readers {
        for (word, name, version) in [
            ("ADDED", "c", "11"),
            ("DELETED", "a", "12"),
            ("BOOKMARK", "", "12"),
        ] {
            while reader.1.is_empty() {
                assert!(reader.read().await);
            }
            let (length, rest) = reader.1.split_first_chunk::<4>().unwrap();
            let (event, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
            assert_eq!(field(event, 1), word.as_bytes());
            let envelope = field(field(event, 2), 1).strip_prefix(b"k8s\0").unwrap();
            assert_eq!(field(field(envelope, 1), 2), b"Service");
            let meta = field(field(envelope, 2), 1);
            let of = |number| {
                fields(meta)
                    .into_iter()
                    .find(|field| field.0 == number)
                    .map_or(&b""[..], |field| field.1)
            };
            assert_eq!((of(1), of(6)), (name.as_bytes(), version.as_bytes()));
            reader.1 = rest.to_vec();
        }
    }
}
