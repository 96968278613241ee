//! Writer of events about objects without a namespace.
//!
//! The name of an event is derived from its content. Another gateway, or this one after a restart, finds the same event on
//! the same object under the same name.

use crate::{client::error_message, log_throttle::LogThrottle};
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams};
use sha2::{Digest, Sha256};
use std::time::Duration;
use tokio::time::timeout;

/// Namespace of events on objects that have none.
const NAMESPACE: &str = "default";
/// Maximum length of an event's note, in bytes.
const MAX_MESSAGE_BYTES: usize = 1000;
/// Time limit of the API's response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A warning about an object.
pub(crate) struct WarningEvent<'a> {
    /// The object.
    pub(crate) regarding: &'a ObjectReference,
    /// Reason of the event: one word in camel case, as the API requires.
    pub(crate) reason: &'static str,
    /// Action that was taken, in the same form.
    pub(crate) action: &'static str,
    /// The text.
    pub(crate) note: &'a str,
}

/// Writer that writes each warning once.
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
    pub(crate) async fn warn(&mut self, warning: &WarningEvent<'_>) {
        let event = self.build_event(warning);
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

    fn build_event(&self, warning: &WarningEvent<'_>) -> Event {
        let message = warning.note;
        let end = (0..=MAX_MESSAGE_BYTES)
            .rev()
            .find(|end| message.is_char_boundary(*end));
        let note = message.get(..end.unwrap_or_default()).unwrap_or(message);
        let uid = warning.regarding.uid.as_deref().unwrap_or_default();
        let digest = Sha256::digest(format!("{uid}\n{note}"));
        let hash = digest.iter().take(8);
        let hash = hash.fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        Event {
            metadata: ObjectMeta {
                name: Some(format!("causeway-{hash:016x}")),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            regarding: Some(warning.regarding.clone()),
            type_: Some("Warning".to_owned()),
            reason: Some(warning.reason.to_owned()),
            action: Some(warning.action.to_owned()),
            note: Some(note.to_owned()),
            reporting_controller: Some("causeway-gateway".to_owned()),
            reporting_instance: Some(self.gateway.clone()),
            ..Event::default()
        }
    }
}
