//! Listeners of a gateway, and the replacement of their list.
//!
//! 1. `plan` reads and builds everything that a list needs, and binds the new sockets; it changes nothing yet.
//! 2. `ListenerUpdate::apply` opens new listeners, replaces changed ones, and closes removed ones. It cannot fail.
//!
//! A listener keeps its socket as long as its address stays the same. A listener whose configuration and files have not changed
//! is not touched, and keeps all of its connections.

use super::{addresses::bind, build::listener::ListenerSource, error::BindError};
use crate::{
    config,
    control::{certificate_expiry::CertificateInUse, jwks::JwksFetchers},
    proxy::{
        Proxy, ProxyState,
        listener::{Listener, ListenerTls, accept::ListenerSocket},
    },
    worker::{WorkerId, Workers},
};
use causeway_certs::{Ca, LiveCa};
use causeway_rt::{listener::BoundSocket, task::TaskGroup};
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak},
};
use tokio_util::sync::CancellationToken;

/// All listeners of a gateway.
#[derive(Debug)]
pub(super) struct Listeners {
    ca: LiveCa,
    shared: Arc<ProxyState>,
    issuers: JwksFetchers,
    workers: Workers,
    tasks: Arc<TaskGroup>,
    /// Asks all listeners, and their connections, to finish.
    ending: CancellationToken,
    standing: Mutex<ActiveListeners>,
}

/// The current listeners.
#[derive(Debug, Default)]
struct ActiveListeners {
    /// Whether clients are admitted; new listeners then open at once.
    open: bool,
    /// Whether the gateway drains; no listener opens any more.
    over: bool,
    listeners: Vec<ActiveListener>,
    removed: Vec<Removed>,
}

impl ActiveListeners {
    /// Sets the successor of each removed listener whose name is back, and forgets removed listeners without streams.
    fn forget_removed(&mut self) {
        let listeners = &self.listeners;
        self.removed.retain(|removed| {
            let Some(listener) = removed.listener.upgrade() else {
                return false;
            };
            let name = &removed.material.listener.name;
            let back = listeners
                .iter()
                .find(|stand| stand.material.listener.name == *name);
            if let Some(back) = back {
                let _ = listener.successor.set(back.listener.clone());
            }
            back.is_none()
        });
    }

    /// Returns the removed listeners that still have streams.
    fn removed(&self) -> impl Iterator<Item = (&ListenerSource, Arc<Listener>)> {
        let removed = self.removed.iter();
        removed.filter_map(|removed| Some((&removed.material, removed.listener.upgrade()?)))
    }

    /// Makes the streams of removed listeners subject to the rebuilt listeners.
    fn replace_removed(&mut self, all: Vec<Rebuilt>) {
        for rebuilt in all {
            let before = Arc::downgrade(&rebuilt.before);
            let mut removed = self.removed.iter_mut();
            if let Some(removed) = removed.find(|removed| removed.listener.ptr_eq(&before)) {
                removed.listener = Arc::downgrade(&rebuilt.listener);
                removed.material = rebuilt.material;
                // Each listener is replaced once.
                let _ = rebuilt.before.successor.set(rebuilt.listener);
            }
        }
    }

    /// Adds to a bind error which other listener of this gateway has the socket.
    fn explain(&self, listener: &config::Listener, error: BindError) -> BindError {
        let config::ListenAddr::Tcp(address) = listener.listen else {
            return error;
        };
        let port = |stand: &&ActiveListener| {
            let there = stand.socket.local_addr();
            there.is_some_and(|there| there.port() == address.port())
        };
        match (error, self.listeners.iter().find(port)) {
            (BindError::Listen { listen, .. }, Some(stand)) => BindError::Held {
                listener: listener.name.clone(),
                listen,
                by: stand.material.listener.name.clone(),
            },
            (error, _) => error,
        }
    }
}

/// One listener, with its socket.
#[derive(Debug)]
struct ActiveListener {
    material: ListenerSource,
    listener: Arc<Listener>,
    entrance: Arc<ListenerSocket>,
    socket: BoundSocket,
}

impl ActiveListener {
    /// Whether `listener` continues on this socket, that is, has the same address. If the system chooses the port, the name
    /// distinguishes listeners.
    fn carries(&self, listener: &config::Listener) -> bool {
        let own = &self.material.listener;
        let chosen =
            matches!(listener.listen, config::ListenAddr::Tcp(address) if address.port() == 0);
        own.listen == listener.listen && (own.name == listener.name || !chosen)
    }

    fn open(&self) {
        let listener = &self.material.listener.name;
        match self.entrance.open(&self.socket) {
            Ok(()) => {
                let address = self.socket.local_addr();
                let address = address.map_or_else(|| "unix".to_owned(), |at| at.to_string());
                tracing::info!(listener, address, "listener open");
            }
            Err(error) => tracing::error!(listener, %error, "this listener cannot be served"),
        }
    }
}

/// Listener that a reload has removed, as long as it has open streams.
#[derive(Debug)]
struct Removed {
    material: ListenerSource,
    listener: Weak<Listener>,
}

/// Removed listener, rebuilt from the current state of its files and of the other listeners.
#[derive(Debug)]
struct Rebuilt {
    before: Arc<Listener>,
    material: ListenerSource,
    listener: Arc<Listener>,
}

/// Change of one listener of a new list.
#[derive(Debug)]
enum ListenerChange {
    /// It stays unchanged, at this index of the old list.
    Keep(usize),
    /// It takes over the socket of the listener at this index, with another configuration.
    Replace(usize, ListenerSource, (Arc<Listener>, Vec<Proxy>)),
    /// It is new.
    Open(ActiveListener),
}

impl ListenerChange {
    /// Whether the listener at this index of the old list stays.
    fn is_at(&self, place: usize) -> bool {
        matches!(self, Self::Keep(kept) | Self::Replace(kept, ..) if *kept == place)
    }

    /// The configuration and file contents that the listener is made of.
    fn material<'a>(&'a self, standing: &'a ActiveListeners) -> &'a ListenerSource {
        match self {
            Self::Keep(place) => &standing.listeners[*place].material,
            Self::Replace(_, material, _) => material,
            Self::Open(stand) => &stand.material,
        }
    }
}

/// New list of listeners, completely built and not yet applied.
#[derive(Debug)]
pub(super) struct ListenerUpdate<'a> {
    standing: MutexGuard<'a, ActiveListeners>,
    steps: Vec<ListenerChange>,
    removed: Vec<Rebuilt>,
}

/// New TLS configurations of all listeners, built for the new CA and not yet installed.
#[derive(Debug)]
pub(super) struct TlsUpdate<'a> {
    _standing: MutexGuard<'a, ActiveListeners>,
    shared: &'a ProxyState,
    turned: Vec<(Arc<Listener>, ListenerTls)>,
}

impl TlsUpdate<'_> {
    /// Installs the configurations, for new connections.
    pub(super) fn apply(self) {
        for (listener, tls) in self.turned {
            // Mints the leaf by the new CA, which logs names that an imported chain does not permit.
            if let Some(leaves) = &tls.leaves {
                leaves.leaf(None);
            }
            listener.turn_to(tls);
        }
        self.shared.streams.changed();
    }
}

/// Names of the listeners that a reload has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerDiff {
    /// Listeners that are new.
    pub opened: Vec<String>,
    /// Listeners that keep their socket and have another configuration.
    pub replaced: Vec<String>,
    /// Listeners that are gone.
    pub closed: Vec<String>,
}

impl Listeners {
    /// Returns an empty list, with the owner of the listeners' tasks and the token that asks them to finish.
    pub(super) fn new(
        ca: &LiveCa,
        shared: &Arc<ProxyState>,
        workers: &Workers,
        (tasks, ending): (&Arc<TaskGroup>, &CancellationToken),
    ) -> Self {
        let (fetching, runtime) = (TaskGroup::new(ending), workers.runtime(WorkerId(0)).clone());
        let (bound, metrics) = (shared.timeouts.authorize, shared.metrics.clone());
        Self {
            issuers: JwksFetchers::new(fetching, runtime, bound, metrics),
            ca: ca.clone(),
            shared: shared.clone(),
            workers: workers.clone(),
            tasks: tasks.clone(),
            ending: ending.clone(),
            standing: Mutex::default(),
        }
    }

    /// Returns names and addresses; unix sockets have no address.
    pub(super) fn addresses(&self) -> Vec<(String, Option<SocketAddr>)> {
        let address = |stand: &ActiveListener| {
            let name = stand.material.listener.name.clone();
            (name, stand.socket.local_addr())
        };
        self.standing().listeners.iter().map(address).collect()
    }

    /// Returns the certificates of all listeners, presented and trusted; or `None` while a reload reads files.
    pub(super) fn certificates(&self) -> Option<Vec<CertificateInUse>> {
        let standing = match self.standing.try_lock() {
            Ok(standing) => standing,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let of = |stand: &ActiveListener| {
            let mut all = stand.material.certificates();
            let made = stand.listener.made_certificate();
            let used_for = format!("listener:{}", stand.material.listener.name);
            let made = made.and_then(|made| CertificateInUse::read(used_for, &made, None));
            all.extend(made.map(CertificateInUse::issued_by_us));
            all
        };
        Some(standing.listeners.iter().flat_map(of).collect())
    }

    /// Opens the listeners to clients.
    pub(super) fn open(&self) {
        let mut standing = self.standing();
        standing.open = true;
        standing.listeners.iter().for_each(ActiveListener::open);
    }

    /// Waits until all listeners are asked to finish, and closes their sockets: new clients are then refused at once and do not
    /// wait in vain.
    pub(super) async fn retire(&self) {
        self.ending.cancelled().await;
        let mut standing = self.standing();
        standing.over = true;
        standing.listeners.clear();
    }

    /// Reads and builds everything that `listeners` need, and binds new sockets. Blocks other calls that plan.
    pub(super) fn plan(
        &self,
        listeners: &[config::Listener],
    ) -> Result<ListenerUpdate<'_>, BindError> {
        let standing = self.standing();
        if standing.over {
            return Err(BindError::Leaving);
        }
        let mut steps: Vec<ListenerChange> = Vec::with_capacity(listeners.len());
        for listener in listeners {
            let place = standing
                .listeners
                .iter()
                .position(|stand| stand.carries(listener));
            let current = place.map(|place| &standing.listeners[place].material);
            let material = ListenerSource::read_in_place_of(listener, current)?;
            steps.push(match place {
                Some(place) if standing.listeners[place].material == material => {
                    ListenerChange::Keep(place)
                }
                Some(place) => {
                    let proxies = self.proxies(&material, &standing.listeners[place].socket)?;
                    ListenerChange::Replace(place, material, proxies)
                }
                None => {
                    let opened = self.stand(material);
                    ListenerChange::Open(opened.map_err(|error| standing.explain(listener, error))?)
                }
            });
        }
        let removed = self.rebuild_removed(&standing, &steps);
        Ok(ListenerUpdate {
            standing,
            steps,
            removed,
        })
    }

    /// Rebuilds removed listeners, removed now or before, whose inputs have changed: their files, or the client certificates that
    /// listeners with a CA in common revoke. A listener that cannot be read or built stays as it was: a reload is not refused for
    /// a listener that is not in its configuration.
    fn rebuild_removed(
        &self,
        standing: &ActiveListeners,
        steps: &[ListenerChange],
    ) -> Vec<Rebuilt> {
        let others: Vec<_> = steps.iter().map(|step| step.material(standing)).collect();
        let stays = |(place, stand): &(usize, &ActiveListener)| {
            let name = &stand.material.listener.name;
            let named = others.iter().any(|other| other.listener.name == *name);
            named || steps.iter().any(|step| step.is_at(*place))
        };
        let going = standing.listeners.iter().enumerate();
        let going = going.filter(|going| !stays(going));
        let going = going.map(|(_, stand)| (&stand.material, stand.listener.clone()));
        let mut rebuilt = Vec::new();
        for (before, listener) in standing.removed().chain(going) {
            let revoked = others.iter().filter(|other| before.shares_ca(other));
            let revoked = revoked.flat_map(|other| &other.listener.client_auth.revoked);
            match self.rebuild((before, &listener), revoked) {
                Ok(Some(built)) => rebuilt.push(built),
                Ok(None) => {}
                Err(error) => {
                    let name = &listener.name;
                    tracing::warn!(listener = name, %error, "this listener was removed; its open streams are checked against its last loaded files");
                }
            }
        }
        rebuilt
    }

    /// Rebuilds a removed listener, if its inputs have changed.
    fn rebuild<'a>(
        &self,
        (before, listener): (&ListenerSource, &Arc<Listener>),
        revoked: impl Iterator<Item = &'a config::Serial>,
    ) -> Result<Option<Rebuilt>, BindError> {
        let mut configured = before.listener.clone();
        let listed = &mut configured.client_auth.revoked;
        for serial in revoked {
            if !listed.contains(serial) {
                listed.push(serial.clone());
            }
        }
        let material = ListenerSource::read(&configured)?;
        if material == *before {
            return Ok(None);
        }
        let built = material.build((&self.ca, &self.issuers), &self.shared, listener.listens)?;
        Ok(Some(Rebuilt {
            before: listener.clone(),
            material,
            listener: Arc::new(built),
        }))
    }

    /// Builds the TLS of all listeners for another CA. Blocks other calls that plan.
    pub(super) fn turn_to(&self, ca: &Ca) -> Result<TlsUpdate<'_>, BindError> {
        let standing = self.standing();
        let all = standing.listeners.iter();
        let all = all.map(|stand| (&stand.material, stand.listener.clone()));
        let mut turned = Vec::new();
        for (material, listener) in all.chain(standing.removed()) {
            let tls = material.tls(ca, (&self.ca, &self.shared.nodes))?;
            turned.extend(tls.map(|tls| (listener, tls)));
        }
        Ok(TlsUpdate {
            _standing: standing,
            shared: &self.shared,
            turned,
        })
    }

    fn stand(&self, material: ListenerSource) -> Result<ActiveListener, BindError> {
        let listener = &material.listener;
        let socket = bind(&format!("listener {:?}", listener.name), &listener.listen)?;
        let (built, proxies) = self.proxies(&material, &socket)?;
        let entrance = ListenerSocket::new(&self.workers, proxies, self.ending.child_token());
        Ok(ActiveListener {
            material,
            listener: built,
            entrance,
            socket,
        })
    }

    /// Returns the listener's proxy on each worker.
    fn proxies(
        &self,
        material: &ListenerSource,
        socket: &BoundSocket,
    ) -> Result<(Arc<Listener>, Vec<Proxy>), BindError> {
        let listens = socket.local_addr().map(|address| address.port());
        let built = Arc::new(material.build((&self.ca, &self.issuers), &self.shared, listens)?);
        let proxy = |worker| Proxy {
            shared: self.shared.clone(),
            listener: built.clone(),
            worker,
            tasks: self.tasks.clone(),
        };
        let proxies = self.workers.all().map(proxy).collect();
        Ok((built, proxies))
    }

    fn standing(&self) -> MutexGuard<'_, ActiveListeners> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ListenerUpdate<'_> {
    /// Applies the update. New `rules` come into force in between, so that no stream of a new listener is checked by the old
    /// rules, and no stream of an old listener by the new ones.
    pub(super) fn apply(mut self, rules: Option<impl FnOnce()>) -> ListenerDiff {
        let mut done = ListenerDiff::default();
        let before = std::mem::take(&mut self.standing.listeners);
        let mut before: Vec<Option<ActiveListener>> = before.into_iter().map(Some).collect();
        let linger = rules.is_none();
        for (place, stand) in before.iter().flatten().enumerate() {
            let stays = |step: &ListenerChange| matches!(step, ListenerChange::Keep(kept) if *kept == place);
            if !self.steps.iter().any(stays) {
                stand.entrance.retire(linger);
            }
        }
        if let Some(rules) = rules {
            rules();
        }
        for step in self.steps {
            let name = |stand: &ActiveListener| stand.material.listener.name.clone();
            let stand = match step {
                ListenerChange::Keep(place) => before[place].take(),
                ListenerChange::Replace(place, material, (listener, proxies)) => before[place]
                    .take()
                    .map(|stand| {
                        stand.entrance.replace(proxies);
                        // Each listener is replaced once.
                        let _ = stand.listener.successor.set(listener.clone());
                        ActiveListener {
                            material,
                            listener,
                            ..stand
                        }
                    })
                    .inspect(|stand| done.replaced.push(name(stand))),
                ListenerChange::Open(stand) => {
                    if self.standing.open {
                        stand.open();
                    }
                    done.opened.push(name(&stand));
                    Some(stand)
                }
            };
            self.standing.listeners.extend(stand);
        }
        self.standing.forget_removed();
        for stand in before.into_iter().flatten() {
            // The streams of a listener that has moved are decided about by its new rules.
            let name = &stand.material.listener.name;
            let mut listeners = self.standing.listeners.iter();
            if let Some(moved) = listeners.find(|moved| moved.material.listener.name == *name) {
                let _ = stand.listener.successor.set(moved.listener.clone());
            }
            stand.entrance.close();
            if let config::ListenAddr::Unix(path) = &stand.material.listener.listen {
                // A task that has removed it already has done the same.
                let _ = std::fs::remove_file(path);
            }
            done.closed.push(stand.material.listener.name.clone());
            if stand.listener.successor.get().is_none() {
                self.standing.removed.push(Removed {
                    listener: Arc::downgrade(&stand.listener),
                    material: stand.material,
                });
            }
        }
        self.standing.replace_removed(self.removed);
        done
    }
}
