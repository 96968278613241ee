//! Two sites of one cloud whose links die and return one by one: tests the data that programs on each node read meanwhile.
//!
//! A pool of four nodes at each site, a switch between them, and an uplink for each node that can be cut alone. On each
//! node a client lists and watches all the time. It is never refused, never gets an event twice or out of order, and never
//! gets an empty list. A node with a path to the cloud, its own or one of its site's, shows the newest state; any other
//! node shows the last state that it had.

use crate::world::{
    netns::{HUB, Host, NEED, SharedNetwork, Switch},
    process::{GatewayProcess, OPEN, Output, Process, address_after, causeway},
    tool::{full, need},
    until,
};
use flate2::read::GzDecoder;
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    convert::Infallible,
    fs,
    io::{self, BufRead},
    path::Path,
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::{Instant, sleep},
};

const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
/// Slices that exist all the time, including the one that changes.
const COUNT: usize = 3;
/// Name of the object that changes.
const STATE: &str = "state";
/// Port at which programs read; it is free on a separate host.
const READER: u16 = 10270;
/// Time until a lost leader is replaced.
const REPLACED: Duration = Duration::from_secs(10);

/// The gateway, and the objects that edges read.
struct Cloud {
    objects: TempDir,
    site: GatewayProcess,
    newest: Cell<u8>,
}

impl Cloud {
    async fn start() -> Self {
        let objects = tempfile::tempdir().unwrap();
        for number in 1..COUNT {
            write(objects.path(), &format!("slice-{number}"), 0);
        }
        let service = json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web", "namespace": "shop" }, "spec": { "clusterIP": "10.96.0.7" } });
        fs::write(objects.path().join("web.json"), service.to_string()).unwrap();
        write(objects.path(), STATE, 1);
        let readers = format!("api_cache: {{ manifests: {} }}", objects.path().display());
        let site =
            GatewayProcess::listening(&format!("{HUB}:0"), &format!("{OPEN}\n{readers}")).await;
        Self {
            objects,
            site,
            newest: Cell::new(1),
        }
    }

    /// Changes the object to a state that no client has read yet.
    fn change(&self) {
        self.newest.set(self.newest.get() + 1);
        write(self.objects.path(), STATE, self.newest.get());
    }

    async fn api(&self, path: &str) -> Value {
        self.site.api(path).await
    }

    /// Returns the leader of each pool.
    async fn leaders(&self) -> BTreeMap<String, String> {
        let pool = self.api("pool").await;
        serde_json::from_value(pool["leaders"].clone()).unwrap()
    }

    /// Returns the leaders that `causeway status` reports.
    async fn status(&self) -> Vec<String> {
        let status = causeway("status --output json").flag("--data-dir", self.site.data());
        let edges = status.run().await.ok().stdout;
        let edges: Vec<Value> = serde_json::from_str(&edges).unwrap();
        let leading = edges.iter().filter(|edge| edge["reading"] == "leader");
        let node = |edge: &Value| edge["node"].as_str().unwrap().to_owned();
        let mut leading: Vec<_> = leading.map(node).collect();
        leading.sort();
        leading
    }
}

/// A slice whose address ends with this number, in place of the present one.
fn write(objects: &Path, name: &str, number: u8) {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": { "name": name, "namespace": "shop" },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [format!("10.0.0.{number}")] }],
    });
    let (new, place) = (objects.join("new"), objects.join(format!("{name}.json")));
    fs::write(&new, slice.to_string()).unwrap();
    fs::rename(new, place).unwrap();
}

/// Returns the number of such a slice.
fn number(slice: &Value) -> u8 {
    let address = slice["endpoints"][0]["addresses"][0].as_str().unwrap();
    address.strip_prefix("10.0.0.").unwrap().parse().unwrap()
}

/// Returns the number of the state in a saved file: after a line with a description the file is gzip, with one object on
/// each line.
fn saved(file: &Path) -> Option<u8> {
    let bytes = fs::read(file).unwrap();
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let lines = io::BufReader::new(GzDecoder::new(&bytes[end + 1..])).lines();
    let objects = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
    let mut states = objects.filter(|object: &Value| object["metadata"]["name"] == STATE);
    states.next().map(|state| number(&state))
}

/// States that a client on a node has read.
#[derive(Default)]
struct SeenChanges {
    state: u8,
    version: u64,
    faults: Vec<String>,
}

impl SeenChanges {
    /// Stores a list, after checking that it is complete.
    fn list(&mut self, list: &Value) {
        let items = list["items"].as_array().map_or(&[][..], Vec::as_slice);
        let state = items.iter().find(|item| item["metadata"]["name"] == STATE);
        let version = version(list);
        match state.map(number) {
            Some(state) if items.len() == COUNT && state >= self.state => {
                (self.state, self.version) = (state, version);
            }
            _ => self.faults.push(format!("after {}: {list}", self.state)),
        }
    }

    /// Stores an event, after checking that it is new.
    fn event(&mut self, event: &Value) {
        let object = &event["object"];
        let good = match event["type"].as_str() {
            Some("BOOKMARK") => true,
            Some("MODIFIED") => {
                object["metadata"]["name"] == STATE
                    && number(object) > self.state
                    && version(object) > self.version
            }
            _ => false,
        };
        if !good {
            return self.faults.push(format!("after {}: {event}", self.state));
        }
        self.version = version(object);
        if event["type"] == "MODIFIED" {
            self.state = number(object);
        }
    }
}

fn version(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.unwrap().parse().unwrap()
}

/// A node, with its edge.
struct Node<'a> {
    name: String,
    host: Host<'a>,
    reader: String,
    /// `None` while the node reboots.
    edge: RefCell<Option<Process>>,
    admin: Cell<u16>,
    seen: RefCell<SeenChanges>,
}

impl<'a> Node<'a> {
    async fn join(
        cloud: &Cloud,
        (street, switch): (&'a SharedNetwork, &Switch),
        name: &str,
    ) -> Self {
        let host = street.host();
        let at = format!("{}:10271", switch.takes(&host));
        let site = format!("{{ listen: \"{at}\", addresses: [\"{at}\"] }}");
        let reader = format!("{{ members: {site}, save_every: 100ms }}");
        let node = Self {
            name: name.to_owned(),
            host,
            reader,
            edge: RefCell::default(),
            admin: Cell::new(0),
            seen: RefCell::default(),
        };
        let token = format!("--node {name} --pool {}", node.pool());
        let token = cloud.site.token(&token).await;
        node.start(cloud, &["--join", &token]).await;
        until("it has read everything", async || {
            node.status().await["healthy"] == true
        })
        .await;
        node
    }

    fn pool(&self) -> &str {
        self.name.split('-').next().unwrap()
    }

    async fn start(&self, cloud: &Cloud, flags: &[&str]) {
        let edge = cloud.site.edge_of(self.host.causeway(), &self.name, 1);
        let edge = edge.flag("--api-cache", &self.reader).args(flags);
        let mut edge = edge.start();
        edge.wait_for_line("the API cache is ready for programs on this node")
            .await;
        let admin = address_after(&edge.wait_for_line("edge is running").await, "admin=");
        let (_, port) = admin.rsplit_once(':').unwrap();
        self.admin.set(port.parse().unwrap());
        self.edge.replace(Some(edge));
    }

    /// As after a power cut.
    async fn reboot(&self, cloud: &Cloud) {
        self.reads_by_its_own_pool();
        let edge = self.edge.take().unwrap();
        edge.kill().await;
        self.start(cloud, &[]).await;
    }

    /// Sends a request; returns the head, and the stream with the body.
    async fn ask(&self, port: u16, path: &str) -> io::Result<(String, BufReader<TcpStream>)> {
        let mut stream = BufReader::new(self.host.dial(port)?);
        // With HTTP/1.0 the connection's end is the end of the body.
        let request = format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok((head, stream))
    }

    async fn get(&self, port: u16, path: &str) -> io::Result<Value> {
        let (head, mut stream) = self.ask(port, path).await?;
        let mut body = String::new();
        stream.read_to_string(&mut body).await?;
        let good = head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200");
        let fault = || io::Error::other(format!("{head}{body}"));
        let read = serde_json::from_str(&body).ok().filter(|_| good);
        read.ok_or_else(fault)
    }

    /// Returns the state that a new program reads.
    async fn reads(&self) -> u8 {
        let list = self.get(READER, SLICES).await.unwrap();
        let items = list["items"].as_array().unwrap();
        assert_eq!(items.len(), COUNT, "{}: {list}", self.name);
        let services = self.get(READER, "/api/v1/services").await.unwrap();
        assert_eq!(services["items"].as_array().unwrap().len(), 1);
        let mut items = items.iter();
        number(
            items
                .find(|item| item["metadata"]["name"] == STATE)
                .unwrap(),
        )
    }

    /// Whether watching clients and new clients have this state.
    async fn shows(&self, state: u8) -> bool {
        self.seen.borrow().state == state && self.reads().await == state
    }

    /// Returns the status of the edge's API cache.
    async fn status(&self) -> Value {
        let status = self.get(self.admin.get(), "/status").await.unwrap();
        status["api_cache"].clone()
    }

    /// Whether its disk has this state.
    fn has_saved(&self, cloud: &Cloud, state: u8) -> bool {
        let folder = cloud.site.edge_data(&self.name).join("pool");
        let mut files = fs::read_dir(folder).unwrap().map(Result::unwrap);
        files.any(|file| {
            let name = file.file_name().into_string().unwrap();
            // The file that is being written has another extension.
            let slices = name.strip_suffix(".pool");
            slices.is_some_and(|name| name.contains("endpointslices"))
                && saved(&file.path()) == Some(state)
        })
    }

    fn written(&self) -> Output {
        self.edge.borrow().as_ref().unwrap().written()
    }

    /// Checks that no log line of its edge names a node of another pool.
    fn reads_by_its_own_pool(&self) {
        let written = self.written();
        let foreign = ["north", "south"]
            .into_iter()
            .filter(|pool| *pool != self.pool());
        for pool in foreign {
            let at = written.line(|line| line.contains(&format!("{pool}-")));
            assert_eq!(at, None, "{} reads at {pool}", self.name);
        }
    }

    /// A program that lists, and watches from that version on, and starts again after a reboot.
    async fn watch(&self) -> Infallible {
        loop {
            let ended = self.follow().await;
            // Nothing else ends a watch.
            if self.edge.borrow().is_some() {
                let fault = format!("a watch ended: {ended:?}");
                self.seen.borrow_mut().faults.push(fault);
            }
            // Pause between the requests.
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn follow(&self) -> io::Result<()> {
        while self.edge.borrow().is_none() {
            // Pause between the checks.
            sleep(Duration::from_millis(20)).await;
        }
        let list = self.get(READER, SLICES).await?;
        self.seen.borrow_mut().list(&list);
        let from = version(&list);
        let path = format!("{SLICES}?watch=true&resourceVersion={from}");
        let (head, events) = self.ask(READER, &path).await?;
        if !head.contains(" 200 ") {
            return Err(io::Error::other(head));
        }
        let mut events = events.lines();
        while let Some(event) = events.next_line().await? {
            let event = serde_json::from_str(&event)?;
            self.seen.borrow_mut().event(&event);
        }
        Ok(())
    }
}

/// The nodes of one site.
struct Pool<'a> {
    name: &'static str,
    nodes: Vec<Node<'a>>,
    _switch: Switch,
}

impl<'a> Pool<'a> {
    async fn join(cloud: &Cloud, street: &'a SharedNetwork, name: &'static str) -> Self {
        let switch = street.switch();
        let names: Vec<_> = (1..=4).map(|number| format!("{name}-{number}")).collect();
        let joining = names
            .iter()
            .map(|node| Node::join(cloud, (street, &switch), node));
        Self {
            name,
            nodes: join_all(joining).await,
            _switch: switch,
        }
    }

    /// Whether one of them leads, in its own view and the gateway's, and the others read from it.
    async fn is_led(&self, cloud: &Cloud) -> bool {
        let leaders = cloud.leaders().await;
        let Some(leader) = leaders.get(self.name) else {
            return false;
        };
        for node in &self.nodes {
            let status = node.status().await;
            let (role, at) = if node.name == *leader {
                ("leader", &cloud.site.tunnel)
            } else {
                ("follower", leader)
            };
            let well = status["role"] == role && status["reads_at"] == **at;
            // A node that has just connected learns of the others step by step.
            let members = status["members"].as_array().map_or(0, Vec::len);
            if !well || status["ready"] != true || members != self.nodes.len() {
                return false;
            }
        }
        true
    }

    /// Returns the number of the node that leads.
    fn leader(&self, leaders: &BTreeMap<String, String>) -> Option<usize> {
        let named = |node: &Node<'_>| leaders.get(self.name) == Some(&node.name);
        self.nodes.iter().position(named)
    }
}

/// Both sites, and the numbers of nodes in each, grouped by what happens to them.
struct Sites<'a> {
    cloud: &'a Cloud,
    pools: &'a [Pool<'a>; 2],
}

impl<'a> Sites<'a> {
    fn nodes(&self) -> impl Iterator<Item = &'a Node<'a>> {
        self.pools.iter().flat_map(|pool| &pool.nodes)
    }

    /// Returns the node with this number of each pool.
    fn each(&self, which: [usize; 2]) -> impl Iterator<Item = &'a Node<'a>> {
        let pools = self.pools.iter().zip(which);
        pools.map(|(pool, which)| &pool.nodes[which])
    }

    /// Waits until each of these shows the newest state.
    async fn show(&self, what: &str, nodes: impl Iterator<Item = &'a Node<'a>>) {
        let newest = self.cloud.newest.get();
        for node in nodes {
            let what = format!("{} shows the newest state: {what}", node.name);
            until(&what, async || node.shows(newest).await).await;
        }
    }

    /// Waits for the normal state: in each pool one node leads and reads from the gateway, and only that one.
    async fn settle(&self) {
        for pool in self.pools {
            let what = format!("one leads {}, and the others read at it", pool.name);
            until(&what, async || pool.is_led(self.cloud).await).await;
        }
        until("only leaders read at the gateway", async || {
            let metrics = self.cloud.site.metrics().await;
            metrics.sum("api_cache_connections", &[]) == 2
                && metrics.sum("api_cache_leaders", &[]) == 2
        })
        .await;
        // A leader that the machine stops may be replaced at any time.
        until("the status names the leaders", async || {
            let leaders: Vec<_> = self.cloud.leaders().await.into_values().collect();
            self.cloud.status().await == leaders
        })
        .await;
    }

    async fn leaders(&self) -> [Option<usize>; 2] {
        let leaders = self.cloud.leaders().await;
        self.pools.each_ref().map(|pool| pool.leader(&leaders))
    }

    /// Cuts one uplink of each pool, without an effect on any node.
    async fn lose_one(&self, lost: [usize; 2]) {
        self.each(lost).for_each(|node| node.host.cut());
        self.cloud.change();
        self.show("one uplink is cut", self.nodes()).await;
        until("only leaders read at the gateway", async || {
            let metrics = self.cloud.site.metrics().await;
            metrics.sum("api_cache_connections", &[]) == 2
        })
        .await;
    }

    /// Cuts the leaders' uplinks as well. Others become leaders in time, and finally each node has a path through them.
    async fn lose_leaders(&self, (lost, leaders): ([usize; 2], [usize; 2])) -> [usize; 2] {
        self.each(leaders).for_each(|node| node.host.cut());
        let cut = Instant::now();
        self.cloud.change();
        let mut others = Vec::new();
        // The gateway may not know of either cut yet, and for a moment name a node that is cut off as well.
        until("others lead", async || {
            let now = self.leaders().await.into_iter().enumerate();
            let able = now.filter_map(|(pool, now)| {
                now.filter(|now| *now != leaders[pool] && *now != lost[pool])
            });
            others = able.collect();
            others.len() == 2
        })
        .await;
        let took = cut.elapsed();
        assert!(
            !full() || took < REPLACED,
            "leaders were replaced after {took:?}"
        );
        self.show("another node leads", self.nodes()).await;
        [others[0], others[1]]
    }

    /// Cuts all uplinks, and reboots a node of each pool; all show their last state.
    async fn lose_all(&self, left: [&[usize]; 2], reboots: [usize; 2]) {
        self.cloud.change();
        self.show("before all is cut", self.nodes()).await;
        let last = self.cloud.newest.get();
        for node in self.each(reboots) {
            until("it is on the disk", async || {
                node.has_saved(self.cloud, last)
            })
            .await;
        }
        for (pool, left) in self.pools.iter().zip(left) {
            for which in left {
                pool.nodes[*which].host.cut();
            }
        }
        self.cloud.change();
        for node in self.each(reboots) {
            node.reboot(self.cloud).await;
            assert_eq!(node.reads().await, last, "{}", node.name);
        }
        for node in self.nodes() {
            assert_eq!(node.reads().await, last, "{}", node.name);
        }
    }

    /// Restores one uplink after the other.
    async fn mend(&self, order: [[usize; 4]; 2]) {
        let [north, south] = order;
        for (nth, mended) in north.into_iter().zip(south).enumerate() {
            let mended = [mended.0, mended.1];
            self.each(mended).for_each(|node| node.host.mend());
            if nth == 0 {
                self.show("its uplink is back", self.each(mended)).await;
            }
        }
        self.cloud.change();
        self.show("all uplinks are back", self.nodes()).await;
    }

    async fn trial(&self) {
        self.show("all is well", self.nodes()).await;
        self.settle().await;
        self.cloud.change();
        self.show("all is well", self.nodes()).await;

        let mut first = [None; 2];
        until("each pool has a leader", async || {
            first = self.leaders().await;
            first.iter().all(Option::is_some)
        })
        .await;
        let first = first.map(Option::unwrap);
        let lost = first.map(|leader| (leader + 1) % 4);
        self.lose_one(lost).await;
        let second = self.lose_leaders((lost, first)).await;
        let rest = |pool: usize| {
            let gone = [first[pool], lost[pool], second[pool]];
            (0..4).find(|which| !gone.contains(which)).unwrap()
        };
        let rest = [rest(0), rest(1)];
        let left = [[second[0], rest[0]], [second[1], rest[1]]];
        // At one site a node that was cut first, at the other the node that leads.
        self.lose_all([&left[0], &left[1]], [lost[0], second[1]])
            .await;
        let order = [
            [rest[0], lost[0], first[0], second[0]],
            [lost[1], second[1], rest[1], first[1]],
        ];
        self.mend(order).await;
        self.settle().await;
    }
}

#[tokio::test]
async fn cut_uplinks_serve_newest_reachable_state() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cloud = Cloud::start().await;
    let (north, south) = tokio::join!(
        Pool::join(&cloud, &street, "north"),
        Pool::join(&cloud, &street, "south"),
    );
    let (cloud, pools) = (&cloud, &[north, south]);
    let sites = Sites { cloud, pools };
    tokio::select! {
        () = Box::pin(sites.trial()) => {}
        _ = join_all(sites.nodes().map(Node::watch)) => {}
    }
    for node in sites.nodes() {
        let faults = &node.seen.borrow().faults;
        assert_eq!(*faults, Vec::<String>::new(), "{}", node.name);
        node.reads_by_its_own_pool();
    }
    // Otherwise the output would not name the edge from which they read.
    let reads = |node: &Node<'_>| {
        node.written()
            .count(&format!("pool leader {}-", node.pool()))
    };
    assert!(sites.nodes().map(reads).sum::<usize>() >= 6);
}
