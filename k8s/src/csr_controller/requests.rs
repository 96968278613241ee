//! Queue of the requests of one signer that still need an action.
//!
//! Signed, denied and failed requests are removed. The last reported reason of a request is stored for as long as the request
//! exists: a watch that restarts must not cause a second report.

use super::validate::ValidCsr;
use crate::csr_client::condition;
use k8s_openapi::api::{certificates::v1::CertificateSigningRequest, core::v1::ObjectReference};
use kube::{Resource, ResourceExt};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// A request, in its last known version.
#[derive(Debug)]
pub(super) struct Csr {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: String,
    pub(super) requester: String,
    /// Time of the request, in Unix seconds.
    pub(super) asked_at: u64,
    pub(super) approved: bool,
    /// Whether it is exactly what its node may ask for; else why not.
    pub(super) judged: Result<ValidCsr, String>,
    /// Reference to the request, for events.
    pub(super) about: ObjectReference,
}

#[derive(Debug)]
struct QueueEntry {
    request: Arc<Csr>,
    /// Last reported reason why the request was left as it is.
    told: Option<String>,
    /// Whether the gateway has signed the request; later events of it are out of date.
    done: bool,
    /// Whether the request is queued already.
    due: bool,
    /// Whether the request was in the list that is in progress.
    listed: bool,
}

/// Queue of all requests.
#[derive(Debug, Default)]
pub(super) struct CsrQueue {
    all: BTreeMap<String, QueueEntry>,
    due: VecDeque<String>,
}

impl CsrQueue {
    /// A list begins.
    pub(super) fn listing(&mut self) {
        for entry in self.all.values_mut() {
            entry.listed = false;
        }
    }

    /// Ends a list: removes the requests that were not in it.
    pub(super) fn whole(&mut self) {
        self.all.retain(|_, entry| entry.listed);
    }

    /// Adds or updates a request, and validates it.
    pub(super) fn take(
        &mut self,
        heard: &CertificateSigningRequest,
        judge: impl FnOnce(&CertificateSigningRequest) -> Result<ValidCsr, String>,
    ) {
        let (name, uid) = (heard.name_any(), heard.uid().unwrap_or_default());
        let known = self.all.remove(&name);
        let known = known.filter(|entry| entry.request.uid == uid);
        let over = ["Denied", "Failed"]
            .iter()
            .any(|kind| condition(heard, kind).is_some());
        let certificate = heard
            .status
            .as_ref()
            .and_then(|status| status.certificate.as_ref());
        if over || certificate.is_some_and(|certificate| !certificate.0.is_empty()) {
            return;
        }
        let (judged, told, done, due) = match known {
            Some(QueueEntry {
                request,
                told,
                done,
                due,
                ..
            }) => (request.judged.clone(), told, done, due),
            None => (judge(heard), None, false, false),
        };
        let asked_at = heard.creation_timestamp();
        let asked_at = asked_at.and_then(|time| time.0.as_second().try_into().ok());
        let request = Csr {
            uid,
            version: heard.resource_version().unwrap_or_default(),
            requester: heard.spec.username.clone().unwrap_or_default(),
            asked_at: asked_at.unwrap_or_default(),
            approved: condition(heard, "Approved").is_some(),
            judged,
            about: heard.object_ref(&()),
            name: name.clone(),
        };
        let entry = QueueEntry {
            request: Arc::new(request),
            told,
            done,
            due: due || !done,
            listed: true,
        };
        if !done && !due {
            self.due.push_back(name.clone());
        }
        self.all.insert(name, entry);
    }

    /// Removes a request that no longer exists.
    pub(super) fn gone(&mut self, name: &str) {
        self.all.remove(name);
    }

    /// Queues every request again whose outcome depends on the table of nodes.
    pub(super) fn again(&mut self) {
        for (name, entry) in &mut self.all {
            if !entry.done && !entry.due && entry.request.judged.is_ok() {
                entry.due = true;
                self.due.push_back(name.clone());
            }
        }
    }

    pub(super) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Returns the next request that is due, if it still exists.
    pub(super) fn next(&mut self) -> Option<Arc<Csr>> {
        let entry = self.all.get_mut(&self.due.pop_front()?)?;
        entry.due = false;
        (!entry.done).then(|| entry.request.clone())
    }

    /// Queues the request again, after the others.
    pub(super) fn put_back(&mut self, request: &Csr) {
        if let Some(entry) = self.all.get_mut(&request.name)
            && !entry.due
        {
            entry.due = true;
            self.due.push_back(request.name.clone());
        }
    }

    /// Marks the request as signed.
    pub(super) fn done(&mut self, request: &Csr) {
        if let Some(entry) = self.all.get_mut(&request.name) {
            entry.done = true;
        }
    }

    /// Records the reason why the request is left as it is. Returns whether this reason was not reported yet.
    pub(super) fn tells(&mut self, request: &Csr, why: &str) -> bool {
        let Some(entry) = self.all.get_mut(&request.name) else {
            return false;
        };
        let known = entry.told.replace(why.to_owned());
        known.as_deref() != Some(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::{
        ByteString,
        api::certificates::v1::{
            CertificateSigningRequestCondition, CertificateSigningRequestStatus,
        },
    };

    fn heard(name: &str, uid: &str, condition: Option<&str>) -> CertificateSigningRequest {
        let mut heard = CertificateSigningRequest::default();
        heard.metadata.name = Some(name.to_owned());
        heard.metadata.uid = Some(uid.to_owned());
        let conditions = condition.map(|kind| CertificateSigningRequestCondition {
            type_: kind.to_owned(),
            ..CertificateSigningRequestCondition::default()
        });
        heard.status = Some(CertificateSigningRequestStatus {
            conditions: Some(conditions.into_iter().collect()),
            certificate: None,
        });
        heard
    }

    fn wrong(_: &CertificateSigningRequest) -> Result<ValidCsr, String> {
        Err("no node asks".to_owned())
    }

    fn never(_: &CertificateSigningRequest) -> Result<ValidCsr, String> {
        unreachable!("it was judged before")
    }

    #[test]
    fn a_new_list_repeats_no_report_except_for_a_new_request() {
        let mut requests = CsrQueue::default();
        requests.take(&heard("a", "1", None), wrong);
        let request = requests.next().unwrap();
        assert!(requests.tells(&request, "no node asks"));
        requests.listing();
        requests.take(&heard("a", "1", Some("Approved")), never);
        requests.whole();
        let request = requests.next().unwrap();
        assert!(request.approved && !requests.tells(&request, "no node asks"));
        requests.take(&heard("a", "2", None), wrong);
        let request = requests.next().unwrap();
        assert!(requests.tells(&request, "no node asks"));
        assert!(!requests.is_due());
    }

    #[test]
    fn finished_requests_are_forgotten_and_never_signed_twice() {
        let mut requests = CsrQueue::default();
        requests.take(&heard("denied", "1", Some("Denied")), never);
        let mut signed = heard("signed", "2", Some("Approved"));
        signed.status.as_mut().unwrap().certificate = Some(ByteString(b"PEM".to_vec()));
        requests.take(&signed, never);
        assert!(!requests.is_due());
        requests.take(&heard("ours", "3", None), wrong);
        let ours = requests.next().unwrap();
        requests.done(&ours);
        requests.take(&heard("ours", "3", Some("Approved")), never);
        assert!(requests.next().is_none());
        requests.take(&heard("gone", "4", None), wrong);
        requests.listing();
        requests.whole();
        assert!(requests.next().is_none());
    }

    #[test]
    fn each_request_is_due_once_and_failed_ones_come_last() {
        let mut requests = CsrQueue::default();
        let right = |_: &CertificateSigningRequest| {
            Ok(ValidCsr {
                node: causeway_certs::NodeName::parse("edge-1").unwrap(),
                request: Vec::new(),
                life: None,
            })
        };
        requests.take(&heard("a", "1", None), right);
        requests.take(&heard("b", "2", None), right);
        requests.take(&heard("a", "1", None), never);
        requests.again();
        let first = requests.next().unwrap();
        requests.put_back(&first);
        requests.put_back(&first);
        let names = std::iter::from_fn(|| requests.next().map(|one| one.name.clone()));
        assert_eq!(names.collect::<Vec<_>>(), ["b", "a"]);
        requests.again();
        assert!(requests.is_due());
    }
}
