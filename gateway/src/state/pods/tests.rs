use super::*;

fn pod(name: &str, node: &str, addresses: &[&str]) -> Pod {
    Pod {
        name: name.into(),
        node: NodeName::parse(node).unwrap(),
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        ends_at: None,
    }
}

fn table(max_pods: usize) -> (Pods, PodsWriter) {
    let pods = Pods::default();
    pods.follow(&["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()]);
    let writer = PodsWriter::new(&pods, max_pods).unwrap();
    (pods, writer)
}

/// Returns the name of the pod with an address, or the outcome without one.
fn at(pods: &Pods, address: &str) -> String {
    text(pods.by_address(address.parse().unwrap()))
}

fn text(found: PodLookup) -> String {
    match found {
        PodLookup::Pod(pod) => format!("{} {}", pod.name, pod.node),
        PodLookup::Unavailable(reason) => format!("unavailable: {reason}"),
        PodLookup::Several(pods) => format!("{} pods", pods.len()),
        other => format!("{other:?}"),
    }
}

#[test]
fn an_address_and_a_name_lead_to_the_pod_until_it_is_gone() {
    let (pods, mut writer) = table(9);
    writer
        .replace(vec![pod("a/web", "edge-1", &["10.9.0.7", "fd00::7"])])
        .unwrap();
    for address in ["10.9.0.7", "::ffff:10.9.0.7", "fd00::7"] {
        assert_eq!(at(&pods, address), "a/web edge-1");
    }
    assert_eq!(text(pods.by_name("a/web")), "a/web edge-1");
    // It was deleted, and created again on another node with another address.
    writer
        .upsert(pod("a/web", "edge-2", &["10.9.0.8"]))
        .unwrap();
    assert_eq!(at(&pods, "10.9.0.7"), "Unknown");
    assert_eq!(at(&pods, "10.9.0.8"), "a/web edge-2");
    assert_eq!(writer.count(), 1);
    writer.remove("a/web");
    assert_eq!(at(&pods, "10.9.0.8"), "Unknown");
    assert_eq!(text(pods.by_name("a/web")), "Unknown");
    assert_eq!(writer.count(), 0);
    writer
        .upsert(pod("b/web", "edge-2", &["10.9.0.8"]))
        .unwrap();
    writer.replace(Vec::new()).unwrap();
    assert_eq!(at(&pods, "10.9.0.8"), "Unknown");
}

#[test]
fn an_address_of_several_running_pods_is_nobodys() {
    let (pods, mut writer) = table(9);
    let first = pod("a/web", "edge-1", &["10.9.0.7"]);
    writer.replace(vec![first.clone()]).unwrap();
    for node in ["edge-2", "edge-1"] {
        let thief = pod("b/thief", node, &["10.9.0.7"]);
        writer.upsert(thief.clone()).unwrap();
        assert_eq!(at(&pods, "10.9.0.7"), "2 pods", "{node}");
        // A list in any order has the same result.
        writer.replace(vec![thief, first.clone()]).unwrap();
        assert_eq!(at(&pods, "10.9.0.7"), "2 pods", "{node}");
        writer.remove("b/thief");
        assert_eq!(at(&pods, "10.9.0.7"), "a/web edge-1", "{node}");
    }
}

#[test]
fn a_pod_whose_time_of_deletion_has_passed_gives_its_address_up() {
    let (pods, mut writer) = table(9);
    let ending = |ends_at| Pod {
        ends_at: Some(ends_at),
        ..pod("a/old", "edge-1", &["10.9.0.7"])
    };
    writer.replace(vec![ending(1)]).unwrap();
    assert_eq!(at(&pods, "10.9.0.7"), "Unknown");
    assert_eq!(text(pods.by_name("a/old")), "Unknown");
    writer
        .upsert(pod("a/new", "edge-2", &["10.9.0.7"]))
        .unwrap();
    assert_eq!(at(&pods, "10.9.0.7"), "a/new edge-2");
    // A pod that still has time to end runs.
    writer.upsert(ending(u64::MAX)).unwrap();
    assert_eq!(at(&pods, "10.9.0.7"), "2 pods");
    writer.remove("a/new");
    assert_eq!(at(&pods, "10.9.0.7"), "a/old edge-1");
}

#[test]
fn addresses_outside_the_networks_of_pods_are_ignored() {
    let pods = Pods::default();
    pods.follow(&["0.0.0.0/0".parse().unwrap()]);
    let mut writer = PodsWriter::new(&pods, 9).unwrap();
    let special = [
        "127.0.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "0.0.0.0",
        "fd00::1",
    ];
    writer
        .replace(vec![pod("a/evil", "edge-1", &special)])
        .unwrap();
    assert_eq!(writer.count(), 0);
    for address in special {
        assert_eq!(at(&pods, address), "NotFollowed");
    }
    assert_eq!(at(&Pods::default(), "10.9.0.7"), "NotFollowed");
}

#[tokio::test(start_paused = true)]
async fn a_table_that_is_not_filled_or_lost_for_long_decides_nothing() {
    let (pods, mut writer) = table(9);
    assert!(at(&pods, "10.9.0.7").starts_with("unavailable: "));
    writer.set_lost("forbidden");
    writer.set_found();
    let reason = at(&pods, "10.9.0.7");
    assert!(
        reason.starts_with("unavailable: ") && reason.ends_with("forbidden"),
        "{reason}"
    );
    writer
        .replace(vec![pod("a/web", "edge-1", &["10.9.0.7"])])
        .unwrap();
    writer.set_lost("away");
    let second = Duration::from_secs(1);
    tokio::time::advance(MAX_LOST.saturating_sub(second)).await;
    // A further failure does not start the time again.
    writer.set_lost("still away");
    assert_eq!(at(&pods, "10.9.0.7"), "a/web edge-1");
    tokio::time::advance(second).await;
    for found in [
        pods.by_name("a/web"),
        pods.by_address("10.9.0.7".parse().unwrap()),
    ] {
        let reason = text(found);
        assert!(
            reason.starts_with("unavailable: ") && reason.ends_with("still away"),
            "{reason}"
        );
    }
    assert_eq!(at(&pods, "192.168.0.1"), "NotFollowed");
    writer.set_found();
    assert_eq!(at(&pods, "10.9.0.7"), "a/web edge-1");
}

#[test]
fn a_table_with_too_many_pods_is_out_of_use() {
    let (pods, mut writer) = table(2);
    let all = |count: u8| -> Vec<Pod> {
        let one = |index| {
            pod(
                &format!("a/{index}"),
                "edge-1",
                &[&format!("10.9.0.{index}")],
            )
        };
        (0..count).map(one).collect()
    };
    writer.replace(all(2)).unwrap();
    assert_eq!(at(&pods, "10.9.0.1"), "a/1 edge-1");
    // A change of a known pod, and a pod without an address of its own, take no place.
    writer.upsert(pod("a/1", "edge-2", &["10.9.0.1"])).unwrap();
    writer.upsert(pod("a/x", "edge-2", &[])).unwrap();
    assert_eq!(
        writer.upsert(pod("a/2", "edge-1", &["10.9.0.2"])),
        Err(TooManyPods(2))
    );
    let is_out = |pods: &Pods| at(pods, "10.9.0.1").contains("max_pods");
    assert!(is_out(&pods));
    writer.set_found();
    assert!(is_out(&pods), "only a list fills the table");
    assert_eq!(writer.replace(all(3)), Err(TooManyPods(2)));
    assert!(is_out(&pods));
    writer.replace(all(2)).unwrap();
    assert_eq!(
        (at(&pods, "10.9.0.1"), writer.count()),
        ("a/1 edge-1".to_owned(), 2)
    );
}

#[test]
fn the_host_of_a_pod_is_its_name_and_namespace() {
    for (host, name) in [
        ("web-0.shop.pod", Some("shop/web-0")),
        ("Web-0.Shop.POD", Some("shop/web-0")),
        (
            "etcd-node.example.kube-system.pod",
            Some("kube-system/etcd-node.example"),
        ),
        ("shop.pod", None),
        (".shop.pod", None),
        ("web-0..pod", None),
        ("web-0.shop.pods", None),
        ("web-0.shop.svc", None),
        ("web_0.shop.pod", None),
        ("pod", None),
    ] {
        assert_eq!(parse_host(host).as_deref(), name, "{host}");
    }
    let long = format!("{}x.shop.pod", "a.".repeat(122));
    assert_eq!(parse_host(&long), None);
}

#[test]
fn addresses_of_several_running_pods_are_counted() {
    let (_pods, mut writer) = table(4);
    assert_eq!(writer.count_conflicts(), 0);
    writer
        .replace(vec![
            pod("a/1", "edge-1", &["10.9.0.7", "fd00::7"]),
            pod("a/2", "edge-2", &["10.9.0.7", "fd00::7"]),
            pod("a/3", "edge-2", &["10.9.0.8"]),
        ])
        .unwrap();
    assert_eq!(writer.count_conflicts(), 2);
    writer.upsert(pod("a/4", "edge-3", &["10.9.0.8"])).unwrap();
    assert_eq!(writer.count_conflicts(), 3);
    // One moves, one is being deleted, and its time has passed.
    writer.upsert(pod("a/4", "edge-3", &["10.9.0.9"])).unwrap();
    assert_eq!(writer.count_conflicts(), 2);
    let ended = Pod {
        ends_at: Some(1),
        ..pod("a/2", "edge-2", &["10.9.0.7", "fd00::7"])
    };
    writer.upsert(ended).unwrap();
    assert_eq!(writer.count_conflicts(), 0);
    writer.upsert(pod("a/2", "edge-2", &["10.9.0.7"])).unwrap();
    assert_eq!(writer.count_conflicts(), 1);
    writer.remove("a/1");
    assert_eq!(writer.count_conflicts(), 0);
    writer.upsert(pod("a/1", "edge-1", &["10.9.0.7"])).unwrap();
    assert_eq!(writer.count_conflicts(), 1);
    writer
        .upsert(pod("a/5", "edge-1", &["10.9.0.1"]))
        .unwrap_err();
    assert_eq!(writer.count_conflicts(), 0, "the table is out of use");
    writer.replace(Vec::new()).unwrap();
    assert_eq!(writer.count_conflicts(), 0);
}
