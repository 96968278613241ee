//! Writer of events about objects without a namespace.
//!
//! The name of an event is derived from its content. Another gateway, or this one after a restart, finds the same event on
//! the same object under the same name.

use crate::{client::error_message, log_throttle::LogThrottle};
use k8s_openapi::{
    api::{
        core::v1::{Node, ObjectReference},
        events::v1::Event,
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, Resource, api::PostParams};
use sha2::{Digest, Sha256};
use std::time::Duration;
use tokio::time::timeout;

/// Namespace of events on objects that have none.
const NAMESPACE: &str = "default";
/// Maximum length of an event's note, in bytes.
const MAX_MESSAGE_BYTES: usize = 1000;
/// Time limit of the API's response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventType {
    Normal,
    Warning,
}

impl EventType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Content of an event about an object.
pub(crate) struct EventContent<'a> {
    /// The object.
    pub(crate) regarding: &'a ObjectReference,
    /// Reason of the event: one word in camel case, as the API requires.
    pub(crate) reason: &'static str,
    /// Action that was taken, in the same form.
    pub(crate) action: &'static str,
    /// The text.
    pub(crate) note: &'a str,
    /// Identifies the occurrence: the same text is written once for each. Empty if it is written once in all.
    pub(crate) occurrence: &'a str,
}

/// Refers to a Node object, with its name as uid, as kubelets do in their events.
pub(crate) fn node_reference(node: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(Node::api_version(&()).into_owned()),
        kind: Some(Node::kind(&()).into_owned()),
        name: Some(node.to_owned()),
        uid: Some(node.to_owned()),
        ..ObjectReference::default()
    }
}

/// Writer that writes each event once.
pub(crate) struct EventWriter {
    events: Api<Event>,
    gateway: String,
    write_log: LogThrottle,
}

impl EventWriter {
    /// Creates a writer with the name of this gateway. `operation` names the writing in the log if it fails.
    pub(crate) fn new(client: Client, gateway: String, operation: &'static str) -> Self {
        Self {
            events: Api::namespaced(client, NAMESPACE),
            gateway,
            write_log: LogThrottle::new(operation),
        }
    }

    /// Writes a warning, unless it exists already.
    pub(crate) async fn warn(&mut self, content: &EventContent<'_>) {
        self.write(EventType::Warning, content).await;
    }

    /// Writes an event, unless it exists already.
    pub(crate) async fn write(&mut self, event_type: EventType, content: &EventContent<'_>) {
        let event = self.build_event(event_type, content);
        let parameters = PostParams::default();
        let written = timeout(WRITE_TIMEOUT, self.events.create(&parameters, &event)).await;
        match written {
            Ok(Ok(_)) => self.write_log.log_recovery(),
            Ok(Err(kube::Error::Api(status))) if status.is_already_exists() => {
                self.write_log.log_recovery();
            }
            Ok(Err(error)) => self.write_log.log_failure(&error_message(&error)),
            Err(_) => self
                .write_log
                .log_failure("the cluster's API did not answer in time"),
        }
    }

    fn build_event(&self, event_type: EventType, content: &EventContent<'_>) -> Event {
        let message = content.note;
        let end = (0..=MAX_MESSAGE_BYTES)
            .rev()
            .find(|end| message.is_char_boundary(*end));
        let note = message.get(..end.unwrap_or_default()).unwrap_or(message);
        let uid = content.regarding.uid.as_deref().unwrap_or_default();
        let occurrence = content.occurrence;
        let digest = Sha256::digest(format!("{uid}\n{note}{occurrence}"));
        let hash = digest.iter().take(8);
        let hash = hash.fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        Event {
            metadata: ObjectMeta {
                name: Some(format!("causeway-{hash:016x}")),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            regarding: Some(content.regarding.clone()),
            type_: Some(event_type.as_str().to_owned()),
            reason: Some(content.reason.to_owned()),
            action: Some(content.action.to_owned()),
            note: Some(note.to_owned()),
            reporting_controller: Some("causeway-gateway".to_owned()),
            reporting_instance: Some(self.gateway.clone()),
            ..Event::default()
        }
    }
}
