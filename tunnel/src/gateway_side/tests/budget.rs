//! Tests of the bytes that stalled streams may hold, at either end.

use super::*;
use crate::{buffered::MemoryBudget, flow_control};
use futures_util::future::join_all;
use std::time::Duration;
use tokio::{
    task::JoinSet,
    time::{interval, timeout},
};

/// A tunnel's budget in these tests. It is small, so that a test moves few bytes.
const BUDGET: usize = 8 << 20;
/// The minimum window.
const FLOOR: usize = 64 << 10;
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
async fn answered(turning: &mut Turning) -> (Response<StreamReceiver>, StreamSender) {
    let opened = open(&turning.tunnel, true).await;
    let stream = turning.asked.recv().await.unwrap();
    let send = stream.responder.send(Response::new(()), false).unwrap();
    (opened.response.await.unwrap(), send)
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
    let Turning {
        tunnel,
        ended: _ended,
        edge,
        mut asked,
        ..
    } = taking_turns(settings(Arc::default())).await;
    let (mut sends, mut deaf) = (Vec::new(), Vec::new());
    let most = flow_control::window_size(Duration::ZERO, 1, BUDGET);
    for count in 1..=40 {
        let mut opened = open(&tunnel, false).await;
        deaf.push(asked.recv().await.unwrap());
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
    let Turning {
        tunnel,
        ended: _ended,
        mut asked,
        ..
    } = taking_turns(settings(pressure.clone())).await;
    let mut sending = JoinSet::new();
    let mut stalled = Vec::new();
    let most = usize::try_from(flow_control::window_size(Duration::ZERO, 1, BUDGET)).unwrap();
    for count in 1..=40 {
        let opened = open(&tunnel, true).await;
        let stream = asked.recv().await.unwrap();
        let mut send = stream.responder.send(Response::new(()), false).unwrap();
        fill(&mut send).await;
        sending.spawn(async move { fill(&mut send).await });
        stalled.push(opened.response.await.unwrap());
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
async fn stalled_small_frames_shrink_windows_and_end_no_stream() {
    const FRAME: usize = 105;
    let mut turning = taking_turns(settings(Arc::default())).await;
    let mut all = Vec::new();
    for _ in 0..6 {
        all.push(answered(&mut turning).await);
    }
    let sending = all.iter_mut().map(async |(_, send)| {
        let chunk = Bytes::from_static(&[0; FRAME]);
        let mut length = 0;
        while let Ok(sent) = timeout(QUIET, send.send_data(chunk.clone())).await {
            sent.unwrap();
            length += FRAME;
        }
        length
    });
    let sent = join_all(sending).await;
    let stalled: usize = sent.iter().sum();
    let windows = BUDGET - 6 * FLOOR;
    // Small frames are joined, and cost no more than their bytes.
    assert!(
        stalled < windows + 6 * FLOOR,
        "{stalled} bytes for no stream"
    );

    // The whole budget is available to the next streams.
    for ((answer, _send), sent) in all.into_iter().zip(sent) {
        let mut body = answer.into_body();
        let mut length = 0;
        while length < sent {
            let data = timeout(Duration::from_mins(2), body.next_chunk())
                .await
                .unwrap();
            length += data.unwrap().unwrap().len();
        }
    }
    assert!(turning.tunnel.is_open());
}

#[tokio::test(start_paused = true)]
async fn small_frames_that_are_read_at_once_keep_the_windows() {
    // A share of the rest that exactly fills the link.
    let settings = GatewaySideConfig {
        budget: 32 << 20,
        round_trip: Duration::from_millis(100),
        ..GatewaySideConfig::default()
    };
    let mut turning = taking_turns(settings).await;
    let (answer, mut send) = answered(&mut turning).await;
    let mut body = answer.into_body();
    let mut windows = Vec::new();
    for _ in 0..40 {
        send.send_data(Bytes::from_static(b"a line")).await.unwrap();
        assert_eq!(body.next_chunk().await.unwrap().unwrap(), "a line");
        tokio::time::sleep(Duration::from_millis(100)).await;
        windows.extend(std::iter::from_fn(|| turning.taken.try_recv().ok()));
    }
    assert!(windows.len() <= 2, "{windows:?}");
}

#[tokio::test]
async fn under_pressure_of_the_whole_process_every_window_is_small() {
    let pressure = Arc::new(MemoryBudget::new(4 * FLOOR));
    let mut first = taking_turns(settings(pressure.clone())).await;
    let mut second = taking_turns(settings(pressure.clone())).await;
    let held = |tunnel: &Tunnel| tunnel.load().sample_buffered().total;

    let _stalled = stall(&mut first, |_| pressure.is_full()).await;
    // The other tunnel notices it with its next stream.
    let early = stall(&mut second, |_| true).await;
    drop(early);
    let _stalled = stall(&mut second, |tunnel| held(tunnel) >= FLOOR / 2).await;
    let held = held(&second.tunnel);
    assert!(held <= 2 * FLOOR, "{held} bytes");
}

/// Returns a response that is not read, once no more of it is accepted and the condition is true.
async fn stall(
    turning: &mut Turning,
    condition: impl Fn(&Tunnel) -> bool,
) -> (Response<StreamReceiver>, StreamSender) {
    let (answer, mut send) = answered(turning).await;
    let filling = timeout(Duration::from_mins(1), async {
        loop {
            fill(&mut send).await;
            if condition(&turning.tunnel) {
                return;
            }
        }
    });
    filling.await.expect("the condition becomes true");
    (answer, send)
}

#[tokio::test(start_paused = true)]
async fn data_of_a_dead_tunnel_counts_until_its_readers_are_gone() {
    let pressure = Arc::new(MemoryBudget::new(usize::MAX));
    let settings = settings(pressure.clone());
    let siblings = settings.node_budget.clone();
    let Turning {
        tunnel,
        mut ended,
        mut asked,
        ..
    } = taking_turns(settings).await;
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
        ends.push(taking_turns(settings.clone()).await);
    }
    let mut sending = JoinSet::new();
    let mut stalled = Vec::new();
    let most = usize::try_from(flow_control::window_size(Duration::ZERO, 1, budget)).unwrap();
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
    let mut turning = taking_turns(settings(Arc::default())).await;
    let opened = open(&turning.tunnel, true).await;
    let stream = turning.asked.recv().await.unwrap();
    let mut send = stream.responder.send(Response::new(()), false).unwrap();
    fill(&mut send).await;
    let unread = || turning.tunnel.load().sample_buffered().total;
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
    let mut turning = taking_turns(settings(Arc::default())).await;
    for interim in [true, false] {
        let mut opened = open(&turning.tunnel, true).await;
        let _unanswered = turning.asked.recv().await.unwrap();
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

/// The edge stays alive by its bytes, but never reports its answer to a window grant.
#[tokio::test(start_paused = true)]
async fn an_edge_that_does_not_take_its_turn_loses_its_tunnel() {
    let (tunnel, mut ended, mut edge) = pair(settings(Arc::default())).await;
    ended.tasks.spawn(async move {
        let Ok(IncomingStream::Control(mut control)) = edge.next_stream().await else {
            panic!("the first stream is the control stream");
        };
        let mut trickle = interval(Duration::from_secs(1));
        let mut open = Vec::new();
        loop {
            tokio::select! {
                incoming = edge.next_stream() => match incoming {
                    Ok(incoming) => open.push(incoming),
                    Err(_) => return,
                },
                _ = trickle.tick() => {
                    let detail = String::from("alive");
                    let until_idle = false;
                    let serves = false;
                    let leave = EdgeMessage::Leave { detail, until_idle, serves };
                    let _ = control.send(&leave).await;
                }
            }
        }
    });
    let mut control = tunnel.open_control_stream().await.unwrap();
    tunnel.enable_window_grants();
    // With many streams the windows have to be smaller.
    let mut crowd = Vec::new();
    for _ in 0..64 {
        crowd.push(open(&tunnel, false).await);
    }
    let began = Instant::now();
    // Neither end is silent.
    let hearing = async {
        while control.receive::<EdgeMessage>().await.is_ok() {
            let _ = control.send(&GatewayMessage::Registered).await;
        }
    };
    let (why, (), _) = tokio::join!(ended.receiver.recv(), hearing, tunnel.next_window_grant());
    let why = why.unwrap().to_string();
    assert!(why.contains("has not acknowledged new SETTINGS"), "{why}");
    let took = began.elapsed();
    assert!(took >= Duration::from_mins(1), "{took:?}");
    assert!(took < Duration::from_secs(90), "{took:?}");
}
