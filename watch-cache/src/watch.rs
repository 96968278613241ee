//! A watch: the initial objects (if they are requested), then each event, until its timeout.
//!
//! Events are pulled, not pushed: a client's connection asks for the next bytes when it has room for them, and gets all events
//! until then. So a slow client holds no queue. A client that is too slow finds its events gone, receives 410, and lists again.

use crate::{
    encode::{ADDED, DELETED, Encoder, MODIFIED},
    event_buffer::Event,
    list,
    list_options::ListOptions,
    response_cache::ResponseCache,
    selector::Selector,
    status::ApiStatus,
    store::{Epoch, EventBatch, ListState, Store, VersionError, WatchGuard},
};
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, BoxStream, StreamExt};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

/// A watch that names no end of its own ends after this time at least, and twice this at most, as kube-apiserver's do.
const LEAST: Duration = Duration::from_mins(30);
/// Limit of a watch whose requested timeout is later than a clock can hold.
const LONGEST: Duration = Duration::from_hours(24);
/// Interval of the bookmarks that tell a client its version.
const BOOKMARK: Duration = Duration::from_mins(1);
/// Maximum size of a chunk, in bytes.
const CHUNK: usize = 64 * 1024;
/// Events that are processed at once, at most.
const EVENTS: usize = 64;

/// State of one watch.
pub(crate) struct Watch {
    pub(crate) store: Arc<Store>,
    pub(crate) encoding: Encoder,
    pub(crate) selector: Selector,
    pub(crate) cache: ResponseCache,
    options: ListOptions,
    phase: WatchPhase,
    ends: Instant,
    bookmark: Instant,
    changed: watch::Receiver<u64>,
    _counted: WatchGuard,
}

enum WatchPhase {
    /// Sends the initial objects, from this object on.
    Initial(Weak<ListState>, usize),
    /// The client knows a version that the store does not know yet.
    Ahead(u64),
    /// The client knows a version that is too old to resume from.
    Expired(u64),
    /// Sends the events from this number on.
    Events {
        history: Epoch,
        next: u64,
    },
    Over,
}

/// Next part of the watch.
enum NextEvent {
    Bytes(Bytes),
    /// There is nothing new.
    Wait,
    Over,
}

impl Watch {
    /// Begins a watch.
    ///
    /// # Errors
    /// If the request cannot be served. An error that a client can correct by a list is sent within the watch.
    pub(crate) async fn begin(
        store: &Arc<Store>,
        (encoding, selector, cache): (Encoder, Selector, ResponseCache),
        options: ListOptions,
    ) -> Result<Self, ApiStatus> {
        let version = options.number()?;
        let initial = options.initial_events;
        if initial.is_some() && options.version_match != "NotOlderThan" {
            let message = "sendInitialEvents requires resourceVersionMatch=NotOlderThan";
            return Err(ApiStatus::malformed(message));
        }
        if initial == Some(true) || options.fresh {
            list::wait_for_version(store, version).await?;
        }
        let unknown = |why| ApiStatus::unknown(store.resource(), version, why);
        let phase = if initial.unwrap_or(version == 0) {
            WatchPhase::Initial(store.state().map_err(unknown)?, 0)
        } else {
            // Version 0 without initial events starts at the current version.
            let from = if version == 0 {
                store.version()
            } else {
                version
            };
            match store.after(from, options.fresh) {
                Ok((history, next)) => WatchPhase::Events { history, next },
                Err(VersionError::Future(_)) => WatchPhase::Ahead(from),
                Err(why @ VersionError::Empty) => return Err(unknown(why)),
                // A valid watch request receives this error as a watch event.
                Err(VersionError::Expired) => WatchPhase::Expired(from),
            }
        };
        let ends = options
            .timeout
            .unwrap_or_else(|| LEAST.mul_f64(1.0 + rand::random::<f64>()))
            .min(LONGEST);
        Ok(Self {
            changed: store.changed(),
            _counted: store.watching(),
            store: store.clone(),
            encoding,
            selector,
            cache,
            phase,
            ends: Instant::now() + ends,
            bookmark: Instant::now() + BOOKMARK.mul_f64(0.75 + rand::random::<f64>() / 4.0),
            options,
        })
    }

    /// Returns the bytes of the watch.
    pub(crate) fn stream(self) -> BoxStream<'static, Bytes> {
        let next = |mut watch: Self| async move {
            let bytes = watch.next().await?;
            Some((bytes, watch))
        };
        stream::unfold(self, next).boxed()
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            self.changed.mark_unchanged();
            match self.step() {
                // Empty chunks are skipped.
                NextEvent::Bytes(bytes) if bytes.is_empty() => continue,
                NextEvent::Bytes(bytes) => return Some(bytes),
                NextEvent::Over => return None,
                NextEvent::Wait => {}
            }
            let stale = self.options.fresh.then(|| self.store.ages_in()).flatten();
            let stale = stale.map(|within| Instant::now() + within);
            let until = stale.unwrap_or(self.ends).min(self.ends).min(self.bookmark);
            tokio::select! {
                biased;
                changed = self.changed.changed() => changed.ok()?,
                () = sleep_until(until) => {
                    let now = Instant::now();
                    if now >= self.ends {
                        self.phase = WatchPhase::Over;
                    }
                    // The watch ends, so that a follower selects a connected source.
                    if self.options.fresh && self.store.age().is_some() {
                        return None;
                    }
                    if now >= self.bookmark || now >= self.ends {
                        self.bookmark = now + BOOKMARK;
                        if let Some(bytes) = self.mark() {
                            return Some(bytes);
                        }
                    }
                }
            }
        }
    }

    fn step(&mut self) -> NextEvent {
        match &self.phase {
            WatchPhase::Over => NextEvent::Over,
            WatchPhase::Expired(version) => self.fail(&ApiStatus::too_old(*version)),
            WatchPhase::Initial(state, from) => match state.upgrade() {
                Some(state) => self.tell(&state.clone(), *from),
                None => self.fail(&ApiStatus::expired(
                    "the initial state of this watch is no longer available, because the client read too slowly",
                )),
            },
            WatchPhase::Ahead(version) => {
                let version = *version;
                match self.store.after(version, self.options.fresh) {
                    Ok((history, next)) => {
                        self.phase = WatchPhase::Events { history, next };
                        self.step()
                    }
                    Err(VersionError::Expired) => self.fail(&ApiStatus::too_old(version)),
                    Err(_) => NextEvent::Wait,
                }
            }
            WatchPhase::Events { history, next } => {
                let (history, next) = (*history, *next);
                match self
                    .store
                    .events(history, next, (EVENTS, self.options.fresh))
                {
                    EventBatch::Missed => self.fail(&ApiStatus::expired(
                        "too old resource version: later events are no longer available",
                    )),
                    EventBatch::Events(events, _) if events.is_empty() => NextEvent::Wait,
                    EventBatch::Events(events, next) => {
                        self.phase = WatchPhase::Events { history, next };
                        self.events(&events)
                    }
                }
            }
        }
    }

    fn fail(&mut self, failure: &ApiStatus) -> NextEvent {
        self.phase = WatchPhase::Over;
        NextEvent::Bytes(self.encoding.error(failure))
    }

    /// Sends the initial objects, a chunk at a time.
    fn tell(&mut self, state: &ListState, from: usize) -> NextEvent {
        let mut bytes = BytesMut::new();
        let mut at = from;
        for object in state.objects.iter().skip(from) {
            at += 1;
            if self.selector.matches(object) {
                bytes.extend_from_slice(&self.encoding.event(ADDED, object));
                if bytes.len() >= CHUNK {
                    break;
                }
            }
        }
        if at < state.objects.len() {
            if let WatchPhase::Initial(_, from) = &mut self.phase {
                *from = at;
            }
            return NextEvent::Bytes(bytes.freeze());
        }
        self.phase = WatchPhase::Events {
            history: state.history,
            next: state.next,
        };
        if self.options.initial_events == Some(true) && self.options.bookmarks {
            bytes.extend_from_slice(&self.encoding.bookmark(state.version, true));
        }
        if bytes.is_empty() {
            return self.step();
        }
        NextEvent::Bytes(bytes.freeze())
    }

    fn events(&self, events: &[Event]) -> NextEvent {
        let mut bytes = BytesMut::new();
        for event in events {
            if let Some(frame) = self.event(event) {
                bytes.extend_from_slice(&frame);
            }
        }
        NextEvent::Bytes(bytes.freeze())
    }

    /// Encodes an event for a client that selects some of the objects. Returns `None` if the event does not concern the client.
    fn event(&self, event: &Event) -> Option<Bytes> {
        let was = event
            .before
            .as_ref()
            .is_some_and(|before| self.selector.matches(before));
        let is = !event.deleted && self.selector.matches(&event.object);
        let word = match (was, is) {
            (false, false) => return None,
            (false, true) => ADDED,
            (true, true) => MODIFIED,
            (true, false) => DELETED,
        };
        // DELETED contains the object as it was when selected, as in kube-apiserver.
        let left = event
            .before
            .as_ref()
            .filter(|_| was && !is && !event.deleted);
        let left = left.map(|before| before.at(event.version));
        let object = left.as_ref().unwrap_or(&event.object);
        if self.encoding.is_plain() {
            return Some(self.encoding.event(word, object));
        }
        let asked = format!(
            "{}#{}{word}{}",
            self.store.resource(),
            event.number,
            self.encoding.word()
        );
        if let Some(bytes) = self.cache.get(&asked) {
            return Some(bytes);
        }
        let bytes = self.encoding.event(word, object);
        self.cache.put(&asked, &bytes);
        Some(bytes)
    }

    /// Returns a bookmark, if the client wants them and has received all events.
    fn mark(&mut self) -> Option<Bytes> {
        let (history, version, next) = self.store.position();
        let told = matches!(self.phase, WatchPhase::Events { history: own, next: from } if (own, from) == (history, next));
        (self.options.bookmarks && told).then(|| self.encoding.bookmark(version, false))
    }
}

#[cfg(test)]
mod tests;
