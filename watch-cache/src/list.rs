//! A list: at which version, which objects, and in parts where that is asked for.

use crate::{
    encode::ListPage,
    list_options::{ContinueToken, ListOptions, VersionMatch},
    selector::Selector,
    status::ApiStatus,
    store::{ListState, Store, VersionError},
};
use std::time::Duration;
use tokio::time::timeout;

/// Time for which a request waits for a version that is not known yet, as in kube-apiserver.
const AHEAD: Duration = Duration::from_secs(3);

/// Waits until the store knows this version.
pub(crate) async fn wait_for_version(store: &Store, version: u64) -> Result<(), ApiStatus> {
    let mut changed = store.changed();
    let reached = async {
        while store.version() < version {
            if changed.changed().await.is_err() {
                return;
            }
        }
    };
    timeout(AHEAD, reached).await.map_err(|_| {
        let known = VersionError::Future(store.version());
        ApiStatus::unknown(store.resource(), version, known)
    })
}

/// Returns the version of a list that is not the newest, and the position at which it continues.
pub(crate) async fn start_version(
    store: &Store,
    options: &ListOptions,
) -> Result<(Option<u64>, Option<ContinueToken>), ApiStatus> {
    if store.version() == 0 {
        return Err(ApiStatus::not_yet(store.resource()));
    }
    if !options.from.is_empty() {
        options.version()?;
        let from = ContinueToken::parse(&options.from)?;
        return Ok((Some(from.version), Some(from)));
    }
    match options.version()? {
        VersionMatch::Any => Ok((None, None)),
        VersionMatch::NotOlderThan(version) => {
            wait_for_version(store, version).await?;
            Ok((None, None))
        }
        VersionMatch::Exact(version) => {
            wait_for_version(store, version).await?;
            Ok((Some(version), None))
        }
    }
}

/// Returns a page of the list.
pub(crate) fn page(
    store: &Store,
    (version, from): (Option<u64>, Option<&ContinueToken>),
    selector: &Selector,
    limit: usize,
) -> Result<ListPage, ApiStatus> {
    let unknown = |why| match (why, from) {
        (VersionError::Expired, Some(_)) => ApiStatus::expired(
            "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter",
        ),
        (why, _) => ApiStatus::unknown(store.resource(), version.unwrap_or(0), why),
    };
    let state = store.at(version).map_err(unknown)?;
    Ok(truncate(&state, from, selector, limit))
}

fn truncate(
    state: &ListState,
    from: Option<&ContinueToken>,
    selector: &Selector,
    limit: usize,
) -> ListPage {
    let told = from.map(|from| (&*from.namespace, &*from.name));
    let is_due = |key: (&str, &str)| told.is_none_or(|told| key > told);
    let due = state
        .objects
        .iter()
        .filter(|object| is_due((&object.key.0, &object.key.1)) && selector.matches(object));
    let mut objects: Vec<_> = due.cloned().collect();
    let mut more = None;
    if limit > 0 && objects.len() > limit {
        let remaining = objects.len() - limit;
        objects.truncate(limit);
        more = objects.last().map(|last| {
            let next = ContinueToken {
                version: state.version,
                namespace: last.key.0.to_string(),
                name: last.key.1.to_string(),
            };
            (next.text(), remaining as u64)
        });
    }
    ListPage {
        version: state.version,
        objects,
        more,
    }
}
