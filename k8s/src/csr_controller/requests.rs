//! The requests of one signer, as far as something is to be done about them.
//!
//! What is signed, denied or has failed is forgotten. What was told of a request is kept for as long as it is there: a watch
//! that begins anew is no reason to tell it again.

use super::validate::ValidCsr;
use crate::csr_client::condition;
use k8s_openapi::api::{certificates::v1::CertificateSigningRequest, core::v1::ObjectReference};
use kube::{Resource, ResourceExt};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// One request, as it was last heard of.
#[derive(Debug)]
pub(super) struct Csr {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: String,
    pub(super) requester: String,
    /// When it was made, in Unix seconds.
    pub(super) asked_at: u64,
    pub(super) approved: bool,
    /// Whether it is exactly what its node may ask for; else why not.
    pub(super) judged: Result<ValidCsr, String>,
    /// For events.
    pub(super) about: ObjectReference,
}

#[derive(Debug)]
struct QueueEntry {
    request: Arc<Csr>,
    /// Why it was left as it is.
    told: Option<String>,
    /// We have signed it; what is heard of its way there is old.
    done: bool,
    /// It is due already.
    due: bool,
    /// It was in the list that is under way.
    listed: bool,
}

/// All of them.
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

    /// The list is whole.
    pub(super) fn whole(&mut self) {
        self.all.retain(|_, entry| entry.listed);
    }

    /// One came, or is another; it is judged when it comes.
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

    /// One is not there any more.
    pub(super) fn gone(&mut self, name: &str) {
        self.all.remove(name);
    }

    /// What hangs on the table of nodes is looked at again.
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

    /// The next that is due, if it is there still.
    pub(super) fn next(&mut self) -> Option<Arc<Csr>> {
        let entry = self.all.get_mut(&self.due.pop_front()?)?;
        entry.due = false;
        (!entry.done).then(|| entry.request.clone())
    }

    /// It is tried again, after the others.
    pub(super) fn put_back(&mut self, request: &Csr) {
        if let Some(entry) = self.all.get_mut(&request.name)
            && !entry.due
        {
            entry.due = true;
            self.due.push_back(request.name.clone());
        }
    }

    /// It is signed.
    pub(super) fn done(&mut self, request: &Csr) {
        if let Some(entry) = self.all.get_mut(&request.name) {
            entry.done = true;
        }
    }

    /// Whether it was not told yet that it is left as it is for this reason. From now on it was.
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
    fn what_was_told_is_not_told_again_by_a_new_list_but_of_another_request_of_that_name() {
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
    fn what_is_over_is_forgotten_and_what_we_signed_is_not_signed_again() {
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
    fn each_is_due_once_and_what_failed_comes_after_the_others() {
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
