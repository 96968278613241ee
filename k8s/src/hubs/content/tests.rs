use super::*;
use causeway_certs::NodeName;

type Change = fn(&mut ConfigMap);

fn hubs(all: &[(&str, &str)]) -> PoolHubs {
    let at = all.iter().map(|(node, at)| {
        let node = NodeName::parse(node).unwrap();
        (node, at.parse().unwrap())
    });
    let resources = ["v1/services", "discovery.k8s.io/v1/endpointslices"];
    PoolHubs {
        at: at.collect(),
        resources: resources.map(|text| text.parse().unwrap()).into(),
    }
}

fn map(content: &Content) -> ConfigMap {
    let mut map = ConfigMap::default();
    map.metadata.name = Some("leader-hub-north".into());
    content.write(&mut map, "leader-hub-north");
    map
}

/// What follows, by one gateway, with nothing absent before.
fn next(before: &Content, now: Option<&PoolHubs>, own: &str) -> Content {
    let mut absent = BTreeMap::new();
    before.next(now, own, |_| true, (&mut absent, Instant::now()))
}

#[test]
fn hubs_are_told_as_openyurts_own_controller_tells_them_by_names_that_no_node_has() {
    let both = hubs(&[("edge-2", "fd00::2"), ("edge-1", "10.1.0.1")]);
    let content = next(&Content::default(), Some(&both), "gw");
    let map = map(&content);
    let data = map.data.clone().unwrap();
    let said = |key: &str| data[key].as_str();
    assert_eq!(
        said("leaders"),
        "causeway:edge-1/10.1.0.1,causeway:edge-2/[fd00::2]"
    );
    assert_eq!(
        said("pool-scoped-metadata"),
        "/v1/services,discovery.k8s.io/v1/endpointslices"
    );
    assert_eq!(said("enable-leader-election"), "true");
    assert_eq!(map.labels()[LABEL], "leader-hub-north");
    for name in ["causeway:edge-1", "causeway:edge-2"] {
        assert!(NodeName::parse(name).is_err());
    }
    assert_eq!(Content::read(&map), content, "it reads as it was written");
    assert_eq!(next(&content, Some(&both), "gw"), content, "and stays");
}

#[tokio::test(start_paused = true)]
async fn each_gateway_takes_out_its_own_edges_alone_and_not_before_a_while() {
    let north = hubs(&[("edge-1", "10.1.0.1")]);
    let south = hubs(&[("edge-2", "10.1.0.2")]);
    let one = next(&Content::default(), Some(&north), "gw-1");
    let two = next(&one, Some(&south), "gw-2");
    assert_eq!(
        two.leaders(),
        "causeway:edge-1/10.1.0.1,causeway:edge-2/10.1.0.2"
    );
    let mut absent = BTreeMap::new();
    let gone = two.next(None, "gw-1", |_| true, (&mut absent, Instant::now()));
    assert_eq!(gone, two, "it may come back");
    tokio::time::advance(GRACE).await;
    let gone = two.next(None, "gw-1", |_| true, (&mut absent, Instant::now()));
    assert_eq!(gone.leaders(), "causeway:edge-2/10.1.0.2");
    assert!(absent.is_empty());
    // The other one's is the other's to take out; one that comes here is ours from then on.
    assert_eq!(next(&gone, None, "gw-1"), gone);
    let moved = next(&gone, Some(&south), "gw-1");
    assert_eq!(moved.leaders(), gone.leaders());
    assert_ne!(moved, gone);
    // A node that is gone from the cluster is nobody's.
    let mut absent = BTreeMap::new();
    let none = gone.next(None, "gw-1", |_| false, (&mut absent, Instant::now()));
    assert_eq!(map(&none).data.unwrap()["enable-leader-election"], "false");
}

#[test]
fn what_somebody_else_has_written_into_it_is_put_right() {
    let north = hubs(&[("edge-1", "10.1.0.1")]);
    let right = next(&Content::default(), Some(&north), "gw");
    let changes: [Change; 5] = [
        |map| {
            let data = map.data.as_mut().unwrap();
            data.insert("leaders".into(), "edge-9/10.1.0.9".into());
        },
        |map| {
            let data = map.data.as_mut().unwrap();
            data.insert("enable-leader-election".into(), "false".into());
        },
        |map| {
            map.data.as_mut().unwrap().remove("interconnectivity");
        },
        |map| map.labels_mut().clear(),
        |map| map.annotations_mut().clear(),
    ];
    for change in changes {
        let mut map = map(&right);
        change(&mut map);
        let found = Content::read(&map);
        assert_ne!(found, right);
        assert_eq!(next(&found, Some(&north), "gw"), right);
    }
}
