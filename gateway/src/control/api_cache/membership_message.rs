//! Message that announces a pool's members to an edge: as many members as fit.

use super::connected_reader::ConnectedReader;
use causeway_certs::NodeName;
use causeway_tunnel::{
    control_stream::{NodePoolMember, NodePoolMembers},
    wire::MAX_MESSAGE,
};

/// Bytes that a message needs beside names and addresses, for each member and in total.
const AROUND: usize = 32;

/// Returns the announcement to a pool: the leader first, so that it fits however many members there are, then the others by
/// name, and then members that are not connected.
pub(super) fn members(
    pool: Option<String>,
    leader: Option<&NodeName>,
    (own, absent): (&[&ConnectedReader], &[NodePoolMember]),
) -> NodePoolMembers {
    if pool.is_none() {
        return NodePoolMembers::default();
    }
    let leads = |here: &&&ConnectedReader| Some(&here.node) == leader;
    let serving = || own.iter().filter(|here| here.serves());
    let others = serving().filter(|here| !leads(here));
    let ordered = serving().filter(leads).chain(others);
    let mut room = room();
    let ordered = ordered.map(|here| at(here)).chain(absent.iter().cloned());
    let fitting = ordered.take_while(|member| {
        let size = size(member);
        let fits = size <= room;
        room = room.saturating_sub(size);
        fits
    });
    NodePoolMembers {
        members: fitting.take(NodePoolMembers::MOST).collect(),
        leader: leader.map(ToString::to_string),
        pool,
    }
}

/// Returns the announcement with the edge itself in it, if the edge is a member.
pub(super) fn with_itself(members: &NodePoolMembers, here: &ConnectedReader) -> NodePoolMembers {
    let mut own = members.clone();
    let known = own.members.iter().any(|one| one.node == here.node.as_str());
    if members.pool.is_none() || known || !here.serves() {
        return own;
    }
    let member = at(here);
    let mut left = room();
    for one in &own.members {
        left = left.saturating_sub(size(one));
    }
    while own.members.len() >= NodePoolMembers::MOST || left < size(&member) {
        match own.members.pop() {
            Some(last) => left += size(&last),
            None => return own,
        }
    }
    own.members.push(member);
    own
}

fn at(here: &ConnectedReader) -> NodePoolMember {
    NodePoolMember {
        node: here.node.to_string(),
        at: here.at.clone(),
    }
}

/// Returns the maximum number of bytes that a member needs in a message.
fn size(member: &NodePoolMember) -> usize {
    let at = member.at.iter().map(|at| at.len() + AROUND);
    member.node.len() + AROUND + at.sum::<usize>()
}

/// Returns the number of bytes for members in a message: the rest is for the names of pool and leader.
fn room() -> usize {
    MAX_MESSAGE - MAX_MESSAGE / 8
}
