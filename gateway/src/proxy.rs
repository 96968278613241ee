//! The way of a request. Read [`Proxy::handle`] first: its steps are the files below, in order.
//!
//! Step by step: (1) `front` accepts, finishes TLS and knows the connection; (2) `caller` says who calls; (3) `route` finds node
//! and target; (4) `authorize` decides; (5) the registry picks a tunnel, and `limits` admits a stream on it;
//! (6) `forward`, `upgrade` or `relay` opens the stream, where `app` does not speak TLS through one and `direct` does not dial itself
//! what is at no edge; (7) `reply` alone turns failures into bytes;
//! (8) `access` keeps one record per stream. Nothing here writes a table, and what it waits for of control has a bound: a
//! decision that is somebody else's (`reviews` for one), or a key that is not here.

pub mod front;

pub mod caller;
pub mod request;
pub mod route;

pub mod pods;

pub mod authorize;
pub mod limits;
pub mod recheck;
pub mod reviews;

pub mod forward;
pub mod forwarding_headers;
mod request_body;
pub mod told;
mod upload;

mod held;
pub mod relay;
pub mod upgrade;

pub mod app;
pub mod direct;

pub mod outgoing;
pub mod reply;

pub mod access;
mod trace;

use crate::{
    config::{ErrorForm, Timeouts},
    core::CoreId,
    error::{Error, Reason},
    metrics::Metrics,
    state::{Away, Nodes, Registry, TunnelId, registry::Picked},
};
use access::Record;
use app::Apps;
use authorize::{Act, Ask, Authorize, Destination};
use caller::{Caller, jwt::Expired};
use causeway_certs::NodeName;
use causeway_tunnel::{headers, interim::Exchange, task::Tasks};
use front::{Connection, Front};
use http::{HeaderMap, Method, Request, Response, Version, header::EXPECT};
use http_body::Body;
use hyper::body::Incoming;
use limits::{Count, Limits};
use outgoing::Outgoing;
use pods::Pods;
use recheck::{Allowed, OpenStreams};
use reply::Protocol;
use request::Kind;
use request_body::RequestBody;
use reviews::Answers;
use route::{Asked, Route};
use std::{pin::pin, sync::Arc, time::SystemTime};

/// What all fronts of a gateway share.
#[derive(Debug)]
pub struct Shared {
    /// The nodes that are known.
    pub nodes: Nodes,
    /// The tunnels that are here.
    pub registry: Registry,
    /// How many streams may be open.
    pub limits: Limits,
    /// Sessions that are dialled from here.
    pub direct: Count,
    /// The streams that are open.
    pub streams: OpenStreams,
    /// Apps to which this gateway itself speaks TLS.
    pub apps: Apps,
    /// Who knows where pods are, if anybody does.
    pub pods: Option<Arc<dyn Pods>>,
    /// What the cluster's API says of callers, if there is one.
    pub reviews: Option<Answers>,
    /// Who may do what.
    pub authorizer: Arc<dyn Authorize>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// The bounds of waits.
    pub timeouts: Timeouts,
    /// Which streams leave a line in the access log.
    pub access_log: crate::config::AccessLog,
    /// Longest target of a request, in bytes.
    pub uri_bytes: usize,
    /// The same at listeners whose errors are for kubectl.
    pub kubernetes_uri_bytes: usize,
    /// Largest fields of a request, in bytes.
    pub header_bytes: usize,
    /// Most fields in a request head.
    pub max_headers: usize,
}

/// One front on one core.
#[derive(Clone, Debug)]
pub struct Proxy {
    /// What all fronts share.
    pub shared: Arc<Shared>,
    /// The front.
    pub front: Arc<Front>,
    /// The core that serves the connection.
    pub core: CoreId,
    /// The owner of what outlives a request: request bodies, upgraded sessions.
    pub tasks: Arc<Tasks>,
}

impl Proxy {
    /// From a caller's request to an app's answer, or to the reply that says why there is none.
    pub async fn handle(
        &self,
        connection: &Arc<Connection>,
        request: Request<Incoming>,
        exchange: Exchange,
    ) -> Response<Outgoing> {
        let record = Record::begin(self, connection, &request);
        let protocol = Protocol::of(&request);
        let is_awaited = !request.body().is_end_stream()
            && headers::lists(request.headers(), &EXPECT, "100-continue");
        let is_http1 = request.version() != Version::HTTP_2;
        let condition = is_http1.then_some(&connection.condition);
        let request = request
            .map(|body| RequestBody::new(body, is_awaited, (self, connection.peer), condition));
        // RFC 9110 §9.3.2. The engine sees to it for HTTP/1.1 alone.
        let bodiless = request.method() == Method::HEAD && request.version() == Version::HTTP_2;
        let served = pin!(self.serve(connection, request, exchange, &record));
        match record.unless_ended(served).await.flatten() {
            Ok(response) => response,
            Err(error) => {
                let error = self.ended_by_drain(&record, error);
                let reply = reply::of(&self.front, &record, (protocol, &error));
                if bodiless {
                    return reply.map(|_| Outgoing::empty());
                }
                reply
            }
        }
    }

    /// Returns the error of a request that failed, which is of the drain if this gateway itself has closed the tunnel.
    fn ended_by_drain(&self, record: &Record, error: Error) -> Error {
        if error.reason == Reason::TunnelLost && self.shared.registry.is_over() {
            record.failed(&error);
            return record.failure().unwrap_or(error);
        }
        error
    }

    /// Returns how many bytes of a request's target this listener takes.
    pub(crate) fn most_target(&self) -> usize {
        match self.front.errors {
            ErrorForm::Problem => self.shared.uri_bytes,
            ErrorForm::Kubernetes => self.shared.kubernetes_uri_bytes,
        }
    }

    fn bounds(&self) -> request::Bounds {
        request::Bounds {
            target: self.most_target(),
            header_bytes: self.shared.header_bytes,
            headers: self.shared.max_headers,
        }
    }

    /// Returns the form of the listener's errors, and the longest target that it takes.
    pub(crate) fn form(&self) -> (ErrorForm, usize) {
        (self.front.errors, self.most_target())
    }

    async fn serve(
        &self,
        connection: &Arc<Connection>,
        request: Request<RequestBody>,
        exchange: Exchange,
        record: &Arc<Record>,
    ) -> Result<Response<Outgoing>, Error> {
        if self.front.is_over() {
            let why = "this front has another configuration by now; connect anew";
            return Err(Reason::Draining.says(why));
        }
        request::check(&request, self.bounds())?;
        let kind = request::kind(&request, self.front.kind)?;
        let asked = self.front.asked(connection, request::authority(&request)?);
        if matches!(kind, Kind::Connect)
            && let Some(target) = direct::target(&self.front.direct, &asked, &self.shared.nodes)
        {
            let caller = self.identify(connection, request.headers(), Some(target.port));
            let caller = caller.await?;
            record.caller(&caller);
            record.allow(Allowed::new(Act::Connect, &request, connection));
            let direct = direct::Direct {
                proxy: self,
                connection,
                caller: &caller,
                target: &target,
                record,
            };
            return Box::pin(direct::connect(direct, request)).await;
        }
        let (caller, routed) = self.known(connection, request.headers(), &asked).await?;
        record.caller(&caller);
        let route = pods::or_route(self, (&caller, &kind), &request, routed).await?;
        record.route(&route);
        let act = match kind {
            Kind::Plain => Act::Request,
            Kind::Upgrade(_) => Act::Upgrade,
            Kind::Connect => Act::Connect,
        };
        let ask = Ask {
            caller: &caller,
            from: connection.peer,
            destination: Destination::Node(&route),
            act,
            method: request.method(),
            path: request.uri().path(),
        };
        record.allow(Allowed::new(act, &request, connection));
        self.authorize(&ask, record).await?;
        let picked = self.pick(&route).await?;
        record.permit(self.shared.limits.admit(&caller.open, &picked.streams)?);
        record.tunnel(picked.id);
        let way = Way {
            proxy: self,
            connection,
            caller: &caller,
            route: &route,
            tunnel: &picked.tunnel,
            id: picked.id,
            record,
            exchange,
        };
        way.open(kind, request).await
    }

    /// Who calls, and where to. The route is looked up first, because who may come as nobody depends on the
    /// port that is really reached; but that a route is wrong is told to a known caller only.
    pub(crate) async fn meet(
        &self,
        connection: &Connection,
        fields: &HeaderMap,
        asked: &Asked<'_>,
    ) -> Result<(Caller, Route), Error> {
        let (caller, routed) = self.known(connection, fields, asked).await?;
        Ok((caller, routed?))
    }

    async fn known(
        &self,
        connection: &Connection,
        fields: &HeaderMap,
        asked: &Asked<'_>,
    ) -> Result<(Caller, Result<Route, Error>), Error> {
        let routed = route::of(asked, &self.shared.nodes);
        let port = routed.as_ref().ok().map(|route| route.target.port);
        let caller = self.identify(connection, fields, port).await?;
        Ok((caller, routed))
    }

    async fn identify(
        &self,
        connection: &Connection,
        fields: &HeaderMap,
        port: Option<u16>,
    ) -> Result<Caller, Error> {
        self.identify_by(connection, (fields, Expired::Refused), port)
            .await
    }

    /// Says who calls, by a JWT that has expired too if that is so wanted.
    async fn identify_by(
        &self,
        connection: &Connection,
        presented: (&HeaderMap, Expired<'_>),
        port: Option<u16>,
    ) -> Result<Caller, Error> {
        let authentication = &self.front.authentication;
        let caller = authentication
            .identify(connection, presented, port, &self.shared)
            .await?;
        if !self.front.believes(caller.root) {
            let why = "certificate: the root on which it hangs is trusted no more";
            return Err(Reason::Unauthenticated.says(why));
        }
        caller.is_welcome(&self.front)?;
        Ok(caller)
    }

    /// Whether they may, which the record notes.
    pub(crate) async fn authorize(&self, ask: &Ask<'_>, record: &Record) -> Result<(), Error> {
        let (authorizer, bound) = (&self.shared.authorizer, self.shared.timeouts.authorize);
        let (by, decided) = authorize::check(authorizer.as_ref(), ask, bound).await;
        if let Some(by) = by {
            record.decided(by);
        }
        decided?;
        reviews::check(self, ask).await
    }

    /// The tunnel to use, or why there is none. Waits for a node that is probably back soon.
    pub(crate) async fn pick(&self, route: &Route) -> Result<Picked, Error> {
        if self.shared.registry.core(&route.node) != self.core {
            self.shared.metrics.crossed();
        }
        self.shared
            .registry
            .pick_within(&route.node, self.shared.timeouts.reconnect)
            .await
            .map_err(|away| explain(&route.node, &away))
    }
}

/// What the last steps of the way need: a stream is about to be opened.
#[derive(Clone, Copy, Debug)]
pub struct Way<'a> {
    /// The front and what it shares.
    pub proxy: &'a Proxy,
    /// The caller's connection.
    pub connection: &'a Arc<Connection>,
    /// Who calls.
    pub caller: &'a Caller,
    /// The node and port that it goes to.
    pub route: &'a Route,
    /// The tunnel that was picked.
    pub tunnel: &'a causeway_tunnel::Tunnel,
    /// Its identity.
    pub id: TunnelId,
    /// The record of this stream.
    pub record: &'a Arc<Record>,
    /// Exchange that interim answers belong to.
    pub exchange: Exchange,
}

impl Way<'_> {
    /// The last step: opens the stream, or asks the app through one. Only the way of most requests is a part of this
    /// future, which is moved as a whole at each request; the larger ones are allocated.
    async fn open(
        self,
        kind: Kind,
        request: Request<RequestBody>,
    ) -> Result<Response<Outgoing>, Error> {
        match (kind, self.proxy.shared.apps.of(self.route)) {
            (Kind::Plain, None) => forward::run(self, request).await,
            (Kind::Plain, Some(app)) => Box::pin(app::forward(self, &app, request)).await,
            (Kind::Upgrade(token), None) => Box::pin(upgrade::run(self, request, &token)).await,
            (Kind::Upgrade(token), Some(app)) => {
                Box::pin(app::upgrade(self, &app, request, &token)).await
            }
            (Kind::Connect, _) => Box::pin(relay::connect(self, request)).await,
        }
    }
}

fn explain(node: &NodeName, away: &Away) -> Error {
    match away {
        Away::Never => Reason::NodeAway.says(format!(
            "{node} is not connected and was not seen since this gateway started"
        )),
        Away::Last { seen, from } => {
            let ago = SystemTime::now().duration_since(*seen).unwrap_or_default();
            Reason::NodeAway.says(format!(
                "{node} is not connected since {}, {} s ago; its last tunnel came from {from}",
                humantime::format_rfc3339_seconds(*seen),
                ago.as_secs()
            ))
        }
        Away::Suspect { from } => Reason::NodeAway.says(format!(
            "{node} does not answer on its tunnel from {from}; the link is probably down"
        )),
        Away::Draining => Reason::Draining.says(format!(
            "{node} is leaving this gateway and takes no new streams here"
        )),
    }
}

/// Whether a method is CONNECT.
pub(crate) fn is_connect(method: &Method) -> bool {
    method == Method::CONNECT
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, into);
            } else {
                into.push(path);
            }
        }
    }

    #[test]
    fn proxy_and_control_import_only_what_lies_between() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for (side, other) in [("proxy", "control"), ("control", "proxy")] {
            let mut files = vec![root.join(format!("{side}.rs"))];
            sources(&root.join(side), &mut files);
            assert!(files.len() > 5, "{side} has its files");
            for file in files {
                let text = std::fs::read_to_string(&file).unwrap();
                // A list of imports may break its line behind `crate::{`.
                let guilty = text.lines().find(|line| {
                    let line = line.trim_start();
                    line.contains(&format!("crate::{other}::"))
                        || line.starts_with(&format!("{other}::"))
                });
                assert_eq!(guilty, None, "{} imports {other}", file.display());
            }
        }
    }
}
