//! Violations of RFC 9113 by the peer, with the codes of the RFC.

use super::{
    super::{
        error::Reason,
        flow::WindowLimits,
        frame::{PREFACE, flag, kind},
    },
    raw::{
        Frame, GET, Peer, Verdict, block, data, frame, headers, request, reset, settings,
        window_update,
    },
};
use Verdict::{Accepted, Connection, Stream};

fn server_verdict(frames: &[Vec<u8>]) -> Verdict {
    let mut peer = Peer::of_server(|config| {
        config.settings.max_concurrent_streams = Some(2);
    });
    peer.verdict(frames)
}

fn client_verdict(frames: &[Vec<u8>]) -> Verdict {
    let mut peer = Peer::of_client();
    let head = http::Request::get("http://a/").body(()).unwrap();
    peer.state.send_request(&head, true).unwrap();
    peer.verdict(frames)
}

#[test]
fn frames_of_invalid_size_or_stream_end_the_connection() {
    let size = Connection(Reason::FRAME_SIZE_ERROR);
    let protocol = Connection(Reason::PROTOCOL_ERROR);
    for (bytes, verdict) in [
        (frame(kind::DATA, 0, 1, &vec![0; 16_385]), size),
        (frame(kind::SETTINGS, 0, 0, &[0; 5]), size),
        (frame(kind::SETTINGS, flag::ACK, 0, &[0; 6]), size),
        (frame(kind::PING, 0, 0, &[0; 7]), size),
        (frame(kind::GOAWAY, 0, 0, &[0; 7]), size),
        (frame(kind::WINDOW_UPDATE, 0, 0, &[0; 3]), size),
        (frame(kind::RST_STREAM, 0, 1, &[0; 5]), size),
        (frame(kind::PRIORITY, 0, 1, &[0; 4]), size),
        (
            frame(kind::HEADERS, flag::PADDED | flag::END_HEADERS, 1, &[]),
            size,
        ),
        (data(0, false, b"x"), protocol),
        (request(0, true, &[]), protocol),
        (reset(0, Reason::CANCEL), protocol),
        (frame(kind::PRIORITY, 0, 0, &[0; 5]), protocol),
        (frame(kind::SETTINGS, 0, 1, &[]), protocol),
        (frame(kind::SETTINGS, flag::ACK, 0, &[]), protocol),
        (frame(kind::PING, 0, 1, &[0; 8]), protocol),
        (frame(kind::GOAWAY, 0, 1, &[0; 8]), protocol),
        (
            frame(kind::PUSH_PROMISE, flag::END_HEADERS, 1, &[0; 4]),
            protocol,
        ),
        (
            frame(kind::CONTINUATION, flag::END_HEADERS, 1, &[]),
            protocol,
        ),
        (settings(&[(2, 2)]), protocol),
        (
            settings(&[(4, 1 << 31)]),
            Connection(Reason::FLOW_CONTROL_ERROR),
        ),
        (window_update(0, 0), protocol),
        (
            window_update(0, (1 << 31) - 1),
            Connection(Reason::FLOW_CONTROL_ERROR),
        ),
        (request(2, true, &[]), protocol),
        (frame(77, 0xff, 9, b"unknown"), Accepted),
        (frame(kind::PRIORITY, 0, 9, &[0, 0, 0, 9, 1]), Accepted),
        (frame(kind::PING, flag::ACK, 0, &[1; 8]), Accepted),
    ] {
        assert_eq!(
            server_verdict(std::slice::from_ref(&bytes)),
            verdict,
            "{bytes:?}"
        );
    }
}

#[test]
fn the_preface_and_settings_come_first() {
    let new = || Peer {
        state: super::super::connection::State::new(super::super::config::Config::new(true)),
    };
    let protocol = Connection(Reason::PROTOCOL_ERROR);
    assert_eq!(new().verdict(&[b"GET / HTTP/1.1\r\n".to_vec()]), protocol);
    let preface = PREFACE.to_vec();
    assert_eq!(
        new().verdict(&[preface.clone(), request(1, true, &[])]),
        protocol
    );
    let ack = frame(kind::SETTINGS, flag::ACK, 0, &[]);
    assert_eq!(new().verdict(&[preface.clone(), ack]), protocol);
    assert_eq!(new().verdict(&[preface, settings(&[])]), Accepted);
}

#[test]
fn frames_on_idle_streams_end_the_connection() {
    for bytes in [
        data(1, false, b"x"),
        reset(1, Reason::CANCEL),
        window_update(1, 1),
    ] {
        let verdict = server_verdict(std::slice::from_ref(&bytes));
        assert_eq!(verdict, Connection(Reason::PROTOCOL_ERROR), "{bytes:?}");
    }
    let idle_at_client = [
        data(3, false, b"x"),
        headers(3, false, &[(":status", "200")]),
        request(2, true, &[]),
    ];
    for bytes in idle_at_client {
        assert_eq!(client_verdict(&[bytes]), Connection(Reason::PROTOCOL_ERROR));
    }
}

#[test]
fn requests_that_were_never_sent_are_idle_streams() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1)]));
    let head = || http::Request::get("http://a/").body(()).unwrap();
    for _ in 0..2 {
        peer.state.send_request(&head(), true).unwrap();
    }
    let last = [0, 0, 0, 1, 0, 0, 0, 0];
    peer.feed(&frame(kind::GOAWAY, 0, 0, &last));
    let verdict = peer.verdict(&[headers(3, true, &[(":status", "200")])]);
    assert_eq!(verdict, Connection(Reason::PROTOCOL_ERROR));
}

#[test]
fn malformed_requests_are_reset() {
    let malformed = Stream(1, Reason::PROTOCOL_ERROR);
    for more in [
        ("Upper", "x"),
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("keep-alive", "1"),
        ("proxy-connection", "x"),
        ("te", "gzip"),
        (":path", "/again"),
        (":status", "200"),
        (":unknown", "x"),
        (":protocol", "websocket"),
        ("a b", "x"),
        ("x", "line\nfeed"),
    ] {
        assert_eq!(
            server_verdict(&[request(1, true, &[more])]),
            malformed,
            "{more:?}"
        );
    }
    let late_pseudo = [("a", "b"), GET[0], GET[1], GET[2], GET[3]];
    let connect_with_path = [
        (":method", "CONNECT"),
        (":authority", "a:1"),
        (":path", "/"),
    ];
    let empty_path = [GET[0], GET[1], (":path", "")];
    let lists = [
        &late_pseudo[..],
        &GET[..3],
        &GET[1..],
        &connect_with_path,
        &empty_path,
        &[],
    ];
    for fields in lists {
        assert_eq!(
            server_verdict(&[headers(1, true, fields)]),
            malformed,
            "{fields:?}"
        );
    }
    for fields in [
        &[GET[0], GET[1], GET[3], ("te", "trailers")][..],
        &[(":method", "CONNECT"), (":authority", "a:1")],
    ] {
        assert_eq!(
            server_verdict(&[headers(1, true, fields)]),
            Accepted,
            "{fields:?}"
        );
    }
}

#[test]
fn extended_connect_needs_the_setting() {
    let fields = [
        (":method", "CONNECT"),
        (":protocol", "websocket"),
        GET[1],
        GET[2],
        GET[3],
    ];
    let upgrade = headers(1, false, &fields);
    assert_eq!(
        server_verdict(std::slice::from_ref(&upgrade)),
        Stream(1, Reason::PROTOCOL_ERROR)
    );
    let mut peer = Peer::of_server(|config| config.settings.enable_connect_protocol = Some(1));
    assert_eq!(peer.verdict(&[upgrade]), Accepted);
    let (_, request) = peer.state.next_request().unwrap();
    let protocol = request.extensions().get::<super::super::ext::Protocol>();
    assert_eq!(protocol.unwrap().as_str(), "websocket");
}

#[test]
fn malformed_responses_are_reset() {
    let malformed = Stream(1, Reason::PROTOCOL_ERROR);
    for frames in [
        vec![headers(1, true, &[("a", "b")])],
        vec![headers(1, true, &[(":status", "20x")])],
        vec![headers(1, false, &[(":status", "101")])],
        vec![headers(1, true, &[(":status", "103")])],
        vec![headers(1, true, &[(":status", "200"), (":path", "/")])],
        vec![data(1, true, b"x")],
        vec![
            headers(1, false, &[(":status", "200")]),
            headers(1, false, &[("a", "b")]),
        ],
        vec![
            headers(1, false, &[(":status", "200")]),
            headers(1, true, &[(":status", "200")]),
        ],
    ] {
        assert_eq!(client_verdict(&frames), malformed, "{frames:?}");
    }
    let interim = headers(1, false, &[(":status", "103")]);
    let frames = [
        interim.clone(),
        interim,
        headers(1, false, &[(":status", "200")]),
        data(1, false, b"x"),
        headers(1, true, &[("a", "b")]),
    ];
    assert_eq!(client_verdict(&frames), Accepted);
}

#[test]
fn header_blocks_are_contiguous_and_decodable() {
    let start = frame(kind::HEADERS, flag::END_STREAM, 1, &block(&GET[..2]));
    let rest = |stream| {
        frame(
            kind::CONTINUATION,
            flag::END_HEADERS,
            stream,
            &block(&GET[2..]),
        )
    };
    assert_eq!(server_verdict(&[start.clone(), rest(1)]), Accepted);
    let protocol = Connection(Reason::PROTOCOL_ERROR);
    assert_eq!(server_verdict(&[start.clone(), rest(3)]), protocol);
    let ping = frame(kind::PING, 0, 0, &[0; 8]);
    assert_eq!(server_verdict(&[start.clone(), ping, rest(1)]), protocol);
    assert_eq!(server_verdict(&[start, frame(77, 0, 1, &[])]), protocol);
    let broken = frame(
        kind::HEADERS,
        flag::END_HEADERS,
        1,
        &[0xff, 0xff, 0xff, 0xff, 0xff],
    );
    assert_eq!(
        server_verdict(&[broken]),
        Connection(Reason::COMPRESSION_ERROR)
    );
}

#[test]
fn streams_have_states() {
    let closed = Stream(1, Reason::STREAM_CLOSED);
    let open = request(1, false, &[]);
    let ended = request(1, true, &[]);
    assert_eq!(
        server_verdict(&[ended.clone(), data(1, false, b"x")]),
        closed
    );
    assert_eq!(
        server_verdict(&[ended.clone(), headers(1, true, &[("a", "b")])]),
        closed
    );
    assert_eq!(
        server_verdict(&[request(3, true, &[]), ended]),
        Connection(Reason::PROTOCOL_ERROR),
        "numbers only grow"
    );
    let trailers = headers(1, true, &[("a", "b")]);
    assert_eq!(
        server_verdict(&[open.clone(), data(1, false, b"x"), trailers.clone()]),
        Accepted
    );
    assert_eq!(
        server_verdict(&[open.clone(), trailers.clone(), trailers]),
        closed
    );
    let not_the_end = headers(1, false, &[("a", "b")]);
    assert_eq!(
        server_verdict(&[open.clone(), not_the_end]),
        Stream(1, Reason::PROTOCOL_ERROR)
    );
    let cancelled = [open.clone(), reset(1, Reason::CANCEL)];
    assert_eq!(server_verdict(&cancelled), Accepted);
    let late = [
        &cancelled[..],
        &[window_update(1, 5), reset(1, Reason::CANCEL)],
    ]
    .concat();
    assert_eq!(server_verdict(&late), Accepted);
    let late = [&cancelled[..], &[data(1, false, b"x")]].concat();
    assert_eq!(server_verdict(&late), closed);
    let third = [open, request(3, false, &[]), request(5, false, &[])];
    assert_eq!(server_verdict(&third), Stream(5, Reason::REFUSED_STREAM));
}

#[test]
fn windows_are_enforced_and_padding_counts() {
    let open = request(1, false, &[]);
    let chunk = data(1, false, &[0; 16_384]);
    let mut frames = vec![open.clone()];
    frames.extend(std::iter::repeat_n(chunk.clone(), 3));
    frames.push(data(1, false, &[0; 16_383]));
    assert_eq!(server_verdict(&frames), Accepted);
    frames.push(data(1, false, &[0; 1]));
    assert_eq!(
        server_verdict(&frames),
        Connection(Reason::FLOW_CONTROL_ERROR)
    );
    let mut peer = Peer::of_server(|config| config.connection_window = 1 << 20);
    assert_eq!(peer.verdict(&frames), Stream(1, Reason::FLOW_CONTROL_ERROR));
    let overflow = [open.clone(), window_update(1, (1 << 31) - 1)];
    assert_eq!(
        server_verdict(&overflow),
        Stream(1, Reason::FLOW_CONTROL_ERROR)
    );
    let nothing = [open.clone(), window_update(1, 0)];
    assert_eq!(server_verdict(&nothing), Stream(1, Reason::PROTOCOL_ERROR));
    let padded = |payload: &[u8]| frame(kind::DATA, flag::PADDED, 1, payload);
    assert_eq!(
        server_verdict(&[open.clone(), padded(&[3, 1, 0, 0, 0])]),
        Accepted
    );
    let protocol = Connection(Reason::PROTOCOL_ERROR);
    assert_eq!(
        server_verdict(&[open.clone(), padded(&[3, 0, 0])]),
        protocol
    );
    let size = Connection(Reason::FRAME_SIZE_ERROR);
    assert_eq!(server_verdict(&[open.clone(), padded(&[])]), size);
    // A stream of padding alone does not use up the windows.
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&open);
    for _ in 0..1_000 {
        assert_eq!(peer.verdict(&[padded(&[255; 256])]), Accepted);
    }
}

#[test]
fn late_frames_of_a_stream_that_this_end_reset_are_ignored_and_give_back_the_window() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&request(1, false, &[]));
    let (key, _) = peer.state.next_request().unwrap();
    peer.state
        .reset(key, Reason::CANCEL, super::super::error::Initiator::User);
    assert_eq!(peer.verdict(&[]), Stream(1, Reason::CANCEL));
    for _ in 0..100 {
        let late = [
            data(1, false, &[0; 16_000]),
            headers(1, true, &[("a", "b")]),
        ];
        assert_eq!(peer.verdict(&late), Accepted);
    }
}

#[test]
fn late_frames_of_many_streams_are_ignored() {
    let mut peer = Peer::of_server(|config| config.max_remembered_resets = 5_000);
    let ids = || (0..5_001).map(|index| index * 2 + 1);
    for id in ids() {
        peer.feed(&request(id, false, &[]));
        let (key, _) = peer.state.next_request().unwrap();
        let user = super::super::error::Initiator::User;
        peer.state.reset(key, Reason::CANCEL, user);
        for _ in 0..2 {
            peer.state.drop_handle(key);
        }
    }
    peer.take();
    for id in ids().skip(1) {
        assert_eq!(peer.verdict(&[data(id, false, b"x")]), Accepted, "{id}");
    }
    // The oldest was forgotten, and is remembered after its second reset.
    let late = headers(1, true, &[("a", "b")]);
    let closed = Stream(1, Reason::STREAM_CLOSED);
    assert_eq!(peer.verdict(std::slice::from_ref(&late)), closed);
    assert_eq!(peer.verdict(&[late]), Accepted);
}

#[test]
fn bodies_have_the_length_that_their_heads_state() {
    let malformed = Stream(1, Reason::PROTOCOL_ERROR);
    let post = |end, length| request(1, end, &[("content-length", length)]);
    let trailers = headers(1, true, &[("a", "b")]);
    for frames in [
        vec![post(true, "5")],
        vec![post(false, "5"), data(1, true, b"1234")],
        vec![post(false, "5"), data(1, false, b"123456")],
        vec![
            post(false, "5"),
            data(1, false, b"12345"),
            data(1, true, b"6"),
        ],
        vec![post(false, "5"), data(1, false, b"1"), trailers.clone()],
        vec![post(false, "x")],
        vec![post(false, "+5")],
        vec![post(false, "")],
        vec![post(false, "5, 5")],
        vec![post(false, "18446744073709551616")],
        vec![request(
            1,
            false,
            &[("content-length", "5"), ("content-length", "6")],
        )],
    ] {
        assert_eq!(server_verdict(&frames), malformed, "{frames:?}");
    }
    let padded = frame(kind::DATA, flag::PADDED, 1, &[2, b'3', b'4', 0, 0]);
    let whole = [
        post(false, "5"),
        data(1, false, b"12"),
        padded,
        data(1, true, b"5"),
    ];
    for frames in [
        &whole[..],
        &[post(true, "0")],
        &[post(false, "5"), data(1, false, b"12345"), trailers],
    ] {
        assert_eq!(server_verdict(frames), Accepted, "{frames:?}");
    }
}

#[test]
fn lengths_of_responses_depend_on_method_and_status() {
    let malformed = Stream(1, Reason::PROTOCOL_ERROR);
    let response = |method: http::Method, status, length, body: Option<&[u8]>| {
        let mut peer = Peer::of_client();
        let mut head = http::Request::get("http://a:1/").body(()).unwrap();
        *head.method_mut() = method;
        peer.state.send_request(&head, true).unwrap();
        let fields = [(":status", status), ("content-length", length)];
        let mut frames = vec![headers(1, body.is_none(), &fields)];
        frames.extend(body.map(|body| data(1, true, body)));
        peer.verdict(&frames)
    };
    let (get, head, connect) = (http::Method::GET, http::Method::HEAD, http::Method::CONNECT);
    for (method, status, body, verdict) in [
        (&get, "200", Some(&b"12345"[..]), Accepted),
        (&get, "200", Some(b"1234"), malformed),
        (&get, "200", Some(b"123456"), malformed),
        (&get, "200", None, malformed),
        (&get, "204", None, Accepted),
        (&get, "304", None, Accepted),
        (&get, "304", Some(b""), Accepted),
        (&head, "200", None, Accepted),
        (&head, "200", Some(b""), Accepted),
        (&head, "200", Some(b"12345"), malformed),
        (&connect, "200", Some(b"a tunnel"), Accepted),
        (&connect, "502", Some(b"1234"), malformed),
        (&connect, "502", Some(b"12345"), Accepted),
    ] {
        let actual = response(method.clone(), status, "5", body);
        assert_eq!(actual, verdict, "{method} {status} {body:?}");
    }
}

#[test]
fn over_a_far_link_a_stream_begins_with_a_wider_window() {
    let of_streams = |frames: Vec<Frame>| -> Vec<(u8, u32)> {
        let frames = frames.iter().filter(|frame| frame.stream > 0);
        frames.map(|frame| (frame.kind, frame.stream)).collect()
    };
    for (max, widens) in [(1 << 20, true), (65_535, false), (0, false)] {
        let limits = WindowLimits { max, is_far: true };
        let mut peer = Peer::of_client();
        peer.state.stream_windows.limits = limits;
        let head = http::Request::get("http://a/").body(()).unwrap();
        peer.state.send_request(&head, true).unwrap();
        let mut expected = vec![(kind::HEADERS, 1)];
        expected.extend(widens.then_some((kind::WINDOW_UPDATE, 1)));
        assert_eq!(of_streams(peer.take()), expected);

        let mut peer = Peer::of_server(|_| {});
        peer.state.stream_windows.limits = limits;
        let requests = [request(1, true, &[]), request(3, false, &[])];
        for request in requests {
            peer.feed(&request);
        }
        let expected = widens.then_some((kind::WINDOW_UPDATE, 3));
        assert_eq!(of_streams(peer.take()), Vec::from_iter(expected));
    }
}

#[test]
fn an_update_that_is_no_longer_due_is_not_sent() {
    let mut peer = Peer::of_server(|config| config.connection_window = 8 << 20);
    let limits = |max| WindowLimits { max, is_far: true };
    peer.state.stream_windows.limits = limits(256 << 10);
    peer.feed(&request(1, false, &[]));
    let updates = |frames: Vec<Frame>| -> Vec<u32> {
        let updates = frames
            .iter()
            .filter(|frame| frame.kind == kind::WINDOW_UPDATE);
        let updates = updates.filter(|frame| frame.stream == 1);
        updates
            .map(|frame| u32::from_be_bytes(frame.payload[..].try_into().unwrap()))
            .collect()
    };
    assert_eq!(updates(peer.take()), [(256 << 10) - 65_535]);
    let key = peer.state.store.find(1).unwrap();
    let read = |peer: &mut Peer, frames: usize| {
        for _ in 0..frames {
            peer.feed(&data(1, false, &[0; 16_384]));
        }
        let windows = peer.state.stream_windows;
        let stream = peer.state.store.get(key).unwrap();
        while stream.body.pop().is_some() {}
        stream.in_flight = 0;
        stream.release(frames * 16_384, windows);
        peer.state.mark_update(key);
    };
    // Listed, and before it is written the window becomes smaller.
    read(&mut peer, 8);
    peer.state.stream_windows.limits = limits(0);
    read(&mut peer, 1);
    assert!(updates(peer.take()).is_empty());
    // What the peer may still send is read as well.
    read(&mut peer, 7);
    assert_eq!(updates(peer.take()), [65_535]);
}

#[test]
fn windows_of_ended_streams_do_not_change() {
    for (end, verdict) in [
        (true, Accepted),
        (false, Connection(Reason::FLOW_CONTROL_ERROR)),
    ] {
        let mut peer = Peer::of_client();
        let head = http::Request::get("http://a/").body(()).unwrap();
        peer.state.send_request(&head, end).unwrap();
        let most = window_update(1, (1 << 31) - 1 - 65_535);
        assert_eq!(peer.verdict(&[most]), Accepted);
        assert_eq!(peer.verdict(&[settings(&[(4, 65_536)])]), verdict);
    }
    let mut peer = Peer::of_client();
    let head = http::Request::get("http://a/").body(()).unwrap();
    peer.state.send_request(&head, true).unwrap();
    let smaller = settings(&[(4, 0)]);
    let most = window_update(1, (1 << 31) - 1);
    assert_eq!(peer.verdict(&[smaller, most]), Accepted);
}

#[test]
fn settings_of_a_server_are_checked_and_obeyed() {
    let push = settings(&[(2, 1)]);
    let protocol = Connection(Reason::PROTOCOL_ERROR);
    assert_eq!(client_verdict(std::slice::from_ref(&push)), protocol);
    assert_eq!(server_verdict(&[push]), Accepted);
    assert_eq!(client_verdict(&[settings(&[(2, 0)])]), Accepted);
    // The table was emptied for a moment.
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(1, 0), (1, 4_096)]));
    let head = http::Request::get("http://a/").body(()).unwrap();
    peer.state.send_request(&head, true).unwrap();
    let frames = peer.take();
    let head = frames.iter().find(|frame| frame.kind == kind::HEADERS);
    assert_eq!(head.unwrap().payload[..4], [0x20, 0x3f, 0xe1, 0x1f]);
}

#[test]
fn a_partial_frame_waits_at_every_byte() {
    let frames = [
        request(1, false, &[("x", "y")]),
        frame(kind::DATA, flag::PADDED, 1, &[2, b'a', b'b', 0, 0]),
        data(1, true, b"cd"),
    ];
    let bytes = frames.concat();
    for step in 1..20 {
        let mut peer = Peer::of_server(|_| {});
        let mut read = bytes::BytesMut::new();
        for part in bytes.chunks(step) {
            read.extend_from_slice(part);
            peer.state.receive(&mut read, (0, 0));
        }
        assert!(read.is_empty());
        let (key, request) = peer.state.next_request().unwrap();
        assert_eq!(request.headers()["x"], "y");
        let stream = peer.state.store.get(key).unwrap();
        let body: Vec<u8> = std::iter::from_fn(|| stream.body.pop()).flatten().collect();
        assert_eq!(body, b"abcd");
        assert_eq!(stream.recv, super::super::streams::Half::Ended);
    }
}

#[test]
fn go_away_ends_the_streams_that_it_does_not_take() {
    let mut peer = Peer::of_client();
    let head = || http::Request::get("http://a/").body(()).unwrap();
    let first = peer.state.send_request(&head(), true).unwrap();
    let second = peer.state.send_request(&head(), true).unwrap();
    let mut payload = [0; 8];
    payload[3] = 1;
    assert_eq!(
        peer.verdict(&[frame(kind::GOAWAY, 0, 0, &payload)]),
        Accepted
    );
    assert!(peer.state.store.get(first).unwrap().error.is_none());
    let error = peer.state.store.get(second).unwrap().error.clone().unwrap();
    assert!(error.is_go_away() && error.is_remote());
    assert!(peer.state.send_request(&head(), true).is_err());
    peer.feed(&headers(1, true, &[(":status", "200")]));
    assert!(
        matches!(peer.state.end, Some(Ok(()))),
        "nothing is left to do"
    );
}

#[test]
fn a_server_leaves_in_two_steps() {
    let mut peer = Peer::of_server(|_| {});
    peer.state.shut_down();
    peer.state.shut_down();
    let frames = peer.take();
    let kinds: Vec<u8> = frames.iter().map(|frame| frame.kind).collect();
    assert_eq!(kinds, [kind::GOAWAY, kind::PING]);
    assert_eq!(frames[0].payload[..4], [0x7f, 0xff, 0xff, 0xff]);
    // A request on its way is still served.
    peer.feed(&request(1, true, &[]));
    let (key, _) = peer.state.next_request().unwrap();
    peer.feed(&frame(kind::PING, flag::ACK, 0, &frames[1].payload));
    let frames = peer.take();
    assert_eq!(frames[0].payload[..4], [0, 0, 0, 1]);
    let untaken = [
        request(3, false, &[]),
        data(3, false, b"x"),
        headers(3, true, &[("a", "b")]),
    ];
    assert_eq!(peer.verdict(&untaken), Accepted);
    assert!(peer.state.next_request().is_none());
    assert!(peer.state.end.is_none());
    for _ in 0..2 {
        peer.state.drop_handle(key);
    }
    peer.state.check_end();
    assert!(matches!(peer.state.end, Some(Ok(()))));
}

#[test]
fn the_number_in_go_away_never_grows() {
    let mut peer = Peer::of_server(|_| {});
    peer.state.shut_down();
    let frames = peer.take();
    peer.feed(&request(1, true, &[]));
    peer.feed(&frame(kind::PING, flag::ACK, 0, &frames[1].payload));
    peer.feed(&request(3, true, &[]));
    peer.feed(&window_update(0, 0));
    let frames = peer.take();
    let last: Vec<_> = frames
        .iter()
        .filter(|frame| frame.kind == kind::GOAWAY)
        .map(|frame| frame.payload[3])
        .collect();
    assert_eq!(last, [1, 1]);
}
