//! A malicious edge with a valid certificate: it ends its own tunnel, and no other.
//!
//! The gateway is the built binary. Each test floods or lies in one way. Meanwhile another node is served, and the reason
//! is in the gateway's log. With `CAUSEWAY_TEST_FULL=1` the test checks that the gateway's memory has not grown by more
//! than a tunnel's unread bytes.

use crate::world::{
    PATIENCE,
    app::App,
    evil::{self, CONTROL, HostileTunnel},
    frames::{
        self, CONTINUATION, DATA, END_HEADERS, GOAWAY, HEADERS, PING, RST_STREAM, STATUS_200,
        WINDOW_UPDATE, fields, frame, next, send, settings,
    },
    process::{GatewayProcess, Process},
    tool::{ToolOutput, full, need},
    until,
};
use tokio::{task::JoinSet, time::timeout};

/// Allowed growth of the gateway's memory, in bytes: the unread bytes of one tunnel's streams (`tunnel.memory`), and as
/// much again for all else.
const GROWTH: usize = 128 << 20;

/// Limits of a gateway that waits for a slow edge, and for an edge that answers no PING. The hostile edge then ends only for
/// its attack, however busy the machine is. An edge that does not read its dismissal keeps the connection for `hello_timeout`.
const PATIENT: &str = "tunnel: { handshake_timeout: 10m, hello_timeout: 20s, ping_timeout: 10m }";

/// 103 without further fields.
const EARLY: &[u8] = &[0x08, 3, b'1', b'0', b'3'];

struct TestSetup {
    site: GatewayProcess,
    before: usize,
    _good: Process,
    _app: App,
}

impl TestSetup {
    async fn new() -> Self {
        Self::with(PATIENT).await
    }

    async fn with(configuration: &str) -> Self {
        let app = App::saying("it").await;
        let site = GatewayProcess::with(configuration)
            .await
            .restart(evil::enrol)
            .await;
        let good = site.join("edge-1", app.port()).await;
        let ground = Self {
            before: site.gateway.usage().peak,
            site,
            _good: good,
            _app: app,
        };
        ground.serves().await;
        ground
    }

    /// Checks that a request to another node is answered.
    async fn serves(&self) {
        let ran = self.site.curl("edge-1", "").args(["--max-time", "120"]);
        assert_eq!(ran.run().await.ok().text(), "it");
    }

    /// Runs the attack while the other node serves; then checks the reason, and the memory.
    async fn bears(&mut self, attack: impl Future<Output = ()>, reason: &str) {
        let served = async {
            for _ in 0..3 {
                self.serves().await;
            }
        };
        tokio::join!(attack, served);
        self.says(reason).await;
        self.serves().await;
        let grown = self.site.gateway.usage().peak.saturating_sub(self.before);
        assert!(!full() || grown < GROWTH, "{} MiB", grown >> 20);
    }

    async fn says(&mut self, reason: &str) {
        let ended = |line: &str| line.contains(evil::NODE) && line.contains(reason);
        self.site.gateway.line(reason, ended).await;
    }

    /// A client of the hostile node, and the stream that the gateway opens for it.
    async fn called(&self, evil: &mut HostileTunnel) -> (JoinSet<ToolOutput>, u32) {
        let mut calling = JoinSet::new();
        let curl = self.site.curl(evil::NODE, "").args(["--max-time", "120"]);
        calling.spawn(curl.run());
        (calling, evil.stream().await)
    }
}

#[tokio::test]
async fn a_flood_of_pings_ends_its_own_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let evil = HostileTunnel::registered(&ground.site).await;
    let flood = evil.flood(frame(PING, 0, 0, &[7; 8]));
    Box::pin(ground.bears(flood, "floods its tunnel with PING")).await;
}

#[tokio::test]
async fn a_flood_with_unread_answers_ends_its_own_tunnel() {
    need!("curl");
    // With the usual limits of its PINGs: shorter ones would also end the tunnel of the other node on a busy machine.
    let mut ground = TestSetup::with("").await;
    let evil = HostileTunnel::registered(&ground.site).await;
    let flood = evil.flood_deaf(frame(PING, 0, 0, &[7; 8]));
    Box::pin(ground.bears(flood, "disconnected: ")).await;
}

#[tokio::test]
async fn a_flood_of_settings_ends_its_own_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let evil = HostileTunnel::registered(&ground.site).await;
    let flood = evil.flood(frames::settings(&[(4, 65_535)]));
    Box::pin(ground.bears(flood, "floods its tunnel with SETTINGS")).await;
}

#[tokio::test]
async fn a_flood_of_resets_ends_its_own_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (mut calling, stream) = ground.called(&mut evil).await;
    let flood = evil.flood(frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]));
    Box::pin(ground.bears(flood, "floods its tunnel with RST_STREAM")).await;
    let ran = calling.join_next().await.unwrap().unwrap();
    assert!(ran.text().contains("\"status\":502"), "{ran:?}");
}

#[tokio::test]
async fn a_flood_of_continuations_ends_its_own_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (_calling, stream) = ground.called(&mut evil).await;
    evil.send(&frame(HEADERS, 0, stream, STATUS_200))
        .await
        .unwrap();
    let flood = evil.flood(frame(
        CONTINUATION,
        0,
        stream,
        &frames::fields(&[("a", "b")]),
    ));
    Box::pin(ground.bears(flood, "floods its tunnel with CONTINUATION")).await;
}

#[tokio::test]
async fn a_field_list_without_measure_is_not_kept() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (_calling, stream) = ground.called(&mut evil).await;
    evil.send(&frame(HEADERS, 0, stream, STATUS_200))
        .await
        .unwrap();
    let list = frames::fields(&[("a", vec![b'b'; 16_000])]);
    let flood = evil.flood(frame(CONTINUATION, 0, stream, &list));
    Box::pin(ground.bears(flood, "disconnected: ")).await;
}

#[tokio::test]
async fn a_flood_of_windows_ends_its_own_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (_calling, stream) = ground.called(&mut evil).await;
    let flood = evil.flood(frame(WINDOW_UPDATE, 0, stream, &[0, 0, 0, 1]));
    Box::pin(ground.bears(flood, "floods its tunnel with WINDOW_UPDATE")).await;
}

#[tokio::test]
async fn a_flood_of_empty_frames_ends_its_own_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let evil = HostileTunnel::registered(&ground.site).await;
    let flood = evil.flood(frame(0x77, 0, 0, &[]));
    Box::pin(ground.bears(flood, "floods its tunnel with frames of rare kinds")).await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (_calling, stream) = ground.called(&mut evil).await;
    evil.send(&frame(HEADERS, END_HEADERS, stream, STATUS_200))
        .await
        .unwrap();
    let flood = evil.flood(frame(DATA, 0, stream, &[]));
    Box::pin(ground.bears(flood, "floods its tunnel with empty or unread DATA frames")).await;
}

#[tokio::test]
async fn endless_interim_answers_fail_their_stream_then_their_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (mut calling, stream) = ground.called(&mut evil).await;
    let flood = evil.flood(frame(HEADERS, END_HEADERS, stream, EARLY));
    Box::pin(ground.bears(flood, "floods its tunnel with HEADERS")).await;
    let ran = calling.join_next().await.unwrap().unwrap();
    assert!(ran.text().contains("too many interim responses"), "{ran:?}");
}

/// Name of the lie, its bytes, and a word of the reason that the log must have.
type MalformedMessage = (&'static str, Vec<u8>, &'static str);

fn out_of_bounds() -> Vec<MalformedMessage> {
    let whole = &0x7fff_ffff_u32.to_be_bytes();
    vec![
        (
            "a window beyond its most",
            frame(WINDOW_UPDATE, 0, 0, whole).repeat(2),
            "flow-control",
        ),
        (
            "a window of the control stream beyond its most",
            frame(WINDOW_UPDATE, 0, CONTROL, whole).repeat(2),
            "",
        ),
        (
            "a window that grows by nothing",
            frame(WINDOW_UPDATE, 0, 0, &[0; 4]),
            "protocol",
        ),
        (
            "a first window beyond its most",
            frames::settings(&[(4, u32::MAX)]),
            "protocol",
        ),
        (
            "a frame size below the least",
            frames::settings(&[(5, 1)]),
            "protocol",
        ),
        (
            "a frame larger than was agreed",
            frame(DATA, 0, CONTROL, &vec![0; 70_000]),
            "frame with invalid size",
        ),
        (
            "bytes beyond the window",
            frame(DATA, 0, CONTROL, &vec![b'x'; 60_000]).repeat(4_000),
            "",
        ),
    ]
}

fn out_of_place() -> Vec<MalformedMessage> {
    vec![
        (
            "an answer to a stream it was not given",
            frame(HEADERS, END_HEADERS, 99, STATUS_200),
            "protocol",
        ),
        (
            "bytes of a stream it was not given",
            frame(DATA, 0, 99, b"x"),
            "protocol",
        ),
        (
            "a reset of a stream it was not given",
            frame(RST_STREAM, 0, 99, &[0; 4]),
            "protocol",
        ),
        (
            "a stream of its own",
            frame(HEADERS, END_HEADERS, 2, STATUS_200),
            "protocol",
        ),
        (
            "a push",
            frame(5, END_HEADERS, CONTROL, &[0, 0, 0, 2, 0x82]),
            "protocol",
        ),
        (
            "an end to fields that never began",
            frame(CONTINUATION, END_HEADERS, CONTROL, &[]),
            "protocol",
        ),
        (
            "fields that are no HPACK",
            frame(HEADERS, END_HEADERS, CONTROL, &[0xff; 9]),
            "",
        ),
        (
            "no HTTP/2 at all",
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "frame with invalid size",
        ),
    ]
}

#[tokio::test]
async fn protocol_violations_end_their_own_tunnel_with_the_reason() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let lies = [out_of_bounds(), out_of_place()].concat();
    for (number, (what, bytes, reason)) in lies.iter().enumerate() {
        let mut evil = HostileTunnel::registered(&ground.site).await;
        // The gateway may close the connection before it has read everything.
        let _ = evil.send(bytes).await;
        evil.ended().await;
        let mut last = String::new();
        until(what, async || {
            let written = ground.site.gateway.written();
            let all = format!("{}{}", written.stdout, written.stderr);
            let ended: Vec<&str> = all
                .lines()
                .filter(|line| line.contains("evil disconnected"))
                .collect();
            last = ended.last().copied().unwrap_or_default().to_owned();
            ended.len() > number
        })
        .await;
        assert!(last.contains(reason), "{what}: {last}");
    }
    Box::pin(ground.bears(async {}, "disconnected")).await;
}

#[tokio::test]
async fn a_hello_without_end_is_cut_short() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::greeted(&ground.site).await;
    let head = frame(HEADERS, END_HEADERS, CONTROL, STATUS_200);
    let part = frame(DATA, 0, CONTROL, &[b'x'; 16_000]);
    // Within the window of the stream somewhat more than a line may have, and then the rest of a gibibyte.
    evil.send(&[head, part.repeat(4)].concat()).await.unwrap();
    evil.until(|frame| frame.kind == WINDOW_UPDATE && frame.stream == CONTROL)
        .await;
    evil.send(&part).await.unwrap();
    ground.says("longer than 65536 bytes").await;
    Box::pin(ground.bears(evil.flood(part.clone()), "longer than 65536 bytes")).await;
}

#[tokio::test]
async fn a_hello_that_never_comes_is_not_waited_for() {
    need!("curl");
    let mut ground = TestSetup::with("tunnel: { hello_timeout: 5s }").await;
    for answered in [false, true] {
        let mut evil = HostileTunnel::greeted(&ground.site).await;
        if answered {
            evil.send(&frame(HEADERS, END_HEADERS, CONTROL, STATUS_200))
                .await
                .unwrap();
        }
        Box::pin(ground.bears(evil.ended(), "no response to the hello within 5s")).await;
    }
}

/// Sends a thousand interim answers instead of an answer's head.
#[tokio::test]
async fn endless_interim_answers_to_a_hello_end_their_tunnel() {
    need!("curl");
    let mut ground = TestSetup::new().await;
    let evil = HostileTunnel::greeted(&ground.site).await;
    let flood = evil.flood(frame(HEADERS, END_HEADERS, CONTROL, EARLY));
    Box::pin(ground.bears(flood, "too many interim responses")).await;
}

/// Sends batches of frames on a new connection of a node for egress until the gateway ends it. Returns the payload of its GOAWAY.
async fn flood_egress(
    site: &GatewayProcess,
    node: &str,
    mut batch: impl FnMut() -> Vec<u8>,
) -> Vec<u8> {
    let mut wire = evil::egress(site, node).await;
    let flood = async {
        loop {
            // The answer to the ping shows that the batch was read.
            let all = [batch(), frame(PING, 0, 0, &[8; 8])].concat();
            send(&mut wire, &all).await.unwrap();
            loop {
                let frame = next(&mut wire).await.unwrap();
                match frame.kind {
                    GOAWAY => return frame.payload,
                    PING if frame.payload == [8; 8] => break,
                    _ => {}
                }
            }
        }
    };
    let goaway = timeout(PATIENCE, flood).await;
    goaway.expect("the flood is served without end")
}

/// Error code of RFC 9113, section 7.
const ENHANCE_YOUR_CALM: [u8; 4] = 11_u32.to_be_bytes();

#[tokio::test]
async fn floods_on_a_connection_for_egress_end_it_with_the_reason() {
    need!("curl");
    let rules = "egress: { rules: [{ to: { networks: [192.0.2.0/24] } }] }";
    let configuration = format!("{PATIENT}\n{rules}");
    let mut ground = Box::pin(TestSetup::with(&configuration)).await;
    let connect = fields(&[(":method", "CONNECT"), (":authority", "192.0.2.1:443")]);
    let mut stream = 1;
    let mut reset_streams = || {
        let mut one = || {
            let opened = frame(HEADERS, END_HEADERS, stream, &connect);
            let ended = frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]);
            stream += 2;
            [opened, ended].concat()
        };
        (0..100).flat_map(|_| one()).collect()
    };
    let pings = || frame(PING, 0, 0, &[7; 8]).repeat(100);
    let floods: [(&mut dyn FnMut() -> Vec<u8>, _); 3] = [
        (&mut { pings }, "PING"),
        (&mut || settings(&[]).repeat(100), "SETTINGS"),
        (&mut reset_streams, "RST_STREAM"),
    ];
    // The log lines of a node are throttled.
    for (node, (batch, frames)) in evil::NODES.into_iter().zip(floods) {
        let goaway = flood_egress(&ground.site, node, batch).await;
        assert_eq!(goaway[4..8], ENHANCE_YOUR_CALM, "{node}");
        let failed = format!("egress connections of {node} failed");
        let reason = format!("floods its tunnel with {frames}");
        let has_reason = |line: &str| line.contains(&failed) && line.ends_with(&reason);
        ground.site.gateway.line(&failed, has_reason).await;
        ground.serves().await;
    }
}
