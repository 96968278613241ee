//! Tests of the calls to the review API, their number, and the lifetime of answers.

use super::*;
use causeway_rt::listener::RemoteAddr;
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use std::{collections::BTreeMap, sync::atomic::AtomicUsize};
use tokio::sync::watch;

/// Fake review client that answers with the name in the token when the gate is open.
#[derive(Debug)]
struct Fake {
    asked: AtomicUsize,
    gate: watch::Receiver<bool>,
}

impl Fake {
    async fn opened(mut gate: watch::Receiver<bool>) {
        let _ = gate.wait_for(|open| *open).await;
    }

    fn count(&self) -> usize {
        self.asked.load(Relaxed)
    }
}

impl ReviewClient for Fake {
    fn review_token(
        &self,
        token: &str,
        _: &[String],
    ) -> BoxFuture<'static, Result<Option<UserInfo>, ReviewError>> {
        self.asked.fetch_add(1, Relaxed);
        let (gate, token) = (self.gate.clone(), token.to_owned());
        async move {
            Self::opened(gate).await;
            match token.as_str() {
                "broken" => Err(ReviewError {
                    detail: "broken".into(),
                    cause: "broken".into(),
                }),
                "wrong" => Ok(None),
                _ => Ok(Some(UserInfo::default())),
            }
        }
        .boxed()
    }

    fn review_access(
        &self,
        access: &ReviewAttributes,
    ) -> BoxFuture<'static, Result<bool, ReviewError>> {
        self.asked.fetch_add(1, Relaxed);
        let (gate, allowed) = (self.gate.clone(), access.verb == "get");
        async move {
            Self::opened(gate).await;
            Ok(allowed)
        }
        .boxed()
    }
}

struct World {
    fake: Arc<Fake>,
    gate: watch::Sender<bool>,
    answers: Arc<ReviewCache>,
}

/// Source addresses of clients.
const HERE: RemoteAddr = RemoteAddr::Unix(0);
const BOUND: Duration = Duration::from_mins(2);

fn world(open: bool, kubernetes: &Kubernetes) -> World {
    let (gate, asked) = watch::channel(open);
    let fake = Arc::new(Fake {
        asked: AtomicUsize::default(),
        gate: asked,
    });
    let by = (fake.clone() as Arc<dyn ReviewClient>, Handle::current());
    World {
        fake,
        gate,
        answers: Arc::new(ReviewCache::new(by, kubernetes, BOUND, &Metrics::new())),
    }
}

fn access(verb: &'static str) -> ReviewAttributes {
    ReviewAttributes {
        account: Arc::default(),
        verb,
        node: "edge-1".to_owned(),
        subresource: "metrics",
    }
}

fn jwt(end: u64) -> String {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
    let claims = part(&format!("{{\"exp\":{end}}}"));
    format!("{}.{claims}.c2ln", part("{\"alg\":\"RS256\"}"))
}

#[tokio::test]
async fn of_a_thousand_that_ask_the_same_one_is_answered_by_asking() {
    let world = world(false, &Kubernetes::default());
    let tokens = (0..1_000).map(|_| world.answers.review_token("good", &[], HERE));
    let accesses = (0..1_000).map(|_| world.answers.review_access(access("get"), HERE));
    let open = async { world.gate.send_replace(true) };
    let (tokens, accesses, _) = tokio::join!(join_all(tokens), join_all(accesses), open);
    assert!(tokens.into_iter().all(|found| found.unwrap().is_some()));
    assert!(accesses.into_iter().all(Result::unwrap));
    assert_eq!(world.fake.count(), 2);
    assert!(
        world
            .answers
            .review_token("wrong", &[], HERE)
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        world
            .answers
            .review_token("wrong", &[], HERE)
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        !world
            .answers
            .review_access(access("create"), HERE)
            .await
            .unwrap()
    );
    assert_eq!(world.fake.count(), 4);
}

#[tokio::test]
async fn a_cancelled_client_does_not_cancel_the_review_of_others() {
    let world = world(false, &Kubernetes::default());
    {
        let mut first = Box::pin(world.answers.review_token("good", &[], HERE));
        while world.fake.count() == 0 {
            assert!(futures_util::poll!(&mut first).is_pending());
            tokio::task::yield_now().await;
        }
    }
    world.gate.send_replace(true);
    assert!(
        world
            .answers
            .review_token("good", &[], HERE)
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(world.fake.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_review_times_out_and_admits_no_client() {
    let world = world(false, &Kubernetes::default());
    let begun = tokio::time::Instant::now();
    let why = world
        .answers
        .review_token("good", &[], HERE)
        .await
        .unwrap_err();
    assert!(why.detail.contains("did not answer within 120s"), "{why:?}");
    assert_eq!(begun.elapsed(), BOUND);
    assert!(
        world
            .answers
            .review_access(access("get"), HERE)
            .await
            .is_err()
    );
}

#[tokio::test]
async fn that_there_is_no_answer_is_not_kept() {
    let world = world(true, &Kubernetes::default());
    assert!(
        world
            .answers
            .review_token("broken", &[], HERE)
            .await
            .is_err()
    );
    let asked = world.fake.count();
    let again = async {
        while world.fake.count() == asked {
            assert!(
                world
                    .answers
                    .review_token("broken", &[], HERE)
                    .await
                    .is_err()
            );
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_mins(2), again).await.unwrap();
}

#[tokio::test]
async fn an_answer_is_asked_for_again_when_its_time_is_over() {
    let (short, long) = (Duration::from_millis(50), Duration::from_hours(1));
    let kubernetes = |tokens, accesses| Kubernetes {
        token_allowed_for: tokens,
        token_refused_for: tokens,
        review_allowed_for: accesses,
        review_refused_for: accesses,
        ..Kubernetes::default()
    };
    // Each kind of review has its own cache time.
    let accesses = world(true, &kubernetes(long, short));
    for verb in ["get", "create"] {
        let asked = accesses.fake.count();
        let again = async {
            while accesses.fake.count() < asked + 3 {
                let allowed = accesses
                    .answers
                    .review_access(access(verb), HERE)
                    .await
                    .unwrap();
                assert_eq!(allowed, verb == "get");
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_mins(2), again).await.unwrap();
    }
    let world = world(true, &kubernetes(short, long));
    for token in ["good", "wrong"] {
        let asked = world.fake.count();
        let again = async {
            while world.fake.count() < asked + 3 {
                let found = world.answers.review_token(token, &[], HERE).await.unwrap();
                assert_eq!(found.is_some(), token == "good");
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_mins(2), again).await.unwrap();
    }
}

#[tokio::test]
async fn a_token_never_counts_beyond_its_own_end() {
    let world = world(true, &Kubernetes::default());
    let mut life = 2;
    let token = loop {
        let end = now().as_secs() + life;
        let token = jwt(end);
        let found = world.answers.review_token(&token, &[], HERE).await;
        if found.unwrap().is_some() {
            break token;
        }
        // A slow machine has asked too late.
        assert!(now().as_secs() >= end, "it has not ended");
        life *= 2;
    };
    let over = async {
        while world
            .answers
            .review_token(&token, &[], HERE)
            .await
            .unwrap()
            .is_some()
        {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_mins(2), over).await.unwrap();
    let asked = world.fake.count();
    for over in [token, jwt(now().as_secs() - 1)] {
        assert!(
            world
                .answers
                .review_token(&over, &[], HERE)
                .await
                .unwrap()
                .is_none()
        );
    }
    assert_eq!(
        world.fake.count(),
        asked,
        "no question is asked for an ended request"
    );
}

#[tokio::test]
async fn audiences_are_part_of_the_question() {
    let world = world(true, &Kubernetes::default());
    let names = |all: &[&str]| -> Vec<String> { all.iter().map(|&each| each.into()).collect() };
    for audiences in [
        names(&[]),
        names(&["a"]),
        names(&["a", "b"]),
        names(&["ab"]),
    ] {
        let found = world.answers.review_token("good", &audiences, HERE).await;
        assert!(found.unwrap().is_some());
    }
    assert_eq!(world.fake.count(), 4);
}

#[test]
fn no_two_questions_have_one_answer() {
    let of = |change: &dyn Fn(&mut UserInfo, &mut ReviewAttributes)| {
        let mut access = access("get");
        let mut account = UserInfo::default();
        change(&mut account, &mut access);
        access.account = Arc::new(account);
        access_key(&access)
    };
    let extra = |name: &str, values: &[&str]| {
        let values = values.iter().map(|&each| each.to_owned()).collect();
        BTreeMap::from([(name.to_owned(), values)])
    };
    let all = [
        of(&|_, _| {}),
        of(&|account, _| account.user = "a".into()),
        of(&|account, _| account.uid = "a".into()),
        of(&|account, _| account.groups = vec!["a".into()]),
        of(&|account, _| account.groups = vec!["a".into(), "b".into()]),
        of(&|account, _| account.groups = vec!["ab".into()]),
        of(&|account, _| account.groups = vec![String::new()]),
        of(&|account, _| account.extra = extra("a", &[])),
        of(&|account, _| account.extra = extra("a", &["b"])),
        of(&|account, _| account.extra = extra("ab", &[])),
        of(&|_, access| access.verb = "create"),
        of(&|_, access| access.node = "edge-2".into()),
        of(&|_, access| access.subresource = "proxy"),
    ];
    let different: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(different.len(), all.len());
    assert_eq!(of(&|_, _| {}), of(&|_, _| {}));
}

#[tokio::test]
async fn wrong_tokens_of_one_source_hold_up_no_other_source() {
    let world = world(false, &Kubernetes::default());
    let from = |last| std::net::IpAddr::from([192, 0, 2, last]);
    let tokens: Vec<_> = (0..10 * MAX_CONCURRENT_REVIEWS)
        .map(|number| format!("token-{number}"))
        .collect();
    let strangers = tokens
        .iter()
        .map(|token| world.answers.review_token(token, &[], from(1)));
    let mut strangers = Box::pin(join_all(strangers));
    while world.fake.count() < MAX_CONCURRENT_REVIEWS * 3 / 4 {
        assert!(futures_util::poll!(&mut strangers).is_pending());
        tokio::task::yield_now().await;
    }
    let other = world.answers.review_token("good", &[], from(2));
    let mut other = Box::pin(other);
    while world.fake.count() <= MAX_CONCURRENT_REVIEWS * 3 / 4 {
        assert!(futures_util::poll!(&mut other).is_pending());
        tokio::task::yield_now().await;
    }
    world.gate.send_replace(true);
    assert!(other.await.unwrap().is_some());
}
