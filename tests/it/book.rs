//! Commands of the README, the tutorials, the how-to guides and the pages about migration: each block runs as it is printed.
//!
//! A page is run by a function of this file, on a machine of its own ([`Page`]). Blocks that need a cluster, a container
//! engine or the internet are in [`ELSEWHERE`] and [`NOT_RUN`]. A block that is in none of these places fails a test.

mod blocks;
mod mistakes;
mod page;
mod scenes;

use crate::world::{netns, tool::need};
use blocks::{Block, ROOT, blocks};
use page::Page;
use std::{fs, path::Path};

/// A page, a text of the blocks, and the test that runs them or the reason why none does.
type Row = (&'static str, &'static str, &'static str);

/// Blocks that another test runs.
#[rustfmt::skip]
const ELSEWHERE: &[Row] = &[
    ("README.md", "cargo test", ".ci/run, step tests"),
    ("README.md", "docker compose", ".ci/containers image"),
    ("README.md", "kubectl apply", "tests/kube/deploy/commands.rs"),
    ("docs/howto/dns.md", "kubectl apply", "tests/kube/book.rs"),
    ("docs/howto/egress-selector.md", "egress-config", "tests/kube/book.rs"),
    ("docs/howto/kubernetes-tokens.md", "kubectl apply", "tests/kube/book.rs"),
    ("docs/howto/install.md", "packaging/build arm64", "packaging/test-cross"),
    ("docs/howto/install.md", "docker build", ".ci/containers arm64"),
    ("docs/howto/port-lists.md", "patch configmap", "tests/kube/book.rs"),
    ("docs/tutorials/cluster.md", "rbac.yaml", "tests/kube/book.rs"),
    ("docs/tutorials/cluster.md", "kubectl label", "tests/kube/book.rs"),
    ("docs/tutorials/cluster.md", "causeway edge", "tests/kube/book.rs"),
    ("docs/tutorials/compose.md", "docker compose", ".ci/containers image"),
];

/// Blocks that no test runs.
#[rustfmt::skip]
const NOT_RUN: &[Row] = &[
    ("README.md", "rustup", "it installs a compiler from the internet"),
    ("docs/tutorials/first-tunnel.md", "rustup", "the same commands"),
    ("docs/howto/heartbeats.md", "custom-columns", "it needs a Node that stays delegated"),
    ("docs/howto/heartbeats.md", "kubectl annotate lease", "it needs a Node that stays delegated"),
    ("docs/migrate/konnectivity.md", "socat", "it needs kubelets and a Service of a cluster"),
    ("docs/migrate/konnectivity.md", "https://10.1.0.11:10250", "it needs a kubelet"),
    ("docs/migrate/konnectivity.md", "kubectl logs", "it needs pods of a cluster"),
    ("docs/migrate/konnectivity.md", "daemonset konnectivity-agent", "it needs Konnectivity"),
    ("docs/migrate/raven.md", "kubectl label node", "it needs nodes of OpenYurt"),
    ("docs/migrate/raven.md", "create configmap", "it needs the ports that Raven served"),
    ("docs/migrate/raven.md", "configmap edge-tunnel-nodes", "it needs the ConfigMap of Raven"),
    ("docs/migrate/raven.md", "configmap raven-cfg", "it needs Raven"),
    ("docs/migrate/superedge.md", "kubectl label node", "it needs nodes of SuperEdge"),
    ("docs/migrate/superedge.md", "kubectl get nodes", "it needs nodes of SuperEdge"),
    ("docs/migrate/superedge.md", "deployment tunnel-coredns", "it needs SuperEdge"),
    ("docs/migrate/superedge.md", "deployment tunnel-cloud --replicas", "it needs SuperEdge"),
    ("docs/migrate/superedge.md", "delete daemonset tunnel-edge", "it needs SuperEdge"),
    ("docs/migrate/yurtcoordinator.md", "--server http://127.0.0.1:20270", "it needs YurtHub beside the edge"),
    ("docs/migrate/yurtcoordinator.md", "kubectl get nodes", "it needs nodes of OpenYurt"),
    ("docs/migrate/yurtcoordinator.md", "yurtappdaemon", "it needs YurtCoordinator"),
    ("docs/migrate/yurttunnel.md", "kubectl label node", "it needs nodes of OpenYurt"),
    ("docs/migrate/yurttunnel.md", "kubectl get nodes", "it needs nodes of OpenYurt"),
    ("docs/migrate/yurttunnel.md", "configmap yurt-tunnel-nodes", "it needs the ConfigMap of YurtTunnel"),
    ("docs/migrate/yurttunnel.md", "apiserver-kubelet-client", "it needs a kubelet"),
    ("docs/migrate/yurttunnel.md", "deployment yurt-tunnel-server --replicas", "it needs YurtTunnel"),
    ("docs/migrate/yurttunnel.md", "delete daemonset yurt-tunnel-agent", "it needs YurtTunnel"),
];

/// Returns the test that runs the block, or the reason why none does.
fn elsewhere(page: &str, block: &Block) -> Option<&'static str> {
    let all = ELSEWHERE.iter().chain(NOT_RUN);
    let mut found = all.filter(|(name, part, _)| *name == page && block.text.contains(part));
    let (_, _, place) = found.next()?;
    Some(place)
}

/// The message about a block that no test runs.
fn unknown(page: &str, block: &Block) -> String {
    format!(
        "{page}:{}: no test runs this block: run it in tests/it/book.rs, or name the test that runs it in ELSEWHERE there\n{}",
        block.line, block.text
    )
}

/// Returns the pages in these folders, and the README.
fn pages(folders: &[&str]) -> Vec<String> {
    let names = folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(Path::new(ROOT).join(folder));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(move |entry| format!("{folder}/{}", entry.file_name().display()))
    });
    let mut pages: Vec<_> = names.chain(["README.md".to_owned()]).collect();
    pages.sort();
    pages
}

/// Makes a test of each function, which runs the commands of a page.
macro_rules! run {
    ($($page:literal: $test:ident;)+) => {
        const RUN: &[&str] = &[$($page),+];
        $(
            #[tokio::test]
            async fn $test() {
                need!("mounts", netns::NEED, "curl", "openssl", "kubectl", "nft", "etcd", "sshd", "nc", "corkscrew");
                let mut page = Page::open($page).await;
                scenes::$test(&mut page).await;
                page.close();
            }
        )+
    };
}

run! {
    "README.md": readme;
    "docs/howto/company-ca.md": company_ca;
    "docs/howto/edge-clusters.md": edge_clusters;
    "docs/howto/enrol-nodes.md": enrol_nodes;
    "docs/howto/external-ca.md": external_ca;
    "docs/howto/forwarding-headers.md": forwarding_headers;
    "docs/howto/install.md": install;
    "docs/howto/jwt.md": jwt;
    "docs/howto/laptop.md": laptop;
    "docs/howto/listeners.md": listeners;
    "docs/howto/monitor.md": monitor;
    "docs/howto/policy.md": policy;
    "docs/howto/revoke-nodes.md": revoke_nodes;
    "docs/howto/rotate-ca.md": rotate_ca;
    "docs/howto/shared-state.md": shared_state;
    "docs/howto/upstreams.md": upstreams;
    "docs/migrate/frp.md": frp;
    "docs/migrate/konnectivity.md": konnectivity;
    "docs/migrate/rathole.md": rathole;
    "docs/migrate/superedge.md": superedge;
    "docs/tutorials/api-cache.md": api_cache;
    "docs/tutorials/first-tunnel.md": first_tunnel;
    "docs/tutorials/two-machines.md": two_machines;
}

#[test]
fn each_block_of_commands_is_run() {
    let mut faults = Vec::new();
    for (page, part, _) in ELSEWHERE.iter().chain(NOT_RUN) {
        let found = blocks(page)
            .into_iter()
            .filter(|block| block.text.contains(part));
        let count = found.filter(Block::is_commands).count();
        if count == 0 {
            faults.push(format!(
                "{page}: no block has the text {part:?} of a table in tests/it/book.rs"
            ));
        }
    }
    // A page that is run checks its own blocks.
    let pages = pages(&["docs/howto", "docs/migrate", "docs/tutorials"]);
    for page in pages.iter().filter(|page| !RUN.contains(&page.as_str())) {
        let left = blocks(page).into_iter().filter(Block::is_commands);
        let left = left.filter(|block| elsewhere(page, block).is_none());
        faults.extend(left.map(|block| unknown(page, &block)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the number of commands in a block. Lines of a here document and continued lines do not count.
fn count_commands(block: &Block) -> usize {
    let (mut count, mut end, mut is_continued) = (0, None, false);
    for line in block.text.lines() {
        if end.is_some() {
            end = end.filter(|end| *end != line);
            continue;
        }
        count += usize::from(!is_continued);
        is_continued = line.ends_with('\\');
        end = line.split('\'').nth(1).filter(|_| line.contains("<<'"));
    }
    count
}

#[test]
fn two_machines_take_at_most_twelve_commands() {
    let blocks = blocks("docs/tutorials/two-machines.md").into_iter();
    let counts: Vec<_> = blocks
        .filter(Block::is_commands)
        .map(|block| count_commands(&block))
        .collect();
    assert_eq!(counts, [5, 4, 2]);
}

/// Folders whose pages have configurations.
const DOCUMENTS: [&str; 5] = [
    "docs/explanation",
    "docs/howto",
    "docs/migrate",
    "docs/reference",
    "docs/tutorials",
];

/// Keys by which a YAML block is another program's, or a file that the test of its page uses.
const FOREIGN: [&str; 3] = ["apiVersion:", "expect:", "scrape_configs:"];

/// Checks a configuration or a policy. Returns the messages if neither the gateway nor the edge accepts it.
async fn refused(page: &Page, text: &str) -> Option<String> {
    let policy = text.starts_with("rules:");
    let file = if policy { "policy.yaml" } else { "block.yaml" };
    // A policy may name namespaces of pods.
    let pods = "kubernetes: { pods: {}, pod_networks: [10.244.0.0/16] }";
    let configuration = format!("policy: policy.yaml\n{pods}\n");
    fs::write(page.file("block.yaml"), configuration).unwrap();
    fs::write(page.file(file), text).unwrap();
    let check = "--config block.yaml --check-config";
    let check = format!("causeway gateway {check} || causeway edge {check}");
    let ended = page.shell(&check).run().await;
    (ended.code != Some(0)).then_some(ended.stderr)
}

#[tokio::test]
async fn each_yaml_block_passes_check_config() {
    need!("mounts", netns::NEED, "openssl");
    let page = Page::open("README.md").await;
    page.commands(&scenes::configured_files()).await;
    let mut faults = Vec::new();
    let mut count = 0;
    for document in pages(&DOCUMENTS) {
        let foreign = |line: &str| FOREIGN.iter().any(|key| line.starts_with(key));
        let blocks = blocks(&document).into_iter();
        let blocks = blocks.filter(|block| block.language == "yaml");
        for block in blocks.filter(|block| !block.text.lines().any(foreign)) {
            count += 1;
            if let Some(messages) = refused(&page, &block.text).await {
                let (line, text) = (block.line, block.text);
                faults.push(format!(
                    "{document}:{line}: not accepted:\n{text}{messages}"
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 20, "{count}");
}
