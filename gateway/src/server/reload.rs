//! Reload of a running gateway's configuration: build all of it, then swap, then retire the old parts.
//!
//! Settings that cannot change while a gateway runs (its directory, its workers, the tunnel and admin addresses, limits and
//! timeouts) are reported, and take effect at the next start.

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
        broadcast::{announce, listing},
        dns::{NodeNames, Zones},
        nat::PortMap,
    },
    proxy::{ProxyState, upstream::ByPort},
    state::{AdvertisedGateways, AnnouncedPortsCell, GatewayEndpoints, NodesWriter},
};
use causeway_certs::{HostName, NodeName};
use causeway_tunnel::control_stream::{AnnouncedPorts, GatewayMessage};
use std::{collections::BTreeSet, fmt, net::SocketAddr, sync::Arc};
use tokio::sync::watch;

/// Handle to the parts of a running gateway that can change. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reloader(Arc<Reloadable>);

/// Parts that a reload changes.
#[derive(Debug)]
pub(super) struct Reloadable {
    pub(super) authority: Arc<CaReload>,
    /// Configuration at the start of the gateway.
    pub(super) began: Config,
    /// Address of the tunnel port.
    pub(super) tunnel: Option<SocketAddr>,
    pub(super) listeners: Arc<Listeners>,
    pub(super) identity: TunnelIdentity,
    /// Addresses and ports that are announced to edges.
    pub(super) to_edges: (AdvertisedGateways, AnnouncedPortsCell),
    pub(super) nodes: NodesWriter,
    pub(super) names: NodeNames,
    /// Redirected ports.
    pub(super) ports: watch::Sender<PortMap>,
    pub(super) shared: Arc<ProxyState>,
}

/// Configuration that is completely built and not in force. Dropping it changes nothing.
#[derive(Debug)]
pub struct PendingReload<'a> {
    parts: &'a Reloadable,
    listeners: ListenerUpdate<'a>,
    redirect: Option<(Redirect, Vec<config::Listener>)>,
    identity: PendingIdentity,
    apps: ByPort,
    advertised: GatewayEndpoints,
    listed: Option<AnnouncedPorts>,
    revoked: BTreeSet<NodeName>,
    node_zones: Vec<String>,
    zones: Option<Zones>,
    at_restart: Vec<&'static str>,
}

/// Summary of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct ReloadSummary {
    /// The listeners.
    pub listeners: ListenerDiff,
    /// Whether the identity of the tunnel port has changed (`tunnel.identity`).
    pub identity: bool,
    /// Whether the upstreams to which the gateway speaks TLS, or their files, have changed.
    pub apps: bool,
    /// Whether the addresses or the number of gateways announced to edges have changed.
    pub advertised: bool,
    /// Whether the revoked nodes have changed (`tunnel.revoked`).
    pub revoked: bool,
    /// Whether DNS answers for names of nodes have changed (`dns`).
    pub dns: bool,
    /// Keys that differ from the configuration at the start, and wait for the next start.
    pub at_restart: Vec<&'static str>,
}

impl Reloader {
    pub(super) fn new(parts: Reloadable) -> Self {
        Self(Arc::new(parts))
    }

    /// Reads and builds everything that `config`, which has been validated, needs. Nothing is in force before
    /// [`PendingReload::apply`].
    ///
    /// # Errors
    /// The missing, malformed or occupied item, by name; then nothing has changed.
    pub fn prepare(&self, config: &Config) -> Result<PendingReload<'_>, BindError> {
        let parts = &self.0;
        // Independent of the configuration, everything that depends on the CA is built from the current CA.
        parts.authority.take_up()?;
        Ok(PendingReload {
            listeners: parts.listeners.plan(&config.listeners)?,
            redirect: config
                .redirect
                .clone()
                .map(|redirect| (redirect, config.listeners.clone())),
            identity: parts.identity.prepare(&config::Tunnel {
                // The current address of the port, and not the address after a restart.
                listen: parts.began.tunnel.listen,
                ..config.tunnel.clone()
            })?,
            apps: {
                let apps = &parts.shared.apps;
                let known = (&parts.shared.nodes, apps.pins());
                upstream_tls::read_all(&config.upstream_tls, known, Some(apps))?
            },
            advertised: advertised(&config.tunnel, parts.tunnel),
            listed: config.listed.clone(),
            revoked: config.tunnel.unwelcome(),
            node_zones: config.zones(),
            zones: zones(&parts.began, config)?,
            at_restart: at_restart(&parts.began, config),
            parts,
        })
    }

    /// Returns the current listeners, with the ports that the system chose; unix sockets have no address.
    pub fn listeners(&self) -> Vec<(String, Option<SocketAddr>)> {
        self.0.listeners.addresses()
    }

    /// Returns the names under which edges reach the gateway: those of its certificate.
    pub fn names(&self) -> Vec<HostName> {
        self.0.identity.names()
    }

    /// Records that a configuration was refused: it could not be read, or not be prepared.
    pub fn refused(&self) {
        self.0.shared.metrics.reloaded(false);
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

    /// Puts the configuration into force together with other `rules`. This function calls `rules` when the old listeners begin no
    /// new streams, and the new listeners none yet.
    pub fn apply_with(self, rules: Option<impl FnOnce()>) -> ReloadSummary {
        let parts = self.parts;
        // Done before the admitted nodes are checked.
        let revoked = parts.nodes.revoke(self.revoked);
        let tls = parts.identity.apply(self.identity);
        let identity = tls.is_some();
        match tls {
            Some(tls) => parts.authority.turn(tls),
            // The directory may have been replaced by that of another gateway.
            None => parts.authority.look(),
        }
        let (all, listed) = &parts.to_edges;
        let advertised = all.replace(self.advertised);
        if advertised {
            let GatewayEndpoints { gateways, replicas } = all.all();
            let line = GatewayMessage::Gateways { gateways, replicas };
            announce(&parts.shared.registry, |_| [line.clone()]);
        }
        // A name that DNS serves must be known to the gateway.
        parts.nodes.zones(&self.node_zones);
        let dns = self.zones.is_some_and(|zones| parts.names.replace(zones));
        let apps = parts.shared.apps.replace(self.apps);
        let listeners = self.listeners.apply(rules);
        if let Some((redirect, configured)) = self.redirect {
            let redirected = PortMap::new(&redirect, &configured, &parts.listeners.addresses());
            parts.ports.send_replace(redirected);
        }
        parts.shared.streams.changed();
        // Announced after the listeners changed, except for removals: an edge would refuse requests that are still in transit.
        if listed.replace(self.listed) {
            announce(&parts.shared.registry, |edge| {
                listing(&edge.admitted, listed)
            });
        }
        parts.shared.metrics.reloaded(true);
        ReloadSummary {
            listeners,
            identity,
            apps,
            advertised,
            revoked,
            dns,
            at_restart: self.at_restart,
        }
    }
}

/// Returns the new zones of the DNS server. A server that is removed or added at the next start stays as it is until then.
fn zones(began: &Config, now: &Config) -> Result<Option<Zones>, BindError> {
    let stays = began.dns.0.is_some() && now.dns.0.is_some();
    let zones = stays.then(|| Zones::of(now)).transpose();
    zones.map_err(BindError::Name)
}

fn at_restart(began: &Config, now: &Config) -> Vec<&'static str> {
    // Only the advertised addresses and the contents of the TLS files of the tunnel port can change at run time.
    let tunnel = |config: &Config| config::Tunnel {
        advertise: Vec::new(),
        gateways: Vec::new(),
        replicas: None,
        revoked: Vec::new(),
        identity: None,
        ..config.tunnel.clone()
    };
    let table = |config: &Config| config.redirect.clone().map(|redirect| redirect.table);
    let given = |config: &Config| config.tunnel.identity.is_some();
    let asked = |config: &Config| {
        let identity = config.tunnel.identity.as_ref();
        identity.map(|identity| (identity.signer.clone(), identity.trust_domain.clone()))
    };
    let clients = |config: &Config| {
        let of = |(port, app): (&u16, &config::UpstreamTls)| {
            Some((*port, app.signer.clone()?, app.user.clone(), app.approve))
        };
        config
            .upstream_tls
            .iter()
            .filter_map(of)
            .collect::<Vec<_>>()
    };
    let answers = |config: &Config| config.dns.0.as_ref().map(|dns| dns.listen);
    let keys = [
        ("data_dir", began.data_dir != now.data_dir),
        ("workers", began.workers != now.workers),
        ("tunnel", tunnel(began) != tunnel(now)),
        (
            "tunnel.identity",
            given(began) != given(now) || asked(began) != asked(now),
        ),
        ("upstream_tls.*.signer", clients(began) != clients(now)),
        ("redirect", table(began) != table(now)),
        ("admin", began.admin != now.admin),
        ("kubernetes", began.kubernetes != now.kubernetes),
        ("api_cache", began.api_cache != now.api_cache),
        ("dns.listen", answers(began) != answers(now)),
        ("limits", began.limits != now.limits),
        ("timeouts", began.timeouts != now.timeouts),
        ("access_log", began.access_log != now.access_log),
        ("audit_log", began.audit_log != now.audit_log),
        ("log", began.log != now.log),
    ];
    let differs = keys.into_iter().filter(|(_, differs)| *differs);
    differs.map(|(key, _)| key).collect()
}

/// Text for people, in one line.
impl fmt::Display for ReloadSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ListenerDiff {
            opened,
            replaced,
            closed,
        } = &self.listeners;
        let mut said = Vec::new();
        for (what, names) in [
            ("opened", opened),
            ("changed", replaced),
            ("closed", closed),
        ] {
            if !names.is_empty() {
                said.push(format!("{what} {}", names.join(", ")));
            }
        }
        let listeners = if said.is_empty() {
            "listeners unchanged".to_owned()
        } else {
            format!("listeners: {}", said.join("; "))
        };
        f.write_str(&listeners)?;
        if self.identity {
            f.write_str("; tunnel.identity files changed")?;
        }
        if self.apps {
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
        if !self.at_restart.is_empty() {
            write!(
                f,
                "; takes effect at the next start: {}",
                self.at_restart.join(", ")
            )?;
        }
        Ok(())
    }
}
