//! Why a request is left as it is, in an event on it.
//!
//! The event is named after what it says: whoever says the same of the same request finds it there, be it another gateway or
//! this one after a restart.

use super::{BOUND, requests::Request};
use crate::{client::said, trouble::Trouble};
use k8s_openapi::{
    api::events::v1::Event,
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

/// Where the API has events on what is in no namespace.
const NAMESPACE: &str = "default";
/// As much of a reason as fits into an event, in bytes.
const NOTE: usize = 1000;

/// Who tells.
pub(super) struct Teller {
    events: Api<Event>,
    gateway: String,
    telling: Trouble,
}

impl Teller {
    pub(super) fn new(client: Client, gateway: String) -> Self {
        Self {
            events: Api::namespaced(client, NAMESPACE),
            gateway,
            telling: Trouble::new("writing an event on a request for a certificate"),
        }
    }

    /// Tells it, unless it is told already.
    pub(super) async fn tell(&mut self, request: &Request, why: &str) {
        let event = self.event(request, why);
        let parameters = PostParams::default();
        let written = timeout(BOUND, self.events.create(&parameters, &event)).await;
        match written {
            Ok(Ok(_)) => self.telling.over(),
            Ok(Err(kube::Error::Api(status))) if status.is_already_exists() => self.telling.over(),
            Ok(Err(error)) => self.telling.say(&said(&error)),
            Err(_) => self
                .telling
                .say("the cluster's API does not answer in time"),
        }
    }

    fn event(&self, request: &Request, why: &str) -> Event {
        let end = (0..=NOTE).rev().find(|end| why.is_char_boundary(*end));
        let note = why.get(..end.unwrap_or_default()).unwrap_or(why);
        let digest = Sha256::digest(format!("{}\n{note}", request.uid));
        let number = digest.iter().take(8);
        let number = number.fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        Event {
            metadata: ObjectMeta {
                name: Some(format!("causeway-{number:016x}")),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            regarding: Some(request.about.clone()),
            type_: Some("Warning".to_owned()),
            reason: Some("NotSigned".to_owned()),
            action: Some("Signing".to_owned()),
            note: Some(note.to_owned()),
            reporting_controller: Some("causeway-gateway".to_owned()),
            reporting_instance: Some(self.gateway.clone()),
            ..Event::default()
        }
    }
}
