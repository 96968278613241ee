//! One object of the API, each time that it is another.

use crate::client::{watch_said, watch_timeout};
use futures_util::{StreamExt, future::ready, stream::BoxStream};
use kube::{
    Api, Resource,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// The object as it is now, or that there is none; or why that is not known.
pub(crate) type Now<K> = Result<Option<K>, String>;

/// Each state of the object with this name, from now on. Never ends.
pub(crate) fn follow<K>(api: Api<K>, name: &str) -> BoxStream<'static, Now<K>>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let name = format!("metadata.name={name}");
    let config = watcher::Config::default().fields(&name);
    let config = config.timeout(watch_timeout());
    let mut listed = None;
    let state = move |event: Result<Event<K>, watcher::Error>| {
        ready(match event {
            Ok(Event::Init) => {
                listed = None;
                None
            }
            Ok(Event::InitApply(object)) => {
                listed = Some(object);
                None
            }
            Ok(Event::InitDone) => Some(Ok(listed.take())),
            Ok(Event::Apply(object)) => Some(Ok(Some(object))),
            Ok(Event::Delete(_)) => Some(Ok(None)),
            Err(error) => Some(Err(watch_said(&error))),
        })
    };
    let events = watcher(api, config).default_backoff();
    events.filter_map(state).boxed()
}
