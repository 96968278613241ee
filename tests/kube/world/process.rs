//! Programs as child processes: run to their end within a time limit, or left running with their output in a file.
//!
//! A running process ends with the value that owns it. This machine's settings for proxies and for Causeway reach no
//! process. Every wait has a limit, and a failed one prints the output so far.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Time limit on a machine that does other work as well, on which an API server may take minutes to start.
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);

/// Waits until the condition holds.
pub(crate) fn until(what: &str, holds: impl FnMut() -> bool) {
    assert!(within(PATIENCE, holds), "not within {PATIENCE:?}: {what}");
}

/// Whether the condition holds within this time.
pub(crate) fn within(bound: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        if holds() {
            return true;
        }
        if begun.elapsed() > bound {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a command line that has to succeed.
pub(crate) fn must(line: &str) {
    let mut words = line.split_whitespace();
    Program::new(words.next().unwrap()).args(words).run().ok();
}

/// A program before its start.
pub(crate) struct Program {
    command: Command,
    what: String,
    input: Vec<u8>,
    patience: Duration,
}

impl Program {
    /// Any program.
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(&program);
        for (name, _) in env::vars_os() {
            let upper = name.to_string_lossy().to_ascii_uppercase();
            let ours = upper.starts_with("CAUSEWAY_") || upper.ends_with("_PROXY");
            if ours || upper == "RUST_LOG" || upper == "KUBECONFIG" {
                command.env_remove(name);
            }
        }
        Self {
            command,
            what: program.as_ref().to_string_lossy().into_owned(),
            input: Vec::new(),
            patience: PATIENCE,
        }
    }

    /// Adds arguments.
    pub(crate) fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        for argument in arguments {
            self.what.push(' ');
            self.what.push_str(&argument.as_ref().to_string_lossy());
            self.command.arg(argument);
        }
        self
    }

    /// Adds the words of a line as arguments.
    pub(crate) fn words(self, line: &str) -> Self {
        self.args(line.split_whitespace())
    }

    /// Sets a variable.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets the standard input.
    pub(crate) fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.input = input.into();
        self
    }

    /// Sets the time limit.
    pub(crate) fn within(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Runs it to its end.
    pub(crate) fn run(mut self) -> ToolOutput {
        self.command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = self.spawn();
        let (input, mut stdin) = (self.input, child.stdin.take().unwrap());
        // A program may end without reading its whole input.
        let writer = thread::spawn(move || drop(stdin.write_all(&input)));
        let stdout = reader(child.stdout.take().unwrap());
        let stderr = reader(child.stderr.take().unwrap());
        let begun = Instant::now();
        let ended = within(self.patience, || child.try_wait().unwrap().is_some());
        if !ended {
            let _ = child.kill();
        }
        let status = child.wait().unwrap();
        let took = begun.elapsed();
        let stderr = String::from_utf8_lossy(&stderr.join().unwrap()).into_owned();
        let stdout = stdout.join().unwrap();
        writer.join().unwrap();
        let (what, patience) = (self.what, self.patience);
        assert!(ended, "{what}: not over within {patience:?}: {stderr}");
        ToolOutput {
            what,
            code: status.code(),
            stdout,
            stderr,
            took,
        }
    }

    /// Starts it and leaves it running; its output goes to the file `log`.
    pub(crate) fn start(mut self, log: &Path) -> Process {
        let file = File::create(log).unwrap();
        self.command
            .stdin(Stdio::piped())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        let child = self.spawn();
        Process {
            child,
            log: log.to_owned(),
            what: self.what,
        }
    }

    fn spawn(&mut self) -> Child {
        let spawned = self.command.spawn();
        spawned.unwrap_or_else(|error| panic!("cannot start {}: {error}", self.what))
    }
}

fn reader(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut all = Vec::new();
        // The output before an error is returned.
        let _ = pipe.read_to_end(&mut all);
        all
    })
}

/// A running program; dropping it kills it.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
    what: String,
}

impl Process {
    /// Its id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of the log.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the output so far.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until its output contains this.
    pub(crate) fn says(&mut self, part: &str) {
        let there = within(PATIENCE, || {
            self.output().contains(part) || self.child.try_wait().unwrap().is_some()
        });
        let message = self.output();
        let short = message.len().saturating_sub(4000);
        let tail = String::from_utf8_lossy(&message.as_bytes()[short..]);
        let what = &self.what;
        assert!(
            there && message.contains(part),
            "{what} did not print {part:?}: {tail}"
        );
    }

    /// Writes to its input.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let stdin = self.child.stdin.as_mut().expect("the input is open");
        stdin.write_all(bytes).unwrap();
        stdin.flush().unwrap();
    }

    /// Closes its input.
    pub(crate) fn close_input(&mut self) {
        self.child.stdin = None;
    }

    /// Requests its end.
    pub(crate) fn is_to_end(&self) {
        must(&format!("kill -TERM {}", self.id()));
    }

    /// Requests its end, and kills it if it takes longer than this.
    pub(crate) fn stop(mut self, grace: Duration) {
        self.is_to_end();
        within(grace, || self.child.try_wait().unwrap().is_some());
    }

    /// Waits until it ends by itself; returns its exit code, and the time.
    pub(crate) fn ended(&mut self) -> (Option<i32>, Duration) {
        let begun = Instant::now();
        let over = within(PATIENCE, || self.child.try_wait().unwrap().is_some());
        assert!(over, "{} does not end: {}", self.what, self.output());
        (self.child.wait().unwrap().code(), begun.elapsed())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct ToolOutput {
    what: String,
    /// `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl ToolOutput {
    /// Returns it, after checking that it ended with success.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(
            self.code,
            Some(0),
            "{}: {}{}",
            self.what,
            self.text(),
            self.stderr
        );
        self
    }

    /// Returns its error message, after checking that it has failed.
    pub(crate) fn failed(self) -> String {
        assert!(
            self.code.is_some_and(|code| code != 0),
            "{}: {}",
            self.what,
            self.text()
        );
        self.stderr
    }

    /// Returns the standard output as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}
