//! Tests of the bytes that stalled streams may hold, at either end.

use super::*;
use crate::{buffered::MemoryBudget, flow_control};
use std::time::Duration;
use tokio::{task::JoinSet, time::timeout};

/// A tunnel's budget in these tests. It is small, so that a test moves few bytes.
const BUDGET: usize = 8 << 20;
/// The window of a new stream.
const FLOOR: usize = 64 << 10;
/// The window of a new stream over a far link.
const FAR: usize = 256 << 10;
/// Number of bytes after which a stream has its largest window.
const BULK: usize = 768 << 10;
/// Time that a stalled stream has until it may be evicted.
const QUIET: Duration = Duration::from_millis(150);

fn settings(pressure: Arc<MemoryBudget>) -> GatewaySideConfig {
    GatewaySideConfig {
        budget: BUDGET,
        memory_budget: pressure,
        ..GatewaySideConfig::default()
    }
}

async fn open(tunnel: &Tunnel, end: bool) -> OpenStream {
    let target = target();
    let opened = tunnel.open(get("/"), &StreamKind::Request, &target, end);
    opened.await.unwrap()
}

/// Returns a response that has begun, and the sender of the rest.
async fn answered(pair: &mut Connected) -> (Response<StreamReceiver>, StreamSender) {
    let opened = open(&pair.tunnel, true).await;
    let stream = pair.asked.recv().await.unwrap();
    let send = stream.responder.send(Response::new(()), false).unwrap();
    (opened.response.await.unwrap(), send)
}

/// Moves this many bytes.
async fn exchange(send: &mut StreamSender, body: &mut StreamReceiver, bytes: usize) {
    let reading = async {
        let mut length = 0;
        while length < bytes {
            length += body.next_chunk().await.unwrap().unwrap().len();
        }
    };
    let both = async { tokio::join!(send.send_data(Bytes::from(vec![0; bytes])), reading) };
    let (outcome, ()) = timeout(Duration::from_mins(2), both).await.unwrap();
    outcome.unwrap();
}

/// Gives a stream its largest window. A chunk counts once the next one is read.
async fn warm_up(send: &mut StreamSender, body: &mut StreamReceiver) {
    exchange(send, body, BULK + 2 * FLOOR).await;
}

/// Sends until no more bytes are accepted.
async fn fill(send: &mut StreamSender) {
    let chunk = Bytes::from(vec![0; 64 << 10]);
    while let Ok(sent) = timeout(QUIET, send.send_data(chunk.clone())).await {
        sent.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn stalled_uploads_hold_no_more_at_the_edge_than_its_budget() {
    let Connected {
        tunnel,
        ended: _ended,
        edge,
        mut asked,
        ..
    } = connected(settings(Arc::default())).await;
    let (mut sends, mut deaf) = (Vec::new(), Vec::new());
    let most = flow_control::window_limits(Duration::ZERO, 1, BUDGET).max;
    for count in 1..=40 {
        let mut opened = open(&tunnel, false).await;
        let mut request = asked.recv().await.unwrap();
        warm_up(&mut opened.send, &mut request.body).await;
        deaf.push(request);
        fill(&mut opened.send).await;
        sends.push(opened);
        let held = edge.sample_buffered().total;
        let allowed = BUDGET + count * FLOOR + usize::try_from(most).unwrap();
        assert!(
            held <= allowed,
            "{held} bytes in {count} uploads, {allowed} allowed"
        );
    }
    assert!(
        edge.sample_buffered().total >= BUDGET / 2,
        "the budget is used"
    );

    // An upload that the other end reads continues beside them.
    let mut opened = open(&tunnel, false).await;
    let mut read = asked.recv().await.unwrap();
    let total = 4 << 20;
    let sending = opened.send.send_last(Bytes::from(vec![1; total]));
    let reading = async {
        let mut length = 0;
        while let Some(chunk) = read.body.next_chunk().await {
            length += chunk.unwrap().len();
        }
        length
    };
    let both = async { tokio::join!(sending, reading) };
    let (sent, length) = timeout(Duration::from_mins(2), both).await.unwrap();
    sent.unwrap();
    assert_eq!(length, total);
    drop((sends, deaf));
}

#[tokio::test(start_paused = true)]
async fn stalled_readers_hold_no_more_at_the_gateway_than_its_budget() {
    let pressure = Arc::new(MemoryBudget::new(usize::MAX));
    let Connected {
        tunnel,
        ended: _ended,
        mut asked,
        ..
    } = connected(settings(pressure.clone())).await;
    let mut sending = JoinSet::new();
    let mut stalled = Vec::new();
    let most = usize::try_from(flow_control::window_limits(Duration::ZERO, 1, BUDGET).max).unwrap();
    for count in 1..=40 {
        let opened = open(&tunnel, true).await;
        let stream = asked.recv().await.unwrap();
        let mut send = stream.responder.send(Response::new(()), false).unwrap();
        let mut body = opened.response.await.unwrap().into_body();
        warm_up(&mut send, &mut body).await;
        fill(&mut send).await;
        sending.spawn(async move { fill(&mut send).await });
        stalled.push(body);
        let held = tunnel.load().sample_buffered().total;
        let allowed = BUDGET + count * FLOOR + most;
        assert!(
            held <= allowed,
            "{held} bytes for {count} readers, {allowed} allowed"
        );
    }
    assert!(pressure.bytes() >= BUDGET / 2, "{} bytes", pressure.bytes());

    // Bytes of a dropped stream count for no stream.
    drop(stalled);
    sending.shutdown().await;
    drop(asked);
    tunnel.close();
    let gone = async {
        while pressure.bytes() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_mins(2), gone).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn stalled_small_frames_hold_little_more_than_their_bytes_and_end_no_stream() {
    const FRAME: usize = 105;
    let mut pair = connected(settings(Arc::default())).await;
    let mut all = Vec::new();
    for _ in 0..6 {
        let (answer, mut send) = answered(&mut pair).await;
        let mut body = answer.into_body();
        warm_up(&mut send, &mut body).await;
        let chunk = Bytes::from_static(&[0; FRAME]);
        let mut length = 0;
        while let Ok(sent) = timeout(QUIET, send.send_data(chunk.clone())).await {
            sent.unwrap();
            length += FRAME;
        }
        all.push((body, send, length));
    }
    let stalled: usize = all.iter().map(|(.., length)| length).sum();
    assert!(stalled >= BUDGET / 2, "the budget is used: {stalled} bytes");
    let held = pair.tunnel.load().sample_buffered().total;
    assert!(held < stalled * 2, "{held} bytes of memory for {stalled}");

    // The whole budget is available to the next streams.
    for (mut body, _send, sent) in all {
        let mut length = 0;
        while length < sent {
            let data = timeout(Duration::from_mins(2), body.next_chunk())
                .await
                .unwrap();
            length += data.unwrap().unwrap().len();
        }
    }
    assert!(pair.tunnel.is_open());
}

/// A stream keeps a window that it got while fewer streams were open.
#[tokio::test(start_paused = true)]
async fn windows_that_were_given_before_the_crowd_came_exceed_the_budget_by_little() {
    let mut pair = connected(settings(Arc::default())).await;
    let mut all = Vec::new();
    for _ in 0..16 {
        let (answer, mut send) = answered(&mut pair).await;
        let mut body = answer.into_body();
        warm_up(&mut send, &mut body).await;
        all.push((body, send));
    }
    let filling = all.iter_mut().map(|(_, send)| fill(send));
    futures_util::future::join_all(filling).await;
    let held = pair.tunnel.load().sample_buffered().total;
    assert!((BUDGET..BUDGET * 4).contains(&held), "{held} bytes");
    // Nothing of this is more than an honest edge may do.
    fetch_one(&mut pair).await;
}

async fn fetch_one(pair: &mut Connected) {
    let (answer, mut send) = answered(pair).await;
    exchange(&mut send, &mut answer.into_body(), FLOOR).await;
}

/// After a reader has read nothing, a little, and much.
#[tokio::test(start_paused = true)]
async fn a_window_follows_what_the_reader_takes_at_either_end() {
    follow_reader(Duration::ZERO, [FLOOR, FLOOR, 4 << 20]).await;
    follow_reader(Duration::from_millis(50), [FAR, FAR, 8 << 20]).await;
}

async fn follow_reader(round_trip: Duration, windows: [usize; 3]) {
    let settings = GatewaySideConfig {
        budget: 2 * BUDGET,
        round_trip,
        ..settings(Arc::default())
    };
    let mut pair = connected(settings).await;
    for (taken, window) in [0, FLOOR, BULK + FLOOR].into_iter().zip(windows) {
        let (answer, mut send) = answered(&mut pair).await;
        let mut body = answer.into_body();
        exchange(&mut send, &mut body, taken).await;
        fill(&mut send).await;
        let held = pair.tunnel.load().sample_buffered().total;
        assert!(
            (window * 3 / 4..=window * 9 / 8).contains(&held),
            "{taken}: {held} at the gateway"
        );
        drop((body, send));

        let mut opened = open(&pair.tunnel, false).await;
        let mut request = pair.asked.recv().await.unwrap();
        exchange(&mut opened.send, &mut request.body, taken).await;
        fill(&mut opened.send).await;
        let held = pair.edge.sample_buffered().total;
        assert!(
            (window * 3 / 4..=window * 9 / 8).contains(&held),
            "{taken}: {held} at the edge"
        );
        drop((opened, request));
        timeout(Duration::from_mins(2), async {
            while pair.edge.sample_buffered().total > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn under_pressure_of_the_whole_process_every_window_is_small() {
    let pressure = Arc::new(MemoryBudget::new(4 * FLOOR));
    let mut first = connected(settings(pressure.clone())).await;
    let mut second = connected(settings(pressure.clone())).await;
    let held = |tunnel: &Tunnel| tunnel.load().sample_buffered().total;

    let _stalled = stall(&mut first, |_| pressure.is_full()).await;
    // The other tunnel notices it with its next stream.
    let early = stall(&mut second, |_| true).await;
    drop(early);
    let _stalled = stall(&mut second, |tunnel| held(tunnel) >= FLOOR / 2).await;
    let held = held(&second.tunnel);
    assert!(held <= 2 * FLOOR, "{held} bytes");
}

/// Returns a response that is not read any more, once no more of it is accepted and the condition is true.
async fn stall(
    pair: &mut Connected,
    condition: impl Fn(&Tunnel) -> bool,
) -> (StreamReceiver, StreamSender) {
    let (answer, mut send) = answered(pair).await;
    let mut body = answer.into_body();
    warm_up(&mut send, &mut body).await;
    let filling = timeout(Duration::from_mins(1), async {
        loop {
            fill(&mut send).await;
            if condition(&pair.tunnel) {
                return;
            }
        }
    });
    filling.await.expect("the condition becomes true");
    (body, send)
}

#[tokio::test(start_paused = true)]
async fn data_of_a_dead_tunnel_counts_until_its_readers_are_gone() {
    let pressure = Arc::new(MemoryBudget::new(usize::MAX));
    let settings = settings(pressure.clone());
    let siblings = settings.node_budget.clone();
    let Connected {
        tunnel,
        mut ended,
        mut asked,
        ..
    } = connected(settings).await;
    let opened = open(&tunnel, true).await;
    let stream = asked.recv().await.unwrap();
    let mut send = stream.responder.send(Response::new(()), false).unwrap();
    fill(&mut send).await;
    let stalled = opened.response.await.unwrap();
    let held = tunnel.load().sample_buffered().total;
    tunnel.close();
    ended.receiver.recv().await.unwrap();
    drop((opened.send, tunnel));
    assert!(held > 0);
    let counted = || (pressure.bytes(), siblings.stalled_bytes());
    assert_eq!(counted(), (held, held), "the bytes are still in memory");
    drop(stalled);
    assert_eq!(counted(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn tunnels_of_one_node_share_its_budget() {
    let budget = 4 * BUDGET;
    let settings = GatewaySideConfig {
        budget,
        ..settings(Arc::default())
    };
    let mut ends = Vec::new();
    for _ in 0..2 {
        ends.push(connected(settings.clone()).await);
    }
    let mut sending = JoinSet::new();
    let mut stalled = Vec::new();
    let most = usize::try_from(flow_control::window_limits(Duration::ZERO, 1, budget).max).unwrap();
    for count in 1..=40 {
        let (answer, mut send) = stall(&mut ends[count % 2], |_| true).await;
        sending.spawn(async move { fill(&mut send).await });
        stalled.push(answer);
        let held: usize = ends
            .iter()
            .map(|end| end.tunnel.load().sample_buffered().total)
            .sum();
        // For each of them one check may be late.
        let allowed = budget + count * FLOOR + 2 * most;
        assert!(
            held <= allowed,
            "{held} bytes for {count} readers, {allowed} allowed"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_counts_before_it_is_read() {
    let mut pair = connected(settings(Arc::default())).await;
    let opened = open(&pair.tunnel, true).await;
    let stream = pair.asked.recv().await.unwrap();
    let mut send = stream.responder.send(Response::new(()), false).unwrap();
    fill(&mut send).await;
    let unread = || pair.tunnel.load().sample_buffered().total;
    let before = unread();
    assert!(before > 0);
    let response = opened.response.await.unwrap();
    // Only the head has left.
    assert!((before - 1_000..before).contains(&unread()));
    drop(response);
    assert_eq!(unread(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_eviction_wakes_the_reader_of_a_response() {
    let mut pair = connected(settings(Arc::default())).await;
    for interim in [true, false] {
        let mut opened = open(&pair.tunnel, true).await;
        let _unanswered = pair.asked.recv().await.unwrap();
        let progress = opened
            .response
            .buffered
            .as_ref()
            .unwrap()
            .progress()
            .clone();
        let reading = async {
            if interim {
                opened.response.next_informational().await.map(drop)
            } else {
                opened.response.await.map(drop)
            }
        };
        let evicting = async {
            tokio::task::yield_now().await;
            progress.evict();
        };
        let both = async { tokio::join!(reading, evicting) };
        let (read, ()) = timeout(Duration::from_mins(1), both).await.unwrap();
        assert!(matches!(read, Err(StreamError::Evicted)), "{read:?}");
    }
}
