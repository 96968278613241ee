//! Lease of a node, and the state of delegated heartbeats in its annotations.
//!
//! A delegated renewal records its own `renewTime` in an annotation. A kubelet copies annotations when it renews its Lease, and
//! writes another `renewTime`. So any gateway notices the return of a node.
//!
//! The age of a Lease is the time since its last change by the clock of the API server (`managedFields`). The kubelet writes
//! `renewTime` by the clock of its node, which may be wrong. kube-controller-manager only takes a `renewTime` that is later than
//! the last one. So a delegated renewal continues the node's own clock: its offset is recorded when the delegation begins.

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;

/// Annotation that tells `OpenYurt`'s controllers of a delegated renewal.
pub(super) const DELEGATE_HEARTBEAT: &str = "openyurt.io/delegate-heartbeat";
/// `renewTime` of the last delegated renewal.
const RENEW_TIME: &str = "causeway.io/delegated-renew-time";
/// Number of successive delegated renewals.
const COUNT: &str = "causeway.io/delegated-count";
/// Offset of the node's clock, in seconds; absent if the clock is right.
const CLOCK_OFFSET: &str = "causeway.io/delegated-clock-offset";
const ANNOTATIONS: [&str; 4] = [DELEGATE_HEARTBEAT, RENEW_TIME, COUNT, CLOCK_OFFSET];

/// Age from which a Lease that the node renewed last is renewed for it: the node renews it every 10 s.
const RENEW_AFTER: SignedDuration = SignedDuration::from_secs(15);
/// Age from which a Lease with a delegated renewal is renewed again. Two members may send heartbeats of one node at once.
const RENEW_DELEGATED_AFTER: SignedDuration = SignedDuration::from_secs(5);
/// Offset up to which the clock of a node counts as right.
const CLOCK_TOLERANCE: SignedDuration = SignedDuration::from_secs(5);

/// State of a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseState {
    /// The node, or another program, renewed it last. No annotation of a delegation is left.
    Direct,
    /// The last renewals were delegated: this many in succession.
    Delegated(u32),
    /// The node has renewed it, and annotations of the delegation are left.
    Returned,
}

/// Result of a delegated renewal.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Renewal {
    /// The renewed Lease, and the number of successive delegated renewals.
    Renewed(Box<Lease>, u32),
    /// The Lease needs no renewal yet.
    Fresh,
    /// The Lease is not of this node.
    Foreign,
}

/// Returns the state of a Lease.
pub(super) fn state(lease: &Lease) -> LeaseState {
    let Some(renewed) = lease.annotations().get(RENEW_TIME) else {
        return LeaseState::Direct;
    };
    let renewed = renewed.parse::<Timestamp>().ok();
    if renewed.is_some() && renewed == renew_time(lease) {
        let count = lease.annotations().get(COUNT);
        let count = count.and_then(|count| count.parse().ok());
        return LeaseState::Delegated(count.unwrap_or(1));
    }
    LeaseState::Returned
}

/// Returns the time since the last change of a Lease, or `None` if it has never been renewed.
pub(super) fn age(lease: &Lease, now: Timestamp) -> Option<SignedDuration> {
    Some(now.duration_since(changed_at(lease)?))
}

/// Whether the last change of a Lease is old enough for a delegated renewal.
pub(super) fn is_due(lease: &Lease, now: Timestamp) -> bool {
    let renew_after = match state(lease) {
        LeaseState::Delegated(_) => RENEW_DELEGATED_AFTER,
        LeaseState::Direct | LeaseState::Returned => RENEW_AFTER,
    };
    age(lease, now).is_none_or(|age| age >= renew_after)
}

/// Returns the Lease of this node as a delegated heartbeat renews it.
pub(super) fn renew(lease: &Lease, node: &str, now: Timestamp) -> Renewal {
    let holder = lease.spec.as_ref();
    let holder = holder.and_then(|spec| spec.holder_identity.as_deref());
    if holder != Some(node) || lease.name_any() != node {
        return Renewal::Foreign;
    }
    if !is_due(lease, now) {
        return Renewal::Fresh;
    }
    let (count, offset) = match state(lease) {
        LeaseState::Delegated(count) => (count.saturating_add(1), recorded_offset(lease)),
        LeaseState::Direct | LeaseState::Returned => (1, clock_offset(lease)),
    };
    let (last, next) = (renew_time(lease), now.saturating_add(offset).unwrap_or(now));
    let later = last.and_then(|last| last.checked_add(SignedDuration::from_secs(1)).ok());
    let renewed = later.map_or(next, |later| next.max(later));
    let mut lease = lease.clone();
    let annotations = lease.annotations_mut();
    annotations.insert(DELEGATE_HEARTBEAT.to_owned(), "true".to_owned());
    annotations.insert(RENEW_TIME.to_owned(), micros(renewed).to_string());
    annotations.insert(COUNT.to_owned(), count.to_string());
    annotations.remove(CLOCK_OFFSET);
    if !offset.is_zero() {
        annotations.insert(CLOCK_OFFSET.to_owned(), offset.as_secs().to_string());
    }
    let spec: &mut LeaseSpec = lease.spec.get_or_insert_default();
    spec.renew_time = Some(MicroTime(micros(renewed)));
    Renewal::Renewed(Box::new(lease), count)
}

/// Returns the Lease without the annotations of delegated renewals.
pub(super) fn without_annotations(lease: &Lease) -> Lease {
    let mut lease = lease.clone();
    for annotation in ANNOTATIONS {
        lease.annotations_mut().remove(annotation);
    }
    lease
}

fn renew_time(lease: &Lease) -> Option<Timestamp> {
    let spec = lease.spec.as_ref()?;
    spec.renew_time.as_ref().map(|time| micros(time.0))
}

/// Returns the time of the last change by the API server's clock, or else by the writer's.
fn changed_at(lease: &Lease) -> Option<Timestamp> {
    let managers = lease.metadata.managed_fields.iter().flatten();
    let times = managers.filter_map(|manager| manager.time.as_ref());
    let last = times.map(|time| time.0).max();
    last.or_else(|| renew_time(lease))
}

/// Returns the offset of the clock of the node that renewed the Lease last.
fn clock_offset(lease: &Lease) -> SignedDuration {
    let times = renew_time(lease).zip(changed_at(lease));
    let offset = times.map(|(renewed, changed)| renewed.duration_since(changed));
    let offset = offset.map(|offset| SignedDuration::from_secs(offset.as_secs()));
    offset
        .filter(|offset| offset.abs() > CLOCK_TOLERANCE)
        .unwrap_or(SignedDuration::ZERO)
}

fn recorded_offset(lease: &Lease) -> SignedDuration {
    let recorded = lease.annotations().get(CLOCK_OFFSET);
    let recorded = recorded.and_then(|seconds| seconds.parse().ok());
    recorded.map_or(SignedDuration::ZERO, SignedDuration::from_secs)
}

/// Returns the time as a Lease stores it.
fn micros(time: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}
