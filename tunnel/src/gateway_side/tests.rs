//! Both ends of a tunnel over one in-memory pipe.

mod budget;
mod heads;

use super::*;
use crate::{
    body::pump,
    control_frame_limit::ControlFrameLimiter,
    control_stream::{ControlStreamError, EdgeMessage, GatewayMessage},
    copy::{self, ByteCounters},
    edge_side::{self, EdgeSide, IncomingStream, StreamRequest},
    error::{RejectCode, TunnelEnd},
};
use causeway_rt::socket::CountedIo;
use http::StatusCode;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, duplex},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::Instant,
};

/// Tasks of a test. Dropping it ends them, and fails the test if one of them has panicked.
#[derive(Default)]
struct Tasks(JoinSet<()>);

impl Tasks {
    fn spawn(&mut self, task: impl Future<Output = ()> + std::marker::Send + 'static) {
        self.0.spawn(task);
    }

    /// Whether a task has ended. A panic of a task fails the test.
    fn has_ended(&mut self) -> bool {
        self.0.try_join_next().map(Result::unwrap).is_some()
    }

    /// Waits until all tasks have ended.
    async fn join(mut self) {
        while let Some(ended) = self.0.join_next().await {
            ended.unwrap();
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        while let Some(ended) = self.0.try_join_next() {
            assert!(std::thread::panicking() || ended.is_ok(), "{ended:?}");
        }
    }
}

type Edge = EdgeSide<CountedIo<DuplexStream>>;

/// A tunnel's driver, which runs as long as this value lives.
struct Ended {
    receiver: mpsc::UnboundedReceiver<TunnelEnd>,
    tasks: Tasks,
}

impl Ended {
    /// Runs the driver until its tunnel ends.
    fn of(driver: impl Future<Output = TunnelEnd> + std::marker::Send + 'static) -> Self {
        let (tell, receiver) = mpsc::unbounded_channel();
        let mut tasks = Tasks::default();
        tasks.spawn(async move { drop(tell.send(driver.await)) });
        Self { receiver, tasks }
    }
}

async fn pair(settings: GatewaySideConfig) -> (Tunnel, Ended, Edge) {
    let (near, far) = duplex(256 * 1024);
    let (near, far) = (CountedIo::new(near), CountedIo::new(far));
    let (near_traffic, far_traffic) = (near.traffic(), far.traffic());
    let accept = edge_side::accept(far, far_traffic, edge_side::EdgeSideConfig::default());
    let (connected, accepted) = tokio::join!(connect(near, near_traffic, settings), accept);
    let (tunnel, driver) = connected.unwrap();
    (tunnel, Ended::of(driver.run()), accepted.unwrap())
}

#[tokio::test]
async fn a_tunnel_continues_after_its_connection_blocked_for_a_while() {
    let (near, far) = duplex(64);
    let (near, far) = (CountedIo::new(near), CountedIo::new(far));
    let (near_traffic, far_traffic) = (near.traffic(), far.traffic());
    let accept = edge_side::accept(far, far_traffic, edge_side::EdgeSideConfig::default());
    let settings = GatewaySideConfig::default();
    let (connected, accepted) = tokio::join!(connect(near, near_traffic, settings), accept);
    let ((tunnel, driver), mut edge) = (connected.unwrap(), accepted.unwrap());
    let mut ended = Ended::of(driver.run());
    // Many small responses in one turn: each is held back, and the connection takes 64 bytes at a time.
    ended.tasks.spawn(async move {
        let (mut asked, mut replies) = (Vec::new(), JoinSet::new());
        while let Ok(IncomingStream::Stream(stream)) = edge.next_stream().await {
            asked.push(*stream);
            if asked.len() < 32 {
                continue;
            }
            for (index, stream) in asked.drain(..).enumerate() {
                let mut send = stream.responder.send(Response::new(()), false).unwrap();
                let body = Bytes::from(vec![u8::try_from(index).unwrap(); 3000]);
                replies.spawn(async move { send.send_last(body).await });
            }
        }
    });
    let mut answers = Vec::new();
    for index in 0..32 {
        let head = Request::new(());
        let target = Target::new("edge-1", 80);
        let opened = tunnel.open(head, &StreamKind::Request, &target, true).await;
        answers.push((index, opened.unwrap().response));
    }
    let all_come = async {
        for (index, answer) in answers {
            let mut body = answer.await.unwrap().into_body();
            let mut all = Vec::new();
            while let Some(data) = body.next_chunk().await {
                all.extend_from_slice(&data.unwrap());
            }
            assert_eq!(all, vec![index; 3000]);
        }
    };
    let bound = Duration::from_mins(2);
    tokio::time::timeout(bound, all_come).await.unwrap();
}

/// Both ends of a tunnel, whose edge passes on the streams that it receives.
struct Connected {
    tunnel: Tunnel,
    ended: Ended,
    /// Load of the tunnel at the edge.
    edge: Arc<TunnelLoad>,
    /// Requests that the edge receives.
    asked: mpsc::UnboundedReceiver<StreamRequest>,
}

/// Runs the edge's loop, reduced to streams.
async fn pass_on(mut server: Edge, tell: mpsc::UnboundedSender<StreamRequest>) {
    let mut control_streams = Vec::new();
    loop {
        match server.next_stream().await {
            Ok(IncomingStream::Stream(stream)) => drop(tell.send(*stream)),
            Ok(IncomingStream::Control(opened)) => control_streams.push(opened),
            Err(_) => return,
        }
    }
}

/// Connects both ends with the same budget and round trip.
async fn connected(settings: GatewaySideConfig) -> Connected {
    let (near, far) = duplex(256 * 1024);
    let (near, far) = (CountedIo::new(near), CountedIo::new(far));
    let (near_traffic, far_traffic) = (near.traffic(), far.traffic());
    let edge = edge_side::EdgeSideConfig {
        budget: settings.budget,
        round_trip: settings.round_trip,
        ..edge_side::EdgeSideConfig::default()
    };
    let accept = edge_side::accept(far, far_traffic, edge);
    let (connected, accepted) = tokio::join!(connect(near, near_traffic, settings), accept);
    let ((tunnel, driver), server) = (connected.unwrap(), accepted.unwrap());
    let mut ended = Ended::of(driver.run());
    let load = server.load();
    let (tell, asked) = mpsc::unbounded_channel();
    ended.tasks.spawn(pass_on(server, tell));
    let control = tunnel.open_control_stream().await.unwrap();
    ended.tasks.spawn(async move {
        let _control = control;
        std::future::pending::<()>().await;
    });
    Connected {
        tunnel,
        ended,
        edge: load,
        asked,
    }
}

/// Returns a tunnel whose edge serves each stream with `serve`, and the tasks of both ends.
async fn serving<F>(
    serve: impl Fn(Box<StreamRequest>) -> F + std::marker::Send + 'static,
) -> (Tunnel, Tasks)
where
    F: Future<Output = ()> + std::marker::Send + 'static,
{
    let (tunnel, mut ended, mut edge) = pair(GatewaySideConfig::default()).await;
    ended.tasks.spawn(async move {
        let mut served = JoinSet::new();
        loop {
            tokio::select! {
                incoming = edge.next_stream() => match incoming {
                    Ok(IncomingStream::Stream(asked)) => drop(served.spawn(serve(asked))),
                    Ok(_) => {}
                    Err(_) => return,
                },
                Some(done) = served.join_next() => done.unwrap(),
            }
        }
    });
    (tunnel, ended.tasks)
}

fn target() -> Target {
    Target::new("edge-1", 9100)
}

fn get(path: &str) -> Request<()> {
    Request::builder()
        .uri(format!("https://edge-1:9100{path}"))
        .body(())
        .unwrap()
}

async fn fetch(tunnel: &Tunnel, path: &str) -> Result<Bytes, StreamError> {
    let opened = tunnel
        .open(get(path), &StreamKind::Request, &target(), true)
        .await?;
    let body = opened.response.await?.into_body();
    Ok(body.collect().await?.to_bytes())
}

async fn answer_with(asked: Box<StreamRequest>, body: Bytes) {
    let mut send = asked.responder.send(Response::new(()), false).unwrap();
    let _ = pump(Full::new(body), &mut send, None).await;
}

#[tokio::test]
async fn a_request_reaches_the_edge_with_target_and_no_private_fields() {
    let (tunnel, _tasks) = serving(|asked| async move {
        assert_eq!(asked.kind, StreamKind::Request);
        assert_eq!(asked.target, target());
        assert!(
            asked
                .head
                .headers()
                .keys()
                .all(|name| !name.as_str().starts_with("causeway"))
        );
        let path = asked.head.uri().to_string();
        answer_with(asked, Bytes::from(path)).await;
    })
    .await;
    let body = fetch(&tunnel, "/a//b?c=%2f").await.unwrap();
    assert_eq!(body, "https://edge-1:9100/a//b?c=%2f");
}

#[tokio::test]
async fn an_upgrade_keeps_its_method_and_token() {
    let (tunnel, _tasks) = serving(|asked| async move {
        if asked.kind == StreamKind::Request {
            return answer_with(asked, Bytes::new()).await;
        }
        assert_eq!(asked.kind, StreamKind::Upgrade("SPDY/3.1".into()));
        assert_eq!(asked.head.method(), Method::POST);
        answer_with(asked, Bytes::from_static(b"whole")).await;
    })
    .await;
    // SETTINGS of the edge arrive with its first answer at the latest (trap 5).
    fetch(&tunnel, "/").await.unwrap();
    let mut head = get("/exec");
    *head.method_mut() = Method::POST;
    let ask = StreamKind::Upgrade("SPDY/3.1".into());
    let opened = tunnel.open(head, &ask, &target(), false).await.unwrap();
    let answer = opened.response.await.unwrap();
    assert_eq!(
        answer.into_body().collect().await.unwrap().to_bytes(),
        "whole"
    );
}

#[tokio::test]
async fn an_edges_refusal_carries_its_word_and_sentence() {
    let (tunnel, _tasks) = serving(|asked| async move {
        asked
            .responder
            .reject(&RejectCode::TargetRefused.with_detail("could not dial 127.0.0.1:9: refused"));
    })
    .await;
    let opened = tunnel
        .open(Request::new(()), &StreamKind::Tcp, &target(), false)
        .await
        .unwrap();
    let answer = opened.response.await.unwrap();
    assert_eq!(answer.status(), StatusCode::BAD_GATEWAY);
    let word = answer.headers()[wire::FAILURE].to_str().unwrap();
    assert_eq!(RejectCode::parse(word), Some(RejectCode::TargetRefused));
    assert!(
        answer.headers()[wire::DETAIL]
            .to_str()
            .unwrap()
            .contains("127.0.0.1:9")
    );
}

#[tokio::test]
async fn trap_1_many_small_chunks_and_no_empty_frames_keep_the_tunnel() {
    let (tunnel, _tasks) = serving(|asked| async move {
        let mut send = asked.responder.send(Response::new(()), false).unwrap();
        let chunk = |_| {
            Ok::<_, std::convert::Infallible>(http_body::Frame::data(Bytes::from_static(&[7; 64])))
        };
        let chunks = futures_util::stream::iter((0..200_000).map(chunk));
        pump(StreamBody::new(chunks), &mut send, None)
            .await
            .unwrap();
    })
    .await;
    let body = fetch(&tunnel, "/").await.unwrap();
    assert_eq!(body.len(), 64 * 200_000);
    assert!(fetch(&tunnel, "/").await.is_ok(), "the tunnel still works");
}

#[tokio::test]
async fn trap_2_clients_that_hang_up_by_the_thousand_keep_the_tunnel() {
    let (tunnel, _tasks) = serving(|mut asked| async move {
        asked.responder.wait_for_reset().await;
    })
    .await;
    for _ in 0..100 {
        let mut waiting = Vec::new();
        for _ in 0..50 {
            let opened = tunnel
                .open(get("/"), &StreamKind::Request, &target(), true)
                .await
                .unwrap();
            waiting.push(opened);
        }
        tokio::task::yield_now().await;
        drop(waiting);
    }
    assert_eq!(tunnel.load().open_streams(), 0);
    assert!(tunnel.is_open());
    let opened = tunnel
        .open(get("/"), &StreamKind::Request, &target(), true)
        .await;
    assert!(opened.is_ok(), "5,000 resets are permitted on a tunnel");
}

#[tokio::test]
async fn trap_3_an_abort_is_a_reset_and_never_a_clean_end() {
    let (saw, mut seen) = mpsc::unbounded_channel();
    let (tunnel, _tasks) = serving(move |mut asked| {
        let saw = saw.clone();
        async move {
            let first = asked.body.next_chunk().await;
            assert!(matches!(first, Some(Ok(_))));
            let second = asked.body.next_chunk().await;
            saw.send(matches!(second, Some(Err(error)) if error.is_reset()))
                .unwrap();
        }
    })
    .await;
    let mut opened = tunnel
        .open(get("/"), &StreamKind::Request, &target(), false)
        .await
        .unwrap();
    opened
        .send
        .send_data(Bytes::from_static(b"half"))
        .await
        .unwrap();
    tokio::task::yield_now().await;
    drop(opened.send);
    assert!(seen.recv().await.unwrap());

    let (tunnel, _tasks) = serving(|asked| async move {
        let mut send = asked.responder.send(Response::new(()), false).unwrap();
        send.send_data(Bytes::from_static(b"half")).await.unwrap();
        drop(send);
    })
    .await;
    let error = fetch(&tunnel, "/").await.unwrap_err();
    assert!(error.is_reset(), "{error}");
}

#[tokio::test]
async fn an_answer_before_the_request_is_read_is_whole() {
    let (tunnel, _tasks) = serving(|asked| async move {
        let StreamRequest {
            responder, body, ..
        } = *asked;
        let mut send = responder.send(Response::new(()), false).unwrap();
        send.send_last(Bytes::from(vec![1; 300_000])).await.unwrap();
        drop((send, body));
    })
    .await;
    let mut opened = tunnel
        .open(get("/"), &StreamKind::Request, &target(), false)
        .await
        .unwrap();
    // May already fail, because the edge needs no more of the body.
    let _ = opened
        .send
        .send_data(Bytes::from_static(b"never read"))
        .await;
    let body = opened.response.await.unwrap().into_body();
    assert_eq!(body.collect().await.unwrap().to_bytes().len(), 300_000);
}

#[tokio::test]
async fn a_half_close_and_a_reset_travel_through_a_relay() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tunnel, _tasks) = serving(move |asked| async move {
        let app = TcpStream::connect(address).await.unwrap();
        let send = asked.responder.send(Response::new(()), false).unwrap();
        copy::relay(app, send, asked.body, &ByteCounters::default(), false).await;
    })
    .await;
    let open = async || {
        let opened = tunnel
            .open(Request::new(()), &StreamKind::Tcp, &target(), false)
            .await
            .unwrap();
        let (app, _) = listener.accept().await.unwrap();
        (opened.send, opened.response.await.unwrap().into_body(), app)
    };

    let (mut send, mut receive, mut app) = open().await;
    send.send_last(Bytes::from_static(b"question"))
        .await
        .unwrap();
    let mut heard = Vec::new();
    app.read_to_end(&mut heard).await.unwrap();
    assert_eq!(heard, b"question", "the app sees the half-close");
    app.write_all(b"answer").await.unwrap();
    assert_eq!(receive.next_chunk().await.unwrap().unwrap(), "answer");
    drop(app);
    let end = receive.next_chunk().await;
    assert!(end.is_none(), "a clean end stays clean: {end:?}");

    let (_send, mut receive, app) = open().await;
    socket2::SockRef::from(&app)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(app);
    assert!(receive.next_chunk().await.unwrap().unwrap_err().is_reset());

    let (send, receive, mut app) = open().await;
    drop((send, receive));
    let error = app.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn the_control_stream_speaks_both_ways() {
    let (tunnel, _ended, mut edge) = pair(GatewaySideConfig::default()).await;
    let mut tasks = Tasks::default();
    tasks.spawn(async move {
        let Ok(IncomingStream::Control(mut control)) = edge.next_stream().await else {
            panic!("the first stream is the control stream");
        };
        let talk = async {
            let heard: GatewayMessage = control.receive().await.unwrap();
            assert_eq!(heard, GatewayMessage::Registered);
            let leave = EdgeMessage::Leave {
                detail: "bye".into(),
                until_idle: false,
                serves: false,
            };
            control.send(&leave).await.unwrap();
            let end = control.receive::<GatewayMessage>().await;
            assert!(end.is_err());
        };
        tokio::select! { () = talk => {}, _ = edge.next_stream() => panic!("no other stream") }
    });
    let mut control = tunnel.open_control_stream().await.unwrap();
    control.send(&GatewayMessage::Registered).await.unwrap();
    let heard: EdgeMessage = control
        .receive_within(Duration::from_mins(2))
        .await
        .unwrap();
    assert_eq!(
        heard,
        EdgeMessage::Leave {
            detail: "bye".into(),
            until_idle: false,
            serves: false,
        }
    );
    control.close();
    tasks.join().await;
}

#[tokio::test]
async fn a_line_is_sent_only_if_the_other_end_takes_it() {
    let (tunnel, _ended, mut edge) = pair(GatewaySideConfig::default()).await;
    let message = |length: usize| GatewayMessage::Roots {
        pem: "x".repeat(length),
    };
    let fields = serde_json::to_vec(&message(0)).unwrap().len();
    let longest = message(wire::MAX_MESSAGE - fields);
    let too_long = message(wire::MAX_MESSAGE - fields + 1);
    let mut tasks = Tasks::default();
    let expected = longest.clone();
    tasks.spawn(async move {
        let Ok(IncomingStream::Control(mut control)) = edge.next_stream().await else {
            panic!("the first stream is the control stream");
        };
        let talk = async {
            for expected in [GatewayMessage::Registered, expected] {
                let heard: GatewayMessage = control.receive().await.unwrap();
                assert_eq!(heard, expected);
            }
        };
        tokio::select! { () = talk => {}, _ = edge.next_stream() => panic!("no other stream") }
    });
    let mut control = tunnel.open_control_stream().await.unwrap();
    control.enqueue(&GatewayMessage::Registered).unwrap();
    let refused = control.enqueue(&too_long);
    assert!(matches!(refused, Err(ControlStreamError::TooLong)));
    control.send(&longest).await.unwrap();
    tasks.join().await;
}

#[tokio::test]
async fn streams_beyond_the_limit_are_refused_and_counted_back() {
    let settings = GatewaySideConfig {
        max_streams: 2,
        ..GatewaySideConfig::default()
    };
    let (tunnel, mut ended, mut edge) = pair(settings).await;
    ended
        .tasks
        .spawn(async move { while edge.next_stream().await.is_ok() {} });
    let open = || async {
        tunnel
            .open(get("/"), &StreamKind::Request, &target(), true)
            .await
    };
    let first = open().await.unwrap();
    let _second = open().await.unwrap();
    assert!(matches!(open().await, Err(StreamError::Busy)));
    drop(first);
    assert!(open().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_silent_tunnel_is_suspect_after_10_s_and_closed_after_15_s() {
    // The edge is never polled: it reads nothing and answers no PING.
    let (tunnel, mut ended, _edge) = pair(GatewaySideConfig::default()).await;
    let started = Instant::now();
    tokio::time::sleep(Duration::from_millis(4_400)).await;
    assert_eq!(tunnel.unanswered_for(), Duration::ZERO);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(tunnel.is_open());
    // The probe was sent after 4.5 to 5 s.
    let late = tunnel.unanswered_for();
    assert!(
        (Duration::from_millis(4_300)..Duration::from_secs(5)).contains(&late),
        "{late:?}"
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(tunnel.is_suspect());
    assert_eq!(ended.receiver.recv().await, Some(TunnelEnd::Silent));
    assert!(started.elapsed() <= Duration::from_secs(15));
    assert!(!tunnel.is_open());
}

#[tokio::test(start_paused = true)]
async fn a_probe_may_be_answered_within_the_microsecond_in_which_it_is_sent() {
    let (tunnel, mut ended, mut edge) = pair(GatewaySideConfig::default()).await;
    ended
        .tasks
        .spawn(async move { while edge.next_stream().await.is_ok() {} });
    // All later times are between two microseconds of the connection's age.
    tokio::time::advance(Duration::from_nanos(500)).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(tunnel.is_open() && !tunnel.is_suspect());
}

/// Copies bytes, at 512 bytes per second while `slow` is set.
async fn trickle(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    slow: Arc<AtomicBool>,
) {
    let mut part = vec![0; 4096];
    loop {
        let most = if slow.load(Relaxed) { 512 } else { 4096 };
        let read = from.read(&mut part[..most]).await.unwrap();
        if read == 0 || to.write_all(&part[..read]).await.is_err() {
            return;
        }
        if most == 512 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_trickling_tunnel_without_pongs_takes_no_new_streams() {
    let second = Duration::from_secs(1);
    let (near, from_near) = duplex(64 * 1024);
    let (far, from_far) = duplex(64 * 1024);
    let (near, far) = (CountedIo::new(near), CountedIo::new(far));
    let (near_traffic, far_traffic) = (near.traffic(), far.traffic());
    let (mut from_near, to_near) = tokio::io::split(from_near);
    let (from_far, mut to_far) = tokio::io::split(from_far);
    let mut tasks = Tasks::default();
    tasks.spawn(async move { drop(tokio::io::copy(&mut from_near, &mut to_far).await) });
    let trickles = Arc::new(AtomicBool::new(false));
    tasks.spawn(trickle(from_far, to_near, trickles.clone()));
    let accept = edge_side::accept(far, far_traffic, edge_side::EdgeSideConfig::default());
    let connecting = connect(near, near_traffic, GatewaySideConfig::default());
    let (connected, accepted) = tokio::join!(connecting, accept);
    let ((tunnel, driver), mut edge) = (connected.unwrap(), accepted.unwrap());
    let _ended = Ended::of(driver.run());
    let (finish, finished) = tokio::sync::oneshot::channel::<()>();
    tasks.spawn(async move {
        let Ok(IncomingStream::Stream(stream)) = edge.next_stream().await else {
            return;
        };
        let answering = async {
            let mut send = stream.responder.send(Response::new(()), false).unwrap();
            let endless = async { while send.send_data(vec![0; 65536].into()).await.is_ok() {} };
            tokio::select! {
                () = endless => {}
                _ = finished => {}
            }
        };
        let _ = tokio::join!(answering, edge.next_stream());
    });
    // Like the control stream of every tunnel.
    let _control = OpenStreamGuard::new(tunnel.load(), 9).unwrap();
    let head = Request::new(());
    let target = Target::new("edge-1", 80);
    let opened = tunnel.open(head, &StreamKind::Request, &target, true).await;
    let mut body = opened.unwrap().response.await.unwrap().into_body();
    tasks.spawn(async move { while body.next_chunk().await.is_some() {} });

    trickles.store(true, Relaxed);
    let until = async |suspect: bool| {
        let look = async {
            while tunnel.is_suspect() != suspect {
                tokio::time::sleep(second / 10).await;
            }
        };
        tokio::time::timeout(60 * second, look).await.unwrap();
    };
    until(true).await;
    assert!(!tunnel.is_open());
    trickles.store(false, Relaxed);
    drop(finish);
    until(false).await;
    assert!(tunnel.is_open(), "it has not ended");
}

/// Answers each request with a body of a few bytes, ten times a second.
async fn answer_for_ever<S: AsyncRead + AsyncWrite + Unpin>(mut edge: EdgeSide<S>) {
    let mut bodies = JoinSet::new();
    while let Ok(IncomingStream::Stream(stream)) = edge.next_stream().await {
        let mut send = stream.responder.send(Response::new(()), false).unwrap();
        bodies.spawn(async move {
            while send.send_data(Bytes::from_static(b"event")).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
}

/// Such a connection has no control stream, so it has no window grants either.
#[tokio::test(start_paused = true)]
async fn probes_of_a_busy_egress_connection_are_no_flood() {
    let (near, far) = duplex(64 * 1024);
    let (near, far) = (CountedIo::new(near), CountedIo::new(far));
    let (near_traffic, far_traffic) = (near.traffic(), far.traffic());
    let flooded = Arc::new(AtomicBool::new(false));
    let on_flood = flooded.clone();
    let far = ControlFrameLimiter::new(far, move || on_flood.store(true, Relaxed));
    let settings = GatewaySideConfig {
        budget: 1 << 20,
        control_streams: 0,
        is_trusted: true,
        ..GatewaySideConfig::default()
    };
    let accept = edge_side::accept(far, far_traffic, edge_side::EdgeSideConfig::default());
    let (connected, accepted) = tokio::join!(connect(near, near_traffic, settings), accept);
    let (tunnel, driver) = connected.unwrap();
    let _ended = Ended::of(driver.run());
    let mut tasks = Tasks::default();
    tasks.spawn(answer_for_ever(accepted.unwrap()));
    // So many streams that their windows shrink.
    for _ in 0..8 {
        let head = Request::new(());
        let target = Target::new("edge-1", 80);
        let opened = tunnel.open(head, &StreamKind::Request, &target, true).await;
        let mut body = opened.unwrap().response.await.unwrap().into_body();
        tasks.spawn(async move { while body.next_chunk().await.is_some() {} });
    }
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert!(!flooded.load(Relaxed));
    assert!(tunnel.is_open());
}

#[tokio::test(start_paused = true)]
async fn an_early_probe_measures_the_silence_of_a_tunnel() {
    let second = Duration::from_secs(1);
    let (tunnel, _ended, mut edge) = pair(GatewaySideConfig::default()).await;
    tokio::time::sleep(2 * second).await;
    // The edge has not received it yet.
    tunnel.request_probe();
    tokio::time::sleep(second).await;
    assert!(tunnel.unanswered_for() >= second / 2 && tunnel.idle_for() >= 2 * second);
    let mut driven = Tasks::default();
    driven.spawn(async move { drop(edge.next_stream().await) });
    tokio::time::sleep(second).await;
    assert_eq!(tunnel.unanswered_for(), Duration::ZERO);
    tunnel.request_probe();
    tokio::time::sleep(second / 2).await;
    assert!(tunnel.idle_for() < second);
    assert!(!driven.has_ended());
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_is_probed_within_1_s() {
    let second = Duration::from_secs(1);
    let (tunnel, _ended, _edge) = pair(GatewaySideConfig {
        control_streams: 0,
        ..GatewaySideConfig::default()
    })
    .await;
    tokio::time::sleep(2 * second).await;
    let target = target();
    let opened = tunnel.open(get("/"), &StreamKind::Request, &target, true);
    let _stream = opened.await.unwrap();
    tokio::time::sleep(3 * second / 2).await;
    let unanswered = tunnel.unanswered_for();
    assert!((second / 4..second).contains(&unanswered), "{unanswered:?}");
}

#[tokio::test(start_paused = true)]
async fn an_idle_tunnel_is_kept_alive_by_pings_seen_at_both_ends() {
    let (tunnel, mut ended, mut edge) = pair(GatewaySideConfig::default()).await;
    let mut driven = Tasks::default();
    driven.spawn(async move { drop(edge.next_stream().await) });
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert!(tunnel.is_open());
    assert_eq!(tunnel.unanswered_for(), Duration::ZERO);
    assert!(ended.receiver.try_recv().is_err());
    assert!(!driven.has_ended());
}

#[tokio::test(start_paused = true)]
async fn an_edge_gives_up_after_fifteen_seconds_of_silence() {
    let (near, far) = duplex(64 * 1024);
    let (near, far) = (CountedIo::new(near), CountedIo::new(far));
    let (near_traffic, far_traffic) = (near.traffic(), far.traffic());
    let accept = edge_side::accept(far, far_traffic, edge_side::EdgeSideConfig::default());
    let (connected, accepted) = tokio::join!(
        connect(near, near_traffic, GatewaySideConfig::default()),
        accept
    );
    // The driver is never polled: the gateway has died without notice.
    let _dead = connected.unwrap();
    let started = Instant::now();
    let ended = accepted.unwrap().next_stream().await.unwrap_err();
    assert_eq!(ended, TunnelEnd::Silent);
    assert!(started.elapsed() <= Duration::from_secs(15));
}

/// Serves every stream by echoing it.
async fn echo(mut all: mpsc::UnboundedReceiver<StreamRequest>) {
    let mut echoes = JoinSet::new();
    while let Some(asked) = all.recv().await {
        echoes.spawn(async move {
            let StreamRequest {
                responder: reply,
                mut body,
                ..
            } = asked;
            let mut send = reply.send(Response::new(()), false).unwrap();
            while let Some(Ok(chunk)) = body.next_chunk().await {
                if send.send_data(chunk).await.is_err() {
                    return;
                }
            }
            let _ = send.end();
        });
    }
}

/// Sends 4 MiB through an echoing tunnel, this many times. Returns the number of echoed bytes.
async fn shout(tunnel: Tunnel, times: usize) -> usize {
    let mut moved = 0;
    for _ in 0..times {
        let opened = tunnel
            .open(get("/"), &StreamKind::Request, &target(), false)
            .await
            .unwrap();
        let mut send = opened.send;
        let up = async move {
            for _ in 0..64 {
                send.send_data(Bytes::from(vec![3; 64 * 1024]))
                    .await
                    .unwrap();
            }
            send.end().unwrap();
        };
        let down = async {
            let mut body = opened.response.await.unwrap().into_body();
            while let Some(chunk) = body.next_chunk().await {
                moved += chunk.unwrap().len();
            }
        };
        tokio::join!(up, down);
    }
    moved
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trap_11_bulk_both_ways_survives_probes_and_window_changes() {
    let liveness = KeepaliveConfig {
        probe_after: Duration::from_millis(50),
        ..KeepaliveConfig::default()
    };
    let settings = GatewaySideConfig {
        keepalive: liveness,
        budget: 16 << 20,
        round_trip: Duration::from_millis(100),
        ..GatewaySideConfig::default()
    };
    let Connected {
        tunnel,
        mut ended,
        asked,
        ..
    } = connected(settings).await;
    ended.tasks.spawn(echo(asked));
    // Many streams that begin and end change the largest window of both ends all the time.
    let mut crowd = Tasks::default();
    for times in (0..12).map(|number| number % 3 + 1) {
        let shouting = shout(tunnel.clone(), times);
        crowd.spawn(async move { assert_eq!(shouting.await, times * (4 << 20)) });
    }
    let bound = Duration::from_mins(5);
    tokio::time::timeout(bound, crowd.join())
        .await
        .expect("it hangs");
    assert!(ended.receiver.try_recv().is_err(), "the tunnel still works");
    assert!(tunnel.round_trip() > Duration::ZERO);
}

#[tokio::test]
async fn a_control_line_may_arrive_bytewise_or_with_the_next_line() {
    let (tunnel, _ended, mut edge) = pair(GatewaySideConfig::default()).await;
    let speaking = async {
        let Ok(IncomingStream::Control(mut control)) = edge.next_stream().await else {
            panic!("the first stream is the control stream");
        };
        let line = |digest: &str| {
            let digest = digest.to_owned();
            let mut line = serde_json::to_vec(&EdgeMessage::Crls { digest }).unwrap();
            line.push(b'\n');
            line
        };
        let both = [line("first"), line("second")].concat();
        let (most, rest) = both.split_at(both.len() / 2 - 1);
        for byte in most {
            control
                .sender
                .send_data(Bytes::from(vec![*byte]))
                .await
                .unwrap();
            // The sent bytes leave as a separate frame.
            while edge.next_stream().now_or_never().is_some() {}
        }
        control
            .sender
            .send_data(Bytes::from(rest.to_vec()))
            .await
            .unwrap();
        // Drives the connection until the other side has all bytes and closes.
        while edge.next_stream().await.is_ok() {}
    };
    let hearing = async {
        let mut control = tunnel.open_control_stream().await.unwrap();
        for expected in ["first", "second"] {
            let heard = control
                .receive_within(Duration::from_mins(2))
                .await
                .unwrap();
            assert!(matches!(heard, EdgeMessage::Crls { digest } if digest == expected));
        }
        tunnel.close();
    };
    tokio::join!(speaking, hearing);
}
