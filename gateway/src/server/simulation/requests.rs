//! Requests of clients, and the log of what has happened to each of them.

use super::hosts::{EDGES, World, edge};
use crate::proxy::{Proxy, tests::send};
use causeway_rt::task::TaskGroup;
use http::{
    Method, Request, StatusCode,
    header::{HOST, SERVER},
    response,
};
use http_body_util::Full;
use std::time::Duration;
use tokio::time::sleep;
use tracing::debug_span;

/// Field that identifies a request.
pub(super) const REQUEST_ID: &str = "simulated-request";
/// Path of requests whose response is long. Gateways select the peer with the fewest streams, so without these streams a peer
/// with streams that hang would never be selected.
pub(super) const SESSION: &str = "/session";
/// Interval of the requests at one gateway. Each node gets one in a second.
const INTERVAL: Duration = Duration::from_millis(200);

/// Everything that has happened to one request.
#[derive(Clone, Debug)]
pub(super) struct RequestRecord {
    /// Gateway that the client has reached.
    pub(super) entry: usize,
    /// Node of the request.
    pub(super) edge: usize,
    /// Whether the request may be repeated.
    pub(super) is_safe: bool,
    pub(super) began: Duration,
    /// Time of the response's head, its status, and the server that it names.
    pub(super) head: Option<(Duration, StatusCode, String)>,
    /// Whether the response has ended, completely or not.
    pub(super) is_ended: bool,
    /// Senders and receivers of the forwarded request.
    pub(super) forwarded: Vec<(usize, usize)>,
    /// Edges that have received the request.
    pub(super) edges: Vec<usize>,
    /// Whether the gateway that the client has reached was killed.
    pub(super) is_lost: bool,
}

impl RequestRecord {
    /// Whether an edge has answered the request.
    pub(super) fn is_answered(&self) -> bool {
        matches!(&self.head, Some((_, StatusCode::OK, _)))
    }
}

/// All requests; the index is the identifier.
#[derive(Debug, Default)]
pub(super) struct RequestLog {
    pub(super) records: Vec<RequestRecord>,
}

impl RequestLog {
    fn begin(&mut self, entry: usize, edge: usize, is_safe: bool) -> usize {
        self.records.push(RequestRecord {
            entry,
            edge,
            is_safe,
            began: now(),
            head: None,
            is_ended: false,
            forwarded: Vec::new(),
            edges: Vec::new(),
            is_lost: false,
        });
        self.records.len() - 1
    }

    /// Whether a request has not ended, except for requests that were lost with their gateway.
    pub(super) fn has_open_requests(&self) -> bool {
        let mut records = self.records.iter();
        records.any(|record| !record.is_ended && !record.is_lost)
    }

    pub(super) fn forwarded(&mut self, id: usize, between: (usize, usize)) {
        self.records[id].forwarded.push(between);
    }

    pub(super) fn served(&mut self, id: usize, edge: usize) {
        self.records[id].edges.push(edge);
    }

    /// Records that a gateway was killed, with the open requests of its clients.
    pub(super) fn forget_entry(&mut self, entry: usize) {
        let records = self.records.iter_mut();
        for record in records.filter(|record| record.entry == entry && !record.is_ended) {
            record.is_lost = true;
        }
    }
}

fn now() -> Duration {
    turmoil::sim_elapsed().unwrap()
}

/// Sends requests to all nodes in turn. Does not wait for the responses, except at the end.
pub(super) async fn send_requests(entry: usize, world: &World, proxy: &Proxy) {
    let load = world.load();
    sleep(load.start.saturating_sub(now())).await;
    let tasks = TaskGroup::default();
    for number in 0.. {
        if now() >= load.end {
            break;
        }
        let (edge_number, is_safe) = (number % EDGES, number % 3 > 0);
        let path = if number % 4 > 0 { SESSION } else { "/" };
        let id = world.log().begin(entry, edge_number, is_safe);
        let (proxy, world) = (proxy.clone(), world.clone());
        tasks.spawn(debug_span!("request"), async move {
            let (method, body) = if is_safe {
                (Method::GET, Full::default())
            } else {
                (Method::POST, Full::from("a body"))
            };
            let request = Request::builder().method(method).uri(path);
            let request = request
                .header(HOST, edge(edge_number))
                .header(REQUEST_ID, id)
                .body(body);
            let record_head = |head: &response::Parts| {
                let server = head.headers.get(SERVER).map(|name| name.to_str().unwrap());
                let server = server.unwrap_or_default().to_owned();
                world.log().records[id].head = Some((now(), head.status, server));
            };
            // A response that breaks after its head is an error here.
            drop(Box::pin(send(&proxy, request.unwrap(), record_head)).await);
            world.log().records[id].is_ended = true;
        });
        sleep(INTERVAL).await;
    }
    tasks.wait_until_idle().await;
}
