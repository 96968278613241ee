//! Reload of a running gateway's configuration: build all of it, then swap, then retire the old parts.
//!
//! Some settings cannot change while a gateway runs: its directory, its workers, the tunnel and admin addresses, limits and
//! timeouts. Changes of these are reported, and take effect at the next start.

use super::{
    addresses::advertised,
    build::upstream_tls,
    ca_reload::CaReload,
    error::BindError,
    listeners::{ListenerDiff, ListenerUpdate, Listeners},
    tunnel_identity::{PendingIdentity, TunnelIdentity},
};
use crate::{
    config::{self, Config, Redirect},
    control::{
        broadcast::{announce, ports_message},
        dns::{NodeNames, Zones},
        nat::PortMap,
    },
    proxy::{ProxyState, upstream::ByPort},
    state::{AdvertisedGateways, AnnouncedPortsCell, GatewayEndpoints, NodesWriter},
};
use causeway_certs::{HostName, NodeName};
use causeway_config::{RestartKey, RestartKeys};
use causeway_tunnel::control_stream::{AnnouncedPorts, GatewayMessage};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    sync::Arc,
};
use tokio::sync::watch;

/// Handle for the parts of a running gateway that can change. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reloader(Arc<Reloadable>);

/// Parts that a reload changes.
#[derive(Debug)]
pub(super) struct Reloadable {
    pub(super) authority: Arc<CaReload>,
    /// Configuration at the start of the gateway.
    pub(super) startup_config: Config,
    /// Address of the tunnel port.
    pub(super) tunnel: Option<SocketAddr>,
    pub(super) listeners: Arc<Listeners>,
    pub(super) identity: TunnelIdentity,
    /// Addresses and ports that are announced to edges.
    pub(super) announcements: (AdvertisedGateways, AnnouncedPortsCell),
    pub(super) nodes: NodesWriter,
    pub(super) names: NodeNames,
    /// Redirected ports.
    pub(super) ports: watch::Sender<PortMap>,
    pub(super) shared: Arc<ProxyState>,
}

/// Configuration that is completely built and not yet in force. Dropping it changes nothing.
#[derive(Debug)]
pub struct PendingReload<'a> {
    parts: &'a Reloadable,
    listeners: ListenerUpdate<'a>,
    redirect: Option<(Redirect, Vec<config::Listener>)>,
    identity: PendingIdentity,
    upstream_tls: ByPort,
    egress: Option<config::Egress>,
    advertised: GatewayEndpoints,
    announced_ports: Option<AnnouncedPorts>,
    revoked: BTreeSet<NodeName>,
    node_zones: Vec<String>,
    zones: Option<Zones>,
    needs_restart: Vec<&'static str>,
}

/// Summary of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct ReloadSummary {
    /// The listeners.
    pub listeners: ListenerDiff,
    /// Whether the identity of the tunnel port has changed (`tunnel.identity`).
    pub identity: bool,
    /// Whether the upstreams with which the gateway speaks TLS, or their files, have changed.
    pub upstream_tls: bool,
    /// Whether the addresses or the number of gateways announced to edges have changed.
    pub advertised: bool,
    /// Whether the revoked nodes have changed (`tunnel.revoked`).
    pub revoked: bool,
    /// Whether DNS answers for names of nodes have changed (`dns`).
    pub dns: bool,
    /// Keys that differ from the configuration at the start, and take effect at the next start.
    pub needs_restart: Vec<&'static str>,
}

impl Reloader {
    pub(super) fn new(parts: Reloadable) -> Self {
        Self(Arc::new(parts))
    }

    /// Reads and builds everything that the validated `config` requires. Nothing is in force before [`PendingReload::apply`].
    ///
    /// # Errors
    /// The missing, malformed or occupied item, by name. The configuration is then unchanged.
    pub fn prepare(&self, config: &Config) -> Result<PendingReload<'_>, BindError> {
        let parts = &self.0;
        // Independent of the configuration, everything that depends on the CA is built from the current CA.
        parts.authority.reload_ca()?;
        Ok(PendingReload {
            listeners: parts.listeners.plan(&config.listeners)?,
            redirect: config
                .redirect
                .clone()
                .map(|redirect| (redirect, config.listeners.clone())),
            identity: parts.identity.prepare(&config::Tunnel {
                // Uses the current address of the port, and not the address after a restart.
                listen: parts.startup_config.tunnel.listen,
                ..config.tunnel.clone()
            })?,
            upstream_tls: {
                let apps = &parts.shared.upstream_tls_ports;
                let known = (&parts.shared.nodes, apps.pins());
                upstream_tls::read_all(&config.upstream_tls, known, Some(apps))?
            },
            egress: config.egress.clone(),
            advertised: advertised(&config.tunnel, parts.tunnel),
            announced_ports: config.announced_ports.clone(),
            revoked: config.tunnel.revoked_nodes(),
            node_zones: config.zones(),
            zones: zones(&parts.startup_config, config)?,
            needs_restart: RESTART_KEYS.changed(&parts.startup_config, config),
            parts,
        })
    }

    /// Returns the current listeners, with the ports that the system chose. Unix sockets have no address.
    pub fn listeners(&self) -> Vec<(String, Option<SocketAddr>)> {
        self.0.listeners.addresses()
    }

    /// Returns the names by which edges reach the gateway, which are the names in its certificate.
    pub fn names(&self) -> Vec<HostName> {
        self.0.identity.names()
    }

    /// Whether this gateway follows the cluster's Pod objects. Only a start changes this.
    pub fn follows_pods(&self) -> bool {
        self.0.shared.nodes.follows_pods()
    }

    /// Counts a configuration that was refused, because it could not be read or prepared.
    pub fn record_refused(&self) {
        self.0.shared.metrics.count_reload(false);
    }

    pub(super) fn parts(&self) -> &Reloadable {
        &self.0
    }
}

impl PendingReload<'_> {
    /// Puts the configuration into force.
    pub fn apply(self) -> ReloadSummary {
        self.apply_with(None::<fn()>)
    }

    /// Puts the configuration into force together with other `rules`. Calls `rules` when the old listeners accept no new streams
    /// any more, and the new listeners none yet.
    pub fn apply_with(self, rules: Option<impl FnOnce()>) -> ReloadSummary {
        let parts = self.parts;
        // Done before the admitted nodes are checked.
        let revoked = parts.nodes.replace_revoked(self.revoked);
        let tls = parts.identity.apply(self.identity);
        let identity = tls.is_some();
        match tls {
            Some(tls) => parts.authority.install_tls(tls),
            // The directory may have been replaced by another gateway's directory.
            None => parts.authority.refresh_nodes(),
        }
        let (all, listed) = &parts.announcements;
        let advertised = all.replace(self.advertised);
        if advertised {
            let GatewayEndpoints { gateways, replicas } = all.get();
            let message = GatewayMessage::Gateways { gateways, replicas };
            announce(&parts.shared.registry, |_| [message.clone()]);
        }
        // The gateway must know every name that DNS serves.
        parts.nodes.replace_zones(&self.node_zones);
        let dns = self.zones.is_some_and(|zones| parts.names.replace(zones));
        let apps = parts.shared.upstream_tls_ports.replace(self.upstream_tls);
        parts.shared.egress.replace(self.egress.as_ref());
        let listeners = self.listeners.apply(rules);
        if let Some((redirect, configured)) = self.redirect
            && !parts.listeners.is_draining()
        {
            let port_map = PortMap::new(&redirect, &configured, &parts.listeners.addresses());
            parts.ports.send_replace(port_map);
        }
        parts.shared.streams.request_recheck();
        // Announced after the listeners changed, except for removals. Otherwise an edge would refuse requests that are in
        // transit.
        if listed.replace(self.announced_ports) {
            announce(&parts.shared.registry, |edge| {
                ports_message(&edge.tunnel, listed)
            });
        }
        parts.shared.metrics.count_reload(true);
        ReloadSummary {
            listeners,
            identity,
            upstream_tls: apps,
            advertised,
            revoked,
            dns,
            needs_restart: self.needs_restart,
        }
    }
}

/// Returns the new zones of the DNS server. `None` if the server is added or removed, which takes effect at the next start.
fn zones(startup: &Config, current: &Config) -> Result<Option<Zones>, BindError> {
    let has_server = startup.dns.0.is_some() && current.dns.0.is_some();
    let zones = has_server.then(|| Zones::from_config(current)).transpose();
    zones.map_err(BindError::Name)
}

/// Keys that a reload only reports as changed.
pub const RESTART_KEYS: RestartKeys<Config> = RestartKeys(&[
    RestartKey::whole("data_dir", |one, two| one.data_dir != two.data_dir),
    RestartKey::whole("workers", |one, two| one.workers != two.workers),
    RestartKey {
        name: "tunnel",
        // In the tunnel section, only these keys and the contents of the TLS files change at run time.
        reloads: &[
            "tunnel.advertise",
            "tunnel.gateways",
            "tunnel.replicas",
            "tunnel.revoked",
        ],
        differs: |one, two| tunnel(one) != tunnel(two),
    },
    RestartKey {
        name: "tunnel.identity",
        reloads: &[
            "tunnel.identity.chain",
            "tunnel.identity.key",
            "tunnel.identity.client_ca",
            "tunnel.identity.any_node",
        ],
        differs: |one, two| requested_identity(one) != requested_identity(two),
    },
    RestartKey::whole("upstream_tls.*.signer", |one, two| {
        upstream_certificates(one) != upstream_certificates(two)
    }),
    RestartKey::whole("upstream_tls.*.user", |one, two| {
        upstream_certificate_differs(one, two, |one, two| one.user != two.user)
    }),
    RestartKey::whole("upstream_tls.*.approve", |one, two| {
        upstream_certificate_differs(one, two, |one, two| one.approve != two.approve)
    }),
    RestartKey {
        name: "redirect",
        reloads: &["redirect.listeners", "redirect.ports", "redirect.pods"],
        differs: |one, two| table(one) != table(two),
    },
    RestartKey::whole("admin", |one, two| one.admin != two.admin),
    RestartKey::whole("kubernetes", |one, two| one.kubernetes != two.kubernetes),
    RestartKey::whole("state", |one, two| one.state != two.state),
    RestartKey::whole("peers", |one, two| one.peers != two.peers),
    RestartKey::whole("api_cache", |one, two| one.api_cache != two.api_cache),
    RestartKey {
        name: "dns",
        reloads: &[
            "dns.listen",
            "dns.zones",
            "dns.addresses",
            "dns.holders",
            "dns.ttl",
        ],
        differs: |one, two| one.dns.is_absent() != two.dns.is_absent(),
    },
    RestartKey::whole("dns.listen", |one, two| {
        let of = |config: &Config| config.dns.0.as_ref().map(|dns| dns.listen);
        of(one).zip(of(two)).is_some_and(|(one, two)| one != two)
    }),
    RestartKey::whole("limits", |one, two| one.limits != two.limits),
    RestartKey::whole("timeouts", |one, two| one.timeouts != two.timeouts),
    RestartKey::whole("access_log", |one, two| one.access_log != two.access_log),
    RestartKey::whole("audit_log", |one, two| one.audit_log != two.audit_log),
    RestartKey::whole("log", |one, two| one.log != two.log),
]);

/// Returns the part of `tunnel` that does not change at run time.
fn tunnel(config: &Config) -> config::Tunnel {
    config::Tunnel {
        advertise: Vec::new(),
        gateways: Vec::new(),
        replicas: None,
        revoked: Vec::new(),
        identity: None,
        ..config.tunnel.clone()
    }
}

/// Returns the certificate that the gateway requests for its tunnel port, if there is an external CA.
fn requested_identity(config: &Config) -> Option<(Option<&String>, Option<&String>)> {
    let identity = config.tunnel.identity.as_ref()?;
    Some((identity.signer.as_ref(), identity.trust_domain.as_ref()))
}

/// Returns the ports for which the gateway requests a client certificate, with its signer.
fn upstream_certificates(config: &Config) -> BTreeMap<u16, &String> {
    let ports = config.upstream_tls.iter();
    ports
        .filter_map(|(port, upstream)| Some((*port, upstream.signer.as_ref()?)))
        .collect()
}

/// Whether a requested client certificate differs.
fn upstream_certificate_differs(
    one: &Config,
    two: &Config,
    differs: fn(&config::UpstreamTls, &config::UpstreamTls) -> bool,
) -> bool {
    let both = upstream_certificates(one).into_keys();
    let mut both = both.filter(|port| upstream_certificates(two).contains_key(port));
    both.any(|port| differs(&one.upstream_tls[&port], &two.upstream_tls[&port]))
}

fn table(config: &Config) -> Option<&String> {
    config.redirect.as_ref().map(|redirect| &redirect.table)
}

/// Formats the summary as one line of text.
impl fmt::Display for ReloadSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ListenerDiff {
            opened,
            replaced,
            closed,
        } = &self.listeners;
        let mut parts = Vec::new();
        for (what, names) in [
            ("opened", opened),
            ("changed", replaced),
            ("closed", closed),
        ] {
            if !names.is_empty() {
                parts.push(format!("{what} {}", names.join(", ")));
            }
        }
        let listeners = if parts.is_empty() {
            "listeners unchanged".to_owned()
        } else {
            format!("listeners: {}", parts.join("; "))
        };
        f.write_str(&listeners)?;
        if self.identity {
            f.write_str("; tunnel.identity files changed")?;
        }
        if self.upstream_tls {
            f.write_str("; upstream_tls changed")?;
        }
        if self.advertised {
            f.write_str("; advertised gateway addresses changed")?;
        }
        if self.revoked {
            f.write_str("; tunnel.revoked changed")?;
        }
        if self.dns {
            f.write_str("; dns changed")?;
        }
        if !self.needs_restart.is_empty() {
            write!(
                f,
                "; takes effect at the next start: {}",
                self.needs_restart.join(", ")
            )?;
        }
        Ok(())
    }
}
