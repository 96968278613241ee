//! The gateways to which one node port leads, tried in turn.
//!
//! The one that took the last connection is the first to be asked for the next: one that is away costs its share of
//! the bound once, and not each caller. One that takes connections and answers nothing is asked last for a while. A gateway at an address that is itself led away is none: the way to it would
//! come back here.

use crate::{
    metrics::RedirectorMetrics,
    state::{Nodes, nodes::Named},
};
use causeway_config::host_port;
use causeway_rt::resolve;
use causeway_tunnel::socket;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout_at},
};

/// How long a gateway that hangs is asked last.
const HUNG: Duration = Duration::from_secs(30);

/// Fronts of gateways, by `host:port`.
#[derive(Debug)]
pub(super) struct Gateways {
    all: Vec<String>,
    first: AtomicUsize,
    /// When those that hang were found to, by their places in the list.
    hung: Mutex<BTreeMap<usize, Instant>>,
}

/// A connection that a gateway has taken.
#[derive(Debug)]
pub(super) struct Dialled {
    pub(super) tcp: TcpStream,
    /// The place of the gateway in the list.
    pub(super) place: usize,
}

impl Gateways {
    /// These, which have been validated.
    pub(super) fn new(all: Vec<String>) -> Self {
        Self {
            all,
            first: AtomicUsize::new(0),
            hung: Mutex::default(),
        }
    }

    /// Whether they are these.
    pub(super) fn are(&self, all: &[String]) -> bool {
        self.all == all
    }

    /// Notes that the gateway at this place takes connections and answers nothing.
    pub(super) fn hangs(&self, place: usize) {
        let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        let before = hung.insert(place, Instant::now());
        drop(hung);
        if before.is_none_or(|since| since.elapsed() >= HUNG) {
            let gateway = self.all.get(place).map_or("", String::as_str);
            tracing::warn!(
                gateway,
                "a gateway takes connections and does not answer in time (timeouts.answer): others are asked before it"
            );
        }
    }

    /// Notes that the gateway at this place answers.
    pub(super) fn answers(&self, place: usize) {
        let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        hung.remove(&place);
    }

    /// The places in the order in which they are asked, but for those that have been `tried`.
    fn order(&self, tried: &[usize]) -> Vec<usize> {
        let first = self.first.load(Relaxed);
        let hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        let hangs = |place: &usize| hung.get(place).is_some_and(|at| at.elapsed() < HUNG);
        let ring = (0..self.all.len()).map(|next| (first + next) % self.all.len());
        let mut order: Vec<_> = ring.filter(|place| !tried.contains(place)).collect();
        order.sort_by_key(hangs);
        order
    }

    /// A connection to the first that takes one before `bound` has passed, of which each gets its share; to none of those that
    /// this client has `tried`.
    ///
    /// # Errors
    /// What each of them said.
    pub(super) async fn dial(
        &self,
        bound: Duration,
        tried: &[usize],
        (nodes, metrics): (&Nodes, &RedirectorMetrics),
    ) -> Result<Dialled, String> {
        let (deadline, order) = (Instant::now() + bound, self.order(tried));
        let mut said = Vec::new();
        for (asked, &place) in order.iter().enumerate() {
            let until = share(deadline, order.len() - asked);
            let gateway = &self.all[place];
            match one(gateway, until, nodes).await {
                Ok(tcp) => {
                    self.first.store(place, Relaxed);
                    return Ok(Dialled { tcp, place });
                }
                Err(why) => {
                    metrics.gateway_failed();
                    said.push(format!("{gateway}: {why}"));
                }
            }
        }
        Err(said.join("; "))
    }
}

/// When the next of so many has had its share of the time until the deadline.
fn share(deadline: Instant, of: usize) -> Instant {
    let left = deadline.saturating_duration_since(Instant::now());
    Instant::now() + left / u32::try_from(of).unwrap_or(u32::MAX)
}

/// A connection to one gateway, whose addresses are tried in turn.
async fn one(gateway: &str, until: Instant, nodes: &Nodes) -> Result<TcpStream, String> {
    let (host, port) = host_port(gateway)?;
    let addresses = match timeout_at(until, resolve(host, port)).await {
        Ok(found) => found.map_err(|error| error.to_string())?,
        Err(_) => return Err("not resolved in time".to_owned()),
    };
    let mut why = String::new();
    for (tried, address) in addresses.iter().enumerate() {
        why = match timeout_at(
            share(until, addresses.len() - tried),
            connect(*address, nodes),
        )
        .await
        {
            Ok(Ok(tcp)) => return Ok(tcp),
            Ok(Err(why)) => why,
            Err(_) => format!("{address} does not answer"),
        };
    }
    Err(why)
}

async fn connect(address: SocketAddr, nodes: &Nodes) -> Result<TcpStream, String> {
    if matches!(
        nodes.by_address(address.ip()),
        Named::Node(_) | Named::Pod(_)
    ) {
        return Err(format!(
            "{address} is the address of a node at the edge or a pod there, which leads back here"
        ));
    }
    let tcp = TcpStream::connect(address).await;
    let tcp = tcp.map_err(|error| format!("{address}: {error}"))?;
    socket::tune(&tcp);
    Ok(tcp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Node, NodesWriter};
    use causeway_certs::NodeName;
    use tokio::net::TcpListener;

    const BOUND: Duration = Duration::from_secs(5);

    async fn listening() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    #[tokio::test]
    async fn the_gateway_that_took_the_last_connection_is_asked_first_and_all_are_before_none_is_left()
     {
        let (gone, refusing) = listening().await;
        drop(gone);
        let (first, one) = listening().await;
        let (second, two) = listening().await;
        let gateways = Gateways::new(vec![refusing, one.clone(), two.clone()]);
        let (nodes, metrics) = (Nodes::default(), RedirectorMetrics::new());
        let dial = || gateways.dial(BOUND, &[], (&nodes, &metrics));
        let to = |dialled: Dialled| dialled.tcp.peer_addr().unwrap().to_string();
        assert_eq!(to(dial().await.unwrap()), one);
        assert_eq!(to(dial().await.unwrap()), one);
        let failed = "causeway_redirect_gateways_failed_total 1";
        assert!(
            metrics
                .encode(causeway_rt::Exposition::OpenMetrics)
                .contains(failed),
            "asked again"
        );
        drop(first);
        assert_eq!(to(dial().await.unwrap()), two);
        drop(second);
        let why = dial().await.unwrap_err();
        assert_eq!(why.matches("refused").count(), 3, "{why}");
        assert!(why.starts_with(&two), "{why}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_gateway_that_hangs_is_asked_last_until_it_answers_or_for_a_while() {
        let all = ["one:1", "two:1", "three:1"].map(str::to_owned);
        let gateways = Gateways::new(all.into());
        gateways.hangs(0);
        assert_eq!(gateways.order(&[]), [1, 2, 0]);
        assert_eq!(gateways.order(&[1]), [2, 0]);
        gateways.hangs(1);
        assert_eq!(gateways.order(&[]), [2, 0, 1]);
        gateways.answers(0);
        assert_eq!(gateways.order(&[]), [0, 2, 1]);
        tokio::time::advance(HUNG).await;
        assert_eq!(gateways.order(&[]), [0, 1, 2]);
    }

    #[tokio::test]
    async fn a_gateway_at_the_address_of_a_node_is_not_dialled() {
        let (listener, address) = listening().await;
        let writer = NodesWriter::default();
        let node = Node {
            addresses: vec!["127.0.0.1".parse().unwrap()],
            ..Node::default()
        };
        writer.put(NodeName::parse("edge-1").unwrap(), node);
        let gateways = Gateways::new(vec![address]);
        let metrics = RedirectorMetrics::new();
        let dialled = gateways
            .dial(BOUND, &[], (&writer.reader(), &metrics))
            .await;
        assert!(dialled.unwrap_err().contains("leads back here"));
        drop(listener);
    }
}
