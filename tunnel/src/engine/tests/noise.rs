//! Random frames and random calls of the user: no panic, and the sums of counts and windows stay right.

use super::{
    super::{
        error::{Error, Initiator, Reason},
        flow::{DEFAULT_WINDOW, WindowLimits},
        frame::flag,
        outgoing::Outgoing,
        streams::{Half, Key},
    },
    raw::{GET, Peer, block, frame, settings},
};
use bytes::{Bytes, BytesMut};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Returns a frame that is often valid.
fn random_frame(rng: &mut StdRng, is_server: bool) -> Vec<u8> {
    let stream = rng.random_range(0..14);
    let odd = stream | 1;
    let response = block(&[(":status", ["200", "103", "1"][rng.random_range(0..3)])]);
    let head = if is_server { block(&GET) } else { response };
    let length = [0, 1, 4, 5, 8, 9, 5_000][rng.random_range(0..7)];
    match rng.random_range(0..11) {
        0..3 => frame(1, flag::END_HEADERS | rng.random_range(0..2), odd, &head),
        3..5 => frame(0, rng.random_range(0..2), odd, &vec![0; length]),
        5 => frame(3, 0, odd, &[0, 0, 0, 8]),
        6 => frame(
            8,
            0,
            [0, odd][rng.random_range(0..2)],
            &[0, 0, rng.random(), 1],
        ),
        7 => settings(&[
            (4, rng.random_range(0..100_000)),
            (3, rng.random_range(0..4)),
        ]),
        8 => frame(6, rng.random_range(0..2), 0, &[0; 8]),
        9 => frame(1, flag::END_HEADERS | 1, odd, &block(&[("a", "b")])),
        _ if rng.random_ratio(1, 20) => frame(
            rng.random_range(0..11),
            rng.random(),
            stream,
            &vec![1; length],
        ),
        _ => frame(0, flag::PADDED, odd, &[4, 0, 0, 0, 0, 0]),
    }
}

/// Changes a stream as its user may.
fn use_stream(peer: &mut Peer, key: Key, rng: &mut StdRng) {
    let state = &mut peer.state;
    let Some(stream) = state.store.get(key) else {
        return;
    };
    match rng.random_range(0..6) {
        0 if stream.error.is_none() && stream.send != Half::Ended => {
            stream.send = [Half::Open, Half::Ended][rng.random_range(0..2)];
            let length = rng.random_range(1..60_000);
            stream.queued += length;
            stream.queue.push_back(Bytes::from(vec![0; length]));
            state.queued += length;
            state.schedule.add(key, stream);
        }
        1 => state.reset(key, Reason::CANCEL, Initiator::User),
        2..5 => {
            let bytes = std::iter::from_fn(|| stream.body.pop())
                .map(|chunk| chunk.len())
                .sum();
            stream.in_flight -= bytes;
            let max = [0, 100_000, 1 << 20][rng.random_range(0..3)];
            let is_far = rng.random();
            state.stream_windows.limits = WindowLimits { max, is_far };
            stream.release(bytes, state.stream_windows);
            state.release_connection(bytes);
            state.mark_update(key);
        }
        _ => {}
    }
}

/// Checks what holds between any two calls.
fn check(peer: &mut Peer) {
    let state = &mut peer.state;
    let (mut local, mut remote, mut in_flight, mut queued) = (0, 0, 0, 0);
    for (_, stream) in state.store.iter_mut() {
        local += usize::from(stream.is_counted && stream.is_local);
        remote += usize::from(stream.is_counted && !stream.is_local);
        in_flight += stream.in_flight;
        queued += stream.queued;
        assert!(stream.handles > 0 || stream.is_unaccepted || !stream.is_closed());
        assert_eq!(
            stream.queue.iter().map(Bytes::len).sum::<usize>(),
            stream.queued
        );
        let unread = stream.body.memory();
        assert!(unread == 0 || stream.in_flight > 0);
    }
    assert_eq!((state.open_local, state.open_remote), (local, remote));
    assert_eq!(state.queued, queued);
    if !state.receiving.is_inside_frame() && state.end.is_none() {
        let window = state.recv_window.total() + i64::try_from(in_flight).unwrap();
        assert_eq!(window, i64::from(DEFAULT_WINDOW));
    }
}

fn run(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let is_server = rng.random();
    let mut peer = if is_server {
        Peer::of_server(|config| config.settings.max_concurrent_streams = Some(4))
    } else {
        Peer::of_client()
    };
    let (mut handles, mut read) = (Vec::new(), BytesMut::new());
    for _ in 0..rng.random_range(1..300) {
        match rng.random_range(0..10) {
            0..6 => {
                read.extend_from_slice(&random_frame(&mut rng, is_server));
                peer.state.receive(&mut read, (0, 0));
            }
            6 if is_server => {
                let accepted = peer.state.next_request();
                handles.extend(accepted.into_iter().flat_map(|(key, _)| [key, key]));
            }
            6 => {
                let head = http::Request::get("http://a/").body(()).unwrap();
                let opened = peer.state.send_request(&head, rng.random());
                handles.extend(opened.into_iter().flat_map(|key| [key, key]));
            }
            7 if !handles.is_empty() => {
                let key = handles.swap_remove(rng.random_range(0..handles.len()));
                peer.state.drop_handle(key);
            }
            8 => drop(peer.state.drain(&mut Outgoing::default())),
            _ if !handles.is_empty() => {
                use_stream(
                    &mut peer,
                    handles[rng.random_range(0..handles.len())],
                    &mut rng,
                );
            }
            _ => {}
        }
        peer.state.check_end();
        check(&mut peer);
    }
    peer.state.transport_ended(None);
    for key in handles {
        peer.state.drop_handle(key);
    }
    check(&mut peer);
    assert_eq!(peer.state.store.len(), 0);
    let error = peer.state.error.as_ref();
    assert!(error.is_some_and(|error: &Error| error.is_io() || error.is_go_away()));
}

#[test]
fn noise_breaks_no_invariant() {
    let seeds = std::env::var("ENGINE_NOISE").map_or(2_000, |count| count.parse().unwrap());
    for seed in 0..seeds {
        let result = std::panic::catch_unwind(|| run(seed));
        assert!(result.is_ok(), "seed {seed}");
    }
}
