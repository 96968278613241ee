//! One `EndpointSlice`, as kube-controller-manager makes it of a Service with ten Pods.

use super::super::readers::stamp;
use serde_json::{Value, json};

/// Endpoints of each slice.
const ENDPOINTS: usize = 10;

/// Its name.
pub(super) fn name(number: usize) -> String {
    format!("service-{number}-x7k2p")
}

/// Returns the slice with this number; with each step another of its endpoints is not ready, and before the first step all
/// are.
pub(super) fn of(number: usize, step: usize, mark: char) -> Value {
    let service = format!("service-{number}");
    let unready = step.checked_sub(1).map(|step| step % ENDPOINTS);
    let endpoints: Vec<Value> = (0..ENDPOINTS)
        .map(|endpoint| self::endpoint(number, endpoint, unready != Some(endpoint)))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name(number),
            "namespace": "default",
            "labels": {
                "app.kubernetes.io/name": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": service,
            },
            "annotations": { "endpoints.kubernetes.io/last-change-trigger-time": stamp::now(mark) },
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Service", "name": service, "uid": uid(number, ENDPOINTS),
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [
            { "name": "http", "protocol": "TCP", "port": 8080 },
            { "name": "metrics", "protocol": "TCP", "port": 9090 },
        ],
    })
}

fn endpoint(number: usize, endpoint: usize, ready: bool) -> Value {
    let pod = number * ENDPOINTS + endpoint;
    json!({
        "addresses": [format!("10.{}.{}.{}", 64 + pod / 65536 % 64, pod / 256 % 256, pod % 256)],
        "conditions": { "ready": ready, "serving": ready, "terminating": false },
        "nodeName": format!("edge-node-{}", pod % 200),
        "zone": format!("zone-{}", pod % 3),
        "targetRef": {
            "kind": "Pod", "namespace": "default", "uid": uid(number, endpoint),
            "name": format!("service-{number}-6d4b75cb6d-{:05x}", pod * 7919 % 0xf_ffff),
        },
    })
}

/// A random number that is always the same, and as different from the next one as real ones are.
fn uid(number: usize, endpoint: usize) -> String {
    let seed = u64::try_from(number * (ENDPOINTS + 1) + endpoint + 1).unwrap_or(1);
    // Vigna's splitmix64.
    let mixed = |turn: u64| {
        let state = seed.wrapping_add(turn).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    };
    let (high, low) = (mixed(0), mixed(1 << 40));
    format!(
        "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xfff,
        low >> 48 & 0xfff,
        low & 0xffff_ffff_ffff
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_marks_another_endpoint_unready_and_uids_are_unique() {
        let unready = |step| {
            let slice = of(3, step, 'm');
            let all = slice["endpoints"].as_array().unwrap().clone();
            all.iter()
                .position(|one| one["conditions"]["ready"] == false)
        };
        assert_eq!(
            [0, 1, 2, 11].map(unready),
            [None, Some(0), Some(1), Some(0)]
        );
        let slice = of(0, 0, 'm').to_string();
        assert!((2000..5000).contains(&slice.len()), "{}", slice.len());
        assert_ne!(uid(0, 1), uid(0, 2));
        assert_ne!(uid(0, ENDPOINTS), uid(1, 0));
        assert_eq!(uid(0, 0).len(), 36);
    }
}
