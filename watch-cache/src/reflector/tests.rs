use super::*;
use crate::{
    resource::GroupVersionResource,
    server::{AccessScope, CacheLimits, WatchCache},
    store::tests::{labelled, object},
};
use http::Request;
use http_body_util::BodyExt;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::SystemTime,
};
use tokio::{sync::Notify, task::JoinSet};

/// Another watch cache as a source, whose connection may be cut.
struct Through {
    pool: Arc<WatchCache>,
    cut: Arc<Cut>,
    asked: Mutex<Vec<String>>,
    as_pool: bool,
}

#[derive(Default)]
struct Cut {
    down: AtomicBool,
    now: Notify,
    count: AtomicUsize,
}

impl Cut {
    fn cut(&self) {
        self.down.store(true, Relaxed);
        self.count.fetch_add(1, Relaxed);
        self.now.notify_waiters();
    }

    fn mend(&self) {
        self.down.store(false, Relaxed);
    }
}

impl Through {
    fn new(pool: &Arc<WatchCache>, as_pool: bool) -> Arc<Self> {
        Arc::new(Self {
            pool: pool.clone(),
            cut: Arc::default(),
            asked: Mutex::default(),
            as_pool,
        })
    }
}

impl ListWatch for Through {
    fn get(&self, asked: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        self.asked.lock().unwrap().push(asked.clone());
        Box::pin(async move {
            if self.cut.down.load(Relaxed) {
                return Err("cut".to_owned());
            }
            let request = Request::get(&asked).header("accept-encoding", "gzip");
            let head = request.body(()).unwrap().into_parts().0;
            let (head, body) = self.pool.handle_request(&head, None).await.into_parts();
            let cut = self.cut.clone();
            let count = cut.count.load(Relaxed);
            let next = move |mut body: crate::ResponseBody| {
                let cut = cut.clone();
                async move {
                    if cut.count.load(Relaxed) != count {
                        return Some((Err("cut".to_owned()), body));
                    }
                    tokio::select! {
                        () = cut.now.notified() => Some((Err("cut".to_owned()), body)),
                        frame = body.frame() => {
                            let bytes = frame?.unwrap().into_data().unwrap();
                            Some((Ok(bytes), body))
                        }
                    }
                }
            };
            Ok(SourceResponse {
                status: head.status,
                headers: head.headers,
                body: futures_util::stream::unfold(body, next).boxed(),
            })
        })
    }

    fn is_watch_cache(&self) -> bool {
        self.as_pool
    }
}

/// The same source after a minute of silence.
struct Silent(Arc<Through>);

impl ListWatch for Silent {
    fn get(&self, asked: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        self.0.get(asked)
    }

    fn time_since_contact(&self) -> Duration {
        Duration::from_mins(1)
    }
}

fn pool(window: usize) -> Arc<WatchCache> {
    let services: GroupVersionResource = "v1/services".parse().unwrap();
    WatchCache::new(
        &[services],
        &CacheLimits {
            response_bytes: 1 << 20,
            event_buffer_bytes: window,
        },
    )
}

fn store(pool: &Arc<WatchCache>) -> Arc<Store> {
    pool.stores()[0].clone()
}

fn held(pool: &Arc<WatchCache>) -> Vec<(String, u64, String)> {
    let snapshot = store(pool).snapshot().unwrap();
    let objects = snapshot.objects.iter();
    objects
        .map(|object| {
            (
                object.key.1.to_string(),
                object.version,
                object.label("app").unwrap_or_default().to_owned(),
            )
        })
        .collect()
}

/// Keeps following the source after each error.
fn keep(tasks: &mut JoinSet<()>, pool: &Arc<WatchCache>, source: Arc<Through>) {
    let store = store(pool);
    tasks.spawn(async move {
        loop {
            reflect(&store, &*source).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
}

async fn until(pool: &Arc<WatchCache>, version: u64) {
    let store = store(pool);
    let mut changed = store.subscribe();
    let reached = async {
        while store.version() < version {
            changed.changed().await.unwrap();
        }
    };
    timeout(Duration::from_hours(1), reached)
        .await
        .expect("the version is reached");
}

#[tokio::test(start_paused = true)]
async fn a_paged_list_and_later_events_fill_a_store() {
    let (cloud, own) = (pool(1 << 20), pool(1 << 20));
    let many = (0..1200).map(|number| object("n", &format!("s{number:04}"), number + 1));
    store(&cloud).replace(2000, many.collect());
    store(&cloud).mark_connected(None);
    let source = Through::new(&cloud, false);
    let mut tasks = JoinSet::new();
    keep(&mut tasks, &own, source.clone());
    until(&own, 2000).await;
    assert_eq!(held(&own).len(), 1200);
    assert_eq!(
        source.asked.lock().unwrap().len(),
        4,
        "three parts of a list and a watch"
    );
    store(&cloud).apply(labelled("n", "s0001", 2001, "new"), false);
    store(&cloud).apply(object("n", "s0002", 2002), true);
    until(&own, 2002).await;
    assert_eq!(held(&own), held(&cloud));
    assert_eq!(store(&own).status().lost, None);
}

#[tokio::test(start_paused = true)]
async fn a_reflector_resumes_after_a_cut_and_lists_only_if_needed() {
    let (cloud, own) = (pool(10_000), pool(1 << 20));
    store(&cloud).replace(10, vec![object("n", "a", 10)]);
    store(&cloud).mark_connected(None);
    let source = Through::new(&cloud, true);
    let mut tasks = JoinSet::new();
    keep(&mut tasks, &own, source.clone());
    until(&own, 10).await;
    source.cut.cut();
    store(&cloud).apply(object("n", "b", 11), false);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(store(&own).status().lost.is_some());
    source.asked.lock().unwrap().clear();
    source.cut.mend();
    until(&own, 11).await;
    assert!(
        source
            .asked
            .lock()
            .unwrap()
            .iter()
            .all(|asked| asked.contains("watch=true"))
    );
    // More events than the buffer of the source holds.
    source.cut.cut();
    for version in 12..500 {
        store(&cloud).apply(object("n", &format!("c{}", version % 7), version), false);
    }
    source.cut.mend();
    until(&own, 499).await;
    assert_eq!(held(&own), held(&cloud));
    assert!(
        source
            .asked
            .lock()
            .unwrap()
            .iter()
            .any(|asked| !asked.contains("watch=true"))
    );
}

#[tokio::test(start_paused = true)]
async fn a_stale_source_is_no_source_for_a_filled_store() {
    let (leader, own) = (pool(1 << 20), pool(1 << 20));
    store(&leader).replace(10, vec![object("n", "a", 10)]);
    store(&leader).mark_lost(Duration::from_mins(1));
    let source = Through::new(&leader, true);
    // A cache without data takes the data of any age, and its watch ends.
    let ended = timeout(Duration::from_mins(1), reflect(&store(&own), &*source))
        .await
        .unwrap();
    assert!(matches!(ended, ReflectorError::Stale(..)), "{ended:?}");
    assert_eq!(held(&own), held(&leader));
    assert!(store(&own).stale_age().unwrap() >= Duration::from_secs(59));
    let ended = reflect(&store(&own), &*source).await;
    assert!(matches!(ended, ReflectorError::Stale(..)), "{ended:?}");
}

/// Checks that the view has this age, which is reported some time after it was noticed. The system's clock runs beside the
/// paused one.
async fn is_old(store: &Store, seconds: u64, begun: SystemTime) {
    assert_eq!(
        store.stale_age(),
        None,
        "another source may be there at once"
    );
    tokio::time::advance(Duration::from_secs(3)).await;
    let age = store.stale_age().unwrap_or_default().as_secs();
    // The clock of the machine goes on while time is paused.
    let since = begun.elapsed().unwrap().as_secs();
    assert!(
        (seconds..seconds + 5 + since).contains(&age),
        "{age} s, not {seconds}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_age_of_a_view_counts_from_the_sources_last_message() {
    let (cloud, here) = (pool(1 << 20), pool(1 << 20));
    store(&cloud).replace(5, vec![object("n", "a", 5)]);
    store(&cloud).mark_connected(None);
    let source = Through::new(&cloud, false);
    for (followed, age) in [(20, 20), (3600, 60)] {
        let silent = Silent(source.clone());
        let (store, begun) = (store(&here), SystemTime::now());
        let following = async { reflect(&store, &silent).await };
        let cutting = async {
            tokio::time::sleep(Duration::from_secs(followed)).await;
            assert_eq!(store.status().lost, None);
            source.cut.cut();
        };
        tokio::join!(following, cutting);
        source.cut.mend();
        is_old(&store, age, begun).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_view_is_stale_at_the_next_level_with_the_same_age() {
    let (leader, here) = (pool(1 << 20), pool(1 << 20));
    store(&leader).replace(5, vec![object("n", "a", 5)]);
    store(&leader).mark_connected(None);
    let (source, own) = (Through::new(&leader, true), store(&here));
    let begun = SystemTime::now();
    let following = async { reflect(&own, &*source).await };
    let losing = async {
        tokio::time::sleep(Duration::from_mins(2)).await;
        store(&leader).mark_lost(Duration::from_mins(1));
    };
    let (ended, ()) = tokio::join!(following, losing);
    assert!(matches!(ended, ReflectorError::Stale(..)), "{ended:?}");
    is_old(&own, 60, begun).await;
    // A cache that another source has just updated does not take over the age of this source.
    own.mark_connected(None);
    let ended = reflect(&own, &*source).await;
    assert!(matches!(ended, ReflectorError::Stale(..)), "{ended:?}");
    tokio::time::advance(Duration::from_secs(3)).await;
    assert_eq!(own.stale_age(), None);
}

#[tokio::test(start_paused = true)]
async fn a_view_never_goes_back_except_after_30_s_of_an_older_cloud() {
    let (gateway, own) = (pool(1 << 20), pool(1 << 20));
    store(&gateway).replace(10, vec![object("n", "a", 10)]);
    store(&gateway).mark_connected(None);
    store(&own).replace(100, vec![object("n", "z", 100)]);
    let source = Through::new(&gateway, true);
    let ended = reflect(&store(&own), &*source).await;
    assert!(matches!(ended, ReflectorError::Stale(..)), "{ended:?}");
    assert_eq!(store(&own).version(), 100);
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    keep(&mut tasks, &own, source);
    let store = store(&own);
    while store.version() == 100 {
        assert!(
            begun.elapsed() < Duration::from_secs(90),
            "it does not trust"
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(
        begun.elapsed() > Duration::from_secs(25),
        "it trusts too soon"
    );
    assert_eq!(held(&own), held(&gateway));
}

/// View of a Kubernetes client, from a list and watches: name → version, by the selector.
struct Client {
    pool: Arc<WatchCache>,
    selector: &'static str,
    known: Arc<Mutex<BTreeMap<String, u64>>>,
    version: Arc<Mutex<u64>>,
}

impl Client {
    async fn get(&self, query: &str) -> (StatusCode, crate::ResponseBody) {
        let asked = format!("/api/v1/services?labelSelector={}&{query}", self.selector);
        let head = Request::get(asked).body(()).unwrap().into_parts().0;
        let (head, body) = self.pool.handle_request(&head, None).await.into_parts();
        (head.status, body)
    }

    async fn list(&self) -> u64 {
        loop {
            let (status, body) = self.get("").await;
            let bytes = body.collect().await.unwrap().to_bytes();
            if status != StatusCode::OK {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
            let list: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            let mut known = self.known.lock().unwrap();
            known.clear();
            for item in list["items"].as_array().unwrap() {
                known.insert(name(item), version(item));
            }
            return version(&list);
        }
    }

    /// Runs like an informer: a list, then watches, and a list again after 410.
    async fn run(self, seed: u64) {
        let mut random = SmallRng::seed_from_u64(seed);
        'list: loop {
            let mut at = self.list().await;
            loop {
                *self.version.lock().unwrap() = at;
                let seconds = random.random_range(1..20);
                let query = format!(
                    "watch=true&allowWatchBookmarks=true&resourceVersion={at}&timeoutSeconds={seconds}"
                );
                let (status, mut body) = self.get(&query).await;
                assert_eq!(status, StatusCode::OK);
                let mut unread = Vec::new();
                while let Some(frame) = body.frame().await {
                    unread.extend_from_slice(&frame.unwrap().into_data().unwrap());
                    assert!(unread.ends_with(b"\n"), "a frame is whole");
                    for line in unread
                        .split(|byte| *byte == b'\n')
                        .filter(|line| !line.is_empty())
                    {
                        let event: Happening<'_> = serde_json::from_slice(line).unwrap();
                        if event.r#type == "ERROR" {
                            assert_eq!(event.object.code, 410, "{event:?}");
                            continue 'list;
                        }
                        at = self.take(&event, at);
                        *self.version.lock().unwrap() = at;
                    }
                    unread.clear();
                    if random.random_bool(0.05) {
                        // A slow reader.
                        tokio::time::sleep(Duration::from_secs(random.random_range(0..9))).await;
                    }
                }
            }
        }
    }

    fn take(&self, event: &Happening<'_>, at: u64) -> u64 {
        let (meta, mut known) = (&event.object.metadata, self.known.lock().unwrap());
        let new = meta.resource_version.parse().unwrap();
        assert!(new >= at, "versions never go back: {event:?} after {at}");
        match event.r#type {
            "ADDED" => assert!(
                known.insert(meta.name.to_owned(), new).is_none(),
                "added twice: {event:?}"
            ),
            "MODIFIED" => assert!(
                known.insert(meta.name.to_owned(), new).is_some(),
                "not added: {event:?}"
            ),
            "DELETED" => assert!(known.remove(meta.name).is_some(), "not there: {event:?}"),
            "BOOKMARK" => {}
            other => panic!("{other}"),
        }
        new
    }
}

/// The part of an event that the test checks: the test parses a hundred thousand of them, which takes most of its time.
#[derive(Debug, Deserialize)]
struct Happening<'a> {
    r#type: &'a str,
    #[serde(borrow)]
    object: ListedObject<'a>,
}

#[derive(Debug, Deserialize)]
struct ListedObject<'a> {
    #[serde(default)]
    code: u16,
    #[serde(borrow)]
    metadata: ReceivedEvent<'a>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ReceivedEvent<'a> {
    name: &'a str,
    resource_version: &'a str,
}

fn name(value: &serde_json::Value) -> String {
    value["metadata"]["name"].as_str().unwrap().to_owned()
}

fn version(value: &serde_json::Value) -> u64 {
    value["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap()
}

/// A client's view: its cache, its selector, its objects and its version.
type View = (
    usize,
    &'static str,
    Arc<Mutex<BTreeMap<String, u64>>>,
    Arc<Mutex<u64>>,
);

/// Starts clients at each level, with several selectors.
fn read(tasks: &mut JoinSet<()>, levels: &[Arc<WatchCache>]) -> Vec<View> {
    let mut views = Vec::new();
    for (number, pool) in levels.iter().enumerate() {
        for selector in ["", "app%3Dred", "app%21%3Dred"] {
            let client = Client {
                pool: pool.clone(),
                selector,
                known: Arc::default(),
                version: Arc::default(),
            };
            views.push((
                number,
                selector,
                client.known.clone(),
                client.version.clone(),
            ));
            tasks.spawn(client.run(number as u64));
        }
    }
    views
}

/// Changes the cloud at random, and the connections between the levels. Returns the version at the end.
async fn change(
    tasks: &mut JoinSet<()>,
    (cloud, cuts): (&Arc<WatchCache>, &[Arc<Cut>]),
    mut at: u64,
) -> u64 {
    let mut random = SmallRng::seed_from_u64(7);
    for _ in 0..10_000 {
        at += random.random_range(1..4);
        let name = format!("s{}", random.random_range(0..60));
        let app = ["red", "blue"][random.random_range(0..2)];
        let deleted = random.random_bool(0.3);
        store(cloud).apply(labelled("n", &name, at, app), deleted);
        let cut = &cuts[random.random_range(0..cuts.len())];
        match random.random_range(0..100) {
            0 => cut.cut(),
            1..5 => cut.mend(),
            5..30 => tokio::time::sleep(Duration::from_millis(random.random_range(1..400))).await,
            _ => {}
        }
        assert!(
            tasks.try_join_next().is_none(),
            "a reader got an inconsistent event"
        );
    }
    for cut in cuts {
        cut.mend();
    }
    store(cloud).apply(labelled("n", "last", at + 1, "red"), false);
    store(cloud).apply(labelled("n", "least", at + 2, "blue"), false);
    at + 2
}

/// Makes 10,000 random changes in the cloud. Clients read them through a gateway, a leader and a follower while the
/// connections between these are cut again and again. Each client at each level ends with the true state, and never receives
/// an inconsistent event.
#[tokio::test(start_paused = true)]
async fn readers_stay_consistent_through_10000_changes_and_cuts() {
    // The windows are small, so that outages exceed them.
    let levels = [pool(200_000), pool(100_000), pool(100_000), pool(50_000)];
    store(&levels[0]).replace(100, vec![object("n", "s0", 50)]);
    store(&levels[0]).mark_connected(None);
    let (mut tasks, mut cuts) = (JoinSet::new(), Vec::new());
    for (number, pair) in levels.windows(2).enumerate() {
        let source = Through::new(&pair[0], number > 0);
        cuts.push(source.cut.clone());
        keep(&mut tasks, &pair[1], source);
    }
    let views = read(&mut tasks, &levels);
    let at = change(&mut tasks, (&levels[0], &cuts), 100).await;
    for level in &levels[1..] {
        until(level, at).await;
        assert_eq!(held(level), held(&levels[0]));
    }
    let truth = held(&levels[0]);
    for (number, selector, known, version) in views {
        let is_wanted = |app: &str| match selector {
            "" => true,
            "app%3Dred" => app == "red",
            _ => app != "red",
        };
        let wanted = truth.iter().filter(|(_, _, app)| is_wanted(app));
        let wanted: BTreeMap<_, _> = wanted.map(|(name, at, _)| (name.clone(), *at)).collect();
        let newest = wanted.values().max().copied().unwrap();
        let reached = async {
            while *version.lock().unwrap() < newest {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let reached = timeout(Duration::from_mins(10), reached).await;
        reached.expect("a reader comes along");
        assert_eq!(
            *known.lock().unwrap(),
            wanted,
            "level {number}, {selector:?}"
        );
    }
    assert!(
        tasks.try_join_next().is_none(),
        "a reader got an inconsistent event"
    );
}

#[tokio::test]
async fn a_reader_reads_granted_resources_and_others_are_forbidden() {
    let pool = pool(1 << 20);
    store(&pool).replace(10, vec![object("n", "a", 10), object("m", "b", 9)]);
    let services = AccessScope {
        resources: vec!["v1/services".parse().unwrap()],
        namespaces: Some(vec!["n".to_owned()]),
    };
    let nothing = AccessScope::default();
    for (grant, path, status) in [
        (&services, "/api/v1/namespaces/n/services", 200),
        (&services, "/api/v1/namespaces/n/services/a", 200),
        (&services, "/api/v1/namespaces/m/services", 403),
        (&services, "/api/v1/services", 403),
        (&nothing, "/api/v1/namespaces/n/services", 403),
        (&nothing, "/api/v1", 404),
        (&services, "/api/v1", 200),
        (&services, "/api/v1/pods", 404),
    ] {
        let head = Request::get(path).body(()).unwrap().into_parts().0;
        let answer = pool.handle_request(&head, Some(grant)).await;
        assert_eq!(answer.status().as_u16(), status, "{path}");
    }
}
