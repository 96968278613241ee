//! IPv4 and IPv6 in the kernel's terms.

use netlink_bindings::nftables::Nfgenmsg;

/// `NFPROTO_INET`: IPv4 and IPv6 at once.
const INET: u8 = 1;

/// Differences between IPv4 and IPv6.
pub(super) struct Family {
    pub(super) protocol: u8,
    pub(super) addresses: &'static str,
    pub(super) pods: &'static str,
    pub(super) key_type: u32,
    pub(super) length: u32,
    /// Offset of the destination address in the header.
    pub(super) offset: u32,
}

pub(super) const FAMILIES: [Family; 2] = [
    Family {
        protocol: 2,
        addresses: "edges4",
        pods: "pods4",
        key_type: 7,
        length: 4,
        offset: 16,
    },
    Family {
        protocol: 10,
        addresses: "edges6",
        pods: "pods6",
        key_type: 8,
        length: 16,
        offset: 24,
    },
];

pub(super) fn header() -> Nfgenmsg {
    let mut header = Nfgenmsg::new();
    header.nfgen_family = INET;
    header
}
