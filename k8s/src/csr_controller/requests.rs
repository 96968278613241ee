//! Queue of the requests of one signer that still need an action.
//!
//! Signed, denied and failed requests are removed. The last reported reason of a request is stored as long as the request
//! exists. So a restarted watch causes no second report.

use super::validate::ValidCsr;
use crate::csr_client::find_condition;
use causeway_certs::NodeName;
use k8s_openapi::api::{certificates::v1::CertificateSigningRequest, core::v1::ObjectReference};
use kube::{Resource, ResourceExt};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
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
    pub(super) requested_at: u64,
    pub(super) approved: bool,
    /// Validated content of the request, or the reason for which it is not exactly the request that its node may make.
    pub(super) validation: Result<ValidCsr, String>,
    /// Reference to the request, for events.
    pub(super) object_ref: ObjectReference,
}

#[derive(Debug)]
struct QueueEntry {
    request: Arc<Csr>,
    /// Last reported reason for which the request was left pending.
    reported_reason: Option<String>,
    /// Whether the gateway has signed the request. Later events of the request are out of date.
    is_signed: bool,
    /// Whether the request is queued already.
    is_queued: bool,
    /// Whether the request is in the list that is in progress.
    is_listed: bool,
}

impl Csr {
    /// Returns the node that requests a certificate, if the request is valid.
    pub(super) fn node(&self) -> Option<&NodeName> {
        let valid_csr = self.validation.as_ref().ok();
        valid_csr.map(|valid_csr| &valid_csr.node)
    }
}

/// Queue of all requests.
#[derive(Debug, Default)]
pub(super) struct CsrQueue {
    entries: BTreeMap<String, QueueEntry>,
    pending: VecDeque<String>,
    /// Requests whose last attempt has failed. Some may no longer exist.
    failed: BTreeSet<String>,
    /// Time of the newest request of each requester that was signed, in Unix seconds. Requesters are nodes.
    last_signed: HashMap<String, u64>,
}

impl CsrQueue {
    /// Begins a list.
    pub(super) fn begin_list(&mut self) {
        for entry in self.entries.values_mut() {
            entry.is_listed = false;
        }
    }

    /// Ends a list: removes the requests that were not in it.
    pub(super) fn end_list(&mut self) {
        self.entries.retain(|_, entry| entry.is_listed);
    }

    /// Adds or updates a request, and validates it.
    pub(super) fn apply(
        &mut self,
        object: &CertificateSigningRequest,
        validate: impl FnOnce(&CertificateSigningRequest) -> Result<ValidCsr, String>,
    ) {
        let (name, uid) = (object.name_any(), object.uid().unwrap_or_default());
        let previous = self.entries.remove(&name);
        let previous = previous.filter(|entry| entry.request.uid == uid);
        let is_finished = ["Denied", "Failed"]
            .iter()
            .any(|kind| find_condition(object, kind).is_some());
        let certificate = object
            .status
            .as_ref()
            .and_then(|status| status.certificate.as_ref());
        let requester = object.spec.username.clone().unwrap_or_default();
        let requested_at = object.creation_timestamp();
        let requested_at = requested_at.and_then(|time| time.0.as_second().try_into().ok());
        let requested_at = requested_at.unwrap_or_default();
        if certificate.is_some_and(|certificate| !certificate.0.is_empty()) {
            return self.record_signed(requester, requested_at);
        }
        if is_finished {
            return;
        }
        let (validation, reported_reason, is_signed, is_queued) = match previous {
            Some(QueueEntry {
                request,
                reported_reason: reported,
                is_signed: done,
                is_queued: due,
                ..
            }) => (request.validation.clone(), reported, done, due),
            None => (validate(object), None, false, false),
        };
        let request = Csr {
            uid,
            version: object.resource_version().unwrap_or_default(),
            requester,
            requested_at,
            approved: find_condition(object, "Approved").is_some(),
            validation,
            object_ref: object.object_ref(&()),
            name: name.clone(),
        };
        let entry = QueueEntry {
            request: Arc::new(request),
            reported_reason,
            is_signed,
            is_queued: is_queued || !is_signed,
            is_listed: true,
        };
        if !is_signed && !is_queued {
            self.pending.push_back(name.clone());
        }
        self.entries.insert(name, entry);
    }

    /// Removes a request that no longer exists.
    pub(super) fn remove(&mut self, name: &str) {
        self.entries.remove(name);
    }

    /// Queues again every request whose outcome depends on the table of nodes.
    pub(super) fn requeue_all(&mut self) {
        for (name, entry) in &mut self.entries {
            if !entry.is_signed && !entry.is_queued && entry.request.validation.is_ok() {
                entry.is_queued = true;
                self.pending.push_back(name.clone());
            }
        }
    }

    /// Whether a request is due, of a node that is not one of the `busy` ones.
    pub(super) fn has_pending(&self, busy: &BTreeSet<NodeName>) -> bool {
        self.pending.iter().any(|name| self.is_due(name, busy))
    }

    /// Returns the next request that is due and still exists. Requests of nodes that are `busy` stay in their order.
    pub(super) fn pop(&mut self, busy: &BTreeSet<NodeName>) -> Option<Arc<Csr>> {
        loop {
            let due = self.pending.iter().position(|name| self.is_due(name, busy));
            let entry = self.entries.get_mut(&self.pending.remove(due?)?);
            let Some(entry) = entry else { continue };
            entry.is_queued = false;
            if !entry.is_signed {
                return Some(entry.request.clone());
            }
        }
    }

    /// Whether a newer request of the same node is signed.
    pub(super) fn is_outdated(&self, request: &Csr) -> bool {
        let last_signed = self.last_signed.get(&request.requester);
        last_signed.is_some_and(|last| request.requested_at < *last)
    }

    fn is_due(&self, name: &str, busy: &BTreeSet<NodeName>) -> bool {
        let entry = self.entries.get(name);
        let node = entry.and_then(|entry| entry.request.node());
        node.is_none_or(|node| !busy.contains(node))
    }

    /// Queues a request whose processing has failed again, after the others.
    pub(super) fn requeue(&mut self, request: &Csr) {
        self.failed.insert(request.name.clone());
        if let Some(entry) = self.entry_mut(request)
            && !entry.is_queued
        {
            entry.is_queued = true;
            self.pending.push_back(request.name.clone());
        }
    }

    /// Records that a request was processed. Returns whether the last attempt of another request has failed.
    pub(super) fn record_success(&mut self, request: &Csr) -> bool {
        self.failed.remove(&request.name);
        self.failed.retain(|name| self.entries.contains_key(name));
        !self.failed.is_empty()
    }

    /// Marks the request as signed.
    pub(super) fn mark_signed(&mut self, request: &Csr) {
        self.record_signed(request.requester.clone(), request.requested_at);
        if let Some(entry) = self.entry_mut(request) {
            entry.is_signed = true;
        }
    }

    fn record_signed(&mut self, requester: String, requested_at: u64) {
        let last = self.last_signed.entry(requester).or_default();
        *last = requested_at.max(*last);
    }

    /// Returns the entry of a request, unless the request was deleted meanwhile. Another request may have its name now.
    fn entry_mut(&mut self, request: &Csr) -> Option<&mut QueueEntry> {
        let entry = self.entries.get_mut(&request.name);
        entry.filter(|entry| entry.request.uid == request.uid)
    }

    /// Records the reason for which the request is left pending. Returns whether this reason was not reported yet.
    pub(super) fn record_reason(&mut self, request: &Csr, why: &str) -> bool {
        let Some(entry) = self.entry_mut(request) else {
            return false;
        };
        let previous = entry.reported_reason.replace(why.to_owned());
        previous.as_deref() != Some(why)
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
        apimachinery::pkg::apis::meta::v1::Time,
        jiff::Timestamp,
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
        requests.apply(&heard("a", "1", None), wrong);
        let request = requests.pop(&BTreeSet::new()).unwrap();
        assert!(requests.record_reason(&request, "no node asks"));
        requests.begin_list();
        requests.apply(&heard("a", "1", Some("Approved")), never);
        requests.end_list();
        let request = requests.pop(&BTreeSet::new()).unwrap();
        assert!(request.approved && !requests.record_reason(&request, "no node asks"));
        requests.apply(&heard("a", "2", None), wrong);
        let request = requests.pop(&BTreeSet::new()).unwrap();
        assert!(requests.record_reason(&request, "no node asks"));
        assert!(!requests.has_pending(&BTreeSet::new()));
    }

    #[test]
    fn finished_requests_are_forgotten_and_never_signed_twice() {
        let mut requests = CsrQueue::default();
        requests.apply(&heard("denied", "1", Some("Denied")), never);
        let mut signed = heard("signed", "2", Some("Approved"));
        signed.status.as_mut().unwrap().certificate = Some(ByteString(b"PEM".to_vec()));
        requests.apply(&signed, never);
        assert!(!requests.has_pending(&BTreeSet::new()));
        requests.apply(&heard("ours", "3", None), wrong);
        let ours = requests.pop(&BTreeSet::new()).unwrap();
        requests.mark_signed(&ours);
        requests.apply(&heard("ours", "3", Some("Approved")), never);
        assert!(requests.pop(&BTreeSet::new()).is_none());
        requests.apply(&heard("gone", "4", None), wrong);
        requests.begin_list();
        requests.end_list();
        assert!(requests.pop(&BTreeSet::new()).is_none());
    }

    #[test]
    fn the_outcome_of_a_request_is_not_that_of_a_later_one_with_its_name() {
        let mut requests = CsrQueue::default();
        requests.apply(&heard("a", "1", None), wrong);
        let first = requests.pop(&BTreeSet::new()).unwrap();
        requests.apply(&heard("a", "2", None), wrong);
        requests.mark_signed(&first);
        assert!(!requests.record_reason(&first, "no node asks"));
        let second = requests.pop(&BTreeSet::new()).unwrap();
        assert_eq!(second.uid, "2");
        requests.requeue(&first);
        assert!(requests.pop(&BTreeSet::new()).is_none());
    }

    #[test]
    fn a_request_is_not_signed_after_a_newer_one_of_its_node() {
        let request = |name: &str, node: &str, seconds| {
            let mut request = heard(name, name, None);
            request.spec.username = Some(format!("system:node:{node}"));
            let at = Timestamp::from_second(seconds).unwrap();
            request.metadata.creation_timestamp = Some(Time(at));
            request
        };
        let pop_all = |requests: &mut CsrQueue| {
            let all: Vec<_> = std::iter::from_fn(|| requests.pop(&BTreeSet::new())).collect();
            let in_order = all.iter().filter(|one| !requests.is_outdated(one));
            in_order.map(|one| one.name.clone()).collect::<Vec<_>>()
        };
        let mut requests = CsrQueue::default();
        for (name, node, seconds) in [
            ("failed", "edge-1", 10),
            ("next", "edge-1", 20),
            ("last", "edge-1", 30),
            ("other", "edge-2", 5),
        ] {
            requests.apply(&request(name, node, seconds), wrong);
        }
        let failed = requests.pop(&BTreeSet::new()).unwrap();
        requests.requeue(&failed);
        let next = requests.pop(&BTreeSet::new()).unwrap();
        requests.mark_signed(&next);
        assert_eq!(pop_all(&mut requests), ["last", "other"]);
        // Another gateway has signed a newer one.
        let mut signed = request("signed", "edge-1", 50);
        signed.status.as_mut().unwrap().certificate = Some(ByteString(b"PEM".to_vec()));
        requests.apply(&signed, never);
        for (name, seconds) in [("late", 40), ("newest", 50)] {
            requests.apply(&request(name, "edge-1", seconds), wrong);
        }
        assert_eq!(pop_all(&mut requests), ["newest"]);
    }

    #[test]
    fn each_request_is_due_once_and_failed_ones_come_last() {
        let mut requests = CsrQueue::default();
        let right = |_: &CertificateSigningRequest| {
            Ok(ValidCsr {
                node: NodeName::parse("edge-1").unwrap(),
                request: Vec::new(),
                lifetime: None,
            })
        };
        requests.apply(&heard("a", "1", None), right);
        requests.apply(&heard("b", "2", None), right);
        requests.apply(&heard("a", "1", None), never);
        requests.requeue_all();
        let first = requests.pop(&BTreeSet::new()).unwrap();
        requests.requeue(&first);
        requests.requeue(&first);
        let names =
            std::iter::from_fn(|| requests.pop(&BTreeSet::new()).map(|one| one.name.clone()));
        assert_eq!(names.collect::<Vec<_>>(), ["b", "a"]);
        requests.requeue_all();
        assert!(requests.has_pending(&BTreeSet::new()));
    }
}
