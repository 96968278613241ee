//! Fixtures for tests of the control plane: a gateway (`world`), and edges that send the messages of a test.

pub(crate) mod world;

use causeway_rt::{socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    TunnelEnd,
    control_stream::{ControlStream, EdgeHello, GatewayMessage, GoAway},
    edge_side::{self, IncomingStream, StreamRequest},
    wire,
};
use std::time::Duration;
use tokio::{
    net::TcpStream,
    sync::{mpsc, oneshot, watch},
    time::timeout,
};
use tokio_rustls::client::TlsStream;
use tracing::info_span;

/// Timeout that is longer than any wait under test.
pub(crate) const LONG: Duration = Duration::from_mins(2);
pub(crate) const SHORT: Duration = Duration::from_secs(3);

pub(crate) fn welcome(instance: &str, slot: u32) -> EdgeHello {
    EdgeHello {
        protocol: wire::VERSION,
        version: "1.2.3".to_owned(),
        instance: instance.to_owned(),
        slot,
        ports: vec![9100],
        ..EdgeHello::default()
    }
}

/// Returns the reason and detail of a message that makes the edge disconnect.
pub(crate) fn dismissal(line: &GatewayMessage) -> Option<(GoAway, &str)> {
    match line {
        GatewayMessage::Dismiss {
            why,
            detail,
            retry_after_ms,
        } => {
            assert!(*retry_after_ms >= 40_000, "a refused edge dials again late");
            Some((*why, detail))
        }
        _ => None,
    }
}

/// The edge's end of a tunnel.
pub(crate) struct FakeEdge {
    pub(crate) hello: GatewayMessage,
    pub(crate) control: ControlStream,
    pub(crate) streams: mpsc::UnboundedReceiver<Box<StreamRequest>>,
    /// Whether the edge neither reads nor answers.
    pub(crate) hushed: watch::Sender<bool>,
    over: oneshot::Receiver<TunnelEnd>,
    /// The task that drives the connection; dropping it cuts the connection.
    _driver: TaskGroup,
}

impl FakeEdge {
    /// Returns nothing if the gateway closes the connection before it has sent its hello.
    pub(super) async fn greeted(io: TlsStream<CountedIo<TcpStream>>) -> Option<Self> {
        let (traffic, config) = (
            io.get_ref().0.traffic(),
            edge_side::EdgeSideConfig::default(),
        );
        let mut server = edge_side::accept(io, traffic, config).await.ok()?;
        let mut control = match server.next_stream().await.ok()? {
            IncomingStream::Control(control) => control,
            IncomingStream::Stream(_) => panic!("the first stream is the control stream"),
        };
        let (stream, streams) = mpsc::unbounded_channel();
        let (tell, over) = oneshot::channel();
        let (hushed, mut hush) = watch::channel(false);
        let driver = TaskGroup::default();
        driver.spawn(info_span!("edge"), async move {
            let ended = loop {
                let Ok(_) = hush.wait_for(|hushed| !hushed).await else {
                    return;
                };
                let next = tokio::select! {
                    next = server.next_stream() => next,
                    Ok(()) = hush.changed() => continue,
                };
                match next {
                    Ok(IncomingStream::Stream(asked)) => drop(stream.send(asked)),
                    Ok(IncomingStream::Control(_)) => {}
                    Err(ended) => break ended,
                }
            };
            let _ = tell.send(ended);
        });
        let hello = timeout(LONG, control.receive()).await.unwrap().ok()?;
        Some(Self {
            hello,
            control: *control,
            streams,
            hushed,
            over,
            _driver: driver,
        })
    }

    /// Returns the next message from the gateway.
    pub(crate) async fn hear(&mut self) -> GatewayMessage {
        timeout(LONG, self.control.receive())
            .await
            .unwrap()
            .unwrap()
    }

    /// Whether the gateway has closed the connection.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.over.try_recv().is_ok() || self.over.is_terminated()
    }

    /// Waits until the gateway has closed the connection.
    pub(crate) async fn ended(self) -> TunnelEnd {
        timeout(LONG, self.over).await.unwrap().unwrap()
    }
}
