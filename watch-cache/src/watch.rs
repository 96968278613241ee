//! A watch: the initial objects (if they are requested), then each event, until its timeout.
//!
//! Events are pulled, not pushed: a client's connection requests the next bytes when it has room for them, and gets all
//! events until then. So a slow client holds no queue. If a client is so slow that its events are no longer in the buffer, it
//! receives 410 and lists again.

use crate::{
    encode::{ADDED, DELETED, Encoder, MODIFIED, ResponseCache},
    event_buffer::Event,
    list,
    list_options::ListOptions,
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

/// Minimum timeout of a watch that requests none; the maximum is twice this, as in kube-apiserver.
const MIN_TIMEOUT: Duration = Duration::from_mins(30);
/// Timeout of a watch whose requested timeout is too large for a clock.
const MAX_TIMEOUT: Duration = Duration::from_hours(24);
/// Interval of the bookmarks that send a client its version.
const BOOKMARK_INTERVAL: Duration = Duration::from_mins(1);
/// Maximum size of a chunk, in bytes.
const MAX_CHUNK_BYTES: usize = 64 * 1024;
/// Maximum number of events that are processed at once.
const MAX_BATCH_EVENTS: usize = 64;

/// State of one watch.
pub(crate) struct Watch {
    pub(crate) store: Arc<Store>,
    pub(crate) encoder: Encoder,
    pub(crate) selector: Selector,
    pub(crate) cache: ResponseCache,
    options: ListOptions,
    phase: WatchPhase,
    deadline: Instant,
    next_bookmark: Instant,
    version_changes: watch::Receiver<u64>,
    _watch_guard: WatchGuard,
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
        epoch: Epoch,
        next_event: u64,
    },
    Ended,
}

/// Next part of the watch.
enum NextEvent {
    Bytes(Bytes),
    /// There is nothing new.
    Wait,
    Ended,
}

impl Watch {
    /// Begins a watch.
    ///
    /// # Errors
    /// If the request cannot be served. An error that a client can correct by a list is sent within the watch.
    pub(crate) async fn start(
        store: &Arc<Store>,
        (encoder, selector, cache): (Encoder, Selector, ResponseCache),
        options: ListOptions,
    ) -> Result<Self, ApiStatus> {
        let version = options.version_number()?;
        let send_initial_events = options.initial_events;
        if send_initial_events.is_some() && options.version_match != "NotOlderThan" {
            let message = "sendInitialEvents requires resourceVersionMatch=NotOlderThan";
            return Err(ApiStatus::malformed(message));
        }
        if send_initial_events == Some(true) || options.require_fresh {
            list::wait_for_version(store, version).await?;
        }
        let to_status = |why| ApiStatus::version_error(store.resource(), version, why);
        let phase = if send_initial_events.unwrap_or(version == 0) {
            WatchPhase::Initial(store.list_state().map_err(to_status)?, 0)
        } else {
            // Version 0 without initial events starts at the current version.
            let start_version = if version == 0 {
                store.version()
            } else {
                version
            };
            match store.position_after(start_version, options.require_fresh) {
                Ok((history, next)) => WatchPhase::Events {
                    epoch: history,
                    next_event: next,
                },
                Err(VersionError::Future(_)) => WatchPhase::Ahead(start_version),
                Err(why @ VersionError::Empty) => return Err(to_status(why)),
                // A valid watch request receives this error as a watch event.
                Err(VersionError::Expired) => WatchPhase::Expired(start_version),
            }
        };
        let timeout = options
            .timeout
            .unwrap_or_else(|| MIN_TIMEOUT.mul_f64(1.0 + rand::random::<f64>()))
            .min(MAX_TIMEOUT);
        Ok(Self {
            version_changes: store.subscribe(),
            _watch_guard: store.register_watch(),
            store: store.clone(),
            encoder,
            selector,
            cache,
            phase,
            deadline: Instant::now() + timeout,
            next_bookmark: Instant::now()
                + BOOKMARK_INTERVAL.mul_f64(0.75 + rand::random::<f64>() / 4.0),
            options,
        })
    }

    /// Returns the bytes of the watch.
    pub(crate) fn stream(self) -> BoxStream<'static, Bytes> {
        let next_chunk = |mut watch: Self| async move {
            let bytes = watch.next_chunk().await?;
            Some((bytes, watch))
        };
        stream::unfold(self, next_chunk).boxed()
    }

    async fn next_chunk(&mut self) -> Option<Bytes> {
        loop {
            self.version_changes.mark_unchanged();
            match self.advance() {
                // Empty chunks are skipped.
                NextEvent::Bytes(bytes) if bytes.is_empty() => continue,
                NextEvent::Bytes(bytes) => return Some(bytes),
                NextEvent::Ended => return None,
                NextEvent::Wait => {}
            }
            let stale_in = self
                .options
                .require_fresh
                .then(|| self.store.time_until_stale())
                .flatten();
            let stale_at = stale_in.map(|remaining| Instant::now() + remaining);
            let wake_at = stale_at
                .unwrap_or(self.deadline)
                .min(self.deadline)
                .min(self.next_bookmark);
            tokio::select! {
                biased;
                changed = self.version_changes.changed() => changed.ok()?,
                () = sleep_until(wake_at) => {
                    let now = Instant::now();
                    if now >= self.deadline {
                        self.phase = WatchPhase::Ended;
                    }
                    // The watch ends, so that a follower selects a connected source.
                    if self.options.require_fresh && self.store.stale_age().is_some() {
                        return None;
                    }
                    if now >= self.next_bookmark || now >= self.deadline {
                        self.next_bookmark = now + BOOKMARK_INTERVAL;
                        if let Some(bytes) = self.bookmark_if_current() {
                            return Some(bytes);
                        }
                    }
                }
            }
        }
    }

    fn advance(&mut self) -> NextEvent {
        match &self.phase {
            WatchPhase::Ended => NextEvent::Ended,
            WatchPhase::Expired(version) => self.fail(&ApiStatus::too_old(*version)),
            WatchPhase::Initial(state, from) => match state.upgrade() {
                Some(state) => self.send_initial(&state.clone(), *from),
                None => self.fail(&ApiStatus::expired(
                    "the initial state of this watch is no longer available, because the client read too slowly",
                )),
            },
            WatchPhase::Ahead(version) => {
                let version = *version;
                match self.store.position_after(version, self.options.require_fresh) {
                    Ok((history, next)) => {
                        self.phase = WatchPhase::Events { epoch: history, next_event: next };
                        self.advance()
                    }
                    Err(VersionError::Expired) => self.fail(&ApiStatus::too_old(version)),
                    Err(_) => NextEvent::Wait,
                }
            }
            WatchPhase::Events { epoch: history, next_event: next } => {
                let (history, next) = (*history, *next);
                match self
                    .store
                    .read_events(history, next, (MAX_BATCH_EVENTS, self.options.require_fresh))
                {
                    EventBatch::Missed => self.fail(&ApiStatus::expired(
                        "too old resource version: later events are no longer available",
                    )),
                    EventBatch::Events(events, _) if events.is_empty() => NextEvent::Wait,
                    EventBatch::Events(events, next) => {
                        self.phase = WatchPhase::Events { epoch: history, next_event: next };
                        self.encode_events(&events)
                    }
                }
            }
        }
    }

    fn fail(&mut self, failure: &ApiStatus) -> NextEvent {
        self.phase = WatchPhase::Ended;
        NextEvent::Bytes(self.encoder.encode_error(failure))
    }

    /// Sends the initial objects, one chunk at a time.
    fn send_initial(&mut self, state: &ListState, from: usize) -> NextEvent {
        let mut bytes = BytesMut::new();
        let mut position = from;
        for object in state.objects.iter().skip(from) {
            position += 1;
            if self.selector.matches(object) {
                bytes.extend_from_slice(&self.encoder.encode_event(ADDED, object));
                if bytes.len() >= MAX_CHUNK_BYTES {
                    break;
                }
            }
        }
        if position < state.objects.len() {
            if let WatchPhase::Initial(_, from) = &mut self.phase {
                *from = position;
            }
            return NextEvent::Bytes(bytes.freeze());
        }
        self.phase = WatchPhase::Events {
            epoch: state.epoch,
            next_event: state.next_event,
        };
        if self.options.initial_events == Some(true) && self.options.bookmarks {
            bytes.extend_from_slice(&self.encoder.encode_bookmark(state.version, true));
        }
        if bytes.is_empty() {
            return self.advance();
        }
        NextEvent::Bytes(bytes.freeze())
    }

    fn encode_events(&self, events: &[Event]) -> NextEvent {
        let mut bytes = BytesMut::new();
        for event in events {
            if let Some(frame) = self.encode_event(event) {
                bytes.extend_from_slice(&frame);
            }
        }
        NextEvent::Bytes(bytes.freeze())
    }

    /// Encodes an event for a client that selects some of the objects. Returns `None` if the event does not concern the client.
    fn encode_event(&self, event: &Event) -> Option<Bytes> {
        let was_selected = event
            .before
            .as_ref()
            .is_some_and(|before| self.selector.matches(before));
        let is_selected = !event.deleted && self.selector.matches(&event.object);
        let event_type = match (was_selected, is_selected) {
            (false, false) => return None,
            (false, true) => ADDED,
            (true, true) => MODIFIED,
            (true, false) => DELETED,
        };
        // DELETED contains the object as it was when selected, as in kube-apiserver.
        let deselected = event
            .before
            .as_ref()
            .filter(|_| was_selected && !is_selected && !event.deleted);
        let deselected = deselected.map(|before| before.with_version(event.version));
        let object = deselected.as_ref().unwrap_or(&event.object);
        if self.encoder.is_plain() {
            return Some(self.encoder.encode_event(event_type, object));
        }
        let cache_key = format!(
            "{}#{}{event_type}{}",
            self.store.resource(),
            event.number,
            self.encoder.cache_key()
        );
        if let Some(bytes) = self.cache.get(&cache_key) {
            return Some(bytes);
        }
        let bytes = self.encoder.encode_event(event_type, object);
        self.cache.put(&cache_key, &bytes);
        Some(bytes)
    }

    /// Returns a bookmark, if the client requests bookmarks and has received all events.
    fn bookmark_if_current(&mut self) -> Option<Bytes> {
        let (epoch, version, next_event) = self.store.position();
        let is_current = matches!(self.phase, WatchPhase::Events { epoch: own, next_event: from } if (own, from) == (epoch, next_event));
        (self.options.bookmarks && is_current).then(|| self.encoder.encode_bookmark(version, false))
    }
}

#[cfg(test)]
mod tests;
