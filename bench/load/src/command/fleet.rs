//! Many light edges in one process: real TLS with a certificate each, real HTTP/2, the real hello.
//!
//! 1. All dial, some at a time, and register.
//! 2. Each answers every stream. An edge whose tunnel ends dials again, with the backoff of an edge.
//! 3. When all are registered the report contains it; after each loss it contains the time until they are back.
//!
//! Light means: one tunnel for each node, no policy, no app, no renewal, no second tunnel for bulk.

mod node;
mod roll;
mod storm;

use super::mint;
use crate::{cli, files, report, stop::Stop};
use bytes::Bytes;
use causeway_rt::task::TaskGroup;
use node::Node;
use roll::Roll;
use serde_json::json;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::sync::{Semaphore, mpsc};
use tracing::Span;

/// The body of every answer.
const BODY: &[u8] = &[b'.'; 1024];

/// State that all nodes share.
struct Fleet {
    /// Tunnel ports. Each node has a tunnel to one of them.
    gateways: Vec<SocketAddr>,
    body: Bytes,
    roll: Roll,
    /// Number of simultaneous dials until each edge has been registered once.
    first: Semaphore,
    /// One task for each open stream.
    streams: TaskGroup,
    /// Random: a gateway distinguishes processes by it.
    instance: String,
}

/// Runs the fleet until it is asked to stop, or the storm until its time is over.
pub(crate) async fn run(asked: cli::Fleet, stop: Stop) -> anyhow::Result<()> {
    let identities = mint::read(&asked.identities, (asked.skip, asked.nodes), asked.resume)?;
    let count = identities.len();
    let (told, changes) = mpsc::unbounded_channel();
    let fleet = Arc::new(Fleet {
        gateways: asked.gateways.clone(),
        body: Bytes::from_static(BODY),
        roll: Roll::new(told),
        first: Semaphore::new(asked.at_once),
        streams: TaskGroup::default(),
        instance: format!("{:032x}", rand::random::<u128>()),
    });
    if let Some(lasting) = asked.lasting {
        files::enough(asked.clients)?;
        return storm::run(&fleet, identities, &asked, lasting, &stop.token).await;
    }
    files::enough(count)?;
    report::say(&json!({"event": "ready", "nodes": count}));
    let nodes = TaskGroup::new(&stop.token);
    for (number, identity) in identities.into_iter().enumerate() {
        let node = Node::new(identity, fleet.clone(), number);
        nodes.spawn(Span::none(), Box::pin(node.live()));
    }
    stop.token
        .run_until_cancelled(roll::watch(&fleet.roll, changes, count))
        .await;
    nodes.drain(Duration::ZERO).await;
    report::say(&json!({"event": "end", "counts": fleet.roll.counts()}));
    Ok(())
}
