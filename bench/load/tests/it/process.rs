//! The generator and a gateway as processes. The generator ends with the value, because its standard input does.

use serde_json::{Value, json};
use std::{env, fs, path::Path, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines},
    process::{Child, ChildStderr, ChildStdout, Command},
    time::timeout,
};

/// Time limit on a machine that does other work as well.
const PATIENCE: Duration = Duration::from_mins(1);

/// A running generator.
pub(crate) struct Load {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Outcome of a load generator's run.
pub(crate) struct Outcome {
    pub(crate) good: bool,
    /// Lines that no test has read yet.
    pub(crate) lines: Vec<Value>,
    pub(crate) complaint: String,
}

impl Load {
    /// Starts it with these arguments, split at blanks.
    pub(crate) fn start(line: &str) -> Self {
        Self::run(
            Command::new(env!("CARGO_BIN_EXE_causeway-bench-load")),
            line,
        )
    }

    /// As [`Load::open_h2_stream`], in a network namespace.
    pub(crate) fn start_in(netns: &str, line: &str) -> Self {
        let mut command = Command::new("ip");
        let binary = env!("CARGO_BIN_EXE_causeway-bench-load");
        command.args(["netns", "exec", netns, binary]);
        Self::run(command, line)
    }

    fn run(mut command: Command, line: &str) -> Self {
        let mut child = command
            .args(line.split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Its next line, which must be this event.
    pub(crate) async fn event(&mut self, name: &str) -> Value {
        let Some(line) = self.line().await else {
            let mut complaint = String::new();
            let stderr = self.child.stderr.as_mut().unwrap();
            stderr.read_to_string(&mut complaint).await.unwrap();
            panic!("no {name}: {complaint}");
        };
        assert_eq!(line["event"], name, "{line}");
        line
    }

    async fn line(&mut self) -> Option<Value> {
        let line = timeout(PATIENCE, self.lines.next_line()).await;
        let line = line.expect("a line in time").unwrap()?;
        Some(serde_json::from_str(&line).unwrap())
    }

    /// Ends its input, which asks it to stop, and waits for its end.
    pub(crate) async fn stop(mut self) -> Outcome {
        drop(self.child.stdin.take());
        self.wait().await
    }

    /// Waits until it ends by itself.
    pub(crate) async fn wait(mut self) -> Outcome {
        let mut lines = Vec::new();
        while let Some(line) = self.line().await {
            lines.push(line);
        }
        let stdin = self.child.stdin.take();
        let ended = timeout(PATIENCE, self.child.wait_with_output()).await;
        let ended = ended.expect("an end in time").unwrap();
        drop(stdin);
        Outcome {
            good: ended.status.success(),
            lines,
            complaint: String::from_utf8(ended.stderr).unwrap(),
        }
    }
}

impl Outcome {
    /// The last line of a run that succeeded.
    pub(crate) fn last(&self) -> &Value {
        assert!(self.good, "{}", self.complaint);
        self.lines.last().expect("a last line")
    }
}

/// Runs a generator that ends by itself; returns its result.
pub(crate) async fn result(line: &str) -> Value {
    let outcome = Load::start(line).wait().await;
    let last = outcome.last();
    assert_eq!(last["event"], "result", "{last}");
    last.clone()
}

/// The app, and its address.
pub(crate) async fn app() -> (Load, String) {
    let mut app = Load::start("app --listen 127.0.0.1:0");
    let ready = app.event("ready").await;
    let address = ready["listen"].as_str().unwrap().to_owned();
    (app, address)
}

/// A gateway, of the build that `BENCH_PROGRAM` names, as for `bench/run`.
pub(crate) struct Gateway {
    child: Child,
    /// Kept open: a gateway that cannot write its log would lose lines.
    _log: Lines<BufReader<ChildStderr>>,
    /// Addresses of the tunnel port and of the listeners.
    pub(crate) tunnel: String,
    pub(crate) https: String,
    pub(crate) connect: String,
}

impl Gateway {
    /// Starts a gateway with a data directory, whose tunnel port is at this address, and waits until it is ready.
    pub(crate) async fn start(data: &Path, tunnel: &str) -> Self {
        let program = env::var_os("BENCH_PROGRAM");
        let program = program.expect("BENCH_PROGRAM names a build of causeway");
        let listener = |protocol: &str| json!({ "name": protocol, "protocol": protocol, "listen": "127.0.0.1:0" });
        let config = json!({
            "data_dir": data,
            "workers": 1,
            "access_log": "none",
            "tunnel": { "listen": tunnel },
            "admin": { "listen": "127.0.0.1:0" },
            "listeners": [listener("https"), listener("connect")],
        });
        let file = data.with_extension("yaml");
        fs::write(&file, config.to_string()).unwrap();
        let mut child = Command::new(program)
            .arg("gateway")
            .arg("--config")
            .arg(file)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut text = String::new();
        while !text.contains("gateway ready") {
            let line = timeout(PATIENCE, log.next_line()).await;
            let line = line.expect("a line in time").unwrap();
            text += &line.unwrap_or_else(|| panic!("the gateway ended: {text}"));
            text.push('\n');
        }
        let value_after = |start: &str| {
            let (_, rest) = text.split_once(start).expect(start);
            let value = rest.split_whitespace().next().unwrap();
            value.trim_matches('"').to_owned()
        };
        Self {
            child,
            _log: log,
            tunnel: value_after("gateway ready tunnel="),
            https: value_after("listener=\"https\" address="),
            connect: value_after("listener=\"connect\" address="),
        }
    }

    /// Ends it at once.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }
}
