//! By which address each gateway is reached, where an edge has tunnels at all of them.
//!
//! A name may lead to several addresses of one gateway (IPv4 and IPv6, or one of its own and a load balancer's). It takes the
//! newest tunnel of an edge for the one that counts, so tunnels by two of its addresses would end each other for ever.
//! Whoever comes first holds it; the others wait until it is lost.

use crate::control::dial::Place;
use std::{collections::BTreeMap, sync::Arc};
use tokio::sync::watch;

/// Of each gateway's process by where it is reached, and how many tunnels are there.
type Table = BTreeMap<String, (Place, usize)>;

/// By which address each gateway is reached. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reached(Arc<watch::Sender<Table>>);

/// A gateway is reached at one of its addresses for as long as this lives.
#[derive(Debug)]
pub(super) struct Claim {
    reached: Reached,
    instance: String,
}

impl Reached {
    /// Takes this gateway for this place; `None` where it is reached at another one.
    pub(super) fn claim(&self, instance: &str, place: &Place) -> Option<Claim> {
        let mut ours = false;
        self.0.send_if_modified(|table| {
            let (at, tunnels) = table
                .entry(instance.to_owned())
                .or_insert_with(|| (place.clone(), 0));
            ours = at == place;
            *tunnels += usize::from(ours);
            // Nobody waits for a gateway to be taken.
            false
        });
        ours.then(|| Claim {
            reached: self.clone(),
            instance: instance.to_owned(),
        })
    }

    /// Waits until this gateway is reached nowhere.
    pub(super) async fn lost(&self, instance: &str) {
        let mut table = self.0.subscribe();
        // The sender lives as long as this.
        let _ = table.wait_for(|table| !table.contains_key(instance)).await;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.reached.0.send_if_modified(|table| {
            let Some((_, tunnels)) = table.get_mut(&self.instance) else {
                return false;
            };
            *tunnels -= 1;
            let last = *tunnels == 0;
            if last {
                table.remove(&self.instance);
            }
            last
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn a_gateway_is_reached_at_one_of_its_addresses_until_its_last_tunnel_there_ends() {
        let place = |address: &str| Place {
            gateway: "gw.example:10262".into(),
            address: Some(address.parse().unwrap()),
        };
        let (four, six) = (place("192.0.2.1:10262"), place("[2001:db8::1]:10262"));
        let reached = Reached::default();
        let first = reached.claim("a", &four).unwrap();
        let second = reached.claim("a", &four).unwrap();
        assert!(reached.claim("a", &six).is_none());
        assert!(reached.claim("b", &six).is_some());
        drop(first);
        assert!(reached.lost("a").now_or_never().is_none());
        let lost = reached.lost("a");
        drop(second);
        lost.await;
        assert!(reached.claim("a", &six).is_some());
    }
}
