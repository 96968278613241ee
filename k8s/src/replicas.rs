//! Number of gateways behind a Service, from its `EndpointSlice`s.
//!
//! A gateway counts from the time when clients may be routed to it until it terminates. With `publishNotReadyAddresses` it
//! counts earlier, from the time when it has an address. If no endpoint counts, the number is unknown, because the Service
//! may route to gateways by other means.

use crate::client::{WATCH_TIMEOUT, watch_error_message};
use futures_util::{StreamExt, future::ready, stream::BoxStream};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::{
    Api, Client, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use std::collections::{BTreeMap, BTreeSet};

/// Label of a slice that names its Service.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// Slices of one Service, by name.
type SlicesByName = BTreeMap<String, EndpointSlice>;

/// Present number, or the reason for which it is not known.
pub(crate) type ReplicaCount = Result<Option<u32>, String>;

/// Returns a stream that yields each time the number may have changed, from now on. Never ends.
pub(crate) fn watch_replica_count(
    client: Client,
    namespace: &str,
    service: &str,
) -> BoxStream<'static, ReplicaCount> {
    let api = Api::<EndpointSlice>::namespaced(client, namespace);
    let config = watcher::Config::default().labels(&format!("{SERVICE_NAME_LABEL}={service}"));
    let config = config.timeout(WATCH_TIMEOUT);
    let (mut slices, mut listed) = (SlicesByName::new(), SlicesByName::new());
    let count = move |event: Result<Event<EndpointSlice>, watcher::Error>| {
        match event {
            Ok(Event::Init) => {
                listed.clear();
                return ready(None);
            }
            Ok(Event::InitApply(slice)) => {
                listed.insert(slice.name_any(), slice);
                return ready(None);
            }
            Ok(Event::InitDone) => slices = std::mem::take(&mut listed),
            Ok(Event::Apply(slice)) => drop(slices.insert(slice.name_any(), slice)),
            Ok(Event::Delete(slice)) => drop(slices.remove(&slice.name_any())),
            Err(error) => return ready(Some(Err(watch_error_message(&error)))),
        }
        ready(Some(Ok(count_replicas(&slices))))
    };
    watcher(api, config)
        .default_backoff()
        .filter_map(count)
        .boxed()
}

/// Returns the number of gateways. A gateway with an address of each family is in a slice of each, and counts once.
fn count_replicas(slices: &SlicesByName) -> Option<u32> {
    let mut families: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for slice in slices.values() {
        let serving = slice.endpoints.iter().filter(|each| is_serving(each));
        let addresses = serving.filter_map(|each| each.addresses.first());
        let family = families.entry(&slice.address_type).or_default();
        family.extend(addresses.map(String::as_str));
    }
    let max_count = families.values().map(BTreeSet::len).max()?;
    u32::try_from(max_count).ok().filter(|most| *most > 0)
}

/// Whether an endpoint counts. An unknown condition counts as ready, as the API defines `ready`.
fn is_serving(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().is_none_or(|conditions| {
        conditions.ready != Some(false) && conditions.terminating != Some(true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn slices(each: &[Value]) -> SlicesByName {
        let slice = |(number, slice): (usize, &Value)| {
            let mut slice = slice.clone();
            slice["metadata"] = json!({ "name": number.to_string() });
            (number.to_string(), serde_json::from_value(slice).unwrap())
        };
        each.iter().enumerate().map(slice).collect()
    }

    #[test]
    fn ready_replicas_count_once_across_address_families() {
        let four = json!({ "addressType": "IPv4", "endpoints": [
            { "addresses": ["10.0.0.1"], "conditions": { "ready": true } },
            { "addresses": ["10.0.0.2"], "conditions": {} },
            { "addresses": ["10.0.0.3"], "conditions": { "ready": false } },
            // As in a Service with publishNotReadyAddresses.
            { "addresses": ["10.0.0.4"], "conditions": { "ready": true, "terminating": true } },
        ] });
        let six = json!({ "addressType": "IPv6", "endpoints": [
            { "addresses": ["2001:db8::1"], "conditions": { "ready": true } },
        ] });
        let more = json!({ "addressType": "IPv4", "endpoints": [
            // Between two writes the same endpoint may be in two slices.
            { "addresses": ["10.0.0.1"] }, { "addresses": ["10.0.0.5"] },
        ] });
        assert_eq!(count_replicas(&slices(&[four, six, more])), Some(3));
    }

    #[test]
    fn a_service_without_replicas_reports_no_count() {
        assert_eq!(count_replicas(&slices(&[])), None);
        let none = json!({ "addressType": "IPv4", "endpoints": null });
        assert_eq!(count_replicas(&slices(&[none])), None);
    }
}
