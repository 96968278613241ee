//! The line by which edges are told their neighbours: as many of them as fit into it.

use super::leaders::ConnectedReader;
use causeway_certs::NodeName;
use causeway_tunnel::{
    control_stream::{NodePoolMember, NodePoolMembers},
    wire::MAX_MESSAGE,
};

/// What a line needs beside names and addresses, for each member and in all.
const AROUND: usize = 32;

/// What a pool is told: the leader first, so that it is among them however many there are, the others by name, and then those
/// who are away.
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

/// The same with the edge itself among them, if it is a member.
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

/// What a member takes of a line, at most.
fn size(member: &NodePoolMember) -> usize {
    let at = member.at.iter().map(|at| at.len() + AROUND);
    member.node.len() + AROUND + at.sum::<usize>()
}

/// What there is for members in a line: the rest is for the names of pool and leader.
fn room() -> usize {
    MAX_MESSAGE - MAX_MESSAGE / 8
}
