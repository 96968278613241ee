//! A list: at which version, which objects, and in parts where that is asked for.

use crate::{
    encode::Page,
    failure::Failure,
    query::{Continue, Options, Version},
    selector::Selector,
    store::{State, Store, Unknown},
};
use std::time::Duration;
use tokio::time::timeout;

/// How long a version that is not known yet is waited for, as kube-apiserver does.
const AHEAD: Duration = Duration::from_secs(3);

/// Waits until the store knows this version.
pub(crate) async fn reach(store: &Store, version: u64) -> Result<(), Failure> {
    let mut changed = store.changed();
    let reached = async {
        while store.version() < version {
            if changed.changed().await.is_err() {
                return;
            }
        }
    };
    timeout(AHEAD, reached).await.map_err(|_| {
        let known = Unknown::Future(store.version());
        Failure::unknown(store.resource(), version, known)
    })
}

/// The version of a list that is not the newest, and where it goes on.
pub(crate) async fn begin(
    store: &Store,
    options: &Options,
) -> Result<(Option<u64>, Option<Continue>), Failure> {
    if store.version() == 0 {
        return Err(Failure::not_yet(store.resource()));
    }
    if !options.from.is_empty() {
        options.version()?;
        let from = Continue::parse(&options.from)?;
        return Ok((Some(from.version), Some(from)));
    }
    match options.version()? {
        Version::Any => Ok((None, None)),
        Version::NotOlderThan(version) => {
            reach(store, version).await?;
            Ok((None, None))
        }
        Version::Exact(version) => {
            reach(store, version).await?;
            Ok((Some(version), None))
        }
    }
}

/// What is in the list.
pub(crate) fn page(
    store: &Store,
    (version, from): (Option<u64>, Option<&Continue>),
    selector: &Selector,
    limit: usize,
) -> Result<Page, Failure> {
    let unknown = |why| match (why, from) {
        (Unknown::Expired, Some(_)) => Failure::expired(
            "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter",
        ),
        (why, _) => Failure::unknown(store.resource(), version.unwrap_or(0), why),
    };
    let state = store.at(version).map_err(unknown)?;
    Ok(cut(&state, from, selector, limit))
}

fn cut(state: &State, from: Option<&Continue>, selector: &Selector, limit: usize) -> Page {
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
            let next = Continue {
                version: state.version,
                namespace: last.key.0.to_string(),
                name: last.key.1.to_string(),
            };
            (next.text(), remaining as u64)
        });
    }
    Page {
        version: state.version,
        objects,
        more,
    }
}
