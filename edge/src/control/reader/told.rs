//! Who the members of this node's pool are: as a gateway told last, and kept on the disk for a start without any.

use causeway_certs::{NodeName, Store, verify::IsMember};
use causeway_config::host_port;
use causeway_tunnel::hello::Members;
use std::sync::Arc;
use tokio::sync::watch;
use tracing::{info, warn};

/// As what it is kept in the data directory.
const KEPT: &str = "members";

/// Who the members are. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Told(Arc<watch::Sender<Members>>);

impl Told {
    /// What was told before the last end.
    pub(super) fn load(store: &Store) -> Self {
        let kept = store.read_runtime(KEPT).unwrap_or_else(|error| {
            warn!(%error, "who reads with this node is not known until a gateway says it");
            None
        });
        let read = kept.and_then(|text| serde_json::from_str(&text).ok());
        Self(Arc::new(watch::Sender::new(read.unwrap_or_default())))
    }

    /// A gateway tells it.
    pub(super) fn hear(&self, mut members: Members) {
        let count = members.members.len();
        if count > Members::MOST {
            let most = Members::MOST;
            warn!(
                count,
                most, "a gateway told more members than a pool has; those before stay"
            );
            return;
        }
        for member in &mut members.members {
            member.at.retain(|at| host_port(at).is_ok());
        }
        self.0.send_if_modified(|now| {
            let differs = *now != members;
            if differs {
                info!(pool = ?members.pool, leader = ?members.leader, members = count, "the gateway told with whom this node reads");
                *now = members;
            }
            differs
        });
    }

    /// As it is now.
    pub(super) fn now(&self) -> Members {
        self.0.borrow().clone()
    }

    /// Whenever it is another.
    pub(super) fn changes(&self) -> watch::Receiver<Members> {
        self.0.subscribe()
    }

    /// Says whether a node is a member now.
    pub(super) fn is_member(&self) -> IsMember {
        let told = self.clone();
        Arc::new(move |node: &NodeName| {
            let now = told.0.borrow();
            let mut members = now.members.iter();
            now.pool.is_some() && members.any(|member| member.node == node.as_str())
        })
    }

    /// Keeps it on the disk. Blocks.
    pub(super) fn keep(&self, store: &Store) {
        let text = serde_json::to_string(&self.now()).unwrap_or_default();
        if let Err(error) = store.write_runtime(KEPT, &text) {
            warn!(%error, "who reads with this node could not be stored; it is known until the next restart");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::store::Access;
    use causeway_tunnel::hello::MemberAt;

    #[test]
    fn members_are_known_after_a_restart_and_what_cannot_be_dialled_is_not_among_them() {
        let data = tempfile::TempDir::new().unwrap();
        let store = Store::open(data.path(), Access::Create).unwrap();
        let told = Told::load(&store);
        assert_eq!(told.now(), Members::default());
        let member = |node: &str, at: &[&str]| MemberAt {
            node: node.into(),
            at: at.iter().map(ToString::to_string).collect(),
        };
        let all = |members| Members {
            pool: Some("north".into()),
            leader: Some("a".into()),
            members,
        };
        told.hear(all(vec![
            member("a", &["10.1.0.5:10271", "10.1.0.5"]),
            member("b", &[]),
        ]));
        told.hear(all(vec![member("c", &[]); Members::MOST + 1]));
        told.keep(&store);
        let again = Told::load(&store);
        assert_eq!(
            again.now().members,
            [member("a", &["10.1.0.5:10271"]), member("b", &[])]
        );
        let is_member = again.is_member();
        let known = ["a", "b", "c"].map(|node| is_member(&NodeName::parse(node).unwrap()));
        assert_eq!(known, [true, true, false]);
        again.hear(Members::default());
        assert!(!is_member(&NodeName::parse("a").unwrap()));
    }
}
