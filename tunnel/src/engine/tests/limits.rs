//! Floods and stalls: what a peer can make this end do and keep is bounded.

use super::{
    super::{
        client,
        error::{Initiator, Reason},
        frame::{PREFACE, flag, kind},
        frame_limit::FrameLimit,
        io::MAX_DISCARDED,
        message, server,
    },
    raw::{Peer, Verdict, data, frame, headers, request, reset, settings, window_update},
};
use crate::io_observer::{IoObserver, ObservedIo};
use Verdict::{Accepted, Connection, Stream};
use bytes::Bytes;
use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Waker},
};
use tokio::io::AsyncWriteExt;

const CALM: Verdict = Connection(Reason::ENHANCE_YOUR_CALM);

#[test]
fn unread_answers_to_control_frames_are_limited() {
    let ping = frame(kind::PING, 0, 0, &[0; 8]);
    let floods = [(ping.clone(), 1_000), (settings(&[]), 100)];
    for (bytes, limit) in floods {
        let mut peer = Peer::of_server(|_| {});
        for _ in 0..limit {
            peer.feed(&bytes);
        }
        assert!(peer.state.end.is_none());
        peer.feed(&bytes);
        assert_eq!(peer.verdict(&[]), CALM);
    }
    // A peer that reads may ask as often as it likes.
    let mut peer = Peer::of_server(|_| {});
    for _ in 0..5_000 {
        assert_eq!(peer.verdict(std::slice::from_ref(&ping)), Accepted);
    }
}

#[test]
fn rapid_resets_end_the_connection() {
    let mut peer = Peer::of_server(|config| config.max_unaccepted_resets = 20);
    for index in 0..21 {
        let id = index * 2 + 1;
        assert_eq!(
            peer.verdict(&[request(id, true, &[]), reset(id, Reason::CANCEL)]),
            if index < 20 { Accepted } else { CALM }
        );
    }
    // Streams that were accepted do not count, and those that were reset are not given to the user.
    let mut peer = Peer::of_server(|config| config.max_unaccepted_resets = 20);
    for index in 0..1_000 {
        let id = index * 2 + 1;
        peer.feed(&request(id, true, &[]));
        if index % 2 == 0 {
            let (key, _) = peer.state.next_request().unwrap();
            assert_eq!(peer.verdict(&[reset(id, Reason::CANCEL)]), Accepted);
            peer.state.drop_handle(key);
            peer.state.drop_handle(key);
        } else {
            assert_eq!(peer.verdict(&[reset(id, Reason::CANCEL)]), Accepted);
            assert!(peer.state.next_request().is_none());
        }
        assert_eq!(peer.state.store.len(), 0);
    }
}

#[test]
fn a_peer_cannot_make_this_end_reset_streams_without_limit() {
    let mut peer = Peer::of_server(|config| config.max_error_resets = Some(30));
    for index in 0..30 {
        let id = index * 2 + 1;
        let bad = request(id, true, &[("connection", "x")]);
        assert_eq!(peer.verdict(&[bad]), Stream(id, Reason::PROTOCOL_ERROR));
    }
    assert_eq!(
        peer.verdict(&[request(61, true, &[("connection", "x")])]),
        CALM
    );
    // Nor while it does not read.
    let mut peer = Peer::of_server(|config| config.max_error_resets = None);
    for index in 0..=20_000 {
        assert!(peer.state.end.is_none());
        peer.feed(&request(index * 2 + 1, true, &[("connection", "x")]));
    }
    assert_eq!(peer.verdict(&[]), CALM);
}

#[test]
fn floods_of_continuation_end_the_connection() {
    for payload in [&[][..], &[0; 1_000]] {
        let mut peer = Peer::of_server(|config| {
            config.settings.max_header_list_size = Some(100_000);
        });
        peer.feed(&frame(kind::HEADERS, 0, 1, &[]));
        let more = frame(kind::CONTINUATION, 0, 1, payload);
        let count = (0..10_000).take_while(|_| {
            peer.feed(&more);
            peer.state.end.is_none()
        });
        assert!(count.count() < 300);
        assert_eq!(peer.verdict(&[]), CALM);
    }
}

#[tokio::test(start_paused = true)]
async fn frames_without_data_are_limited_and_paid_by_traffic() {
    let unknown = frame(200, 0, 0, &[]);
    let rare = (unknown, 10_000, "frames of rare kinds");
    let updates = (window_update(0, 1), 100_000, "WINDOW_UPDATE");
    for (bytes, limit, name) in [rare, updates] {
        let mut peer = Peer::of_client();
        peer.state.frame_limit = Some(FrameLimit::new());
        for _ in 0..limit {
            peer.feed(&bytes);
        }
        assert!(peer.state.end.is_none());
        let head = http::Request::get("http://a/").body(()).unwrap();
        peer.state.send_request(&head, true).unwrap();
        // The stream pays for eight frames.
        for _ in 0..8 {
            peer.feed(&window_update(0, 1));
        }
        assert!(peer.state.end.is_none());
        // The frames that cost the most are named, not the one for which nothing is left.
        peer.feed(&frame(kind::PING, 0, 0, &[0; 8]));
        let frames = peer.take();
        let last = frames.iter().find(|frame| frame.kind == kind::GOAWAY);
        let text = &last.unwrap().payload[8..];
        let expected = format!("the peer floods its tunnel with {name}");
        assert_eq!(text, expected.as_bytes());
        let error = peer.state.end.unwrap().unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    // A peer that is trusted pays nothing.
    let mut peer = Peer::of_client();
    for _ in 0..200_000 {
        peer.feed(&window_update(0, 1));
    }
    assert!(peer.state.end.is_none());
}

/// Counts the bytes that are read.
struct ReadCounter(Arc<AtomicUsize>);

impl IoObserver for ReadCounter {
    fn on_read(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.fetch_add(bytes.len(), Relaxed);
        Ok(())
    }
}

#[tokio::test]
async fn a_peer_that_sends_thousands_of_frames_yields_to_other_tasks() {
    let (near, mut far) = tokio::io::duplex(1 << 20);
    let read = Arc::<AtomicUsize>::default();
    let io = ObservedIo::new(near, ReadCounter(read.clone()));
    let builder = client::Builder::new();
    let (_sender, mut connection) = builder.handshake::<_, Bytes>(io).await.unwrap();
    let update = window_update(0, 1);
    let flood = [settings(&[]), update.repeat(10_000)].concat();
    far.write_all(&flood).await.unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let mut polls = 0;
    while read.load(Relaxed) < flood.len() {
        assert!(Pin::new(&mut connection).poll(&mut cx).is_pending());
        polls += 1;
    }
    assert!(polls > 4, "{polls}");
}

#[tokio::test]
async fn nothing_is_read_while_requests_wait() {
    let (near, mut far) = tokio::io::duplex(4 << 20);
    let read = Arc::<AtomicUsize>::default();
    let io = ObservedIo::new(near, ReadCounter(read.clone()));
    let requests: Vec<u8> = (0..50_000)
        .flat_map(|index| request(index * 2 + 1, true, &[]))
        .collect();
    let start = [PREFACE, &settings(&[])[..], &requests].concat();
    far.write_all(&start).await.unwrap();
    let mut server = server::Builder::new()
        .handshake::<_, Bytes>(io)
        .await
        .unwrap();
    let mut accepted = vec![server.accept().await.unwrap().unwrap()];
    let read_first = read.load(Relaxed);
    assert!(read_first < start.len() / 4, "{read_first}");
    for _ in 0..1_000 {
        accepted.push(server.accept().await.unwrap().unwrap());
    }
    assert_eq!(read.load(Relaxed), read_first);
}

#[test]
fn resets_by_the_user_are_no_flood_of_the_peer() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1 << 20)]));
    peer.take();
    for _ in 0..30_000 {
        let head = http::Request::get("http://a/").body(()).unwrap();
        let key = peer.state.send_request(&head, false).unwrap();
        peer.state.reset(key, Reason::CANCEL, Initiator::User);
    }
    peer.feed(&window_update(0, 1));
    assert!(peer.state.end.is_none());
}

#[test]
fn empty_data_frames_are_limited() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&request(1, false, &[]));
    let empty = data(1, false, &[]);
    for _ in 0..10_000 {
        peer.feed(&empty);
    }
    assert!(peer.state.end.is_none());
    peer.feed(&empty);
    assert_eq!(peer.verdict(&[]), CALM);
}

#[test]
fn large_heads_are_refused() {
    let value = "x".repeat(100);
    let large = [("a", &value[..]), ("b", &value)];
    let small_limit = |peer: &mut Peer| {
        peer.state.config.settings.max_header_list_size = Some(300);
    };
    let mut peer = Peer::of_server(|_| {});
    small_limit(&mut peer);
    peer.feed(&request(1, false, &large));
    let frames = peer.take();
    let kinds: Vec<_> = frames
        .iter()
        .map(|frame| (frame.kind, frame.flags))
        .collect();
    let end = flag::END_HEADERS | flag::END_STREAM;
    assert_eq!(kinds, [(kind::HEADERS, end), (kind::RST_STREAM, 0)]);
    let code = u32::from(Reason::PROTOCOL_ERROR).to_be_bytes();
    assert_eq!(frames[1].payload, code[..], "not to be repeated");
    assert_eq!(peer.state.store.len(), 0);
    assert_eq!(
        peer.verdict(&[request(3, true, &[])]),
        Accepted,
        "the table is still right"
    );

    let mut peer = Peer::of_client();
    small_limit(&mut peer);
    let head = http::Request::get("http://a/").body(()).unwrap();
    peer.state.send_request(&head, true).unwrap();
    let response = headers(1, true, &[&[(":status", "200")][..], &large].concat());
    assert_eq!(peer.verdict(&[response]), Stream(1, Reason::PROTOCOL_ERROR));
}

#[test]
fn answers_to_large_heads_are_limited() {
    let value = "x".repeat(100);
    let large = [("a", &value[..]), ("b", &value)];
    let flood = |end: bool, max: Option<usize>, reads: bool| {
        let mut peer = Peer::of_server(|config| {
            config.settings.max_header_list_size = Some(300);
            config.max_error_resets = max;
        });
        let mut count = 0;
        while peer.state.end.is_none() && count < 25_000 {
            peer.feed(&request(count * 2 + 1, end, &large));
            count += 1;
            if reads && peer.state.end.is_none() {
                peer.take();
            }
        }
        assert!(peer.state.heads.len() < 1 << 20);
        assert_eq!(peer.verdict(&[]), CALM);
        count
    };
    for end in [true, false] {
        assert_eq!(flood(end, Some(30), true), 31);
        assert!(flood(end, None, false) <= 20_001);
    }
}

#[test]
fn requests_that_were_reset_before_they_were_accepted_keep_no_fields() {
    let mut peer = Peer::of_server(|_| {});
    for id in [1, 3] {
        peer.feed(&request(id, true, &[("x", "y")]));
    }
    peer.feed(&reset(3, Reason::CANCEL));
    let accept = peer.state.accept.iter();
    let counts: Vec<_> = accept.map(|(_, request)| request.headers().len()).collect();
    assert_eq!(counts, [1, 0]);
}

#[test]
fn unread_interim_responses_are_limited_in_number_and_size() {
    let client = |max_size| {
        let mut peer = Peer::of_client();
        peer.state.config.settings.max_header_list_size = max_size;
        let head = http::Request::get("http://a/").body(()).unwrap();
        peer.state.send_request(&head, true).unwrap();
        peer
    };
    let malformed = Stream(1, Reason::PROTOCOL_ERROR);
    let interim = headers(1, false, &[(":status", "103")]);
    let mut peer = client(None);
    for _ in 0..1_024 {
        assert_eq!(peer.verdict(std::slice::from_ref(&interim)), Accepted);
    }
    assert_eq!(peer.verdict(&[interim]), malformed);
    let large = headers(1, false, &[(":status", "103"), ("a", &"x".repeat(100))]);
    let mut peer = client(Some(1_000));
    let count = (0..1_024).take_while(|_| peer.verdict(std::slice::from_ref(&large)) == Accepted);
    assert_eq!(count.count(), 5);
}

#[test]
fn unread_frames_cost_their_bytes_and_no_more() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&request(1, false, &[]));
    let (key, _) = peer.state.next_request().unwrap();
    let byte = data(1, false, b"x");
    for _ in 0..60_000 {
        peer.feed(&byte);
    }
    let stream = peer.state.store.get(key).unwrap();
    assert_eq!(stream.in_flight, 60_000);
    assert!(stream.used() < 3 * 60_000, "{}", stream.used());
}

#[test]
fn a_shared_read_buffer_counts_once_for_each_stream() {
    let mut peer = Peer::of_server(|_| {});
    let keys = [1, 3].map(|id| {
        peer.feed(&request(id, false, &[]));
        peer.state.next_request().unwrap().0
    });
    let frames = [
        data(1, false, &[1; 5_000]),
        data(3, false, &[3; 5_000]),
        data(1, false, &[1; 5_000]),
    ];
    let mut read = bytes::BytesMut::from(&frames.concat()[..]);
    let capacity = read.capacity();
    peer.state.receive(&mut read, (7, capacity));
    for key in keys {
        let stream = peer.state.store.get(key).unwrap();
        assert!(stream.used() >= capacity && stream.used() < capacity + 1_000);
        while stream.body.pop().is_some() {}
        assert_eq!(stream.used(), stream.in_flight);
    }
}

#[test]
fn responses_that_the_peer_does_not_read_are_bounded() {
    let mut peer = Peer::of_server(|config| config.settings.max_concurrent_streams = Some(100));
    let mut response = http::Response::new(());
    let value = http::HeaderValue::from_str(&"x".repeat(1_000)).unwrap();
    response.headers_mut().insert("etag", value);
    let mut refused = false;
    for index in 0..10_000 {
        let id = index * 2 + 1;
        peer.feed(&request(id, true, &[]));
        if let Some((key, _)) = peer.state.next_request() {
            let encoder = &mut peer.state.encoder;
            super::super::frame::put_block(&mut peer.state.heads, (id, true), 16_384, |block| {
                message::put_response(encoder, &response, block);
            });
            let stream = peer.state.store.get(key).unwrap();
            stream.send = super::super::streams::Half::Ended;
            stream.end_sent = true;
            peer.state.settle(key);
            peer.state.drop_handle(key);
            peer.state.drop_handle(key);
        } else {
            refused = true;
        }
    }
    assert!(
        refused && peer.state.heads.len() < 600 << 10,
        "{}",
        peer.state.heads.len()
    );
    assert!(peer.state.store.len() <= 100);
}

#[test]
fn streams_that_end_while_they_wait_to_send_leave_no_entries() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&request(1, true, &[]));
    for index in 1..5_000 {
        let id = index * 2 + 1;
        peer.feed(&request(id, true, &[]));
        while let Some((key, _)) = peer.state.next_request() {
            let state = &mut peer.state;
            let stream = state.store.get(key).unwrap();
            stream.send = super::super::streams::Half::Open;
            stream.queue.push_back(bytes::Bytes::from_static(b"x"));
            stream.queued = 1;
            state.queued += 1;
            state.schedule.add(key, stream);
            peer.feed(&reset(key.id, Reason::CANCEL));
            peer.state.drop_handle(key);
            peer.state.drop_handle(key);
        }
    }
    assert!(peer.state.schedule.len() < 200);
}

/// Returns a client whose frames are charged for.
fn limited_client() -> Peer {
    let mut peer = Peer::of_client();
    peer.state.frame_limit = Some(FrameLimit::new());
    peer
}

/// Sends a request and returns its number.
fn get(peer: &mut Peer) -> super::super::streams::Key {
    let head = http::Request::get("http://a/").body(()).unwrap();
    peer.state.send_request(&head, true).unwrap()
}

#[tokio::test(start_paused = true)]
async fn small_data_that_nobody_reads_is_charged() {
    let flood = |payload: &[u8]| {
        let mut peer = limited_client();
        let key = get(&mut peer);
        peer.state.reset(key, Reason::CANCEL, Initiator::User);
        peer.take();
        let bytes = data(1, false, payload);
        let mut count = 0;
        while peer.state.end.is_none() && count < 200_000 {
            peer.feed(&bytes);
            count += 1;
            if count % 32 == 0 {
                peer.take();
            }
        }
        count
    };
    // The window that the peer had at the time of the reset is free.
    assert_eq!(flood(b"x"), 65_535 + 100_001);
    assert_eq!(flood(&[0; 1_024]), 200_000);
    assert_eq!(flood(&[]), 10_001, "frames without a payload");
}

/// Returns the fields of a response with this many fields of 100 bytes.
fn large_head(status: &'static str, field_count: usize) -> Vec<(&'static str, &'static str)> {
    const VALUE: &str = concat!(
        "01234567890123456789012345678901234567890123456789",
        "01234567890123456789012345678901234567890123456789"
    );
    let fields = std::iter::repeat_n(("a", VALUE), field_count);
    std::iter::once((":status", status)).chain(fields).collect()
}

#[tokio::test(start_paused = true)]
async fn a_long_header_block_costs_as_much_as_its_fields() {
    let flood = |field_count: usize| {
        let mut peer = limited_client();
        let key = get(&mut peer);
        peer.take();
        let interim = headers(1, false, &large_head("103", field_count));
        let mut count = 0;
        while peer.state.end.is_none() && count < 150_000 {
            peer.feed(&interim);
            if let Some(stream) = peer.state.store.get(key) {
                stream.interim.clear();
            }
            count += 1;
        }
        count
    };
    assert_eq!(flood(1), 100_001);
    // Three more tokens for 101 fields.
    assert_eq!(flood(100), 100_000 / 4 + 1);
}

#[tokio::test(start_paused = true)]
async fn a_peer_may_measure_the_link_after_each_burst() {
    let ping = frame(kind::PING, 0, 0, &[0; 8]);
    let mut peer = limited_client();
    for _ in 0..60_000 {
        let key = get(&mut peer);
        peer.take();
        peer.feed(&ping);
        peer.state.reset(key, Reason::CANCEL, Initiator::User);
        peer.state.drop_handle(key);
        peer.state.drop_handle(key);
    }
    assert!(peer.state.end.is_none());
    peer.take();
    // The answers to PINGs are no reason for more of them.
    let mut count = 0;
    while peer.state.end.is_none() && count < 20_000 {
        peer.feed(&ping);
        count += 1;
        if peer.state.end.is_none() {
            peer.take();
        }
    }
    assert!(count < 10_100, "{count}");
}

#[tokio::test(start_paused = true)]
async fn resets_of_requests_that_nobody_got_are_charged() {
    let mut peer = Peer::of_server(|config| config.max_unaccepted_resets = usize::MAX);
    peer.state.frame_limit = Some(FrameLimit::new());
    let mut count = 0;
    while peer.state.end.is_none() && count < 100_000 {
        let id = count * 2 + 1;
        peer.feed(&request(id, true, &[]));
        peer.feed(&reset(id, Reason::CANCEL));
        count += 1;
    }
    // Two frames and ten tokens more for each.
    assert_eq!(count, 100_000 / 12);
}

#[test]
fn late_frames_of_forgotten_streams_are_no_violations() {
    let mut peer = Peer::of_server(|config| {
        config.max_remembered_resets = 10;
        config.max_error_resets = Some(10);
    });
    for index in 0..1_000 {
        let id = index * 2 + 1;
        peer.feed(&request(id, false, &[]));
        let (key, _) = peer.state.next_request().unwrap();
        peer.state.drop_handle(key);
        peer.state.drop_handle(key);
        peer.take();
    }
    assert_eq!(peer.verdict(&[data(1_999, false, b"late")]), Accepted);
    for id in [1, 3, 901] {
        let late = [data(id, false, b"late")];
        assert_eq!(peer.verdict(&late), Stream(id, Reason::STREAM_CLOSED));
    }
    for id in (1..201).step_by(2) {
        peer.feed(&data(id, false, b"late"));
        peer.take();
    }
    assert!(peer.state.end.is_none());
}

#[test]
fn resets_are_forgotten_once_the_peer_has_read_them() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1_000)]));
    let mut keys = Vec::new();
    for _ in 0..4 {
        keys.push(get(&mut peer));
    }
    peer.take();
    peer.state.reset(keys[0], Reason::CANCEL, Initiator::User);
    peer.state.reset(keys[1], Reason::CANCEL, Initiator::User);
    peer.state.send_ping().unwrap();
    peer.state.reset(keys[2], Reason::CANCEL, Initiator::User);
    let ping = peer.take().into_iter().find(|sent| sent.kind == kind::PING);
    let ids = [1, 3, 5];
    let remembered = |peer: &Peer| ids.map(|id| peer.state.resets.contains(id));
    assert_eq!(remembered(&peer), [true; 3]);
    peer.feed(&frame(kind::PING, flag::ACK, 0, &ping.unwrap().payload));
    assert_eq!(remembered(&peer), [false, false, true]);
    assert_eq!(peer.verdict(&[data(5, false, b"late")]), Accepted);

    // A reset behind queued heads may leave after the PING.
    let cx = Context::from_waker(Waker::noop());
    assert!(peer.state.take_pong(&cx).is_some());
    let key = get(&mut peer);
    peer.state.reset(key, Reason::CANCEL, Initiator::User);
    peer.state.send_ping().unwrap();
    peer.state.receive_pong(b"causeway");
    assert!(peer.state.resets.contains(key.id));
}

#[test]
fn unread_heads_and_trailers_count_as_memory() {
    let mut peer = Peer::of_client();
    let key = get(&mut peer);
    let used = |peer: &mut Peer| peer.state.store.get(key).unwrap().used();
    peer.feed(&headers(1, false, &large_head("103", 100)));
    let interim = used(&mut peer);
    assert!(interim > 30_000, "{interim}");
    peer.feed(&headers(1, false, &large_head("200", 100)));
    assert_eq!(used(&mut peer), 2 * interim);
    let stream = peer.state.store.get(key).unwrap();
    stream.interim.clear();
    stream.response = None;
    assert_eq!(stream.used(), 0);
    peer.feed(&headers(1, true, &large_head("200", 100)[1..]));
    let trailers = used(&mut peer);
    assert!(trailers > 30_000 && trailers < interim, "{trailers}");
}

#[test]
fn all_streams_together_queue_a_bounded_number_of_bytes() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&settings(&[(4, 1 << 30)]));
    peer.feed(&window_update(0, 1 << 30));
    let mut queued = 0;
    for index in 0..1_000 {
        peer.feed(&request(index * 2 + 1, true, &[]));
        let (key, _) = peer.state.next_request().unwrap();
        let max_queued = peer.state.max_queued();
        let stream = peer.state.store.get(key).unwrap();
        stream.requested = usize::MAX;
        let capacity = stream.capacity(max_queued);
        stream.queue.push_back(Bytes::from(vec![0; capacity]));
        stream.queued = capacity;
        peer.state.queued += capacity;
        queued += capacity;
    }
    assert_eq!(queued, (8 << 20) + (1_000 - 64) * (16 << 10));
    for index in 0..1_000 {
        peer.feed(&reset(index * 2 + 1, Reason::CANCEL));
    }
    assert_eq!(peer.state.queued, 0);
}

#[test]
fn a_peer_that_only_sends_after_the_end_is_cut_off() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&frame(kind::PING, 0, 1, &[0; 8]));
    assert!(peer.state.end.is_some());
    for _ in 0..1_025 {
        peer.feed(b"x");
    }
    assert!(peer.state.discarded > MAX_DISCARDED);
}
