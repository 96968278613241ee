//! Commands of the book that need a cluster, as they are printed but for folders, on a machine of the cloud and on a node.

#[path = "../it/book/blocks.rs"]
mod blocks;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use libtest_mimic::Trial;

use crate::{
    trial,
    world::{
        World,
        causeway::BINARY,
        net::{MACHINE, Machine},
        process::{PATIENCE, Process, Program, until, within},
        world,
    },
};
use blocks::{ROOT, blocks};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial(
        "book::commands_of_the_pages_about_clusters",
        commands_of_the_pages_about_clusters,
    )]
}

/// The only block of commands of a page that has this text.
pub(crate) fn block(page: &str, part: &str) -> String {
    only(page, part, true)
}

/// The only file in a page that has this text.
pub(crate) fn file(page: &str, part: &str) -> String {
    only(page, part, false)
}

fn only(page: &str, part: &str, commands: bool) -> String {
    let all = blocks(page).into_iter();
    let all = all.filter(|block| block.is_commands() == commands);
    let mut found = all.filter(|block| block.text.contains(part));
    let one = found
        .next()
        .unwrap_or_else(|| panic!("{page} has no {part}"));
    let place = format!("{page}:{}", one.line);
    assert!(found.next().is_none(), "{place} is not the only {part}");
    one.text
}

/// The reader: a folder with the programs and the examples, and the gateway's host.
struct Reader<'a> {
    world: &'a World,
    folder: PathBuf,
    host: Machine,
}

impl<'a> Reader<'a> {
    fn new(world: &'a World) -> Self {
        let folder = world.path("book");
        fs::create_dir_all(folder.join("bin")).unwrap();
        fs::create_dir_all(folder.join("www")).unwrap();
        fs::create_dir_all(folder.join("kubernetes")).unwrap();
        let examples = Path::new(ROOT).join("examples");
        let kubectl = world.cluster.assets.join("kubectl");
        symlink(examples, folder.join("examples")).unwrap();
        symlink(kubectl, folder.join("bin/kubectl")).unwrap();
        symlink(BINARY, folder.join("bin/causeway")).unwrap();
        let hosts = format!("127.0.0.1 localhost\n{MACHINE} edge-1\n");
        fs::write(folder.join("hosts"), hosts).unwrap();
        fs::write(folder.join("www/metrics"), "of the node\n").unwrap();
        let host = Machine::new();
        Self {
            world,
            folder,
            host,
        }
    }

    /// Writes a file of an example to the reader's folder, with the host's address and these changes.
    fn write(&self, example: &str, name: &str, changes: &[(&str, &str)]) {
        let file = self.folder.join("examples").join(example).join(name);
        let mut text = fs::read_to_string(file).unwrap();
        text = text.replace("gw.example.com", &MACHINE.to_string());
        for (from, to) in changes {
            assert!(text.contains(from), "{example}/{name} has no {from}");
            text = text.replace(from, to);
        }
        fs::write(self.folder.join(name), self.here(&text)).unwrap();
    }

    /// Puts the reader's folder in place of the host's.
    fn here(&self, text: &str) -> String {
        let etc = self.folder.join("causeway").display().to_string();
        let kubernetes = self.folder.join("kubernetes").display().to_string();
        text.replace("/etc/causeway", &etc)
            .replace("/etc/kubernetes", &kubernetes)
    }

    /// Completes `place`, a place to run programs, by a shell with these commands. All that it starts ends with it.
    fn shell(&self, place: Program, data: &str, commands: &str) -> Program {
        let folder = self.folder.display();
        let script = format!("mount --bind {folder}/hosts /etc/hosts\ncd {folder}\n{commands}");
        let path = std::env::var("PATH").unwrap();
        place
            .words("--mount --pid --fork --kill-child --mount-proc bash -euo pipefail -c")
            .args([self.here(&script)])
            .env("PATH", format!("{folder}/bin:{path}"))
            .env(
                "KUBECONFIG",
                self.world.cluster.pki.path("admin.kubeconfig"),
            )
            .env("CAUSEWAY_DATA_DIR", self.folder.join(data))
    }

    /// Commands at the gateway's host.
    fn at_host(&self, commands: &str) -> Program {
        self.shell(self.host.at("unshare"), "gateway", commands)
    }

    fn run(&self, page: &str, part: &str) -> String {
        self.at_host(&block(page, part)).run().ok().text()
    }

    /// Starts a block whose last command is the gateway.
    fn gateway(&self, page: &str, part: &str) -> Process {
        let log = self.folder.join("gateway.log");
        let mut gateway = self.at_host(&block(page, part)).start(&log);
        gateway.says("gateway ready");
        gateway
    }

    /// Starts the edge of the first node with a token.
    fn edge(&self, token: &str) -> Process {
        let node = &self.world.nodes[0];
        let edge = block("docs/tutorials/cluster.md", "causeway edge");
        // The node has an edge of other tests, too.
        let edge = self
            .shell(node.at("unshare"), "edge", &edge)
            .env("CAUSEWAY_NODE", &node.name)
            .env("CAUSEWAY_ADMIN_LISTEN", "127.0.0.1:11566")
            .env("CAUSEWAY_JOIN", token);
        let mut edge = edge.start(&self.folder.join("edge.log"));
        edge.says("tunnel registered");
        edge
    }
}

/// Additions of the page about lists of ports to the gateway of the names.
const PORTS: [(&str, &str); 2] = [
    (
        "\nkubernetes:\n",
        "\nkubernetes:\n  ports: { http: plain, service: causeway-clients }\n",
    ),
    (
        "\nlisteners:\n",
        "\nlisteners:\n  - { name: plain, protocol: http, listen: \"10.97.0.50:10255\", port: 10255, anonymous: true, anonymous_from: [10.97.0.0/24], anonymous_ports: [10255] }\n",
    ),
];

/// A rule for clients of the listed port.
const RULE: (&str, &str) = (
    "\nrules:\n",
    "\nrules:\n  - { who: { users: [\"system:anonymous\"] }, what: { ports: [9051] }, then: allow }\n",
);

fn commands_of_the_pages_about_clusters() {
    let world = world();
    let reader = Reader::new(&world);
    let (tutorial, names) = ("docs/tutorials/cluster.md", "docs/howto/dns.md");
    let (ports, egress) = ("docs/howto/port-lists.md", "docs/howto/egress-selector.md");

    reader.write("dns", "rbac.yaml", &[]);
    reader.run(tutorial, "apply -f rbac.yaml");
    for file in ["ports/rbac.yaml", "ports/ports.yaml"] {
        world.cluster.apply_example(file);
    }
    reader.write("dns", "gateway.yaml", &PORTS);
    reader.write("dns", "policy.yaml", &[RULE]);
    let gateway = reader.gateway(names, "kubelet-client");
    let token = reader.run(tutorial, "kubectl label");
    let token = token.lines().last().unwrap_or_default();
    let listed = "listed_ports: [\"9000-9999\"]\nports:\n";
    reader.write("dns", "edge.yaml", &[("ports:\n", listed)]);
    let _edge = reader.edge(token);

    let app = world.nodes[0].at("python3");
    let app = app.words("-u -m http.server 9051 --bind 127.0.0.1 --directory");
    let mut app = app
        .args([reader.folder.join("www")])
        .start(&reader.folder.join("app.log"));
    app.says("Serving HTTP");
    let call = block(ports, "patch configmap");
    let served = within(PATIENCE, || {
        let called = reader.at_host(&call).run();
        called.text().ends_with("of the node\n")
    });
    assert!(served, "{}", gateway.output());
    drop(gateway);
    until("the gateway has ended", || {
        reader.at_host("causeway health").run().code != Some(0)
    });

    reader.run("docs/howto/kubernetes-tokens.md", "kubectl apply");
    reader.write("egress", "gateway.yaml", &[]);
    let _gateway = reader.gateway(egress, "egress-config");
    until("the edge is connected", || {
        let status = reader.at_host("causeway status").run().text();
        status.contains("edge-1  connected")
    });
    let selector = fs::read_to_string(reader.folder.join("kubernetes/egress.yaml")).unwrap();
    assert!(
        selector.contains("/run/causeway/kube-apiserver.sock"),
        "{selector}"
    );
    for file in ["ports/rbac.yaml", "ports/ports.yaml"] {
        let file = reader.folder.join("examples").join(file);
        world.cluster.kubectl("delete -f").args([file]).run().ok();
    }
}
