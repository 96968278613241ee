//! Informers and reflectors at the cloud and at each edge. The tests compare their views with the state of the API server.
//!
//! Each prints its events as lines; its state is their sum. An object must never appear in an older version than before.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
    time::Duration,
};

use serde::Deserialize;

use super::{
    reflector,
    scene::{ENDPOINT, Edge},
};
use crate::{
    full,
    world::{
        cluster::Cluster,
        process::{PATIENCE, Process, Program, within},
    },
};

const SLICES: &str = "discovery.k8s.io/v1/endpointslices";
pub(super) const SERVICES: &str = "v1/services";

/// Number of changes in the cloud; with all tests, a larger number.
fn times() -> usize {
    if full() { 25 } else { 1 }
}

/// Client that reads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ReadMode {
    /// An informer of client-go.
    Json,
    /// The same with protobuf.
    Protobuf,
    /// A reflector of kube-rs.
    KubeRs,
}
use ReadMode::{Json, KubeRs, Protobuf};

/// How a client begins to read.
#[derive(Clone, Copy, Debug)]
struct ReadMethod {
    resource: &'static str,
    by: ReadMode,
    /// With a watch that begins with all objects, or with a list before the watch.
    watch_list: bool,
}

/// All combinations for slices, and some for Services.
const WAYS: [ReadMethod; 9] = [
    way(SLICES, Json, false),
    way(SLICES, Json, true),
    way(SLICES, Protobuf, false),
    way(SLICES, Protobuf, true),
    way(SLICES, KubeRs, false),
    way(SLICES, KubeRs, true),
    way(SERVICES, Json, true),
    way(SERVICES, Protobuf, false),
    way(SERVICES, KubeRs, false),
];
/// The clients in the cloud.
const CLOUD: [ReadMethod; 3] = [
    way(SLICES, Protobuf, true),
    way(SLICES, KubeRs, true),
    way(SERVICES, Protobuf, false),
];
/// The clients that read from another place for a while.
const SOME: [ReadMethod; 4] = [
    way(SLICES, Json, false),
    way(SLICES, Protobuf, false),
    way(SLICES, KubeRs, false),
    way(SERVICES, Protobuf, false),
];

const fn way(resource: &'static str, by: ReadMode, watch_list: bool) -> ReadMethod {
    ReadMethod {
        resource,
        by,
        watch_list,
    }
}

/// An object's namespace and name.
type Key = (String, String);
/// Version and hash of each object.
type ObjectVersions = BTreeMap<Key, (u64, String)>;

/// A line of an informer.
#[derive(Deserialize)]
struct ReaderLine {
    event: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    hash: String,
}

/// A running informer.
struct Reader {
    place: String,
    way: ReadMethod,
    process: Process,
    /// Number of its output lines that are in the view.
    heard: u64,
    view: ObjectVersions,
    /// Versions at which objects were deleted.
    gone: BTreeMap<Key, u64>,
    /// An object in an older version than before.
    fault: Option<String>,
}

/// All of them, and the number of changes so far.
#[derive(Default)]
pub(super) struct Readers {
    all: Vec<Reader>,
    seed: usize,
}

impl Readers {
    /// Starts them: some in the cloud, all combinations on each node.
    pub(super) fn start(&mut self, folder: &Path, cluster: &Cluster, edges: &[Edge]) {
        for way in CLOUD {
            let admin = cluster.pki.path("admin.kubeconfig");
            let program = match way.by {
                KubeRs => reflector::program(None, &admin, way.read()),
                Json | Protobuf => way.informer(in_the_cloud(cluster)),
            };
            self.begin((folder, "cloud"), program, way);
        }
        for edge in edges {
            for way in WAYS {
                self.begin((folder, &edge.name), way.on(edge, ENDPOINT), way);
            }
        }
    }

    /// Starts some on each node, all combinations for slices and some for Services, which read from this URL, or with this
    /// kubeconfig.
    pub(super) fn start_at(&mut self, edges: &[Edge], at: &str) {
        for edge in edges {
            for way in SOME {
                self.begin((&edge.folder, &edge.name), way.on(edge, at), way);
            }
        }
    }

    fn begin(&mut self, (folder, place): (&Path, &str), program: Program, way: ReadMethod) {
        let log = format!("informer-{place}-{}.log", self.all.len());
        let process = program.start(&folder.join(log));
        self.all.push(Reader {
            place: place.to_owned(),
            way,
            process,
            heard: 0,
            view: ObjectVersions::new(),
            gone: BTreeMap::new(),
            fault: None,
        });
    }

    /// Makes changes in the cloud.
    pub(super) fn change(&mut self, cluster: &Cluster, count: usize) {
        self.change_a_few(cluster, count * times());
    }

    /// Makes as many changes, independent of changes made elsewhere.
    pub(super) fn change_a_few(&mut self, cluster: &Cluster, count: usize) {
        self.seed += 1;
        in_the_cloud(cluster)
            .args(["-change".to_owned(), count.to_string()])
            .args(["-seed".to_owned(), self.seed.to_string()])
            .within(5 * PATIENCE)
            .run()
            .ok();
    }

    /// Checks that the clients at these places see the state of the API server; returns those that do not, and the
    /// differences.
    pub(super) fn agree(
        &mut self,
        cluster: &Cluster,
        at: impl Fn(&str) -> bool,
    ) -> Result<(), String> {
        let truth = [SLICES, SERVICES].map(|resource| (resource, truth(cluster, resource)));
        let truth = BTreeMap::from(truth);
        let mut wrong = String::new();
        within(PATIENCE, || {
            let readers = self.all.iter_mut().filter(|reader| at(&reader.place));
            let message = readers.map(|reader| reader.compared(&truth[reader.way.resource]));
            wrong = message.collect::<Vec<_>>().concat();
            wrong.is_empty() || self.all.iter().any(|reader| reader.fault.is_some())
        });
        if wrong.is_empty() {
            return Ok(());
        }
        Err(format!("not all see what the API server has:\n{wrong}"))
    }
}

fn in_the_cloud(cluster: &Cluster) -> Program {
    let admin = cluster.pki.path("admin.kubeconfig");
    Program::new(cluster.assets.join("informer")).args(["-kubeconfig", &admin])
}

/// Returns the current state of the API server.
fn truth(cluster: &Cluster, resource: &str) -> ObjectVersions {
    let asked = in_the_cloud(cluster).args(["-once", "-resource", resource]);
    let message = asked.within(Duration::from_secs(30)).run().ok().text();
    let (mut view, mut gone) = (ObjectVersions::new(), BTreeMap::new());
    for line in message.lines() {
        let message = serde_json::from_str(line).unwrap();
        let fault = take((&mut view, &mut gone), message);
        assert_eq!(fault, None);
    }
    view
}

/// Adds output lines to a view; returns impossible events.
fn take(
    (view, gone): (&mut ObjectVersions, &mut BTreeMap<Key, u64>),
    message: ReaderLine,
) -> Option<String> {
    let key = (message.namespace, message.name);
    let version: u64 = message.version.parse().unwrap_or_default();
    let gone_at = gone.get(&key).copied().unwrap_or_default();
    let before = view.get(&key).map_or(gone_at, |(version, _)| *version);
    match message.event.as_str() {
        "synced" => return None,
        "deleted" => {
            view.remove(&key);
            gone.insert(key.clone(), version);
        }
        _ => {
            view.insert(key.clone(), (version, message.hash));
        }
    }
    (version < before).then(|| format!("{key:?} was at {before} and is at {version}"))
}

impl ReadMethod {
    /// Returns the resource, and whether it is read by a watch from the beginning.
    fn read(self) -> (&'static str, bool) {
        (self.resource, self.watch_list)
    }

    /// The program on a node.
    fn on(self, edge: &Edge, at: &str) -> Program {
        if self.by == KubeRs {
            return reflector::program(Some(&edge.site), at, self.read());
        }
        let flag = if at.contains("://") {
            "-server"
        } else {
            "-kubeconfig"
        };
        self.informer(edge.part("informer").args([flag, at]))
    }

    fn informer(self, program: Program) -> Program {
        let protobuf = self.by == Protobuf;
        program
            .args(["-resource", self.resource])
            .args([format!("-protobuf={protobuf}")])
            .env("KUBE_FEATURE_WatchListClient", self.watch_list.to_string())
    }
}

impl Reader {
    /// Reads its new output.
    fn hear(&mut self) {
        let mut log = File::open(self.process.log()).unwrap();
        log.seek(SeekFrom::Start(self.heard)).unwrap();
        let mut message = Vec::new();
        log.read_to_end(&mut message).unwrap();
        let whole = message.iter().rposition(|byte| *byte == b'\n');
        let message = &message[..whole.map_or(0, |end| end + 1)];
        self.heard += message.len() as u64;
        for line in message.split(|byte| *byte == b'\n') {
            // The client library prints lines of its own in between.
            let Ok(message) = serde_json::from_slice::<ReaderLine>(line) else {
                continue;
            };
            if let Some(fault) = take((&mut self.view, &mut self.gone), message) {
                self.fault.get_or_insert(fault);
            }
        }
    }

    /// Returns the differences between the view and the API server's state.
    fn compared(&mut self, truth: &ObjectVersions) -> String {
        self.hear();
        let mut wrong = self.fault.clone().unwrap_or_default();
        let of = |view: &ObjectVersions, key: &(String, String)| {
            view.get(key).map(|(version, _)| *version)
        };
        let keys = truth.keys().chain(self.view.keys());
        let mut keys = keys.filter(|key| truth.get(key) != self.view.get(key));
        if let Some(first) = keys.next() {
            let (theirs, here) = (of(truth, first), of(&self.view, first));
            let more = keys.count();
            let found = format!(
                " {first:?} is at {theirs:?} and seen at {here:?}, and {more} more are different"
            );
            wrong += &found;
        }
        if wrong.is_empty() {
            return wrong;
        }
        let (place, way) = (&self.place, self.way);
        format!("{place}, {way:?}: {wrong}\n")
    }
}
