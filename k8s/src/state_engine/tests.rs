use super::{
    shard::{ENTRIES_KEY, MAX_SECRET_BYTES, entries_text},
    *,
};
use bytes::Bytes;
use causeway_certs::{
    Ca, CaError, Fingerprint, NodeName, NodeRecord, OpenMode, Pin, Revocation, RotationStep,
    SharedCa, Store, StoreError, entry_text,
};
use causeway_gateway::shared_state::SharedState;
use futures_util::{StreamExt, future::join_all, stream};
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use k8s_openapi::ByteString;
use kube::{ResourceExt, client::Body};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    convert::Infallible,
    sync::{Mutex, MutexGuard},
};
use tokio::sync::watch;

const NAMESPACE: &str = "causeway";
const NAME: &str = "causeway-state";
const CA_NAME: &str = "causeway-ca";

/// Returns the name of the Secret with this number.
fn secret_name(index: usize) -> String {
    let names = SecretNames {
        state: NAME.to_owned(),
        ca: CA_NAME.to_owned(),
    };
    names.name(index)
}

/// API of Secrets, in memory.
#[derive(Clone, Default)]
struct Api(Arc<Mutex<ApiState>>, watch::Sender<usize>);

#[derive(Default)]
struct ApiState {
    secrets: BTreeMap<String, Secret>,
    version: u64,
    /// Events of watches: name, type and object.
    events: Vec<(String, &'static str, Value)>,
    /// Number of writes after which the API fails.
    writes_left: Option<usize>,
    /// Whether all requests fail.
    down: bool,
    /// Verbs that are refused for the Secret with the CA.
    refused: &'static [&'static str],
    reads: usize,
    writes: usize,
}

impl Api {
    /// Returns the API after the manifest was applied.
    fn with_manifest() -> Self {
        let api = Self::default();
        api.apply_manifest();
        api
    }

    fn state(&self) -> MutexGuard<'_, ApiState> {
        self.0.lock().unwrap()
    }

    fn store(&self, mut secret: Secret, kind: &'static str) -> Value {
        let mut state = self.state();
        state.version += 1;
        secret.metadata.resource_version = Some(state.version.to_string());
        let (name, object) = (secret.name_any(), json!(secret));
        if kind == "DELETED" {
            state.secrets.remove(&name);
        } else {
            state.secrets.insert(name.clone(), secret);
        }
        state.events.push((name, kind, object.clone()));
        self.1.send_replace(state.events.len());
        object
    }

    /// Creates the missing Secrets, as `examples/state` has them.
    fn apply_manifest(&self) {
        for index in 0..=CA_SECRET {
            let name = secret_name(index);
            let state = self.state();
            if state.secrets.contains_key(&name) {
                continue;
            }
            let mut secret = Secret::default();
            secret.metadata.name = Some(name);
            secret.metadata.namespace = Some(NAMESPACE.to_owned());
            secret.metadata.uid = Some(format!("uid-{}", state.version));
            drop(state);
            self.store(secret, "ADDED");
        }
    }

    fn change(&self, index: usize, change: impl FnOnce(&mut BTreeMap<String, ByteString>)) {
        let secret = self.state().secrets.get(&secret_name(index)).cloned();
        let mut secret = secret.unwrap();
        change(secret.data.get_or_insert_default());
        self.store(secret, "MODIFIED");
    }

    fn set(&self, index: usize, key: &str, text: &str) {
        self.change(index, |data| {
            data.insert(key.to_owned(), ByteString(text.as_bytes().to_vec()));
        });
    }

    fn delete(&self, index: usize) {
        let secret = self.state().secrets.get(&secret_name(index)).cloned();
        self.store(secret.unwrap(), "DELETED");
    }

    /// Replaces all Secrets by the manifest.
    fn replace_all(&self) {
        for index in 0..SHARDS {
            self.change(index, BTreeMap::clear);
        }
    }

    fn text(&self, index: usize, key: &str) -> Option<String> {
        let state = self.state();
        let data = state.secrets.get(&secret_name(index))?.data.as_ref()?;
        Some(String::from_utf8(data.get(key)?.0.clone()).unwrap())
    }

    /// Returns the response to a request that is no watch.
    fn answer(&self, method: &Method, path: &str, query: &str, body: &[u8]) -> (u16, Value) {
        let failure = |code: u16, reason: &str| {
            let status = json!({ "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": format!("{reason} {path}") });
            (code, status)
        };
        let verb = match *method {
            Method::PUT => "update",
            _ if path.ends_with("/secrets") => "list",
            _ => "get",
        };
        let is_of_ca = path.ends_with(CA_NAME) || query.contains(CA_NAME);
        if is_of_ca && self.state().refused.contains(&verb) {
            let (code, mut status) = failure(403, "Forbidden");
            status["message"] = json!(format!(
                "secrets \"{CA_NAME}\" is forbidden: User \"gateway\" cannot {verb} resource \"secrets\" in API group \"\" in the namespace \"{NAMESPACE}\""
            ));
            return (code, status);
        }
        if *method == Method::PUT {
            let secret: Secret = serde_json::from_slice(body).unwrap();
            let mut state = self.state();
            state.writes += 1;
            let Some(current) = state.secrets.get(&secret.name_any()) else {
                return failure(404, "NotFound");
            };
            let (now, next) = (&current.metadata, &secret.metadata);
            if now.resource_version != next.resource_version || now.uid != next.uid {
                return failure(409, "Conflict");
            }
            drop(state);
            return (200, self.store(secret, "MODIFIED"));
        }
        let mut state = self.state();
        state.reads += 1;
        if let Some(name) = path.strip_prefix("/api/v1/namespaces/causeway/secrets/") {
            match state.secrets.get(name) {
                Some(secret) => (200, json!(secret)),
                None => failure(404, "NotFound"),
            }
        } else {
            let items = state.secrets.get(&selected(query));
            let version = state.version.to_string();
            let items: Vec<_> = items.into_iter().collect();
            let list = json!({ "kind": "SecretList", "apiVersion": "v1", "metadata": { "resourceVersion": version }, "items": items });
            (200, list)
        }
    }

    /// Returns the events of a Secret after a version.
    fn watch(&self, query: &str) -> impl futures_util::Stream<Item = Bytes> + use<> {
        let after = query.split("resourceVersion=").nth(1).unwrap();
        let after: u64 = after.split('&').next().unwrap().parse().unwrap();
        let name = selected(query);
        let (api, changes) = (self.clone(), self.1.subscribe());
        let lines = stream::unfold((0, changes), move |(from, mut changes)| {
            let (api, name) = (api.clone(), name.clone());
            async move {
                let known = *changes.wait_for(|count| *count > from).await.ok()?;
                let lines = api.state().events[from..known]
                    .iter()
                    .filter(|event| event.0 == name)
                    .filter(|event| {
                        let version = event.2["metadata"]["resourceVersion"].as_str();
                        version.unwrap().parse::<u64>().unwrap() > after
                    })
                    .map(|event| json!({ "type": event.1, "object": event.2 }).to_string() + "\n")
                    .collect::<Vec<_>>()
                    .concat();
                Some((Bytes::from(lines), (known, changes)))
            }
        });
        lines.filter(|lines| std::future::ready(!lines.is_empty()))
    }

    fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                {
                    let mut state = api.state();
                    let is_write = head.method == Method::PUT;
                    if state.down || (is_write && state.writes_left == Some(0)) {
                        return Err(kube::Error::TlsRequired);
                    }
                    if is_write {
                        state.writes_left = state.writes_left.map(|left| left - 1);
                    }
                }
                let query = head.uri.query().unwrap_or_default();
                let frame = |bytes| Ok::<_, Infallible>(Frame::data(bytes));
                let (status, body) = if query.contains("watch=true") {
                    (200, api.watch(query).map(frame).boxed())
                } else {
                    let (status, answer) = api.answer(&head.method, head.uri.path(), query, &body);
                    let answer = Bytes::from(answer.to_string());
                    (status, stream::iter([frame(answer)]).boxed())
                };
                let response = Response::builder().status(status);
                Ok(response.body(StreamBody::new(body)).unwrap())
            }
        });
        Client::new(service, NAMESPACE)
    }

    fn engine(&self) -> SecretEngine {
        SecretEngine::new(self.client(), NAMESPACE, NAME, CA_NAME)
    }
}

/// Returns the name in the field selector of a list or a watch.
fn selected(query: &str) -> String {
    let name = query.split("metadata.name%3D").nth(1).unwrap();
    name.split('&').next().unwrap().to_owned()
}

fn change(key: &str, expected: Option<&str>, value: Option<&str>) -> EntryChange {
    EntryChange {
        key: key.to_owned(),
        expected: expected.map(str::to_owned),
        value: value.map(str::to_owned),
    }
}

fn revocation(reason: &str) -> String {
    let reason = reason.to_owned();
    entry_text(&Revocation {
        at: 7,
        reason,
        other: causeway_certs::OtherFields::new(),
    })
}

#[test]
fn entries_of_a_node_are_in_one_secret_which_never_changes() {
    for (key, index) in [
        ("ca", CA_SECRET),
        ("version", 0),
        ("node/edge-1", 15),
        ("revoked/edge-1", 15),
        ("pin/edge-1:10250", 15),
        ("pin/edge-1:9100", 15),
        ("node/edge-2.example", 7),
        ("token/0123456789ab", 4),
        ("later/edge-1", 15),
    ] {
        assert_eq!(shard_index(key), index, "{key}");
    }
}

fn fleet(nodes: usize) -> Entries {
    let mut entries = Entries::new();
    for number in 0..nodes {
        let node = format!("edge-{number:05}.site-{:03}.example", number % 500);
        let key = format!("{number:064x}").parse::<Fingerprint>().unwrap();
        let labels = [
            ("site", format!("site-{:03}", number % 500)),
            ("zone", "eu-central-1a".into()),
        ];
        let record = NodeRecord {
            addresses: vec!["10.1.2.3".parse().unwrap()],
            pool: Some(format!("pool-{:03}", number % 500)),
            labels: labels.map(|(key, value)| (key.to_owned(), value)).into(),
            serial: "7b1f04c9d2e8a6537b1f04c9d2e8a653".to_owned(),
            root: Some(key),
            not_after: Some(1_796_000_000),
            ..NodeRecord::name_only(&NodeName::parse(&node).unwrap(), 1_764_195_000)
        };
        entries.insert(format!("node/{node}"), entry_text(&record));
        let pin = Pin {
            key,
            since: 1_764_195_000,
        };
        entries.insert(format!("pin/{node}:10250"), entry_text(&pin));
    }
    entries
}

#[test]
fn twenty_thousand_nodes_fit_into_the_secrets() {
    let mut shards = vec![Entries::new(); SHARDS];
    for (key, value) in fleet(20_000) {
        shards[shard_index(&key)].insert(key, value);
    }
    let sizes: Vec<usize> = shards
        .iter()
        .map(|shard| entries_text(shard).len())
        .collect();
    let largest = *sizes.iter().max().unwrap();
    println!("bytes of each Secret: {sizes:?}");
    // The rest is for the CA, tokens and revocations.
    assert!(largest < MAX_SECRET_BYTES * 85 / 100, "{largest}");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_is_too_large_is_an_error_that_names_it() {
    let api = Api::with_manifest();
    let engine = api.engine();
    engine.load().await.unwrap();
    let large = "x".repeat(MAX_SECRET_BYTES);
    let changes = vec![
        change("node/edge-1", None, Some(&large)),
        change("node/edge-2.example", None, Some("1")),
    ];
    let why = engine.write(changes).await.unwrap_err().to_string();
    for part in [
        "Secret causeway/causeway-state-15: ",
        "1048",
        "causeway node remove",
    ] {
        assert!(why.contains(part), "{why}");
    }
    let other = engine.get("node/edge-2.example").await.unwrap();
    assert_eq!(other.as_deref(), Some("1"), "the other Secret is written");
}

#[tokio::test(start_paused = true)]
async fn two_gateways_fill_new_secrets_at_once() {
    let api = Api::with_manifest();
    let engines = [api.engine(), api.engine(), api.engine()];
    for entries in join_all(engines.iter().map(StateEngine::load)).await {
        assert_eq!(entries.unwrap(), Entries::new());
    }
    for index in 0..SHARDS {
        assert_eq!(api.text(index, ENTRIES_KEY).as_deref(), Some("{}"));
    }
    // A gateway that comes later only reads.
    let writes = api.state().writes;
    assert_eq!(api.engine().load().await.unwrap(), Entries::new());
    assert_eq!(api.state().writes, writes);
}

#[tokio::test(start_paused = true)]
async fn one_of_two_writers_of_an_entry_wins_and_the_other_gets_the_conflict() {
    let api = Api::with_manifest();
    let engines = [api.engine(), api.engine()];
    for engine in &engines {
        engine.load().await.unwrap();
    }
    let values = [r#"{"a":"\u00e9 1"}"#, "2"];
    let writes = engines.iter().zip(values).map(|(engine, value)| {
        // The own entry of each is in the same Secret.
        let own = format!("pin/edge-1:{}", 1000 + value.len());
        engine.write(vec![
            change("node/edge-1", None, Some(value)),
            change(&own, None, Some(value)),
            change("revoked/edge-9", Some("no such value"), None),
        ])
    });
    let outcomes = join_all(writes).await;
    let outcomes: Vec<BTreeSet<String>> = outcomes
        .into_iter()
        .map(|conflicts| conflicts.unwrap().into_iter().collect())
        .collect();
    let lost = outcomes.iter().filter(|it| it.contains("node/edge-1"));
    assert_eq!(lost.count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().all(|it| it.contains("revoked/edge-9")));
    let winner = outcomes.iter().position(|it| !it.contains("node/edge-1"));
    let winner = values[winner.unwrap()];
    for engine in &engines {
        let current = engine.get("node/edge-1").await.unwrap();
        assert_eq!(current.as_deref(), Some(winner));
        let entries = engine.load().await.unwrap();
        assert_eq!(entries.get("node/edge-1").map(String::as_str), Some(winner));
        assert_eq!(entries.len(), 3, "{entries:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_of_another_gateway_is_seen_without_further_reads() {
    let api = Api::with_manifest();
    let (first, second) = (api.engine(), api.engine());
    first.load().await.unwrap();
    second.load().await.unwrap();
    // The first lists of the watches.
    sleep(Duration::from_secs(1)).await;
    second.load().await.unwrap();
    let reads = api.state().reads;
    let writes = api.state().writes;
    let quiet = timeout(Duration::from_secs(30), second.changed()).await;
    assert!(quiet.is_err(), "nothing has changed");
    let conflicts = first.write(vec![change("node/edge-1", None, Some("1"))]);
    assert!(conflicts.await.unwrap().is_empty());
    second.changed().await;
    let entries = second.load().await.unwrap();
    assert_eq!(entries.get("node/edge-1").map(String::as_str), Some("1"));
    // A write after the change of another gateway needs no read: the watch has brought the version.
    let conflicts = second.write(vec![change("node/edge-1", Some("1"), None)]);
    assert!(conflicts.await.unwrap().is_empty());
    let state = api.state();
    assert_eq!((state.reads - reads, state.writes - writes), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_reported_and_changes_in_it_are_loaded_afterwards() {
    let api = Api::with_manifest();
    let engine = api.engine();
    engine.load().await.unwrap();
    api.state().down = true;
    // The watches end at the latest after their timeout.
    let mut failures = 0;
    while failures < 3 {
        engine.changed().await;
        failures += usize::from(engine.load().await.is_err());
    }
    assert!(engine.get("version").await.is_err());
    assert!(
        engine
            .write(vec![change("version", None, Some("1"))])
            .await
            .is_err()
    );
    api.set(0, ENTRIES_KEY, r#"{"version":"2"}"#);
    api.state().down = false;
    let loaded = timeout(Duration::from_secs(6), async {
        while engine.load().await.is_err() {
            engine.changed().await;
        }
        engine.load().await.unwrap()
    });
    let entries = loaded.await.unwrap();
    assert_eq!(entries.get("version").map(String::as_str), Some("2"));
}

const EARLIER: &str = r#"{"revoked":{"edge-1":{"at":7,"reason":"stolen"},"edge-3":{"at":8,"reason":"lost"}},"pins":{"edge-2:10250":{"key":"PIN","since":7}}}"#;

/// Returns the state of the earlier format, and its entries.
fn earlier() -> (String, Entries) {
    let key = "5a".repeat(32).parse::<Fingerprint>().unwrap();
    let text = EARLIER.replace("PIN", &key.to_string());
    let entries = [
        ("revoked/edge-1", revocation("stolen")),
        ("revoked/edge-3", revocation("lost").replace('7', "8")),
        ("pin/edge-2:10250", entry_text(&Pin { key, since: 7 })),
    ];
    let entries = entries.map(|(key, value)| (key.to_owned(), value));
    (text, entries.into())
}

/// Whether each revocation is in the form that gateways use at this moment.
fn is_revoked(api: &Api, node: &str) -> bool {
    let key = format!("revoked/{node}");
    match api.text(0, ENTRIES_KEY) {
        None => api.text(0, "state.json").unwrap().contains(node),
        Some(_) => api
            .text(shard_index(&key), ENTRIES_KEY)
            .unwrap()
            .contains(&key),
    }
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_dies_while_it_moves_the_earlier_state_loses_nothing() {
    let (text, entries) = earlier();
    for writes in 0..=SHARDS {
        let api = Api::with_manifest();
        api.set(0, "state.json", &text);
        api.state().writes_left = Some(writes);
        let died = api.engine().load().await;
        assert_eq!(died.is_ok(), writes == SHARDS, "{writes}: {died:?}");
        assert!(is_revoked(&api, "edge-1") && is_revoked(&api, "edge-3"));
        api.state().writes_left = None;
        let next = [api.engine(), api.engine()];
        for loaded in join_all(next.iter().map(StateEngine::load)).await {
            assert_eq!(loaded.unwrap(), entries, "{writes}");
        }
        assert!(is_revoked(&api, "edge-1") && is_revoked(&api, "edge-3"));
        let left = api.text(0, "state.json").unwrap();
        assert!(!left.contains("stolen") && left.contains("moved"), "{left}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_in_the_earlier_format_during_the_move_is_moved_too() {
    let (text, mut entries) = earlier();
    for writes in 0..SHARDS {
        let api = Api::with_manifest();
        api.set(0, "state.json", &text);
        api.state().writes_left = Some(writes);
        assert!(api.engine().load().await.is_err());
        // A gateway of the earlier version revokes one node and allows another.
        api.state().writes_left = None;
        let changed = text.replace("edge-3", "edge-4");
        api.set(0, "state.json", &changed);
        if let Some(value) = entries.remove("revoked/edge-3") {
            entries.insert("revoked/edge-4".to_owned(), value);
        }
        assert_eq!(api.engine().load().await.unwrap(), entries, "{writes}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_secret_is_an_error_until_it_is_made_again() {
    let api = Api::with_manifest();
    let engine = api.engine();
    engine.load().await.unwrap();
    let write = vec![
        change("revoked/edge-1", None, Some("1")),
        change("revoked/edge-2.example", None, Some("2")),
    ];
    assert!(engine.write(write).await.unwrap().is_empty());
    let entries = engine.load().await.unwrap();
    api.delete(15);
    engine.changed().await;
    let why = loop {
        match engine.load().await {
            Err(why) => break why.to_string(),
            Ok(_) => engine.changed().await,
        }
    };
    assert!(
        why.starts_with("Secret causeway/causeway-state-15: it does not exist; apply"),
        "{why}"
    );
    assert!(engine.get("revoked/edge-1").await.is_err());
    let other = engine.get("revoked/edge-2.example").await.unwrap();
    assert_eq!(other.as_deref(), Some("2"));

    // A gateway that has never loaded the state cannot know the lost entries.
    api.apply_manifest();
    let new = api.engine();
    let why = new.load().await.unwrap_err().to_string();
    assert!(
        why.contains("kubectl -n causeway patch secret causeway-state-15 -p"),
        "{why}"
    );
    assert_eq!(engine.load().await.unwrap(), entries, "written back");
    assert_eq!(new.load().await.unwrap(), entries);
}

#[tokio::test(start_paused = true)]
async fn an_operator_can_go_on_without_the_lost_entries() {
    let api = Api::with_manifest();
    let engine = api.engine();
    engine.load().await.unwrap();
    let keys = ["revoked/edge-1", "revoked/edge-2.example", "version"];
    let write = keys.map(|key| change(key, None, Some("1"))).to_vec();
    assert!(engine.write(write).await.unwrap().is_empty());
    drop(engine);
    for (index, left) in [(15, &keys[1..]), (0, &keys[1..2])] {
        api.change(index, BTreeMap::clear);
        assert!(api.engine().load().await.is_err(), "{index}");
        // The command that the error message has.
        api.set(index, ENTRIES_KEY, "{}");
        let entries = api.engine().load().await.unwrap();
        assert!(entries.keys().eq(left), "{entries:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_gateway_with_the_state_writes_it_back_after_kubectl_replace() {
    let api = Api::with_manifest();
    let (text, entries) = earlier();
    api.set(0, "state.json", &text);
    let engine = api.engine();
    assert_eq!(engine.load().await.unwrap(), entries);
    for replaced in 0..2 {
        api.replace_all();
        if replaced == 1 {
            // A new gateway has begun to fill the Secrets.
            api.state().writes_left = Some(SHARDS - 1);
            assert!(api.engine().load().await.is_err());
            api.state().writes_left = None;
        }
        while api.text(0, ENTRIES_KEY).is_none() {
            engine.changed().await;
            assert_eq!(engine.load().await.unwrap(), entries);
        }
        assert_eq!(api.engine().load().await.unwrap(), entries);
    }
}

#[tokio::test(start_paused = true)]
async fn a_gateway_does_not_take_new_content_for_the_removal_of_all_entries() {
    let api = Api::with_manifest();
    let engine = api.engine();
    engine.load().await.unwrap();
    let write = vec![change("revoked/edge-1", None, Some("1"))];
    assert!(engine.write(write).await.unwrap().is_empty());
    api.state().down = true;
    api.replace_all();
    api.state().down = false;
    let new = api.engine();
    assert_eq!(new.load().await.unwrap(), Entries::new());
    sleep(Duration::from_secs(10)).await;
    let why = engine.load().await.unwrap_err().to_string();
    assert!(why.contains("keeps its copy"), "{why}");
}

/// Step of a change of the CA.
type CaStep = fn(Ca) -> Result<(Ca, RotationStep), CaError>;

/// Gateway with a data directory and an engine of its own.
struct TestGateway {
    folder: tempfile::TempDir,
    store: Store,
    shared: SharedState,
}

impl TestGateway {
    fn start(api: &Api) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), OpenMode::Create).unwrap();
        let shared = SharedState::new(Arc::new(api.engine()), store.clone(), true);
        Self {
            folder,
            store,
            shared,
        }
    }

    /// Changes the CA of the data directory as a command does.
    fn change_ca(&self, step: CaStep) {
        let step = |ca| Ok::<_, StoreError>(step(ca).unwrap());
        self.store.change_ca(step).unwrap();
    }

    /// Synchronizes after each change, until the condition is true.
    async fn synchronize_until(&self, is_done: impl Fn() -> bool) {
        let done = timeout(Duration::from_mins(1), async {
            while !is_done() {
                self.shared.synchronize().await.ok();
                if !is_done() {
                    self.shared.changed().await;
                }
            }
        });
        done.await.unwrap();
    }

    /// Synchronizes after each change, until the fault has this part. Returns the fault.
    async fn synchronize_until_fault(&self, part: &str) -> String {
        let found = timeout(Duration::from_mins(1), async {
            loop {
                match self.shared.synchronize().await {
                    Err(error) if error.to_string().contains(part) => return error.to_string(),
                    _ => self.shared.changed().await,
                }
            }
        });
        found.await.unwrap()
    }

    /// Returns the content that the Secret with the CA must have.
    fn files(&self) -> [Option<String>; 2] {
        let files = self.store.shared().unwrap().files().unwrap();
        files.map(|(_, text)| Some(text))
    }

    /// Returns the roots, the one that signs first.
    fn roots(&self) -> Vec<Fingerprint> {
        self.store.ca().unwrap().unwrap().fingerprints()
    }

    fn add_node(&self, node: &str) {
        let node = NodeName::parse(node).unwrap();
        let record = NodeRecord::name_only(&node, 7);
        self.store.nodes().put(record).unwrap();
    }

    fn has_node(&self, node: &str) -> bool {
        let nodes = self.store.nodes().all().unwrap();
        nodes.iter().any(|record| record.node.to_string() == node)
    }
}

fn new_ca() -> SharedCa {
    SharedCa::new(Ca::create(&"td".parse().unwrap()).unwrap())
}

/// Replaces the content of the Secret with the CA, as `causeway k8s ca-secret` and `kubectl replace` do.
fn replace_ca(api: &Api, shared: &SharedCa) {
    api.change(CA_SECRET, BTreeMap::clear);
    for (name, text) in shared.files().unwrap() {
        api.set(CA_SECRET, name, &text);
    }
}

/// Returns the content of the Secret with the CA.
fn stored_ca(api: &Api) -> [Option<String>; 2] {
    ["ca.json", "tickets.key"].map(|name| api.text(CA_SECRET, name))
}

#[tokio::test(start_paused = true)]
async fn the_secret_of_the_operator_is_the_entry_of_the_ca() {
    let (api, ca) = (Api::with_manifest(), new_ca());
    replace_ca(&api, &ca);
    api.set(CA_SECRET, "note", "of the operator");
    let engine = api.engine();
    // Before the state is loaded: a gateway cannot start without the CA.
    let entry = engine.get("ca").await.unwrap();
    assert_eq!(entry, Some(ca.to_entry().unwrap()));
    let entries = engine.load().await.unwrap();
    assert_eq!(entries.get("ca"), entry.as_ref());
    let next = new_ca();
    let write = change("ca", entry.as_deref(), Some(&next.to_entry().unwrap()));
    assert!(engine.write(vec![write.clone()]).await.unwrap().is_empty());
    assert_eq!(engine.write(vec![write]).await.unwrap(), ["ca"]);
    assert_eq!(
        stored_ca(&api),
        next.files().unwrap().map(|(_, text)| Some(text))
    );
    let note = api.text(CA_SECRET, "note");
    assert_eq!(note.as_deref(), Some("of the operator"));
    let remove = change("ca", Some(&next.to_entry().unwrap()), None);
    assert!(engine.write(vec![remove]).await.unwrap().is_empty());
    assert_eq!(stored_ca(&api), [None, None]);

    api.set(CA_SECRET, "ca.json", "{}");
    let why = api.engine().get("ca").await.unwrap_err().to_string();
    assert_eq!(
        why,
        "Secret causeway/causeway-ca: the data key tickets.key is missing"
    );
}

#[tokio::test(start_paused = true)]
async fn a_rotation_at_one_gateway_is_at_the_other_and_at_one_that_is_replaced() {
    let api = Api::with_manifest();
    replace_ca(&api, &new_ca());
    let [one, two] = [TestGateway::start(&api), TestGateway::start(&api)];
    for gateway in [&one, &two] {
        gateway.shared.synchronize().await.unwrap();
    }
    assert_eq!(one.roots(), two.roots());
    let steps: [(CaStep, usize); 4] = [
        (Ca::prepare, 0),
        (Ca::activate, 1),
        (Ca::retire, 0),
        (Ca::request_listener_ca, 1),
    ];
    for (step, number) in steps {
        let (here, there) = if number == 0 {
            (&one, &two)
        } else {
            (&two, &one)
        };
        here.change_ca(step);
        here.shared.synchronize().await.unwrap();
        assert!(stored_ca(&api) == here.files() && here.files() != there.files());
        there
            .synchronize_until(|| there.files() == here.files())
            .await;
    }
    // Its data directory was in memory.
    drop(one.folder);
    let next = TestGateway::start(&api);
    next.shared.synchronize().await.unwrap();
    assert_eq!(next.roots(), two.roots());
    assert!(next.files() == two.files());
    let ca = next.store.ca().unwrap().unwrap();
    assert!(ca.listener_request_pem().unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn of_two_steps_at_once_one_is_stored_and_the_other_gateway_reports_a_fault() {
    let api = Api::with_manifest();
    replace_ca(&api, &new_ca());
    let gateways = [TestGateway::start(&api), TestGateway::start(&api)];
    for gateway in &gateways {
        gateway.shared.synchronize().await.unwrap();
    }
    for (gateway, node) in gateways.iter().zip(["edge-1", "edge-2"]) {
        gateway.change_ca(Ca::prepare);
        gateway.add_node(node);
    }
    let results = join_all(gateways.iter().map(|it| it.shared.synchronize())).await;
    let winner = results.iter().position(Result::is_ok).unwrap();
    let (winner, loser) = (&gateways[winner], &gateways[1 - winner]);
    let lost = results.iter().find_map(|result| result.as_ref().err());
    let why = lost.unwrap().to_string();
    assert!(
        why.contains("each have a change that the other lacks"),
        "{why}"
    );
    assert_eq!(stored_ca(&api), winner.files());
    // The other entries are shared.
    for gateway in &gateways {
        let has_both = || gateway.has_node("edge-1") && gateway.has_node("edge-2");
        gateway.synchronize_until(has_both).await;
    }
    loser.shared.synchronize().await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn a_refused_verb_is_named_and_stops_no_other_entry() {
    let api = Api::with_manifest();
    replace_ca(&api, &new_ca());
    let [one, two] = [TestGateway::start(&api), TestGateway::start(&api)];
    for gateway in [&one, &two] {
        gateway.shared.synchronize().await.unwrap();
    }
    for (verb, refused, node) in [
        ("update", &["update"][..], "edge-1"),
        ("get", &["get", "list"], "edge-2"),
    ] {
        one.change_ca(Ca::prepare);
        one.add_node(node);
        api.state().refused = refused;
        // A gateway that has just started has no copy of the Secret in memory.
        let started = SharedState::new(Arc::new(api.engine()), one.store.clone(), true);
        let why = started.synchronize().await.unwrap_err().to_string();
        for part in [
            "Secret causeway/causeway-ca: ",
            &format!("cannot {verb} resource \"secrets\""),
            "needs the verbs get, list, watch and update",
        ] {
            assert!(why.contains(part), "{why}");
        }
        two.synchronize_until(|| two.has_node(node)).await;
    }
    api.state().refused = &[];
    one.shared.synchronize().await.unwrap();
    two.synchronize_until(|| one.files() == two.files()).await;
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_deleted_emptied_or_older_loses_no_step() {
    let api = Api::with_manifest();
    let gateway = TestGateway::start(&api);
    gateway.store.import_shared(&new_ca()).unwrap();
    let older = gateway.store.shared().unwrap();
    gateway.change_ca(Ca::prepare);
    // The empty Secret of the manifest gets the CA of the first gateway.
    let is_stored = || stored_ca(&api) == gateway.files();
    gateway.synchronize_until(is_stored).await;
    api.delete(CA_SECRET);
    gateway.add_node("edge-1");
    let remedy = "it does not exist; make it with `causeway k8s ca-secret --namespace causeway";
    let why = gateway.synchronize_until_fault(remedy).await;
    assert!(api.text(15, ENTRIES_KEY).unwrap().contains("node/edge-1"));
    assert_eq!(
        api.engine().get("ca").await.unwrap_err().to_string(),
        why,
        "a gateway that starts waits"
    );
    api.apply_manifest();
    gateway.synchronize_until(is_stored).await;
    replace_ca(&api, &older);
    gateway.synchronize_until(is_stored).await;
    // The CA of another system is not replaced.
    let other = new_ca();
    replace_ca(&api, &other);
    let fault = "it has another CA than";
    gateway.synchronize_until_fault(fault).await;
    let files = other.files().unwrap();
    assert_eq!(stored_ca(&api), files.map(|(_, text)| Some(text)));
}
