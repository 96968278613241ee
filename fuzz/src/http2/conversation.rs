//! One conversation: the peer's frames, the engine and its user, each in steps that the input chooses.

use super::{
    checker::{Checker, Limits, MAX_WINDOW, MAX_WINDOW_LIMIT, Role},
    input::Input,
    peer::Peer,
    transport::{Flag, Transport},
    user::UserStream,
};
use bytes::Bytes;
use causeway_tunnel::engine::{Error, Ping, PingPong, WindowLimits, client, ext::Protocol, server};
use futures_util::FutureExt;
use http::{Method, Request};
use std::{
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

/// Steps of one conversation.
const MAX_STEPS: usize = 300;
/// Polls after which the engine must wait for its peer or its user.
const MAX_POLLS: usize = 2_000;
/// Memory of the engine's buffers, in bytes: a frame in and a batch out, and answers up to their limits.
const MAX_BUFFERED: usize = 2 << 20;
/// Memory of unread data, in bytes, for each byte of the windows: small payloads share chunks of up to twice their size, and large
/// ones keep their read buffers.
const MEMORY_FACTOR: usize = 8;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

enum Connection {
    Handshake(server::Handshake<Transport, Bytes>),
    Server(server::Connection<Transport, Bytes>),
    Client {
        connection: client::Connection<Transport, Bytes>,
        sender: Option<client::SendRequest<Bytes>>,
        pings: PingPong,
    },
    Ended,
}

struct Conversation<'a> {
    input: Input<'a>,
    checker: Checker,
    transport: Transport,
    connection: Connection,
    flag: Arc<Flag>,
    streams: Vec<UserStream>,
    /// Tasks that wait to open a stream.
    waiting: Vec<(client::ReadySendRequest<Bytes>, Arc<Flag>)>,
    /// Whether the data of the peer has the known pattern.
    is_pattern: bool,
    /// Number of bytes that the peer sends at once, or 0 if all.
    split: usize,
}

/// Runs the conversation that the input describes.
pub fn run(role: Role, input: &[u8]) {
    let mut input = Input(input);
    let flags = input.byte();
    let is_polite = flags & 1 != 0;
    let limits = Limits {
        stream_window: input.choose(&[65_535, 700, 1 << 20]),
        connection_window: input.choose(&[65_535, 1 << 20, MAX_WINDOW as u32]),
        max_frame: input.choose(&[1 << 14, 1 << 16]),
        max_streams: input.choose(&[100, 1, 3]),
        max_header_list: if is_polite {
            1 << 16
        } else {
            input.choose(&[1 << 16, 100])
        },
    };
    let transport = Transport::default();
    transport.0.borrow_mut().room = usize::MAX;
    let mut conversation = Conversation {
        input,
        checker: Checker::new(role, limits, is_polite),
        connection: connect(role, limits, transport.clone()),
        transport,
        flag: Arc::default(),
        streams: Vec::new(),
        waiting: Vec::new(),
        is_pattern: true,
        split: 0,
    };
    // A future is polled once before anything wakes it.
    conversation.flag.clone().wake();
    if flags & 2 == 0 {
        let mut start = if role == Role::Server {
            PREFACE.to_vec()
        } else {
            Vec::new()
        };
        start.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
        conversation.deliver(&start);
    } else {
        conversation.checker.is_polite = false;
    }
    for _ in 0..MAX_STEPS {
        if conversation.input.is_empty() {
            break;
        }
        conversation.step();
    }
    conversation.finish();
}

/// Returns the engine's end of a connection.
fn connect(role: Role, limits: Limits, transport: Transport) -> Connection {
    if role == Role::Server {
        let mut builder = server::Builder::new();
        builder
            .initial_window_size(limits.stream_window)
            .initial_connection_window_size(limits.connection_window)
            .max_frame_size(limits.max_frame)
            .max_header_list_size(limits.max_header_list)
            .max_concurrent_streams(limits.max_streams)
            .max_concurrent_reset_streams(1_000)
            .enable_connect_protocol();
        return Connection::Handshake(builder.handshake(transport));
    }
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(limits.stream_window)
        .initial_connection_window_size(limits.connection_window)
        .max_frame_size(limits.max_frame)
        .max_header_list_size(limits.max_header_list)
        .max_concurrent_reset_streams(1_000);
    let handshake = builder.handshake(transport).now_or_never();
    let (sender, mut connection) = handshake
        .expect("it waits for nothing")
        .expect("it cannot fail");
    let pings = connection.ping_pong().expect("the first handle");
    Connection::Client {
        connection,
        sender: Some(sender),
        pings,
    }
}

impl Conversation<'_> {
    fn step(&mut self) {
        let operation = self.input.byte() % 32;
        match operation {
            0..14 => {
                let (written, has_raw) = self.peer(|peer| peer.step(operation));
                self.is_pattern &= !has_raw;
                if operation == 7 {
                    self.checker.engine_pings.clear();
                }
                self.deliver(&written);
            }
            14 => {
                let room = self.input.choose(&[0, 10, 1_000, usize::MAX]);
                let mut pipe = self.transport.0.borrow_mut();
                pipe.room = room;
                pipe.wake();
            }
            15 => self.split = self.input.byte().into(),
            16 => self.send_request(),
            17 => self.wait_for_place(),
            18 => self.check(),
            19 => self.connection_call(),
            _ => self.use_stream(operation),
        }
        self.pump();
    }

    /// Lets the peer write frames.
    fn peer(&mut self, write: impl FnOnce(&mut Peer<'_, '_>)) -> (Vec<u8>, bool) {
        let (checker, input) = (&self.checker, &mut self.input);
        let mut peer = Peer {
            checker,
            input,
            out: Vec::new(),
            has_raw: false,
        };
        write(&mut peer);
        (peer.out, peer.has_raw)
    }

    fn use_stream(&mut self, operation: u8) {
        let number = usize::from(self.input.byte());
        let Some(place) = number.checked_rem(self.streams.len()) else {
            return;
        };
        let (stream, input) = (&mut self.streams[place], &mut self.input);
        match operation {
            20 | 21 => stream.respond(input),
            22..=24 => stream.send(input),
            25 => stream.send_trailers(),
            26 => stream.reset(input),
            27 => stream.drop_handles(input),
            28 | 29 => {
                stream.read(&self.checker, self.is_pattern);
            }
            30 => {
                let amount = input.length();
                stream.release(amount);
            }
            _ => {
                stream.poll_send();
                stream.poll_reset();
            }
        }
    }

    /// Opens a stream of the engine.
    fn send_request(&mut self) {
        let form = self.input.byte();
        let Connection::Client {
            sender: Some(sender),
            ..
        } = &mut self.connection
        else {
            return;
        };
        let method = [Method::GET, Method::POST, Method::HEAD, Method::CONNECT];
        let method = method[usize::from(form >> 1 & 3)].clone();
        let uri = if method == Method::CONNECT {
            "a:1"
        } else {
            "http://a/x"
        };
        let mut request = Request::new(());
        (*request.method_mut(), *request.uri_mut()) = (method, uri.parse().expect("a URI"));
        if form & 8 != 0 && request.method() == Method::CONNECT {
            *request.uri_mut() = "http://a/x".parse().expect("a URI");
            request.extensions_mut().insert(Protocol::from("p"));
        }
        let Ok((response, send)) = sender.send_request(&request, form & 1 != 0) else {
            return;
        };
        self.streams
            .push(UserStream::opened(response, send, form & 1 != 0));
    }

    /// Polls a task that waits to open a stream.
    fn wait_for_place(&mut self) {
        let number = usize::from(self.input.byte());
        if let Connection::Client {
            sender: Some(sender),
            ..
        } = &self.connection
            && self.waiting.len() < 8
            && number & 1 == 0
        {
            let flag = Arc::<Flag>::default();
            let waker = Waker::from(flag.clone());
            let mut ready = sender.clone().ready();
            if ready
                .poll_unpin(&mut Context::from_waker(&waker))
                .is_pending()
            {
                self.waiting.push((ready, flag));
            }
        } else if let Some(place) = number.checked_rem(self.waiting.len()) {
            let (mut ready, flag) = self.waiting.swap_remove(place);
            let was_woken = flag.take();
            let waker = Waker::from(flag.clone());
            match ready.poll_unpin(&mut Context::from_waker(&waker)) {
                Poll::Ready(_) => assert!(was_woken, "a task that waits for a place is not woken"),
                Poll::Pending => self.waiting.push((ready, flag)),
            }
        }
    }

    fn connection_call(&mut self) {
        let form = self.input.byte();
        let window = self.input.choose(&[0, 700, 65_535, MAX_WINDOW_LIMIT]);
        match &mut self.connection {
            Connection::Server(connection) if form > 200 => connection.graceful_shutdown(),
            Connection::Server(connection) => connection.limit_windows(WindowLimits { max: window, is_far: form % 2 == 0 }),
            Connection::Client { sender, .. } if form > 240 => *sender = None,
            Connection::Client { pings, .. } if form > 100 => {
                let _ = pings.send_ping(Ping::opaque());
                let waker = Waker::noop();
                let _ = pings.poll_pong(&mut Context::from_waker(waker));
            }
            Connection::Client { connection, .. } => connection.limit_windows(WindowLimits { max: window, is_far: form % 2 == 0 }),
            Connection::Handshake(_) | Connection::Ended => {}
        }
    }

    /// Gives the peer's bytes to the engine, in pieces.
    fn deliver(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let size = if self.split == 0 {
            bytes.len()
        } else {
            self.split
        };
        // Large frames in few pieces, for speed.
        for piece in bytes.chunks(size.max(bytes.len() / 32)) {
            self.checker.observe_input(piece);
            {
                let mut pipe = self.transport.0.borrow_mut();
                pipe.input.extend_from_slice(piece);
                pipe.wake();
            }
            self.pump();
        }
    }

    /// Polls the connection for as long as it is woken.
    fn pump(&mut self) {
        for _ in 0..MAX_POLLS {
            if !self.flag.take() && !matches!(self.connection, Connection::Handshake(_)) {
                let pipe = self.transport.0.borrow();
                if pipe.input.is_empty() && pipe.room > 0 {
                    self.checker.settle();
                }
                return;
            }
            let is_handshake = matches!(self.connection, Connection::Handshake(_));
            self.poll_connection();
            let output = self.transport.0.borrow_mut().output.split();
            self.checker.observe_output(&output);
            if is_handshake
                && !self.flag.is_set()
                && matches!(self.connection, Connection::Handshake(_))
            {
                return;
            }
        }
        panic!("the connection does not rest");
    }

    fn poll_connection(&mut self) {
        let waker = Waker::from(self.flag.clone());
        let cx = &mut Context::from_waker(&waker);
        let ended: Option<Option<Error>> = match &mut self.connection {
            Connection::Handshake(handshake) => match handshake.poll_unpin(cx) {
                Poll::Ready(Ok(connection)) => {
                    self.connection = Connection::Server(connection);
                    self.flag.take();
                    waker.wake_by_ref();
                    None
                }
                Poll::Ready(Err(error)) => Some(Some(error)),
                Poll::Pending => None,
            },
            Connection::Server(connection) => loop {
                match connection.poll_accept(cx) {
                    Poll::Ready(Some(Ok((request, respond)))) => {
                        let stream = UserStream::accepted(request.into_body(), respond);
                        self.streams.push(stream);
                    }
                    Poll::Ready(Some(Err(error))) => break Some(Some(error)),
                    Poll::Ready(None) => break Some(None),
                    Poll::Pending => break None,
                }
            },
            Connection::Client { connection, .. } => match connection.poll_unpin(cx) {
                Poll::Ready(result) => Some(result.err()),
                Poll::Pending => None,
            },
            Connection::Ended => None,
        };
        if let Some(error) = ended {
            let is_orderly = error
                .as_ref()
                .is_none_or(|error| error.is_io() || error.is_remote());
            assert!(!self.checker.is_polite || is_orderly, "{error:?}");
            self.connection = Connection::Ended;
        }
    }

    /// Checks that nothing waits that could go on, and that memory is bounded.
    fn check(&mut self) {
        let buffered = match &self.connection {
            Connection::Server(connection) => connection.buffered_memory(),
            Connection::Client { connection, .. } => connection.buffered_memory(),
            Connection::Handshake(_) | Connection::Ended => 0,
        };
        assert!(buffered <= MAX_BUFFERED, "buffers of {buffered} bytes");
        let used: usize = self.streams.iter_mut().map(UserStream::used).sum();
        let window = self.checker.limits.connection_window.max(65_535) as usize;
        let max = window.saturating_mul(MEMORY_FACTOR) + (1 << 20);
        assert!(used <= max, "unread data takes {used} bytes");
        if matches!(self.connection, Connection::Ended) || self.flag.is_set() {
            return;
        }
        self.poll_connection();
        let output = self.transport.0.borrow_mut().output.split();
        assert!(output.is_empty(), "the connection was not woken");
    }

    /// Ends the conversation: all that can be sent arrives, then the connection ends.
    fn finish(&mut self) {
        {
            let mut pipe = self.transport.0.borrow_mut();
            pipe.room = usize::MAX;
            pipe.wake();
        }
        self.pump();
        self.split = 0;
        if self.checker.is_polite {
            self.finish_streams();
        }
        self.check();
        for stream in &mut self.streams {
            stream.poll_reset();
            while stream.read(&self.checker, self.is_pattern) {}
        }
        let is_closed_first = self.input.byte() & 1 != 0;
        if is_closed_first {
            self.close();
        }
        self.streams.clear();
        self.waiting.clear();
        if let Connection::Client { sender, .. } = &mut self.connection {
            *sender = None;
        }
        self.pump();
        // A client ends its connection, unless a rough peer does not take the rest of its data.
        let is_ended = matches!(self.connection, Connection::Ended);
        assert!(
            is_ended || self.checker.role == Role::Server || !self.checker.is_polite,
            "the connection does not end"
        );
        if !is_ended {
            self.close();
        }
    }

    /// Closes the peer's end of the transport, which ends the connection and wakes all that wait.
    fn close(&mut self) {
        {
            let mut pipe = self.transport.0.borrow_mut();
            pipe.is_closed = true;
            pipe.wake();
        }
        self.pump();
        assert!(
            matches!(self.connection, Connection::Ended),
            "the connection does not end"
        );
        for stream in &mut self.streams {
            while stream.read(&self.checker, self.is_pattern) {}
            stream.poll_reset();
        }
        for (ready, flag) in &mut self.waiting {
            let waker = Waker::noop();
            assert!(flag.is_set(), "a task that waits for a place is not woken");
            assert!(ready.poll_unpin(&mut Context::from_waker(waker)).is_ready());
        }
    }

    /// Opens all windows, reads everything, and checks that all data arrives.
    fn finish_streams(&mut self) {
        for _ in 0..3 {
            let (written, _) = self.peer(|peer| {
                peer.acknowledge();
                let streams = peer.checker.streams.iter();
                let open = streams.filter(|(_, stream)| stream.is_open());
                let windows: Vec<(u32, i64)> = open
                    .map(|(id, stream)| (*id, stream.engine_window))
                    .collect();
                for (id, window) in [(0, peer.checker.engine_connection)]
                    .into_iter()
                    .chain(windows)
                {
                    peer.put_update(id, u32::try_from(MAX_WINDOW - window).unwrap_or(0));
                }
            });
            self.checker.engine_pings.clear();
            self.deliver(&written);
            for stream in &mut self.streams {
                while stream.read(&self.checker, self.is_pattern) {
                    stream.release_all();
                }
            }
            self.pump();
        }
        for stream in &mut self.streams {
            stream.poll_reset();
            let Some(seen) = self.checker.streams.get(&stream.id) else {
                continue;
            };
            let is_broken = stream.has_failed || seen.peer.has_reset || seen.engine.has_reset;
            if is_broken || matches!(self.connection, Connection::Ended) {
                continue;
            }
            assert_eq!(
                seen.engine.bytes, stream.sent,
                "all data of the engine arrives"
            );
            assert_eq!(seen.engine.has_ended, stream.has_ended, "the end arrives");
            if seen.peer.has_ended && stream.recv.is_some() {
                assert!(stream.has_received_end, "the peer's end arrives");
            }
        }
    }
}
