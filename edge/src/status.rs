//! Status of an edge: its tunnels, and the last failure.
//!
//! `control` writes the status. The admin listener and the program that embeds an edge read it, and a reader never waits. The
//! guard of a tunnel removes the tunnel's row when the tunnel ends.

mod egress;
mod heartbeat;

use crate::control::dial::GatewayAddr;
use causeway_tunnel::load::TunnelLoad;
pub use egress::{EgressErrorStatus, EgressListenerStatus, EgressStatus};
pub use heartbeat::HeartbeatStatus;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::watch;

/// Status of an edge, for `/status` and for the program that embeds it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Status {
    /// Name of the node in its certificate.
    pub node: String,
    /// Version of this program.
    pub version: &'static str,
    /// Random identifier of the edge process.
    pub instance: String,
    /// Start time of the edge, in milliseconds since the Unix epoch.
    pub started: u64,
    /// `connected`, `connecting` or `refused`.
    pub state: &'static str,
    /// Tunnels, oldest first.
    pub tunnels: Vec<TunnelStatus>,
    /// Addresses of the gateways that the edge dials.
    pub gateways: Vec<String>,
    /// Number of connected gateways and of all gateways; absent if no gateway announces the number of all, unless `tunnels.gateways` is a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reached: Option<ConnectedGatewaysStatus>,
    /// Last failure; absent once a tunnel has been opened after it.
    pub trouble: Option<LastErrorStatus>,
    /// Certificate of this node; absent until the edge runs.
    pub certificate: Option<CertificateStatus>,
    /// State of the API cache; absent if it is not configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_cache: Option<ApiCacheStatus>,
    /// State of egress; absent if it is not configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressStatus>,
    /// State of delegated heartbeats, if they are configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<HeartbeatStatus>,
}

/// A tunnel.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TunnelStatus {
    /// Number of the tunnel's slot, from 0.
    pub slot: u32,
    /// `active` or `draining`.
    pub state: &'static str,
    /// Address of the gateway as configured or announced (`host:port`).
    pub gateway: String,
    /// IP address and port that were dialled; `null` behind a proxy.
    pub address: Option<SocketAddr>,
    /// Time at which the tunnel was registered, in milliseconds since the Unix epoch.
    pub since: u64,
    /// Round-trip time of the TLS handshake, in microseconds.
    pub round_trip_us: u64,
    /// Number of open streams, with the control stream.
    pub streams: usize,
    /// Number of streams opened so far.
    pub opened: u64,
    /// Payload bytes sent to the gateway.
    pub sent: u64,
    /// Payload bytes received from the gateway.
    pub received: u64,
    /// Bytes received from the gateway that no upstream has accepted yet.
    pub unread: usize,
}

/// Number of gateways that have a tunnel of this edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ConnectedGatewaysStatus {
    /// Gateways that have a tunnel of this edge and do not drain.
    pub gateways: u32,
    /// Number of gateways, as they announce it. If no gateway announces it and `tunnels.gateways` is a number: number of addresses, without those that lead to a gateway with a tunnel through another address.
    pub of: u32,
    /// Number of gateways that the edge wants, if `tunnels.gateways` is a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<u32>,
}

/// Certificate of this node.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CertificateStatus {
    /// Expiry time, in milliseconds since the Unix epoch.
    pub not_after: u64,
    /// Time of the next renewal, in milliseconds since the Unix epoch.
    pub renews_at: u64,
    /// Error of the last attempt to renew it, if that failed.
    pub trouble: Option<LastErrorStatus>,
}

/// Last failure.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LastErrorStatus {
    /// Time of the failure, in milliseconds since the Unix epoch.
    pub at: u64,
    /// Description of the failure in plain English.
    pub what: String,
    /// Whether a gateway refused this edge; false if no gateway was reachable.
    pub refused: bool,
    /// Latest time of the next attempt, in milliseconds since the Unix epoch.
    pub retry_at: u64,
}

#[derive(Debug)]
struct Inner {
    node: String,
    instance: String,
    started: u64,
    next_tunnel_id: AtomicU64,
    table: watch::Sender<Table>,
    /// Number of open tunnels.
    open_tunnels: watch::Sender<usize>,
    api_cache: ApiCacheStatusSlot,
}

#[derive(Debug, Default)]
struct Table {
    tunnels: BTreeMap<u64, Tunnel>,
    gateways: Vec<String>,
    /// Number of connected gateways.
    connected_gateways: u32,
    /// Number of gateways that they announce.
    announced_gateways: Option<u32>,
    /// Configured number of gateways, and the number of known addresses.
    wanted_gateways: Option<(u32, u32)>,
    /// Last failures, by gateway.
    errors: BTreeMap<String, LastErrorStatus>,
    /// Instruction for the operator to replace an identity that gateways refuse.
    identity_hint: Option<String>,
    certificate: Option<CertificateStatus>,
    egress: Option<EgressStatus>,
    heartbeat: Option<HeartbeatStatus>,
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
pub(crate) const ANY_GATEWAY: &str = "";

/// Reader of the status.
#[derive(Clone, Debug)]
pub struct StatusReader(Arc<Inner>);

/// Writer of the status.
#[derive(Debug)]
pub(crate) struct StatusWriter(Arc<Inner>);

/// Status row of an open tunnel, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct TunnelSummary {
    shared: Arc<Inner>,
    id: u64,
}

/// Creates the writer and the reader of a new status.
pub(crate) fn status_channel(node: &str, instance: &str) -> (StatusWriter, StatusReader) {
    let shared = Arc::new(Inner {
        node: node.to_owned(),
        instance: instance.to_owned(),
        started: now(),
        next_tunnel_id: AtomicU64::new(0),
        table: watch::Sender::default(),
        open_tunnels: watch::Sender::default(),
        api_cache: ApiCacheStatusSlot::default(),
    });
    (StatusWriter(shared.clone()), StatusReader(shared))
}

/// Returns the time in milliseconds since the Unix epoch.
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

impl StatusWriter {
    /// Returns the start time of the edge, in milliseconds since the Unix epoch.
    pub(crate) fn started(&self) -> u64 {
        self.0.started
    }

    /// Adds a registered tunnel, and removes the errors that it has resolved.
    pub(crate) fn add_tunnel(
        &self,
        slot: u32,
        gateway_addr: &GatewayAddr,
        round_trip: Duration,
        load: Arc<TunnelLoad>,
    ) -> TunnelSummary {
        let id = self.0.next_tunnel_id.fetch_add(1, Relaxed);
        let tunnel = Tunnel {
            slot,
            state: "active",
            gateway: gateway_addr.gateway.clone(),
            address: gateway_addr.address,
            since: now(),
            round_trip,
            load,
        };
        self.change(|table| {
            table.tunnels.insert(id, tunnel);
            table.errors.remove(ANY_GATEWAY);
            table.errors.remove(&gateway_addr.to_string());
            table.identity_hint = None;
        });
        self.0.open_tunnels.send_modify(|count| *count += 1);
        TunnelSummary {
            shared: self.0.clone(),
            id,
        }
    }

    /// Sets the last failure of this gateway, or of all gateways ([`ANY_GATEWAY`]).
    pub(crate) fn set_error(&self, gateway: &str, what: &str, refused: bool, retry_in: Duration) {
        let error = LastErrorStatus::new(what, refused, retry_in);
        self.change(|table| {
            table.errors.insert(gateway.to_owned(), error);
        });
    }

    /// Removes the failure of this gateway.
    pub(crate) fn clear_error(&self, gateway: &str) {
        self.change(|table| {
            table.errors.remove(gateway);
        });
    }

    /// Waits until a tunnel is open.
    pub(crate) async fn wait_until_connected(&self) {
        let mut open_tunnels = self.0.open_tunnels.subscribe();
        // The sender lives at least as long as this task.
        let _ = open_tunnels.wait_for(|count| *count > 0).await;
    }

    /// Sets the instruction for the operator about an identity that gateways refuse, or removes it with `None`. Returns
    /// whether that is a change.
    pub(crate) fn set_identity_hint(&self, hint: Option<&str>) -> bool {
        self.0.table.send_if_modified(|table| {
            let is_changed = table.identity_hint.as_deref() != hint;
            table.identity_hint = hint.map(ToOwned::to_owned);
            is_changed
        })
    }

    /// Sets the expiry and the renewal time of the certificate.
    pub(crate) fn set_certificate(&self, not_after: SystemTime, renews_at: SystemTime) {
        self.change(|table| {
            table.certificate = Some(CertificateStatus {
                not_after: millis(not_after),
                renews_at: millis(renews_at),
                trouble: None,
            });
        });
    }

    /// Records that the certificate could not be renewed.
    pub(crate) fn set_renewal_error(&self, what: &str, refused: bool, retry_in: Duration) {
        self.change(|table| {
            if let Some(certificate) = &mut table.certificate {
                certificate.trouble = Some(LastErrorStatus::new(what, refused, retry_in));
            }
        });
    }

    /// Changes the state of delegated heartbeats.
    pub(crate) fn heartbeat(&self, change: impl FnOnce(&mut HeartbeatStatus)) {
        self.change(|table| change(table.heartbeat.get_or_insert_default()));
    }

    /// Sets the addresses of the gateways that the edge dials.
    pub(crate) fn set_gateways(&self, gateways: Vec<String>) {
        self.change(|table| table.gateways = gateways);
    }

    /// Sets the number of connected gateways, and the number of gateways that exist, if they announce it.
    pub(crate) fn set_connected_gateways(&self, gateways: u32, of: Option<u32>) {
        self.change(|table| {
            table.connected_gateways = gateways;
            table.announced_gateways = of;
        });
    }

    /// Sets the number of gateways that the edge wants, if a number is configured, and the number of addresses that may lead to
    /// different gateways.
    pub(crate) fn set_wanted_gateways(&self, wanted: Option<u32>, addresses: usize) {
        let addresses = u32::try_from(addresses).unwrap_or(u32::MAX);
        let counts = wanted.map(|wanted| (wanted, addresses));
        self.0.table.send_if_modified(|table| {
            std::mem::replace(&mut table.wanted_gateways, counts) != counts
        });
    }

    /// Returns the gateways with an active tunnel, as they were dialled.
    pub(crate) fn tunnel_gateways(&self) -> BTreeSet<String> {
        let table = self.0.table.borrow();
        let active = table.tunnels.values();
        let active = active.filter(|tunnel| tunnel.state == "active");
        active.map(|tunnel| tunnel.gateway.clone()).collect()
    }

    /// Changes the state of egress.
    pub(crate) fn change_egress(&self, change: impl FnOnce(&mut EgressStatus)) {
        self.change(|table| change(table.egress.get_or_insert_default()));
    }

    /// Sets the last failure of egress.
    pub(crate) fn set_egress_error(&self, what: &str) {
        self.change_egress(|status| {
            status.trouble = Some(EgressErrorStatus {
                at: now(),
                what: what.to_owned(),
            });
        });
    }

    fn change(&self, change: impl FnOnce(&mut Table)) {
        self.0.table.send_modify(change);
    }
}

impl Table {
    fn connected_gateways_status(&self) -> Option<ConnectedGatewaysStatus> {
        let gateways = self.connected_gateways;
        let addresses = self
            .wanted_gateways
            .map(|(_, addresses)| addresses.max(gateways));
        Some(ConnectedGatewaysStatus {
            gateways,
            of: self.announced_gateways.or(addresses)?,
            wanted: self.wanted_gateways.map(|(wanted, _)| wanted),
        })
    }
}

impl TunnelSummary {
    /// Marks the tunnel as draining: it accepts no new streams.
    pub(crate) fn mark_draining(&self) {
        self.shared.table.send_modify(|table| {
            if let Some(tunnel) = table.tunnels.get_mut(&self.id) {
                tunnel.state = "draining";
            }
        });
    }
}

impl Drop for TunnelSummary {
    fn drop(&mut self) {
        self.shared.table.send_modify(|table| {
            table.tunnels.remove(&self.id);
        });
        self.shared.open_tunnels.send_modify(|count| *count -= 1);
    }
}

impl StatusReader {
    /// Returns the current status of the edge.
    pub fn status(&self) -> Status {
        let api_cache = self.0.api_cache.status();
        let table = self.0.table.borrow();
        let tunnels: Vec<_> = table.tunnels.values().map(Tunnel::status).collect();
        let latest = table.errors.values().max_by_key(|trouble| trouble.at);
        let mut last_error = latest.cloned();
        if let (Some(trouble), Some(hint)) = (&mut last_error, &table.identity_hint) {
            trouble.what = format!("{}; {hint}", trouble.what);
        }
        let state = match &last_error {
            _ if tunnels.iter().any(|tunnel| tunnel.state == "active") => "connected",
            // Another process serves the node now, although old streams continue here.
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
            gateways: table.gateways.clone(),
            reached: table.connected_gateways_status(),
            trouble: last_error,
            certificate: table.certificate.clone(),
            api_cache,
            egress: table.egress.clone(),
            heartbeat: table.heartbeat.clone(),
        }
    }

    /// Waits until the status fulfils a condition. Changes of a tunnel's bytes and streams do not wake this task.
    #[cfg(test)]
    pub(crate) async fn wait_for(&self, wanted: impl Fn(&Status) -> bool) -> Status {
        use tokio::time::timeout;
        let mut table = self.0.table.subscribe();
        let found = async {
            loop {
                let status = self.status();
                if wanted(&status) {
                    return status;
                }
                let changed = table.changed();
                if status.api_cache.is_some() {
                    // The API cache computes its state on request.
                    let _ = timeout(Duration::from_millis(10), changed).await;
                } else {
                    let _ = changed.await;
                }
            }
        };
        let found = timeout(Duration::from_mins(2), found).await;
        found.unwrap_or_else(|_| panic!("never: {:#?}", self.status()))
    }

    /// Returns a receiver of the number of open tunnels.
    pub(crate) fn open_tunnels(&self) -> watch::Receiver<usize> {
        self.0.open_tunnels.subscribe()
    }

    /// Sets the function that reports the state of the API cache.
    pub(crate) fn set_api_cache_source(
        &self,
        status: Box<dyn Fn() -> ApiCacheStatus + Send + Sync>,
    ) {
        self.0.api_cache.set(status);
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
            streams: self.load.open_streams(),
            opened: self.load.streams_opened(),
            sent: self.load.bytes_sent(),
            received: self.load.bytes_received(),
            unread: self.load.unread_bytes(),
        }
    }
}

/// State of the API cache of an edge.
#[derive(Clone, Debug, Serialize, schemars::JsonSchema)]
pub struct ApiCacheStatus {
    /// `pending` (the first synchronisation is not complete), `follower` or `leader`.
    pub role: &'static str,
    /// Whether objects of every resource can be served.
    pub healthy: bool,
    /// Whether every resource is complete and synchronised with its source.
    pub ready: bool,
    /// Node pool, as a gateway confirmed it.
    pub pool: Option<String>,
    /// Node that leads the pool: it reads at a gateway, and the other members read at it.
    pub leader: Option<String>,
    /// Gateway (`host:port`) or node that is the source now.
    pub reads_at: Option<String>,
    /// Members of the pool.
    pub members: Vec<String>,
    /// Resources that are cached.
    pub resources: Vec<causeway_watch_cache::Status>,
}

/// Function that returns the state of the API cache.
type StatusFn = Box<dyn Fn() -> ApiCacheStatus + Send + Sync>;

/// Slot for the status function of the API cache, empty if there is no cache.
#[derive(Default)]
struct ApiCacheStatusSlot(OnceLock<StatusFn>);

impl ApiCacheStatusSlot {
    fn set(&self, status_fn: StatusFn) {
        // The API cache starts only once.
        let _ = self.0.set(status_fn);
    }

    fn status(&self) -> Option<ApiCacheStatus> {
        self.0.get().map(|status_fn| status_fn())
    }
}

impl fmt::Debug for ApiCacheStatusSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiCacheStatusSlot").finish_non_exhaustive()
    }
}
