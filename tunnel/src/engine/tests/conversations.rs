//! Random conversations of the engine with itself and with the crate h2 in both roles. Both ends must see the same bytes and ends.
//! (Two ends of h2 may block each other for ever while both only write, so that pairing is left out.)

use super::super::WindowLimits;
use bytes::Bytes;
use futures_util::{StreamExt, future::join, stream::FuturesUnordered};
use http::{HeaderMap, HeaderValue, Request, Response};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
    time::Duration,
};
use tokio::io::DuplexStream;

/// Messages that one end sends on a stream.
#[derive(Clone, Debug)]
struct Body {
    chunks: Vec<usize>,
    has_trailers: bool,
    /// Code of a reset after the chunks, instead of an end.
    reset: Option<u32>,
    /// The reader's pauses: how often it yields before a chunk.
    pauses: usize,
    /// Bytes that the reader keeps before it releases them.
    held: usize,
}

impl Body {
    fn random(rng: &mut StdRng, reset_chance: u32) -> Self {
        let count = rng.random_range(0..5);
        let chunks = (0..count).map(|_| match rng.random_range(0..6) {
            // More than the body after which a stream gets the largest window.
            0 if rng.random_ratio(1, 8) => 900_000,
            0 => 1,
            1 => rng.random_range(1..100),
            2 => rng.random_range(1..5_000),
            3 => rng.random_range(1..20_000),
            4 => rng.random_range(1..40_000),
            _ => rng.random_range(1..120_000),
        });
        Self {
            chunks: chunks.collect(),
            has_trailers: rng.random_ratio(1, 4),
            reset: rng
                .random_ratio(reset_chance, 20)
                .then(|| rng.random_range(1..12)),
            pauses: rng.random_range(0..3),
            held: rng.random_range(0..300),
        }
    }

    fn len(&self) -> usize {
        self.chunks.iter().sum()
    }

    fn expected(&self) -> (usize, End) {
        match self.reset {
            Some(code) => (self.len(), End::Reset(code)),
            None => (self.len(), End::Clean(self.has_trailers)),
        }
    }
}

#[derive(Clone, Debug)]
struct StreamPlan {
    request: Body,
    response: Body,
    interim: usize,
    /// Whether the server sends its response before it has read the request.
    is_early: bool,
}

#[derive(Clone, Debug)]
struct Plan {
    streams: Vec<StreamPlan>,
    client_window: u32,
    server_window: u32,
    max_frame: u32,
    max_streams: u32,
    pipe: usize,
    /// Largest windows of streams to which an end of the engine changes again and again.
    max_windows: Vec<u32>,
    /// Number of requests after which the server begins to leave.
    leaves_after: Option<usize>,
}

impl Plan {
    fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let window = |rng: &mut StdRng| [700, 65_535, 1 << 20][rng.random_range(0..3)];
        let reset_chance = if rng.random_ratio(1, 2) { 4 } else { 0 };
        let count = rng.random_range(1..25);
        let streams = (0..count).map(|_| StreamPlan {
            request: Body::random(&mut rng, reset_chance),
            response: Body::random(&mut rng, reset_chance),
            interim: if rng.random_ratio(1, 5) { 2 } else { 0 },
            is_early: rng.random(),
        });
        let streams = streams.collect();
        Self {
            streams,
            client_window: window(&mut rng),
            server_window: window(&mut rng),
            max_frame: [16_384, 65_536][rng.random_range(0..2)],
            max_streams: [1, 3, 100][rng.random_range(0..3)],
            pipe: [19, 1_000, 70_000][rng.random_range(0..3)],
            max_windows: (0..rng.random_range(0..6))
                .map(|_| window(&mut rng))
                .collect(),
            leaves_after: rng.random_ratio(1, 5).then(|| rng.random_range(0..5)),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// The end, with trailers or without.
    Clean(bool),
    Reset(u32),
    Lost(String),
}

/// Messages that one end has received on a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Received {
    interim: usize,
    length: usize,
    end: End,
}

fn byte_at(position: usize) -> u8 {
    u8::try_from(position * 31 % 251).unwrap()
}

fn payload(start: usize, length: usize) -> Bytes {
    (start..start + length).map(byte_at).collect()
}

fn trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", HeaderValue::from_static("none"));
    trailers
}

async fn pause(times: usize) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}

macro_rules! implementation {
    ($module:ident, [$($limit_windows:ident)?], [$($borrow:tt)?], $($path:tt)+) => {
        mod $module {
            use super::*;
            use $($path)+ as h2;

            fn end_of(error: &h2::Error) -> End {
                match error.reason() {
                    Some(reason) if !error.is_go_away() => End::Reset(reason.into()),
                    _ => End::Lost(error.to_string()),
                }
            }

            async fn send(stream: &mut h2::SendStream<Bytes>, body: &Body) -> Result<(), h2::Error> {
                let mut position = 0;
                for chunk in &body.chunks {
                    let mut left = *chunk;
                    while left > 0 {
                        stream.reserve_capacity(left);
                        let mut capacity = stream.capacity();
                        while capacity == 0 {
                            match poll_fn(|cx| stream.poll_capacity(cx)).await {
                                Some(result) => capacity = result?,
                                None => return Err(h2::Reason::CANCEL.into()),
                            }
                        }
                        let part = left.min(capacity);
                        stream.send_data(payload(position, part), false)?;
                        (position, left) = (position + part, left - part);
                    }
                }
                if let Some(code) = body.reset {
                    // The data goes first, as far as the connection takes it.
                    pause(3).await;
                    stream.send_reset(code.into());
                    return Ok(());
                }
                if body.has_trailers {
                    stream.send_trailers(trailers())
                } else {
                    stream.send_data(Bytes::new(), true)
                }
            }

            async fn receive(mut stream: h2::RecvStream, body: &Body, interim: usize) -> Received {
                let (mut length, mut held) = (0, 0);
                let end = loop {
                    pause(body.pauses).await;
                    match poll_fn(|cx| stream.poll_data(cx)).await {
                        Some(Ok(chunk)) => {
                            for (offset, byte) in chunk.iter().enumerate() {
                                assert_eq!(*byte, byte_at(length + offset));
                            }
                            (length, held) = (length + chunk.len(), held + chunk.len());
                            assert!(stream.flow_control().used_capacity() >= held);
                            if held > body.held {
                                stream.flow_control().release_capacity(held).unwrap();
                                held = 0;
                            }
                        }
                        Some(Err(error)) => break end_of(&error),
                        None => match poll_fn(|cx| stream.poll_trailers(cx)).await {
                            Ok(found) => {
                                assert!(found.is_none() || found == Some(trailers()));
                                break End::Clean(found.is_some());
                            }
                            Err(error) => break end_of(&error),
                        },
                    }
                };
                Received { interim, length, end }
            }

            async fn response(mut response: h2::client::ResponseFuture, plan: &StreamPlan) -> Received {
                let mut interim = 0;
                let outcome = loop {
                    match poll_fn(|cx| response.poll_informational(cx)).await {
                        Some(Ok(head)) => {
                            assert_eq!(head.status(), 103);
                            interim += 1;
                        }
                        Some(Err(error)) => break Err(error),
                        None => break Pin::new(&mut response).await,
                    }
                };
                match outcome {
                    Ok(response) => {
                        assert_eq!(response.status(), 207);
                        assert_eq!(response.headers()["x-kind"], "answer");
                        receive(response.into_body(), &plan.response, interim).await
                    }
                    Err(error) => Received { interim, length: 0, end: end_of(&error) },
                }
            }

            async fn exchange(
                sender: h2::client::SendRequest<Bytes>,
                index: usize,
                plan: &StreamPlan,
            ) -> (usize, Received) {
                let mut request = Request::new(());
                *request.uri_mut() = format!("http://example.com/{index}?x=y").parse().unwrap();
                *request.method_mut() = http::Method::PUT;
                let opened = match sender.ready().await {
                    Ok(mut sender) => sender.send_request($($borrow)? request, false),
                    Err(error) => Err(error),
                };
                let (future, mut send_half) = match opened {
                    Ok(opened) => opened,
                    Err(error) => {
                        return (index, Received { interim: 0, length: 0, end: end_of(&error) });
                    }
                };
                let (_sent, received) =
                    join(send(&mut send_half, &plan.request), response(future, plan)).await;
                (index, received)
            }

            pub(super) async fn client(io: DuplexStream, plan: &Plan) -> Vec<(usize, Received)> {
                let (sender, mut connection) = h2::client::Builder::new()
                    .initial_window_size(plan.client_window)
                    .initial_connection_window_size(1 << 20)
                    .max_frame_size(plan.max_frame)
                    .max_concurrent_reset_streams(1000)
                    .initial_max_send_streams(1)
                    .handshake::<_, Bytes>(io)
                    .await
                    .unwrap();
                let mut polls = 0_u32;
                let mut max_windows = plan.max_windows.iter().copied().cycle();
                let driver = poll_fn(move |cx| {
                    polls += 1;
                    if polls % 50 == 0 && let Some(_size) = max_windows.next() {
                        $(connection.$limit_windows(WindowLimits { max: _size, is_far: _size > 65_535 });)?
                    }
                    Pin::new(&mut connection).poll(cx).map(drop)
                });
                let exchanges = FuturesUnordered::new();
                for (index, stream) in plan.streams.iter().enumerate() {
                    exchanges.push(exchange(sender.clone(), index, stream));
                }
                drop(sender);
                // The connection ends by itself after its last stream.
                join(driver, exchanges.collect::<Vec<_>>()).await.1
            }

            async fn serve(
                request: Request<h2::RecvStream>,
                mut respond: h2::server::SendResponse<Bytes>,
                plan: &Plan,
            ) -> (usize, Received) {
                let index: usize = request.uri().path()[1..].parse().unwrap();
                assert_eq!(request.uri().to_string(), format!("http://example.com/{index}?x=y"));
                let stream = &plan.streams[index];
                let answer = async {
                    for _ in 0..stream.interim {
                        let mut head = Response::new(());
                        *head.status_mut() = 103.try_into().unwrap();
                        respond.send_informational(head)?;
                        pause(1).await;
                    }
                    let mut head = Response::new(());
                    *head.status_mut() = 207.try_into().unwrap();
                    head.headers_mut().insert("x-kind", HeaderValue::from_static("answer"));
                    let mut sender = respond.send_response(head, false)?;
                    send(&mut sender, &stream.response).await
                };
                let receive = receive(request.into_body(), &stream.request, 0);
                let received = if stream.is_early {
                    join(answer, receive).await.1
                } else {
                    let received = receive.await;
                    let _sent = answer.await;
                    received
                };
                (index, received)
            }

            pub(super) async fn server(io: DuplexStream, plan: &Plan) -> Vec<(usize, Received)> {
                let mut connection = h2::server::Builder::new()
                    .initial_window_size(plan.server_window)
                    .initial_connection_window_size(1 << 20)
                    .max_frame_size(plan.max_frame)
                    .max_concurrent_streams(plan.max_streams)
                    .max_concurrent_reset_streams(1000)
                    .max_pending_accept_reset_streams(1000)
                    .handshake::<_, Bytes>(io)
                    .await
                    .unwrap();
                let (mut open, mut received) = (FuturesUnordered::new(), Vec::new());
                let (mut accepted, mut is_over) = (0, false);
                let mut polls = 0_u32;
                let mut max_windows = plan.max_windows.iter().copied().cycle();
                poll_fn(|cx| {
                    while let Poll::Ready(Some(outcome)) = open.poll_next_unpin(cx) {
                        received.push(outcome);
                    }
                    polls += 1;
                    if polls % 50 == 0 && let Some(_size) = max_windows.next() {
                        $(connection.$limit_windows(WindowLimits { max: _size, is_far: _size > 65_535 });)?
                    }
                    while !is_over {
                        if plan.leaves_after.is_some_and(|after| accepted >= after) {
                            connection.graceful_shutdown();
                        }
                        match connection.poll_accept(cx) {
                            Poll::Ready(Some(Ok((request, respond)))) => {
                                accepted += 1;
                                open.push(serve(request, respond, plan));
                            }
                            Poll::Ready(_) => is_over = true,
                            Poll::Pending => break,
                        }
                        while let Poll::Ready(Some(outcome)) = open.poll_next_unpin(cx) {
                            received.push(outcome);
                        }
                    }
                    while let Poll::Ready(Some(outcome)) = open.poll_next_unpin(cx) {
                        received.push(outcome);
                    }
                    if is_over && open.is_empty() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                received
            }
        }
    };
}

implementation!(engine, [limit_windows], [&], super::super::super);
implementation!(oracle, [], [], ::h2);

/// Checks what an end has received of a body. Its own reset may hide all of it.
fn check(received: &Received, sent: &Body, own: &Body, context: &str) {
    let (length, end) = sent.expected();
    if own.reset.is_some() {
        return;
    }
    match sent.reset {
        // The last bytes before a reset may be lost.
        Some(_) => assert!(
            received.length <= length && received.end == end,
            "{context}"
        ),
        None => assert_eq!(
            (received.length, &received.end),
            (length, &end),
            "{context}"
        ),
    }
}

async fn converse(
    number: u64,
    plan: &Plan,
    client: impl Future<Output = Vec<(usize, Received)>>,
    server: impl Future<Output = Vec<(usize, Received)>>,
    pairing: &str,
) {
    let both = tokio::time::timeout(Duration::from_mins(1), join(client, server)).await;
    let context = format!("{pairing}, seed {number}");
    let (at_client, at_server) = both.unwrap_or_else(|_| panic!("{context} hangs: {plan:?}"));
    assert_eq!(at_client.len(), plan.streams.len(), "{context}");
    for (index, received) in &at_client {
        let stream = &plan.streams[*index];
        let seen = at_server.iter().find(|(other, _)| other == index);
        let context = format!("{context}, stream {index}: {received:?}, {seen:?}, {stream:?}");
        let Some((_, seen)) = seen else {
            let is_resetting = stream.request.reset.is_some();
            assert!(plan.leaves_after.is_some() || is_resetting, "{context}");
            assert_eq!(received.length, 0, "{context}");
            continue;
        };
        check(received, &stream.response, &stream.request, &context);
        check(seen, &stream.request, &stream.response, &context);
        let is_reset = stream.request.reset.is_some() || stream.response.reset.is_some();
        assert!(is_reset || received.interim == stream.interim, "{context}");
    }
}

#[tokio::test(start_paused = true)]
async fn all_pairings_see_the_same_bytes_and_ends() {
    let seeds = std::env::var("ENGINE_SEEDS").map_or(0..12, |range| {
        let (start, end) = range.split_once("..").unwrap();
        start.parse().unwrap()..end.parse().unwrap()
    });
    for seed in seeds {
        let plan = Plan::random(seed);
        let pipe = || tokio::io::duplex(plan.pipe);
        let (near, far) = pipe();
        let (client, server) = (engine::client(near, &plan), engine::server(far, &plan));
        converse(seed, &plan, client, server, "engine to engine").await;
        let (near, far) = pipe();
        let (client, server) = (engine::client(near, &plan), oracle::server(far, &plan));
        converse(seed, &plan, client, server, "engine to h2").await;
        let (near, far) = pipe();
        let (client, server) = (oracle::client(near, &plan), engine::server(far, &plan));
        converse(seed, &plan, client, server, "h2 to engine").await;
    }
}
