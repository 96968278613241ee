//! Identities and join tokens: the result of each action of an operator in each state of a node's identity.
//!
//! An identity that the gateway accepts stays. A newer token replaces an identity that no gateway accepts, and the edge
//! puts the old identity aside. If nothing helps, the edge names the command that does.

use crate::world::{
    LIFE, World,
    app::App,
    edge::Edge,
    process::{GatewayProcess, causeway},
    until,
};
use Action::{Fresh, LeaveFresh, LeaveSpent, OtherCa, Outdated, RejoinFresh, RejoinSpent, Spent};
use Outcome::{Ends, Keeps, Refused, Replaces};
use State::{Damaged, Expired, LostCa, Nothing, Removed, Renamed, Revoked, Valid};
use causeway_certs::{
    Ca, EdgeIdentity, JoinToken, NodeName, OpenMode, PrivateKey, Revocation, Store, TrustDomain,
    VerifiedPublicKey,
};
use causeway_edge::{Config, config::TunnelMode};
use futures_util::future::join_all;
use std::time::{Duration, SystemTime};

/// The state of a node's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The node has none.
    Nothing,
    /// The gateway accepts it.
    Valid,
    /// Its certificate has expired.
    Expired,
    /// It is from a CA that the gateway no longer has.
    LostCa,
    /// The gateway has forgotten the node.
    Removed,
    /// The gateway no longer admits the node.
    Revoked,
    /// The configuration gives the node another name.
    Renamed,
    /// Its file is no identity.
    Damaged,
}

/// Action of the operator before the edge starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Leaves the token with which the node has joined; a node without identity has none.
    Spent,
    /// Configures a new token.
    Fresh,
    /// Configures a new token that has expired.
    Outdated,
    /// Configures a token of another gateway.
    OtherCa,
    /// `--rejoin` with a new token.
    RejoinFresh,
    /// `--rejoin` with the token with which the node has joined.
    RejoinSpent,
    /// `causeway edge leave` and a new token.
    LeaveFresh,
    /// `causeway edge leave` and the token with which the node has joined.
    LeaveSpent,
}

/// Expected outcome.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// The edge is connected with the previous identity, and the token is not used up.
    Keeps,
    /// The edge is connected with a new identity; the previous one is put aside.
    Replaces,
    /// The edge runs, keeps its identity, and logs this.
    Refused(&'static str),
    /// The edge does not start, and prints this.
    Ends(&'static str),
}

const CREATE: &str = "causeway token create --node";

const TABLE: &[(State, Action, Outcome)] = &[
    (Nothing, Spent, Ends("causeway token create")),
    (Nothing, Fresh, Replaces),
    (Nothing, Outdated, Ends("expired")),
    (Nothing, OtherCa, Ends("the token expects")),
    (Nothing, RejoinFresh, Replaces),
    (Nothing, RejoinSpent, Ends("causeway token create")),
    (Valid, Spent, Keeps),
    (Valid, Fresh, Keeps),
    (Valid, Outdated, Keeps),
    (Valid, OtherCa, Keeps),
    (Valid, RejoinFresh, Replaces),
    (Valid, RejoinSpent, Keeps),
    (Valid, LeaveFresh, Replaces),
    (Valid, LeaveSpent, Ends("already used")),
    (
        Expired,
        Spent,
        Refused("was already used for this identity"),
    ),
    (Expired, Fresh, Replaces),
    (Expired, Outdated, Refused("join token expired")),
    (Expired, OtherCa, Refused("the token expects")),
    (Expired, RejoinFresh, Replaces),
    (
        Expired,
        RejoinSpent,
        Refused("was already used for this identity"),
    ),
    (Expired, LeaveFresh, Replaces),
    (Expired, LeaveSpent, Ends("already used")),
    (LostCa, Spent, Refused("was already used for this identity")),
    (LostCa, Fresh, Replaces),
    (LostCa, Outdated, Refused("join token expired")),
    (LostCa, OtherCa, Refused("another server answers")),
    (LostCa, RejoinFresh, Replaces),
    (
        LostCa,
        RejoinSpent,
        Refused("was already used for this identity"),
    ),
    (LostCa, LeaveFresh, Replaces),
    (LostCa, LeaveSpent, Ends("already used")),
    (
        Removed,
        Spent,
        Refused("was already used for this identity"),
    ),
    (Removed, Fresh, Replaces),
    (Removed, Outdated, Refused("join token expired")),
    (Removed, OtherCa, Refused("the token expects")),
    (Removed, RejoinFresh, Replaces),
    (
        Removed,
        RejoinSpent,
        Refused("was already used for this identity"),
    ),
    (Removed, LeaveFresh, Replaces),
    (Removed, LeaveSpent, Ends("already used")),
    (Revoked, Spent, Refused("is revoked: stolen")),
    (Revoked, Fresh, Refused("is revoked: stolen")),
    (Revoked, Outdated, Refused("is revoked: stolen")),
    (Revoked, OtherCa, Refused("is revoked: stolen")),
    (Revoked, RejoinFresh, Refused("is revoked: stolen")),
    (Revoked, RejoinSpent, Refused("is revoked: stolen")),
    (Revoked, LeaveFresh, Ends("is revoked: stolen")),
    (Revoked, LeaveSpent, Ends("is revoked: stolen")),
    (Renamed, Spent, Ends(CREATE)),
    (Renamed, Fresh, Replaces),
    (Renamed, Outdated, Ends(CREATE)),
    (Renamed, OtherCa, Ends("the token expects")),
    (Renamed, RejoinFresh, Replaces),
    (Renamed, RejoinSpent, Ends(CREATE)),
    (Renamed, LeaveFresh, Replaces),
    (Renamed, LeaveSpent, Ends("for node")),
    (Damaged, Spent, Ends("causeway edge leave")),
    (Damaged, Fresh, Ends("causeway edge leave")),
    (Damaged, Outdated, Ends("causeway edge leave")),
    (Damaged, OtherCa, Ends("causeway edge leave")),
    (Damaged, RejoinFresh, Ends("causeway edge leave")),
    (Damaged, RejoinSpent, Ends("causeway edge leave")),
    (Damaged, LeaveFresh, Replaces),
    (Damaged, LeaveSpent, Ends("already used")),
];

/// An edge waits for the time limit of a dial before it treats an identity as refused.
fn short_dials(config: &mut Config) {
    let limit = Duration::from_secs(3);
    (
        config.timeouts.tcp,
        config.timeouts.tls,
        config.timeouts.hello,
    ) = (limit, limit, limit);
}

/// One row, before the edge starts again.
struct RejoinCase {
    edge: Edge,
    state: State,
    action: Action,
    outcome: Outcome,
    /// The certificate of the identity, unless there is none.
    before: Option<Vec<u8>>,
    token: Option<JoinToken>,
}

/// An identity from this CA whose certificate has this lifetime.
fn identity(ca: &Ca, node: &NodeName, life: Duration) -> EdgeIdentity {
    let key = PrivateKey::generate().unwrap();
    let request = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let issued = ca.issue_edge(&request, node, life).unwrap();
    EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap()
}

fn opened(edge: &Edge) -> Store {
    Store::open(edge.folder(), OpenMode::Existing).unwrap()
}

fn certificate(store: &Store) -> Option<Vec<u8>> {
    let identity = store.edge().unwrap()?;
    Some(identity.leaf.chain()[0].to_vec())
}

/// Returns the identities that were put aside.
fn aside(edge: &Edge) -> Vec<String> {
    let entries = std::fs::read_dir(edge.folder()).unwrap();
    let names = entries.map(|entry| entry.unwrap());
    let kept = names.filter(|entry| {
        let name = entry.file_name().into_string().unwrap();
        name.starts_with("edge-replaced-")
    });
    kept.map(|entry| std::fs::read_to_string(entry.path()).unwrap())
        .collect()
}

impl RejoinCase {
    async fn new(
        world: &World,
        (lost, other): (&Ca, &World),
        number: usize,
        (state, action, outcome): (State, Action, Outcome),
    ) -> Self {
        let name = format!("edge-{number}");
        let node = NodeName::parse(&name).unwrap();
        let spent = world.token(&name, LIFE);
        let plan = world.edge(&name).token(spent.text().expose());
        let plan = plan.config(short_dials);
        let mut edge = plan.join().await;
        edge.stop().await;
        let store = opened(&edge);
        match state {
            Nothing => {
                std::fs::remove_dir_all(edge.folder()).unwrap();
                edge.forget_token();
            }
            Expired => {
                let expired = identity(world.ca(), &node, Duration::ZERO);
                store.save_edge(&expired).unwrap();
            }
            LostCa => store.save_edge(&identity(lost, &node, LIFE)).unwrap(),
            Valid | Removed | Revoked | Renamed | Damaged => {}
        }
        let joins_as = if state == Renamed {
            format!("{name}-new")
        } else {
            name
        };
        if state == Renamed {
            edge.rename(&joins_as);
        }
        let token = match action {
            Fresh | RejoinFresh | LeaveFresh => Some(world.token(&joins_as, LIFE)),
            Outdated => Some(world.token(&joins_as, Duration::ZERO)),
            // An old token of the lost CA exists, too: it is from the CA that the node trusts, unlike the gateway's.
            OtherCa if state == LostCa => {
                let folder = tempfile::tempdir().unwrap();
                let book = Store::open(folder.path(), OpenMode::Create).unwrap();
                book.save_ca(lost).unwrap();
                let tokens = book.tokens().unwrap();
                Some(tokens.create(&node, LIFE, <_>::default()).unwrap())
            }
            OtherCa => Some(other.token(&joins_as, LIFE)),
            Spent | RejoinSpent | LeaveSpent => None,
        };
        let before = (state != Nothing).then(|| certificate(&store)).flatten();
        if state == Damaged {
            std::fs::write(edge.folder().join("edge.json"), "{").unwrap();
        }
        Self {
            edge,
            state,
            action,
            outcome,
            before,
            token,
        }
    }

    /// Action of the operator on the node.
    fn act(&mut self) {
        if let Some(token) = &self.token {
            self.edge.take_token(token);
        }
        match self.action {
            RejoinFresh | RejoinSpent => self.edge.rejoin(),
            LeaveFresh | LeaveSpent => {
                let kept = opened(&self.edge).leave_edge().unwrap();
                assert!(kept.unwrap().exists());
            }
            Spent | Fresh | Outdated | OtherCa => {}
        }
    }

    async fn run(&mut self, world: &World) {
        let what = format!("{:?} {:?} {:?}", self.state, self.action, self.outcome);
        let started = self.edge.start().await;
        let message = match (self.outcome, started) {
            (Ends(words), Err(error)) => {
                assert!(error.to_string().contains(words), "{what}: {error}");
                return;
            }
            (Ends(_), Ok(())) => panic!("{what}: it runs"),
            (_, Err(error)) => panic!("{what}: {error}"),
            (Refused(words), Ok(())) => Some(words),
            (Keeps | Replaces, Ok(())) => None,
        };
        let store = opened(&self.edge);
        until(&what, async || {
            let status = self.edge.status();
            let trouble = status.trouble.map(|trouble| trouble.what);
            match message {
                Some(words) => trouble.is_some_and(|trouble| {
                    trouble.contains(words) && trouble.contains(self.helps())
                }),
                None if matches!(self.outcome, Replaces) => {
                    status.state == "connected" && certificate(&store) != self.before
                }
                None => status.state == "connected",
            }
        })
        .await;
        let kept = aside(&self.edge);
        if matches!(self.outcome, Replaces) {
            assert_eq!(kept.len(), usize::from(self.before.is_some()), "{what}");
            let trusted = store.edge().unwrap().unwrap().fingerprints();
            assert_eq!(trusted, world.ca().fingerprints(), "{what}");
        } else {
            assert_eq!(certificate(&store), self.before, "{what}");
            assert!(kept.is_empty(), "{what}");
            self.assert_not_spent(world, &what);
        }
        self.edge.kill().await;
    }

    /// The command that helps.
    fn helps(&self) -> &'static str {
        if self.state == Revoked {
            "causeway node allow"
        } else {
            CREATE
        }
    }

    fn assert_not_spent(&self, world: &World, what: &str) {
        let Some(token) = &self.token else { return };
        let tokens = world.store().tokens().unwrap().all().unwrap();
        let record = tokens.into_iter().find(|record| record.id == token.id);
        assert!(
            record.is_none_or(|record| record.used.is_empty()),
            "{what}: the token is spent"
        );
    }
}

#[tokio::test]
async fn each_state_of_an_identity_and_each_action_has_its_outcome() {
    let (mut world, other) = (World::start().await, World::start().await);
    let lost = Ca::create(&TrustDomain::parse("world.test").unwrap()).unwrap();
    let mut rows = Vec::new();
    for (number, row) in TABLE.iter().enumerate() {
        rows.push(RejoinCase::new(&world, (&lost, &other), number, *row).await);
    }
    world.stop_gateway().await;
    let nodes = world.store().nodes();
    for (number, (state, ..)) in TABLE.iter().enumerate() {
        let node = NodeName::parse(&format!("edge-{number}")).unwrap();
        let revocation = Revocation {
            at: 1,
            reason: "stolen".to_owned(),
            other: causeway_certs::OtherFields::new(),
        };
        match state {
            Removed | Nothing => assert!(nodes.remove(&node).unwrap()),
            Revoked => assert!(nodes.set_revoked(&node, Some(revocation)).unwrap()),
            Valid | Expired | LostCa | Renamed | Damaged => {}
        }
    }
    world.start_gateway().await;
    let end = SystemTime::now() + Duration::from_secs(1);
    until("certificates without lifetime have expired", async || {
        SystemTime::now() > end
    })
    .await;
    rows.iter_mut().for_each(RejoinCase::act);
    // At the same time, because each refused edge waits whether another gateway accepts it. First those that join: after some
    // refused tokens the gateway lets their address wait. The edges that end at once come last, because most tokens are refused there.
    let (ending, running) = rows
        .iter_mut()
        .partition::<Vec<_>, _>(|row| matches!(row.outcome, Ends(_)));
    let (refused, accepted) = running
        .into_iter()
        .partition(|row| matches!(row.outcome, Refused(_)));
    for rows in [accepted, refused, ending] {
        join_all(rows.into_iter().map(|row| row.run(&world))).await;
    }
}

#[tokio::test]
async fn a_token_that_is_put_into_its_file_is_used_without_a_restart() {
    let world = World::start().await;
    let path = world.folder().join("token");
    let file = path.clone();
    let plan = world.edge("edge-1").config(|config| {
        config.join_file = Some(file);
        short_dials(config);
        config.backoff.refused_max = Duration::from_millis(100);
    });
    let mut edge = plan.join().await;
    edge.stop().await;
    edge.forget_token();
    let lost = Ca::create(&TrustDomain::parse("world.test").unwrap()).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let store = opened(&edge);
    store.save_edge(&identity(&lost, &node, LIFE)).unwrap();
    edge.start().await.unwrap();
    until("the edge logs what it needs", async || {
        let trouble = edge.status().trouble;
        trouble.is_some_and(|trouble| trouble.what.contains(CREATE))
    })
    .await;
    std::fs::write(&path, world.token("edge-1", LIFE).text().expose()).unwrap();
    until("the edge is connected", async || {
        edge.status().state == "connected"
    })
    .await;
    let trusted = store.edge().unwrap().unwrap().fingerprints();
    assert_eq!(trusted, world.ca().fingerprints());
}

#[tokio::test]
async fn an_identity_accepted_by_one_gateway_is_kept_for_others() {
    let (world, other) = (World::start().await, World::start().await);
    let elsewhere = other.tunnel().to_string();
    let plan = world.edge("edge-1").config(|config| {
        config.gateways.push(elsewhere.clone());
        config.tunnels.gateways = TunnelMode::Every;
        short_dials(config);
        config.backoff.refused_max = Duration::from_millis(100);
    });
    let mut edge = plan.join().await;
    edge.stop().await;
    let before = certificate(&opened(&edge));
    let token = other.token("edge-1", LIFE);
    edge.take_token(&token);
    edge.start().await.unwrap();
    until("one gateway accepts the edge, one is refused", async || {
        let status = edge.status();
        status.state == "connected" && status.trouble.is_some()
    })
    .await;
    // Longer than the time limit of a dial.
    let last = edge.status().started + 5_000;
    until("the other gateway was dialled again", async || {
        edge.status()
            .trouble
            .is_some_and(|trouble| trouble.at > last)
    })
    .await;
    assert_eq!(certificate(&opened(&edge)), before);
    let tokens = other.store().tokens().unwrap().all().unwrap();
    assert!(tokens.iter().all(|token| token.used.is_empty()));
}

#[tokio::test]
async fn a_leaving_edge_sets_its_identity_aside_and_joins_again() {
    let app = App::saying("it").await;
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", app.port()).await;
    let data = site.edge_data("edge-1");
    let leave = || causeway("edge leave").flag("--data-dir", &data).run();
    leave().await.failed(&["stop it first"]);
    edge.kill().await;
    let before = std::fs::read(data.join("edge.json")).unwrap();
    let message = leave().await.ok().stdout;
    let kept = message.lines().next().unwrap().rsplit(' ').next().unwrap();
    assert_eq!(std::fs::read(kept).unwrap(), before);
    assert!(message.contains("causeway token create"), "{message}");
    leave().await.failed(&["nothing to give up"]);
    let edge = site.edge("edge-1", app.port());
    edge.run().await.failed(&["causeway token create"]);
    let token = site.token("--node edge-1").await;
    let edge = site.edge("edge-1", app.port()).flag("--join", &token);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    // The directory is free only when the process has ended.
    edge.kill().await;

    // A node that has joined uses a new token only if its owner orders it, and once.
    let token = site.token("--node edge-1").await;
    let joining = || site.edge("edge-1", app.port()).flag("--join", &token);
    let mut edge = joining().start();
    edge.wait_for_line("tunnel registered").await;
    edge.kill().await;
    let list = causeway("token list -o json").flag("--data-dir", site.data());
    let listed: serde_json::Value = serde_json::from_str(&list.run().await.ok().stdout).unwrap();
    let id = token.split('.').nth(1).unwrap();
    let unused = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["id"] == id);
    assert_eq!(unused.unwrap()["used"], serde_json::json!([]));
    for message in ["identity is replaced", "was already used for this identity"] {
        let mut edge = joining().args(["--rejoin"]).start();
        edge.wait_for_line(message).await;
        edge.kill().await;
    }
}
