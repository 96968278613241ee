//! Status of an edge: its tunnels, and the last failure.
//!
//! `control` writes, the admin listener and the program that embeds an edge read; a reader never waits. A row lives as long
//! as the tunnel that it is about: its guard removes it.

mod api_cache;

use crate::control::dial::GatewayAddr;
use causeway_tunnel::load::TunnelLoad;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::watch;

pub use api_cache::ApiCacheStatus;
use api_cache::ApiCacheStatusSlot;

/// Status of an edge, for `/status` and for the program that embeds it.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The node, as the certificate says.
    pub node: String,
    /// The version of this program.
    pub version: &'static str,
    /// Random for each edge process.
    pub instance: String,
    /// When the edge began, in milliseconds of the Unix epoch.
    pub started: u64,
    /// `connected`, `connecting` or `refused`.
    pub state: &'static str,
    /// The tunnels, oldest first.
    pub tunnels: Vec<TunnelStatus>,
    /// All addresses at which gateways are looked for.
    pub gateways: Vec<String>,
    /// How many of all gateways are reached, where these say how many there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reached: Option<ConnectedGatewaysStatus>,
    /// Last failure, as long as it has not been mended by a tunnel.
    pub trouble: Option<LastErrorStatus>,
    /// This node's certificate, once the edge runs.
    pub certificate: Option<CertificateStatus>,
    /// State of the API cache, if this edge has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_cache: Option<ApiCacheStatus>,
}

/// One tunnel.
#[derive(Clone, Debug, Serialize)]
pub struct TunnelStatus {
    /// Index of this tunnel among those of the edge, from 0.
    pub slot: u32,
    /// `standing` or `leaving`.
    pub state: &'static str,
    /// The gateway, as it was dialled.
    pub gateway: String,
    /// The address that its name led to; `null` behind a proxy.
    pub address: Option<SocketAddr>,
    /// Since when, in milliseconds of the Unix epoch.
    pub since: u64,
    /// The round trip of its TLS handshake, in microseconds.
    pub round_trip_us: u64,
    /// Streams that are open now, the control stream included.
    pub streams: usize,
    /// Streams opened so far.
    pub opened: u64,
    /// Payload bytes sent to the gateway.
    pub sent: u64,
    /// Payload bytes received from the gateway.
    pub received: u64,
    /// Bytes that came from the gateway and that no upstream has taken yet.
    pub unread: usize,
}

/// How far tunnels at every gateway are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectedGatewaysStatus {
    /// Gateways with a tunnel that do not drain.
    pub gateways: u32,
    /// How many there are, as they say.
    pub of: u32,
}

/// This node's certificate.
#[derive(Clone, Debug, Serialize)]
pub struct CertificateStatus {
    /// When it ends, in milliseconds of the Unix epoch.
    pub not_after: u64,
    /// When a new one is asked for, in milliseconds of the Unix epoch.
    pub renews_at: u64,
    /// Why it has not been renewed, where that was tried.
    pub trouble: Option<LastErrorStatus>,
}

/// Last failure.
#[derive(Clone, Debug, Serialize)]
pub struct LastErrorStatus {
    /// When, in milliseconds of the Unix epoch.
    pub at: u64,
    /// Description of the failure, for people.
    pub what: String,
    /// Whether a gateway refused this edge, as against being out of reach.
    pub refused: bool,
    /// When it is tried again at the latest, in milliseconds of the Unix epoch.
    pub retry_at: u64,
}

#[derive(Debug)]
struct Inner {
    node: String,
    instance: String,
    started: u64,
    next: AtomicU64,
    tunnels: Mutex<BTreeMap<u64, Tunnel>>,
    gateways: Mutex<Vec<String>>,
    reached: Mutex<Option<ConnectedGatewaysStatus>>,
    /// Last failures, by the gateway that each is about.
    troubles: Mutex<BTreeMap<String, LastErrorStatus>>,
    /// How the operator replaces an identity that gateways refuse.
    identity_hint: Mutex<Option<String>>,
    certificate: Mutex<Option<CertificateStatus>>,
    /// How many tunnels stand.
    standing: watch::Sender<usize>,
    reading: ApiCacheStatusSlot,
}

#[derive(Debug)]
struct Tunnel {
    slot: u32,
    state: &'static str,
    gateway: String,
    address: Option<SocketAddr>,
    since: u64,
    round_trip: Duration,
    load: Arc<TunnelLoad>,
}

/// Key of the failures that concern every gateway.
pub(crate) const ANY: &str = "";

/// Reader of the status.
#[derive(Clone, Debug)]
pub struct StatusReader(Arc<Inner>);

/// The writing end.
#[derive(Debug)]
pub(crate) struct StatusWriter(Arc<Inner>);

/// A tunnel that stands as long as this lives.
#[derive(Debug)]
pub(crate) struct TunnelSummary {
    shared: Arc<Inner>,
    id: u64,
}

/// Both ends of a new table.
pub(crate) fn table(node: &str, instance: &str) -> (StatusWriter, StatusReader) {
    let shared = Arc::new(Inner {
        node: node.to_owned(),
        instance: instance.to_owned(),
        started: now(),
        next: AtomicU64::new(0),
        tunnels: Mutex::default(),
        gateways: Mutex::default(),
        reached: Mutex::default(),
        troubles: Mutex::default(),
        identity_hint: Mutex::default(),
        certificate: Mutex::default(),
        standing: watch::Sender::default(),
        reading: ApiCacheStatusSlot::default(),
    });
    (StatusWriter(shared.clone()), StatusReader(shared))
}

/// Milliseconds of the Unix epoch.
fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn now() -> u64 {
    millis(SystemTime::now())
}

impl LastErrorStatus {
    fn new(what: &str, refused: bool, retry_in: Duration) -> Self {
        let at = now();
        let delay = u64::try_from(retry_in.as_millis()).unwrap_or(u64::MAX);
        Self {
            at,
            what: what.to_owned(),
            refused,
            retry_at: at.saturating_add(delay),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StatusWriter {
    /// When the edge began, in milliseconds of the Unix epoch.
    pub(crate) fn started(&self) -> u64 {
        self.0.started
    }

    /// A tunnel was registered.
    pub(crate) fn stands(
        &self,
        slot: u32,
        place: &GatewayAddr,
        round_trip: Duration,
        load: Arc<TunnelLoad>,
    ) -> TunnelSummary {
        let id = self.0.next.fetch_add(1, Relaxed);
        let tunnel = Tunnel {
            slot,
            state: "standing",
            gateway: place.gateway.clone(),
            address: place.address,
            since: now(),
            round_trip,
            load,
        };
        locked(&self.0.tunnels).insert(id, tunnel);
        self.0.standing.send_modify(|standing| *standing += 1);
        let mut troubles = locked(&self.0.troubles);
        troubles.remove(ANY);
        troubles.remove(&place.to_string());
        drop(troubles);
        *locked(&self.0.identity_hint) = None;
        TunnelSummary {
            shared: self.0.clone(),
            id,
        }
    }

    /// Something went wrong with this gateway, or ([`ANY`]) with all of them.
    pub(crate) fn trouble(&self, whose: &str, what: &str, refused: bool, retry_in: Duration) {
        let trouble = LastErrorStatus::new(what, refused, retry_in);
        locked(&self.0.troubles).insert(whose.to_owned(), trouble);
    }

    /// Nothing is wrong with this gateway any more, or it is none.
    pub(crate) fn mended(&self, whose: &str) {
        locked(&self.0.troubles).remove(whose);
    }

    /// Returns once a tunnel stands.
    pub(crate) async fn connected(&self) {
        let mut standing = self.0.standing.subscribe();
        // The sender lives as long as this.
        let _ = standing.wait_for(|standing| *standing > 0).await;
    }

    /// Sets, or with `None` removes, what the operator has to do about an identity that gateways refuse. Returns whether
    /// that has changed.
    pub(crate) fn identity_hint(&self, hint: Option<&str>) -> bool {
        let mut said = locked(&self.0.identity_hint);
        let changed = said.as_deref() != hint;
        *said = hint.map(ToOwned::to_owned);
        changed
    }

    /// The certificate, and when it is renewed.
    pub(crate) fn certificate(&self, not_after: SystemTime, renews_at: SystemTime) {
        *locked(&self.0.certificate) = Some(CertificateStatus {
            not_after: millis(not_after),
            renews_at: millis(renews_at),
            trouble: None,
        });
    }

    /// The certificate could not be renewed.
    pub(crate) fn not_renewed(&self, what: &str, refused: bool, retry_in: Duration) {
        if let Some(certificate) = &mut *locked(&self.0.certificate) {
            certificate.trouble = Some(LastErrorStatus::new(what, refused, retry_in));
        }
    }

    /// Sets the addresses at which gateways are looked for.
    pub(crate) fn gateways(&self, gateways: Vec<String>) {
        *locked(&self.0.gateways) = gateways;
    }

    /// So many gateways are reached, of as many as they say that there are.
    pub(crate) fn reached(&self, gateways: u32, of: Option<u32>) {
        *locked(&self.0.reached) = of.map(|of| ConnectedGatewaysStatus { gateways, of });
    }
}

impl TunnelSummary {
    /// The tunnel takes no new streams.
    pub(crate) fn leaves(&self) {
        if let Some(tunnel) = locked(&self.shared.tunnels).get_mut(&self.id) {
            tunnel.state = "leaving";
        }
    }
}

impl Drop for TunnelSummary {
    fn drop(&mut self) {
        locked(&self.shared.tunnels).remove(&self.id);
        self.shared.standing.send_modify(|standing| *standing -= 1);
    }
}

impl StatusReader {
    /// Returns the current status of the edge.
    pub fn status(&self) -> Status {
        let tunnels: Vec<_> = locked(&self.0.tunnels)
            .values()
            .map(Tunnel::status)
            .collect();
        let newest = |troubles: &BTreeMap<_, LastErrorStatus>| {
            let newest = troubles.values().max_by_key(|trouble| trouble.at);
            newest.cloned()
        };
        let mut trouble = newest(&locked(&self.0.troubles));
        if let (Some(trouble), Some(hint)) = (&mut trouble, &*locked(&self.0.identity_hint)) {
            trouble.what = format!("{}; {hint}", trouble.what);
        }
        let state = match &trouble {
            _ if tunnels.iter().any(|tunnel| tunnel.state == "standing") => "connected",
            // Another process has the node, though old streams go on here.
            Some(trouble) if trouble.refused => "refused",
            _ if !tunnels.is_empty() => "connected",
            _ => "connecting",
        };
        Status {
            node: self.0.node.clone(),
            version: env!("CARGO_PKG_VERSION"),
            instance: self.0.instance.clone(),
            started: self.0.started,
            state,
            tunnels,
            gateways: locked(&self.0.gateways).clone(),
            reached: *locked(&self.0.reached),
            trouble,
            certificate: locked(&self.0.certificate).clone(),
            api_cache: self.0.reading.status(),
        }
    }

    /// How many tunnels stand, whenever that changes.
    pub(crate) fn standing(&self) -> watch::Receiver<usize> {
        self.0.standing.subscribe()
    }

    /// Sets the function that reports the state of the API cache.
    pub(crate) fn reads(&self, status: Box<dyn Fn() -> ApiCacheStatus + Send + Sync>) {
        self.0.reading.begin(status);
    }
}

impl Tunnel {
    fn status(&self) -> TunnelStatus {
        TunnelStatus {
            slot: self.slot,
            state: self.state,
            gateway: self.gateway.clone(),
            address: self.address,
            since: self.since,
            round_trip_us: u64::try_from(self.round_trip.as_micros()).unwrap_or(u64::MAX),
            streams: self.load.streams(),
            opened: self.load.opened(),
            sent: self.load.sent(),
            received: self.load.received(),
            unread: self.load.unread(),
        }
    }
}
