//! Order of sending, and progress while one end does not read.

use super::{
    super::{
        client,
        config::Config,
        connection::Shared,
        frame::kind,
        io::Driver,
        outgoing::Outgoing,
        server,
        streams::{Half, Key},
    },
    raw::{Frame, Peer, frame, headers, request, settings, window_update},
};
use bytes::Bytes;
use futures_util::future::{join, join3};
use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake},
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Queues a body on a stream.
fn queue(peer: &mut Peer, key: Key, length: usize, end: bool) {
    let stream = peer.state.store.get(key).unwrap();
    stream.send = if end { Half::Ended } else { Half::Open };
    stream.queued += length;
    stream.queue.push_back(Bytes::from(vec![0; length]));
    peer.state.queued += length;
    peer.state.schedule.add(key, stream);
}

/// A server with open windows and this many accepted requests.
fn serving(count: u32) -> (Peer, Vec<Key>) {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&settings(&[(4, 1 << 30), (5, 1 << 16)]));
    peer.feed(&window_update(0, 1 << 30));
    let keys = (0..count).map(|index| {
        peer.feed(&request(index * 2 + 1, true, &[]));
        peer.state.next_request().unwrap().0
    });
    let keys = keys.collect();
    peer.take();
    (peer, keys)
}

fn lengths(frames: &[Frame]) -> Vec<(u32, usize)> {
    let data = frames.iter().filter(|frame| frame.kind == kind::DATA);
    data.map(|frame| (frame.stream, frame.payload.len()))
        .collect()
}

#[test]
fn a_small_message_overtakes_bulk() {
    let (mut peer, keys) = serving(3);
    queue(&mut peer, keys[0], 1 << 20, false);
    let frames = peer.take_batch();
    assert_eq!(
        lengths(&frames),
        [(1, 65_536)],
        "a lone stream sends frames of the peer's size"
    );
    queue(&mut peer, keys[1], 1 << 20, false);
    queue(&mut peer, keys[2], 1_000, true);
    let frames = peer.take_batch();
    // The second stream is fresh, and then bulk as well.
    let first = [(3, 16_384), (3, 16_384), (5, 1_000), (1, 16_384)];
    assert_eq!(lengths(&frames)[..4], first);
    assert!(
        frames
            .iter()
            .map(|frame| frame.payload.len())
            .sum::<usize>()
            < 90 << 10
    );
    let next = peer.take_batch();
    let streams: Vec<u32> = lengths(&next).iter().map(|(stream, _)| *stream).collect();
    assert_eq!(
        streams.iter().filter(|stream| **stream == 1).count(),
        2,
        "turns: {streams:?}"
    );
}

#[test]
fn bulk_that_waited_for_its_window_stays_bulk() {
    let (mut peer, keys) = serving(2);
    peer.feed(&settings(&[(4, 40_000)]));
    queue(&mut peer, keys[0], 1 << 20, false);
    assert_eq!(peer_sent(&mut peer), [(1, 40_000)]);
    peer.feed(&window_update(1, 1_000));
    queue(&mut peer, keys[1], 1_000, true);
    assert_eq!(peer_sent(&mut peer), [(3, 1_000), (1, 1_000)]);
}

fn peer_sent(peer: &mut Peer) -> Vec<(u32, usize)> {
    lengths(&peer.take())
}

#[test]
fn streams_share_a_window_that_opens_byte_by_byte() {
    let mut peer = Peer::of_server(|config| config.settings.max_concurrent_streams = Some(200));
    let keys: Vec<_> = (0..100)
        .map(|index| {
            peer.feed(&request(index * 2 + 1, true, &[]));
            peer.state.next_request().unwrap().0
        })
        .collect();
    queue(&mut peer, keys[0], 65_535, true);
    peer.take();
    for key in &keys[1..] {
        queue(&mut peer, *key, 20, true);
    }
    assert_eq!(peer_sent(&mut peer), []);
    let mut sent = 0;
    while peer
        .state
        .store
        .iter_mut()
        .any(|(_, stream)| !stream.end_sent)
    {
        peer.feed(&window_update(0, 1));
        sent += peer_sent(&mut peer).len();
        assert!(sent <= 99 * 20);
    }
    assert_eq!(sent, 99 * 20);
}

#[test]
fn control_frames_go_first_and_in_order() {
    let (mut peer, keys) = serving(2);
    queue(&mut peer, keys[0], 1 << 20, false);
    peer.take_batch();
    peer.feed(&frame(kind::PING, 0, 0, &[7; 8]));
    peer.feed(&settings(&[]));
    peer.state
        .reset(keys[1], 8.into(), super::super::error::Initiator::User);
    let kinds: Vec<u8> = peer.take_batch().iter().map(|frame| frame.kind).collect();
    assert_eq!(
        kinds[..4],
        [kind::PING, kind::SETTINGS, kind::RST_STREAM, kind::DATA]
    );
}

#[test]
fn a_reset_frees_the_queue_and_follows_its_own_head_only() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1)]));
    peer.take();
    let head = || http::Request::get("http://a/").body(()).unwrap();
    let first = peer.state.send_request(&head(), false).unwrap();
    let waiting = peer.state.send_request(&head(), false).unwrap();
    for key in [waiting, first] {
        queue(&mut peer, key, 1 << 20, false);
        peer.state
            .reset(key, 8.into(), super::super::error::Initiator::User);
        assert_eq!(peer.state.store.get(key).unwrap().queued, 0);
    }
    let frames: Vec<_> = peer
        .take()
        .iter()
        .map(|frame| (frame.kind, frame.stream))
        .collect();
    assert_eq!(
        frames,
        [(kind::HEADERS, 1), (kind::RST_STREAM, 1)],
        "the peer never knew the other"
    );
}

#[test]
fn waiting_requests_open_when_the_peer_allows() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1)]));
    let head = || http::Request::get("http://a/").body(()).unwrap();
    for _ in 0..3 {
        peer.state.send_request(&head(), true).unwrap();
    }
    let heads = |peer: &mut Peer| {
        let frames = peer.take();
        let heads = frames.iter().filter(|frame| frame.kind == kind::HEADERS);
        heads.map(|frame| frame.stream).collect::<Vec<_>>()
    };
    assert_eq!(heads(&mut peer), [1]);
    peer.feed(&super::raw::headers(1, true, &[(":status", "200")]));
    assert_eq!(heads(&mut peer), [3]);
    peer.feed(&settings(&[(3, 5)]));
    assert_eq!(heads(&mut peer), [5]);
}

#[test]
fn data_follows_the_head_of_a_stream_that_opens_in_the_same_batch() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1)]));
    let head = || http::Request::post("http://a/").body(()).unwrap();
    let keys = [(); 2].map(|()| peer.state.send_request(&head(), false).unwrap());
    peer.take();
    for key in keys {
        queue(&mut peer, key, 10, true);
    }
    peer.feed(&headers(1, true, &[(":status", "200")]));
    let frames = peer.take_batch();
    let frames: Vec<_> = frames
        .iter()
        .map(|frame| (frame.kind, frame.stream))
        .collect();
    let expected = [(kind::DATA, 1), (kind::HEADERS, 3), (kind::DATA, 3)];
    assert_eq!(frames, expected);
}

#[test]
fn streams_queue_little_while_the_connections_window_is_exhausted() {
    let shared = Arc::new(Shared::new(Config::new(false)));
    let receive = |bytes: &[u8]| {
        let mut read = bytes::BytesMut::from(bytes);
        shared.with(|state| state.receive(&mut read, (0, 0)));
        shared.with(|state| while state.drain(&mut Outgoing::default()) {});
    };
    receive(&settings(&[(4, 1 << 20)]));
    let mut sender = client::SendRequest::<Bytes>::new(shared.clone());
    let mut open = || {
        let head = http::Request::post("http://a/").body(()).unwrap();
        let (response, mut send) = sender.send_request(&head, false).unwrap();
        send.reserve_capacity(1 << 20);
        (response, send)
    };
    let (mut first, mut second) = (open(), open());
    assert_eq!(first.1.capacity(), 128 << 10);
    first
        .1
        .send_data(Bytes::from(vec![0; 65_535]), false)
        .unwrap();
    receive(&[]);
    assert_eq!(second.1.capacity(), 16 << 10);
    let chunk = Bytes::from(vec![0; 16 << 10]);
    second.1.send_data(chunk, false).unwrap();
    assert_eq!(second.1.capacity(), 0);
    let wakes = Arc::<Wakes>::default();
    let mut capacity = Box::pin(poll_fn(|cx| second.1.poll_capacity(cx)));
    assert!(poll(&mut capacity, &wakes).is_pending());
    receive(&window_update(0, 1_000));
    assert_eq!(wakes.0.load(Relaxed), 1);
    assert!(poll(&mut capacity, &wakes).is_ready());
}

#[test]
fn a_sender_that_waits_because_all_streams_queue_much_is_woken() {
    let shared = Arc::new(Shared::new(Config::new(false)));
    let receive = |bytes: &[u8]| {
        let mut read = bytes::BytesMut::from(bytes);
        shared.with(|state| state.receive(&mut read, (0, 0)));
        shared.with(|state| while state.drain(&mut Outgoing::default()) {});
    };
    receive(
        &[
            settings(&[(3, 1_000), (4, 1 << 20)]),
            window_update(0, 1 << 30),
        ]
        .concat(),
    );
    let mut sender = client::SendRequest::<Bytes>::new(shared.clone());
    let mut fill = || {
        let head = http::Request::post("http://a/").body(()).unwrap();
        let (response, mut send) = sender.send_request(&head, false).unwrap();
        send.reserve_capacity(1 << 20);
        let capacity = send.capacity();
        send.send_data(Bytes::from(vec![0; capacity]), false)
            .unwrap();
        (response, send, capacity)
    };
    let others: Vec<_> = (0..64).map(|_| fill()).collect();
    assert!(others.iter().all(|(.., capacity)| *capacity == 128 << 10));
    let (_response, mut last, capacity) = fill();
    assert_eq!((capacity, last.capacity()), (16 << 10, 0));
    let wakes = Arc::<Wakes>::default();
    let mut capacity = Box::pin(poll_fn(|cx| last.poll_capacity(cx)));
    assert!(poll(&mut capacity, &wakes).is_pending());
    receive(&[]);
    assert_eq!(wakes.0.load(Relaxed), 1);
    assert!(poll(&mut capacity, &wakes).is_ready());
}

#[test]
fn many_small_chunks_share_a_frame() {
    let (mut peer, keys) = serving(1);
    for _ in 0..1_000 {
        queue(&mut peer, keys[0], 10, false);
    }
    assert_eq!(lengths(&peer.take()), [(1, 10_000)]);
    queue(&mut peer, keys[0], 10, true);
    let frames = peer.take();
    assert_eq!((lengths(&frames), frames[0].flags), (vec![(1, 10)], 1));
}

#[test]
fn data_waits_for_both_windows() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&request(1, true, &[]));
    peer.feed(&request(3, true, &[]));
    let keys = [(); 2].map(|()| peer.state.next_request().unwrap().0);
    queue(&mut peer, keys[0], 100_000, true);
    let sent = |peer: &mut Peer| {
        lengths(&peer.take())
            .iter()
            .map(|(_, length)| length)
            .sum::<usize>()
    };
    assert_eq!(sent(&mut peer), 65_535);
    peer.feed(&window_update(1, 10_000));
    assert_eq!(sent(&mut peer), 0);
    queue(&mut peer, keys[1], 5_000, true);
    peer.feed(&window_update(0, 12_000));
    assert_eq!(sent(&mut peer), 12_000);
    peer.feed(&window_update(0, 100_000));
    assert_eq!(sent(&mut peer), 3_000);
    // A smaller window may be negative.
    peer.feed(&settings(&[(4, 1_000)]));
    peer.feed(&window_update(1, 50_000));
    assert_eq!(sent(&mut peer), 0);
    peer.feed(&window_update(1, 40_000));
    assert_eq!(sent(&mut peer), 100_000 - 65_535 - 10_000);
}

#[test]
fn requests_wait_in_turn_and_pass_their_place_on() {
    let shared = Arc::new(Shared::new(Config::new(false)));
    let head = || http::Request::get("http://a/").body(()).unwrap();
    let mut read = bytes::BytesMut::from(&settings(&[(3, 1)])[..]);
    shared.lock().receive(&mut read, (0, 0));
    let first = shared.lock().send_request(&head(), true).unwrap();
    let sender = client::SendRequest::<Bytes>::new(shared.clone());
    let mut waiting: Vec<_> = (0..3).map(|_| with_wakes(sender.clone().ready())).collect();
    for (future, _) in &mut waiting {
        for _ in 0..3 {
            assert!(poll(future, &Arc::default()).is_pending());
        }
    }
    for (future, wakes) in &mut waiting {
        assert!(poll(future, wakes).is_pending());
    }
    shared.with(|state| state.reset(first, 8.into(), super::super::error::Initiator::User));
    assert_eq!(woken(&waiting), [1, 0, 0]);
    drop(waiting.remove(0));
    assert_eq!(woken(&waiting), [1, 0]);
    let (mut next, wakes) = waiting.remove(0);
    assert!(matches!(poll(&mut next, &wakes), Poll::Ready(Ok(_))));
}

#[test]
fn a_newcomer_waits_behind_those_that_were_woken() {
    let shared = Arc::new(Shared::new(Config::new(false)));
    let head = || http::Request::get("http://a/").body(()).unwrap();
    let mut read = bytes::BytesMut::from(&settings(&[(3, 1)])[..]);
    shared.lock().receive(&mut read, (0, 0));
    let first = shared.lock().send_request(&head(), true).unwrap();
    let sender = client::SendRequest::<Bytes>::new(shared.clone());
    let mut waiting: Vec<_> = (0..2).map(|_| with_wakes(sender.clone().ready())).collect();
    for (future, wakes) in &mut waiting {
        assert!(poll(future, wakes).is_pending());
    }
    shared.with(|state| state.reset(first, 8.into(), super::super::error::Initiator::User));
    let (mut newcomer, wakes) = with_wakes(sender.ready());
    assert!(poll(&mut newcomer, &wakes).is_pending());
    // A sender that is dropped unused passes its place on, and so does one whose request fails.
    for (index, (future, wakes)) in waiting.iter_mut().enumerate() {
        assert_eq!(wakes.0.load(Relaxed), 1);
        let Poll::Ready(Ok(mut sender)) = poll(future, wakes) else {
            panic!("a woken task has its place");
        };
        if index == 1 {
            let mut malformed = head();
            malformed.headers_mut().insert(
                http::header::CONNECTION,
                http::HeaderValue::from_static("x"),
            );
            assert!(sender.send_request(&malformed, true).is_err());
        }
    }
    assert_eq!(wakes.0.load(Relaxed), 1);
    assert!(poll(&mut newcomer, &wakes).is_ready());
}

#[test]
fn tasks_that_wait_for_large_heads_are_woken_when_the_heads_leave() {
    let shared = Arc::new(Shared::new(Config::new(false)));
    let mut read = bytes::BytesMut::from(&settings(&[(3, 3)])[..]);
    shared.lock().receive(&mut read, (0, 0));
    let head = || http::Request::post("http://a/").body(()).unwrap();
    let keys = [(); 3].map(|()| shared.lock().send_request(&head(), false).unwrap());
    shared.lock().drain(&mut Outgoing::default());
    let large = http::Request::post("http://a/").header("x", "x".repeat(300_000));
    let large = large.body(()).unwrap();
    shared.lock().send_request(&large, false).unwrap();
    let sender = client::SendRequest::<Bytes>::new(shared.clone());
    let (mut waiting, wakes) = with_wakes(sender.ready());
    assert!(poll(&mut waiting, &wakes).is_pending());
    // The first two streams end, which opens the one with the large head, and the trailers of the third stream follow.
    for id in [1, 3] {
        let response = headers(id, true, &[(":status", "200")]);
        let mut read = bytes::BytesMut::from(&response[..]);
        shared.lock().receive(&mut read, (0, 0));
    }
    for key in keys {
        let state = &mut *shared.lock();
        let stream = state.store.get(key).unwrap();
        stream.send = Half::Ended;
        if key == keys[2] {
            stream.last_block = Some(Box::default());
        }
        state.schedule.add(key, stream);
    }
    while shared.with(|state| state.drain(&mut Outgoing::default())) {}
    assert_eq!(wakes.0.load(Relaxed), 1);
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn woken<F>(waiting: &[(F, Arc<Wakes>)]) -> Vec<usize> {
    let woken = waiting.iter().map(|(_, wakes)| wakes.0.load(Relaxed));
    woken.collect()
}

fn with_wakes<F>(future: F) -> (F, Arc<Wakes>) {
    (future, Arc::default())
}

fn poll<F: Future + Unpin>(future: &mut F, wakes: &Arc<Wakes>) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(&wakes.clone().into()))
}

#[tokio::test(start_paused = true)]
async fn pings_are_answered_while_the_body_is_blocked() {
    let (near, mut far) = tokio::io::duplex(1_000);
    let (sender, connection) = client::handshake(near).await.unwrap();
    let peer = async {
        far.write_all(&settings(&[])).await.unwrap();
        // Takes in the preface and no more, so that the client's writes block.
        let mut preface = [0; 24];
        far.read_exact(&mut preface).await.unwrap();
        for _ in 0..50 {
            far.write_all(&frame(kind::PING, 0, 0, &[1; 8]))
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // All were read. Their answers come before the rest of the body.
        let (mut bytes, mut pongs) = (vec![0; 200_000], 0);
        let mut length = 0;
        while pongs < 50 {
            length += far.read(&mut bytes[length..]).await.unwrap();
            pongs = bytes[..length]
                .windows(8)
                .filter(|window| *window == [1; 8])
                .count();
        }
        length
    };
    let work = async {
        let mut sender = sender.ready().await.unwrap();
        let request = http::Request::post("http://a/").body(()).unwrap();
        let (response, mut send) = sender.send_request(&request, false).unwrap();
        send.send_data(Bytes::from(vec![0; 65_000]), false).unwrap();
        std::future::pending::<()>().await;
        drop((response, send));
    };
    let all = async {
        tokio::select! {
            length = peer => length,
            _ = join(connection, work) => unreachable!("the connection ends later"),
        }
    };
    let length = tokio::time::timeout(Duration::from_mins(1), all)
        .await
        .unwrap();
    assert!(length <= 70_000, "{length}");
}

#[tokio::test(start_paused = true)]
async fn two_ends_that_both_only_write_do_not_block_each_other() {
    const LENGTH: usize = 1 << 20;
    let (near, far) = tokio::io::duplex(64);
    let window = 2 << 20;
    let (sender, connection) = client::Builder::new()
        .initial_window_size(window)
        .initial_connection_window_size(window)
        .handshake::<_, Bytes>(near)
        .await
        .unwrap();
    let client = async move {
        let mut sender = sender.ready().await.unwrap();
        let request = http::Request::post("http://a/").body(()).unwrap();
        let (response, mut send) = sender.send_request(&request, false).unwrap();
        send.send_data(Bytes::from(vec![1; LENGTH]), true).unwrap();
        let mut body = response.await.unwrap().into_body();
        let mut length = 0;
        while let Some(chunk) = poll_fn(|cx| body.poll_data(cx)).await {
            length += chunk.unwrap().len();
        }
        length
    };
    let server = async move {
        let mut builder = server::Builder::new();
        builder
            .initial_window_size(window)
            .initial_connection_window_size(window);
        let mut connection = builder.handshake::<_, Bytes>(far).await.unwrap();
        let (mut request, mut respond) = connection.accept().await.unwrap().unwrap();
        let mut send = respond
            .send_response(http::Response::new(()), false)
            .unwrap();
        send.send_data(Bytes::from(vec![2; LENGTH]), true).unwrap();
        let read = async {
            let mut length = 0;
            while let Some(chunk) = poll_fn(|cx| request.body_mut().poll_data(cx)).await {
                length += chunk.unwrap().len();
            }
            length
        };
        join(read, async { assert!(connection.accept().await.is_none()) })
            .await
            .0
    };
    let all = join3(connection, client, server);
    let (end, at_client, at_server) = tokio::time::timeout(Duration::from_mins(1), all)
        .await
        .unwrap();
    end.unwrap();
    assert_eq!((at_client, at_server), (LENGTH, LENGTH));
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_keeps_no_buffers() {
    let (near, far) = tokio::io::duplex(1_000);
    let (sender, mut connection) = client::handshake(near).await.unwrap();
    let mut ping_pong = connection.ping_pong().unwrap();
    let mut server = server::handshake(far);
    let work = async {
        for _ in 0..4 {
            ping_pong.send_ping(super::super::Ping::opaque()).unwrap();
            poll_fn(|cx| ping_pong.poll_pong(cx)).await.unwrap();
        }
    };
    let serve = async {
        let mut connection = (&mut server).await.unwrap();
        connection.accept().await.is_none()
    };
    tokio::select! {
        () = work => {}
        _ = &mut connection => unreachable!(),
        _ = serve => unreachable!(),
    }
    drop(sender);
    assert_eq!(connection.buffered_memory(), 0);
}

/// The next request often follows the last one at once.
#[tokio::test(start_paused = true)]
async fn buffers_stay_behind_requests_until_two_pings() {
    let (near, far) = tokio::io::duplex(10_000);
    let (mut sender, mut connection) = client::handshake(near).await.unwrap();
    let mut ping_pong = connection.ping_pong().unwrap();
    let serve = async {
        let mut connection = server::handshake(far).await.unwrap();
        // A control stream stays open, as on a tunnel.
        let _control = connection.accept().await.unwrap().unwrap();
        while let Some(request) = connection.accept().await {
            let (_, mut respond) = request.unwrap();
            respond
                .send_response(http::Response::new(()), true)
                .unwrap();
        }
    };
    let mut serve = pin!(serve);
    let head = http::Request::post("http://a/").body(()).unwrap();
    let (_control, _send) = sender.send_request(&head, false).unwrap();
    let request = async {
        let (response, _) = sender.send_request(&head, true).unwrap();
        response.await.unwrap();
    };
    tokio::select! {
        () = request => {}
        _ = &mut connection => unreachable!(),
        () = &mut serve => unreachable!(),
    }
    assert!(connection.buffered_memory() > 0);
    let pings = async {
        for _ in 0..2 {
            ping_pong.send_ping(super::super::Ping::opaque()).unwrap();
            poll_fn(|cx| ping_pong.poll_pong(cx)).await.unwrap();
        }
    };
    tokio::select! {
        () = pings => {}
        _ = &mut connection => unreachable!(),
        () = &mut serve => unreachable!(),
    }
    assert_eq!(connection.buffered_memory(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_connection_with_several_idle_streams_gives_its_buffers_back() {
    let (near, far) = tokio::io::duplex(10_000);
    let (mut sender, mut connection) = client::handshake(near).await.unwrap();
    let mut ping_pong = connection.ping_pong().unwrap();
    let mut server = server::handshake(far);
    let work = async {
        let mut streams = Vec::new();
        for _ in 0..3 {
            let head = http::Request::post("http://a/").body(()).unwrap();
            let (response, mut send) = sender.send_request(&head, false).unwrap();
            send.send_data(Bytes::from(vec![0; 10_000]), false).unwrap();
            streams.push((response, send));
        }
        for _ in 0..40 {
            ping_pong.send_ping(super::super::Ping::opaque()).unwrap();
            poll_fn(|cx| ping_pong.poll_pong(cx)).await.unwrap();
        }
        streams
    };
    let serve = async {
        let mut connection = (&mut server).await.unwrap();
        let mut accepted = Vec::new();
        while let Some(request) = connection.accept().await {
            accepted.push(request);
        }
    };
    let mut least = usize::MAX;
    let measured = poll_fn(|cx| {
        let polled = Pin::new(&mut connection).poll(cx);
        least = least.min(connection.buffered_memory());
        polled
    });
    let streams = tokio::select! {
        streams = work => streams,
        _ = measured => unreachable!(),
        () = serve => unreachable!(),
    };
    assert_eq!(streams.len(), 3);
    assert_eq!(least, 0);
}

#[tokio::test]
async fn the_state_of_a_dropped_connection_keeps_no_frames() {
    let (near, _far) = tokio::io::duplex(10);
    let driver = Driver::new(near, Config::new(false));
    let shared = driver.shared().clone();
    let head = http::Request::get("http://a/").body(()).unwrap();
    shared
        .with(|state| state.send_request(&head, true))
        .unwrap();
    drop(driver);
    let state = shared.lock();
    assert_eq!(state.control.capacity() + state.heads.capacity(), 0);
}

#[tokio::test]
async fn work_that_a_turn_has_done_wakes_its_task_no_more() {
    let (near, mut far) = tokio::io::duplex(10_000);
    let mut driver = Driver::new(near, Config::new(false));
    let shared = driver.shared().clone();
    let head = http::Request::get("http://a/").body(()).unwrap();
    let key = shared
        .with(|state| state.send_request(&head, true))
        .unwrap();
    let frames = [settings(&[]), headers(1, true, &[(":status", "200")])];
    far.write_all(&frames.concat()).await.unwrap();
    let wakes = Arc::<Wakes>::default();
    let polled = driver.poll(&mut Context::from_waker(&wakes.clone().into()));
    assert!(polled.is_pending());
    let before = wakes.0.load(Relaxed);
    for _ in 0..2 {
        shared.with(|state| state.drop_handle(key));
    }
    assert!(shared.lock().store.is_empty());
    assert_eq!(wakes.0.load(Relaxed), before);
}
