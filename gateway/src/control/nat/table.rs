//! The nftables table of this gateway.
//!
//! The number of rules does not depend on the number of nodes, because addresses and ports are in sets and maps. A change is one
//! batch, which the kernel executes completely or not at all. The table belongs to our socket (`owner`): no other process can
//! change or flush it, and the kernel removes it when this process ends in any way.

use super::{
    AddressChange, NatError, PortMap, RedirectSet,
    family::{FAMILIES, Family, header},
    netlink::{Netlink, NetlinkError},
    rules,
};
use ipnet::IpNet;
use netlink_bindings::nftables::{Chained, Nfgenmsg, PushSetelemListAttrs, SetFlags, TableFlags};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CString,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// `NFNL_SUBSYS_NFTABLES`, the subsystem of a batch.
const NFTABLES: u16 = 10;
/// Maximum number of elements in one message. The attributes of a message have at most 64 KiB.
const MAX_ELEMENTS_PER_MESSAGE: usize = 1000;
/// Type numbers by which `nft` displays the elements of a set.
const INET_SERVICE_TYPE: u32 = 13;

/// Per chain: its hook, the hook's number, and the maps of ports by family.
const CHAINS: [(&str, u32, [&str; 2]); 2] = [
    ("prerouting", 0, ["forwarded4", "forwarded6"]),
    ("output", 3, ["local4", "local6"]),
];

/// The table in the kernel.
#[derive(Debug)]
pub(super) struct Table {
    netlink: Netlink,
    name: CString,
    exists: bool,
}

impl Table {
    /// Opens the table of this name, which does not exist yet.
    pub(super) fn open(name: &str) -> Result<Self, NatError> {
        let mut netlink = Netlink::open().map_err(NatError::Unsupported)?;
        // The result of the first message tells whether the process has permission.
        let sequence = netlink.reserve(1);
        let mut batch = Chained::new(sequence);
        batch.request().op_getgen_do(&header());
        let asked = netlink.send_acknowledged(&batch.finalize());
        asked.map_err(|error| match error.cause.raw_os_error() {
            Some(EPERM | EACCES) => NatError::NotAllowed,
            _ => NatError::Unsupported(error.cause),
        })?;
        Ok(Self {
            netlink,
            name: CString::new(name).unwrap_or_default(),
            exists: false,
        })
    }

    /// Replaces the table in one step.
    pub(super) fn replace(
        &mut self,
        redirected: &RedirectSet,
        ports: &PortMap,
    ) -> Result<(), NatError> {
        let done = self.run_batch(|batch, name| {
            // Deleting a table that does not exist fails on kernels before 6.3, so the table is created first.
            add_table(batch, name, None);
            batch
                .request()
                .op_deltable_do(&header())
                .encode()
                .push_name(name);
            add_table(batch, name, Some(TableFlags::Owner));
            for family in &FAMILIES {
                add_set(batch, name, family.addresses, (family, 0));
                let pod_flags = match redirected.pod_addresses {
                    Some(_) => 0,
                    None => SetFlags::Interval as u32,
                };
                add_set(batch, name, family.pods, (family, pod_flags));
            }
            for (chain, hook, maps) in CHAINS {
                rules::add_chain(batch, name, chain, hook);
                for (family, map) in FAMILIES.iter().zip(maps) {
                    let origin_and_family = (chain == "output", family.length == 4);
                    add_port_map(
                        batch,
                        name,
                        map,
                        ports.ports_of(origin_and_family.0, origin_and_family.1),
                    );
                    rules::add_redirect_rule(batch, name, chain, (family, map));
                    if let Some(port) = ports.pod_port(origin_and_family.0, origin_and_family.1) {
                        rules::add_pod_redirect_rule(batch, name, chain, (family, port));
                    }
                }
            }
            let edges = &redirected.edge_addresses;
            change_addresses(batch, name, EDGES, (edges, true));
            match &redirected.pod_addresses {
                Some(pods) => change_addresses(batch, name, PODS, (pods, true)),
                None => add_networks(batch, name, &redirected.pod_networks),
            }
        });
        done.map_err(|error| match error.cause.raw_os_error() {
            Some(EPERM) => NatError::TableInUse(self.name.to_string_lossy().into_owned()),
            _ => NatError::Kernel(error),
        })?;
        self.exists = true;
        Ok(())
    }

    /// Adds and removes redirected addresses of nodes and of pods.
    pub(super) fn change(
        &mut self,
        edges: &AddressChange,
        pods: &AddressChange,
    ) -> Result<(), NatError> {
        let done = self.run_batch(|batch, name| {
            for (change, set) in [(edges, EDGES), (pods, PODS)] {
                change_addresses(batch, name, set, (&change.added, true));
                change_addresses(batch, name, set, (&change.removed, false));
            }
        });
        done.map_err(NatError::Kernel)
    }

    /// Removes the table.
    pub(super) fn remove(&mut self) -> Result<(), NatError> {
        if !std::mem::take(&mut self.exists) {
            return Ok(());
        }
        let done = self.run_batch(|batch, name| {
            batch
                .request()
                .op_deltable_do(&header())
                .encode()
                .push_name(name);
        });
        done.map_err(NatError::Kernel)
    }

    fn run_batch(
        &mut self,
        fill: impl FnOnce(&mut Chained<'static>, &CString),
    ) -> Result<(), NetlinkError> {
        let mut batch_header = Nfgenmsg::new();
        batch_header.set_res_id(NFTABLES);
        // The number exceeds any batch: 100,000 addresses take 100 messages.
        let sequence = self.netlink.reserve(1 << 16);
        let mut batch = Chained::new(sequence);
        batch.request().op_batch_begin_do(&batch_header);
        fill(&mut batch, &self.name);
        batch.request().op_batch_end_do(&batch_header);
        self.netlink.send_acknowledged(&batch.finalize())
    }
}

fn add_table(batch: &mut Chained<'static>, table: &CString, flags: Option<TableFlags>) {
    let mut made = batch.request().set_create().op_newtable_do(&header());
    let attributes = made.encode().push_name(table);
    if let Some(flags) = flags {
        attributes.push_flags(flags as u32);
    }
}

/// Adds a set of addresses, or of intervals of addresses.
fn add_set(
    batch: &mut Chained<'static>,
    table: &CString,
    name: &str,
    (family, flags): (&Family, u32),
) {
    batch
        .request()
        .set_create()
        .op_newset_do(&header())
        .encode()
        .push_table(table)
        .push_name_bytes(name.as_bytes())
        .push_flags(flags)
        .push_key_type(family.key_type)
        .push_key_len(family.length)
        .push_id(1);
}

/// Adds a map from node ports to ports on this host, with its elements.
fn add_port_map(
    batch: &mut Chained<'static>,
    table: &CString,
    name: &str,
    ports: &BTreeMap<u16, u16>,
) {
    batch
        .request()
        .set_create()
        .op_newset_do(&header())
        .encode()
        .push_table(table)
        .push_name_bytes(name.as_bytes())
        .push_flags(SetFlags::Map as u32)
        .push_key_type(INET_SERVICE_TYPE)
        .push_key_len(2)
        .push_data_type(INET_SERVICE_TYPE)
        .push_data_len(2)
        .push_id(2);
    if ports.is_empty() {
        return;
    }
    let mut put = batch.request().set_create().op_newsetelem_do(&header());
    let put = put
        .encode()
        .push_table(table)
        .push_set_bytes(name.as_bytes());
    let mut all = put.nested_elements();
    for (port, here) in ports {
        all = all
            .nested_elem()
            .nested_key()
            .push_value(&port.to_be_bytes())
            .end_nested()
            .nested_data()
            .push_value(&here.to_be_bytes())
            .end_nested()
            .end_nested();
    }
}

/// Set of addresses in each family.
type AddressSet = fn(&Family) -> &'static str;
const EDGES: AddressSet = |family| family.addresses;
const PODS: AddressSet = |family| family.pods;

/// Adds addresses to a set, or removes them.
fn change_addresses(
    batch: &mut Chained<'static>,
    table: &CString,
    set: AddressSet,
    (addresses, is_add): (&BTreeSet<IpAddr>, bool),
) {
    for family in &FAMILIES {
        let family_addresses = addresses
            .iter()
            .filter(|a| a.is_ipv4() == (family.length == 4));
        let values: Vec<Vec<u8>> = family_addresses.map(octets).collect();
        for chunk in values.chunks(MAX_ELEMENTS_PER_MESSAGE) {
            let fill = |list: PushSetelemListAttrs<&mut Vec<u8>>| {
                let list = list
                    .push_table(table)
                    .push_set_bytes(set(family).as_bytes());
                let mut list = list.nested_elements();
                for value in chunk {
                    let element = list.nested_elem().nested_key().push_value(value);
                    list = element.end_nested().end_nested();
                }
            };
            if is_add {
                let request = batch.request().set_create();
                fill(request.op_newsetelem_do(&header()).encode());
            } else {
                fill(batch.request().op_delsetelem_do(&header()).encode());
            }
        }
    }
}

/// Adds networks to the sets of pods. Adjacent and nested networks are merged, since intervals may not overlap.
fn add_networks(batch: &mut Chained<'static>, table: &CString, pods: &BTreeSet<IpNet>) {
    /// `NFT_SET_ELEM_INTERVAL_END`.
    const END: u32 = 1;
    let all: Vec<IpNet> = pods.iter().copied().collect();
    let all = IpNet::aggregate(&all);
    for family in &FAMILIES {
        let own = all
            .iter()
            .filter(|net| net.addr().is_ipv4() == (family.length == 4));
        let own: Vec<_> = own.collect();
        for chunk in own.chunks(MAX_ELEMENTS_PER_MESSAGE / 2) {
            let mut put = batch.request().set_create().op_newsetelem_do(&header());
            let put = put
                .encode()
                .push_table(table)
                .push_set_bytes(family.pods.as_bytes());
            let mut list = put.nested_elements();
            for net in chunk {
                let element = list.nested_elem().nested_key();
                let begun = element.push_value(&octets(&net.network()));
                list = begun.end_nested().end_nested();
                // The last network of the address space has no end.
                if let Some(next) = address_after(net) {
                    let element = list.nested_elem().nested_key();
                    let ended = element.push_value(&octets(&next)).end_nested();
                    list = ended.push_flags(&END.to_be_bytes()).end_nested();
                }
            }
        }
    }
}

/// Returns the first address after a network.
fn address_after(net: &IpNet) -> Option<IpAddr> {
    Some(match net.broadcast() {
        IpAddr::V4(last) => Ipv4Addr::from_bits(last.to_bits().checked_add(1)?).into(),
        IpAddr::V6(last) => Ipv6Addr::from_bits(last.to_bits().checked_add(1)?).into(),
    })
}

fn octets(address: &IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

const EPERM: i32 = nix::errno::Errno::EPERM as i32;
const EACCES: i32 = nix::errno::Errno::EACCES as i32;
