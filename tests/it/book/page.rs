//! A page of the book, and a machine of its own on which its commands run as they are printed.
//!
//! The machine has namespaces of its own for mounts, network, name and processes: `/etc`, `/run`, `/var` and `/usr/local/bin`
//! belong to the page, nothing reaches another network, and every process ends with the machine. Its name is edge-1. Each block
//! runs in a shell of its own, as in another terminal of the reader.

use super::blocks::{Block, blocks};
use crate::world::{
    process::{Causeway, ExitedProcess, Process, binary, program},
    until,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// Makes the machine, and then holds it. `$1` is a folder of its own, `$2` the binary.
const MACHINE: &str = r#"
hostname edge-1
ip link set lo up
mkdir "$1/etc" "$1/home"
for kept in passwd group ssl alternatives ld.so.cache; do [ ! -e /etc/$kept ] || cp -a /etc/$kept "$1/etc"; done
echo 'hosts: files' >"$1/etc/nsswitch.conf"
echo '127.0.0.1 localhost gw.example.com' >"$1/etc/hosts"
mount --bind "$1/etc" /etc
for own in /run /usr/local/bin /var/lib /var/log; do mount -t tmpfs tmpfs $own; done
ln -s "$2" /usr/local/bin/causeway
echo the machine is there
exec sleep infinity
"#;

/// The reader of a page.
pub(super) struct Page {
    name: &'static str,
    blocks: Vec<Block>,
    ran: BTreeSet<usize>,
    folder: TempDir,
    _machine: Process,
    /// The process whose namespaces are the machine's.
    id: String,
}

impl Page {
    /// Opens a page at a machine of its own.
    pub(super) async fn open(name: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let namespaces = "--mount --net --uts --pid --fork --kill-child --mount-proc sh -ec";
        let mut machine = program("unshare")
            .args(namespaces.split(' '))
            .args([MACHINE, "sh"])
            .args([folder.path(), Path::new(binary())])
            .start();
        machine.wait_for_line("the machine is there").await;
        let unshare = machine.id();
        let children = format!("/proc/{unshare}/task/{unshare}/children");
        let id = fs::read_to_string(children).unwrap().trim().to_owned();
        Self {
            name,
            blocks: blocks(name),
            ran: BTreeSet::new(),
            folder,
            _machine: machine,
            id,
        }
    }

    /// Commands of the machine's shell, which ends at the first one that fails.
    pub(super) fn shell(&self, commands: &str) -> Causeway {
        program("nsenter")
            .args(["--target", &self.id, "--mount", "--net", "--uts", "--pid"])
            .args(["bash", "-euo", "pipefail", "-c", &format!("cd\n{commands}")])
            .env("HOME", self.folder.path().join("home"))
            .env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            // On a busy machine an answer of etcd can take longer than the default of 5 s.
            .env("ETCDCTL_COMMAND_TIMEOUT", "1m")
            .env("ETCDCTL_DIAL_TIMEOUT", "1m")
    }

    /// Starts commands of the test.
    pub(super) fn start_commands(&self, commands: &str) -> Process {
        self.shell(commands).start()
    }

    /// Runs commands of the test. Returns their output.
    pub(super) async fn commands(&self, commands: &str) -> String {
        self.shell(commands).run().await.ok().stdout
    }

    /// Waits until commands of the test succeed.
    pub(super) async fn until(&self, commands: &str) {
        let what = format!("{}: {commands}", self.name);
        until(&what, async || {
            self.shell(commands).run().await.code == Some(0)
        })
        .await;
    }

    /// A file in the reader's folder.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("home").join(name)
    }

    /// Makes a program of the machine, in place of one that cannot run there.
    pub(super) async fn stand_in(&self, name: &str, script: &str) {
        fs::write(self.file("stand-in"), format!("#!/bin/sh\n{script}\n")).unwrap();
        let install = format!("install -D -m 755 stand-in {name}");
        self.commands(&install).await;
    }

    /// The only block with this text.
    fn block(&mut self, part: &str) -> Block {
        let mut found = (0..self.blocks.len()).filter(|at| self.blocks[*at].text.contains(part));
        let (one, more) = (found.next(), found.next());
        let (Some(one), None) = (one, more) else {
            panic!("{}: not exactly one block has the text {part}", self.name);
        };
        self.ran.insert(one);
        self.blocks[one].clone()
    }

    /// Writes the YAML block with this text to a file.
    pub(super) async fn write(&mut self, part: &str, file: &str) {
        self.commands(&format!("rm -f {file}")).await;
        self.add(part, file).await;
    }

    /// Adds it to a file.
    pub(super) async fn add(&mut self, part: &str, file: &str) {
        let text = self.block(part).text;
        fs::write(self.file("block"), text).unwrap();
        self.commands(&format!("mkdir -p $(dirname {file}); cat block >>{file}"))
            .await;
    }

    /// Starts the block with this text.
    pub(super) fn start(&mut self, part: &str) -> Process {
        self.start_with(part, "")
    }

    /// Starts it with a line that the reader types.
    pub(super) fn start_with(&mut self, part: &str, typed: &str) -> Process {
        let block = self.block(part);
        let input = self.file(&format!("typed-{}", block.line));
        fs::write(&input, format!("{typed}\n")).unwrap();
        // Opened before the block runs: it may change the folder.
        self.shell(&format!("exec <{}\n{}", input.display(), block.text))
            .start()
    }

    /// Runs the block with this text to its end.
    pub(super) async fn run(&mut self, part: &str) -> ExitedProcess {
        self.start(part).ended().await.ok()
    }

    /// Runs each command of the block with this text, and compares what the page shows of its output. Returns the outputs.
    ///
    /// Times and identifiers differ from the page's. A later command of the block gets the machine's in place of the page's.
    pub(super) async fn console(&mut self, part: &str) -> Vec<String> {
        let block = self.block(part);
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        let mut outputs = Vec::new();
        for (mut command, shown) in steps(&block.text) {
            for (page, here) in &names {
                command = command.replace(page, here);
            }
            let output = self.commands(&command).await;
            let (page, here) = (words(&shown), words(&output));
            let pairs = || page.iter().zip(&here);
            let same = page.len() == here.len() && pairs().all(|(page, here)| is_like(page, here));
            let place = format!("{}:{}: {command}", self.name, block.line);
            assert!(same || shown.is_empty(), "{place}\n{output}");
            names.extend(pairs().map(|(page, here)| (page.clone(), here.clone())));
            outputs.push(output);
        }
        outputs
    }

    /// The text of the only block that has this in it.
    pub(super) fn text(&mut self, part: &str) -> String {
        self.block(part).text
    }

    /// Checks that the output has the lines that the block with this text shows, apart from numbers and folders.
    pub(super) fn shows(&mut self, part: &str, output: &str) {
        let block = self.block(part);
        let lines: BTreeSet<String> = output.lines().map(stable).collect();
        for line in block.text.lines().filter(|line| *line != "…") {
            let place = format!("{}:{}: {line}", self.name, block.line);
            assert!(lines.contains(&stable(line)), "{place}\n{output}");
        }
    }

    /// Ends all processes of the machine in order, and waits for that.
    pub(super) async fn stop_all(&self) {
        self.commands("kill -TERM -1 || true").await;
        self.until("! kill -0 -1").await;
    }

    /// Fails if a block of commands was not run, unless another test runs it.
    pub(super) fn close(self) {
        let known = |block: &Block| super::elsewhere(self.name, block).is_some();
        let left = self.blocks.iter().enumerate();
        let left = left.filter(|(at, block)| block.is_commands() && !self.ran.contains(at));
        let left = left.filter(|(_, block)| !known(block));
        let left: Vec<_> = left.map(|(_, it)| super::unknown(self.name, it)).collect();
        assert!(left.is_empty(), "{}", left.join("\n"));
    }
}

/// Returns the commands of a block with prompts, each with the output that the page shows.
fn steps(text: &str) -> Vec<(String, String)> {
    let mut steps: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        match line.split_once("$ ") {
            // A prompt has at most the name of a machine.
            Some((prompt, command)) if !prompt.contains(' ') => {
                steps.push((command.to_owned(), String::new()));
            }
            _ => {
                let (_, shown) = steps.last_mut().expect("a command comes first");
                shown.push_str(line);
                shown.push('\n');
            }
        }
    }
    steps
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Whether a word is that of the page, apart from times and identifiers.
fn is_like(page: &str, here: &str) -> bool {
    let is_time = |word: &str| word.len() == 20 && word.ends_with('Z') && word.contains('T');
    let is_identifier = page.len() == 12
        && page.contains(|c: char| c.is_ascii_uppercase())
        && page.contains(|c: char| c.is_ascii_lowercase());
    match page {
        _ if is_time(page) => is_time(here),
        _ if is_identifier => here.len() == page.len(),
        _ if page.ends_with('…') => here.len() > page.len(),
        _ => page == here,
    }
}

/// Returns a line without what differs from run to run: numbers, folders, and the widths of columns.
fn stable(line: &str) -> String {
    let word = |word: &str| match word.strip_prefix(['/', '…']) {
        Some(path) => match path.rsplit_once('/') {
            Some((_, file)) if file.contains('.') => file.to_owned(),
            _ => "…".to_owned(),
        },
        None if word
            .trim_start_matches('(')
            .starts_with(|c: char| c.is_ascii_digit()) =>
        {
            "#".into()
        }
        None => word.replace(|c: char| c.is_ascii_digit(), ""),
    };
    let words: Vec<String> = line.split_whitespace().map(word).collect();
    words.join(" ")
}
