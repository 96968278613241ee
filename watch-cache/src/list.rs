//! Lists: the version, the objects, and the pages of a list.

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
const VERSION_WAIT_TIMEOUT: Duration = Duration::from_secs(3);

/// Waits until the store knows this version.
pub(crate) async fn wait_for_version(store: &Store, version: u64) -> Result<(), ApiStatus> {
    let mut version_changes = store.subscribe();
    let version_reached = async {
        while store.version() < version {
            if version_changes.changed().await.is_err() {
                return;
            }
        }
    };
    timeout(VERSION_WAIT_TIMEOUT, version_reached)
        .await
        .map_err(|_| {
            let current = VersionError::Future(store.version());
            ApiStatus::version_error(store.resource(), version, current)
        })
}

/// Returns the version of a list that is not the newest, and the position at which it continues.
pub(crate) async fn start_version(
    store: &Store,
    options: &ListOptions,
) -> Result<(Option<u64>, Option<ContinueToken>), ApiStatus> {
    if store.version() == 0 {
        return Err(ApiStatus::not_loaded(store.resource()));
    }
    if !options.continue_token.is_empty() {
        options.requested_version()?;
        let continue_token = ContinueToken::parse(&options.continue_token)?;
        return Ok((Some(continue_token.version), Some(continue_token)));
    }
    match options.requested_version()? {
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
pub(crate) fn list_page(
    store: &Store,
    (version, continue_token): (Option<u64>, Option<&ContinueToken>),
    selector: &Selector,
    limit: usize,
) -> Result<ListPage, ApiStatus> {
    let to_status = |why| match (why, continue_token) {
        (VersionError::Expired, Some(_)) => ApiStatus::expired(
            "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter",
        ),
        (why, _) => ApiStatus::version_error(store.resource(), version.unwrap_or(0), why),
    };
    let state = store.state_at(version).map_err(to_status)?;
    Ok(truncate(&state, continue_token, selector, limit))
}

fn truncate(
    state: &ListState,
    continue_token: Option<&ContinueToken>,
    selector: &Selector,
    limit: usize,
) -> ListPage {
    let last_sent = continue_token.map(|from| (&*from.namespace, &*from.name));
    let is_after_last = |key: (&str, &str)| last_sent.is_none_or(|sent| key > sent);
    let selected = state
        .objects
        .iter()
        .filter(|object| is_after_last((&object.key.0, &object.key.1)) && selector.matches(object));
    let mut objects: Vec<_> = selected.cloned().collect();
    let mut continuation = None;
    if limit > 0 && objects.len() > limit {
        let remaining = objects.len() - limit;
        objects.truncate(limit);
        continuation = objects.last().map(|last| {
            let next = ContinueToken {
                version: state.version,
                namespace: last.key.0.to_string(),
                name: last.key.1.to_string(),
            };
            (next.encode(), remaining as u64)
        });
    }
    ListPage {
        version: state.version,
        objects,
        continuation,
    }
}
