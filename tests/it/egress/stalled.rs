//! Streams whose reader stops, beside others on the same connection of the edge.

use super::{join, proxied, world};
use crate::world::{
    gateway::loopback,
    transfer::{TransferServer, receive, send},
    until,
};
use serde_json::json;
use socket2::SockRef;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// More bytes than the windows and the buffers on the path of one stream hold.
const STALLED: usize = 64_000_000;
/// Bytes of a transfer in each direction beside the stalled streams, and number of the transfers.
const LIVE: usize = 4_000_000;
const LIVE_COUNT: usize = 8;

/// Stream one of whose ends writes while the other one does not read.
struct StalledStream {
    reader: TcpStream,
    written: Arc<AtomicUsize>,
    writing: JoinSet<io::Result<Vec<u8>>>,
}

impl StalledStream {
    fn new(reader: TcpStream, writer: TcpStream) -> Self {
        // Otherwise the system alone could buffer all bytes.
        SockRef::from(&reader)
            .set_recv_buffer_size(64 << 10)
            .unwrap();
        let written = Arc::<AtomicUsize>::default();
        let counter = written.clone();
        let mut writing = JoinSet::new();
        writing.spawn(async move { send(writer, (STALLED, 3), &counter).await });
        Self {
            reader,
            written,
            writing,
        }
    }

    fn written(&self) -> usize {
        self.written.load(Relaxed)
    }

    /// Reads all bytes, and asserts that they arrive unchanged.
    async fn finish(mut self) {
        let received = receive(&mut self.reader).await.unwrap();
        let sent = self.writing.join_next().await.unwrap().unwrap();
        assert_eq!(received, (STALLED, sent.unwrap()));
    }
}

#[tokio::test]
async fn stalled_streams_are_not_buffered_whole_and_delay_no_other_stream() {
    let world = world(json!({ "rules": [{ "to": { "networks": ["127.0.0.1"] } }] })).await;
    let edge = join(&world, "edge-1", &[]).await;
    let destination = TcpListener::bind(loopback()).await.unwrap();
    let target = destination.local_addr().unwrap().to_string();
    let open = async || {
        let (program, head) = proxied(&edge, &target).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        (program, destination.accept().await.unwrap().0)
    };
    let (program, accepted) = open().await;
    let download = StalledStream::new(program, accepted);
    let (program, accepted) = open().await;
    let upload = StalledStream::new(accepted, program);
    let move_live = async || {
        let server = TransferServer::of(LIVE).await;
        let (wire, _) = proxied(&edge, &server.address.to_string()).await;
        server.transfer(wire).await;
    };
    let written = || (download.written(), upload.written());
    until("both streams are stalled", async || {
        let before = written();
        move_live().await;
        before.0 > 0 && before.1 > 0 && written() == before
    })
    .await;
    let mut count = 0;
    until("the other streams are served", async || {
        move_live().await;
        count += 1;
        count == LIVE_COUNT
    })
    .await;
    let (down, up) = written();
    assert!(down < STALLED, "the whole download is buffered");
    assert!(up < STALLED, "the whole upload is buffered");
    let log = world.log().text();
    let connections = log.matches("egress uses this gateway").count();
    assert_eq!(connections, 1, "the streams share a connection");
    download.finish().await;
    upload.finish().await;
}
