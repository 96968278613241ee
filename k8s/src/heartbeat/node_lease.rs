//! Lease of a node, and the state of delegated heartbeats in its annotations.
//!
//! A delegated renewal notes its own `renewTime` in an annotation. A kubelet copies annotations when it renews its Lease, and
//! writes another `renewTime`: by that the return of a node is noticed, whichever gateway renewed last.
//!
//! The age of a Lease is the time since its last change by the clock of the API server (`managedFields`). The kubelet writes
//! `renewTime` by the clock of its node, which may be wrong. kube-controller-manager only takes a `renewTime` that is later than
//! the last one. So a delegated renewal continues the node's own clock: its offset is noted when the delegation begins.

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;

/// Annotation by which `OpenYurt`'s controllers know delegated renewals.
pub(super) const DELEGATED: &str = "openyurt.io/delegate-heartbeat";
/// `renewTime` of the last delegated renewal.
const RENEWED: &str = "causeway.io/delegated-renew-time";
/// Number of successive delegated renewals.
const COUNT: &str = "causeway.io/delegated-count";
/// Offset of the node's clock, in seconds; absent if the clock is right.
const OFFSET: &str = "causeway.io/delegated-clock-offset";
const ANNOTATIONS: [&str; 4] = [DELEGATED, RENEWED, COUNT, OFFSET];

/// Age from which a Lease that the node renewed last is renewed for it: the node renews it every 10 s.
const OLD: SignedDuration = SignedDuration::from_secs(15);
/// Age from which a Lease with a delegated renewal is renewed again. Two members may send heartbeats of one node at once.
const DELEGATED_OLD: SignedDuration = SignedDuration::from_secs(5);
/// Offset up to which the clock of a node counts as right.
const CLOCK_TOLERANCE: SignedDuration = SignedDuration::from_secs(5);

/// State of a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseState {
    /// The node, or another program, renewed it last, and nothing of a delegation is left.
    Direct,
    /// It was renewed by delegated heartbeats so many times in succession.
    Delegated(u32),
    /// The node has renewed it, and annotations of the delegation are left.
    Returned,
}

/// Result of a delegated renewal.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Renewal {
    /// The Lease as it is to be, and the number of successive delegated renewals.
    Renewed(Box<Lease>, u32),
    /// The Lease is not old.
    Fresh,
    /// The Lease is not this node's.
    Foreign,
}

/// Returns the state of a Lease.
pub(super) fn state(lease: &Lease) -> LeaseState {
    let Some(renewed) = lease.annotations().get(RENEWED) else {
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

/// Returns the time since the last change of a Lease, or `None` if it was never renewed.
pub(super) fn age(lease: &Lease, now: Timestamp) -> Option<SignedDuration> {
    Some(now.duration_since(changed(lease)?))
}

/// Returns the Lease of this node as a delegated heartbeat renews it.
pub(super) fn renew(lease: &Lease, node: &str, now: Timestamp) -> Renewal {
    let holder = lease.spec.as_ref();
    let holder = holder.and_then(|spec| spec.holder_identity.as_deref());
    if holder != Some(node) || lease.name_any() != node {
        return Renewal::Foreign;
    }
    let (count, offset, old) = match state(lease) {
        LeaseState::Delegated(count) => {
            (count.saturating_add(1), noted_offset(lease), DELEGATED_OLD)
        }
        LeaseState::Direct | LeaseState::Returned => (1, clock_offset(lease), OLD),
    };
    if age(lease, now).is_some_and(|age| age < old) {
        return Renewal::Fresh;
    }
    let (last, next) = (renew_time(lease), now.saturating_add(offset).unwrap_or(now));
    let later = last.and_then(|last| last.checked_add(SignedDuration::from_secs(1)).ok());
    let renewed = later.map_or(next, |later| next.max(later));
    let mut lease = lease.clone();
    let annotations = lease.annotations_mut();
    annotations.insert(DELEGATED.to_owned(), "true".to_owned());
    annotations.insert(RENEWED.to_owned(), micros(renewed).to_string());
    annotations.insert(COUNT.to_owned(), count.to_string());
    annotations.remove(OFFSET);
    if !offset.is_zero() {
        annotations.insert(OFFSET.to_owned(), offset.as_secs().to_string());
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
fn changed(lease: &Lease) -> Option<Timestamp> {
    let managers = lease.metadata.managed_fields.iter().flatten();
    let times = managers.filter_map(|manager| manager.time.as_ref());
    let last = times.map(|time| time.0).max();
    last.or_else(|| renew_time(lease))
}

/// Returns the offset of the clock of the node that renewed the Lease last.
fn clock_offset(lease: &Lease) -> SignedDuration {
    let times = renew_time(lease).zip(changed(lease));
    let offset = times.map(|(renewed, changed)| renewed.duration_since(changed));
    let offset = offset.map(|offset| SignedDuration::from_secs(offset.as_secs()));
    offset
        .filter(|offset| offset.abs() > CLOCK_TOLERANCE)
        .unwrap_or(SignedDuration::ZERO)
}

fn noted_offset(lease: &Lease) -> SignedDuration {
    let noted = lease.annotations().get(OFFSET);
    let noted = noted.and_then(|seconds| seconds.parse().ok());
    noted.map_or(SignedDuration::ZERO, SignedDuration::from_secs)
}

/// Returns the time as a Lease stores it.
fn micros(time: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}
