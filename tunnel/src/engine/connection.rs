//! State of a connection in both roles: settings, streams, errors and ends. A pure state machine: bytes come in by
//! [`State::receive`], bytes go out by [`State::drain`], tasks are woken by wakers. It knows no IO, and time only for the limit of
//! frames.

use super::{
    config::Config,
    error::{Error, Reason},
    flow::{DEFAULT_WINDOW, MAX_WINDOW, RecvWindow, SendWindow, StreamWindows, WindowLimits},
    frame::{self, PREFACE, Settings, flag, kind},
    frame_limit::FrameLimit,
    hpack::{Decoder, Encoder},
    message,
    ready_queue::ReadyQueue,
    receiving::Receiving,
    reset_list::ResetList,
    schedule::Schedule,
    streams::{Content, Half, Key, MAX_QUEUED, Store, Stream},
};
use bytes::BytesMut;
use http::Request;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Waker},
};

/// Size of the dynamic tables of header compression, in bytes.
const HEADER_TABLE: usize = 4096;
/// Number of unsent answers to PING from which on the peer floods. It does not read what it asks for.
const MAX_UNSENT_PONGS: usize = 1_000;
/// The same for acknowledgements of SETTINGS.
const MAX_UNSENT_ACKS: usize = 100;
/// The same for resets that the peer has caused.
const MAX_UNSENT_RESETS: usize = 20_000;
/// Number of bytes that a stream queues for sending while all streams together have many queued, or the window of the connection
/// is exhausted, so that all of them wait at once.
const MAX_QUEUED_CROWDED: usize = 16 << 10;
/// Number of queued bytes of all streams from which on each stream queues less. Bytes that a peer's smaller window has stranded
/// count as well.
const CROWDED_BYTES: usize = 8 << 20;
/// Size of unsent heads, in bytes, from which on new requests wait.
const MAX_UNSENT_HEADS: usize = 256 << 10;
/// Payload of the user's PING.
const USER_PING: [u8; 8] = *b"causeway";
/// Payload of the PING between the two GOAWAY frames of a graceful end.
pub(super) const SHUTDOWN_PING: [u8; 8] = *b"goingawy";

/// State shared by the task of a connection and its handles.
#[derive(Debug)]
pub(super) struct Shared(Mutex<State>);

impl Shared {
    pub(super) fn new(config: Config) -> Self {
        Self(Mutex::new(State::new(config)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `change` with the state, then wakes the tasks that it concerns, outside of the lock.
    pub(super) fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        let task = if state.has_work {
            state.task.take()
        } else {
            None
        };
        let wakes = std::mem::take(&mut state.wakes);
        drop(state);
        for waker in task.into_iter().chain(wakes) {
            waker.wake();
        }
        result
    }
}

/// Settings of the peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) has_settings: bool,
    pub(super) window: u32,
    pub(super) max_frame: usize,
    pub(super) max_streams: usize,
    pub(super) allows_protocol: bool,
}

impl Peer {
    /// Returns the values before the peer's SETTINGS (RFC 9113 section 6.5.2).
    fn new(max_streams: usize) -> Self {
        Self {
            has_settings: false,
            window: DEFAULT_WINDOW,
            max_frame: frame::DEFAULT_MAX_FRAME as usize,
            max_streams,
            allows_protocol: false,
        }
    }
}

/// Answers and resets that are queued and not yet given to the transport.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    pub(super) pongs: usize,
    pub(super) acks: usize,
    pub(super) resets: usize,
}

/// The user's PING.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UserPing {
    Idle,
    Sent,
    Answered,
}

/// State of a connection.
#[derive(Debug)]
pub(super) struct State {
    pub(super) config: Config,
    pub(super) store: Store,
    pub(super) receiving: Receiving,
    pub(super) frame_limit: Option<FrameLimit>,
    pub(super) decoder: Decoder,
    pub(super) encoder: Encoder,
    /// Frames that go ahead of all others.
    pub(super) control: BytesMut,
    /// HEADERS frames, already compressed, so their order is fixed.
    pub(super) heads: BytesMut,
    pub(super) unsent: Unsent,
    pub(super) schedule: Schedule,
    /// Number of bytes that all streams have queued for sending.
    pub(super) queued: usize,
    /// Streams with a due `WINDOW_UPDATE`.
    pub(super) updates: Vec<Key>,
    pub(super) send_window: SendWindow,
    pub(super) recv_window: RecvWindow,
    pub(super) peer: Peer,
    /// Windows of streams towards this end. The peer has acknowledged the initial one.
    pub(super) stream_windows: StreamWindows,
    /// Window in SETTINGS that the peer has not acknowledged.
    unacknowledged: Option<u32>,

    next_id: u32,
    /// Highest number of a stream that this end has opened on the wire.
    pub(super) last_local: u32,
    pub(super) last_remote: u32,
    pub(super) open_local: usize,
    pub(super) open_remote: usize,
    pub(super) waiting: VecDeque<(Key, Box<Request<()>>, bool)>,
    /// Tasks that wait to open a stream, by their tickets. A task that was woken keeps its place until it is polled.
    pub(super) ready_queue: ReadyQueue,
    pub(super) accept: VecDeque<(Key, Request<()>)>,
    pub(super) unaccepted_resets: usize,
    pub(super) error_resets: usize,
    pub(super) resets: ResetList,

    ping: UserPing,
    pub(super) pong_waker: Option<Waker>,
    /// Number in the last GOAWAY that was sent.
    pub(super) last_accepted: Option<u32>,
    /// The peer's GOAWAY.
    pub(super) peer_left: Option<Error>,
    /// Lowest number in the GOAWAY frames of the peer.
    pub(super) peer_last: Option<u32>,
    /// Error that new streams get.
    pub(super) error: Option<Error>,
    /// Result of the connection, once nothing more is read.
    pub(super) end: Option<Result<(), Error>>,
    /// Whether nothing more is written either.
    pub(super) is_finished: bool,
    /// Bytes that arrived after the end.
    pub(super) discarded: usize,
    pub(super) has_no_senders: bool,

    /// Task of the connection, until it is woken.
    pub(super) task: Option<Waker>,
    /// Whether the task of the connection has something to do.
    pub(super) has_work: bool,
    /// Tasks to wake once the lock is released.
    pub(super) wakes: Vec<Waker>,
}

impl State {
    pub(super) fn new(config: Config) -> Self {
        let (settings, is_server) = (config.settings, config.is_server);
        let mut control = BytesMut::new();
        if !is_server {
            control.extend_from_slice(PREFACE);
        }
        settings.put(&mut control);
        let mut recv_window = RecvWindow::new(DEFAULT_WINDOW);
        if config.connection_window > DEFAULT_WINDOW {
            recv_window.resize(config.connection_window);
            frame::put_window_update(&mut control, 0, recv_window.announce());
        }
        Self {
            store: Store::default(),
            receiving: Receiving::new(is_server),
            frame_limit: config.limits_frames.then(FrameLimit::new),
            decoder: Decoder::new(HEADER_TABLE),
            encoder: Encoder::new(HEADER_TABLE),
            control,
            heads: BytesMut::new(),
            unsent: Unsent::default(),
            schedule: Schedule::default(),
            queued: 0,
            updates: Vec::new(),
            send_window: SendWindow::new(DEFAULT_WINDOW),
            recv_window,
            peer: Peer::new(config.initial_max_streams),
            stream_windows: StreamWindows {
                initial: DEFAULT_WINDOW,
                limits: WindowLimits::default(),
            },
            unacknowledged: Some(settings.window()),
            next_id: if is_server { 2 } else { 1 },
            last_local: 0,
            last_remote: 0,
            open_local: 0,
            open_remote: 0,
            waiting: VecDeque::new(),
            ready_queue: ReadyQueue::default(),
            accept: VecDeque::new(),
            unaccepted_resets: 0,
            error_resets: 0,
            resets: ResetList::default(),
            ping: UserPing::Idle,
            pong_waker: None,
            last_accepted: None,
            peer_left: None,
            peer_last: None,
            error: None,
            end: None,
            is_finished: false,
            discarded: 0,
            has_no_senders: false,
            task: None,
            has_work: true,
            wakes: Vec::new(),
            config,
        }
    }

    // Settings and PING.

    /// Applies this end's SETTINGS, which the peer has acknowledged (RFC 9113 section 6.9.2). No others follow.
    pub(super) fn apply_local_settings(&mut self) -> Result<(), Reason> {
        let window = self.unacknowledged.take().ok_or(Reason::PROTOCOL_ERROR)?;
        let by = i64::from(window) - i64::from(self.stream_windows.initial);
        self.stream_windows.initial = window;
        if by == 0 {
            return Ok(());
        }
        for (key, stream) in self.store.iter_mut() {
            stream.recv_window.change(by);
            // The peer may wait for bytes that were released while the window was larger.
            let is_due = stream.recv != Half::Ended && stream.recv_window.is_due();
            if is_due && !stream.has_update && stream.error.is_none() {
                stream.has_update = true;
                self.updates.push(key);
            }
        }
        Ok(())
    }

    /// Applies the peer's SETTINGS and acknowledges them.
    pub(super) fn apply_peer_settings(&mut self, settings: &Settings) -> Result<(), Reason> {
        // Compressed heads have to leave before the acknowledgement of a smaller table or frame.
        let out = if self.heads.is_empty() {
            &mut self.control
        } else {
            &mut self.heads
        };
        frame::put_frame(out, kind::SETTINGS, flag::ACK, 0, &[]);
        self.unsent.acks += 1;
        // The peer must learn of a smaller size that was replaced at once (RFC 7541 section 4.2).
        let sizes = [settings.smallest_table_size, settings.header_table_size];
        for size in sizes.into_iter().flatten() {
            self.encoder.set_max_size(HEADER_TABLE.min(size as usize));
        }
        // RFC 9113 section 6.5.2.
        if settings.enable_push == Some(1) && !self.config.is_server {
            return Err(Reason::PROTOCOL_ERROR);
        }
        if let Some(size) = settings.max_frame_size {
            self.peer.max_frame = size as usize;
        }
        match settings.enable_connect_protocol {
            Some(1) => self.peer.allows_protocol = true,
            // RFC 8441 section 3.
            Some(_) if self.peer.allows_protocol => return Err(Reason::PROTOCOL_ERROR),
            _ => {}
        }
        if settings.max_concurrent_streams.is_some() || !self.peer.has_settings {
            let max = settings.max_concurrent_streams.unwrap_or(u32::MAX);
            self.peer.max_streams = usize::try_from(max).unwrap_or(usize::MAX);
        }
        self.peer.has_settings = true;
        if let Some(window) = settings.initial_window_size {
            self.change_peer_window(window)?;
        }
        self.open_waiting();
        Ok(())
    }

    fn change_peer_window(&mut self, window: u32) -> Result<(), Reason> {
        let by = i64::from(window) - i64::from(self.peer.window);
        self.peer.window = window;
        if by == 0 {
            return Ok(());
        }
        let max_queued = self.max_queued();
        for (key, stream) in self.store.iter_mut() {
            if stream.end_sent || stream.error.is_some() {
                continue;
            }
            if !stream.send_window.change(by) {
                return Err(Reason::FLOW_CONTROL_ERROR);
            }
            if by > 0 {
                stream.wake_sender(max_queued, &mut self.wakes);
                self.schedule.add(key, stream);
            }
        }
        Ok(())
    }

    /// Answers a PING.
    pub(super) fn put_pong(&mut self, payload: &[u8]) {
        frame::put_frame(&mut self.control, kind::PING, flag::ACK, 0, payload);
        self.unsent.pongs += 1;
    }

    pub(super) fn send_ping(&mut self) -> Result<(), Error> {
        if let Some(error) = self.final_error() {
            return Err(error);
        }
        if self.ping != UserPing::Idle {
            return Err(Error::user("a PING is not answered yet"));
        }
        self.ping = UserPing::Sent;
        if self.heads.is_empty() {
            self.resets.mark();
        }
        if self.end.is_none() {
            frame::put_frame(&mut self.control, kind::PING, 0, 0, &USER_PING);
            self.has_work = true;
        }
        Ok(())
    }

    /// Returns whether the user's PING was answered, once.
    pub(super) fn take_pong(&mut self, cx: &Context<'_>) -> Option<Result<(), Error>> {
        if self.ping == UserPing::Answered {
            self.ping = UserPing::Idle;
            return Some(Ok(()));
        }
        let error = self.final_error();
        if error.is_none() {
            register(&mut self.pong_waker, cx);
        }
        error.map(Err)
    }

    /// Receives the answer to a PING. Answers to PINGs that were never sent are ignored.
    pub(super) fn receive_pong(&mut self, payload: &[u8]) {
        if payload == USER_PING && self.ping == UserPing::Sent {
            self.ping = UserPing::Answered;
            self.resets.forget_marked();
            self.wakes.extend(self.pong_waker.take());
        } else if payload == SHUTDOWN_PING && self.last_accepted == Some(MAX_WINDOW) {
            self.put_go_away(Reason::NO_ERROR, self.last_remote, &[]);
        }
    }

    /// Returns the error of a connection that has ended and has written all that it can. A user who got the error earlier would
    /// drop the connection before its last frames have left.
    fn final_error(&self) -> Option<Error> {
        let result = self.end.as_ref().filter(|_| self.is_finished)?;
        Some(result.clone().err().unwrap_or_else(Error::broken_pipe))
    }

    /// Checks that the peer reads the answers that it causes.
    pub(super) fn check_unsent(&self) -> Result<(), Reason> {
        let unsent = &self.unsent;
        if unsent.pongs > MAX_UNSENT_PONGS
            || unsent.acks > MAX_UNSENT_ACKS
            || unsent.resets > MAX_UNSENT_RESETS
        {
            return Err(Reason::ENHANCE_YOUR_CALM);
        }
        Ok(())
    }

    /// Releases bytes of the connection's window.
    pub(super) fn release_connection(&mut self, bytes: usize) {
        self.recv_window.release(bytes);
        self.has_work |= self.recv_window.is_due();
    }

    // Streams of this end.

    /// Returns the number of streams that may be opened now.
    fn free_streams(&self) -> usize {
        if self.heads.len() >= MAX_UNSENT_HEADS {
            return 0;
        }
        let used = self.open_local + self.waiting.len();
        self.peer.max_streams.saturating_sub(used)
    }

    /// Whether a new stream may be opened: `None` if the caller has to wait. `ticket` is the caller's place in the queue.
    pub(super) fn poll_ready(
        &mut self,
        ticket: &mut Option<u64>,
        cx: &Context<'_>,
    ) -> Option<Result<(), Error>> {
        if let Some(error) = &self.error {
            return Some(Err(error.clone()));
        }
        let free = self.free_streams();
        if !self.ready_queue.poll(ticket, free, cx) {
            return None;
        }
        if let Some(ticket) = ticket.take() {
            self.leave_queue(ticket);
        }
        Some(Ok(()))
    }

    /// Leaves the queue for new streams, with or without the intent to open one.
    pub(super) fn leave_queue(&mut self, ticket: u64) {
        let free = self.free_streams();
        self.wakes.extend(self.ready_queue.leave(ticket, free));
    }

    /// Returns the next request of the peer. Requests that were reset meanwhile are left out.
    pub(super) fn next_request(&mut self) -> Option<(Key, Request<()>)> {
        // A peer that does not read the responses gets no more of them.
        while self.heads.len() < MAX_UNSENT_HEADS {
            let (key, request) = self.accept.pop_front()?;
            let Some(stream) = self.store.get(key) else {
                continue;
            };
            stream.is_unaccepted = false;
            let Some(error) = &stream.error else {
                stream.handles = 2;
                return Some((key, request));
            };
            if error.is_remote() {
                self.unaccepted_resets -= 1;
            }
            self.settle(key);
        }
        None
    }

    /// Opens a stream with two handles. The request is copied only if it has to wait.
    pub(super) fn send_request(&mut self, request: &Request<()>, end: bool) -> Result<Key, Error> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        if !message::is_sendable(request) {
            return Err(Error::user("the request's head is malformed"));
        }
        if self.next_id > MAX_WINDOW {
            return Err(Error::user(
                "the connection has no more numbers for streams",
            ));
        }
        let (peer, local) = (self.peer.window, self.stream_windows.initial);
        let mut stream = Stream::new(
            self.next_id,
            true,
            SendWindow::new(peer),
            RecvWindow::new(local),
        );
        self.next_id += 2;
        stream.handles = 2;
        stream.send = if end { Half::Ended } else { Half::Open };
        stream.is_waiting = true;
        stream.content = Content::after(request.method());
        let key = self.store.insert(stream);
        if self.waiting.is_empty() && self.open_local < self.peer.max_streams {
            self.open(key, request, end);
        } else {
            let copy = Box::new(request.clone());
            self.waiting.push_back((key, copy, end));
        }
        Ok(key)
    }

    /// Writes the head of a request.
    fn open(&mut self, key: Key, request: &Request<()>, end: bool) {
        let max_queued = self.max_queued();
        let Some(stream) = self.store.get(key) else {
            return;
        };
        if stream.error.is_some() {
            return;
        }
        (stream.is_waiting, stream.is_counted, stream.end_sent) = (false, true, end);
        stream.wake_sender(max_queued, &mut self.wakes);
        self.schedule.add(key, stream);
        self.open_local += 1;
        if let Some(limit) = &mut self.frame_limit {
            limit.earn_for_stream();
        }
        self.last_local = key.id;
        let (encoder, max_frame) = (&mut self.encoder, self.peer.max_frame);
        frame::put_block(&mut self.heads, (key.id, end), max_frame, |block| {
            message::put_request(encoder, request, block);
        });
        stream.recv_window.resize(self.stream_windows.after(0));
        if stream.recv_window.is_due() {
            // Behind the stream's HEADERS.
            let bytes = stream.recv_window.announce();
            frame::put_window_update(&mut self.heads, key.id, bytes);
        }
        self.has_work = true;
    }

    /// Opens waiting streams and wakes tasks that wait to open one, as many as the peer allows.
    pub(super) fn open_waiting(&mut self) {
        while self.open_local < self.peer.max_streams {
            let Some((key, request, end)) = self.waiting.pop_front() else {
                break;
            };
            self.open(key, &request, end);
        }
        if self.ready_queue.is_empty() {
            return;
        }
        let free = self.free_streams();
        self.wakes.extend(self.ready_queue.wakers(free));
    }

    /// Frees the memory of empty queues.
    pub(super) fn shrink_queues(&mut self) {
        if self.waiting.is_empty() {
            self.waiting = VecDeque::new();
        }
        self.ready_queue.shrink();
        if self.accept.is_empty() {
            self.accept = VecDeque::new();
        }
    }

    /// Returns the number of bytes that one stream may queue for sending.
    pub(super) fn max_queued(&self) -> usize {
        if self.send_window.size() > 0 && self.queued < CROWDED_BYTES {
            MAX_QUEUED
        } else {
            MAX_QUEUED_CROWDED
        }
    }
}

/// Registers the task that is polling.
pub(super) fn register(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}
