use super::*;
use crate::ca::IssuedCertificate;
use crate::{
    Ca, EdgeIdentity, GatewayRevocations, NodeName, PrivateKey, RotationStep, TrustDomain,
    VerifiedPublicKey, verify_crls,
};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

fn open() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("data"), OpenMode::Create).unwrap();
    (dir, store)
}

fn ca() -> Ca {
    Ca::create(&TrustDomain::parse("td").unwrap()).unwrap()
}

fn edge(ca: &Ca, node: &str) -> EdgeIdentity {
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let node = NodeName::parse(node).unwrap();
    let issued = ca.issue_edge(&csr, &node, Duration::from_mins(1)).unwrap();
    EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_ca_comes_back_after_a_restart_and_is_not_overwritten() {
    let (dir, store) = open();
    assert!(store.ca().unwrap().is_none());
    let first = ca();
    store.save_ca(&first).unwrap();
    assert!(matches!(
        store.save_ca(&ca()),
        Err(StoreError::Exists { .. })
    ));
    let again = Store::open(dir.path().join("data"), OpenMode::Existing).unwrap();
    assert_eq!(
        again.ca().unwrap().unwrap().fingerprint(),
        first.fingerprint()
    );
}

#[test]
fn an_edge_keeps_revocations_of_gateways() {
    let (_dir, store) = open();
    let own = ca();
    store.revoke_gateway("40aa", "stolen").unwrap();
    let list = store.revoked_gateways().unwrap();
    let mut edge = edge(&own, "edge-1");
    let text = own.sign_crls(&list).unwrap().unwrap();
    let (revoked, _) = verify_crls(&text, &edge.roots, &edge.trust_domain).unwrap();
    edge.revoked_gateways = revoked;
    store.save_edge(&edge).unwrap();
    let stored = || store.edge().unwrap().unwrap().revoked_gateways;
    assert_eq!(stored(), GatewayRevocations::default());
    store
        .save_gateway_revocations(&edge.revoked_gateways)
        .unwrap();
    assert_eq!(stored(), edge.revoked_gateways);
    assert!(stored().is_revoked("40aa"));
    store.leave_edge().unwrap();
    assert!(store.gateway_revocations().is_revoked("40aa"));
    // A damaged file does not keep the edge from its start.
    store.save_edge(&edge).unwrap();
    fs::write(store.dir.path("gateway-revocations.json"), "half of").unwrap();
    assert_eq!(stored(), GatewayRevocations::default());
    let kept = store.dir.path("gateway-revocations.damaged");
    assert_eq!(fs::read_to_string(kept).unwrap(), "half of");
}

#[test]
fn revocations_of_gateways_are_entries_and_parts_of_a_backup() {
    let (dir, store) = open();
    store.save_ca(&ca()).unwrap();
    store.revoke_gateway("40aa", "stolen").unwrap();
    let list = store.revoked_gateways().unwrap();
    let key = "revoked-gateway/40aa";
    let text = store.entries().unwrap()[key].clone();
    assert_eq!(normalize_entry(key, &text).unwrap(), text);
    assert!(normalize_entry("revoked-gateway/40AA", &text).is_err());
    let other = Store::open(dir.path().join("other"), OpenMode::Create).unwrap();
    let change = |expected: Option<&String>, value: Option<&String>| EntryChange {
        key: key.to_owned(),
        expected: expected.cloned(),
        value: value.cloned(),
    };
    other.change_entries(&[change(None, Some(&text))]).unwrap();
    assert_eq!(other.revoked_gateways().unwrap(), list);
    other.change_entries(&[change(Some(&text), None)]).unwrap();
    assert_eq!(
        other.revoked_gateways().unwrap(),
        RevokedGateways::default()
    );
    other.restore(&store.backup().unwrap()).unwrap();
    assert_eq!(other.revoked_gateways().unwrap(), list);
}

#[test]
fn the_ticket_secret_is_created_once_and_damage_is_named() {
    let (dir, store) = open();
    let made = store.ticket_secret().unwrap();
    let again = Store::open(dir.path().join("data"), OpenMode::Existing).unwrap();
    assert_eq!(again.ticket_secret().unwrap(), made);
    store.save_ca(&ca()).unwrap();
    assert_ne!(store.ticket_secret().unwrap(), made, "a new CA has another");
    let file = dir.path().join("data/tickets.key");
    fs::write(&file, "half").unwrap();
    let damaged = store.ticket_secret().unwrap_err().to_string();
    assert!(damaged.contains("tickets.key is damaged"), "{damaged}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "half");
}

#[test]
fn the_directory_and_its_files_are_the_owners_alone() {
    let (dir, store) = open();
    store.save_ca(&ca()).unwrap();
    store.save_edge(&edge(&ca(), "edge-1")).unwrap();
    store.ticket_secret().unwrap();
    let data = dir.path().join("data");
    assert_eq!(mode(&data), 0o700);
    for name in names(&data) {
        assert_eq!(mode(&data.join(&name)), 0o600, "{name}");
    }
}

#[test]
fn an_edge_comes_back_with_the_gateways_it_learned() {
    let (_dir, store) = open();
    assert!(store.edge().unwrap().is_none());
    let gateways = vec!["gw:10262".to_owned()];
    let saved = EdgeIdentity {
        gateways,
        ..edge(&ca(), "edge-1")
    };
    store.save_edge(&saved).unwrap();
    let found = store.edge().unwrap().unwrap();
    assert_eq!(
        (found.node.as_str(), &found.gateways),
        ("edge-1", &saved.gateways)
    );
    assert_eq!(
        (found.roots, found.leaf.chain()),
        (saved.roots, saved.leaf.chain())
    );
}

#[test]
fn a_damaged_file_is_named_and_kept() {
    let (dir, store) = open();
    store.save_ca(&ca()).unwrap();
    let data = dir.path().join("data");
    for name in [
        "ca.json",
        "ca.pem",
        "tokens.json",
        "nodes.json",
        "edge.json",
    ] {
        fs::write(data.join(name), "{ \"half\": ").unwrap();
    }
    let root = store.ca().unwrap_err().to_string();
    assert!(root.contains("ca.json is damaged"), "{root}");
    assert!(
        store
            .edge()
            .unwrap_err()
            .to_string()
            .contains("edge.json is damaged")
    );
    assert!(
        store
            .nodes()
            .all()
            .unwrap_err()
            .to_string()
            .contains("nodes.json is damaged")
    );
    assert!(
        store
            .nodes()
            .remove(&NodeName::parse("a").unwrap())
            .is_err()
    );
    assert_eq!(
        fs::read_to_string(data.join("nodes.json")).unwrap(),
        "{ \"half\": "
    );
}

/// Creates a directory in the format from before `ca.json`.
fn from_before(data: &Path, ca: &Ca) {
    fs::remove_file(data.join("ca.json")).ok();
    fs::write(data.join("ca.pem"), ca.root_pem()).unwrap();
    fs::write(data.join("ca.key"), ca.key_pem().expose()).unwrap();
}

#[test]
fn a_key_of_another_ca_is_named() {
    let (dir, store) = open();
    let data = dir.path().join("data");
    from_before(&data, &ca());
    fs::write(data.join("ca.key"), ca().key_pem().expose()).unwrap();
    let refused = store.ca().unwrap_err().to_string();
    assert!(refused.contains("ca.key is damaged"), "{refused}");
    fs::remove_file(data.join("ca.key")).unwrap();
    let refused = store.ca().unwrap_err().to_string();
    assert!(refused.contains("ca.json is missing"), "{refused}");
}

#[test]
fn an_old_format_root_is_read_and_migrated_at_rotation() {
    let (dir, store) = open();
    let (data, old) = (dir.path().join("data"), ca());
    from_before(&data, &old);
    assert_eq!(
        store.ca().unwrap().unwrap().fingerprint(),
        old.fingerprint()
    );
    assert!(matches!(
        store.save_ca(&ca()),
        Err(StoreError::Exists { .. })
    ));
    let (prepared, step) = store
        .change_ca(|ca| {
            ca.prepare().map_err(|error| StoreError::Corrupt {
                path: "".into(),
                why: error.to_string(),
            })
        })
        .unwrap();
    assert_eq!(step, RotationStep::Applied);
    assert!(data.join("ca.json").exists() && !data.join("ca.key").exists());
    let again = store.ca().unwrap().unwrap();
    assert_eq!(again.fingerprints(), prepared.fingerprints());
    assert_eq!(again.fingerprint(), old.fingerprint());
    let shown = fs::read_to_string(data.join("ca.pem")).unwrap();
    assert_eq!(shown, prepared.bundle_pem());
}

#[test]
fn the_roots_for_people_follow_the_ca() {
    let (dir, store) = open();
    let (data, ca) = (dir.path().join("data"), ca());
    store.save_ca(&ca).unwrap();
    for spoiled in ["", "nonsense"] {
        fs::write(data.join("ca.pem"), spoiled).unwrap();
        store.ca().unwrap();
        assert_eq!(
            fs::read_to_string(data.join("ca.pem")).unwrap(),
            ca.root_pem()
        );
    }
    fs::write(data.join("ca.json"), "{\"version\": 3, \"roots\": []}").unwrap();
    let refused = store.ca().unwrap_err().to_string();
    assert!(
        refused.contains("ca.json is damaged") && refused.contains("version 3"),
        "{refused}"
    );
}

#[test]
fn missing_files_and_other_versions_are_refused() {
    let (dir, _store) = open();
    let nowhere = Store::open(dir.path().join("other"), OpenMode::Existing);
    assert!(matches!(nowhere, Err(StoreError::Missing { .. })));
    let empty = Store::open(dir.path(), OpenMode::Existing);
    assert!(matches!(empty, Err(StoreError::Missing { .. })));
    fs::write(dir.path().join("data/version"), "2").unwrap();
    let newer = Store::open(dir.path().join("data"), OpenMode::Create)
        .unwrap_err()
        .to_string();
    assert!(newer.contains("version '2'"), "{newer}");
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let (dir, _store) = open();
    fs::write(dir.path().join("file"), "").unwrap();
    let refused = Store::open(dir.path().join("file/data"), OpenMode::Create).unwrap_err();
    assert!(refused.to_string().contains("file/data"), "{refused}");
}

#[test]
fn a_failed_write_names_the_file_and_leaves_no_remains() {
    let (dir, store) = open();
    let data = dir.path().join("data");
    fs::create_dir_all(data.join("edge.json/x")).unwrap();
    let before = names(&data).len();
    let refused = store.save_edge(&edge(&ca(), "edge-1")).unwrap_err();
    assert!(
        matches!(refused, StoreError::Io { doing: "write", .. }),
        "{refused}"
    );
    assert_eq!(names(&data).len(), before);
}

#[test]
fn the_next_write_removes_partial_files_of_a_killed_process() {
    let (dir, store) = open();
    let left = dir.path().join("data/.new-abc123");
    fs::write(&left, "half").unwrap();
    store.write_runtime("admin", "127.0.0.1:1").unwrap();
    assert!(!left.exists());
}

#[test]
fn a_write_that_fails_leaves_the_old_file() {
    let (dir, store) = open();
    store.save_edge(&edge(&ca(), "edge-1")).unwrap();
    let data = dir.path().join("data");
    let aside = dir.path().join("aside");
    fs::rename(&data, &aside).unwrap();
    assert!(store.save_edge(&edge(&ca(), "edge-2")).is_err());
    fs::rename(&aside, &data).unwrap();
    assert_eq!(store.edge().unwrap().unwrap().node.as_str(), "edge-1");
}

#[test]
fn sessions_of_a_retired_root_cannot_be_resumed() {
    let (_dir, store) = open();
    store.save_ca(&ca()).unwrap();
    let before = store.ticket_secret().unwrap().text().clone();
    let step = |step: fn(Ca) -> Result<(Ca, RotationStep), crate::CaError>| {
        store
            .change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()))
            .unwrap();
        store.ticket_secret().unwrap().text().clone()
    };
    assert_eq!(step(Ca::prepare), before);
    assert_eq!(step(Ca::activate), before);
    let after = step(Ca::retire);
    assert_ne!(after, before);
    assert_eq!(step(Ca::retire), after, "made again, it changes nothing");
}

#[test]
fn a_renewal_restores_no_removed_node_and_changes_no_revocation() {
    let (_dir, store) = open();
    let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let key =
        VerifiedPublicKey::verify(&PrivateKey::generate().unwrap().request().unwrap()).unwrap();
    let issued = ca.issue_edge(&key, &node, Duration::from_hours(1)).unwrap();
    let nodes = store.nodes();
    nodes.put(record("edge-1")).unwrap();
    let renew = |issued: &IssuedCertificate| {
        let change = (node.clone(), NodeUpdate::Renewed(issued.clone()));
        nodes.change(&[change]).unwrap().remove(0)
    };
    let renewed = renew(&issued).unwrap();
    assert_eq!(renewed.serial, issued.serial_hex());
    assert_eq!(renewed.root, Some(ca.fingerprint()));
    assert_eq!(nodes.all().unwrap(), std::slice::from_ref(&renewed));

    let revoked = Revocation {
        at: 1,
        reason: "stolen".into(),
        other: crate::OtherFields::new(),
    };
    nodes.set_revoked(&node, Some(revoked)).unwrap();
    let next = ca.issue_edge(&key, &node, Duration::from_hours(1)).unwrap();
    let found = renew(&next).unwrap();
    assert!(found.revoked.is_some());
    assert_eq!(found.serial, renewed.serial);

    nodes.remove(&node).unwrap();
    assert_eq!(renew(&next), None);
    assert_eq!(nodes.all().unwrap(), []);
}

#[test]
fn nodes_are_kept_by_name() {
    let (_dir, store) = open();
    let record = |node: &str, serial: &str| NodeRecord {
        node: NodeName::parse(node).unwrap(),
        addresses: vec![[10, 0, 0, 1].into()],
        pool: None,
        labels: BTreeMap::new(),
        enrolled_at: 1,
        order: None,
        serial: serial.into(),
        root: None,
        not_after: None,
        revoked: None,
        follows_cluster: false,
        join_key: None,
        other: crate::OtherFields::new(),
    };
    let nodes = store.nodes();
    nodes.put(record("b", "1")).unwrap();
    nodes.put(record("a", "2")).unwrap();
    nodes.put(record("b", "3")).unwrap();
    assert_eq!(nodes.all().unwrap(), [record("a", "2"), record("b", "3")]);
    assert!(nodes.remove(&NodeName::parse("a").unwrap()).unwrap());
}

#[test]
fn runtime_facts_stay_in_the_directory() {
    let (dir, store) = open();
    store.write_runtime("../admin", "127.0.0.1:1").unwrap();
    assert_eq!(
        store.read_runtime("../admin").unwrap().as_deref(),
        Some("127.0.0.1:1")
    );
    assert_eq!(names(dir.path()), ["data"]);
    store.remove_runtime("../admin").unwrap();
    store.remove_runtime("../admin").unwrap();
    assert_eq!(store.read_runtime("../admin").unwrap(), None);
}

#[test]
fn preparing_for_an_edge_leaves_no_files_and_names_the_obstacle() {
    let (dir, store) = open();
    let data = dir.path().join("data");
    store.check_edge_space().unwrap();
    let mut left = names(&data);
    left.sort();
    assert_eq!(left, [".lock", "version"]);
    fs::remove_dir_all(&data).unwrap();
    let error = store.check_edge_space().unwrap_err().to_string();
    assert!(error.contains(data.to_str().unwrap()), "{error}");
}

#[test]
fn a_directory_is_lived_on_by_one_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let first = Store::open(folder.path(), OpenMode::Create).unwrap();
    let second = Store::open(folder.path(), OpenMode::Existing).unwrap();
    let claim = first.claim().unwrap();
    let refused = second.claim().unwrap_err();
    assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
    second
        .write_runtime("fact", "changes need no claim")
        .unwrap();
    drop(claim);
    second.claim().unwrap();
}

/// Returns a directory with all files of a backup.
fn full() -> (tempfile::TempDir, Store, Ca) {
    let ((dir, store), ca) = (open(), ca());
    store.save_ca(&ca).unwrap();
    store.ticket_secret().unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let (tokens, life) = (store.tokens().unwrap(), Duration::from_mins(1));
    tokens
        .create(&node, life, crate::NodeAttributes::default())
        .unwrap();
    store.nodes().put(record("edge-1")).unwrap();
    let (key, since) = (crate::Fingerprint::digest(b"an app's"), 7);
    let met = (node, 10250, crate::Pin { key, since });
    store.pins().record_new(&[met]).unwrap();
    (dir, store, ca)
}

fn record(node: &str) -> NodeRecord {
    NodeRecord {
        node: NodeName::parse(node).unwrap(),
        addresses: Vec::new(),
        pool: None,
        labels: BTreeMap::new(),
        enrolled_at: 1,
        order: None,
        serial: "01".into(),
        root: None,
        not_after: None,
        revoked: None,
        follows_cluster: false,
        join_key: None,
        other: crate::OtherFields::new(),
    }
}

/// Returns the contents of the files, without `version` and locks.
fn says(data: &Path) -> BTreeMap<String, String> {
    let kept = names(data).into_iter();
    let kept = kept.filter(|name| !name.starts_with('.') && name != "version");
    kept.map(|name| (name.clone(), fs::read_to_string(data.join(name)).unwrap()))
        .collect()
}

#[test]
fn a_backup_copies_the_directory_and_overwrites_no_file() {
    let (dir, store, made) = full();
    let path = dir.path().join("backup");
    store.backup().unwrap().save(&path).unwrap();
    assert_eq!(mode(&path), 0o600);
    let again = store.backup().unwrap().save(&path).unwrap_err();
    assert!(matches!(again, StoreError::Exists { .. }), "{again}");

    let backup = Backup::read(&path).unwrap();
    let (data, copy) = (dir.path().join("data"), dir.path().join("other"));
    let other = Store::open(&copy, OpenMode::Create).unwrap();
    other.restore(&backup).unwrap();
    assert!(says(&copy) == says(&data));
    for name in names(&copy) {
        assert_eq!(mode(&copy.join(&name)), 0o600, "{name}");
    }
    // Later files are removed, and removed files come back.
    other.nodes().put(record("edge-2")).unwrap();
    let rotated = other.change_ca(|ca| Ok::<_, StoreError>(ca.prepare().unwrap()));
    assert_eq!(rotated.unwrap().0.fingerprints().len(), 2);
    other.restore(&backup).unwrap();
    assert_eq!(other.nodes().all().unwrap().len(), 1);
    let found = other.ca().unwrap().unwrap();
    assert_eq!(found.fingerprints(), made.fingerprints());
}

#[test]
fn a_restore_into_a_used_directory_or_another_ca_is_refused() {
    let (_dir, store, _) = full();
    let backup = store.backup().unwrap();
    let claim = store.claim().unwrap();
    let refused = store.restore(&backup).unwrap_err();
    assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
    drop(claim);
    let (strange, stranger) = open();
    stranger.save_ca(&ca()).unwrap();
    let before = says(&strange.path().join("data"));
    let refused = stranger.restore(&backup).unwrap_err();
    assert!(matches!(refused, StoreError::Exists { .. }), "{refused}");
    assert!(says(&strange.path().join("data")) == before);
}

#[test]
fn a_backup_that_is_damaged_anywhere_is_not_read() {
    let (dir, store, _) = full();
    let good = serde_json::to_value(store.backup().unwrap()).unwrap();
    let path = dir.path().join("backup");
    for (name, text) in [
        ("ca.json", "{\"version\": 2, \"roots\": []}"),
        ("ca.json", ""),
        ("nodes.json", "[]"),
        ("tokens.json", "{}"),
        ("tickets.key", "half"),
        ("../edge.json", "{}"),
    ] {
        let mut bad = good.clone();
        bad["files"][name] = text.into();
        fs::write(&path, bad.to_string()).unwrap();
        let refused = Backup::read(&path).unwrap_err().to_string();
        let told = refused.contains(name) && refused.contains("backup");
        assert!(told, "{refused}");
    }
    let half = good.to_string();
    fs::write(&path, &half[..half.len() / 2]).unwrap();
    assert!(Backup::read(&path).is_err());
}

#[test]
fn the_next_process_finishes_an_interrupted_restore() {
    let (dir, store, made) = full();
    let backup = serde_json::to_string(&store.backup().unwrap()).unwrap();
    let (wanted, data) = (says(&dir.path().join("data")), dir.path().join("other"));
    drop(Store::open(&data, OpenMode::Create).unwrap());
    fs::write(data.join(".restore.json"), &backup).unwrap();
    let other = Store::open(&data, OpenMode::Existing).unwrap();
    let found = other.ca().unwrap().unwrap();
    assert_eq!(found.fingerprint(), made.fingerprint());
    assert!(says(&data) == wanted);
    assert!(!data.join(".restore.json").exists());
}

#[test]
fn an_identity_that_is_replaced_or_given_up_is_kept_aside() {
    let (dir, store) = open();
    let data = dir.path().join("data");
    let (first, second) = (edge(&ca(), "edge-1"), edge(&ca(), "edge-2"));
    assert_eq!(store.replace_edge(&first, Some("one")).unwrap(), None);
    assert_eq!(store.joined_by().unwrap().as_deref(), Some("one"));
    let before = fs::read_to_string(data.join("edge.json")).unwrap();

    let kept = store.replace_edge(&second, None).unwrap().unwrap();
    assert_eq!(fs::read_to_string(&kept).unwrap(), before);
    assert_eq!(mode(&kept), 0o600);
    assert_eq!(store.edge().unwrap().unwrap().node, second.node);
    assert_eq!(store.joined_by().unwrap(), None);

    // A file that cannot be parsed is also given up, and identities that were already put aside stay.
    fs::write(data.join("edge.json"), b"\xff").unwrap();
    let left = store.leave_edge().unwrap().unwrap();
    assert_ne!(left, kept);
    assert_eq!(fs::read(&left).unwrap(), b"\xff");
    assert_eq!(fs::read_to_string(&kept).unwrap(), before);
    assert!(store.edge().unwrap().is_none());
    assert_eq!(store.leave_edge().unwrap(), None);
}

#[test]
fn revocations_are_replaced_together_and_records_stay() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path(), OpenMode::Create).unwrap();
    let name = |text: &str| NodeName::parse(text).unwrap();
    let revocation = |reason: &str| Revocation {
        at: 7,
        reason: reason.to_owned(),
        other: crate::OtherFields::new(),
    };
    let nodes = store.nodes();
    nodes
        .put(NodeRecord::name_only(&name("edge-1"), 1))
        .unwrap();
    nodes
        .revoke_or_create(&name("edge-2"), &revocation("lost"))
        .unwrap();
    let change = |node: &str, expected: Option<&str>, value: Option<&str>| EntryChange {
        key: format!("revoked/{node}"),
        expected: expected.map(|reason| entry_text(&revocation(reason))),
        value: value.map(|reason| entry_text(&revocation(reason))),
    };
    let changes = [
        change("edge-2", Some("lost"), None),
        change("edge-1", None, Some("stolen")),
        change("edge-3", None, Some("unknown")),
        change("edge-4", Some("lost"), Some("stolen")),
    ];
    let previous = store.entries().unwrap();
    assert!(!store.change_all_entries(&changes).unwrap());
    assert_eq!(store.entries().unwrap(), previous);
    let conflicts = store.change_entries(&changes).unwrap();
    assert_eq!(conflicts, ["revoked/edge-4"]);
    let revoked = nodes.all().unwrap().into_iter().map(|node| {
        let reason = node.revoked.map(|revoked| revoked.reason);
        (node.node.to_string(), node.enrolled_at, reason)
    });
    let expected = [
        ("edge-1".to_owned(), 1, Some("stolen".to_owned())),
        ("edge-2".to_owned(), 7, None),
        ("edge-3".to_owned(), 7, Some("unknown".to_owned())),
    ];
    assert_eq!(revoked.collect::<Vec<_>>(), expected);
}

#[test]
fn a_released_claim_detects_a_claim_by_another_process() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), OpenMode::Create).unwrap();
    let released = store.claim().unwrap().release();
    assert!(!released.is_taken());
    let _successor = store.claim().unwrap();
    assert!(released.is_taken());
}
