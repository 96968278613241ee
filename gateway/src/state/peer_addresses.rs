//! Addresses at which this gateway dials other gateways (peers), and the results of the attempts.
//!
//! One gateway may have several addresses, such as IPv4 and IPv6, of which only one answers. So an address does not stand for a
//! gateway. The process that answered there last tells whether a connected peer, or this gateway itself, is behind the address.

use std::{
    collections::HashMap,
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Table of the addresses. Cheap to clone, for any thread.
#[derive(Clone, Debug, Default)]
pub struct PeerAddresses(Arc<Mutex<HashMap<PeerAddress, AddressState>>>);

/// Address of another gateway.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddress {
    /// Name or IP address in the configuration.
    pub host: String,
    /// Address to which the name resolves.
    pub address: SocketAddr,
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// Process that an address leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressOwner {
    /// This process.
    OwnProcess,
    /// Process of another gateway, by its random identifier.
    Peer(String),
}

/// Failure of an attempt to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectFailure {
    /// Reason, for people.
    pub reason: String,
    /// Whether something at the address answered, even if only to refuse. A silent address may be unused.
    pub is_answered: bool,
}

/// Address that may lead to a gateway which is not connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreachableAddress {
    /// The address.
    pub address: SocketAddr,
    /// Reason why no gateway is connected there, for people.
    pub reason: String,
}

/// State of one address.
#[derive(Clone, Debug, Default)]
struct AddressState {
    /// Whether a configured name has the address now.
    is_listed: bool,
    /// Process that answered last, since the start of this gateway.
    owner: Option<AddressOwner>,
    /// Failure of the last attempt. Neither an owner nor a failure means that the first attempt has not ended.
    failure: Option<ConnectFailure>,
}

impl PeerAddresses {
    /// Records whether a configured name has an address. A new address is added before its first attempt.
    pub fn set_listed(&self, address: &PeerAddress, is_listed: bool) {
        let mut all = self.lock();
        all.entry(address.clone()).or_default().is_listed = is_listed;
    }

    /// Removes an address that is not dialled any more.
    pub fn remove(&self, address: &PeerAddress) {
        self.lock().remove(address);
    }

    /// Records the process that has answered at an address. If it is the successor of another process, that one is gone from all
    /// addresses.
    pub fn record_owner(&self, address: &PeerAddress, owner: AddressOwner) {
        let mut all = self.lock();
        let Some(state) = all.get_mut(address) else {
            return;
        };
        let before = state.owner.take().filter(|before| *before != owner);
        (state.owner, state.failure) = (Some(owner), None);
        if before.is_some() {
            for state in all.values_mut().filter(|state| state.owner == before) {
                state.owner = None;
            }
        }
    }

    /// Records a failed attempt.
    pub fn record_failure(&self, address: &PeerAddress, failure: ConnectFailure) {
        if let Some(state) = self.lock().get_mut(address) {
            state.failure = Some(failure);
        }
    }

    /// Returns the addresses that may lead to a gateway which is not connected. These are the addresses where a process has
    /// answered that is not connected now, and those without any process that refuse the connection. An address that never
    /// answered does not count. Nor does an address whose name has addresses of the other IP version that all lead to connected
    /// gateways: a gateway that is reached by IPv4 alone refuses connections at its IPv6 address.
    pub fn unreachable(&self, is_connected: impl Fn(&str) -> bool) -> Vec<UnreachableAddress> {
        let all = self.lock();
        let is_known = |state: &AddressState| match &state.owner {
            Some(AddressOwner::OwnProcess) => true,
            Some(AddressOwner::Peer(instance)) => is_connected(instance),
            None => false,
        };
        let is_known_by_other_version = |address: &PeerAddress| {
            let is_other = |other: &PeerAddress| {
                other.host == address.host && other.address.is_ipv6() != address.address.is_ipv6()
            };
            let others = all
                .iter()
                .filter(|(other, state)| state.is_listed && is_other(other));
            let mut others = others.peekable();
            others.peek().is_some() && others.all(|(_, state)| is_known(state))
        };
        let may_lead_to_gateway = |state: &AddressState| {
            let is_answered = |failure: &ConnectFailure| failure.is_answered;
            let may_be_used = state.failure.as_ref().is_none_or(is_answered);
            state.is_listed && (state.owner.is_some() || may_be_used)
        };
        let mut found: Vec<_> = all
            .iter()
            .filter(|(_, state)| !is_known(state) && may_lead_to_gateway(state))
            .filter(|(address, _)| !is_known_by_other_version(address))
            .map(|(address, state)| UnreachableAddress {
                address: address.address,
                reason: describe(state),
            })
            .collect();
        found.sort_by_key(|unreachable| unreachable.address);
        found.dedup_by_key(|unreachable| unreachable.address);
        found
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PeerAddress, AddressState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe(state: &AddressState) -> String {
    match (&state.failure, &state.owner) {
        (Some(failure), _) => failure.reason.clone(),
        (None, Some(_)) => "the connection was lost".to_owned(),
        (None, None) => "the first attempt to connect has not ended yet".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, address: &str) -> PeerAddress {
        PeerAddress {
            host: host.to_owned(),
            address: address.parse().unwrap(),
        }
    }

    fn failure(is_answered: bool) -> ConnectFailure {
        ConnectFailure {
            reason: "it failed".to_owned(),
            is_answered,
        }
    }

    /// Returns the unreachable addresses while the process `up` is connected.
    fn unreachable(table: &PeerAddresses) -> Vec<String> {
        let found = table.unreachable(|instance| instance == "up").into_iter();
        found.map(|found| found.address.to_string()).collect()
    }

    #[test]
    fn an_address_counts_until_its_process_is_connected() {
        let (table, address) = (PeerAddresses::default(), at("one", "10.0.0.1:1"));
        table.set_listed(&address, true);
        assert_eq!(unreachable(&table), ["10.0.0.1:1"], "the first attempt");
        table.record_owner(&address, AddressOwner::Peer("up".to_owned()));
        assert_eq!(unreachable(&table), [""; 0]);
        // The gateway has restarted: the process that answered there is gone.
        table.record_owner(&address, AddressOwner::Peer("down".to_owned()));
        table.record_failure(&address, failure(false));
        assert_eq!(unreachable(&table), ["10.0.0.1:1"]);
        table.record_owner(&address, AddressOwner::OwnProcess);
        assert_eq!(unreachable(&table), [""; 0]);
        table.record_failure(&address, failure(true));
        assert_eq!(unreachable(&table), [""; 0], "it led to this gateway");
        table.record_owner(&address, AddressOwner::Peer("down".to_owned()));
        table.set_listed(&address, false);
        assert_eq!(unreachable(&table), [""; 0], "no name has it");
        table.set_listed(&address, true);
        assert_eq!(unreachable(&table), ["10.0.0.1:1"]);
    }

    #[test]
    fn a_silent_address_does_not_count_and_one_that_refuses_does() {
        let table = PeerAddresses::default();
        for (address, is_answered) in [("10.0.0.1:1", true), ("10.0.0.2:1", false)] {
            table.set_listed(&at("one", address), true);
            table.record_failure(&at("one", address), failure(is_answered));
        }
        assert_eq!(unreachable(&table), ["10.0.0.1:1"]);
    }

    #[test]
    fn a_refusal_by_the_unused_ip_version_of_a_name_does_not_count() {
        let table = PeerAddresses::default();
        for (host, address) in [("one", "[fd00::1]:1"), ("two", "[fd00::2]:1")] {
            table.set_listed(&at(host, address), true);
            table.record_failure(&at(host, address), failure(true));
        }
        table.set_listed(&at("one", "10.0.0.1:1"), true);
        table.record_owner(
            &at("one", "10.0.0.1:1"),
            AddressOwner::Peer("up".to_owned()),
        );
        assert_eq!(unreachable(&table), ["[fd00::2]:1"], "another name");
        // A further gateway behind the name, with the same IP version, is down.
        table.set_listed(&at("one", "10.0.0.2:1"), true);
        table.record_failure(&at("one", "10.0.0.2:1"), failure(true));
        let all = ["10.0.0.2:1", "[fd00::1]:1", "[fd00::2]:1"];
        assert_eq!(unreachable(&table), all);
    }

    #[test]
    fn a_blocked_ip_version_between_gateways_does_not_count() {
        let table = PeerAddresses::default();
        let peer = || AddressOwner::Peer("up".to_owned());
        for (address, owner) in [
            ("10.0.0.1:1", AddressOwner::OwnProcess),
            ("10.0.0.2:1", peer()),
            ("[fd00::1]:1", AddressOwner::OwnProcess),
        ] {
            table.set_listed(&at("one", address), true);
            table.record_owner(&at("one", address), owner);
        }
        table.set_listed(&at("one", "[fd00::2]:1"), true);
        table.record_failure(&at("one", "[fd00::2]:1"), failure(true));
        assert_eq!(unreachable(&table), [""; 0]);
    }

    #[test]
    fn a_process_that_was_replaced_is_gone_from_its_other_addresses() {
        let table = PeerAddresses::default();
        let down = || AddressOwner::Peer("down".to_owned());
        for address in ["10.0.0.1:1", "10.0.0.2:1"] {
            table.set_listed(&at("one", address), true);
            table.record_owner(&at("one", address), down());
            table.record_failure(&at("one", address), failure(false));
        }
        assert_eq!(unreachable(&table), ["10.0.0.1:1", "10.0.0.2:1"]);
        let successor = AddressOwner::Peer("up".to_owned());
        table.record_owner(&at("one", "10.0.0.1:1"), successor);
        assert_eq!(unreachable(&table), [""; 0], "the second one is silent");
    }
}
