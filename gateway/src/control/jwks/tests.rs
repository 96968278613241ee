use super::*;
use causeway_certs::install_provider;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

const KEYS: &str = r#"{ "keys": [{ "kty": "OKP", "crv": "Ed25519", "kid": "one",
    "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo" }] }"#;
const REFRESH: Duration = Duration::from_mins(10);

fn set() -> KeySet {
    KeySet::parse(KEYS.as_bytes()).unwrap()
}

/// Fetches keys while `work` runs, and returns the seconds after which they were fetched.
async fn fetched_at(
    (keys, writer): &(JwksCache, JwksWriter),
    work: impl AsyncFnOnce(&JwksCache),
    mut answer: impl FnMut(usize) -> Option<KeySet>,
) -> Vec<u64> {
    let began = Instant::now();
    let fetches = Mutex::new(Vec::new());
    let fetch = || {
        let mut fetches = fetches.lock().unwrap();
        fetches.push(began.elapsed().as_secs());
        std::future::ready(answer(fetches.len()))
    };
    tokio::select! {
        () = run_fetches(writer, REFRESH, fetch) => {}
        () = work(keys) => {}
    }
    fetches.into_inner().unwrap()
}

/// Advances the paused clock.
async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn keys_are_fetched_at_once_and_then_as_often_as_configured() {
    let table = JwksCache::refreshable(REFRESH);
    let work = async |_: &JwksCache| seconds(1210).await;
    assert_eq!(
        fetched_at(&table, work, |_| Some(set())).await,
        [0, 600, 1200]
    );
}

#[tokio::test(start_paused = true)]
async fn a_silent_issuer_is_retried_at_growing_intervals() {
    let table = JwksCache::refreshable(REFRESH);
    let work = async |keys: &JwksCache| {
        seconds(60).await;
        assert!(keys.current().is_err());
        seconds(41).await;
        keys.current().unwrap();
    };
    let answer = |time: usize| (time > 4).then(set);
    assert_eq!(fetched_at(&table, work, answer).await, [0, 10, 30, 60, 100]);
}

#[tokio::test(start_paused = true)]
async fn unknown_key_ids_cause_one_fetch_in_ten_seconds_per_issuer() {
    let table = JwksCache::refreshable(REFRESH);
    let bound = Duration::from_secs(3);
    let work = async |keys: &JwksCache| {
        seconds(100).await;
        for _ in 0..15 {
            for _ in 0..1000 {
                keys.request_fetch(bound).await;
            }
            seconds(1).await;
        }
    };
    assert_eq!(
        fetched_at(&table, work, |_| Some(set())).await,
        [0, 100, 110]
    );
}

/// Starts a local server that gives each connection the next of these responses, and repeats the last one.
async fn server(answers: &'static [String]) -> (String, Arc<AtomicUsize>, TaskGroup) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/keys?p=secret", listener.local_addr().unwrap());
    let (tasks, asked) = (TaskGroup::default(), Arc::new(AtomicUsize::new(0)));
    let counted = asked.clone();
    tasks.spawn(info_span!("server"), async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let number = counted.fetch_add(1, SeqCst).min(answers.len() - 1);
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(socket.read_u8().await.unwrap());
            }
            assert!(head.starts_with(b"GET /keys?p=secret HTTP/1.1\r\nHost: 127.0.0.1:"));
            // The client may have disconnected because it has read enough.
            let _ = socket.write_all(answers[number].as_bytes()).await;
        }
    });
    (url, asked, tasks)
}

fn answer(head: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {head}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn fetch(answer: String) -> Result<KeySet, String> {
    let answers: &'static [String] = vec![answer].leak();
    let (url, _, _server) = server(answers).await;
    JwksSource::new(&url.parse().unwrap(), None)
        .unwrap()
        .fetch()
        .await
}

#[tokio::test]
async fn an_invalid_key_set_is_refused_and_described() {
    assert_eq!(fetch(answer("200 OK", KEYS)).await, Ok(set()));
    for (answer, says) in [
        (answer("404 Not Found", KEYS), "404"),
        (
            answer("302 Found\r\nLocation: http://127.0.0.1/", KEYS),
            "redirects are not followed",
        ),
        (answer("200 OK", "<html>"), "not a JSON Web Key Set"),
        (
            answer("200 OK", &" ".repeat((1 << 20) + 1)),
            "larger than 1048576",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{".to_owned(),
            "is incomplete",
        ),
        ("what?\r\n\r\n".to_owned(), "no answer"),
    ] {
        let refused = fetch(answer).await.unwrap_err();
        assert!(refused.contains(says), "{says}: {refused}");
    }
}

#[tokio::test]
async fn a_loopback_name_with_a_remote_address_serves_no_plain_keys() {
    let url = "http://192.0.2.1/keys".parse().unwrap();
    let refused = JwksSource::new(&url, None)
        .unwrap()
        .fetch()
        .await
        .unwrap_err();
    assert!(refused.contains("only for this machine"), "{refused}");
}

#[tokio::test]
async fn listeners_share_a_key_set_and_the_last_one_stops_the_fetches() {
    install_provider();
    let answers: &'static [String] = vec![answer("200 OK", KEYS)].leak();
    let (url, asked, _server) = server(answers).await;
    let metrics = Metrics::new();
    let issuers = JwksFetchers::new(
        TaskGroup::default(),
        Handle::current(),
        Duration::from_mins(2),
        metrics.clone(),
    );
    let jwt = Jwt::new("https://id.test", "causeway", url.parse().unwrap());
    let first = issuers.keys(&jwt, None).unwrap();
    let second = issuers.keys(&jwt, None).unwrap();
    first.request_fetch(Duration::from_mins(2)).await;
    assert!(second.is_current(&first.current().unwrap()));
    assert_eq!(asked.load(SeqCst), 1);
    assert!(
        metrics
            .encode(causeway_rt::Exposition::OpenMetrics)
            .contains("jwks_fetches_total{outcome=\"ok\"} 1")
    );
    assert_eq!(issuers.tasks.len(), 1);
    drop((first, second));
    tokio::time::timeout(
        Duration::from_mins(2),
        issuers.tasks.drain(Duration::from_mins(2)),
    )
    .await
    .unwrap();
    let third = issuers.keys(&jwt, None).unwrap();
    assert!(third.current().is_err(), "the pauses start again");
}
