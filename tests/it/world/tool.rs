//! Real clients and servers as child processes: curl, netcat, Python, the built binary.
//!
//! `need!` ends a test whose tools are missing, and writes this to the real stderr (the test runner hides the output of
//! `eprintln!`); with `CAUSEWAY_TEST_REQUIRE_ALL=1` it fails the test instead. Every child has a time limit and ends with
//! the value that owns it.

use super::{netns, process::am_root};
use std::{
    collections::BTreeMap,
    env,
    ffi::OsStr,
    io::Write,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::Mutex,
    time::Duration,
};
use test_summary::Skipped;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// Default time limit of a child, unless `within` sets another. It allows for a machine that does other work as well.
const PATIENCE: Duration = Duration::from_mins(2);

/// Variables that would send a client to another destination than the test's.
const PROXY_VARIABLES: [&str; 8] = [
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
];

/// Returns from the test unless every tool is here: `need!("curl", "python:grpc")`.
macro_rules! need {
    ($($tool:expr),+ $(,)?) => {
        $(if !$crate::world::tool::have($tool) {
            return;
        })+
    };
}
pub(crate) use need;

/// Whether `tool` is available: a program, or a module as `python:name`. Reports a missing one.
pub(crate) fn have(tool: &str) -> bool {
    if was_found(tool) {
        return true;
    }
    let required = env::var_os("CAUSEWAY_TEST_REQUIRE_ALL").is_some_and(|value| value == "1");
    let command = match tool {
        _ if needs_root(tool) && !am_root() => r#"sudo -E env "PATH=$PATH" cargo test --workspace"#,
        // A build of minutes, which no test starts.
        "coredns" => "tests/kube/assets/build && cargo test --workspace",
        "h2spec" => r#"PATH="$(tests/h2spec/build):$PATH" cargo test --workspace"#,
        _ => ".ci/setup && cargo test --workspace",
    };
    // `.ci/setup` does not install h2spec; `.ci/run --full` builds it.
    assert!(!required || tool == "h2spec", "needs {tool}: {command}");
    let name = test_name();
    let mut stderr = std::io::stderr().lock();
    writeln!(stderr, "{name}: skipped: needs {tool}: {command}").unwrap();
    let skipped = skipped().add(&name, &format!("needs {tool}"), command);
    skipped.expect("the target directory can be written to");
    false
}

/// Whether long runs and measurements are wanted (`CAUSEWAY_TEST_FULL=1`). If not, the summary of the run lists the test.
pub(crate) fn full() -> bool {
    skipped().full(&test_name())
}

fn skipped() -> Skipped {
    Skipped::of_this_run(env!("CARGO_TARGET_TMPDIR"))
}

/// Returns the name of the running test, which is its thread's name.
fn test_name() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}

fn needs_root(tool: &str) -> bool {
    matches!(tool, netns::NEED | "mounts")
}

/// Looks for each tool once: most tests need one of a few, and starting it costs more than some of these tests.
fn was_found(tool: &str) -> bool {
    static RESULTS: Mutex<BTreeMap<String, bool>> = Mutex::new(BTreeMap::new());
    let earlier = RESULTS.lock().unwrap().get(tool).copied();
    earlier.unwrap_or_else(|| {
        let found = is_here(tool);
        RESULTS.lock().unwrap().insert(tool.to_owned(), found);
        found
    })
}

fn is_here(tool: &str) -> bool {
    let (program, arguments): (&OsStr, &[&str]) = match tool.split_once(':') {
        Some(("python", module)) => {
            let find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)";
            let python = python();
            return probe(python.as_ref(), &["-c", find, module]).is_some();
        }
        // netcat-traditional has the same name and supports neither unix sockets nor CONNECT.
        None if tool == "nc" => (tool.as_ref(), &["-h"]),
        // To mount its own files over the system's, in a namespace.
        None if tool == "mounts" => ("unshare".as_ref(), &["--mount", "true"]),
        None if tool == netns::NEED => return netns::possible(),
        None if tool == "coredns" => return coredns().is_some(),
        None if tool == "corkscrew" => return corkscrew().is_some(),
        None if tool == "kubectl" => return kubectl().is_some(),
        None if tool == "postgresql" => return postgresql().is_some(),
        None if tool == "prometheus" => return prometheus().is_some(),
        None if tool == "sshd" => return openssh_server().is_some(),
        None if tool == "dig" => (tool.as_ref(), &["-v"]),
        None if tool == "ssh" => (tool.as_ref(), &["-V"]),
        None if tool == "haproxy" => (tool.as_ref(), &["-v"]),
        None if tool == "openssl" => (tool.as_ref(), &["version"]),
        _ => (tool.as_ref(), &["--version"]),
    };
    probe(program, arguments).is_some_and(|message| tool != "nc" || message.contains("OpenBSD"))
}

/// Returns the output of the program if it runs and exits successfully.
fn probe(program: &OsStr, arguments: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let message = [output.stdout, output.stderr].concat();
    Some(String::from_utf8_lossy(&message).into_owned())
}

/// The interpreter of `.ci/setup`'s environment, else the system's.
fn python() -> PathBuf {
    if let Some(named) = env::var_os("CAUSEWAY_TEST_PYTHON") {
        return named.into();
    }
    cache()
        .map(|cache| cache.join("python/bin/python3"))
        .filter(|python| python.exists())
        .unwrap_or_else(|| "python3".into())
}

/// Returns the folder for files that stay between runs, outside the clone.
fn cache() -> Option<PathBuf> {
    named("CAUSEWAY_CACHE")
        .or_else(|| named("XDG_CACHE_HOME").map(|home| home.join("causeway")))
        .or_else(|| named("HOME").map(|home| home.join(".cache/causeway")))
}

fn named(variable: &str) -> Option<PathBuf> {
    let value = env::var_os(variable).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

/// `CoreDNS`: that of `KUBEBUILDER_ASSETS`, else the newest that was built into the cache.
pub(crate) fn coredns() -> Option<PathBuf> {
    let in_folder = |folder: PathBuf| Some(folder.join("coredns")).filter(|path| path.exists());
    if let Some(folder) = named("KUBEBUILDER_ASSETS") {
        return in_folder(folder);
    }
    let built = std::fs::read_dir(cache()?.join("tools")).ok()?;
    let built = built.filter_map(|entry| Some(entry.ok()?.path()));
    let complete = built.filter(|folder| {
        let name = folder.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with("kube-")) && folder.join("complete").exists()
    });
    let made = |folder: &PathBuf| folder.metadata().and_then(|data| data.modified()).ok();
    complete.max_by_key(made).and_then(in_folder)
}

/// kubectl of Debian 12, which `.ci/setup` unpacks into the cache.
pub(crate) fn kubectl() -> Option<PathBuf> {
    let program = cache()?.join("kubectl-1.20/usr/bin/kubectl");
    Some(program).filter(|program| program.exists())
}

/// Folder with the files of Debian's OpenSSH server, which `.ci/setup` unpacks into the cache.
pub(crate) fn openssh_server() -> Option<PathBuf> {
    let folder = cache()?.join("openssh-server");
    Some(folder).filter(|folder| folder.join("usr/sbin/sshd").exists())
}

/// Debian's Prometheus, which `.ci/setup` unpacks into the cache.
pub(crate) fn prometheus() -> Option<PathBuf> {
    let program = cache()?.join("prometheus/usr/bin/prometheus");
    Some(program).filter(|program| program.exists())
}

/// Debian's corkscrew, which `.ci/setup` unpacks into the cache.
pub(crate) fn corkscrew() -> Option<PathBuf> {
    let program = cache()?.join("corkscrew/usr/bin/corkscrew");
    Some(program).filter(|program| program.exists())
}

/// Folder with the files of Debian's PostgreSQL, which `.ci/setup` unpacks into the cache. Its programs find their other files by
/// their own path.
pub(crate) fn postgresql() -> Option<PathBuf> {
    let folder = cache()?.join("postgresql");
    Some(folder).filter(|folder| folder.join("usr/lib/postgresql/15/bin/postgres").exists())
}

/// A child before its start.
pub(crate) struct Tool {
    command: Command,
    patience: Duration,
    input: Vec<u8>,
}

impl Tool {
    /// Any program.
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        for variable in PROXY_VARIABLES {
            command.env_remove(variable);
        }
        // Variables of the test run, about which the binary would warn.
        for (variable, _) in env::vars_os() {
            if variable.as_encoded_bytes().starts_with(b"CAUSEWAY_") {
                command.env_remove(variable);
            }
        }
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        Self {
            command,
            patience: PATIENCE,
            input: Vec::new(),
        }
    }

    /// curl, silent but for errors, without the user's configuration.
    pub(crate) fn curl() -> Self {
        Self::new("curl").args(["-q", "-sS"])
    }

    /// A script of `tests/it/clients`.
    pub(crate) fn python(script: &str) -> Self {
        let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests/it/clients", script]
            .iter()
            .collect();
        Self::new(python()).args(["-u"]).args([path])
    }

    /// netcat. It ends its sending side when its input ends.
    pub(crate) fn nc() -> Self {
        Self::new("nc").args(["-N"])
    }

    /// Adds arguments.
    pub(crate) fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.command.args(arguments);
        self
    }

    /// Sets a variable of the child's environment.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets the bytes that `run` sends to the child's standard input.
    pub(crate) fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.input = input.into();
        self
    }

    /// Sets the time limit of the child, or of a line of it.
    pub(crate) fn within(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Runs the child to its end.
    pub(crate) async fn run(mut self) -> ToolOutput {
        let input = std::mem::take(&mut self.input);
        let mut running = self.start();
        let input = async {
            let mut stdin = running.stdin.take().unwrap();
            // A child may end without reading its whole input.
            let _ = stdin.write_all(&input).await;
        };
        let what = &running.what;
        let ended = timeout(running.patience, async {
            tokio::join!(input, ended(&mut running.child, &mut running.lines)).1
        });
        ended
            .await
            .unwrap_or_else(|_| panic!("{what} did not end within {:?}", running.patience))
    }

    /// Starts the child and leaves it running.
    pub(crate) fn start(mut self) -> Running {
        let what = format!("{:?}", self.command.as_std());
        let mut child = self
            .command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {what}: {error}"));
        let stdout = child.stdout.take().unwrap();
        Running {
            stdin: child.stdin.take(),
            lines: BufReader::new(stdout).lines(),
            patience: self.patience,
            what,
            child,
        }
    }
}

/// A running child; dropping it kills it.
pub(crate) struct Running {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    patience: Duration,
    what: String,
}

impl Running {
    /// The next line of the child's output.
    pub(crate) async fn line(&mut self) -> String {
        let next = timeout(self.patience, self.lines.next_line()).await;
        let next = next
            .unwrap_or_else(|_| panic!("{} said nothing within {:?}", self.what, self.patience));
        if let Some(line) = next.unwrap() {
            return line;
        }
        let mut message = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        let _ = timeout(self.patience, stderr.read_to_string(&mut message)).await;
        panic!("{} ended without a further line: {message}", self.what)
    }

    /// The next line, as JSON.
    pub(crate) async fn json(&mut self) -> serde_json::Value {
        let line = self.line().await;
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    /// Writes to the child's input.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let stdin = self.stdin.as_mut().expect("the input is still open");
        stdin.write_all(bytes.as_ref()).await.unwrap();
        stdin.flush().await.unwrap();
    }

    /// Ends the child's input.
    pub(crate) fn close_input(&mut self) {
        self.stdin = None;
    }

    /// Sends a signal by its name, such as `INT`.
    pub(crate) async fn signal(&self, name: &str) {
        let id = self.child.id().expect("the child runs").to_string();
        let kill = r#"kill -s "$1" "$2""#;
        let sent = Tool::new("sh").args(["-c", kill, "sh", name, &id]).run();
        // Boxed: `run` and `signal` would otherwise contain each other's size.
        Box::pin(sent).await.ok();
    }

    /// Waits until the child ends by itself; its input stays open.
    pub(crate) async fn over(mut self) -> ToolOutput {
        let input = self.stdin.take();
        let ran = self.finish().await;
        drop(input);
        ran
    }

    /// Waits for the child's end, and closes its input; returns the output that no `line` has read.
    pub(crate) async fn finish(mut self) -> ToolOutput {
        self.stdin = None;
        let ended = ended(&mut self.child, &mut self.lines);
        timeout(self.patience, ended)
            .await
            .unwrap_or_else(|_| panic!("{} did not end within {:?}", self.what, self.patience))
    }
}

async fn ended(child: &mut Child, lines: &mut Lines<BufReader<ChildStdout>>) -> ToolOutput {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut errors = child.stderr.take().unwrap();
    let (status, ..) = tokio::join!(
        child.wait(),
        lines.get_mut().read_to_end(&mut stdout),
        errors.read_to_end(&mut stderr),
    );
    ToolOutput {
        status: status.unwrap(),
        stdout,
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// A child that has ended.
#[derive(Debug)]
pub(crate) struct ToolOutput {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// Standard output of the program.
    pub(crate) stdout: Vec<u8>,
    /// Standard error of the program.
    pub(crate) stderr: String,
}

impl ToolOutput {
    /// Returns it, after checking that it ended with success.
    pub(crate) fn ok(self) -> Self {
        let (status, stdout) = (self.status, String::from_utf8_lossy(&self.stdout));
        assert!(status.success(), "{status}\n{stdout}\n{}", self.stderr);
        self
    }

    /// Returns the standard output as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns the standard output as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {:?}\n{}", self.text(), self.stderr))
    }
}

#[cfg(test)]
mod tests;
