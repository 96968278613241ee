//! Choice of the source: a pure function of the known facts, and the choice of the freshest of several views.
//!
//! 1. The leader reads from a gateway. So does a node that has no pool, is no member of its pool, or has no leader to read
//!    from.
//! 2. The other nodes read from the leader. If the leader does not answer, or has lost its own source, they read from a
//!    gateway.
//! 3. If no gateway is reachable either, they read from any member of the last announced list that has a fresh view.
//!
//! Only a node that reads from a gateway itself has a fresh view for other members (`local_server` marks the others).
//! Otherwise two nodes could read from each other, and both would appear connected but receive no changes.
//!
//! Gateways name the leader: the nodes do not elect one.

use causeway_tunnel::control_stream::{NodePoolMember, NodePoolMembers};

/// Facts that determine the source.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectionInput<'a> {
    /// Name of this node.
    pub(super) node: &'a str,
    /// Members of the pool, as last announced.
    pub(super) members: &'a NodePoolMembers,
    /// Whether the leader does not answer, or has no fresh view.
    pub(super) has_leader_failed: bool,
    /// Whether a gateway is reachable.
    pub(super) is_gateway_reachable: bool,
}

/// Source to read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SourceChoice {
    /// Any gateway that answers.
    Gateway,
    /// This member, which is the leader.
    Leader(NodePoolMember),
    /// The member of these that has the freshest view. The leader comes first.
    Freshest(Vec<NodePoolMember>),
}

/// Chooses the source from the current membership and health.
pub(super) fn choose_source(input: SelectionInput<'_>) -> SourceChoice {
    let mut candidates = readable_members(input);
    let leader = candidates
        .first()
        .filter(|first| is_leader(input.members, first));
    match leader {
        Some(leader) if !input.has_leader_failed => SourceChoice::Leader(leader.clone()),
        _ if input.is_gateway_reachable || candidates.is_empty() => SourceChoice::Gateway,
        _ => SourceChoice::Freshest(std::mem::take(&mut candidates)),
    }
}

/// Returns the members that this node can read from, the leader first. A node that is not a member can read from none,
/// because members do not admit it.
fn readable_members(input: SelectionInput<'_>) -> Vec<NodePoolMember> {
    let is_member = input
        .members
        .members
        .iter()
        .any(|one| one.node == input.node);
    if input.members.pool.is_none() || !is_member {
        return Vec::new();
    }
    let members = input.members.members.iter();
    let mut candidates: Vec<_> = members
        .filter(|member| member.node != input.node && !member.at.is_empty())
        .cloned()
        .collect();
    candidates.sort_by_key(|member| !is_leader(input.members, member));
    candidates
}

fn is_leader(members: &NodePoolMembers, member: &NodePoolMember) -> bool {
    members.leader.as_ref() == Some(&member.node)
}

/// Freshness of the view of a member that answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Freshness {
    /// Number of seconds for which the member's source has been lost, or `None` while the view is fresh.
    pub(super) age: Option<u64>,
    /// Version of the member's newest state.
    pub(super) version: u64,
}

impl Freshness {
    pub(super) fn is_fresh(self) -> bool {
        self.age.is_none()
    }

    /// Returns the sort key: the youngest view is the best, and of several views of the same age the one with the highest
    /// version.
    fn rank(self) -> (u64, std::cmp::Reverse<u64>) {
        (self.age.unwrap_or(0), std::cmp::Reverse(self.version))
    }
}

/// Returns the member to read from, of those that answered. If no view is fresh, a node keeps its own view. It takes a stale
/// view only if it has none.
pub(super) fn freshest_member<T>(responses: Vec<(T, Freshness)>, has_a_view: bool) -> Option<T> {
    let usable = responses
        .into_iter()
        .filter(|(_, view)| view.is_fresh() || !has_a_view);
    // Among equal candidates the first one wins, which is the leader if it responded.
    usable
        .min_by_key(|(_, view)| view.rank())
        .map(|(who, _)| who)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(node: &str) -> NodePoolMember {
        NodePoolMember {
            node: node.into(),
            at: vec![format!("{node}:10271")],
        }
    }

    fn told(leader: Option<&str>) -> NodePoolMembers {
        NodePoolMembers {
            pool: Some("north".into()),
            leader: leader.map(Into::into),
            members: ["a", "b", "c"].map(member).into(),
        }
    }

    #[test]
    fn the_leader_reads_from_a_gateway_and_followers_from_it() {
        let (gateway, leader) = (SourceChoice::Gateway, |node| {
            SourceChoice::Leader(member(node))
        });
        let freshest = |nodes: [&str; 2]| SourceChoice::Freshest(nodes.map(member).into());
        for (own, named, leader_fails, at_gateway, expected) in [
            ("a", Some("a"), false, true, gateway.clone()),
            ("b", Some("a"), false, true, leader("a")),
            ("b", Some("a"), false, false, leader("a")),
            ("b", Some("a"), true, true, gateway.clone()),
            // Without a gateway: any member with a fresh view, the leader first.
            ("b", Some("c"), true, false, freshest(["c", "a"])),
            ("a", Some("a"), false, false, freshest(["b", "c"])),
            ("b", None, false, true, gateway.clone()),
            ("b", None, false, false, freshest(["a", "c"])),
            // A leader whose address is unknown.
            ("b", Some("d"), false, true, gateway.clone()),
        ] {
            let facts = SelectionInput {
                node: own,
                members: &told(named),
                has_leader_failed: leader_fails,
                is_gateway_reachable: at_gateway,
            };
            assert_eq!(choose_source(facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn a_node_without_pool_or_neighbours_reads_from_a_gateway() {
        let none = NodePoolMembers {
            pool: None,
            ..told(Some("a"))
        };
        let mut alone = told(Some("a"));
        alone.members.truncate(1);
        let mut silent = told(Some("b"));
        silent.members[1].at.clear();
        silent.members[2].at.clear();
        let mut elsewhere = told(Some("b"));
        elsewhere.members.remove(0);
        for told in [NodePoolMembers::default(), none, alone, silent, elsewhere] {
            for gateway in [true, false] {
                let facts = SelectionInput {
                    node: "a",
                    members: &told,
                    has_leader_failed: false,
                    is_gateway_reachable: gateway,
                };
                assert_eq!(choose_source(facts), SourceChoice::Gateway, "{facts:?}");
            }
        }
    }

    #[test]
    fn the_freshest_source_wins_and_a_view_never_goes_back() {
        let view = |age, version| Freshness { age, version };
        let of = |views: &[Freshness], has| {
            let answered = views.iter().copied().enumerate().collect();
            freshest_member(answered, has)
        };
        let both = [true, false];
        for has in both {
            assert_eq!(of(&[view(Some(11), 9), view(None, 7)], has), Some(1));
            assert_eq!(of(&[view(None, 7), view(None, 9)], has), Some(1));
            assert_eq!(of(&[view(None, 7), view(None, 7)], has), Some(0));
            assert_eq!(of(&[], has), None);
        }
        let stale = [view(Some(60), 9), view(Some(30), 7), view(Some(30), 8)];
        assert_eq!(both.map(|has| of(&stale, has)), [None, Some(2)]);
    }
}
