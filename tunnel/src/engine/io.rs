//! The one place with IO: reads into a buffer, gives it to the state machine, writes what that gives back.
//!
//! Reading never waits for writing. Each turn reads what is there, takes the lock once, and writes all frames of the turn
//! together; one flush ends the poll.

use super::{
    config::Config,
    connection::{Shared, State},
    error::Error,
    outgoing::Outgoing,
};
use bytes::BytesMut;
use std::{
    future::Future,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

/// Bytes that are read before they are processed: the plaintext of a TLS record.
const READ_BYTES: usize = 16 << 10;
/// Size of the read buffer: a record and an incomplete frame before it.
const READ_BUFFER: usize = READ_BYTES + (1 << 10);
/// Free space from which on the next read takes a new buffer.
const MIN_FREE: usize = 1 << 10;
/// Number of turns after which other tasks of the thread run.
const MAX_TURNS: usize = 16;

/// Number of frames of the peer after which other tasks of the thread run.
const MAX_FRAMES: usize = 1_000;

/// Bytes in and out of a turn that needs no buffers: a PING and a few small frames.
const QUIET_BYTES: usize = 256;
/// Number of such turns after which a connection with several open streams frees its buffers.
const QUIET_TURNS: u32 = 16;
/// Number of bytes that a peer may send after the end and before it reads the last frames.
pub(super) const MAX_DISCARDED: usize = 1 << 20;

/// Result of a poll for reading.
enum Incoming {
    /// Nothing more is there now; the task is woken when something comes.
    Pending,
    /// More may be there.
    More,
    /// End of the transport, with an error or in order.
    End(Option<io::Error>),
}

/// Result of a turn of the state machine.
#[derive(Default)]
struct Turn {
    has_more: bool,
    /// Number of frames that were received.
    frames: usize,
    /// Result of the connection, once all is written that can be.
    end: Option<Result<(), Error>>,
    has_failed_transport: bool,
}

/// IO of a connection.
#[derive(Debug)]
pub(super) struct Driver<S> {
    io: S,
    shared: Arc<Shared>,
    read: BytesMut,
    /// Number and size of the read buffer.
    buffer: (u64, usize),
    /// Bytes that the next frame needs.
    needed: usize,
    out: Outgoing,
    is_unflushed: bool,
    /// Error of a write, after which nothing more is written.
    write_error: Option<io::Error>,
    wakes: Vec<Waker>,
    /// Whether at most one stream is open.
    is_quiet: bool,
    /// Number of turns in a row with at most one open stream, or with several and hardly a byte.
    quiet_turns: u32,
    /// Whether requests of the peer can be taken.
    pub(super) has_requests: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    pub(super) fn new(io: S, config: Config) -> Self {
        Self {
            io,
            shared: Arc::new(Shared::new(config)),
            read: BytesMut::new(),
            buffer: (0, 0),
            needed: 1,
            out: Outgoing::default(),
            is_unflushed: false,
            write_error: None,
            wakes: Vec::new(),
            is_quiet: true,
            quiet_turns: 0,
            has_requests: false,
        }
    }

    /// Writes the preface and SETTINGS of a client as far as the transport takes them, so that the other end's handshake needs
    /// no poll of the connection. Waits for nothing: the other end may write first as well.
    pub(super) fn start(&mut self, cx: &mut Context<'_>) {
        self.shared.lock().drain(&mut self.out);
        if self.poll_write(cx).is_ready() && self.is_unflushed {
            // A later flush returns an error.
            let _ = Pin::new(&mut self.io).poll_flush(cx);
        }
    }

    /// Moves the connection. Ready when it has ended.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let polled = self.poll_turns(cx);
        if polled.is_ready() {
            self.with(State::finish_writing);
        }
        polled
    }

    fn poll_turns(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let mut frames = 0;
        for _ in 0..MAX_TURNS {
            let mut incoming = self.poll_read(cx);
            let is_pending = matches!(incoming, Incoming::Pending);
            if is_pending && let Some(error) = self.write_error.take() {
                incoming = Incoming::End(Some(error));
            }
            let turn = self.turn(cx, incoming);
            let is_blocked = !turn.has_failed_transport && self.poll_write(cx).is_pending();
            if self.write_error.is_some() && turn.end.is_none() {
                continue;
            }
            if let Some(end) = turn.end.filter(|_| !is_blocked) {
                return self
                    .poll_shutdown(cx, turn.has_failed_transport)
                    .map(|()| end);
            }
            if is_blocked && is_pending {
                return Poll::Pending;
            }
            if is_pending && !turn.has_more {
                return self.poll_flush(cx);
            }
            frames += turn.frames;
            if frames >= MAX_FRAMES {
                break;
            }
        }
        cx.waker().wake_by_ref();
        self.poll_flush(cx)
    }

    /// Writes what the turn has left. An error is kept until all that the peer has sent is read.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_unflushed |= !self.out.is_empty();
        if self.write_error.is_none() {
            match self.out.poll_write(&mut self.io, cx) {
                Poll::Ready(Ok(())) => return Poll::Ready(()),
                Poll::Ready(Err(error)) => self.write_error = Some(error),
                Poll::Pending => return Poll::Pending,
            }
        }
        self.out = Outgoing::default();
        self.is_unflushed = false;
        Poll::Ready(())
    }

    /// Flushes what is written. Never ready, except with an error.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        if self.is_unflushed {
            match Pin::new(&mut self.io).poll_flush(cx) {
                Poll::Ready(Ok(())) => self.is_unflushed = false,
                Poll::Ready(Err(error)) => {
                    let turn = self.turn(cx, Incoming::End(Some(error)));
                    return turn.end.map_or(Poll::Pending, Poll::Ready);
                }
                Poll::Pending => {}
            }
        }
        let quiet_turns = if self.is_quiet { 1 } else { QUIET_TURNS };
        if self.quiet_turns > quiet_turns {
            self.shrink();
        }
        Poll::Pending
    }

    fn poll_shutdown(&mut self, cx: &mut Context<'_>, has_failed: bool) -> Poll<()> {
        // The connection has its result; its transport may fail to close.
        let polled = Pin::new(&mut self.io).poll_shutdown(cx);
        if polled.is_pending() && !has_failed {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    /// Reads until the buffer has enough for a turn, or nothing more is there.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Incoming {
        let wanted = READ_BYTES.max(self.needed);
        while self.read.len() < wanted {
            let (length, capacity) = (self.read.len(), self.read.capacity());
            if capacity - length < MIN_FREE || capacity < self.needed {
                self.read
                    .reserve(READ_BUFFER.max(self.needed) - length.min(READ_BYTES));
                self.buffer = (self.buffer.0 + 1, self.read.capacity());
            }
            match pin!(self.io.read_buf(&mut self.read)).poll(cx) {
                Poll::Ready(Ok(0)) => return Incoming::End(None),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Incoming::End(Some(error)),
                Poll::Pending => return Incoming::Pending,
            }
        }
        Incoming::More
    }

    /// Gives the state machine what was read, and takes what is to be written.
    fn turn(&mut self, cx: &Context<'_>, incoming: Incoming) -> Turn {
        let mut state = self.shared.lock();
        std::mem::swap(&mut state.wakes, &mut self.wakes);
        if !state
            .task
            .as_ref()
            .is_some_and(|task| task.will_wake(cx.waker()))
        {
            state.task = Some(cx.waker().clone());
        }
        let received = self.read.len();
        if !self.read.is_empty() {
            self.needed = state.receive(&mut self.read, self.buffer);
        }
        let mut turn = Turn {
            frames: std::mem::take(&mut state.receiving.frames),
            ..Turn::default()
        };
        if let Incoming::End(error) = incoming {
            let is_cut = !self.read.is_empty() || state.receiving.is_inside_frame();
            let cut = is_cut.then(|| io::Error::from(io::ErrorKind::UnexpectedEof));
            state.transport_ended(error.or(cut));
            turn.has_failed_transport = true;
        }
        state.check_end();
        // A peer that only writes after the end does not learn of it.
        turn.has_failed_transport |= state.discarded > MAX_DISCARDED;
        if turn.has_failed_transport {
            self.out = Outgoing::default();
            turn.end.clone_from(&state.end);
        } else if self.out.is_empty() {
            turn.has_more = state.drain(&mut self.out);
            // The last frames of streams may have left.
            state.check_end();
            turn.has_more |= !state.is_drained();
            turn.end = state.end.clone().filter(|_| !turn.has_more);
        } else {
            turn.has_more = true;
        }
        // This task goes on without a wake if there is more.
        state.has_work = false;
        self.has_requests = !state.accept.is_empty();
        let was_quiet = std::mem::replace(&mut self.is_quiet, state.is_quiet());
        let is_small = received + self.out.len() <= QUIET_BYTES;
        // The turn that ends a request does not count: the buffers are kept for the next request, which may follow at once.
        self.quiet_turns = if was_quiet == self.is_quiet && (was_quiet || is_small) {
            self.quiet_turns + 1
        } else {
            0
        };
        std::mem::swap(&mut state.wakes, &mut self.wakes);
        drop(state);
        for waker in self.wakes.drain(..) {
            waker.wake();
        }
        turn
    }

    /// Returns the size of all buffers.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn buffered_memory(&self) -> usize {
        let state = self.shared.lock();
        let frames = state.control.capacity() + state.heads.capacity();
        self.read.capacity() + self.out.bytes.capacity() + frames
    }

    /// Frees the buffers of an idle connection.
    fn shrink(&mut self) {
        if !self.is_quiet {
            self.quiet_turns = 0;
        }
        if self.read.is_empty() && self.read.capacity() > 0 {
            self.read = BytesMut::new();
        }
        if self.out.is_empty() && self.out.bytes.capacity() > 0 {
            self.out = Outgoing::default();
            self.wakes = Vec::new();
            self.shared.lock().shrink();
        }
    }
}

impl<S> Driver<S> {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        self.shared.with(change)
    }
}

impl<S> Drop for Driver<S> {
    fn drop(&mut self) {
        self.shared.with(|state| {
            state.transport_ended(None);
            state.finish_writing();
        });
    }
}
