//! Message that announces a pool's members to an edge. It contains as many members as fit.

use super::connected_reader::ConnectedReader;
use causeway_certs::NodeName;
use causeway_tunnel::{
    control_stream::{NodePoolMember, NodePoolMembers},
    wire::MAX_MESSAGE,
};

/// Bytes that a message needs beside names and addresses, per member and for the whole message.
const FIELD_OVERHEAD: usize = 32;

/// Returns the announcement to a pool. The leader comes first, so that it always fits. The other members follow by name, and then
/// members that are not connected.
pub(super) fn pool_members(
    pool: Option<String>,
    leader: Option<&NodeName>,
    (readers, disconnected): (&[&ConnectedReader], &[NodePoolMember]),
) -> NodePoolMembers {
    if pool.is_none() {
        return NodePoolMembers::default();
    }
    let is_leader = |here: &&&ConnectedReader| Some(&here.node) == leader;
    let serving_readers = || readers.iter().filter(|here| here.serves_members());
    let others = serving_readers().filter(|here| !is_leader(here));
    let ordered = serving_readers().filter(is_leader).chain(others);
    let mut remaining = members_budget();
    let ordered = ordered
        .map(|here| pool_member(here))
        .chain(disconnected.iter().cloned());
    let fitting_members = ordered.take_while(|member| {
        let size = max_member_size(member);
        let fits = size <= remaining;
        remaining = remaining.saturating_sub(size);
        fits
    });
    NodePoolMembers {
        members: fitting_members.take(NodePoolMembers::MAX_MEMBERS).collect(),
        leader: leader.map(ToString::to_string),
        pool,
    }
}

/// Returns the announcement, extended by the receiving edge itself if that edge is a member.
pub(super) fn with_own_member(
    members: &NodePoolMembers,
    reader: &ConnectedReader,
) -> NodePoolMembers {
    let mut announcement = members.clone();
    let is_listed = announcement
        .members
        .iter()
        .any(|one| one.node == reader.node.as_str());
    if members.pool.is_none() || is_listed || !reader.serves_members() {
        return announcement;
    }
    let member = pool_member(reader);
    let mut remaining = members_budget();
    for one in &announcement.members {
        remaining = remaining.saturating_sub(max_member_size(one));
    }
    while announcement.members.len() >= NodePoolMembers::MAX_MEMBERS
        || remaining < max_member_size(&member)
    {
        match announcement.members.pop() {
            Some(last) => remaining += max_member_size(&last),
            None => return announcement,
        }
    }
    announcement.members.push(member);
    announcement
}

fn pool_member(here: &ConnectedReader) -> NodePoolMember {
    NodePoolMember {
        node: here.node.to_string(),
        at: here.addresses.clone(),
    }
}

/// Returns the maximum number of bytes that a member needs in a message.
fn max_member_size(member: &NodePoolMember) -> usize {
    let at = member.at.iter().map(|at| at.len() + FIELD_OVERHEAD);
    member.node.len() + FIELD_OVERHEAD + at.sum::<usize>()
}

/// Returns the number of bytes for members in a message. The remaining bytes are for the names of the pool and the leader.
fn members_budget() -> usize {
    MAX_MESSAGE - MAX_MESSAGE / 8
}
