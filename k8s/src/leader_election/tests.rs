use super::*;
use http::{Request, Response};
use kube::client::Body;
use std::future::{Future, pending, ready};

/// Returns an elector for an API that gives these responses.
fn by<F>(answer: impl Fn() -> F + Clone + Send + 'static) -> LeaderElector
where
    F: Future<Output = Result<Response<Body>, kube::Error>> + Send + 'static,
{
    let api = tower::service_fn(move |_: Request<Body>| answer());
    LeaderElector::new(
        Client::new(api, "it"),
        "it",
        ("it", "it"),
        "a".to_owned(),
        Duration::from_secs(15),
    )
}

fn lease() -> LeaderElector {
    by(pending)
}

fn of(holder: Option<&str>, seconds: Option<i32>, renewed: i64) -> v1::Lease {
    v1::Lease {
        metadata: ObjectMeta::default(),
        spec: Some(v1::LeaseSpec {
            holder_identity: holder.map(str::to_owned),
            lease_duration_seconds: seconds,
            lease_transitions: Some(3),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            ..v1::LeaseSpec::default()
        }),
    }
}

fn after(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

#[tokio::test(start_paused = true)]
async fn a_foreign_lease_is_free_after_its_duration_by_the_own_clock() {
    let mut lease = lease();
    // Independent of the clock of the other gateway.
    for renewed in [0, 4_000_000_000] {
        lease.observe(&of(Some("b"), Some(20), renewed));
        assert!(!lease.is_free(after(19)), "{renewed}");
        assert!(lease.is_free(after(20)), "{renewed}");
    }
    tokio::time::advance(Duration::from_secs(19)).await;
    lease.observe(&of(Some("b"), Some(20), 4_000_000_000));
    assert!(lease.is_free(after(1)), "seen again, and not renewed");
    lease.observe(&of(Some("b"), Some(20), 4_000_000_001));
    assert!(!lease.is_free(after(19)), "renewed");
    lease.observe(&of(Some("b"), None, 0));
    assert!(!lease.is_free(after(14)) && lease.is_free(after(15)));
}

#[tokio::test]
async fn an_unheld_or_own_lease_is_free() {
    let mut lease = lease();
    for holder in [None, Some(""), Some("a")] {
        lease.observe(&of(holder, Some(20), 0));
        assert!(lease.is_free(after(0)), "{holder:?}");
    }
}

#[tokio::test]
async fn holder_changes_are_counted_and_renewals_keep_acquire_time() {
    let lease = lease();
    let taken = lease
        .owned_lease(Some(of(Some("b"), Some(20), 0)))
        .spec
        .unwrap();
    assert_eq!(taken.lease_transitions, Some(4));
    assert_eq!(taken.lease_duration_seconds, Some(15));
    assert_eq!(taken.holder_identity.as_deref(), Some("a"));
    let mut ours = of(None, None, 0);
    ours.spec = Some(taken.clone());
    let again = lease.owned_lease(Some(ours)).spec.unwrap();
    assert_eq!(again.lease_transitions, Some(4));
    assert_eq!(again.acquire_time, taken.acquire_time);
    let first = lease.owned_lease(None);
    assert_eq!(first.metadata.name.as_deref(), Some("it"));
    assert_eq!(first.spec.unwrap().lease_transitions, Some(0));
}

#[tokio::test(start_paused = true)]
async fn an_unrenewed_lease_is_lost_after_two_thirds_of_its_duration() {
    let broken = || {
        let answer = Response::builder().status(500).body(Body::empty());
        ready(Ok(answer.unwrap()))
    };
    for mut lease in [by(pending), by(broken)] {
        lease.observe(&of(Some("a"), Some(15), 0));
        let begun = Instant::now();
        lease.renewed_at = Some(begun);
        lease.renew_until_lost().await;
        let lasted = begun.elapsed();
        assert!(
            (Duration::from_secs(10)..Duration::from_secs(12)).contains(&lasted),
            "{lasted:?}"
        );
        // There is no lease to release.
        assert!(lease.renewed_at.is_none());
    }
}
