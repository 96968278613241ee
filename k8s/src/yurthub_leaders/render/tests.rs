use super::*;
use causeway_certs::NodeName;

type Change = fn(&mut ConfigMap);

const CLOCK: u64 = 1_800_000_000;
const BOTH: [&str; 2] = ["v1/services", "discovery.k8s.io/v1/endpointslices"];

fn reading(all: &[(&str, &str)], resources: &[&str]) -> NodePoolEndpoints {
    let at = all.iter().map(|(node, at)| {
        let node = NodeName::parse(node).unwrap();
        (node, at.parse().unwrap())
    });
    let resources = resources.iter().map(|text| text.parse().unwrap());
    NodePoolEndpoints {
        addresses: at.collect(),
        resources: resources.collect(),
    }
}

fn hubs(all: &[(&str, &str)]) -> NodePoolEndpoints {
    reading(all, &BOTH)
}

fn map(content: &LeaderMap) -> ConfigMap {
    let mut map = ConfigMap::default();
    map.metadata.name = Some("leader-hub-north".into());
    content.write(&mut map, "leader-hub-north");
    map
}

/// Inputs of a gateway that renders.
struct Gateway {
    own: &'static str,
    absent: BTreeMap<String, Instant>,
}

impl Gateway {
    fn called(own: &'static str) -> Self {
        let absent = BTreeMap::new();
        Self { own, absent }
    }

    fn looks(&mut self, before: &LeaderMap, now: Option<&NodePoolEndpoints>) -> LeaderMap {
        self.looks_at(before, now, CLOCK, true)
    }

    fn looks_at(
        &mut self,
        before: &LeaderMap,
        now: Option<&NodePoolEndpoints>,
        clock: u64,
        may: bool,
    ) -> LeaderMap {
        let mut looks = RenderContext {
            gateway: self.own,
            now: Instant::now(),
            unix_now: clock,
            absent_since: &mut self.absent,
            may_lead: &|_| may,
        };
        before.next_content(now, &mut looks)
    }
}

#[tokio::test]
async fn yurthub_config_matches_openyurts_with_unused_node_names() {
    let both = hubs(&[("edge-2", "fd00::2"), ("edge-1", "10.1.0.1")]);
    let mut gateway = Gateway::called("gw");
    let content = gateway.looks(&LeaderMap::default(), Some(&both));
    let map = map(&content);
    let data = map.data.clone().unwrap();
    let message = |key: &str| data[key].as_str();
    assert_eq!(
        message("leaders"),
        "causeway:edge-1/10.1.0.1,causeway:edge-2/[fd00::2]"
    );
    assert_eq!(
        message("pool-scoped-metadata"),
        "/v1/services,discovery.k8s.io/v1/endpointslices"
    );
    assert_eq!(message("enable-leader-election"), "true");
    assert_eq!(map.labels()[CONFIGMAP_NAME_LABEL], "leader-hub-north");
    for name in ["causeway:edge-1", "causeway:edge-2"] {
        assert!(NodeName::parse(name).is_err());
    }
    assert_eq!(
        LeaderMap::parse(&map),
        content,
        "parsing returns the same data"
    );
    assert_eq!(gateway.looks(&content, Some(&both)), content, "and stays");
}

#[tokio::test(start_paused = true)]
async fn an_edge_is_listed_while_any_gateway_has_it() {
    let (mut one, mut two) = (Gateway::called("gw-1"), Gateway::called("gw-2"));
    let north = hubs(&[("edge-1", "10.1.0.1")]);
    let first = one.looks(&LeaderMap::default(), Some(&north));
    // The same edge has tunnels to both gateways: the other one does not change the written data.
    let both = two.looks(&first, Some(&north));
    assert_eq!(one.looks(&both, Some(&north)), both);
    assert_eq!(two.looks(&both, Some(&north)), both);
    assert_eq!(one.looks(&both, None), both, "the node may return");
    tokio::time::advance(REMOVAL_DELAY).await;
    let left = one.looks(&both, None);
    assert_eq!(left.leaders(), both.leaders());
    assert_eq!(
        one.looks(&both, None),
        left,
        "a write that failed changes nothing"
    );
    assert_eq!(two.looks(&left, Some(&north)), left);
    assert_eq!(one.looks(&left, None), left);
    assert!(one.absent.is_empty());
    assert_eq!(two.looks(&left, None), left);
    tokio::time::advance(REMOVAL_DELAY).await;
    let none = two.looks(&left, None);
    assert_eq!(none.leaders(), "");
    let data = map(&none).data.unwrap();
    assert_eq!(data["enable-leader-election"], "false");
    assert_eq!(
        data["pool-scoped-metadata"],
        map(&left).data.unwrap()["pool-scoped-metadata"]
    );
}

#[tokio::test]
async fn entries_of_a_dead_gateway_expire_or_end_with_their_node() {
    let north = hubs(&[("edge-1", "10.1.0.1")]);
    let left = Gateway::called("gw-1").looks(&LeaderMap::default(), Some(&north));
    let mut other = Gateway::called("gw-2");
    assert_eq!(
        other.looks_at(&left, None, CLOCK + CONFIRM_EXPIRY - 1, true),
        left
    );
    let later = other.looks_at(&left, None, CLOCK + CONFIRM_EXPIRY, true);
    assert_eq!(later.leaders(), "");
    assert_eq!(other.looks_at(&left, None, CLOCK, false).leaders(), "");
    // The connected gateway renews the confirmation in time, and not at each check.
    let mut own = Gateway::called("gw-1");
    assert_eq!(
        own.looks_at(&left, Some(&north), CLOCK + CONFIRM_INTERVAL - 1, true),
        left
    );
    let again = own.looks_at(&left, Some(&north), CLOCK + CONFIRM_INTERVAL, true);
    assert!(again != left && again.has_same_leaders(&left));
}

#[tokio::test]
async fn yurthubs_get_resources_that_all_listed_edges_have() {
    let all =
        Gateway::called("gw-1").looks(&LeaderMap::default(), Some(&hubs(&[("a", "10.1.0.1")])));
    let mut two = Gateway::called("gw-2");
    let less = reading(&[("b", "10.1.0.2")], &["v1/services"]);
    let both = two.looks(&all, Some(&less));
    assert_eq!(
        map(&both).data.unwrap()["pool-scoped-metadata"],
        "/v1/services"
    );
    assert_eq!(
        Gateway::called("gw-1").looks(&both, Some(&hubs(&[("a", "10.1.0.1")]))),
        both
    );
    for nothing in [&["v1/nodes"][..], &[]] {
        let none = reading(&[("c", "10.1.0.3")], nothing);
        assert_eq!(Gateway::called("gw-3").looks(&both, Some(&none)), both);
    }
}

#[tokio::test]
async fn foreign_changes_of_the_config_are_corrected() {
    let north = hubs(&[("edge-1", "10.1.0.1")]);
    let right = Gateway::called("gw").looks(&LeaderMap::default(), Some(&north));
    let changes: [Change; 5] = [
        |map| {
            let data = map.data.as_mut().unwrap();
            data.insert("leaders".into(), "edge-9/10.9.9.9".into());
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
        let found = LeaderMap::parse(&map);
        assert_ne!(found, right);
        assert_eq!(Gateway::called("gw").looks(&found, Some(&north)), right);
    }
}
