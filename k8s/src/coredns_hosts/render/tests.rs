use super::*;

fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

fn addresses(all: &[&str]) -> Vec<IpAddr> {
    all.iter().map(|text| text.parse().unwrap()).collect()
}

fn style(rules: &CoreDnsHosts, limit: usize) -> RenderOptions {
    RenderOptions::new(rules, addresses(&["10.96.0.20", "fd00::20"]), limit)
}

fn places() -> BTreeMap<NodeName, NodeLocation> {
    let elsewhere = |all: &[&str]| NodeLocation::Elsewhere(addresses(all));
    [
        (name("edge-2"), NodeLocation::Edge(name("edge-2"))),
        (name("edge-1"), NodeLocation::Edge(name("edge-1"))),
        (name("cloud-1"), elsewhere(&["10.0.9.1", "fd01::1"])),
        (name("addressless"), elsewhere(&[])),
    ]
    .into()
}

fn many(count: usize) -> BTreeMap<NodeName, NodeLocation> {
    let names = (0..count).map(|number| name(&format!("edge-{number}")));
    names
        .map(|name| (name.clone(), NodeLocation::Edge(name)))
        .collect()
}

#[test]
fn an_edge_name_maps_to_the_gateway_and_others_to_own_addresses() {
    let rules = CoreDnsHosts::default();
    assert_eq!(
        style(&rules, MAX_FILE_BYTES).render_files(&places(), 0),
        ["10.0.9.1 cloud-1\nfd01::1 cloud-1\n\
          10.96.0.20 edge-1\nfd00::20 edge-1\n\
          10.96.0.20 edge-2\nfd00::20 edge-2\n"]
    );
    assert_eq!(
        style(&rules, MAX_FILE_BYTES).render_files(&BTreeMap::new(), 0),
        [""]
    );
}

#[test]
fn a_name_stands_in_each_zone_as_well() {
    let rules = CoreDnsHosts {
        zones: vec!["Nodes.example.".to_owned(), "n".to_owned()],
        ..CoreDnsHosts::default()
    };
    let files = style(&rules, MAX_FILE_BYTES).render_files(&places(), 0);
    let first = files[0].lines().next().unwrap();
    assert_eq!(first, "10.0.9.1 cloud-1 cloud-1.nodes.example cloud-1.n");
}

#[test]
fn the_openyurt_format_has_one_sorted_line_per_node() {
    let rules = CoreDnsHosts {
        format: HostsFormat::OpenYurt,
        ..CoreDnsHosts::default()
    };
    assert_eq!(
        style(&rules, MAX_FILE_BYTES).render_files(&places(), 0),
        ["10.0.9.1\tcloud-1\n10.96.0.20\tedge-1\n10.96.0.20\tedge-2"]
    );
}

#[test]
fn all_names_are_in_one_file_each_and_no_file_is_too_large() {
    let style = style(&CoreDnsHosts::default(), 1000);
    let places = many(200);
    let files = style.render_files(&places, 0);
    assert!(files.len() > 6, "{}", files.len());
    assert!(files.iter().all(|file| file.len() <= 1000));
    let mut names: Vec<&str> = files
        .iter()
        .flat_map(|file| file.lines())
        .filter_map(|line| line.strip_prefix("10.96.0.20 "))
        .collect();
    names.sort_unstable();
    let mut expected: Vec<&str> = places.keys().map(NodeName::as_str).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
}

#[test]
fn one_change_is_one_write() {
    let style = style(&CoreDnsHosts::default(), 1000);
    let mut places = many(200);
    let before = style.render_files(&places, 0);
    places.remove("edge-77");
    let after = style.render_files(&places, before.len());
    let changed = before.iter().zip(&after).filter(|(old, new)| old != new);
    assert_eq!((before.len(), changed.count()), (after.len(), 1));
}

#[test]
fn an_additional_file_takes_names_and_changes_no_other_entry() {
    let style = style(&CoreDnsHosts::default(), 1000);
    let places = many(200);
    let few = style.render_files(&places, 0);
    let entries: Vec<HostEntry> = places
        .keys()
        .map(|name| HostEntry {
            name: name.clone(),
            lines: Vec::new(),
        })
        .collect();
    for entry in &entries {
        let (old, new) = (entry.file_index(few.len()), entry.file_index(few.len() + 1));
        assert!(new == old || new == few.len(), "{}", entry.name);
    }
}

#[test]
fn there_are_fewer_files_only_once_there_is_room_to_spare() {
    let style = style(&CoreDnsHosts::default(), 1000);
    // About 35 bytes each: entries that just fit into one file stay in two.
    let tight = many(25);
    assert_eq!(style.render_files(&tight, 0).len(), 1);
    assert_eq!(style.render_files(&tight, 1).len(), 1);
    assert_eq!(style.render_files(&tight, 2).len(), 2);
    assert_eq!(style.render_files(&many(15), 2).len(), 1);
}
