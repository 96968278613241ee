//! An edge with a valid certificate that uses more of the gateway than its share: by more bytes than its windows allow, by frames
//! of single bytes, by many tunnels. With `CAUSEWAY_TEST_FULL=1` the test measures the
//! gateway's memory.

use crate::world::{
    app::App,
    client::whole,
    evil::{self, HostileTunnel},
    frames::{ACK, DATA, END_HEADERS, HEADERS, PING, RST_STREAM, STATUS_200, frame},
    process::{GatewayProcess, OPEN, Process},
    tool::full,
};
use hyper::Request;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
};

/// Allowed growth of the gateway's memory, in bytes: four times the budget of one tunnel, and as much again.
const GROWTH: usize = 8 * BUDGET;
const BUDGET: usize = 16 << 20;

/// More than the client of a stream takes, and any window of its stream.
const EXCESS: usize = 4 << 20;
/// The window of a new stream. Single bytes on sixteen streams take twice the allowed growth if each takes 256 bytes of memory.
const WINDOW: usize = 65_535;
/// Code of the reset of a stream whose window is exceeded (RFC 9113 section 7).
const FLOW_CONTROL_ERROR: [u8; 4] = [0, 0, 0, 3];

/// An answer of this many bytes.
fn answer(stream: u32, bytes: usize) -> Vec<u8> {
    let part = [0; 16 << 10];
    let head = frame(HEADERS, END_HEADERS, stream, STATUS_200);
    let body = frame(DATA, 0, stream, &part).repeat(bytes / part.len());
    [head, body].concat()
}

struct TestSetup {
    site: GatewayProcess,
    before: usize,
    _good: Process,
    _app: App,
}

impl TestSetup {
    async fn new() -> Self {
        // The hostile edge answers no PING, and must not be ended for that.
        let configuration = format!(
            "{OPEN}\ntunnel: {{ memory: {BUDGET}, handshake_timeout: 10m, hello_timeout: 20s, ping_timeout: 10m }}"
        );
        let site = GatewayProcess::with_listeners(&configuration).await;
        let site = site.restart(evil::enrol).await;
        let app = App::saying("it").await;
        let ground = Self {
            before: site.gateway.usage().peak,
            _good: site.join("edge-1", app.port()).await,
            _app: app,
            site,
        };
        ground.serves().await;
        ground
    }

    /// Checks that a request to another node is answered.
    async fn serves(&self) {
        let request = Request::get("http://edge-1:9100/").body(whole("")).unwrap();
        let answer = self.site.nobody().try_send(request).await.unwrap();
        assert_eq!(answer.text(), "it");
    }

    /// Clients as below, and the streams that the gateway opens for them.
    async fn deaf_clients(
        &self,
        evil: &mut HostileTunnel,
        count: usize,
    ) -> (Vec<TcpStream>, Vec<u32>) {
        let (mut clients, mut streams) = (Vec::new(), Vec::new());
        for _ in 0..count {
            clients.push(self.deaf_client().await);
            streams.push(evil.stream().await);
        }
        (clients, streams)
    }

    /// A client of the hostile node that never reads, and whose system buffers little for it.
    async fn deaf_client(&self) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4 << 10).unwrap();
        let mut wire = socket
            .connect(self.site.listener.parse().unwrap())
            .await
            .unwrap();
        let head = format!("GET / HTTP/1.1\r\nHost: {}:9100\r\n\r\n", evil::NODE);
        wire.write_all(head.as_bytes()).await.unwrap();
        wire
    }

    /// Checks that the gateway has ended a tunnel for this reason and works as before.
    async fn is_rid_of_it(&mut self, reason: &str) {
        let ended = |line: &str| line.contains(evil::NODE) && line.contains(reason);
        self.site.gateway.line(reason, ended).await;
        self.works_as_before().await;
    }

    /// Checks that the gateway answers requests and has not grown beyond its limit.
    async fn works_as_before(&mut self) {
        self.serves().await;
        let grown = self.site.gateway.usage().peak.saturating_sub(self.before);
        assert!(!full() || grown < GROWTH, "{} MiB", grown >> 20);
    }
}

#[tokio::test]
async fn an_edge_that_exceeds_its_windows_loses_the_streams() {
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (_clients, streams) = ground.deaf_clients(&mut evil, 64).await;
    let first = streams[0];
    for stream in streams {
        // Too many bytes for streams that are reset end the tunnel as well.
        if evil.send(&answer(stream, EXCESS)).await.is_err() {
            break;
        }
    }
    let reset = evil
        .until(|frame| frame.kind == RST_STREAM && frame.stream == first)
        .await;
    assert_eq!(reset.payload, FLOW_CONTROL_ERROR);
    ground.works_as_before().await;
}

#[tokio::test]
async fn unread_single_bytes_cost_little_more_than_their_number() {
    let mut ground = TestSetup::new().await;
    let mut evil = HostileTunnel::registered(&ground.site).await;
    let (_clients, streams) = ground.deaf_clients(&mut evil, 16).await;
    for stream in streams {
        let bytes = frame(DATA, 0, stream, b"x").repeat(WINDOW);
        evil.send(&[answer(stream, 0), bytes].concat())
            .await
            .unwrap();
    }
    // The answer shows that the gateway has read all of it and keeps the tunnel.
    evil.send(&frame(PING, 0, 0, &[9; 8])).await.unwrap();
    evil.until(|frame| frame.kind == PING && frame.flags == ACK && frame.payload == [9; 8])
        .await;
    ground.works_as_before().await;
}

#[tokio::test]
async fn a_node_has_no_more_tunnels_than_it_needs() {
    let mut ground = TestSetup::new().await;
    let mut tunnels = Vec::new();
    for slot in 0..causeway_tunnel::wire::MAX_TUNNELS_PER_EDGE {
        tunnels.push(HostileTunnel::registered_as(&ground.site, slot).await);
    }
    let one_more = HostileTunnel::greeted(&ground.site).await;
    one_more.welcome(u32::MAX).await.ended().await;
    ground
        .is_rid_of_it("reached its maximum number of tunnels")
        .await;
    // A slot that is used again is no further tunnel.
    drop(HostileTunnel::registered_as(&ground.site, 0).await);
}
