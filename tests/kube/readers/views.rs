//! Informers at the cloud and at each edge, whose views are compared with what the API server has.
//!
//! Each tells its events in lines; what it knows is their sum. No object may ever be seen older than it was seen before.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
    time::Duration,
};

use serde::Deserialize;

use super::scene::{ENDPOINT, Edge};
use crate::{
    steps::full,
    world::{
        cluster::Cluster,
        process::{PATIENCE, Process, Program, within},
    },
};

const SLICES: &str = "discovery.k8s.io/v1/endpointslices";
const SERVICES: &str = "v1/services";

/// Changes in the cloud are of this many; with all of the tests, of more.
fn times() -> usize {
    if full() { 25 } else { 1 }
}

/// How an informer of client-go reads.
#[derive(Clone, Copy)]
struct Way {
    resource: &'static str,
    protobuf: bool,
    /// By a watch that begins with all there is, or by a list before it.
    watch_list: bool,
}

/// All ways for slices, and two for Services.
const WAYS: [Way; 6] = [
    way(SLICES, false, false),
    way(SLICES, false, true),
    way(SLICES, true, false),
    way(SLICES, true, true),
    way(SERVICES, false, true),
    way(SERVICES, true, false),
];

const fn way(resource: &'static str, protobuf: bool, watch_list: bool) -> Way {
    Way {
        resource,
        protobuf,
        watch_list,
    }
}

/// Version and hash of each object, by namespace and name.
type View = BTreeMap<(String, String), (u64, String)>;

/// A line of an informer.
#[derive(Deserialize)]
struct Said {
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

/// An informer that runs.
struct Reader {
    place: String,
    way: Way,
    process: Process,
    /// So much of what it said is in the view.
    heard: u64,
    view: View,
    /// An object that was older than before.
    fault: Option<String>,
}

/// All of them, and how often something was changed.
#[derive(Default)]
pub(super) struct Readers {
    all: Vec<Reader>,
    seed: usize,
}

impl Readers {
    /// Starts them: in the cloud one for each resource, on each node all ways.
    pub(super) fn start(&mut self, folder: &Path, cluster: &Cluster, edges: &[Edge]) {
        for way in [WAYS[3], WAYS[5]] {
            self.begin(folder, "cloud", in_the_cloud(cluster), way);
        }
        for edge in edges {
            for way in WAYS {
                let program = edge.part("informer").args(["-server", ENDPOINT]);
                self.begin(folder, &edge.name, program, way);
            }
        }
    }

    /// Starts some on each node, for slices by both encodings and for Services, that read there by this server.
    pub(super) fn start_at(&mut self, edges: &[Edge], server: &str) {
        for edge in edges {
            for way in [way(SLICES, false, false), way(SLICES, true, false), WAYS[5]] {
                let program = edge.part("informer").args(["-server", server]);
                self.begin(&edge.folder, &edge.name, program, way);
            }
        }
    }

    fn begin(&mut self, folder: &Path, place: &str, program: Program, way: Way) {
        let (encoding, beginning) = (way.protobuf, way.watch_list);
        let log = format!("informer-{place}-{}.log", self.all.len());
        let process = program
            .args(["-resource", way.resource])
            .args([format!("-protobuf={encoding}")])
            .env("KUBE_FEATURE_WatchListClient", beginning.to_string())
            .start(&folder.join(log));
        self.all.push(Reader {
            place: place.to_owned(),
            way,
            process,
            heard: 0,
            view: View::new(),
            fault: None,
        });
    }

    /// Makes changes in the cloud.
    pub(super) fn change(&mut self, cluster: &Cluster, count: usize) {
        self.seed += 1;
        in_the_cloud(cluster)
            .args(["-change".to_owned(), (count * times()).to_string()])
            .args(["-seed".to_owned(), self.seed.to_string()])
            .within(5 * PATIENCE)
            .run()
            .ok();
    }

    /// Those at these places see what the API server has; who does not, and what is wrong.
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
            let said = readers.map(|reader| reader.compared(&truth[reader.way.resource]));
            wrong = said.collect::<Vec<_>>().concat();
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

/// What the API server has now.
fn truth(cluster: &Cluster, resource: &str) -> View {
    let asked = in_the_cloud(cluster).args(["-once", "-resource", resource]);
    let said = asked.within(Duration::from_secs(30)).run().ok().text();
    let mut view = View::new();
    for line in said.lines() {
        let fault = take(&mut view, serde_json::from_str(line).unwrap());
        assert_eq!(fault, None);
    }
    view
}

/// Adds what was said to a view; what cannot be.
fn take(view: &mut View, said: Said) -> Option<String> {
    let key = (said.namespace, said.name);
    let version: u64 = said.version.parse().unwrap_or_default();
    let before = view.get(&key).map_or(0, |(version, _)| *version);
    match said.event.as_str() {
        "synced" => return None,
        "deleted" => {
            view.remove(&key);
        }
        _ => {
            view.insert(key.clone(), (version, said.hash));
        }
    }
    (version < before).then(|| format!("{key:?} was at {before} and is at {version}"))
}

impl Reader {
    /// Takes what it has said since.
    fn hear(&mut self) {
        let mut log = File::open(self.process.log()).unwrap();
        log.seek(SeekFrom::Start(self.heard)).unwrap();
        let mut said = Vec::new();
        log.read_to_end(&mut said).unwrap();
        let whole = said.iter().rposition(|byte| *byte == b'\n');
        let said = &said[..whole.map_or(0, |end| end + 1)];
        self.heard += said.len() as u64;
        for line in said.split(|byte| *byte == b'\n') {
            // client-go's own words are in between.
            let Ok(said) = serde_json::from_slice::<Said>(line) else {
                continue;
            };
            if let Some(fault) = take(&mut self.view, said) {
                self.fault.get_or_insert(fault);
            }
        }
    }

    /// What is wrong with its view.
    fn compared(&mut self, truth: &View) -> String {
        self.hear();
        let mut wrong = self.fault.clone().unwrap_or_default();
        let of = |view: &View, key: &(String, String)| view.get(key).map(|(version, _)| *version);
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
        let Way {
            resource,
            protobuf,
            watch_list,
        } = self.way;
        let place = &self.place;
        format!("{place}, {resource}, protobuf {protobuf}, watch list {watch_list}: {wrong}\n")
    }
}
