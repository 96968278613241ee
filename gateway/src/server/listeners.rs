//! The fronts of a gateway: what stands, and how another list of them takes its place.
//!
//! 1. `plan` reads and builds all that a list asks for, and binds what is new; nothing is touched yet.
//! 2. `Plan::apply` opens what is new, leads to what has changed, and closes what is gone. It cannot fail.
//!
//! A front stays on its socket as long as its address stays. One whose configuration and files say what they said is
//! left alone, with all of its connections.

use super::{
    BindError,
    build::{bind, listener::ListenerSource},
};
use crate::{
    config,
    control::{certificate_expiry::CertificateInUse, jwks::JwksFetchers},
    proxy::{
        Proxy, ProxyState,
        listener::{Listener, ListenerSocket, ListenerTls},
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

/// All fronts of a gateway.
#[derive(Debug)]
pub(super) struct Listeners {
    ca: LiveCa,
    shared: Arc<ProxyState>,
    issuers: JwksFetchers,
    cores: Workers,
    tasks: Arc<TaskGroup>,
    /// Asks all of them, and their connections, to finish.
    ending: CancellationToken,
    standing: Mutex<ActiveListeners>,
}

/// What there is now.
#[derive(Debug, Default)]
struct ActiveListeners {
    /// Whether callers are let in: what is new is opened at once from then on.
    open: bool,
    /// The gateway is leaving: nothing is opened any more.
    over: bool,
    fronts: Vec<ActiveListener>,
    removed: Vec<Removed>,
}

impl ActiveListeners {
    /// Leads the streams of removed fronts whose names are back to those, and forgets fronts without streams.
    fn forget_removed(&mut self) {
        let fronts = &self.fronts;
        self.removed.retain(|removed| {
            let Some(front) = removed.front.upgrade() else {
                return false;
            };
            let name = &removed.material.front.name;
            let back = fronts
                .iter()
                .find(|stand| stand.material.front.name == *name);
            if let Some(back) = back {
                let _ = front.successor.set(back.front.clone());
            }
            back.is_none()
        });
    }

    /// The fronts that were removed and have streams.
    fn removed(&self) -> impl Iterator<Item = (&ListenerSource, Arc<Listener>)> {
        let removed = self.removed.iter();
        removed.filter_map(|removed| Some((&removed.material, removed.front.upgrade()?)))
    }

    /// Has the streams of removed fronts checked by what is known of these now.
    fn replace_removed(&mut self, all: Vec<Rebuilt>) {
        for rebuilt in all {
            let before = Arc::downgrade(&rebuilt.before);
            let mut removed = self.removed.iter_mut();
            if let Some(removed) = removed.find(|removed| removed.front.ptr_eq(&before)) {
                removed.front = Arc::downgrade(&rebuilt.front);
                removed.material = rebuilt.material;
                // Each front is replaced once.
                let _ = rebuilt.before.successor.set(rebuilt.front);
            }
        }
    }

    /// A front that cannot have its socket because another has it learns which.
    fn explain(&self, front: &config::Listener, error: BindError) -> BindError {
        let config::ListenAddr::Tcp(address) = front.listen else {
            return error;
        };
        let port = |stand: &&ActiveListener| {
            let there = stand.listener.local_addr();
            there.is_some_and(|there| there.port() == address.port())
        };
        match (error, self.fronts.iter().find(port)) {
            (BindError::Listen { listen, .. }, Some(stand)) => BindError::Held {
                front: front.name.clone(),
                listen,
                by: stand.material.front.name.clone(),
            },
            (error, _) => error,
        }
    }
}

/// One front, with its socket.
#[derive(Debug)]
struct ActiveListener {
    material: ListenerSource,
    front: Arc<Listener>,
    entrance: Arc<ListenerSocket>,
    listener: BoundSocket,
}

impl ActiveListener {
    /// Whether `front` goes on here: the socket is the same. Where the system chooses the port, it is the name that
    /// tells them apart.
    fn carries(&self, front: &config::Listener) -> bool {
        let own = &self.material.front;
        let chosen =
            matches!(front.listen, config::ListenAddr::Tcp(address) if address.port() == 0);
        own.listen == front.listen && (own.name == front.name || !chosen)
    }

    fn open(&self) {
        let front = &self.material.front.name;
        match self.entrance.open(&self.listener) {
            Ok(()) => {
                let address = self.listener.local_addr();
                let address = address.map_or_else(|| "unix".to_owned(), |at| at.to_string());
                tracing::info!(front, address, "front open");
            }
            Err(error) => tracing::error!(front, %error, "this front cannot be served"),
        }
    }
}

/// A front that a reload has removed, for as long as streams of it are open.
#[derive(Debug)]
struct Removed {
    material: ListenerSource,
    front: Weak<Listener>,
}

/// A front that is removed, as its files and the other fronts have it now.
#[derive(Debug)]
struct Rebuilt {
    before: Arc<Listener>,
    material: ListenerSource,
    front: Arc<Listener>,
}

/// What becomes of one front of a new list.
#[derive(Debug)]
enum ListenerChange {
    /// It stays, at this place of the old list.
    Keep(usize),
    /// It stays on the socket of the one at this place, and is another now.
    Replace(usize, ListenerSource, (Arc<Listener>, Vec<Proxy>)),
    /// It is new.
    Open(ActiveListener),
}

impl ListenerChange {
    /// Whether the front at this place of the old list stays.
    fn is_at(&self, place: usize) -> bool {
        matches!(self, Self::Keep(kept) | Self::Replace(kept, ..) if *kept == place)
    }

    /// The configuration and file contents that the front is made of.
    fn material<'a>(&'a self, standing: &'a ActiveListeners) -> &'a ListenerSource {
        match self {
            Self::Keep(place) => &standing.fronts[*place].material,
            Self::Replace(_, material, _) => material,
            Self::Open(stand) => &stand.material,
        }
    }
}

/// A list of fronts of which all is built.
#[derive(Debug)]
pub(super) struct ListenerUpdate<'a> {
    standing: MutexGuard<'a, ActiveListeners>,
    steps: Vec<ListenerChange>,
    removed: Vec<Rebuilt>,
}

/// The TLS of all fronts for another CA, built.
#[derive(Debug)]
pub(super) struct TlsUpdate<'a> {
    _standing: MutexGuard<'a, ActiveListeners>,
    shared: &'a ProxyState,
    turned: Vec<(Arc<Listener>, ListenerTls)>,
}

impl TlsUpdate<'_> {
    /// Makes it so, for connections that come from now on.
    pub(super) fn apply(self) {
        for (front, tls) in self.turned {
            front.turn_to(tls);
        }
        self.shared.streams.changed();
    }
}

/// The names of fronts to which something happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerDiff {
    /// Those that are new.
    pub opened: Vec<String>,
    /// Those that are on their socket still, and are others now.
    pub replaced: Vec<String>,
    /// Those that are gone.
    pub closed: Vec<String>,
}

impl Listeners {
    /// None yet, with the owner of their tasks and what asks them to finish.
    pub(super) fn new(
        ca: &LiveCa,
        shared: &Arc<ProxyState>,
        cores: &Workers,
        (tasks, ending): (&Arc<TaskGroup>, &CancellationToken),
    ) -> Self {
        let (fetching, runtime) = (TaskGroup::new(ending), cores.runtime(WorkerId(0)).clone());
        let (bound, metrics) = (shared.timeouts.authorize, shared.metrics.clone());
        Self {
            issuers: JwksFetchers::new(fetching, runtime, bound, metrics),
            ca: ca.clone(),
            shared: shared.clone(),
            cores: cores.clone(),
            tasks: tasks.clone(),
            ending: ending.clone(),
            standing: Mutex::default(),
        }
    }

    /// Names and addresses; unix sockets have no address.
    pub(super) fn addresses(&self) -> Vec<(String, Option<SocketAddr>)> {
        let address = |stand: &ActiveListener| {
            let name = stand.material.front.name.clone();
            (name, stand.listener.local_addr())
        };
        self.standing().fronts.iter().map(address).collect()
    }

    /// The certificates of all listeners, shown and trusted; or `None` while a reload reads files.
    pub(super) fn certificates(&self) -> Option<Vec<CertificateInUse>> {
        let standing = match self.standing.try_lock() {
            Ok(standing) => standing,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let of = |stand: &ActiveListener| {
            let mut all = stand.material.certificates();
            let made = stand.front.made_certificate();
            let used_for = format!("listener:{}", stand.material.front.name);
            let made = made.and_then(|made| CertificateInUse::read(used_for, &made, None));
            all.extend(made.map(CertificateInUse::issued_by_us));
            all
        };
        Some(standing.fronts.iter().flat_map(of).collect())
    }

    /// Lets callers in.
    pub(super) fn open(&self) {
        let mut standing = self.standing();
        standing.open = true;
        standing.fronts.iter().for_each(ActiveListener::open);
    }

    /// Waits until all fronts are asked to finish, and gives up their sockets: whoever comes then is refused at once,
    /// and not left to wait for nobody.
    pub(super) async fn retire(&self) {
        self.ending.cancelled().await;
        let mut standing = self.standing();
        standing.over = true;
        standing.fronts.clear();
    }

    /// Reads and builds all that `fronts` ask for, and binds what is new. Holds everybody else off who would plan.
    pub(super) fn plan(
        &self,
        fronts: &[config::Listener],
    ) -> Result<ListenerUpdate<'_>, BindError> {
        let standing = self.standing();
        if standing.over {
            return Err(BindError::Leaving);
        }
        let mut steps: Vec<ListenerChange> = Vec::with_capacity(fronts.len());
        for front in fronts {
            let place = standing
                .fronts
                .iter()
                .position(|stand| stand.carries(front));
            let current = place.map(|place| &standing.fronts[place].material);
            let material = ListenerSource::read_in_place_of(front, current)?;
            steps.push(match place {
                Some(place) if standing.fronts[place].material == material => {
                    ListenerChange::Keep(place)
                }
                Some(place) => {
                    let proxies = self.proxies(&material, &standing.fronts[place].listener)?;
                    ListenerChange::Replace(place, material, proxies)
                }
                None => {
                    let opened = self.stand(material);
                    ListenerChange::Open(opened.map_err(|error| standing.explain(front, error))?)
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

    /// Builds the fronts that are removed, now or before, and of which something else is known: what their files say, or
    /// the client certificates that fronts with one of their CAs revoke. One that cannot be read or built stays as it was: a
    /// reload is not refused for a front that its configuration does not have.
    fn rebuild_removed(
        &self,
        standing: &ActiveListeners,
        steps: &[ListenerChange],
    ) -> Vec<Rebuilt> {
        let others: Vec<_> = steps.iter().map(|step| step.material(standing)).collect();
        let stays = |(place, stand): &(usize, &ActiveListener)| {
            let name = &stand.material.front.name;
            let named = others.iter().any(|other| other.front.name == *name);
            named || steps.iter().any(|step| step.is_at(*place))
        };
        let going = standing.fronts.iter().enumerate();
        let going = going.filter(|going| !stays(going));
        let going = going.map(|(_, stand)| (&stand.material, stand.front.clone()));
        let mut rebuilt = Vec::new();
        for (before, front) in standing.removed().chain(going) {
            let revoked = others.iter().filter(|other| before.shares_ca(other));
            let revoked = revoked.flat_map(|other| &other.front.callers.revoked);
            match self.rebuild((before, &front), revoked) {
                Ok(Some(built)) => rebuilt.push(built),
                Ok(None) => {}
                Err(error) => {
                    let name = &front.name;
                    tracing::warn!(front = name, %error, "this listener was removed; its open streams are checked by what its files said last");
                }
            }
        }
        rebuilt
    }

    /// Builds a removed front, if something else is known of it.
    fn rebuild<'a>(
        &self,
        (before, front): (&ListenerSource, &Arc<Listener>),
        revoked: impl Iterator<Item = &'a config::Serial>,
    ) -> Result<Option<Rebuilt>, BindError> {
        let mut configured = before.front.clone();
        let listed = &mut configured.callers.revoked;
        for serial in revoked {
            if !listed.contains(serial) {
                listed.push(serial.clone());
            }
        }
        let material = ListenerSource::read(&configured)?;
        if material == *before {
            return Ok(None);
        }
        let built = material.build((&self.ca, &self.issuers), &self.shared, front.listens)?;
        Ok(Some(Rebuilt {
            before: front.clone(),
            material,
            front: Arc::new(built),
        }))
    }

    /// Builds what another CA is shown and believed by. Holds everybody else off who would plan.
    pub(super) fn turn_to(&self, ca: &Ca) -> Result<TlsUpdate<'_>, BindError> {
        let standing = self.standing();
        let all = standing.fronts.iter();
        let all = all.map(|stand| (&stand.material, stand.front.clone()));
        let mut turned = Vec::new();
        for (material, front) in all.chain(standing.removed()) {
            let tls = material.tls(ca, (&self.ca, &self.shared.nodes))?;
            turned.extend(tls.map(|tls| (front, tls)));
        }
        Ok(TlsUpdate {
            _standing: standing,
            shared: &self.shared,
            turned,
        })
    }

    fn stand(&self, material: ListenerSource) -> Result<ActiveListener, BindError> {
        let front = &material.front;
        let listener = bind(&format!("front {:?}", front.name), &front.listen)?;
        let (built, proxies) = self.proxies(&material, &listener)?;
        let entrance = ListenerSocket::new(&self.cores, proxies, self.ending.child_token());
        Ok(ActiveListener {
            material,
            front: built,
            entrance,
            listener,
        })
    }

    /// The front's proxy on each core.
    fn proxies(
        &self,
        material: &ListenerSource,
        listener: &BoundSocket,
    ) -> Result<(Arc<Listener>, Vec<Proxy>), BindError> {
        let listens = listener.local_addr().map(|address| address.port());
        let built = Arc::new(material.build((&self.ca, &self.issuers), &self.shared, listens)?);
        let proxy = |core| Proxy {
            shared: self.shared.clone(),
            front: built.clone(),
            core,
            tasks: self.tasks.clone(),
        };
        let proxies = self.cores.all().map(proxy).collect();
        Ok((built, proxies))
    }

    fn standing(&self) -> MutexGuard<'_, ActiveListeners> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ListenerUpdate<'_> {
    /// Makes it so. Other `rules` come into force in between: no stream is judged by the old ones at a new front, or by
    /// the new ones at an old front.
    pub(super) fn apply(mut self, rules: Option<impl FnOnce()>) -> ListenerDiff {
        let mut done = ListenerDiff::default();
        let before = std::mem::take(&mut self.standing.fronts);
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
            let name = |stand: &ActiveListener| stand.material.front.name.clone();
            let stand = match step {
                ListenerChange::Keep(place) => before[place].take(),
                ListenerChange::Replace(place, material, (front, proxies)) => before[place]
                    .take()
                    .map(|stand| {
                        stand.entrance.replace(proxies);
                        // Each front is replaced once.
                        let _ = stand.front.successor.set(front.clone());
                        ActiveListener {
                            material,
                            front,
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
            self.standing.fronts.extend(stand);
        }
        self.standing.forget_removed();
        for stand in before.into_iter().flatten() {
            // The streams of a listener that has moved are decided about by its new rules.
            let name = &stand.material.front.name;
            let mut fronts = self.standing.fronts.iter();
            if let Some(moved) = fronts.find(|moved| moved.material.front.name == *name) {
                let _ = stand.front.successor.set(moved.front.clone());
            }
            stand.entrance.close();
            if let config::ListenAddr::Unix(path) = &stand.material.front.listen {
                // Whoever has taken it away already has done the same.
                let _ = std::fs::remove_file(path);
            }
            done.closed.push(stand.material.front.name.clone());
            if stand.front.successor.get().is_none() {
                self.standing.removed.push(Removed {
                    front: Arc::downgrade(&stand.front),
                    material: stand.material,
                });
            }
        }
        self.standing.replace_removed(self.removed);
        done
    }
}
