//! Recorder: the state of all nodes in the API server, once a second, with the times at which a test changed something.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::api::Api;
use crate::world::process::{PATIENCE, within};

/// State of a node and of its Lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "columns of a table")]
pub(crate) struct State {
    /// Status of the condition `Ready`.
    pub(crate) ready: String,
    /// The taint of delegated nodes.
    pub(crate) tainted: bool,
    /// Any taint that evicts pods.
    pub(crate) evicts: bool,
    /// The annotation of the Lease that `OpenYurt` has as well.
    pub(crate) delegated: bool,
    /// The pool member that carried the first heartbeat, by the annotation of the Node.
    pub(crate) delegate: Option<String>,
    /// Any annotation of this project on the Lease.
    pub(crate) noted: bool,
    /// Whether the last renewal was a delegated one.
    pub(crate) renewed_for_it: bool,
    /// Its pods, `None` for one that is being deleted.
    pub(crate) pods: BTreeMap<String, Option<String>>,
}

impl State {
    pub(crate) fn is_ready(&self) -> bool {
        self.ready == "True"
    }

    /// Whether the node is as if it had never been cut off.
    pub(crate) fn is_whole(&self) -> bool {
        let left = self.tainted || self.evicts || self.delegated || self.noted;
        self.is_ready() && !left && self.delegate.is_none()
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |holds: bool, word: &'static str| if holds { word } else { "-" };
        let deleted = self.pods.values().filter(|uid| uid.is_none()).count();
        let pods = format!("{}/{}", self.pods.len() - deleted, self.pods.len());
        write!(
            f,
            "{:<8} {:<8} {:<9} {:<10} {:<8} {pods}",
            self.ready,
            shown(self.tainted, "tainted"),
            shown(self.evicts, "NoExecute"),
            shown(self.delegated, "delegated"),
            self.delegate.as_deref().unwrap_or("-"),
        )
    }
}

/// State of a node at a time, with the age of its Lease.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) at: Duration,
    pub(crate) age: Duration,
    pub(crate) state: State,
}

#[derive(Default)]
struct Log {
    nodes: BTreeMap<String, Vec<Sample>>,
    marks: Vec<(Duration, String)>,
}

/// Running recorder; dropping it prints the table of each node that a test has selected.
pub(crate) struct Recorder {
    row: &'static str,
    begun: Instant,
    shown: Vec<String>,
    log: Arc<Mutex<Log>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts recording for this row of the table.
    pub(crate) fn start(row: &'static str, api: &Api, shown: &[&str]) -> Self {
        let begun = Instant::now();
        let (log, ends) = (Arc::<Mutex<Log>>::default(), Arc::<AtomicBool>::default());
        let thread = thread::spawn({
            let (api, log, ends) = (api.clone(), log.clone(), ends.clone());
            move || record(&api, &log, begun, &ends)
        });
        Self {
            row,
            begun,
            shown: shown.iter().map(|&name| name.to_owned()).collect(),
            log,
            ends,
            thread: Some(thread),
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what a test has just changed.
    pub(crate) fn mark(&self, what: impl Into<String>) -> Duration {
        let at = self.begun.elapsed();
        self.log().marks.push((at, what.into()));
        at
    }

    /// Returns the samples of a node from this time on.
    pub(crate) fn since(&self, node: &str, from: Duration) -> Vec<Sample> {
        let log = self.log();
        let all = log.nodes.get(node).into_iter().flatten();
        all.filter(|sample| sample.at >= from).cloned().collect()
    }

    /// Waits for a sample of a node that holds; returns it.
    pub(crate) fn sees(
        &self,
        (node, from): (&str, Duration),
        what: &str,
        holds: impl Fn(&State) -> bool,
    ) -> Sample {
        let mut found = None;
        within(3 * PATIENCE, || {
            let mut samples = self.since(node, from).into_iter();
            found = samples.find(|sample| holds(&sample.state));
            found.is_some()
        });
        found.unwrap_or_else(|| {
            let last = self.since(node, Duration::ZERO).pop();
            panic!("{node}: never seen: {what}; last: {last:?}")
        })
    }

    /// Records until this long after a time.
    pub(crate) fn until(&self, end: Duration) {
        while self.begun.elapsed() < end {
            // The pace of the samples.
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Checks all samples of a node from a time on.
    pub(crate) fn always(
        &self,
        (node, from): (&str, Duration),
        what: &str,
        holds: impl Fn(&State) -> bool,
    ) {
        let samples = self.since(node, from);
        assert!(!samples.is_empty(), "{node} was not recorded");
        for sample in samples {
            assert!(
                holds(&sample.state),
                "{node}: not always {what}: {sample:?}"
            );
        }
    }

    fn print(&self) {
        let log = self.log();
        println!("\n{}", self.row);
        for (at, what) in &log.marks {
            println!("  {:>5}  {what}", at.as_secs());
        }
        for (node, samples) in &log.nodes {
            if !self.shown.contains(node) {
                continue;
            }
            println!(
                "  {node}: seconds, oldest Lease, Ready, taint, evictions, annotation, delegate, pods"
            );
            let same = samples.chunk_by(|a, b| a.state == b.state);
            for span in same {
                let (first, last) = (&span[0], &span[span.len() - 1]);
                let oldest = span.iter().map(|sample| sample.age).max();
                println!(
                    "  {:>5} - {:<5} {:>3} s  {}",
                    first.at.as_secs(),
                    last.at.as_secs(),
                    oldest.unwrap_or_default().as_secs(),
                    first.state
                );
            }
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.print();
    }
}

fn record(api: &Api, log: &Mutex<Log>, begun: Instant, ends: &AtomicBool) {
    // The age of a Lease is the time since another version of it was seen: no clock of a node counts.
    let mut seen: HashMap<String, (String, Duration)> = HashMap::new();
    while !ends.load(Ordering::Relaxed) {
        let at = begun.elapsed();
        if let Some(states) = read(api) {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            for (node, (version, state)) in states {
                let known = seen.entry(node.clone()).or_default();
                if known.0 != version {
                    *known = (version, at);
                }
                let age = at.saturating_sub(known.1);
                let samples = log.nodes.entry(node).or_default();
                samples.push(Sample { at, age, state });
            }
        }
        let next = at + Duration::from_secs(1);
        thread::sleep(next.saturating_sub(begun.elapsed()));
    }
}

/// Returns each node with the version of its Lease.
fn read(api: &Api) -> Option<BTreeMap<String, (String, State)>> {
    let [nodes, leases, pods] = api.lists([
        "/api/v1/nodes",
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
        "/api/v1/pods",
    ])?;
    let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
    let (leases, pods) = (items(&leases), items(&pods));
    let state = |node: Value| {
        let name = node["metadata"]["name"].as_str()?.to_owned();
        let mut leases = leases.iter();
        let lease = leases.find(|lease| lease["metadata"]["name"] == *name);
        let lease = lease.cloned().unwrap_or_default();
        let on = pods.iter().filter(|pod| pod["spec"]["nodeName"] == *name);
        let state = state(&node, &lease, on);
        let version = lease["metadata"]["resourceVersion"].as_str();
        Some((name, (version.unwrap_or_default().to_owned(), state)))
    };
    Some(items(&nodes).into_iter().filter_map(state).collect())
}

fn state<'a>(node: &Value, lease: &Value, pods: impl Iterator<Item = &'a Value>) -> State {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let taints = list(&node["spec"]["taints"]);
    let conditions = list(&node["status"]["conditions"]);
    let ready = conditions.iter().find(|one| one["type"] == "Ready");
    let ready = ready.and_then(|ready| ready["status"].as_str());
    let notes = &lease["metadata"]["annotations"];
    let renewed = &notes["causeway.io/delegated-renew-time"];
    let time = |text: &Value| text.as_str()?.parse::<k8s_openapi::jiff::Timestamp>().ok();
    let pod = |pod: &Value| {
        let data = &pod["metadata"];
        let lives = data["deletionTimestamp"].is_null();
        let name = format!("{}/{}", data["namespace"], data["name"]);
        (name, lives.then(|| data["uid"].to_string()))
    };
    let mark = node["metadata"]["annotations"]["causeway.io/delegated-heartbeat"].as_str();
    State {
        ready: ready.unwrap_or_default().to_owned(),
        tainted: taints
            .iter()
            .any(|taint| taint["key"] == "node.openyurt.io/unschedulable"),
        evicts: taints.iter().any(|taint| taint["effect"] == "NoExecute"),
        delegated: notes["openyurt.io/delegate-heartbeat"] == "true",
        delegate: mark.map(str::to_owned),
        noted: notes.to_string().contains("causeway.io/"),
        renewed_for_it: time(renewed)
            .is_some_and(|at| time(&lease["spec"]["renewTime"]) == Some(at)),
        pods: pods.map(pod).collect(),
    }
}
