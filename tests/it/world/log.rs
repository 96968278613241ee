//! Log of a world: access records and messages for operators, in memory.
//!
//! The subscriber belongs to this thread, so worlds of tests that run beside each other do not mix. A gateway with threads
//! of its own (`Build::workers`) therefore logs nothing here. Spans are not recorded: tasks of one world may outlive its
//! subscriber.

use serde_json::{Map, Value};
use std::{
    fmt,
    sync::{Arc, Mutex},
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::DefaultGuard,
};

/// The events so far. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Log {
    events: Arc<Mutex<Vec<Value>>>,
}

impl Log {
    /// Records the log of this thread until the guard is dropped.
    pub(crate) fn listen(&self) -> DefaultGuard {
        tracing::subscriber::set_default(self.clone())
    }

    /// Every event as a line of JSON.
    pub(crate) fn text(&self) -> String {
        let events = self.events.lock().unwrap();
        let lines: Vec<String> = events.iter().map(Value::to_string).collect();
        lines.join("\n")
    }

    /// All access records, in order.
    pub(crate) fn records(&self) -> Vec<Value> {
        self.with_target("access")
    }

    /// All lines of the audit log, in order.
    pub(crate) fn audit(&self) -> Vec<Value> {
        self.with_target("audit")
    }

    fn with_target(&self, target: &str) -> Vec<Value> {
        let events = self.events.lock().unwrap();
        let found = events.iter().filter(|event| event["target"] == target);
        found.cloned().collect()
    }

    /// The access record of a trace.
    pub(crate) fn record(&self, trace: &str) -> Option<Value> {
        let records = self.records();
        records.into_iter().find(|record| record["trace"] == trace)
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        fields.put("target", metadata.target());
        fields.put("level", metadata.level().as_str());
        self.events.lock().unwrap().push(Value::Object(fields.0));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// An event's fields.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field.name(), value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field.name(), value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field.name(), value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field.name(), value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field.name(), value);
    }
}
