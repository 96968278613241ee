use super::*;
use crate::object::tests::read;

pub(crate) fn object(namespace: &str, name: &str, version: u64) -> Object {
    labelled(namespace, name, version, "")
}

pub(crate) fn labelled(namespace: &str, name: &str, version: u64, app: &str) -> Object {
    let json = format!(
        r#"{{"kind":"Service","apiVersion":"v1","metadata":{{"name":"{name}","namespace":"{namespace}","resourceVersion":"{version}","labels":{{"app":"{app}"}}}},"spec":{{"type":"ClusterIP"}}}}"#
    );
    read(&json).unwrap()
}

pub(crate) fn store(window: usize) -> Arc<Store> {
    Arc::new(Store::new("v1/services".parse().unwrap(), window))
}

/// Returns name, version and deletion of the events after a version.
fn after(store: &Store, version: u64) -> Result<Vec<(String, u64, bool)>, VersionError> {
    let (history, next) = store.position_after(version, false)?;
    match store.read_events(history, next, (1000, false)) {
        EventBatch::Events(events, _) => Ok(events
            .iter()
            .map(|event| (event.object.key.1.to_string(), event.version, event.deleted))
            .collect()),
        EventBatch::Missed => Err(VersionError::Expired),
    }
}

fn names(state: &ListState) -> Vec<(String, u64)> {
    let objects = state.objects.iter();
    objects
        .map(|object| (object.key.1.to_string(), object.version))
        .collect()
}

fn of(name: &str, version: u64) -> (String, u64) {
    (name.to_owned(), version)
}

#[test]
fn events_after_a_version_and_the_state_at_it_are_known() {
    let store = store(1 << 20);
    assert_eq!(after(&store, 5), Err(VersionError::Empty));
    store.replace(10, vec![object("n", "a", 3), object("n", "b", 10)]);
    store.apply(object("n", "c", 11), false);
    store.apply(object("n", "a", 12), false);
    store.apply(object("n", "b", 13), true);
    assert_eq!(
        after(&store, 10),
        Ok(vec![
            ("c".into(), 11, false),
            ("a".into(), 12, false),
            ("b".into(), 13, true)
        ])
    );
    assert_eq!(after(&store, 12), Ok(vec![("b".into(), 13, true)]));
    assert_eq!(after(&store, 13), Ok(vec![]));
    assert_eq!(after(&store, 14), Err(VersionError::Future(13)));
    assert_eq!(after(&store, 9), Err(VersionError::Expired));
    for (version, expected) in [
        (10, vec![of("a", 3), of("b", 10)]),
        (11, vec![of("a", 3), of("b", 10), of("c", 11)]),
        (12, vec![of("a", 12), of("b", 10), of("c", 11)]),
        (13, vec![of("a", 12), of("c", 11)]),
    ] {
        let state = store.state_at(Some(version)).unwrap();
        assert_eq!(
            (state.version, names(&state)),
            (version, expected),
            "{version}"
        );
    }
}

#[test]
fn a_list_after_an_outage_is_converted_to_events() {
    let store = store(1 << 20);
    store.replace(
        10,
        vec![
            object("n", "a", 3),
            object("n", "b", 10),
            object("n", "c", 4),
        ],
    );
    store.replace(
        20,
        vec![
            object("n", "d", 17),
            object("n", "b", 15),
            object("n", "a", 3),
        ],
    );
    assert_eq!(
        after(&store, 10),
        Ok(vec![
            ("b".into(), 15, false),
            ("d".into(), 17, false),
            ("c".into(), 20, true)
        ])
    );
    // An object that disappeared gets a deletion at that version.
    let (history, next) = store.position_after(10, false).unwrap();
    let EventBatch::Events(events, _) = store.read_events(history, next, (10, false)) else {
        panic!()
    };
    assert_eq!(
        events[2].object.to_value()["metadata"]["resourceVersion"],
        "20"
    );
    // Objects that existed only within the outage were never seen here.
    for version in 11..20 {
        assert_eq!(
            after(&store, version),
            Err(VersionError::Expired),
            "{version}"
        );
    }
    assert_eq!(after(&store, 20), Ok(vec![]));
    assert_eq!(
        names(&store.state_at(Some(10)).unwrap()),
        [of("a", 3), of("b", 10), of("c", 4)]
    );
}

#[test]
fn a_version_that_went_back_is_another_history() {
    let store = store(1 << 20);
    store.replace(10, vec![object("n", "a", 3)]);
    let (history, next) = store.position_after(10, false).unwrap();
    store.replace(7, vec![object("n", "b", 7)]);
    assert!(matches!(
        store.read_events(history, next, (10, false)),
        EventBatch::Missed
    ));
    assert_eq!(after(&store, 10), Err(VersionError::Future(7)));
    assert_eq!(names(&store.state_at(None).unwrap()), [of("b", 7)]);
}

#[test]
fn the_window_is_bounded_in_bytes_and_older_versions_expire() {
    let store = store(20_000);
    store.replace(10, vec![]);
    let (history, next) = store.position_after(10, false).unwrap();
    for version in 11..1000 {
        store.apply(object("n", "a", version), false);
    }
    assert_eq!(after(&store, 10), Err(VersionError::Expired));
    assert!(matches!(
        store.read_events(history, next, (10, false)),
        EventBatch::Missed
    ));
    let oldest = (10..1000)
        .find(|version| after(&store, *version).is_ok())
        .unwrap();
    assert!((900..995).contains(&oldest), "{oldest}");
    assert_eq!(
        after(&store, oldest).unwrap().len(),
        999 - usize::try_from(oldest).unwrap()
    );
    let inner = store.lock();
    assert_eq!(
        inner.bytes,
        inner
            .objects
            .values()
            .map(|object| object.memory_size())
            .sum::<usize>()
    );
}

#[test]
fn known_objects_cause_no_event_and_bookmarks_pass() {
    let store = store(1 << 20);
    store.replace(10, vec![object("n", "a", 10)]);
    store.apply(object("n", "a", 10), false);
    store.apply(object("n", "x", 9), false);
    store.apply(object("n", "y", 12), true);
    assert_eq!(after(&store, 10), Ok(vec![]));
    store.advance_version(15);
    store.advance_version(14);
    assert_eq!(store.version(), 15);
    assert_eq!(after(&store, 15), Ok(vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_lost_source_makes_a_view_old_only_after_a_while() {
    let store = store(1 << 20);
    store.replace(10, vec![]);
    store.mark_connected(None);
    assert_eq!((store.stale_age(), store.status().lost), (None, None));
    store.mark_lost(Duration::ZERO);
    assert_eq!(store.stale_age(), None);
    assert!(store.status().lost.is_some());
    let begun = SystemTime::now();
    store.mark_lost(Duration::from_mins(1));
    // Independent of the time until the silence was noticed.
    assert_eq!(store.stale_age(), None);
    assert_eq!(store.time_until_stale(), Some(STALE_NOTICE_DELAY));
    tokio::time::advance(STALE_NOTICE_DELAY).await;
    assert_eq!(store.time_until_stale(), Some(Duration::ZERO));
    let age = store.stale_age().unwrap().as_secs();
    let oldest = 60 + begun.elapsed().unwrap().as_secs();
    assert!((60..=oldest).contains(&age), "{age}");
    // A further loss does not reduce the age.
    store.mark_lost(Duration::ZERO);
    assert!(store.stale_age().unwrap().as_secs() >= 59);
    store.mark_connected(None);
    assert_eq!(store.stale_age(), None);
}

#[test]
fn readers_that_begin_at_one_version_share_its_state() {
    let store = store(1 << 20);
    store.replace(10, vec![object("n", "a", 3)]);
    let (one, two) = (store.list_state().unwrap(), store.list_state().unwrap());
    assert!(one.ptr_eq(&two) && one.upgrade().is_some());
    store.apply(object("n", "b", 11), false);
    assert!(!store.list_state().unwrap().ptr_eq(&one));
}

#[test]
fn an_object_with_many_changes_is_known_at_each_version() {
    let store = store(1 << 20);
    store.replace(10, vec![object("n", "b", 5), object("n", "d", 6)]);
    store.apply(object("n", "b", 11), false);
    store.apply(object("n", "b", 12), true);
    store.apply(object("n", "a", 13), false);
    store.apply(object("n", "b", 14), false);
    store.apply(object("n", "e", 15), false);
    store.apply(object("n", "a", 16), true);
    for (version, expected) in [
        (10, vec![of("b", 5), of("d", 6)]),
        (11, vec![of("b", 11), of("d", 6)]),
        (12, vec![of("d", 6)]),
        (13, vec![of("a", 13), of("d", 6)]),
        (14, vec![of("a", 13), of("b", 14), of("d", 6)]),
        (15, vec![of("a", 13), of("b", 14), of("d", 6), of("e", 15)]),
        (16, vec![of("b", 14), of("d", 6), of("e", 15)]),
    ] {
        let state = store.state_at(Some(version)).unwrap();
        assert_eq!(names(&state), expected, "{version}");
    }
}

#[test]
fn a_list_with_more_changes_than_versions_is_of_another_cloud() {
    for version in [10, 11] {
        let store = store(1 << 20);
        store.replace(10, vec![object("n", "a", 3), object("n", "b", 4)]);
        let (history, next) = store.position_after(10, false).unwrap();
        store.replace(version, vec![object("n", "c", 9)]);
        assert!(matches!(
            store.read_events(history, next, (10, false)),
            EventBatch::Missed
        ));
        assert_eq!(names(&store.state_at(None).unwrap()), [of("c", 9)]);
    }
}

#[test]
fn the_largest_possible_version_is_handled() {
    let store = store(1 << 20);
    store.replace(u64::MAX, vec![object("n", "a", 3)]);
    store.replace(u64::MAX, vec![object("n", "b", 3)]);
    store.advance_version(u64::MAX);
    assert_eq!(
        names(&store.state_at(Some(u64::MAX)).unwrap()),
        [of("b", 3)]
    );
}
