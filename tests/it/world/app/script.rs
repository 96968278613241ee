//! Behaviour of a test upstream, step by step: a script is built by chained calls and played on a connection.
//!
//! A script that runs to its end leaves the connection open for the next request (HTTP) or closes it (TCP). `close` and
//! `reset` end it there. At each step that waits, the departure of the peer ends the script and is recorded.

use super::{End, Head, Record, wire::BufferedSocket};
use std::{sync::Arc, time::Duration};
use tokio::{select, sync::Semaphore, time::sleep};

/// Holds a script back until the test opens it; each `open` lets one wait pass.
#[derive(Clone)]
pub(crate) struct PauseGate(Arc<Semaphore>);

impl PauseGate {
    /// A closed gate.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    /// Lets one script pass once.
    pub(crate) fn open(&self) {
        self.0.add_permits(1);
    }

    async fn pass(&self) {
        let permit = self.0.acquire().await.expect("a gate is never closed");
        permit.forget();
    }
}

#[derive(Clone)]
enum Step {
    Body,
    ReadToEnd,
    Write(Vec<u8>),
    Paced { bytes: Vec<u8>, times: usize },
    Mirror,
    Chunks { size: usize, total: usize },
    Until(PauseGate),
    Forever(Vec<u8>),
    Echo,
    Silence,
    Close,
    Reset,
}

/// The end of a script.
pub(super) enum Outcome {
    /// Played to its end; the connection can be used further.
    Done,
    /// The script ended the connection.
    Over,
    /// The peer ended it.
    Gone(End),
}

/// The steps of an app.
#[derive(Clone, Default)]
pub(crate) struct Script {
    steps: Vec<Step>,
}

impl Script {
    /// Returns a script without steps.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Reads and records the request's body (no step before may have read it).
    pub(crate) fn body(self) -> Self {
        self.then(Step::Body)
    }

    /// Reads until the peer's FIN and records both; the other direction stays open.
    pub(crate) fn read_to_end(self) -> Self {
        self.then(Step::ReadToEnd)
    }

    /// Writes these bytes, in one call.
    pub(crate) fn write(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.then(Step::Write(bytes.into()))
    }

    /// Writes these bytes this many times, a millisecond apart.
    pub(crate) fn paced(self, bytes: impl Into<Vec<u8>>, times: usize) -> Self {
        let bytes = bytes.into();
        self.then(Step::Paced { bytes, times })
    }

    /// Reads the request's body, records it and sends it back with its length.
    pub(crate) fn mirror(self) -> Self {
        self.then(Step::Mirror)
    }

    /// Writes `total` bytes (see [`pattern`]) as a chunked body of `size`-byte chunks.
    pub(crate) fn chunks(self, size: usize, total: usize) -> Self {
        self.then(Step::Chunks { size, total })
    }

    /// Waits for the test to open the gate.
    pub(crate) fn until(self, gate: &PauseGate) -> Self {
        self.then(Step::Until(gate.clone()))
    }

    /// Writes these bytes repeatedly until the peer accepts no more.
    pub(crate) fn forever(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.then(Step::Forever(bytes.into()))
    }

    /// Echoes all bytes until the peer's FIN, then closes.
    pub(crate) fn echo(self) -> Self {
        self.then(Step::Echo)
    }

    /// Sends nothing, until the peer leaves.
    pub(crate) fn silence(self) -> Self {
        self.then(Step::Silence)
    }

    /// Closes with a FIN.
    pub(crate) fn close(self) -> Self {
        self.then(Step::Close)
    }

    /// Closes with an RST.
    pub(crate) fn reset(self) -> Self {
        self.then(Step::Reset)
    }

    fn then(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    pub(super) async fn play(
        &self,
        wire: &mut BufferedSocket,
        head: Option<&Head>,
        record: &Record,
    ) -> Outcome {
        for step in &self.steps {
            match step.take(wire, head, record).await {
                Ok(true) => {}
                Ok(false) => return Outcome::Over,
                Err(end) => return Outcome::Gone(end),
            }
        }
        Outcome::Done
    }
}

impl Step {
    /// Whether the script continues, or how the peer left.
    async fn take(
        &self,
        wire: &mut BufferedSocket,
        head: Option<&Head>,
        record: &Record,
    ) -> Result<bool, End> {
        match self {
            Self::Body => {
                read_body(wire, head, record).await?;
            }
            Self::ReadToEnd => read_to_end(wire, record).await?,
            Self::Write(bytes) => wire.write(bytes).await?,
            Self::Paced { bytes, times } => {
                for _ in 0..*times {
                    wire.write(bytes).await?;
                    sleep(Duration::from_millis(1)).await;
                }
            }
            Self::Mirror => {
                let body = read_body(wire, head, record).await?;
                let length = body.len();
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
                wire.write(&[answer.as_bytes(), &body].concat()).await?;
            }
            Self::Chunks { size, total } => wire.write(&chunked(*size, *total)).await?,
            Self::Until(gate) => select! {
                () = gate.pass() => {}
                end = wire.gone() => return Err(end),
            },
            Self::Forever(bytes) => loop {
                wire.write(bytes).await?;
            },
            Self::Echo => return echo(wire).await,
            // Read and discarded: an endless body must neither stop nor fill the memory.
            Self::Silence => loop {
                wire.read_some().await?;
            },
            Self::Close => {
                wire.finish().await;
                return Ok(false);
            }
            Self::Reset => {
                wire.arm_reset();
                return Ok(false);
            }
        }
        Ok(true)
    }
}

async fn read_body(
    wire: &mut BufferedSocket,
    head: Option<&Head>,
    record: &Record,
) -> Result<Vec<u8>, End> {
    let head = head.expect("only a request has a body");
    let body = wire.read_body(head).await?;
    let _ = record.bodies.send(body.clone());
    Ok(body)
}

async fn read_to_end(wire: &mut BufferedSocket, record: &Record) -> Result<(), End> {
    let mut all = Vec::new();
    loop {
        match wire.read_some().await {
            Ok(bytes) => all.extend(bytes),
            Err(End::Finished) => break,
            Err(End::Reset) => return Err(End::Reset),
        }
    }
    let _ = record.bodies.send(all);
    let _ = record.ends.send(End::Finished);
    Ok(())
}

async fn echo(wire: &mut BufferedSocket) -> Result<bool, End> {
    loop {
        match wire.read_some().await {
            Ok(bytes) => wire.write(&bytes).await?,
            Err(End::Reset) => return Err(End::Reset),
            Err(End::Finished) => {
                wire.finish().await;
                return Err(End::Finished);
            }
        }
    }
}

/// `length` bytes in which all windows of 64 bytes differ, to be compared at the other end.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    let numbers = (0_u64..).flat_map(u64::to_be_bytes);
    numbers.take(length).collect()
}

fn chunked(size: usize, total: usize) -> Vec<u8> {
    let mut framed = Vec::new();
    for chunk in pattern(total).chunks(size) {
        framed.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        framed.extend_from_slice(chunk);
        framed.extend_from_slice(b"\r\n");
    }
    framed.extend_from_slice(b"0\r\n\r\n");
    framed
}
