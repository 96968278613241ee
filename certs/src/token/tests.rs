use super::*;
use crate::{Ca, OpenMode, Store, TrustDomain};
use rustls_pki_types::UnixTime;
use std::time::Duration;

struct World {
    store: Store,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), OpenMode::Create).unwrap();
        store
            .save_ca(&Ca::create(&TrustDomain::parse("td").unwrap()).unwrap())
            .unwrap();
        Self { store, _dir: dir }
    }

    /// Returns the token store as another process opens it.
    fn book(&self) -> TokenStore {
        self.store.tokens().unwrap()
    }

    fn token(&self) -> JoinToken {
        let confirmed = NodeAttributes {
            addresses: vec![[10, 0, 0, 7].into()],
            pool: Some("p".into()),
            labels: [("site".to_owned(), "north".to_owned())].into(),
        };
        self.book()
            .create(&node(), Duration::from_mins(1), confirmed)
            .unwrap()
    }
}

fn node() -> NodeName {
    NodeName::parse("edge-1").unwrap()
}

fn later(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs() + seconds))
}

fn sample() -> String {
    JoinToken::generate(Fingerprint::digest(b"root"))
        .text()
        .expose()
        .to_owned()
}

#[test]
fn a_written_token_parses_back() {
    let text = sample();
    let token = JoinToken::parse(&format!(" {text}\n")).unwrap();
    assert_eq!(token.text().expose(), text);
    assert_eq!(token.root, Fingerprint::digest(b"root"));
    assert!(text.starts_with("cwj1.") && !format!("{token:?} {token}").contains(&text[20..40]));
}

#[test]
fn an_id_can_be_written_on_a_command_line() {
    let root = Fingerprint::digest(b"root");
    for _ in 0..1000 {
        let id = JoinToken::generate(root).id;
        assert!(
            id.starts_with(|first: char| first.is_ascii_alphabetic()),
            "{id}"
        );
    }
}

#[test]
fn a_bad_token_names_its_fault() {
    let text = sample();
    let parts: Vec<_> = text.split('.').collect();
    let refused = |text: &str| JoinToken::parse(text).unwrap_err();
    assert_eq!(refused(" "), TokenError::Empty);
    assert_eq!(refused("hello"), TokenError::Prefix);
    assert_eq!(refused(&text.replace("cwj1", "cwj2")), TokenError::Prefix);
    assert_eq!(refused("cwj1"), TokenError::Truncated { found: 1 });
    assert_eq!(
        refused(&parts[..3].join(".")),
        TokenError::Truncated { found: 3 }
    );
    assert_eq!(
        refused(&text[..text.len() - 5]),
        TokenError::Damaged { part: "CA hash" }
    );
    assert_eq!(
        refused(&text.replace(parts[2], "x")),
        TokenError::Damaged { part: "secret" }
    );
    assert_eq!(
        refused(&text.replace(parts[1], "é")),
        TokenError::Damaged { part: "id" }
    );
    assert_eq!(refused(&format!("{text}.x")), TokenError::TooLong);
}

#[test]
fn a_token_is_good_once_even_for_another_process() {
    let world = World::new();
    let token = world.token();
    let record = world
        .book()
        .redeem(&token, (&node(), NodeStatus::New), later(0))
        .unwrap();
    assert_eq!(record.pool.as_deref(), Some("p"));
    assert_eq!(record.addresses, [std::net::IpAddr::from([10, 0, 0, 7])]);
    let again = world
        .book()
        .redeem(&token, (&node(), NodeStatus::New), later(1));
    assert!(matches!(again, Err(TokenRejected::Used { .. })));
    assert_eq!(world.book().all().unwrap()[0].used.len(), 1);
}

#[test]
fn of_many_racing_redeems_one_wins() {
    let world = World::new();
    let token = world.token();
    let wins = std::thread::scope(|scope| {
        let redeem = || {
            world
                .book()
                .redeem(&token, (&node(), NodeStatus::New), later(0))
                .is_ok()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(redeem)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .filter(|won| *won)
            .count()
    });
    assert_eq!(wins, 1);
}

#[test]
fn racing_creates_lose_no_token() {
    let world = World::new();
    std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| world.token()))));
    assert_eq!(world.book().all().unwrap().len(), 8);
}

#[test]
fn each_refusal_has_its_reason_and_uses_up_no_token() {
    let world = World::new();
    let token = world.token();
    let other = NodeName::parse("edge-2").unwrap();
    let refused = |token: &JoinToken, node: &NodeName, when| {
        world
            .book()
            .redeem(token, (node, NodeStatus::New), when)
            .unwrap_err()
    };
    let wrong_node = refused(&token, &other, later(0));
    assert!(
        matches!(wrong_node, TokenRejected::OtherNode { bound_to, .. } if bound_to.node() == Some(node()))
    );
    assert!(matches!(
        refused(&token, &node(), later(61)),
        TokenRejected::Expired { .. }
    ));
    let wrong_ca = JoinToken {
        root: Fingerprint::digest(b"x"),
        ..token.clone()
    };
    assert!(matches!(
        refused(&wrong_ca, &node(), later(0)),
        TokenRejected::UnexpectedCa
    ));
    let wrong_secret = JoinToken {
        secret: random_secret(),
        ..token.clone()
    };
    assert!(matches!(
        refused(&wrong_secret, &node(), later(0)),
        TokenRejected::Unknown
    ));
    let unheard = JoinToken::generate(token.root);
    assert!(matches!(
        refused(&unheard, &node(), later(0)),
        TokenRejected::Unknown
    ));
    world
        .book()
        .redeem(&token, (&node(), NodeStatus::New), later(0))
        .unwrap();
}

#[test]
fn the_book_keeps_no_secret_and_a_removed_token_is_unknown() {
    let world = World::new();
    let token = world.token();
    assert!(!format!("{:?}", world.book().all().unwrap()).contains(token.secret.expose()));
    assert!(world.book().remove(&token.id).unwrap());
    assert!(!world.book().remove(&token.id).unwrap());
    let refused = world
        .book()
        .redeem(&token, (&node(), NodeStatus::New), later(0));
    assert!(matches!(refused, Err(TokenRejected::Unknown)));
}

#[test]
fn a_pattern_joins_so_many_new_nodes_and_none_that_is_there() {
    let world = World::new();
    let pattern = NodePattern::parse("Site-7-*").unwrap();
    let token = world
        .book()
        .create_for(
            (&pattern, 2),
            Duration::from_mins(1),
            NodeAttributes::default(),
        )
        .unwrap();
    let redeem = |name: &str, standing| {
        let node = NodeName::parse(name).unwrap();
        world.book().redeem(&token, (&node, standing), later(0))
    };
    let known = redeem("site-7-a", NodeStatus::Known);
    assert!(matches!(known, Err(TokenRejected::NotNew { .. })));
    let elsewhere = redeem("site-8-a", NodeStatus::New);
    assert!(matches!(elsewhere, Err(TokenRejected::OtherNode { .. })));
    redeem("site-7-a", NodeStatus::New).unwrap();
    redeem("site-7-b", NodeStatus::New).unwrap();
    let third = redeem("site-7-c", NodeStatus::New);
    assert!(matches!(third, Err(TokenRejected::Used { .. })));
    let used = &world.book().all().unwrap()[0].used;
    let names: Vec<_> = used.iter().flat_map(|one| &one.node).collect();
    assert_eq!(
        names,
        ["site-7-a", "site-7-b"]
            .map(|name| NodeName::parse(name).unwrap())
            .iter()
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_token_for_one_node_brings_that_node_back() {
    let world = World::new();
    let token = world.token();
    let again = world
        .book()
        .redeem(&token, (&node(), NodeStatus::Known), later(0));
    assert!(again.is_ok());
}

/// The record of a node that another edge has made meanwhile is older than the use if the clocks of two gateways differ.
#[test]
fn a_pattern_token_replaces_no_node_by_a_repeated_request() {
    let world = World::new();
    let book = world.book();
    let ttl = Duration::from_mins(1);
    let patterns = ["edge-*", "edge-1"].map(|pattern| NodePattern::parse(pattern).unwrap());
    for pattern in patterns {
        let token = book.create_for((&pattern, 1), ttl, NodeAttributes::default());
        let token = token.unwrap();
        let node = node();
        let request = |status, last_joined_at| Joining {
            node: &node,
            status,
            repeat: Some(RepeatCheck {
                key: Fingerprint::digest(b"key"),
                last_join_key: Some(Fingerprint::digest(b"other")),
                last_joined_at,
                removed_at: None,
            }),
        };
        let now = later(0);
        book.redeem(&token, request(NodeStatus::New, None), now)
            .unwrap();
        let older = Some(now.as_secs() - 1);
        let again = book.redeem(&token, request(NodeStatus::Known, older), now);
        assert_eq!(again.is_ok(), pattern.node().is_some(), "{pattern}");
        let same = Some(now.as_secs());
        let again = book.redeem(&token, request(NodeStatus::Known, same), now);
        assert!(
            matches!(again, Err(TokenRejected::Used { .. })),
            "{pattern}"
        );
    }
}

#[test]
fn a_revoked_token_says_so_and_stays_in_the_book() {
    let world = World::new();
    let token = world.token();
    assert!(world.book().revoke(&token.id, later(0)).unwrap());
    assert!(!world.book().revoke("nobody", later(0)).unwrap());
    let refused = world
        .book()
        .redeem(&token, (&node(), NodeStatus::New), later(1));
    assert!(matches!(refused, Err(TokenRejected::Revoked { .. })));
    assert_eq!(world.book().all().unwrap().len(), 1);
}

#[test]
fn a_book_from_before_there_were_patterns_reads() {
    let old = |used: &str| {
        let hash = Fingerprint::digest(b"x");
        let text = format!(
            r#"{{"id":"a","hash":{},"node":"edge-1","addresses":[],"pool":null,"created":1,"expires":2,"used":{used}}}"#,
            serde_json::to_string(&hash).unwrap()
        );
        serde_json::from_str::<TokenRecord>(&text).unwrap()
    };
    let (fresh, spent) = (old("null"), old("7"));
    assert_eq!((fresh.uses, fresh.used.len()), (1, 0));
    assert_eq!(fresh.nodes.node(), Some(node()));
    assert_eq!(
        spent.used,
        [JoinRecord {
            node: None,
            at: 7,
            key: None,
            other: crate::OtherFields::new()
        }]
    );
    let again = serde_json::to_string(&spent).unwrap();
    assert_eq!(serde_json::from_str::<TokenRecord>(&again).unwrap(), spent);
}
