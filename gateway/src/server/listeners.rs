//! Listeners of a gateway, and the replacement of their list at a reload.
//!
//! 1. `plan` reads and builds everything that the new list requires, and binds the new sockets. It does not change the current
//!    list.
//! 2. `ListenerUpdate::apply` opens new listeners, replaces changed ones, and closes removed ones. It cannot fail.
//!
//! A listener keeps its socket as long as its address stays the same. A listener whose configuration and files have not changed
//! is not touched, and keeps all its connections.

use super::{
    build::listener::ListenerSource,
    error::BindError,
    sockets::{InheritedSockets, SocketName, bind},
};
use crate::{
    config,
    control::{certificate_expiry::CertificateInUse, jwks::JwksFetchers, successor::Successor},
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
    os::fd::{AsFd, OwnedFd},
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
    /// Sockets of a predecessor, for the first list.
    inherited: InheritedSockets,
    /// Process that takes the sockets over, if there is one.
    successor: Successor,
    /// Cancelled when all listeners and their connections have to finish.
    end_token: CancellationToken,
    active: Mutex<ActiveListeners>,
}

/// The current listeners.
#[derive(Debug, Default)]
struct ActiveListeners {
    /// Whether clients are admitted. New listeners then open at once.
    is_open: bool,
    /// Whether the gateway drains. Listeners are then no longer opened.
    is_draining: bool,
    listeners: Vec<ActiveListener>,
    removed: Vec<Removed>,
}

impl ActiveListeners {
    /// Sets the successor of each removed listener whose name exists again, and drops removed listeners without streams.
    fn forget_removed(&mut self) {
        let listeners = &self.listeners;
        self.removed.retain(|removed| {
            let Some(listener) = removed.listener.upgrade() else {
                return false;
            };
            let name = &removed.source.listener.name;
            let reopened = listeners
                .iter()
                .find(|stand| stand.source.listener.name == *name);
            if let Some(back) = reopened {
                let _ = listener.successor.set(back.listener.clone());
            }
            reopened.is_none()
        });
    }

    /// Returns the removed listeners that still have streams.
    fn removed(&self) -> impl Iterator<Item = (&ListenerSource, Arc<Listener>)> {
        let removed = self.removed.iter();
        removed.filter_map(|removed| Some((&removed.source, removed.listener.upgrade()?)))
    }

    /// Makes the streams of removed listeners subject to the rebuilt listeners.
    fn apply_rebuilt(&mut self, all: Vec<Rebuilt>) {
        for rebuilt in all {
            let before = Arc::downgrade(&rebuilt.previous);
            let mut removed = self.removed.iter_mut();
            if let Some(removed) = removed.find(|removed| removed.listener.ptr_eq(&before)) {
                removed.listener = Arc::downgrade(&rebuilt.listener);
                removed.source = rebuilt.source;
                // Each listener is replaced once.
                let _ = rebuilt.previous.successor.set(rebuilt.listener);
            }
        }
    }

    /// Adds to a bind error the name of the listener of this gateway that has the socket.
    fn explain_bind_error(&self, listener: &config::Listener, error: BindError) -> BindError {
        let config::ListenAddr::Tcp(address) = listener.listen else {
            return error;
        };
        let port = |stand: &&ActiveListener| {
            let local_addr = stand.socket.local_addr();
            local_addr.is_some_and(|there| there.port() == address.port())
        };
        match (error, self.listeners.iter().find(port)) {
            (BindError::Listen { listen, .. }, Some(stand)) => BindError::AddressHeld {
                listener: listener.name.clone(),
                listen,
                holder: stand.source.listener.name.clone(),
            },
            (error, _) => error,
        }
    }
}

/// Active listener with its socket.
#[derive(Debug)]
struct ActiveListener {
    source: ListenerSource,
    listener: Arc<Listener>,
    listener_socket: Arc<ListenerSocket>,
    socket: BoundSocket,
}

impl ActiveListener {
    /// Whether `listener` can continue on this socket because it has the same address. If the system chooses the port, the name
    /// distinguishes listeners.
    fn can_continue_as(&self, listener: &config::Listener) -> bool {
        let own = &self.source.listener;
        let is_system_port =
            matches!(listener.listen, config::ListenAddr::Tcp(address) if address.port() == 0);
        own.listen == listener.listen && (own.name == listener.name || !is_system_port)
    }

    fn open(&self) {
        let listener = &self.source.listener.name;
        match self.listener_socket.start_accepting(&self.socket) {
            Ok(()) => {
                let address = self.socket.local_addr();
                let address = address.map_or_else(|| "unix".to_owned(), |at| at.to_string());
                tracing::info!(listener, address, "listener open");
            }
            Err(error) => tracing::error!(listener, %error, "this listener cannot be served"),
        }
    }

    /// Closes the socket. The workers close its last handles, after they have emptied the queue of clients.
    fn close(self) -> (ListenerSource, Arc<Listener>) {
        drop(self.socket);
        self.listener_socket.close();
        if let config::ListenAddr::Unix(path) = &self.source.listener.listen {
            // Fails if the task of the listener has already removed the file.
            let _ = std::fs::remove_file(path);
        }
        (self.source, self.listener)
    }
}

/// Listener that a reload has removed, and that has open streams.
#[derive(Debug)]
struct Removed {
    source: ListenerSource,
    listener: Weak<Listener>,
}

/// Removed listener that was rebuilt from the current state of its files and of the other listeners.
#[derive(Debug)]
struct Rebuilt {
    previous: Arc<Listener>,
    source: ListenerSource,
    listener: Arc<Listener>,
}

/// Change of one listener in a new list.
#[derive(Debug)]
enum ListenerChange {
    /// The listener at this index of the old list stays unchanged.
    Keep(usize),
    /// The listener at this index of the old list keeps its socket and gets another configuration.
    Replace(usize, ListenerSource, (Arc<Listener>, Vec<Proxy>)),
    /// The listener is new.
    Open(ActiveListener),
}

impl ListenerChange {
    /// Whether the listener at this index of the old list is kept.
    fn keeps_index(&self, index: usize) -> bool {
        matches!(self, Self::Keep(kept) | Self::Replace(kept, ..) if *kept == index)
    }

    /// Returns the configuration and file contents of the listener.
    fn source<'a>(&'a self, active: &'a ActiveListeners) -> &'a ListenerSource {
        match self {
            Self::Keep(place) => &active.listeners[*place].source,
            Self::Replace(_, material, _) => material,
            Self::Open(stand) => &stand.source,
        }
    }
}

/// New list of listeners, completely built and not applied yet.
#[derive(Debug)]
pub(super) struct ListenerUpdate<'a> {
    active: MutexGuard<'a, ActiveListeners>,
    steps: Vec<ListenerChange>,
    removed: Vec<Rebuilt>,
}

/// New TLS configurations of all listeners, built for the new CA and not yet installed.
#[derive(Debug)]
pub(super) struct TlsUpdate<'a> {
    _active: MutexGuard<'a, ActiveListeners>,
    shared: &'a ProxyState,
    updates: Vec<(Arc<Listener>, ListenerTls)>,
}

impl TlsUpdate<'_> {
    /// Installs the configurations, for new connections.
    pub(super) fn apply(self) {
        for (listener, tls) in self.updates {
            // Issues the leaf under the new CA now, which logs names that an imported chain does not permit.
            if let Some(leaves) = &tls.leaves {
                leaves.leaf_for_sni(None);
            }
            listener.replace_tls(tls);
        }
        self.shared.streams.request_recheck();
    }
}

/// Names of the listeners that a reload has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerDiff {
    /// New listeners.
    pub opened: Vec<String>,
    /// Listeners that keep their socket and have a new configuration.
    pub replaced: Vec<String>,
    /// Removed listeners.
    pub closed: Vec<String>,
}

impl Listeners {
    /// Returns an empty list, with the owner of the listeners' tasks and the token that ends them.
    pub(super) fn new(
        ca: &LiveCa,
        shared: &Arc<ProxyState>,
        workers: &Workers,
        (tasks, ending): (&Arc<TaskGroup>, &CancellationToken),
        (inherited, successor): (&InheritedSockets, &Successor),
    ) -> Self {
        let (fetch_tasks, runtime) = (TaskGroup::new(ending), workers.runtime(WorkerId(0)).clone());
        let (bound, metrics) = (shared.timeouts.authorize, shared.metrics.clone());
        Self {
            issuers: JwksFetchers::new(fetch_tasks, runtime, bound, metrics),
            ca: ca.clone(),
            shared: shared.clone(),
            workers: workers.clone(),
            tasks: tasks.clone(),
            inherited: inherited.clone(),
            successor: successor.clone(),
            end_token: ending.clone(),
            active: Mutex::default(),
        }
    }

    /// Returns names and addresses. Unix sockets have no address.
    pub(super) fn addresses(&self) -> Vec<(String, Option<SocketAddr>)> {
        let address_of = |stand: &ActiveListener| {
            let name = stand.source.listener.name.clone();
            (name, stand.socket.local_addr())
        };
        self.standing().listeners.iter().map(address_of).collect()
    }

    /// Returns handles of the open sockets, for a successor.
    pub(super) fn sockets(&self) -> Vec<(SocketName, OwnedFd)> {
        let handle_of = |stand: &ActiveListener| {
            let listener = &stand.source.listener;
            let name = SocketName::of_listener(&socket_use(&listener.name), &listener.listen)
                .bound_to(stand.socket.local_addr());
            // Without the handle the successor binds the address itself.
            let handle = stand.socket.as_fd().try_clone_to_owned().ok()?;
            Some((name, handle))
        };
        self.standing()
            .listeners
            .iter()
            .filter_map(handle_of)
            .collect()
    }

    /// Returns the presented and trusted certificates of all listeners, or `None` while a reload reads files.
    pub(super) fn certificates(&self) -> Option<Vec<CertificateInUse>> {
        let standing = match self.active.try_lock() {
            Ok(standing) => standing,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let certificates_of = |stand: &ActiveListener| {
            let mut all = stand.source.certificates();
            let generated = stand.listener.generated_certificate();
            let used_for = format!("listener:{}", stand.source.listener.name);
            let made = generated.and_then(|made| CertificateInUse::read(used_for, &made, None));
            all.extend(made.map(CertificateInUse::issued_by_us));
            all
        };
        Some(
            standing
                .listeners
                .iter()
                .flat_map(certificates_of)
                .collect(),
        )
    }

    /// Whether the listeners are closed, and only their open streams continue.
    pub(super) fn is_draining(&self) -> bool {
        self.standing().is_draining
    }

    /// Opens the listeners to clients.
    pub(super) fn open(&self) {
        let mut standing = self.standing();
        standing.is_open = true;
        standing.listeners.iter().for_each(ActiveListener::open);
    }

    /// Waits for `close`, and closes all sockets. New clients are then refused at once and do not wait. Reloads still change the
    /// rules for the open streams.
    pub(super) async fn retire(&self, close: &CancellationToken) {
        close.cancelled().await;
        let mut standing = self.standing();
        standing.is_draining = true;
        let listeners = std::mem::take(&mut standing.listeners);
        standing
            .removed
            .extend(listeners.into_iter().map(|closed| Removed {
                listener: Arc::downgrade(&closed.listener),
                source: closed.source,
            }));
        drop(standing);
        // The workers close the last handles of the sockets, after they have emptied the queues.
        self.end_token.cancel();
    }

    /// Reads and builds everything that `listeners` require, and binds new sockets. A gateway that has closed its listeners opens
    /// none. Blocks concurrent calls.
    pub(super) fn plan(
        &self,
        listeners: &[config::Listener],
    ) -> Result<ListenerUpdate<'_>, BindError> {
        let standing = self.standing();
        if standing.is_draining {
            return Ok(ListenerUpdate {
                removed: self.rebuild_closed(&standing, listeners),
                active: standing,
                steps: Vec::new(),
            });
        }
        let mut steps: Vec<ListenerChange> = Vec::with_capacity(listeners.len());
        for listener in listeners {
            let index = standing
                .listeners
                .iter()
                .position(|stand| stand.can_continue_as(listener));
            let current = index.map(|place| &standing.listeners[place].source);
            let material = ListenerSource::read_replacing(listener, current)?;
            steps.push(match index {
                Some(place) if standing.listeners[place].source == material => {
                    ListenerChange::Keep(place)
                }
                Some(place) => {
                    let proxies = self.proxies(&material, &standing.listeners[place].socket)?;
                    ListenerChange::Replace(place, material, proxies)
                }
                None => {
                    let opened = self.open_listener(material);
                    ListenerChange::Open(
                        opened.map_err(|error| standing.explain_bind_error(listener, error))?,
                    )
                }
            });
        }
        let removed = self.rebuild_removed(&standing, &steps);
        Ok(ListenerUpdate {
            active: standing,
            steps,
            removed,
        })
    }

    /// Rebuilds removed listeners whose inputs have changed: their files, or the client certificates that listeners with a common
    /// CA revoke. A listener that cannot be read or built stays unchanged, because a reload must not fail for a listener that is
    /// not in its configuration.
    fn rebuild_removed(
        &self,
        standing: &ActiveListeners,
        steps: &[ListenerChange],
    ) -> Vec<Rebuilt> {
        let current_sources: Vec<_> = steps.iter().map(|step| step.source(standing)).collect();
        let is_kept = |(place, stand): &(usize, &ActiveListener)| {
            let name = &stand.source.listener.name;
            let named = current_sources
                .iter()
                .any(|other| other.listener.name == *name);
            named || steps.iter().any(|step| step.keeps_index(*place))
        };
        let removed_now = standing.listeners.iter().enumerate();
        let going = removed_now.filter(|going| !is_kept(going));
        let going = going.map(|(_, stand)| (&stand.source, stand.listener.clone()));
        let mut rebuilt = Vec::new();
        for (before, listener) in standing.removed().chain(going) {
            let revoked = current_sources
                .iter()
                .filter(|other| before.shares_ca(other));
            let revoked = revoked.flat_map(|other| &other.listener.client_auth.revoked);
            let configured = with_revoked(before, revoked);
            rebuilt.extend(self.rebuild((before, &listener), &configured));
        }
        rebuilt
    }

    /// Rebuilds the closed listeners of a draining gateway for a new configuration.
    fn rebuild_closed(
        &self,
        standing: &ActiveListeners,
        listeners: &[config::Listener],
    ) -> Vec<Rebuilt> {
        let read = |new| ListenerSource::read(new).ok();
        let sources: Vec<_> = listeners.iter().filter_map(read).collect();
        let rebuild = |(before, listener): (&ListenerSource, Arc<Listener>)| {
            let (name, protocol) = (&before.listener.name, before.listener.protocol);
            let mut listed = listeners.iter();
            let configured = listed.find(|new| new.name == *name && new.protocol == protocol);
            let configured = configured.cloned().unwrap_or_else(|| {
                let related = sources.iter().filter(|other| before.shares_ca(other));
                let revoked = related.flat_map(|other| &other.listener.client_auth.revoked);
                with_revoked(before, revoked)
            });
            self.rebuild((before, &listener), &configured)
        };
        standing.removed().filter_map(rebuild).collect()
    }

    /// Rebuilds a removed listener with this configuration, if its inputs have changed. Logs errors.
    fn rebuild(
        &self,
        (previous_source, listener): (&ListenerSource, &Arc<Listener>),
        configured: &config::Listener,
    ) -> Option<Rebuilt> {
        let build = || {
            let source = ListenerSource::read(configured)?;
            if source == *previous_source {
                return Ok(None);
            }
            let inputs = (&self.ca, &self.issuers);
            let built = source.build(inputs, &self.shared, listener.bound_port)?;
            Ok::<_, BindError>(Some(Rebuilt {
                previous: listener.clone(),
                source,
                listener: Arc::new(built),
            }))
        };
        build().unwrap_or_else(|error| {
            let name = &listener.name;
            tracing::warn!(listener = name, %error, "this closed listener cannot be rebuilt; its open streams are checked against its last loaded files");
            None
        })
    }

    /// Builds the TLS of all listeners for another CA. Blocks concurrent calls of [`Listeners::plan`].
    pub(super) fn prepare_ca(&self, ca: &Ca) -> Result<TlsUpdate<'_>, BindError> {
        let standing = self.standing();
        let all = standing.listeners.iter();
        let all = all.map(|stand| (&stand.source, stand.listener.clone()));
        let mut updates = Vec::new();
        for (material, listener) in all.chain(standing.removed()) {
            let tls = material.tls(ca, (&self.ca, &self.shared.nodes))?;
            updates.extend(tls.map(|tls| (listener, tls)));
        }
        Ok(TlsUpdate {
            _active: standing,
            shared: &self.shared,
            updates,
        })
    }

    fn open_listener(&self, material: ListenerSource) -> Result<ActiveListener, BindError> {
        let listener = &material.listener;
        let socket = bind(
            &socket_use(&listener.name),
            &listener.listen,
            &self.inherited,
        )?;
        let (built, proxies) = self.proxies(&material, &socket)?;
        let tokens = (self.end_token.child_token(), self.successor.serving.clone());
        let entrance = ListenerSocket::new(&self.workers, proxies, tokens);
        Ok(ActiveListener {
            source: material,
            listener: built,
            listener_socket: entrance,
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
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the configuration of a removed listener, which also revokes these client certificates.
fn with_revoked<'a>(
    before: &ListenerSource,
    revoked: impl Iterator<Item = &'a config::Serial>,
) -> config::Listener {
    let mut configured = before.listener.clone();
    let listed = &mut configured.client_auth.revoked;
    for serial in revoked {
        if !listed.contains(serial) {
            listed.push(serial.clone());
        }
    }
    configured
}

/// Returns the description of a listener's socket, for errors and handovers.
fn socket_use(listener: &str) -> String {
    format!("listener {listener:?}")
}

impl ListenerUpdate<'_> {
    /// Applies the update. New `rules` come into force after the old listeners have stopped and before the new ones start. A
    /// stream of a new listener is therefore never checked by the old rules, nor one of an old listener by the new rules.
    pub(super) fn apply(mut self, rules: Option<impl FnOnce()>) -> ListenerDiff {
        let mut diff = ListenerDiff::default();
        let before = std::mem::take(&mut self.active.listeners);
        let mut before: Vec<Option<ActiveListener>> = before.into_iter().map(Some).collect();
        let has_grace_period = rules.is_none();
        for (place, stand) in before.iter().flatten().enumerate() {
            let is_keep = |step: &ListenerChange| matches!(step, ListenerChange::Keep(kept) if *kept == place);
            if !self.steps.iter().any(is_keep) {
                stand.listener_socket.retire(has_grace_period);
            }
        }
        if let Some(rules) = rules {
            rules();
        }
        for step in self.steps {
            let name = |stand: &ActiveListener| stand.source.listener.name.clone();
            let stand = match step {
                ListenerChange::Keep(place) => before[place].take(),
                ListenerChange::Replace(place, material, (listener, proxies)) => before[place]
                    .take()
                    .map(|stand| {
                        stand.listener_socket.replace_config(proxies);
                        // Set only once per listener.
                        let _ = stand.listener.successor.set(listener.clone());
                        ActiveListener {
                            source: material,
                            listener,
                            ..stand
                        }
                    })
                    .inspect(|stand| diff.replaced.push(name(stand))),
                ListenerChange::Open(stand) => {
                    if self.active.is_open {
                        stand.open();
                    }
                    diff.opened.push(name(&stand));
                    Some(stand)
                }
            };
            self.active.listeners.extend(stand);
        }
        self.active.forget_removed();
        for stand in before.into_iter().flatten() {
            // The streams of a listener that has moved are checked by its new rules.
            let name = &stand.source.listener.name;
            let mut listeners = self.active.listeners.iter();
            if let Some(moved) = listeners.find(|moved| moved.source.listener.name == *name) {
                let _ = stand.listener.successor.set(moved.listener.clone());
            }
            let (source, listener) = stand.close();
            diff.closed.push(source.listener.name.clone());
            if listener.successor.get().is_none() {
                self.active.removed.push(Removed {
                    listener: Arc::downgrade(&listener),
                    source,
                });
            }
        }
        self.active.apply_rebuilt(self.removed);
        diff
    }
}
