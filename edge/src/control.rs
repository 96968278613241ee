//! What keeps an edge connected; never in a stream's way.
//!
//! `dial` makes one authenticated connection to a gateway, directly or through a proxy; `enrol` uses it once,
//! `link` again and again; `gateways` knows the addresses; `trouble` says what went wrong and how long
//! to wait; `changes` hears when the machine's network changed; `admin` tells all of it.

pub(crate) mod dial;
pub(crate) mod gateways;
pub(crate) mod trouble;

pub(crate) mod changes;
pub(crate) mod link;

pub(crate) mod enrol;

pub(crate) mod admin;
