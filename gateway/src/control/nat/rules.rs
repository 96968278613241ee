//! Rules of our table: two chains, with one rule for each family, or two if connections to pods are redirected.
//!
//! The rules require a destination that is not this host. They check for TCP to an address of the set and a port in the map, and
//! otherwise for TCP to a pod. The rules contain no address: all redirected destinations are in sets.

use super::family::{Family, header};
use netlink_bindings::{
    nftables::{
        Chained, CmpOps, FibFlags, MetaKeys, PayloadBase, PushExprListAttrs, PushRuleAttrs,
        Registers, VerdictCode,
    },
    traits::Pusher,
    utils::{finalize_nested_header, push_header, push_nested_header},
};
use std::ffi::{CStr, CString};

/// `NF_IP_PRI_NAT_DST`.
const DSTNAT: i32 = -100;
/// `NFT_FIB_RESULT_ADDRTYPE`; the library has a wrong number for it.
const FIB_ADDRESS_TYPE: u32 = 3;
/// `RTN_LOCAL`: an address of this host, loopback included.
const RTN_LOCAL: u32 = 2;
const TCP: u8 = 6;

/// Adds a chain at this hook that excludes the addresses of this host.
pub(super) fn add_chain(batch: &mut Chained<'static>, table: &CString, chain: &str, hook: u32) {
    batch
        .request()
        .set_create()
        .op_newchain_do(&header())
        .encode()
        .push_table(table)
        .push_name_bytes(chain.as_bytes())
        .push_type(c"nat")
        .nested_hook()
        .push_num(hook)
        .push_priority(DSTNAT);
    add_rule(batch, table, chain, |expressions| {
        let kind = expressions
            .nested_elem()
            .nested_data_fib()
            .push_dreg(REGISTER)
            .push_result(FIB_ADDRESS_TYPE)
            .push_flags(FibFlags::Daddr as u32)
            .end_nested()
            .end_nested();
        compare_register(kind, &RTN_LOCAL.to_ne_bytes())
            .nested_elem()
            .nested_data_immediate()
            .push_dreg(Registers::RegVerdict as u32)
            .nested_data()
            .nested_verdict()
            .push_code(VerdictCode::Return as u32);
    });
}

/// `meta nfproto FAMILY ip daddr @edges redirect to :tcp dport map @ports`.
pub(super) fn add_redirect_rule(
    batch: &mut Chained<'static>,
    table: &CString,
    chain: &str,
    (family, map): (&Family, &str),
) {
    add_rule(batch, table, chain, |expressions| {
        let expressions = match_destination(expressions, family, family.addresses);
        let expressions = expressions
            .nested_elem()
            .nested_data_payload()
            .push_dreg(REGISTER)
            .push_base(PayloadBase::TransportHeader as u32)
            .push_offset(2)
            .push_len(2)
            .end_nested()
            .end_nested();
        let expressions = lookup(expressions, map, true);
        redirect(expressions);
    });
}

/// `meta nfproto FAMILY ip daddr @pods redirect to :PORT`.
pub(super) fn add_pod_redirect_rule(
    batch: &mut Chained<'static>,
    table: &CString,
    chain: &str,
    (family, port): (&Family, u16),
) {
    add_rule(batch, table, chain, |expressions| {
        let expressions = match_destination(expressions, family, family.pods);
        let expressions = expressions
            .nested_elem()
            .nested_data_immediate()
            .push_dreg(REGISTER)
            .nested_data()
            .push_value(&port.to_be_bytes())
            .end_nested()
            .end_nested()
            .end_nested();
        redirect(expressions);
    });
}

/// Adds the condition that the packet is TCP of this family to a member of the set.
fn match_destination<P: Pusher>(
    expressions: PushExprListAttrs<P>,
    family: &Family,
    set: &str,
) -> PushExprListAttrs<P> {
    let expressions = match_meta(expressions, MetaKeys::Nfproto, family.protocol);
    let expressions = match_meta(expressions, MetaKeys::L4Proto, TCP);
    let expressions = expressions
        .nested_elem()
        .nested_data_payload()
        .push_dreg(REGISTER)
        .push_base(PayloadBase::NetworkHeader as u32)
        .push_offset(family.offset)
        .push_len(family.length)
        .end_nested()
        .end_nested();
    lookup(expressions, set, false)
}

const REGISTER: u32 = Registers::Reg1 as u32;

fn add_rule(
    batch: &mut Chained<'static>,
    table: &CString,
    chain: &str,
    fill_expressions: impl FnOnce(PushExprListAttrs<PushRuleAttrs<&mut Vec<u8>>>),
) {
    let request = batch.request().set_create().set_append();
    let mut request = request.op_newrule_do(&header());
    let rule = request
        .encode()
        .push_table(table)
        .push_chain_bytes(chain.as_bytes());
    fill_expressions(rule.nested_expressions());
}

fn match_meta<P: Pusher>(
    expressions: PushExprListAttrs<P>,
    key: MetaKeys,
    value: u8,
) -> PushExprListAttrs<P> {
    let expressions = expressions
        .nested_elem()
        .nested_data_meta()
        .push_dreg(REGISTER)
        .push_key(key as u32)
        .end_nested()
        .end_nested();
    compare_register(expressions, &[value])
}

/// Adds the condition that the register has this value.
fn compare_register<P: Pusher>(
    expressions: PushExprListAttrs<P>,
    value: &[u8],
) -> PushExprListAttrs<P> {
    expressions
        .nested_elem()
        .nested_data_cmp()
        .push_sreg(REGISTER)
        .push_op(CmpOps::Eq as u32)
        .nested_data()
        .push_value(value)
        .end_nested()
        .end_nested()
        .end_nested()
}

/// Looks up the register in the set; in a map, loads the mapped value. The library has wrong numbers for these attributes.
fn lookup<P: Pusher>(
    expressions: PushExprListAttrs<P>,
    set: &str,
    map: bool,
) -> PushExprListAttrs<P> {
    const SET: u16 = 1;
    const SOURCE: u16 = 2;
    const DESTINATION: u16 = 3;
    let set = [set.as_bytes(), &[0]].concat();
    let register = REGISTER.to_be_bytes();
    let all: [(u16, &[u8]); 3] = [(SET, &set), (SOURCE, &register), (DESTINATION, &register)];
    push_expression(expressions, c"lookup", if map { &all } else { &all[..2] })
}

/// Redirects to the port in the register. The library does not provide this expression.
fn redirect<P: Pusher>(expressions: PushExprListAttrs<P>) {
    const PORT: u16 = 1;
    const FLAGS: u16 = 3;
    /// `NF_NAT_RANGE_PROTO_SPECIFIED`.
    const PROTO_SPECIFIED: u32 = 2;
    let (port, flags) = (REGISTER.to_be_bytes(), PROTO_SPECIFIED.to_be_bytes());
    push_expression(expressions, c"redir", &[(PORT, &port), (FLAGS, &flags)]);
}

fn push_expression<P: Pusher>(
    expressions: PushExprListAttrs<P>,
    name: &CStr,
    attributes: &[(u16, &[u8])],
) -> PushExprListAttrs<P> {
    const DATA: u16 = 2;
    let mut expression = expressions.nested_elem().push_name(name);
    let bytes = expression.as_vec_mut();
    let data = push_nested_header(bytes, DATA);
    for (kind, value) in attributes {
        push_header(bytes, *kind, u16::try_from(value.len()).unwrap_or(0));
        bytes.extend(*value);
    }
    finalize_nested_header(bytes, data);
    expression.end_nested()
}
