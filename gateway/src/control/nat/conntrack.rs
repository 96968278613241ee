//! The kernel's connection tracking for redirected addresses.
//!
//! A tracked connection keeps its translation, whatever the current rules are. If an address is assigned to another node, its
//! tracked connections are deleted, and the next packet of each is checked again. Connections to other addresses are not touched.

use super::netlink::{Netlink, message};
use netlink_bindings::{
    conntrack::{IterableConntrackAttrs, Nfgenmsg, OpGetDump, Request},
    traits::NetlinkRequest,
    utils::{finalize_nested_header, push_header, push_nested_header},
};
use std::{io, net::IpAddr};

/// `NFNL_SUBSYS_CTNETLINK`, in the upper half of a message's kind.
const CONNTRACK: u16 = 1 << 8;
/// `IPCTNL_MSG_CT_GET`.
const GET: u16 = CONNTRACK | 1;
/// `IPCTNL_MSG_CT_DELETE`.
const DELETE: u16 = CONNTRACK | 2;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const FLAGS_DUMP: u16 = 0x301;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const FLAGS_ACK: u16 = 0x5;
const TCP: u8 = 6;
/// `CTA_TUPLE_ORIG`.
const TUPLE_ORIG: u16 = 1;
/// `CTA_ZONE`.
const ZONE: u16 = 18;

/// Deletes all tracked TCP connections to addresses for which `is_moved` returns true. Returns their number.
///
/// # Errors
/// If the kernel cannot list tracked connections, for example without `nf_conntrack_netlink`.
pub(super) fn delete_connections(
    netlink: &Netlink,
    is_moved: impl Fn(&IpAddr) -> bool,
) -> io::Result<usize> {
    let mut deletions = Vec::new();
    let request = Request::new().op_get_dump(&Nfgenmsg::new());
    let listed = netlink.request(&message(GET, FLAGS_DUMP, request.payload()), |_, body| {
        let (header, known) = OpGetDump::decode_request(body);
        deletions.extend(deletion(&header, &known, &is_moved));
    });
    listed.map_err(|(_, error)| error)?;
    let mut count = 0;
    for deletion in deletions {
        match netlink.request(&deletion, |_, _| {}) {
            Ok(()) => count += 1,
            // The connection has ended in the meantime.
            Err((_, error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err((_, error)) => return Err(error),
        }
    }
    Ok(count)
}

/// Returns the message that deletes this connection, if its destination has moved.
fn deletion(
    header: &Nfgenmsg,
    attributes: &IterableConntrackAttrs<'_>,
    is_moved: impl Fn(&IpAddr) -> bool,
) -> Option<Vec<u8>> {
    let original = attributes.get_tuple_orig().ok()?;
    let ip = original.get_tuple_ip().ok()?;
    let to = ip.get_ip_v4_dst().map(IpAddr::from);
    let to = to.or_else(|_| ip.get_ip_v6_dst().map(IpAddr::from)).ok()?;
    let protocol = original.get_tuple_proto().ok()?.get_proto_num().ok()?;
    if protocol != TCP || !is_moved(&to) {
        return None;
    }
    let mut body = header.as_slice().to_vec();
    let tuple = push_nested_header(&mut body, TUPLE_ORIG);
    body.extend(original.get_buf());
    finalize_nested_header(&mut body, tuple);
    if let Ok(zone) = attributes.get_zone() {
        push_header(&mut body, ZONE, 2);
        body.extend(zone.to_be_bytes());
        body.extend([0; 2]);
    }
    Some(message(DELETE, FLAGS_ACK, &body))
}
