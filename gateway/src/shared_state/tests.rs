//! Two data directories that share their state, by an engine in memory whose faults the tests choose.

use super::*;
use causeway_certs::{
    Ca, Entries, Fingerprint, JoinToken, Joining, NodeAttributes, NodeName, NodeRecord, NodeStatus,
    OpenMode, Pin, RepeatCheck, Revocation, RevocationEntry, TokenRecord, TokenRejected,
    TokenStore, entry_text,
};
use futures_util::{FutureExt, future::BoxFuture};
use std::{
    collections::BTreeMap,
    fmt,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
};

/// Engine in memory. Clones share the entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryEngine {
    entries: Arc<std::sync::Mutex<Entries>>,
    changes: Arc<Notify>,
    /// Whether requests fail.
    pub(crate) is_away: Arc<AtomicBool>,
    /// Whether writes are applied, but their answers are lost.
    loses_answers: Arc<AtomicBool>,
    /// Entries whose next writes fail, with the number of these writes.
    failing_writes: Arc<std::sync::Mutex<BTreeMap<String, usize>>>,
    /// Time that each request takes.
    delay: Arc<std::sync::Mutex<Duration>>,
    /// Number of reads of one entry so far.
    reads: Arc<AtomicUsize>,
    /// Number of writes so far.
    writes: Arc<AtomicUsize>,
    revision: Arc<AtomicU64>,
}

impl MemoryEngine {
    /// Returns the number of reads of one entry so far.
    pub(crate) fn reads(&self) -> usize {
        self.reads.load(SeqCst)
    }

    /// Changes the entries as another gateway does, without a notification.
    pub(crate) fn with<T>(&self, with: impl FnOnce(&mut Entries) -> T) -> Result<T, EngineError> {
        if self.is_away.load(SeqCst) {
            return Err(EngineError("the engine is away".to_owned()));
        }
        Ok(with(&mut self.entries.lock().unwrap()))
    }

    /// Lets each request take this time.
    pub(crate) fn set_delay(&self, delay: Duration) {
        *self.delay.lock().unwrap() = delay;
    }

    async fn wait(&self) {
        let delay = *self.delay.lock().unwrap();
        if !delay.is_zero() {
            sleep(delay).await;
        }
    }

    /// Lets the next writes of this entry fail, so many times.
    pub(crate) fn fail_writes(&self, key: &str, times: usize) {
        let mut failures = self.failing_writes.lock().unwrap();
        failures.insert(key.to_owned(), times);
    }

    fn write_one(&self, change: EntryChange) -> Result<bool, EngineError> {
        if let Some(left) = self.failing_writes.lock().unwrap().get_mut(&change.key)
            && *left > 0
        {
            *left -= 1;
            return Err(EngineError("the entry cannot be written".to_owned()));
        }
        self.with(|entries| {
            if entries.get(&change.key) != change.expected.as_ref() {
                return false;
            }
            self.revision.fetch_add(1, SeqCst);
            entries.remove(&change.key);
            entries.extend(change.value.map(|value| (change.key, value)));
            true
        })
    }
}

impl fmt::Display for MemoryEngine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("the memory")
    }
}

impl StateEngine for MemoryEngine {
    fn load(&self) -> BoxFuture<'_, Result<Entries, EngineError>> {
        async {
            self.wait().await;
            self.with(|entries| entries.clone())
        }
        .boxed()
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        async {
            self.reads.fetch_add(1, SeqCst);
            self.wait().await;
            self.with(|entries| entries.get(key).cloned())
        }
        .boxed()
    }

    fn write_each(
        &self,
        changes: Vec<EntryChange>,
    ) -> BoxFuture<'_, Vec<Result<bool, EngineError>>> {
        async {
            self.wait().await;
            self.writes.fetch_add(changes.len(), SeqCst);
            let is_lost = self.loses_answers.swap(false, SeqCst);
            let write = |change| {
                let written = self.write_one(change)?;
                if is_lost {
                    return Err(EngineError("the answer was lost".to_owned()));
                }
                Ok(written)
            };
            let written = changes.into_iter().map(write).collect();
            self.changes.notify_waiters();
            written
        }
        .boxed()
    }

    fn revision(&self) -> Option<u64> {
        Some(self.revision.load(SeqCst))
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        self.changes.notified().boxed()
    }
}

struct World {
    _folder: tempfile::TempDir,
    engine: MemoryEngine,
    stores: [Store; 2],
    shared: [SharedState; 2],
}

/// Returns two gateways' state, of which the first has a CA.
fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let store = |name: &str| Store::open(folder.path().join(name), OpenMode::Create).unwrap();
    let (engine, stores) = (MemoryEngine::default(), [store("one"), store("two")]);
    stores[0].save_ca(&ca("td")).unwrap();
    let shared = |store: &Store| SharedState::new(Arc::new(engine.clone()), store.clone(), true);
    World {
        shared: [shared(&stores[0]), shared(&stores[1])],
        _folder: folder,
        engine,
        stores,
    }
}

fn ca(domain: &str) -> Ca {
    Ca::create(&domain.parse().unwrap()).unwrap()
}

fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

fn pin(key: &str, since: u64) -> Pin {
    let key = Fingerprint::digest(key.as_bytes());
    Pin { key, since }
}

fn revocation(reason: &str) -> Revocation {
    let reason = reason.to_owned();
    Revocation {
        at: 7,
        reason,
        other: causeway_certs::OtherFields::new(),
    }
}

impl World {
    async fn synchronize(&self) {
        // The second round shows the first gateway what the second one has stored.
        for shared in self.shared.iter().chain(&self.shared) {
            shared.synchronize().await.unwrap();
        }
        let entries = |store: &Store| store.entries().unwrap();
        assert_eq!(entries(&self.stores[0]), entries(&self.stores[1]));
        let mut stored = self.engine.entries.lock().unwrap().clone();
        assert_eq!(stored.remove(VERSION_KEY).as_deref(), Some(VERSION));
        assert!(stored.remove(CONTENT_ID_KEY).is_some());
        assert_eq!(entries(&self.stores[0]), stored);
    }
}

#[tokio::test]
async fn both_directories_have_each_change_and_the_ca() {
    let world = world();
    let [one, two] = &world.stores;
    let node = name("edge-1");
    one.nodes().put(NodeRecord::name_only(&node, 5)).unwrap();
    let ttl = Duration::from_hours(1);
    let tokens = one.tokens().unwrap();
    tokens
        .create(&name("edge-2"), ttl, NodeAttributes::default())
        .unwrap();
    world.synchronize().await;
    let roots = |store: &Store| store.ca().unwrap().unwrap().fingerprints();
    assert_eq!(roots(one), roots(two));
    assert!(one.ticket_secret().unwrap() == two.ticket_secret().unwrap());

    // Each of the two is changed, one entry by the second one alone.
    two.nodes()
        .set_revoked(&node, Some(revocation("stolen")))
        .unwrap();
    one.pins()
        .record_new(&[(node.clone(), 10250, pin("a", 1))])
        .unwrap();
    two.nodes()
        .put(NodeRecord::name_only(&name("edge-3"), 6))
        .unwrap();
    world.synchronize().await;
    let revoked = one.nodes().all().unwrap().remove(0).revoked;
    assert_eq!(revoked, Some(revocation("stolen")));

    one.nodes().set_revoked(&node, None).unwrap();
    two.nodes().remove(&name("edge-3")).unwrap();
    two.pins().remove(&node, None).unwrap();
    world.synchronize().await;
    let nodes = two.nodes().all().unwrap();
    assert_eq!(nodes, [NodeRecord::name_only(&node, 5)]);
    assert!(one.pins().all().unwrap().is_empty());

    // Without a change nothing is written.
    let writes = world.engine.writes.load(SeqCst);
    world.synchronize().await;
    assert_eq!(world.engine.writes.load(SeqCst), writes);
}

#[tokio::test]
async fn a_rotation_at_one_gateway_is_followed_and_another_ca_is_refused() {
    let world = world();
    world.synchronize().await;
    let [one, two] = &world.stores;
    for (at, step) in [
        (one, Ca::prepare as fn(_) -> _),
        (two, Ca::activate),
        (one, Ca::retire),
    ] {
        at.change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()))
            .unwrap();
        world.synchronize().await;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = Store::open(folder.path(), OpenMode::Create).unwrap();
    other.save_ca(&ca("td")).unwrap();
    let before = other.entries().unwrap();
    let shared = SharedState::new(Arc::new(world.engine.clone()), other.clone(), true);
    let why = shared.synchronize().await.unwrap_err().to_string();
    assert!(why.contains("the memory: it has another CA than"), "{why}");
    assert!(
        why.contains("If it is the state of another system"),
        "{why}"
    );
    assert_eq!(other.entries().unwrap(), before);
}

#[tokio::test]
async fn a_gateway_that_missed_a_whole_rotation_says_so() {
    let world = world();
    world.synchronize().await;
    let [one, two] = &world.stores;
    for step in [Ca::prepare as fn(_) -> _, Ca::activate, Ca::retire] {
        one.change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()))
            .unwrap();
        world.shared[0].synchronize().await.unwrap();
    }
    let why = world.shared[1].synchronize().await.unwrap_err().to_string();
    let cause = "the CA was rotated completely while this gateway was off; end this gateway, move";
    assert!(why.contains(cause), "{why}");
    // The correction in the message.
    let roots = |store: &Store| store.ca().unwrap().unwrap().fingerprints();
    for file in ["ca.json", "ca.pem"] {
        std::fs::remove_file(two.root_path().with_file_name(file)).unwrap();
    }
    let ca = world.engine.entries.lock().unwrap()["ca"].clone();
    two.import_shared(&SharedCa::from_entry(&ca).unwrap())
        .unwrap();
    world.synchronize().await;
    assert_eq!(roots(one), roots(two));
}

/// Spends one use of a token.
async fn redeem<'a>(
    shared: &SharedState,
    tokens: &TokenStore,
    token: &JoinToken,
    joining: impl Into<Joining<'a>>,
) -> Result<TokenRecord, RedeemError> {
    let uses = [(token, joining.into())];
    shared.redeem_all(tokens, &uses).await?.remove(0)
}

/// Stores the record of a node that has joined, and returns whether it is stored.
async fn store_node(shared: &SharedState, record: &NodeRecord, status: NodeStatus) -> bool {
    let results = shared.store_nodes(&[(record, status)]).await;
    results.unwrap().remove(0).unwrap()
}

#[tokio::test]
async fn a_token_is_spent_once_at_all_gateways() {
    let world = world();
    world.synchronize().await;
    let tokens = world.stores[0].tokens().unwrap();
    let ttl = Duration::from_hours(1);
    let nodes = "edge-*".parse().unwrap();
    // The engine has not received the token yet.
    let token = tokens
        .create_for((&nodes, 2), ttl, NodeAttributes::default())
        .unwrap();
    let names = ["edge-1", "edge-2", "edge-3", "edge-4"].map(name);
    let attempts = names.iter().enumerate().map(|(number, node)| {
        let shared = &world.shared[number % 2];
        let (tokens, token) = (&tokens, &token);
        async move {
            shared
                .fetch_tokens([token.id.as_str()].into())
                .await
                .unwrap();
            redeem(shared, tokens, token, (node, NodeStatus::New)).await
        }
    });
    let mut results = futures_util::future::join_all(attempts).await;
    // The second gateway may have asked before the first one had stored the token.
    for (result, node) in results.iter_mut().zip(&names) {
        let is_unknown = matches!(result, Err(RedeemError::Rejected(TokenRejected::Unknown)));
        if is_unknown {
            *result = redeem(&world.shared[1], &tokens, &token, (node, NodeStatus::New)).await;
        }
    }
    let used = |result: &Result<_, RedeemError>| {
        matches!(
            result,
            Err(RedeemError::Rejected(TokenRejected::Used { .. }))
        )
    };
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 2);
    assert_eq!(results.iter().filter(|result| used(result)).count(), 2);
    world.synchronize().await;
    let records = world.stores[1].tokens().unwrap().all().unwrap();
    assert_eq!(records[0].used.len(), 2);
}

/// Regression case of kubeedge/kubeedge#4925: replicas that create or change the same object at once.
#[tokio::test(start_paused = true)]
async fn of_two_gateways_that_write_one_entry_at_once_the_first_wins() {
    let world = world();
    world.synchronize().await;
    // Both gateways have sent their requests before the engine handles the first one.
    world.engine.set_delay(Duration::from_millis(10));
    let [one, two] = &world.shared;
    let writes = || world.engine.writes.load(SeqCst);
    let (node, before) = (name("edge-1"), writes());
    let records = [1, 2].map(|at| NodeRecord::name_only(&node, at));
    let (first, second) = tokio::join!(
        store_node(one, &records[0], NodeStatus::New),
        store_node(two, &records[1], NodeStatus::New),
    );
    assert_ne!(first, second, "the node joins once");
    assert_eq!(writes() - before, 2, "both gateways have tried");
    let winner = records[usize::from(second)].clone();
    let fetched = one.fetch_node_now(&node).await.unwrap();
    assert_eq!(fetched, Some(winner));
    world.synchronize().await;

    let before = writes();
    let observed =
        [("a", 1), ("b", 2)].map(|(key, since)| vec![(node.clone(), 10250, pin(key, since))]);
    let (first, second) = tokio::join!(
        one.pin_first(observed[0].clone()),
        two.pin_first(observed[1].clone()),
    );
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first, second, "both gateways trust the same key");
    assert!(observed.contains(&first), "{first:?}");
    assert_eq!(writes() - before, 2, "both gateways have tried");
    world.synchronize().await;

    // Commands at both gateways change the node, and neither change is lost.
    let [here, there] = world.stores.each_ref().map(Store::nodes);
    here.set_revoked(&node, Some(revocation("stolen"))).unwrap();
    let attributes = NodeAttributes {
        pool: Some("north".to_owned()),
        ..NodeAttributes::default()
    };
    there.confirm(&node, attributes, 3).unwrap();
    let (first, second) = tokio::join!(one.synchronize(), two.synchronize());
    first.and(second).unwrap();
    world.synchronize().await;
    let changed = here.all().unwrap().remove(0);
    assert_eq!(changed.pool.as_deref(), Some("north"));
    assert_eq!(changed.revoked, Some(revocation("stolen")));
}

#[tokio::test]
async fn a_new_node_joins_once_and_the_first_pin_counts() {
    let world = world();
    world.synchronize().await;
    let [one, two] = &world.shared;
    let (node, known) = (name("edge-1"), NodeStatus::Known);
    let record = |at| NodeRecord::name_only(&node, at);
    assert!(store_node(one, &record(1), NodeStatus::New).await);
    assert!(!store_node(two, &record(2), NodeStatus::New).await);
    assert!(store_node(two, &record(3), known).await);
    let fetched = one.fetch_node(&node).await.unwrap();
    assert_eq!(fetched, Some(record(3)));
    world.synchronize().await;
    // A synchronization came first, and the tables of the gateway do not have its changes yet.
    let fetched = one.fetch_node(&node).await.unwrap();
    assert_eq!(fetched, Some(record(3)));
    // The engine does not know yet that a command has removed the node.
    world.stores[0].nodes().remove(&node).unwrap();
    assert_eq!(one.fetch_node_now(&node).await.unwrap(), None);
    world.synchronize().await;
    assert!(world.stores[1].nodes().all().unwrap().is_empty());
    let observed = |key, since| vec![(node.clone(), 10250, pin(key, since))];
    let first = one.pin_first(observed("a", 1)).await.unwrap();
    assert_eq!(first, observed("a", 1));
    assert_eq!(two.pin_first(observed("b", 2)).await.unwrap(), first);
    world.synchronize().await;
}

/// The first enrolment was at a gateway whose clock was ahead.
#[tokio::test]
async fn a_later_enrolment_replaces_one_with_a_later_time() {
    let world = world();
    let node = name("edge-1");
    let record = |at| NodeRecord::name_only(&node, at);
    let [one, two] = &world.shared;
    assert!(store_node(one, &record(1_000), NodeStatus::New).await);
    world.synchronize().await;
    assert!(store_node(two, &record(3), NodeStatus::Known).await);
    // The gateway at which the node has joined stores the record itself.
    world.stores[1].nodes().put(record(3)).unwrap();
    world.synchronize().await;
    world.synchronize().await;
    for store in &world.stores {
        let stored = store.nodes().all().unwrap();
        assert_eq!((stored[0].enrolled_at, stored[0].order()), (3, 1_001));
    }
}

/// The removed enrolment was at a gateway whose clock was ahead.
#[tokio::test]
async fn a_node_joins_again_after_the_removal_of_an_enrolment_in_the_future() {
    let node = name("edge-1");
    let record = |at| NodeRecord::name_only(&node, at);
    let future = UnixTime::now().as_secs() + 1_000;
    // The second gateway has the removal, has neither it nor the record, or still has the record.
    for (steps, status) in [
        (2, NodeStatus::New),
        (0, NodeStatus::New),
        (1, NodeStatus::Known),
    ] {
        let world = world();
        let [one, two] = &world.shared;
        let nodes = world.stores[0].nodes();
        nodes.put(record(future)).unwrap();
        one.synchronize().await.unwrap();
        if steps > 0 {
            two.synchronize().await.unwrap();
        }
        nodes.remove(&node).unwrap();
        one.synchronize().await.unwrap();
        if steps > 1 {
            two.synchronize().await.unwrap();
        }
        assert_eq!(two.fetch_node_now(&node).await.unwrap(), None);
        assert!(store_node(two, &record(3), status).await, "{steps}");
        // The first gateway does not take the record for the removed one.
        one.synchronize().await.unwrap();
        let engine = world.engine.entries.lock().unwrap().clone();
        assert!(engine.contains_key("node/edge-1"), "{steps}");
        world.stores[1].nodes().put(record(3)).unwrap();
        world.synchronize().await;
        for store in &world.stores {
            let stored = store.nodes().all().unwrap();
            let orders = stored.iter().map(|it| (it.enrolled_at, it.order()));
            assert_eq!(orders.collect::<Vec<_>>(), [(3, future + 1)], "{steps}");
        }
        // The removal of the new enrolment counts.
        world.stores[1].nodes().remove(&node).unwrap();
        world.synchronize().await;
        assert!(nodes.all().unwrap().is_empty(), "{steps}");
    }
}

/// The engine has failed when the record of the later enrolment was written to it.
#[tokio::test]
async fn a_later_enrolment_that_only_the_directory_has_replaces_one_with_a_later_time() {
    let world = world();
    let node = name("edge-1");
    let stored = world.stores[0].nodes();
    stored
        .put(NodeRecord::name_only(&node, u64::MAX - 1))
        .unwrap();
    world.synchronize().await;
    for store in &world.stores {
        let later = NodeRecord {
            serial: "2".to_owned(),
            ..NodeRecord::name_only(&node, 3)
        };
        store.nodes().put(later).unwrap();
        world.synchronize().await;
        let stored = stored.all().unwrap().remove(0);
        // An order that cannot be exceeded is no fault.
        assert_eq!((stored.enrolled_at, stored.order()), (3, u64::MAX));
    }
}

#[tokio::test]
async fn a_revoked_node_without_a_record_is_fetched_with_its_revocation() {
    let world = world();
    world.synchronize().await;
    let [one, two] = &world.shared;
    let (node, stolen) = (name("edge-1"), revocation("stolen"));
    let entry = entry_text(&RevocationEntry::from(stolen.clone()));
    let insert = |entries: &mut Entries| entries.insert("revoked/edge-1".to_owned(), entry);
    world.engine.with(insert).unwrap();
    let fetched = two.fetch_node_now(&node).await.unwrap();
    assert_eq!(fetched.unwrap().revoked, Some(stolen.clone()));
    two.synchronize().await.unwrap();
    one.synchronize().await.unwrap();
    let stored = world.stores[0].nodes().all().unwrap().remove(0);
    assert_eq!(stored.revoked, Some(stolen));
}

#[tokio::test]
async fn without_the_engine_nothing_is_decided_and_later_nothing_is_lost() {
    let world = world();
    world.synchronize().await;
    let [one, two] = &world.stores;
    let tokens = one.tokens().unwrap();
    let (node, ttl) = (name("edge-1"), Duration::from_hours(1));
    let token = tokens
        .create(&node, ttl, NodeAttributes::default())
        .unwrap();
    world.engine.is_away.store(true, SeqCst);
    let joining = (&node, NodeStatus::New);
    let refused = redeem(&world.shared[0], &tokens, &token, joining).await;
    assert!(matches!(refused, Err(RedeemError::Unavailable(_))));
    let observed = vec![(node.clone(), 1, pin("a", 1))];
    world.shared[0].pin_first(observed).await.unwrap_err();
    two.nodes()
        .revoke_or_create(&node, &revocation("lost"))
        .unwrap();
    world.shared[1].synchronize().await.unwrap_err();
    world.engine.is_away.store(false, SeqCst);
    world.synchronize().await;
    let revoked = one.nodes().all().unwrap().remove(0).revoked;
    assert_eq!(revoked, Some(revocation("lost")));
    assert!(tokens.all().unwrap()[0].used.is_empty());
}

#[tokio::test]
async fn a_missing_file_is_no_removal_and_entries_of_later_versions_stay() {
    let world = world();
    let [one, two] = &world.stores;
    let node = name("edge-1");
    one.nodes()
        .revoke_or_create(&node, &revocation("stolen"))
        .unwrap();
    world.synchronize().await;
    let file = two.root_path().with_file_name("nodes.json");
    std::fs::remove_file(file).unwrap();
    let why = world.shared[1].synchronize().await.unwrap_err().to_string();
    assert!(why.contains("nodes.json is missing"), "{why}");
    let key = "quota/edge-1".to_owned();
    let quota = EntryChange {
        key: key.clone(),
        expected: None,
        value: Some("1".to_owned()),
    };
    world.engine.write(vec![quota]).await.unwrap();
    world.shared[0].synchronize().await.unwrap();
    assert!(world.engine.entries.lock().unwrap().contains_key(&key));
}

#[tokio::test]
async fn a_gateway_that_starts_with_ends_of_revocations_alone_goes_on() {
    let world = world();
    let [one, two] = &world.stores;
    let node = name("edge-1");
    one.nodes().put(NodeRecord::name_only(&node, 5)).unwrap();
    one.nodes().remove(&node).unwrap();
    world.synchronize().await;
    two.nodes().require().unwrap();
    // An earlier version has made no file of nodes.
    let file = |name: &str| two.root_path().with_file_name(name);
    std::fs::remove_file(file("nodes.json")).unwrap();
    world.synchronize().await;
    std::fs::remove_file(file("revocations-ended.json")).unwrap();
    let why = world.shared[1].synchronize().await.unwrap_err().to_string();
    assert!(why.contains("revocations-ended.json is missing"), "{why}");
}

#[tokio::test]
async fn a_revocation_survives_an_engine_that_is_emptied_or_restored_from_a_backup() {
    let world = world();
    let node = name("edge-1");
    let nodes = world.stores[0].nodes();
    nodes.put(NodeRecord::name_only(&node, 5)).unwrap();
    world.synchronize().await;
    let backup = world.engine.entries.lock().unwrap().clone();
    let revision = world.engine.revision.load(SeqCst);
    nodes
        .set_revoked(&node, Some(revocation("stolen")))
        .unwrap();
    world.synchronize().await;
    // The revision of an engine that lost its entries is no hint if it has other users.
    for (entries, revision) in [(backup, revision), (Entries::new(), u64::MAX / 2)] {
        *world.engine.entries.lock().unwrap() = entries;
        world.engine.revision.store(revision, SeqCst);
        world.synchronize().await;
        for store in &world.stores {
            let revoked = store.nodes().all().unwrap().remove(0).revoked;
            assert_eq!(revoked, Some(revocation("stolen")));
        }
    }
}

#[tokio::test]
async fn a_restored_backup_that_is_not_recognised_undoes_nothing() {
    let world = world();
    let [one, two] = &world.stores;
    let (edge, gone, ttl) = (name("edge-1"), name("edge-2"), Duration::from_hours(1));
    for node in [&edge, &gone] {
        one.nodes().put(NodeRecord::name_only(node, 5)).unwrap();
    }
    let tokens = one.tokens().unwrap();
    let token = tokens
        .create(&name("edge-3"), ttl, NodeAttributes::default())
        .unwrap();
    world.synchronize().await;
    let backup = world.engine.entries.lock().unwrap().clone();
    let new = name("edge-3");
    let joining = (&new, NodeStatus::New);
    let joined = redeem(&world.shared[0], &tokens, &token, joining).await;
    joined.unwrap();
    two.nodes()
        .set_revoked(&edge, Some(revocation("stolen")))
        .unwrap();
    two.nodes().remove(&gone).unwrap();
    two.nodes().put(NodeRecord::name_only(&new, 9)).unwrap();
    world.synchronize().await;
    // The revision is not lower, as after `etcdutl snapshot restore --bump-revision`.
    *world.engine.entries.lock().unwrap() = backup.clone();
    let again = redeem(&world.shared[0], &tokens, &token, joining).await;
    assert!(matches!(
        again,
        Err(RedeemError::Rejected(TokenRejected::Used { .. }))
    ));
    world.synchronize().await;
    for store in &world.stores {
        let nodes = store.nodes().all().unwrap();
        let names: Vec<_> = nodes.iter().map(|record| &record.node).collect();
        assert_eq!(names, [&edge, &new]);
        assert_eq!(nodes[0].revoked, Some(revocation("stolen")));
        assert_eq!(store.tokens().unwrap().all().unwrap()[0].used.len(), 1);
    }
    // A backup from before the end of the revocation does not bring it back.
    let backup = world.engine.entries.lock().unwrap().clone();
    one.nodes().set_revoked(&edge, None).unwrap();
    world.synchronize().await;
    *world.engine.entries.lock().unwrap() = backup;
    world.synchronize().await;
    assert_eq!(two.nodes().all().unwrap()[0].revoked, None);
}

#[tokio::test]
async fn a_token_that_is_revoked_at_one_gateway_is_refused_at_once() {
    let world = world();
    let tokens = world.stores[0].tokens().unwrap();
    let (node, ttl) = (name("edge-1"), Duration::from_hours(1));
    let token = tokens.create(&node, ttl, NodeAttributes::default());
    let token = token.unwrap();
    world.synchronize().await;
    tokens.revoke(&token.id, UnixTime::now()).unwrap();
    let joining = (&node, NodeStatus::New);
    let refused = redeem(&world.shared[0], &tokens, &token, joining).await;
    assert!(matches!(
        refused,
        Err(RedeemError::Rejected(TokenRejected::Revoked { .. }))
    ));
}

#[tokio::test]
async fn an_entry_that_cannot_be_read_stops_no_other_and_unknown_fields_stay() {
    let world = world();
    let [one, two] = &world.stores;
    let tokens = one.tokens().unwrap();
    let (node, ttl) = (name("edge-1"), Duration::from_hours(1));
    let token = tokens.create(&node, ttl, NodeAttributes::default());
    let token = token.unwrap();
    world.synchronize().await;
    // A later version has written two entries.
    let (damaged, token_key) = ("node/edge-2", format!("token/{}", token.id));
    world
        .engine
        .with(|entries| {
            entries.insert(damaged.to_owned(), r#"{"format":2}"#.to_owned());
            let token = entries.get_mut(&token_key).unwrap();
            *token = token.replacen('{', r#"{"quota":{"z":1,"a":2},"#, 1);
        })
        .unwrap();
    one.nodes()
        .revoke_or_create(&node, &revocation("stolen"))
        .unwrap();
    for shared in world.shared.iter().chain(&world.shared) {
        shared.synchronize().await.unwrap();
        let skipped = shared.skipped();
        assert_eq!(skipped.len(), 1);
        assert!(skipped[0].contains(damaged), "{skipped:?}");
    }
    let revoked = two.nodes().all().unwrap().remove(0).revoked;
    assert_eq!(revoked, Some(revocation("stolen")));
    one.nodes().set_revoked(&node, None).unwrap();
    let joining = (&node, NodeStatus::New);
    let redeemed = redeem(&world.shared[0], &tokens, &token, joining).await;
    redeemed.unwrap();
    for shared in world.shared.iter().chain(&world.shared) {
        shared.synchronize().await.unwrap();
    }
    let entries = world.engine.entries.lock().unwrap().clone();
    assert_eq!(entries[damaged], r#"{"format":2}"#);
    let spent: serde_json::Value = serde_json::from_str(&entries[&token_key]).unwrap();
    assert_eq!(spent["quota"].to_string(), r#"{"z":1,"a":2}"#);
    assert_eq!(spent["used"].as_array().unwrap().len(), 1);
    // The entry is taken over when a version can read it.
    let record = NodeRecord::name_only(&name("edge-2"), 5);
    world
        .engine
        .with(|entries| entries.insert(damaged.to_owned(), entry_text(&record)))
        .unwrap();
    for shared in &world.shared {
        shared.synchronize().await.unwrap();
        assert!(shared.skipped().is_empty());
    }
    assert!(two.nodes().all().unwrap().contains(&record));
}

#[tokio::test]
async fn a_ca_that_cannot_be_read_stops_no_other_entry() {
    let world = world();
    world.synchronize().await;
    let damaged = "{}".to_owned();
    world
        .engine
        .with(|entries| entries.insert("ca".to_owned(), damaged.clone()))
        .unwrap();
    let [one, two] = &world.stores;
    let record = NodeRecord::name_only(&name("edge-1"), 5);
    one.nodes().put(record.clone()).unwrap();
    for shared in &world.shared {
        let why = shared.synchronize().await.unwrap_err().to_string();
        assert!(why.contains("the entry `ca` cannot be parsed"), "{why}");
    }
    assert_eq!(two.nodes().all().unwrap(), [record]);
    assert_eq!(world.engine.entries.lock().unwrap()["ca"], damaged);
}

#[tokio::test]
async fn another_engine_removes_nothing_that_it_lacks() {
    let world = world();
    let [one, _] = &world.stores;
    let (node, new) = (name("edge-1"), name("edge-2"));
    one.nodes().put(NodeRecord::name_only(&node, 5)).unwrap();
    let pinned = [
        (node.clone(), 10250, pin("a", 1)),
        (node.clone(), 1, pin("b", 1)),
    ];
    one.pins().record_new(&pinned).unwrap();
    world.synchronize().await;
    let stores = world.stores.clone();
    // The entries of the new prefix have their own version and history. It lacks two entries and has another one.
    let engine = MemoryEngine::default();
    engine
        .with(|entries| {
            entries.clone_from(&world.engine.entries.lock().unwrap());
            entries.remove("node/edge-1");
            entries.remove("pin/edge-1:10250");
            entries.remove(CONTENT_ID_KEY);
            let record = NodeRecord::name_only(&new, 5);
            entries.insert("node/edge-2".to_owned(), entry_text(&record));
        })
        .unwrap();
    engine.revision.store(u64::MAX / 2, SeqCst);
    let engine = Arc::new(engine);
    // As after a restart.
    let shared = stores.map(|store| SharedState::new(engine.clone(), store, true));
    for shared in shared.iter().chain(&shared) {
        shared.synchronize().await.unwrap();
    }
    for store in &world.stores {
        let names: Vec<_> = store.nodes().all().unwrap().into_iter().collect();
        let names: Vec<_> = names.iter().map(|record| &record.node).collect();
        assert_eq!(names, [&node, &new]);
        assert_eq!(store.pins().all().unwrap()[&node].len(), 2);
    }
    // From now on the absence of a pin is its removal again.
    engine
        .with(|entries| entries.remove("pin/edge-1:1"))
        .unwrap();
    shared[0].synchronize().await.unwrap();
    assert_eq!(one.pins().all().unwrap()[&node].len(), 1);
}

#[tokio::test]
async fn two_gateways_that_start_at_once_agree_on_the_content_id() {
    let world = world();
    let [one, two] = &world.shared;
    let (first, second) = tokio::join!(one.synchronize(), two.synchronize());
    first.unwrap();
    second.unwrap();
    world.synchronize().await;
    let id = world.engine.entries.lock().unwrap()[CONTENT_ID_KEY].clone();
    for store in &world.stores {
        let last = load_last(store).unwrap().unwrap();
        assert_eq!(last.content_id.as_ref(), Some(&id));
    }
}

fn joining<'a>(node: &'a NodeName, key: &[u8]) -> Joining<'a> {
    let repeat = RepeatCheck {
        key: Fingerprint::digest(key),
        last_join_key: None,
        last_joined_at: None,
        removed_at: None,
    };
    Joining {
        node,
        status: NodeStatus::New,
        repeat: Some(repeat),
    }
}

#[tokio::test]
async fn a_use_whose_answer_was_lost_is_recognised() {
    let world = world();
    let tokens = world.stores[0].tokens().unwrap();
    let (node, ttl) = (name("edge-1"), Duration::from_hours(1));
    let token = tokens.create(&node, ttl, NodeAttributes::default());
    let token = token.unwrap();
    world.synchronize().await;
    let [one, two] = &world.shared;
    let lose_answer = || world.engine.loses_answers.store(true, SeqCst);
    lose_answer();
    let request = joining(&node, b"key");
    let spent = redeem(one, &tokens, &token, request).await.unwrap();
    assert_eq!(spent.used.len(), 1);
    // The edge gets no answer either, and asks another gateway.
    let others = world.stores[1].tokens().unwrap();
    let again = redeem(two, &others, &token, request).await.unwrap();
    assert_eq!(again.used, spent.used);
    let other = redeem(two, &others, &token, joining(&node, b"other")).await;
    assert!(matches!(
        other,
        Err(RedeemError::Rejected(TokenRejected::Used { .. }))
    ));
    // The record of the same request is no other node.
    let join_key = Some(Fingerprint::digest(b"key"));
    let record = |at, join_key| NodeRecord {
        join_key,
        ..NodeRecord::name_only(&node, at)
    };
    let new = NodeStatus::New;
    assert!(store_node(one, &record(1, join_key), new).await);
    assert!(store_node(two, &record(2, join_key), new).await);
    let other = Some(Fingerprint::digest(b"other"));
    assert!(!store_node(two, &record(3, other), new).await);
    world.synchronize().await;
}

/// The second gateway changes a node, and the first one has not applied the change.
#[tokio::test]
async fn a_repeated_request_is_refused_after_a_change_at_another_gateway() {
    let (node, ttl) = (name("edge-1"), Duration::from_hours(1));
    let (key, other_key) = (Fingerprint::digest(b"key"), Fingerprint::digest(b"other"));
    let changes: [fn(&Store, NodeRecord, Fingerprint); 4] = [
        |_, _, _| {},
        |store, record, _| assert!(store.nodes().remove(&record.node).unwrap()),
        |store, record, _| {
            let revocation = Some(revocation("stolen"));
            store.nodes().set_revoked(&record.node, revocation).unwrap();
        },
        |store, record, key| {
            let record = NodeRecord {
                enrolled_at: record.enrolled_at + 1,
                join_key: Some(key),
                ..record
            };
            store.nodes().put(record).unwrap();
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let world = world();
        let [one, two] = &world.shared;
        let tokens = world.stores[0].tokens().unwrap();
        let token = tokens.create(&node, ttl, NodeAttributes::default());
        let token = token.unwrap();
        world.synchronize().await;
        let request = joining(&node, b"key");
        redeem(one, &tokens, &token, request).await.unwrap();
        let record = NodeRecord {
            join_key: Some(key),
            ..NodeRecord::name_only(&node, UnixTime::now().as_secs())
        };
        assert!(store_node(one, &record, NodeStatus::New).await);
        world.synchronize().await;
        change(&world.stores[1], record, other_key);
        two.synchronize().await.unwrap();
        let known = Joining {
            status: NodeStatus::Known,
            repeat: request.repeat.map(|repeat| RepeatCheck {
                last_join_key: Some(key),
                ..repeat
            }),
            ..request
        };
        // The table of the first gateway has the node, or does not have it yet.
        for request in [request, known] {
            let redeemed = redeem(one, &tokens, &token, request).await;
            let is_expected = match (number, &redeemed) {
                (0, redeemed) => redeemed.is_ok(),
                (2, Err(RedeemError::NodeRevoked { reason })) => reason == "stolen",
                (_, Err(RedeemError::Rejected(TokenRejected::Used { .. }))) => number != 2,
                _ => false,
            };
            assert!(is_expected, "{number}: {redeemed:?}");
        }
        let used = tokens.all().unwrap().remove(0).used;
        assert_eq!(used.len(), 1);
    }
}

#[tokio::test]
async fn a_node_that_joined_again_is_fetched_with_its_new_revocation() {
    let world = world();
    let [one, two] = &world.stores;
    let node = name("edge-1");
    one.nodes().put(NodeRecord::name_only(&node, 5)).unwrap();
    world.synchronize().await;
    one.nodes().remove(&node).unwrap();
    world.synchronize().await;
    // The first gateway has the removal, and not what follows.
    let now = UnixTime::now().as_secs();
    two.nodes()
        .put(NodeRecord::name_only(&node, now + 1))
        .unwrap();
    let stolen = Revocation {
        at: now + 2,
        ..revocation("stolen")
    };
    let revoked = Some(stolen.clone());
    two.nodes().set_revoked(&node, revoked.clone()).unwrap();
    world.shared[1].synchronize().await.unwrap();
    let fetched = world.shared[0].fetch_node_now(&node).await.unwrap();
    assert_eq!(fetched.unwrap().revoked, revoked);
    assert_eq!(one.nodes().all().unwrap()[0].revoked, revoked);
    world.synchronize().await;
    assert_eq!(one.nodes().all().unwrap()[0].revoked, revoked);
}

/// Returns the request of a node that has joined with another key at 5.
fn joining_again<'a>(node: &'a NodeName, key: &[u8]) -> Joining<'a> {
    let request = joining(node, key);
    Joining {
        status: NodeStatus::Known,
        repeat: request.repeat.map(|repeat| RepeatCheck {
            last_join_key: Some(Fingerprint::digest(b"earlier")),
            last_joined_at: Some(5),
            ..repeat
        }),
        ..request
    }
}

/// Stores nodes that have joined at 5, and returns a token for each.
async fn known_nodes(world: &World, nodes: &[NodeName]) -> Vec<JoinToken> {
    let tokens = world.stores[0].tokens().unwrap();
    let mut created = Vec::new();
    for node in nodes {
        let record = NodeRecord {
            join_key: Some(Fingerprint::digest(b"earlier")),
            ..NodeRecord::name_only(node, 5)
        };
        world.stores[0].nodes().put(record).unwrap();
        let ttl = Duration::from_hours(1);
        let token = tokens.create(node, ttl, NodeAttributes::default());
        created.push(token.unwrap());
    }
    world.synchronize().await;
    created
}

#[tokio::test]
async fn a_failed_write_of_one_token_fails_no_other_use() {
    let world = world();
    let nodes = [name("edge-1"), name("edge-2")];
    let created = known_nodes(&world, &nodes).await;
    let tokens = world.stores[0].tokens().unwrap();
    let failing = EntryKey::Token(&created[1].id).to_string();
    world.engine.fail_writes(&failing, 2);
    let shared = &world.shared[0];
    let uses = [
        (&created[0], joining_again(&nodes[0], b"one")),
        (&created[1], joining_again(&nodes[1], b"two")),
    ];
    let results = shared.redeem_all(&tokens, &uses).await.unwrap();
    assert!(results[0].is_ok(), "{results:?}");
    assert!(
        matches!(results[1], Err(RedeemError::Unavailable(_))),
        "{results:?}"
    );
    let results = shared.redeem_all(&tokens, &uses).await.unwrap();
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[tokio::test]
async fn a_node_that_joins_again_without_its_answer_may_repeat_the_request() {
    let world = world();
    let nodes = [name("edge-1")];
    let token = known_nodes(&world, &nodes).await.remove(0);
    let [one, two] = &world.shared;
    world.engine.loses_answers.store(true, SeqCst);
    let tokens = world.stores[0].tokens().unwrap();
    let request = joining_again(&nodes[0], b"new");
    // The gateway fails before it stores the record of the node. The edge asks another gateway.
    redeem(one, &tokens, &token, request).await.unwrap();
    redeem(two, &tokens, &token, request).await.unwrap();
    let used = |result: &Result<_, RedeemError>| {
        matches!(
            result,
            Err(RedeemError::Rejected(TokenRejected::Used { .. }))
        )
    };
    let other = redeem(two, &tokens, &token, joining_again(&nodes[0], b"other")).await;
    assert!(used(&other), "{other:?}");
    // Another edge becomes the node.
    let record = NodeRecord {
        join_key: Some(Fingerprint::digest(b"third")),
        ..NodeRecord::name_only(&nodes[0], UnixTime::now().as_secs() + 1)
    };
    assert!(store_node(two, &record, NodeStatus::Known).await);
    let late = redeem(one, &tokens, &token, request).await;
    assert!(used(&late), "{late:?}");
}

#[tokio::test]
async fn requests_are_not_sent_to_an_engine_that_is_away() {
    let engine = MemoryEngine::default();
    let keys: Vec<_> = (0..1_000).map(|number| number.to_string()).collect();
    let read = engine.get_each(keys.clone()).await;
    assert_eq!((read.len(), read.iter().all(Result::is_ok)), (1_000, true));
    engine.is_away.store(true, SeqCst);
    let before = engine.reads();
    let failed = engine.get_each(keys).await;
    assert_eq!(
        (failed.len(), failed.iter().all(Result::is_err)),
        (1_000, true)
    );
    assert_eq!(engine.reads() - before, CONCURRENT_REQUESTS);
}
