//! Metric handles of one listener, resolved when the listener is built and updated without a lock.

use super::declared::{AtomicHistogram, Declared, ListenerLabel, OpenGauge};
use crate::error::Reason;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use std::time::Duration;

/// Metrics of one listener, labelled with its configured name.
#[derive(Clone, Debug)]
pub struct ListenerMetrics {
    open_connections: Gauge,
    connections: Counter,
    open_streams: Gauge,
    ok: Counter,
    /// Counters in the order of [`Reason::ALL`].
    failed: [Counter; Reason::ALL.len()],
    /// Counters by status class, from 1xx.
    responses: [Counter; 5],
    duration: AtomicHistogram,
    first_byte: AtomicHistogram,
    up: Counter,
    down: Counter,
}

/// Guard of a client's connection, for as long as the connection is open.
#[derive(Debug)]
pub struct ConnectionGuard {
    _open: OpenGauge,
}

/// Guard of a stream, for as long as it is open.
#[derive(Debug)]
pub struct StreamGuard {
    _open: OpenGauge,
}

/// Outcome of an ended stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOutcome {
    /// Reason of the failure, if the stream failed.
    pub reason: Option<Reason>,
    /// Status that the client received; 0 if it received none.
    pub status: u16,
    /// Time from the begin of the stream to its end.
    pub duration: Duration,
    /// Time from the begin of the stream to the first byte of the response, if there was one.
    pub first_byte: Option<Duration>,
    /// Payload bytes from the client to the upstream.
    pub up: u64,
    /// Payload bytes from the upstream to the client.
    pub down: u64,
}

impl ListenerMetrics {
    pub(super) fn from_declared(declared: &Declared, name: &str) -> Self {
        let one = || [label("listener", name)];
        let streams = |outcome| {
            let labels = [label("listener", name), label("outcome", outcome)];
            declared.streams.get_or_create_owned(&labels)
        };
        let bytes = |direction| {
            let labels = [label("listener", name), label("direction", direction)];
            declared.stream_bytes.get_or_create_owned(&labels)
        };
        let responses = |class| {
            let labels = [label("listener", name), label("class", class)];
            declared.responses.get_or_create_owned(&labels)
        };
        Self {
            open_connections: declared.open_connections.get_or_create_owned(&one()),
            connections: declared.connections.get_or_create_owned(&one()),
            open_streams: declared.open_streams.get_or_create_owned(&one()),
            ok: streams("ok"),
            failed: Reason::ALL.map(|reason| streams(reason.word())),
            responses: ["1xx", "2xx", "3xx", "4xx", "5xx"].map(responses),
            duration: declared.stream_duration_seconds.get_or_create_owned(&one()),
            first_byte: declared
                .stream_first_byte_seconds
                .get_or_create_owned(&one()),
            up: bytes("up"),
            down: bytes("down"),
        }
    }

    /// Counts an accepted connection, and its end when the guard is dropped.
    pub fn connection_guard(&self) -> ConnectionGuard {
        self.connections.inc();
        ConnectionGuard {
            _open: OpenGauge::new(&self.open_connections),
        }
    }

    /// Counts an open stream until the guard is dropped.
    pub fn stream_guard(&self) -> StreamGuard {
        StreamGuard {
            _open: OpenGauge::new(&self.open_streams),
        }
    }

    /// Records the outcome of an ended stream.
    pub fn stream_ended(&self, outcome: &StreamOutcome) {
        self.outcome(outcome.reason).inc();
        let class = usize::from(outcome.status / 100).checked_sub(1);
        if let Some(responses) = class.and_then(|class| self.responses.get(class)) {
            responses.inc();
        }
        self.duration.observe(outcome.duration);
        if let Some(first_byte) = outcome.first_byte {
            self.first_byte.observe(first_byte);
        }
        self.up.inc_by(outcome.up);
        self.down.inc_by(outcome.down);
    }

    fn outcome(&self, reason: Option<Reason>) -> &Counter {
        let failed = reason.and_then(|reason| {
            let mut known = Reason::ALL.iter().zip(&self.failed);
            known.find(|(known, _)| **known == reason)
        });
        failed.map_or(&self.ok, |(_, counter)| counter)
    }
}

fn label(name: &'static str, value: &str) -> ListenerLabel {
    (name, value.to_owned())
}
