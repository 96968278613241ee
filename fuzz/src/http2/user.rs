//! The engine's user: the handles of a stream, and the calls on them.

use super::{
    checker::{Checker, pattern},
    input::Input,
    transport::Flag,
};
use bytes::Bytes;
use causeway_tunnel::engine::{Reason, RecvStream, SendStream, client, server};
use futures_util::FutureExt;
use http::{HeaderMap, HeaderValue, Response};
use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

/// Handles of one stream.
#[derive(Default)]
pub(super) struct UserStream {
    pub(super) id: u32,
    pub(super) respond: Option<server::SendResponse<Bytes>>,
    pub(super) response: Option<client::ResponseFuture>,
    pub(super) recv: Option<RecvStream>,
    pub(super) send: Option<SendStream<Bytes>>,
    pub(super) sent: u64,
    /// Whether the user has ended the sending half.
    pub(super) has_ended: bool,
    /// Whether the user or an error has ended the stream.
    pub(super) has_failed: bool,
    pub(super) received: u64,
    pub(super) has_received_end: bool,
    unreleased: usize,
    recv_waiter: Waiter,
    send_waiter: Waiter,
}

/// Task that waits for one half of a stream.
#[derive(Default)]
struct Waiter {
    flag: Arc<Flag>,
    is_waiting: bool,
}

impl Waiter {
    /// Polls, and checks that a task that waits was woken if it is ready now.
    fn poll<T>(&mut self, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Option<T> {
        let may_be_ready = self.flag.take() || !self.is_waiting;
        let waker = Waker::from(self.flag.clone());
        let polled = poll(&mut Context::from_waker(&waker));
        self.is_waiting = polled.is_pending();
        match polled {
            Poll::Ready(value) => {
                assert!(may_be_ready, "a task that waits is not woken");
                Some(value)
            }
            Poll::Pending => None,
        }
    }
}

impl UserStream {
    /// Returns the handles of a stream that the engine has opened.
    pub(super) fn opened(
        response: client::ResponseFuture,
        send: SendStream<Bytes>,
        has_ended: bool,
    ) -> Self {
        Self {
            id: response.stream_id().as_u32(),
            response: Some(response),
            send: Some(send),
            has_ended,
            ..Self::default()
        }
    }

    /// Returns the handles of a stream that the peer has opened.
    pub(super) fn accepted(recv: RecvStream, respond: server::SendResponse<Bytes>) -> Self {
        Self {
            id: respond.stream_id().as_u32(),
            recv: Some(recv),
            respond: Some(respond),
            ..Self::default()
        }
    }

    /// Sends a final or interim response.
    pub(super) fn respond(&mut self, input: &mut Input<'_>) {
        let Some(respond) = &mut self.respond else {
            return;
        };
        let form = input.byte();
        let mut response = Response::new(());
        if form & 2 != 0 {
            let value = HeaderValue::from_bytes(&[b'v'; 200][..usize::from(form >> 2)]);
            response
                .headers_mut()
                .insert("x-value", value.expect("a value"));
        }
        if form & 0xe0 == 0xe0 {
            *response.status_mut() = http::StatusCode::EARLY_HINTS;
            let _ = respond.send_informational(response);
        } else if let Ok(send) = respond.send_response(response, form & 1 != 0) {
            self.has_ended = form & 1 != 0;
            self.send = Some(send);
        }
    }

    pub(super) fn send(&mut self, input: &mut Input<'_>) {
        let (length, form) = (input.length(), input.byte());
        let Some(send) = &mut self.send else { return };
        send.reserve_capacity(length);
        let length = if form & 2 == 0 {
            length
        } else {
            length.min(send.capacity())
        };
        let data = (self.sent..)
            .take(length)
            .map(|place| pattern(self.id, place));
        if send.send_data(data.collect(), form & 1 != 0).is_ok() {
            self.sent += length as u64;
            self.has_ended |= form & 1 != 0;
        }
    }

    pub(super) fn send_trailers(&mut self) {
        let Some(send) = &mut self.send else { return };
        let mut trailers = HeaderMap::new();
        trailers.insert("x-trailer", HeaderValue::from_static("t"));
        self.has_ended |= send.send_trailers(trailers).is_ok();
    }

    pub(super) fn reset(&mut self, input: &mut Input<'_>) {
        let reason = input.choose(&[
            Reason::CANCEL,
            Reason::INTERNAL_ERROR,
            Reason::NO_ERROR,
            Reason::REFUSED_STREAM,
        ]);
        if let Some(send) = &mut self.send {
            send.send_reset(reason);
        } else if let Some(respond) = &mut self.respond {
            respond.send_reset(reason);
        }
        self.has_failed = true;
    }

    /// Drops some of the handles.
    pub(super) fn drop_handles(&mut self, input: &mut Input<'_>) {
        let which = input.byte();
        if which & 1 != 0 {
            self.recv = None;
            self.response = None;
        }
        if which & 2 != 0 {
            self.send = None;
        }
        if which & 4 != 0 {
            self.respond = None;
        }
        let is_gone = self.recv.is_none() && self.response.is_none();
        self.has_failed |= is_gone || (self.send.is_none() && !self.has_ended);
    }

    /// Reads what is there. Returns whether anything was.
    pub(super) fn read(&mut self, checker: &Checker, is_pattern: bool) -> bool {
        if let Some(response) = &mut self.response {
            let waiter = &mut self.recv_waiter;
            while let Some(Some(interim)) = waiter.poll(|cx| response.poll_informational(cx)) {
                if interim.is_err() {
                    break;
                }
            }
            let Some(result) = waiter.poll(|cx| response.poll_unpin(cx)) else {
                return false;
            };
            self.response = None;
            self.has_failed |= result.is_err();
            self.recv = result.ok().map(Response::into_body);
        }
        let Some(recv) = &mut self.recv else {
            return false;
        };
        if self.has_received_end {
            return false;
        }
        let Some(next) = self.recv_waiter.poll(|cx| recv.poll_data(cx)) else {
            return false;
        };
        match next {
            Some(Ok(chunk)) => {
                assert!(!chunk.is_empty(), "an empty chunk");
                self.unreleased += chunk.len();
                for byte in chunk {
                    let expected = pattern(self.id, self.received);
                    assert!(!is_pattern || byte == expected, "the order of bytes");
                    self.received += 1;
                }
            }
            Some(Err(_)) => {
                self.has_failed = true;
                self.recv = None;
            }
            None => {
                let trailers = self.recv_waiter.poll(|cx| recv.poll_trailers(cx));
                trailers
                    .expect("trailers are there")
                    .expect("the body has ended in order");
                assert!(recv.is_end_stream());
                self.has_received_end = true;
                let sent = checker.streams.get(&self.id);
                let sent = sent.map_or(0, |stream| stream.peer.bytes);
                assert!(
                    !checker.is_polite || self.received == sent,
                    "all bytes are there"
                );
            }
        }
        true
    }

    pub(super) fn release(&mut self, amount: usize) {
        let amount = amount.min(self.unreleased);
        if let Some(recv) = &mut self.recv {
            self.unreleased -= amount;
            let released = recv.flow_control().release_capacity(amount);
            released.expect("no more is released than arrived");
        }
    }

    pub(super) fn release_all(&mut self) {
        self.release(self.unreleased);
    }

    /// Waits for the window.
    pub(super) fn poll_send(&mut self) {
        if let Some(send) = &mut self.send {
            // The same waker as that of `poll_reset`: a stream has one sending task.
            let waker = Waker::from(self.send_waiter.flag.clone());
            let _ = send.poll_capacity(&mut Context::from_waker(&waker));
        }
    }

    /// Polls for a reset, whose task must have been woken if there is one.
    pub(super) fn poll_reset(&mut self) {
        let waiter = &mut self.send_waiter;
        let reset = match (&mut self.send, &mut self.respond) {
            (Some(send), _) => waiter.poll(|cx| send.poll_reset(cx)),
            (None, Some(respond)) => waiter.poll(|cx| respond.poll_reset(cx)),
            (None, None) => None,
        };
        self.has_failed |= reset.is_some();
    }

    /// Returns the memory of unread data, in bytes.
    pub(super) fn used(&mut self) -> usize {
        let recv = self.recv.as_mut();
        recv.map_or(0, |recv| recv.flow_control().used_capacity())
    }
}
