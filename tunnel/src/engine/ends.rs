//! Ends: of streams (RFC 9113 sections 5.1 and 5.4.2), and of the connection (sections 5.4.1 and 6.8).

use super::{
    connection::{SHUTDOWN_PING, State},
    error::{Error, Initiator, Reason},
    flow::MAX_WINDOW,
    frame::{self, kind},
    frame_limit,
    streams::{Half, Key, Lane, Stream},
};
use bytes::{Bytes, BytesMut};
use std::io;

impl State {
    // Ends of streams.

    /// Resets a stream.
    pub(super) fn reset(&mut self, key: Key, reason: Reason, initiator: Initiator) {
        let Some(stream) = self.store.get(key) else {
            return;
        };
        if stream.is_closed() {
            return;
        }
        stream.error = Some(Error::reset(reason, initiator));
        self.queued -= stream.clear_send_queue();
        stream.wake_all(&mut self.wakes);
        // A stream whose head was not sent does not exist for the peer (RFC 9113 section 5.1.1).
        if !stream.is_waiting {
            let window = stream.recv_window.left();
            self.put_reset((key.id, window), reason);
        } else if let Ok(place) = self
            .waiting
            .binary_search_by_key(&key.id, |(key, ..)| key.id)
        {
            self.waiting.remove(place);
        }
        self.settle(key);
    }

    /// Queues `RST_STREAM`, and ignores late frames of the stream from now on. `window` is the number of bytes that
    /// the peer may still send on it.
    pub(super) fn put_reset(&mut self, (id, window): (u32, usize), reason: Reason) {
        // Never ahead of the stream's HEADERS.
        let out = if self.heads.is_empty() {
            &mut self.control
        } else {
            &mut self.heads
        };
        frame::put_reset(out, id, reason);
        self.has_work = true;
        let max = self.config.max_remembered_resets;
        self.resets.add((id, window), max);
    }

    /// Counts a reset that the peer's violation has caused.
    pub(super) fn count_error_reset(&mut self) -> Result<(), Reason> {
        self.error_resets += 1;
        match self.config.max_error_resets {
            Some(max) if self.error_resets > max => Err(Reason::ENHANCE_YOUR_CALM),
            _ => Ok(()),
        }
    }

    /// Does what follows from a change of a stream's state: a closed stream counts no more, and is freed with its last handle.
    pub(super) fn settle(&mut self, key: Key) {
        let Some(stream) = self.store.get(key) else {
            return;
        };
        if !stream.is_closed() {
            return;
        }
        let was_counted = std::mem::take(&mut stream.is_counted);
        let (is_local, id) = (stream.is_local, stream.id);
        let is_free = stream.handles == 0 && !stream.is_unaccepted;
        let in_flight = stream.in_flight;
        self.store.forget_id(id);
        if is_free {
            let lane = self.store.remove(key).map(|stream| stream.lane);
            self.release_connection(in_flight);
            if lane.is_some_and(|lane| lane != Lane::None) {
                self.schedule.count_removed(&mut self.store);
            }
        }
        if was_counted {
            if is_local {
                self.open_local -= 1;
                self.open_waiting();
            } else {
                self.open_remote -= 1;
            }
        }
        // The end of the connection may depend on its last stream.
        let may_end =
            self.has_no_senders || self.peer_left.is_some() || self.last_accepted.is_some();
        self.has_work |= may_end && self.open_local + self.open_remote == 0;
    }

    /// Drops a handle. A stream without handles is reset, unless all of it is sent and received.
    pub(super) fn drop_handle(&mut self, key: Key) {
        let Some(stream) = self.store.get(key) else {
            return;
        };
        stream.handles -= 1;
        if stream.handles > 0 {
            return;
        }
        let is_complete = stream.send == Half::Ended && self.config.is_server;
        if stream.is_closed() || (stream.send == Half::Ended && stream.recv == Half::Ended) {
            self.settle(key);
        } else if is_complete && !stream.end_sent {
            // The response goes first (RFC 9113 section 8.1).
            stream.reset_after_end = Some(Reason::NO_ERROR);
            stream.is_unread = true;
            stream.body.clear();
        } else {
            let reason = if is_complete {
                Reason::NO_ERROR
            } else {
                Reason::CANCEL
            };
            self.reset(key, reason, Initiator::User);
        }
    }

    // Ends of the connection.

    /// Begins the end: streams that are on their way are still accepted (RFC 9113 section 6.8).
    pub(super) fn shut_down(&mut self) {
        if self.last_accepted.is_some() || self.end.is_some() {
            return;
        }
        self.put_go_away(Reason::NO_ERROR, MAX_WINDOW, &[]);
        frame::put_frame(&mut self.control, kind::PING, 0, 0, &SHUTDOWN_PING);
    }

    /// Queues GOAWAY. Its number is never higher than in an earlier one (RFC 9113 section 6.8).
    pub(super) fn put_go_away(&mut self, reason: Reason, last: u32, text: &[u8]) {
        let last = self.last_accepted.map_or(last, |earlier| earlier.min(last));
        self.last_accepted = Some(last);
        frame::put_go_away(&mut self.control, last, reason, text);
        self.has_work = true;
    }

    /// Ends the connection because the peer violated the protocol (RFC 9113 section 5.4.1).
    pub(super) fn fail(&mut self, reason: Reason) {
        let text = if reason == Reason::ENHANCE_YOUR_CALM {
            let frames = frame_limit::frame_name(self.receiving.last_kind);
            Bytes::from(format!("the peer floods its tunnel with {frames}"))
        } else {
            Bytes::new()
        };
        self.put_go_away(reason, self.last_remote, &text);
        let error = Error::go_away(reason, Initiator::Engine, text);
        self.finish(Err(error.clone()), &error);
    }

    /// Ends the connection once nothing more can happen on it.
    pub(super) fn check_end(&mut self) {
        if self.end.is_some() || self.open_local + self.open_remote + self.waiting.len() > 0 {
            return;
        }
        let is_last_told = self.last_accepted.is_some_and(|last| last < MAX_WINDOW);
        let is_unused = self.has_no_senders && !self.config.is_server && self.store.is_empty();
        if is_unused || self.peer_left.is_some() || is_last_told {
            if !is_last_told {
                self.put_go_away(Reason::NO_ERROR, self.last_remote, &[]);
            }
            self.finish(self.result_of_peer(), &Error::broken_pipe());
        }
    }

    /// Returns the result of a connection that ended in order at this end.
    fn result_of_peer(&self) -> Result<(), Error> {
        let error = self.peer_left.as_ref();
        let error = error.filter(|error| error.reason() != Some(Reason::NO_ERROR));
        error.cloned().map_or(Ok(()), Err)
    }

    /// Ends the connection after its transport ended, with an error or in order.
    pub(super) fn transport_ended(&mut self, error: Option<io::Error>) {
        if self.end.is_some() {
            return;
        }
        let Some(error) = error else {
            self.finish(self.result_of_peer(), &Error::broken_pipe());
            return;
        };
        // Peers that leave without close_notify are ordinary.
        let is_close = error.kind() == io::ErrorKind::UnexpectedEof
            && (self.config.is_server || self.peer_left.is_some())
            && self.result_of_peer().is_ok();
        let error = Error::io(error);
        let result = if is_close { Ok(()) } else { Err(error.clone()) };
        self.finish(result, &error);
    }

    /// Records the end, and ends all streams with `error`.
    fn finish(&mut self, result: Result<(), Error>, error: &Error) {
        self.end = Some(result);
        self.error.get_or_insert_with(|| error.clone());
        self.end_streams(error, |_| true);
        self.waiting.clear();
        self.accept.clear();
        self.wakes.extend(self.ready_queue.drain());
        self.has_work = true;
    }

    /// Records that nothing more is written.
    pub(super) fn finish_writing(&mut self) {
        self.is_finished = true;
        (self.control, self.heads) = (BytesMut::new(), BytesMut::new());
        self.wakes.extend(self.pong_waker.take());
    }

    /// Ends streams of this end that the peer's GOAWAY did not take, and those that the peer does not know yet (RFC 9113
    /// section 6.8).
    pub(super) fn peer_leaves(&mut self, last: u32, error: Error) {
        // A repeated GOAWAY ends no more streams, so it costs no look at all of them.
        if self.peer_last.is_none_or(|earlier| last < earlier) {
            self.peer_last = Some(last);
            self.end_streams(&error, |stream| {
                stream.is_local && (stream.id > last || stream.is_waiting)
            });
        }
        if !self.config.is_server {
            self.error.get_or_insert_with(|| error.clone());
            self.wakes.extend(self.ready_queue.drain());
        }
        self.peer_left = Some(error);
        self.has_work = true;
    }

    fn end_streams(&mut self, error: &Error, which: impl Fn(&Stream) -> bool) {
        let mut ended = Vec::new();
        for (key, stream) in self.store.iter_mut() {
            if which(stream) && !stream.is_closed() {
                stream.error = Some(error.clone());
                self.queued -= stream.clear_send_queue();
                stream.wake_all(&mut self.wakes);
            }
            if stream.is_closed() {
                stream.is_unaccepted &= self.end.is_none();
                ended.push(key);
            }
        }
        let store = &mut self.store;
        self.waiting
            .retain(|(key, ..)| store.get(*key).is_some_and(|stream| stream.error.is_none()));
        for key in ended {
            self.settle(key);
        }
    }
}
