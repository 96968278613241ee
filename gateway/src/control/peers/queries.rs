//! Queries of all other gateways: for the progress of a rotation, and for the nodes that do not know the revocations of gateways.

use super::message::PeerMessage;
use crate::{
    control::{
        ca_rotation::{PeerRotation, RotationProgress},
        gateway_revocation::{PeerRevocations, RevocationProgress},
    },
    state::directory::{Directory, Peer},
};
use causeway_tunnel::control_stream::ControlStreamError;
use futures_util::future::join_all;
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// Time limit of a gateway's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
enum QueryError {
    #[error("it did not answer within {ANSWER_TIMEOUT:?}")]
    TooSlow,
    #[error("its version {0} cannot answer the question; upgrade it")]
    TooOld(String),
    #[error("{0}")]
    Control(#[from] ControlStreamError),
}

/// Answer of a gateway, which arrives in one or several messages.
trait Answer: Default {
    /// Message that asks for the answer.
    const REQUEST: PeerMessage;

    /// Adds a message. Returns whether the answer is complete with it, or `None` if the message is no part of the answer.
    fn add(&mut self, message: PeerMessage) -> Option<bool>;
}

impl Answer for RotationProgress {
    const REQUEST: PeerMessage = PeerMessage::RotationRequest;

    fn add(&mut self, message: PeerMessage) -> Option<bool> {
        let PeerMessage::Rotation { part, is_last } = message else {
            return None;
        };
        self.merge(part);
        Some(is_last)
    }
}

impl Answer for RevocationProgress {
    const REQUEST: PeerMessage = PeerMessage::RevocationsRequest;

    fn add(&mut self, message: PeerMessage) -> Option<bool> {
        let PeerMessage::Revocations { part, is_last } = message else {
            return None;
        };
        self.merge(part);
        Some(is_last)
    }
}

/// Asks all connected gateways at once for the progress of a rotation. Returns their answers by address, together with the gateways
/// that cannot be asked.
pub(crate) async fn query_rotation(directory: &Directory) -> Vec<PeerRotation> {
    let peers = directory.peers();
    let answers = query_all(directory, &peers).await;
    let mut all: Vec<_> = peers
        .iter()
        .zip(answers)
        .map(|(peer, answer)| {
            let (progress, error) = match answer {
                Ok(progress) => (Some(progress), None),
                Err(error) => (None, Some(error.to_string())),
            };
            PeerRotation {
                address: peer.address.to_string(),
                progress,
                error,
            }
        })
        .collect();
    let is_connected = |instance: &str| peers.iter().any(|peer| peer.instance == instance);
    let unreachable = directory.addresses().unreachable(is_connected);
    all.extend(unreachable.into_iter().map(|unreachable| PeerRotation {
        address: unreachable.address.to_string(),
        progress: None,
        error: Some(unreachable.reason),
    }));
    all.sort_by(|one, two| one.address.cmp(&two.address));
    all
}

/// Asks all connected gateways at once for the nodes that do not know the revocations of gateways. Returns their answers by address.
pub(crate) async fn query_revocations(directory: &Directory) -> Vec<PeerRevocations> {
    let mut peers = Vec::clone(&directory.peers());
    peers.sort_by(|one, two| one.address.cmp(&two.address));
    // A node that connects later is not in the answer, and would count as informed.
    let nodes: Vec<_> = peers.iter().map(|peer| peer.node_names()).collect();
    let answers = query_all(directory, &peers).await;
    let all = peers.iter().zip(nodes).zip(answers);
    all.map(|((peer, nodes), answer)| PeerRevocations {
        address: peer.address.to_string(),
        nodes,
        progress: answer.map_err(|error| error.to_string()),
    })
    .collect()
}

/// Asks these gateways at once. Returns their answers in the same order.
async fn query_all<T: Answer>(
    directory: &Directory,
    peers: &[Arc<Peer>],
) -> Vec<Result<T, QueryError>> {
    let queries = peers.iter().map(async |peer| {
        let answer = timeout(ANSWER_TIMEOUT, query_peer(directory, peer)).await;
        answer.map_err(|_| QueryError::TooSlow).flatten()
    });
    join_all(queries).await
}

/// Asks one gateway. Asks again if a newer connection has replaced the one that was used: a step of a rotation itself makes
/// gateways connect again.
async fn query_peer<T: Answer>(directory: &Directory, peer: &Arc<Peer>) -> Result<T, QueryError> {
    let mut peer = peer.clone();
    loop {
        let answer = request_answer(&peer).await;
        let peers = directory.peers();
        let current = peers.iter().find(|it| it.instance == peer.instance);
        match current {
            Some(newer) if answer.is_err() && !Arc::ptr_eq(newer, &peer) => peer = newer.clone(),
            _ => return answer,
        }
    }
}

/// Asks one gateway, on a stream of its own.
async fn request_answer<T: Answer>(peer: &Peer) -> Result<T, QueryError> {
    let stream = peer.control().open_control_stream().await;
    let mut control = stream.map_err(ControlStreamError::from)?;
    control.send(&T::REQUEST).await?;
    let mut answer = T::default();
    loop {
        match answer.add(control.receive().await?) {
            Some(true) => return Ok(answer),
            Some(false) => {}
            None => return Err(QueryError::TooOld(peer.version.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::feed::own_hello, *};
    use crate::{
        control::{ca_rotation::rotation_progress, peers::NodeFeed, tests::world::new_ca},
        state::Registry,
        worker::Workers,
    };
    use causeway_certs::LiveCa;
    use causeway_rt::{socket::CountedIo, task::TaskGroup};
    use causeway_tunnel::{
        control_stream::ControlStream,
        edge_side::{self, EdgeSideConfig, IncomingStream},
        gateway_side::{self, GatewaySideConfig},
    };
    use futures_util::future::{BoxFuture, pending};
    use tracing::info_span;

    /// Adds a peer that serves each control stream by this function.
    async fn add_peer(
        (directory, tasks): (&Directory, &TaskGroup),
        name: &str,
        serve: impl Fn(ControlStream) -> BoxFuture<'static, ()> + Send + 'static,
    ) {
        let (near, far) = tokio::io::duplex(1 << 16);
        tasks.spawn(info_span!("peer"), async move {
            let io = CountedIo::new(far);
            let traffic = io.traffic();
            let config = EdgeSideConfig::default();
            let mut connection = edge_side::accept(io, traffic, config).await.unwrap();
            let streams = TaskGroup::default();
            while let Ok(IncomingStream::Control(control)) = connection.next_stream().await {
                streams.spawn(info_span!("control"), serve(*control));
            }
        });
        let io = CountedIo::new(near);
        let (traffic, config) = (io.traffic(), GatewaySideConfig::default());
        let (tunnel, driver) = gateway_side::connect(io, traffic, config).await.unwrap();
        tasks.spawn(info_span!("driver"), async move {
            driver.run().await;
        });
        let identity = (name.to_owned(), "0.9".to_owned());
        assert!(directory.add(&Arc::new(Peer::new(name, identity, tunnel, 1))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_gateway_that_connects_again_meanwhile_is_asked_again() {
        let (directory, tasks) = (Directory::default(), TaskGroup::default());
        let feed = NodeFeed {
            registry: Registry::new(&Workers::on_current_runtime()),
            ca: LiveCa::new(new_ca("causeway.test")),
            revocation: None,
            instance: "it".to_owned(),
            hello_timeout: ANSWER_TIMEOUT,
        };
        add_peer((&directory, &tasks), "it", |stream| {
            Box::pin(async move {
                let _open = stream;
                pending::<()>().await;
            })
        })
        .await;
        let asked = directory.peers()[0].clone();
        let connect_again = async {
            add_peer((&directory, &tasks), "it", move |stream| {
                Box::pin(feed.clone().run(stream))
            })
            .await;
            asked.control().close();
        };
        let (answers, ()) = tokio::join!(query_rotation(&directory), connect_again);
        assert_eq!(answers[0].error, None);
        assert!(answers[0].progress.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn each_gateway_answers_or_is_named_with_the_reason() {
        let (directory, tasks) = (Directory::default(), TaskGroup::default());
        let feed = NodeFeed {
            registry: Registry::new(&Workers::on_current_runtime()),
            ca: LiveCa::new(new_ca("causeway.test").prepare().unwrap().0),
            revocation: None,
            instance: "new".to_owned(),
            hello_timeout: ANSWER_TIMEOUT,
        };
        let expected = feed.clone();
        let at = (&directory, &tasks);
        add_peer(at, "1-new", move |stream| {
            Box::pin(feed.clone().run(stream))
        })
        .await;
        add_peer(at, "2-silent", |stream| {
            Box::pin(async move {
                let _open = stream;
                pending::<()>().await;
            })
        })
        .await;
        add_peer(at, "3-old", |mut stream| {
            Box::pin(async move {
                let _: PeerMessage = stream.receive().await.unwrap();
                let hello = PeerMessage::Hello(own_hello("old", false));
                stream.send(&hello).await.unwrap();
                pending::<()>().await;
            })
        })
        .await;
        let [new, silent, old] = &query_rotation(&directory).await[..] else {
            panic!("not three gateways");
        };
        let progress = rotation_progress(&expected.ca, &expected.registry);
        assert_eq!((&new.progress, &new.error), (&Some(progress), &None));
        for (answer, expected) in [(silent, "within 2s"), (old, "version 0.9")] {
            let error = answer.error.as_deref().unwrap();
            assert!(error.contains(expected), "{error}");
            assert_eq!(answer.progress, None);
        }
    }
}
