//! Model of the tunnels of one node: a stream ends in the normal way, by its tunnel's loss, or by revocation.
//!
//! Edges follow the rules of real ones in random order. They dial further tunnels, renew, leave before or after the next dial,
//! lose connections, and are replaced by new processes. Each failure prints its seed.

use super::*;
use crate::state::TunnelId;
use causeway_tunnel::control_stream::EdgeHello;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const SEEDS: u64 = 8;
const STEPS: usize = 60;

/// A tunnel, from the edge's side.
struct Session {
    id: TunnelId,
    edge: FakeEdge,
    process: usize,
    slot: u32,
    leaves: bool,
}

/// A client's stream that has no answer yet.
struct Stream {
    on: TunnelId,
    opened: OpenStream,
    asked: Box<StreamRequest>,
}

struct Model {
    world: World,
    identity: EdgeIdentity,
    random: StdRng,
    process: usize,
    /// Newest tunnel of each slot of the newest process.
    newest: [Option<TunnelId>; 2],
    sessions: Vec<Session>,
    streams: Vec<Stream>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let world = World::start();
        let record = NodeRecord::name_only(&name("edge-1"), 0);
        world.store.nodes().put(record).unwrap();
        Self {
            identity: world.enrolled("edge-1"),
            world,
            random: StdRng::seed_from_u64(seed),
            process: 0,
            newest: [None; 2],
            sessions: Vec::new(),
            streams: Vec::new(),
        }
    }

    /// Opens a tunnel in a slot of the newest process. Like a real edge, the process sends nothing about tunnels before the
    /// newest one of that slot.
    async fn dial(&mut self, slot: u32) {
        let process = self.process;
        let of_slot = |session: &Session| session.process == process && session.slot == slot;
        let newest = self.newest[slot as usize];
        let mut sessions = self.sessions.iter_mut();
        let newest = sessions.find(|session| Some(session.id) == newest);
        let says = EdgeHello {
            takes_over: newest.is_some_and(|newest| !newest.edge.has_ended()),
            ..welcome(&process.to_string(), slot)
        };
        let (edge, heard) = self.world.says(&self.identity, says).await;
        assert_eq!(heard, GatewayMessage::Registered);
        for session in &mut self.sessions {
            session.leaves |= of_slot(session) || session.process != process;
        }
        let registered = self.world.registry.node_tunnels(&name("edge-1")).0;
        let id = registered.last().unwrap().id;
        self.newest[slot as usize] = Some(id);
        self.sessions.push(Session {
            id,
            edge,
            process,
            slot,
            leaves: false,
        });
    }

    /// Makes one of the open tunnels leave.
    async fn leave(&mut self, nth: usize) {
        let session = &mut self.sessions[nth];
        session.leaves = true;
        let leave = EdgeMessage::Leave {
            detail: "no bulk any more".to_owned(),
            until_idle: true,
            serves: false,
        };
        // A tunnel that the gateway has closed in the meantime sends nothing.
        let _ = session.edge.control.send(&leave).await;
    }

    /// Breaks a connection together with its streams. The gateway may not have noticed the loss when the edge reconnects.
    async fn lose(&mut self, nth: usize) {
        let lost = self.sessions.remove(nth).id;
        self.streams.retain(|stream| stream.on != lost);
        if self.random.random() {
            let gone = |world: &World| {
                let registered = world.registry.node_tunnels(&name("edge-1")).0;
                registered.iter().all(|edge| edge.id != lost)
            };
            self.world.until(gone).await;
        }
    }

    /// Opens a client's request.
    async fn open(&mut self) {
        let picked = self.world.registry.select_tunnel(&name("edge-1"));
        let stands = self.sessions.iter().any(|session| !session.leaves);
        assert!(picked.is_ok() || !stands, "{picked:?}");
        let Ok(picked) = picked else { return };
        // The gateway may not know yet that this tunnel is lost.
        let at = |session: &&mut Session| session.id == picked.id;
        let Some(session) = self.sessions.iter_mut().find(at) else {
            return;
        };
        let (head, target) = (Request::new(()), Target::new("edge-1", 9100));
        let opened = picked
            .tunnel
            .open(head, &StreamKind::Request, &target, true);
        let opened = opened.await.unwrap();
        let asked = timeout(LONG, session.edge.streams.recv()).await.unwrap();
        self.streams.push(Stream {
            on: picked.id,
            opened,
            asked: asked.unwrap(),
        });
    }

    async fn step(&mut self) {
        let standing = |sessions: &[Session]| {
            let all = sessions.iter().enumerate();
            let standing = all.filter(|(_, session)| !session.leaves);
            standing.map(|(nth, _)| nth).collect::<Vec<_>>()
        };
        let stands = standing(&self.sessions);
        match self.random.random_range(0..20) {
            // Opens a first tunnel or a bulk tunnel, or renews one of them.
            0..=3 => {
                let slot = self.random.random_range(0..2);
                self.dial(slot).await;
                // The edge announces that older tunnels leave once the new one is registered.
                let before = &mut self.sessions[..stands.len()];
                if before.iter().any(|session| session.leaves) && self.random.random() {
                    let nth = self.random.random_range(0..stands.len());
                    if self.sessions[nth].leaves {
                        self.leave(nth).await;
                    }
                }
            }
            // Ends a bulk tunnel. The next dial of its slot may overtake the announcement or come long after it.
            4..=5 if stands.len() > 1 => {
                let nth = stands[self.random.random_range(0..stands.len())];
                self.leave(nth).await;
                if self.random.random() {
                    let slot = self.sessions[nth].slot;
                    self.dial(slot).await;
                }
            }
            6 if !self.sessions.is_empty() => {
                let nth = self.random.random_range(0..self.sessions.len());
                self.lose(nth).await;
            }
            7 => {
                self.process += 1;
                self.newest = [None; 2];
                self.dial(0).await;
            }
            8..=10 if !self.streams.is_empty() => {
                let nth = self.random.random_range(0..self.streams.len());
                let Stream { opened, asked, .. } = self.streams.swap_remove(nth);
                answered((opened, asked)).await;
            }
            _ => self.open().await,
        }
        for stream in &mut self.streams {
            let ended = (&mut stream.opened.response).now_or_never();
            assert!(ended.is_none(), "{:?} ended: {ended:?}", stream.on);
        }
    }

    async fn run(mut self) {
        self.dial(0).await;
        for _ in 0..STEPS {
            self.step().await;
        }
        for stream in self.streams.split_off(self.streams.len() / 2) {
            answered((stream.opened, stream.asked)).await;
        }
        let nodes = self.world.store.nodes();
        nodes.remove(&name("edge-1")).unwrap();
        self.world.roll().refresh().await.unwrap();
        for stream in self.streams {
            let ended = timeout(LONG, stream.opened.response).await.unwrap();
            assert!(ended.is_err(), "a revoked edge answers");
        }
    }
}

/// Prints the seed of a run that failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {}", self.0);
        }
    }
}

#[tokio::test]
async fn a_stream_ends_by_its_own_ends_its_tunnels_loss_or_revocation() {
    for seed in 0..SEEDS {
        let _seed = Seed(seed);
        Model::new(seed).run().await;
    }
}
