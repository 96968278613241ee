//! Members of this node's pool, as a gateway announced them last. They are saved on the disk for a start without any gateway.
//!
//! Gateways that are not connected to each other may name different leaders. The announcement that counts is that of the
//! gateway process whose random instance name sorts first. Each edge with tunnels to all gateways selects the same one, so that a pool has one leader. Two nodes
//! that follow each other would otherwise switch back and forth for ever. Without any gateway the last announcement stays
//! valid.

use causeway_certs::{NodeName, Store, verify::IsMemberFn};
use causeway_config::host_port;
use causeway_tunnel::control_stream::NodePoolMembers;
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::sync::watch;
use tracing::{info, warn};

/// Name of the file with the saved members in the data directory.
const MEMBERS_FILE: &str = "members";

/// Members of this node's pool. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Membership(Arc<MembershipState>);

#[derive(Debug)]
struct MembershipState {
    current: watch::Sender<NodePoolMembers>,
    /// Last announcement of each tunnel's gateway, ordered so that the one that counts is first.
    announcements: Mutex<BTreeMap<AnnouncerKey, NodePoolMembers>>,
    next_tunnel: AtomicU64,
}

/// Gateway process, and its tunnels with the newest first. An older tunnel that only waits for its streams receives no more
/// announcements.
type AnnouncerKey = (String, Reverse<u64>);

/// Handle for the announcements of one tunnel's gateway, until the gateway is gone or drains.
pub(crate) struct MembershipUpdater {
    membership: Membership,
    key: AnnouncerKey,
}

impl MembershipUpdater {
    /// Takes over the members that the gateway announces.
    pub(crate) fn update(&self, mut members: NodePoolMembers) {
        let count = members.members.len();
        if count > NodePoolMembers::MAX_MEMBERS {
            let most = NodePoolMembers::MAX_MEMBERS;
            warn!(
                count,
                most,
                "a gateway announced more pool members than allowed; keeping the previous list"
            );
            return;
        }
        for member in &mut members.members {
            member.at.retain(|at| host_port(at).is_ok());
        }
        let mut announcements = self.membership.announcements();
        announcements.insert(self.key.clone(), members);
        self.membership.apply(&announcements);
    }
}

impl Drop for MembershipUpdater {
    fn drop(&mut self) {
        let mut announcements = self.membership.announcements();
        announcements.remove(&self.key);
        self.membership.apply(&announcements);
    }
}

impl Membership {
    /// Loads the last announcement of the previous run.
    pub(super) fn load(store: &Store) -> Self {
        let saved = store.read_runtime(MEMBERS_FILE).unwrap_or_else(|error| {
            warn!(%error, "cannot read the saved pool members; they are unknown until a gateway announces them");
            None
        });
        let members = saved.and_then(|text| serde_json::from_str(&text).ok());
        Self(Arc::new(MembershipState {
            current: watch::Sender::new(members.unwrap_or_default()),
            announcements: Mutex::default(),
            next_tunnel: AtomicU64::default(),
        }))
    }

    /// Returns the handle for the announcements of a gateway over a new tunnel.
    pub(crate) fn updater(&self, gateway: &str) -> MembershipUpdater {
        let tunnel = self.0.next_tunnel.fetch_add(1, Relaxed);
        MembershipUpdater {
            membership: self.clone(),
            key: (gateway.to_owned(), Reverse(tunnel)),
        }
    }

    fn announcements(&self) -> MutexGuard<'_, BTreeMap<AnnouncerKey, NodePoolMembers>> {
        self.0
            .announcements
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the announcement that counts the current one. Without any announcement the current one stays.
    fn apply(&self, announcements: &BTreeMap<AnnouncerKey, NodePoolMembers>) {
        let Some(members) = announcements.values().next() else {
            return;
        };
        self.0.current.send_if_modified(|now| {
            let differs = *now != *members;
            if differs {
                info!(pool = ?members.pool, leader = ?members.leader, members = members.members.len(), "the gateway announced the pool members of this node");
                now.clone_from(members);
            }
            differs
        });
    }

    /// Returns the current members.
    pub(super) fn current(&self) -> NodePoolMembers {
        self.0.current.borrow().clone()
    }

    /// Returns a receiver that is notified of each change of the members.
    pub(super) fn changes(&self) -> watch::Receiver<NodePoolMembers> {
        self.0.current.subscribe()
    }

    /// Returns a function that checks whether a node is currently a member.
    pub(super) fn is_member(&self) -> IsMemberFn {
        let membership = self.clone();
        Arc::new(move |node: &NodeName| {
            let current = membership.0.current.borrow();
            let mut members = current.members.iter();
            current.pool.is_some() && members.any(|member| member.node == node.as_str())
        })
    }

    /// Saves the members on the disk. Blocks.
    pub(super) fn save(&self, store: &Store) {
        let text = serde_json::to_string(&self.current()).unwrap_or_default();
        if let Err(error) = store.write_runtime(MEMBERS_FILE, &text) {
            warn!(%error, "cannot save the pool members; they are lost at the next restart");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::store::OpenMode;
    use causeway_tunnel::control_stream::NodePoolMember;

    #[test]
    fn members_survive_a_restart_without_undialable_addresses() {
        let data = tempfile::TempDir::new().unwrap();
        let store = Store::open(data.path(), OpenMode::Create).unwrap();
        let told = Membership::load(&store);
        assert_eq!(told.current(), NodePoolMembers::default());
        let member = |node: &str, at: &[&str]| NodePoolMember {
            node: node.into(),
            at: at.iter().map(ToString::to_string).collect(),
        };
        let all = |members| NodePoolMembers {
            pool: Some("north".into()),
            leader: Some("a".into()),
            members,
        };
        let gateway = told.updater("gateway");
        gateway.update(all(vec![
            member("a", &["10.1.0.5:10271", "10.1.0.5"]),
            member("b", &[]),
        ]));
        gateway.update(all(vec![
            member("c", &[]);
            NodePoolMembers::MAX_MEMBERS + 1
        ]));
        told.save(&store);
        let again = Membership::load(&store);
        assert_eq!(
            again.current().members,
            [member("a", &["10.1.0.5:10271"]), member("b", &[])]
        );
        let is_member = again.is_member();
        let known = ["a", "b", "c"].map(|node| is_member(&NodeName::parse(node).unwrap()));
        assert_eq!(known, [true, true, false]);
        again.updater("gateway").update(NodePoolMembers::default());
        assert!(!is_member(&NodeName::parse("a").unwrap()));
    }

    #[test]
    fn membership_of_one_gateway_applies_until_it_is_lost() {
        let data = tempfile::TempDir::new().unwrap();
        let store = Store::open(data.path(), OpenMode::Create).unwrap();
        let led = |leader: &str| NodePoolMembers {
            pool: Some("north".into()),
            leader: Some(leader.into()),
            members: Vec::new(),
        };
        // Independent of the order of arrival.
        for order in [["1", "2"], ["2", "1"]] {
            let told = Membership::load(&store);
            let leader = || told.current().leader.unwrap_or_default();
            let [mut one, mut two] = order.map(|gateway| {
                let voice = told.updater(gateway);
                voice.update(led(&format!("by-{gateway}")));
                Some(voice)
            });
            assert_eq!(leader(), "by-1");
            if order[0] == "2" {
                std::mem::swap(&mut one, &mut two);
            }
            // A tunnel replaces another one: its announcement counts, and the old tunnel's does not.
            let newer = told.updater("1");
            assert_eq!(leader(), "by-1");
            newer.update(led("newer-by-1"));
            one.as_ref().unwrap().update(led("late"));
            two.as_ref().unwrap().update(led("newer-by-2"));
            assert_eq!(leader(), "newer-by-1");
            drop(one);
            assert_eq!(leader(), "newer-by-1");
            drop(newer);
            assert_eq!(leader(), "newer-by-2");
            drop(two);
            assert_eq!(leader(), "newer-by-2", "no other announcement exists");
        }
    }
}
