//! Built binary as a user runs it: started, observed, signalled by its id, awaited.
//!
//! The output is read all the time, so that the process never blocks on it. The output is stored, so that a test can wait
//! for a line before or after it was written. Every wait is bounded; a process dies when its value is dropped. The settings
//! of this machine do not reach the process.

mod site;
mod usage;

pub(crate) use site::{GatewayProcess, OPEN, address_after};
pub(crate) use usage::Usage;

use super::tool::Tool;
use std::{
    env, ffi::OsStr, net::IpAddr, path::Path, process::Stdio, sync::LazyLock, time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, Command},
    sync::watch,
    task::JoinSet,
    time::timeout,
};

/// Time limit on a machine that does other work as well.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

/// The built binary, or the one of another build that `CAUSEWAY_TEST_BINARY` names.
pub(crate) fn binary() -> &'static str {
    static BINARY: LazyLock<String> = LazyLock::new(|| {
        let other = std::env::var("CAUSEWAY_TEST_BINARY");
        other.unwrap_or_else(|_| env!("CARGO_BIN_EXE_causeway").to_owned())
    });
    &BINARY
}

/// The binary before its start.
pub(crate) struct Causeway(Command);

/// The binary with these arguments, split at blanks.
pub(crate) fn causeway(line: &str) -> Causeway {
    Causeway::new(binary()).args(line.split_whitespace())
}

/// Any program that finally executes the binary.
pub(crate) fn program(path: &str) -> Causeway {
    Causeway::new(path)
}

/// The binary, which can write at most `blocks` of 512 bytes to a file: a disk that is full.
pub(crate) fn causeway_on_a_full_disk(blocks: u32) -> Causeway {
    // Without the trap the kernel's signal would end the process before it sees the error.
    let script = format!("trap '' XFSZ; ulimit -S -f {blocks}; exec \"$0\" \"$@\"");
    Causeway::new("sh").args(["-c", &script, binary()])
}

/// The binary, killed as it is about to make the `nth` system call of this name.
pub(crate) fn causeway_killed_at(call: &str, nth: usize) -> Causeway {
    let when = format!("inject={call}:signal=KILL:when={nth}");
    traced(call).args(["-e", &when, binary()])
}

/// The binary, killed as it is about to make any system call of this name about this file. strace counts calls for each
/// thread, so that the n-th call of one thread may be missed; a call about a file is found in every thread.
pub(crate) fn causeway_killed_over(call: &str, file: &Path) -> Causeway {
    let any = format!("inject={call}:signal=KILL");
    let file = file.display().to_string();
    traced(call).args(["-P", &file, "-e", &any, binary()])
}

fn traced(call: &str) -> Causeway {
    let quiet = ["-f", "-qq", "-o", "/dev/null", "-e"];
    let strace = Causeway::new("strace").args(quiet);
    strace.args([format!("trace={call}")])
}

/// The binary, which can open at most this many files.
pub(crate) fn causeway_with_files(most: u32) -> Causeway {
    let script = format!("ulimit -n {most}; exec \"$0\" \"$@\"");
    Causeway::new("sh").args(["-c", &script, binary()])
}

/// The binary, to which the modes of files apply even if root runs the tests.
pub(crate) fn causeway_under_modes() -> Causeway {
    if am_root() {
        let less = "--bounding-set=-dac_override,-dac_read_search";
        Causeway::new("setpriv").args([less, binary()])
    } else {
        Causeway::new(binary())
    }
}

/// The binary, which resolves names only with this server, at its port 53.
pub(crate) fn causeway_asking(server: IpAddr, folder: &Path) -> Causeway {
    let (servers, sources) = (folder.join("resolv.conf"), folder.join("nsswitch.conf"));
    let options = "options timeout:30 attempts:1";
    std::fs::write(&servers, format!("nameserver {server}\n{options}\n")).unwrap();
    std::fs::write(&sources, "hosts: dns\n").unwrap();
    let script = "mount --bind \"$1\" /etc/resolv.conf && mount --bind \"$2\" /etc/nsswitch.conf && \
        shift 2 && exec \"$0\" \"$@\"";
    Causeway::new("unshare")
        .args(["--mount", "sh", "-c", script, binary()])
        .args([servers, sources])
}

/// Whether root runs the tests.
pub(crate) fn am_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    Path::new("/proc/self").metadata().unwrap().uid() == 0
}

impl Causeway {
    fn new(program: &str) -> Self {
        let mut command = Command::new(program);
        let ours = |name: &str| {
            let name = name.to_ascii_uppercase();
            name.starts_with("CAUSEWAY_") || name.ends_with("_PROXY") || name == "RUST_LOG"
        };
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(ours)) {
            command.env_remove(name);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        Self(command)
    }

    /// Adds arguments.
    pub(crate) fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.0.args(arguments);
        self
    }

    /// Adds a flag with its value.
    pub(crate) fn flag(self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.args([name.as_ref(), value.as_ref()])
    }

    /// Sets a variable.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.0.env(name, value);
        self
    }

    /// Runs it in this directory.
    pub(crate) fn within(mut self, directory: impl AsRef<Path>) -> Self {
        self.0.current_dir(directory);
        self
    }

    /// Starts it and leaves it running.
    pub(crate) fn start(mut self) -> Process {
        let what = format!("{:?}", self.0.as_std());
        let mut child = self
            .0
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {what}: {error}"));
        let (sender, output) = watch::channel(Output::default());
        let mut readers = JoinSet::new();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        readers.spawn(keep(stdout, sender.clone(), |output| &mut output.stdout));
        readers.spawn(keep(stderr, sender, |output| &mut output.stderr));
        Process {
            child,
            output,
            readers,
            what,
        }
    }

    /// Runs it to its end.
    pub(crate) async fn run(self) -> ExitedProcess {
        self.start().ended().await
    }
}

async fn keep(
    pipe: impl AsyncRead + Unpin,
    output: watch::Sender<Output>,
    stream: fn(&mut Output) -> &mut String,
) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while pipe.read_until(b'\n', &mut line).await.unwrap_or(0) > 0 {
        let text = String::from_utf8_lossy(&line);
        output.send_modify(|output| stream(output).push_str(&text));
        line.clear();
    }
}

/// Output of a process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Output {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    /// Returns the first line, of either stream, for which the closure returns true.
    pub(crate) fn line(&self, wanted: impl Fn(&str) -> bool) -> Option<&str> {
        self.stdout
            .split_inclusive('\n')
            .chain(self.stderr.split_inclusive('\n'))
            .filter_map(|line| line.strip_suffix('\n'))
            .find(|line| wanted(line))
    }

    /// Returns the lines about a tunnel's end.
    pub(crate) fn ended(&self) -> Vec<&str> {
        let lines = self.stdout.lines().chain(self.stderr.lines());
        lines.filter(|line| line.contains("disconnected")).collect()
    }

    /// Returns the number of lines with this text.
    pub(crate) fn count(&self, part: &str) -> usize {
        let lines = self.stdout.lines().chain(self.stderr.lines());
        lines.filter(|line| line.contains(part)).count()
    }
}

/// The running binary.
pub(crate) struct Process {
    child: Child,
    output: watch::Receiver<Output>,
    readers: JoinSet<()>,
    what: String,
}

impl Process {
    /// Returns the first line, of either stream, that contains `part`, as soon as it exists.
    pub(crate) async fn wait_for_line(&mut self, part: &str) -> String {
        self.line(part, |line| line.contains(part)).await
    }

    /// Returns the first line for which the closure returns true; `name` is for messages.
    pub(crate) async fn line(&mut self, name: &str, asked: impl Fn(&str) -> bool) -> String {
        let (what, mut output) = (&self.what, self.output.clone());
        let there = output.wait_for(|output| output.line(&asked).is_some());
        match timeout(PATIENCE, there).await {
            Ok(Ok(output)) => output.line(&asked).unwrap().to_owned(),
            Ok(Err(_ended)) => panic!("{what} ended without {name:?}: {:#?}", self.written()),
            Err(late) => panic!("{what} did not say {name:?}, {late}: {:#?}", self.written()),
        }
    }

    /// Whether it writes this before it ends.
    pub(crate) async fn says(&mut self, part: &str) -> bool {
        let message = |output: &Output| output.count(part) > 0;
        let waited = timeout(PATIENCE, self.output.wait_for(message)).await;
        match waited {
            Ok(message) => message.is_ok(),
            Err(late) => panic!("{} did not say {part:?}, {late}", self.what),
        }
    }

    /// Waits until it has written `part` so many times in all.
    pub(crate) async fn wrote(&self, part: &str, times: usize, bound: Duration) {
        let mut output = self.output.clone();
        let enough = output.wait_for(|output| output.count(part) >= times);
        let wrote = matches!(timeout(bound, enough).await, Ok(Ok(_)));
        assert!(wrote, "{part:?}, {times} times: {:#?}", self.written());
    }

    /// Returns the output so far.
    pub(crate) fn written(&self) -> Output {
        self.output.borrow().clone()
    }

    /// Returns the id of the process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("the process runs")
    }

    /// Returns the resource usage that the system reports now.
    pub(crate) fn usage(&self) -> Usage {
        Usage::of(self.child.id().expect("the process runs"))
    }

    /// Sends it a signal, such as `TERM`.
    pub(crate) async fn signal(&self, name: &str) {
        let id = self.child.id().expect("the process runs").to_string();
        let kill = r#"kill -s "$1" "$2""#;
        let sent = Tool::new("sh").args(["-c", kill, "sh", name, &id]).run();
        sent.await.ok();
    }

    /// Waits for its end.
    pub(crate) async fn ended(mut self) -> ExitedProcess {
        let ended = timeout(PATIENCE, async {
            let status = self.child.wait().await.unwrap();
            while self.readers.join_next().await.is_some() {}
            status
        });
        let Ok(status) = ended.await else {
            panic!("{} did not end in time: {:#?}", self.what, self.written());
        };
        let Output { stdout, stderr } = self.written();
        ExitedProcess {
            code: status.code(),
            stdout,
            stderr,
        }
    }

    /// Requests its end, and waits for it.
    pub(crate) async fn stop(self) -> ExitedProcess {
        self.signal("TERM").await;
        self.ended().await
    }

    /// Ends the process that runs under strace at once; strace ends with it.
    pub(crate) async fn kill_traced(self) {
        let id = self.child.id().expect("the process runs").to_string();
        // Its own fault may have ended it already.
        let kill = r#"for child in $(cat "/proc/$1/task/$1/children"); do kill -s KILL "$child"; done; true"#;
        Tool::new("sh")
            .args(["-c", kill, "sh", &id])
            .run()
            .await
            .ok();
        self.ended().await;
    }

    /// Ends it at once, as a power cut does.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }
}

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct ExitedProcess {
    /// `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl ExitedProcess {
    /// Returns it, after checking that it ended with success.
    pub(crate) fn ok(self) -> Self {
        self.with_code(0)
    }

    /// Returns it, after checking that it ended with this code.
    pub(crate) fn with_code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// Returns its error message, after checking that it has failed, temporarily (1) or permanently (78), with all of these
    /// words in the message.
    pub(crate) fn failed(self, words: &[&str]) -> String {
        assert!(matches!(self.code, Some(1 | 78)), "{self:#?}");
        let Self { stderr, .. } = self;
        for word in words {
            assert!(stderr.contains(word), "{word:?} is not in: {stderr}");
        }
        stderr
    }
}
