//! `causeway demo`: the printed commands work unchanged, and the demo leaves no files or processes.

use crate::world::{
    process::{Causeway, ExitedProcess, Process, causeway},
    tool::{Tool, ToolOutput, need},
    until,
};
use serde_json::Value;
use std::{fs, net::TcpListener, path::Path};
use tempfile::TempDir;

#[tokio::test]
async fn every_printed_command_works_and_no_files_remain() {
    need!("curl");
    let demo = Demo::start("").await;
    let stdout_text = &demo.stdout_text;
    let at = |part: &str| {
        stdout_text
            .find(part)
            .unwrap_or_else(|| panic!("no {part:?} in {stdout_text}"))
    };
    let steps = [
        "gateway         tunnels 127.0.0.1:",
        "edge-1          joined with a token in ",
        "edge-2          joined with a token in ",
        "GET https://edge-1:9100/  200 in ",
        "GET https://edge-2:9100/  200 in ",
        "  200: 3 EndpointSlices in the API cache of edge-1",
        "  200: 3 EndpointSlices in the API cache of edge-2",
        "\ncurl ",
        "\nkill -USR1 ",
        "\nready\n",
    ];
    let places: Vec<usize> = steps.iter().map(|step| at(step)).collect();
    assert!(places.is_sorted(), "{stdout_text}");
    demo.every_command_works().await;
    assert!(!stdout_text.contains(" -k") && !stdout_text.contains("--insecure"));

    assert_eq!(left(&demo.temporary).len(), 1);
    assert_eq!(demo.interrupt().await.stderr, "");
}

#[tokio::test]
async fn demo_edges_serve_reads_while_their_gateway_is_stopped() {
    need!("curl");
    // The demos of other tests take the first free loopback address, so they would take this one's while it is stopped.
    let mut demo = Demo::start("--listen 127.0.1.1:9100").await;
    let (call, read) = (demo.command("curl "), demo.command("curl -sS http://"));
    let switch = demo.command("kill ");
    let elsewhere = demo.temporary.path().to_owned();
    let before = slices(&shell(&read, &elsewhere).await.text());
    assert_eq!(before.len(), 3, "{before:?}");

    shell(&switch, &elsewhere).await;
    demo.process.wait_for_line("the gateway has stopped").await;
    let refused = format!("{call} -o /dev/null; test $? = 7");
    shell(&refused, &elsewhere).await;
    let after = slices(&shell(&read, &elsewhere).await.text());
    assert_eq!(before, after);

    // Meanwhile another process has its port.
    let taken = TcpListener::bind(demo.listens()).unwrap();
    shell(&switch, &elsewhere).await;
    demo.process
        .wait_for_line("the gateway cannot start again yet: listener \"https\"")
        .await;
    drop(taken);
    demo.process
        .wait_for_line("the gateway is running again")
        .await;
    // Each connects again by itself.
    for node in ["edge-1", "edge-2"] {
        let call = call.replace("edge-1", node);
        let well = format!("{call} | grep -c 'hello from {node}' || true");
        until("the edges are back", async || {
            shell(&well, &elsewhere).await.text().trim() == "1"
        })
        .await;
    }
    demo.every_command_works().await;
    // It also ends in order while no gateway runs.
    shell(&switch, &elsewhere).await;
    let times = 2;
    let bound = crate::world::PATIENCE;
    demo.process
        .wrote("the gateway has stopped", times, bound)
        .await;
    demo.interrupt().await;
}

/// Returns the names and versions of the listed objects.
fn slices(text: &str) -> Vec<(String, String)> {
    let list: Value = serde_json::from_str(text).unwrap();
    let items = list["items"].as_array().unwrap().iter();
    let field = |item: &Value, name: &str| item["metadata"][name].as_str().unwrap().to_owned();
    items
        .map(|item| (field(item, "name"), field(item, "resourceVersion")))
        .collect()
}

#[tokio::test]
async fn sigterm_ends_a_demo_as_ctrl_c_does() {
    let demo = Demo::start("").await;
    demo.end("TERM").await;
}

#[tokio::test]
async fn a_data_directory_is_kept_and_reused_for_every_name() {
    need!("curl");
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("it's a $HOME");
    let mut roots = Vec::new();
    for _ in 0..2 {
        let demo = Demo::from(
            causeway("demo")
                .flag("--data-dir", "it's a $HOME")
                .within(&folder),
        )
        .await;
        demo.every_command_works().await;
        demo.interrupt().await;
        roots.push(fs::read(data.join("ca.pem")).unwrap());
        assert!(
            !data.join("run-admin").exists(),
            "the demo's address outlives it"
        );
    }
    assert_eq!(roots[0], roots[1]);
}

#[tokio::test]
async fn a_demo_listens_at_the_given_addresses() {
    need!("curl");
    for listen in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"] {
        if listen.starts_with('[') && TcpListener::bind(listen).is_err() {
            continue;
        }
        let demo = Demo::start(&format!("--listen {listen}")).await;
        assert!(
            demo.stdout_text.contains("--connect-to"),
            "{}",
            demo.stdout_text
        );
        demo.every_command_works().await;
        demo.interrupt().await;
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let refused = causeway("demo").flag("--listen", &taken).run().await;
    refused.failed(&["listener \"https\"", &taken, "in use"]);
}

#[tokio::test]
async fn demos_that_start_together_do_not_meet() {
    need!("curl");
    let (one, two, three) = tokio::join!(Demo::start(""), Demo::start(""), Demo::start(""));
    for demo in [one, two, three] {
        demo.every_command_works().await;
        demo.interrupt().await;
    }
}

/// A demo that has printed `ready`.
struct Demo {
    process: Process,
    stdout_text: String,
    /// Folder that the demo takes for the system's directory of temporary files.
    temporary: TempDir,
}

impl Demo {
    async fn start(line: &str) -> Self {
        Self::from(causeway("demo").args(line.split_whitespace())).await
    }

    async fn from(demo: Causeway) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let mut process = demo.env("TMPDIR", temporary.path()).start();
        process.line("ready", |line| line == "ready").await;
        Self {
            stdout_text: process.written().stdout,
            process,
            temporary,
        }
    }

    /// Runs the printed commands in a shell, in another folder.
    async fn every_command_works(&self) {
        let curls: Vec<&str> = self
            .stdout_text
            .lines()
            .filter(|line| line.starts_with("curl "))
            .collect();
        let elsewhere = self.temporary.path();
        let mut answers = Vec::new();
        for line in &curls {
            // The settings of the user must not affect the demo.
            let line = line.replacen("curl ", "curl -q ", 1);
            answers.push(shell(&line, elsewhere).await.text());
        }
        let [one, two, ticks, upload, download, read] = &answers[..] else {
            panic!("{curls:#?}");
        };
        assert_eq!(slices(read).len(), 3, "{read}");
        assert!(
            one.contains("hello from edge-1") && two.contains("hello from edge-2"),
            "{answers:?}"
        );
        assert_eq!(
            ticks.lines().filter(|line| !line.is_empty()).count(),
            3,
            "{ticks:?}"
        );
        let root = self.root();
        let sum = shell(
            &format!("sha256sum < \"{}\"", root.replace('$', "\\$")),
            elsewhere,
        )
        .await;
        let size = fs::metadata(&root).unwrap().len().to_string();
        let sum = sum.text().split(' ').next().unwrap().to_owned();
        assert!(upload.contains(&size) && upload.contains(&sum), "{upload}");
        assert!(download.starts_with("100000000 bytes at "), "{download}");

        let status = self
            .stdout_text
            .lines()
            .find(|line| line.contains(" status --data-dir "));
        let table = shell(status.unwrap(), elsewhere).await.text();
        assert_eq!(table.matches("  connected  ").count(), 2, "{table}");
    }

    /// Returns the first printed command that begins with this text.
    fn command(&self, start: &str) -> String {
        let mut lines = self.stdout_text.lines();
        let line = lines.find(|line| line.starts_with(start)).unwrap();
        line.replacen("curl ", "curl -q ", 1)
    }

    /// Returns the address for clients, as commands name it: `--resolve edge-1:9100:127.0.0.2`, or `--connect-to` with a
    /// port.
    fn listens(&self) -> String {
        let (_, to) = self.stdout_text.split_once(" edge-1:9100:").unwrap();
        let to = to.split_whitespace().next().unwrap();
        if to.contains(':') {
            to.to_owned()
        } else {
            format!("{to}:9100")
        }
    }

    fn data(&self) -> String {
        let line = self
            .stdout_text
            .lines()
            .find_map(|line| line.strip_prefix("data directory  "));
        let line = line.unwrap();
        line.strip_suffix(" (removed at the end)")
            .unwrap_or(line)
            .to_owned()
    }

    fn root(&self) -> String {
        format!("{}/demo-ca.pem", self.data())
    }

    async fn interrupt(self) -> ExitedProcess {
        self.end("INT").await
    }

    /// Ends it, and checks that no temporary file is left.
    async fn end(self, signal: &str) -> ExitedProcess {
        self.process.signal(signal).await;
        let ended = self.process.ended().await.ok();
        assert!(ended.stdout.ends_with("\nstopping\n"), "{}", ended.stdout);
        assert_eq!(left(&self.temporary), Vec::<String>::new());
        ended
    }
}

fn left(folder: &TempDir) -> Vec<String> {
    let all = fs::read_dir(folder.path()).unwrap();
    all.map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect()
}

async fn shell(line: &str, directory: &Path) -> ToolOutput {
    let script = format!("cd \"$0\" && {line}");
    Tool::new("sh")
        .args(["-c".as_ref(), script.as_ref(), directory.as_os_str()])
        .run()
        .await
        .ok()
}
