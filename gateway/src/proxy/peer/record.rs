//! Access record of a request that another gateway has forwarded, at the gateway that holds the node.
//!
//! The gateway that the client has reached writes the record with everything that depends on the client, and counts the request
//! in the metrics of its listener. This record has the same trace, and counts as a request of a client in no metric and in no
//! audit log. It is written when the stream has ended.

use super::ForwardedClient;
use crate::{
    config::AccessLog,
    error::{Error, Reason},
    proxy::{
        access_log::{loggable_path, millis, rule_line},
        context::ProxyState,
        route::Route,
        trace_context::Trace,
    },
    state::{TunnelId, directory::ForwardingGateway, policy::MatchedRule},
};
use bytes::Bytes;
use causeway_tunnel::{
    StreamError, StreamKind, StreamReceiver, copy::ByteCounters, edge_side::StreamRequest, wire,
};
use http::{HeaderMap, Method, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use std::{
    net::IpAddr,
    sync::{
        OnceLock,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::{Duration, Instant},
};

/// Access record of a forwarded request.
pub(super) struct ForwardedRecord {
    access_log: AccessLog,
    /// Gateway that forwards the request.
    forwarded_by: ForwardingGateway,
    started_at: Instant,
    trace: Trace,
    client: String,
    client_address: Option<IpAddr>,
    route: Route,
    method: String,
    /// The path without its query, or the target of a CONNECT.
    path: String,
    bytes: ByteCounters,
    matched_rule: OnceLock<MatchedRule>,
    tunnel: OnceLock<TunnelId>,
    /// Status of the response, and the time until its head arrived.
    answer: OnceLock<(StatusCode, Duration)>,
    failure: OnceLock<(Reason, String)>,
    is_complete: AtomicBool,
}

impl ForwardedRecord {
    /// Begins the record of a request for `route`.
    pub(super) fn begin(
        (shared, forwarded_by): (&ProxyState, ForwardingGateway),
        client: &ForwardedClient,
        route: &Route,
        StreamRequest {
            kind,
            head,
            forwarded,
            ..
        }: &StreamRequest,
    ) -> Self {
        let target;
        let (method, path) = match (&client.inner, kind) {
            (Some((method, path)), StreamKind::Tcp) => (method.as_str(), path.as_str()),
            (None, StreamKind::Tcp) => {
                target = route.target.to_string();
                (Method::CONNECT.as_str(), target.as_str())
            }
            (_, StreamKind::Request | StreamKind::Upgrade(_)) => {
                (head.method().as_str(), head.uri().path())
            }
        };
        // Gateways of earlier versions do not send it.
        let trace = forwarded.trace.as_ref();
        let trace = trace.and_then(|trace| Trace::parse(trace.as_bytes()));
        let trace = trace.unwrap_or_else(|| Trace::from_headers(head.headers()));
        Self {
            access_log: shared.streams.access_log(),
            forwarded_by,
            started_at: Instant::now(),
            trace,
            client: client.name.clone(),
            client_address: client.address,
            route: route.clone(),
            method: method.to_owned(),
            path: loggable_path(path).to_owned(),
            bytes: ByteCounters::default(),
            matched_rule: OnceLock::new(),
            tunnel: OnceLock::new(),
            answer: OnceLock::new(),
            failure: OnceLock::new(),
            is_complete: AtomicBool::new(false),
        }
    }

    /// Returns the node and the target of the request.
    pub(super) fn route(&self) -> &Route {
        &self.route
    }

    /// Records the rule of this gateway's policy that decided.
    pub(super) fn set_matched_rule(&self, rule: Option<MatchedRule>) {
        if let Some(rule) = rule {
            let _ = self.matched_rule.set(rule);
        }
    }

    /// Records the tunnel.
    pub(super) fn set_tunnel(&self, tunnel: TunnelId) {
        let _ = self.tunnel.set(tunnel);
    }

    /// Records the head of the edge's response.
    pub(super) fn response_started(&self, status: StatusCode, fields: &HeaderMap) {
        // The client receives the 101 of an upstream that switches protocols.
        let status = if fields.contains_key(wire::SWITCHED) {
            StatusCode::SWITCHING_PROTOCOLS
        } else {
            status
        };
        let _ = self.answer.set((status, self.started_at.elapsed()));
    }

    /// Records the reason why the request failed. The first reason is kept.
    pub(super) fn record_failure(&self, error: &Error) {
        let _ = self.failure.set((error.reason, error.log_detail()));
    }

    /// Records the failure of the stream to the edge.
    pub(super) fn record_stream_error(&self, error: &StreamError) {
        self.record_failure(&Error::from_stream_error(self.route.node.as_str(), error));
    }

    /// Records that the response was sent to its end, or that both directions of a session have ended.
    pub(super) fn mark_complete(&self) {
        self.is_complete.store(true, Release);
    }

    /// Returns the bytes from the client, counted.
    pub(super) fn count_up(
        &self,
        body: StreamReceiver,
    ) -> impl Body<Data = Bytes, Error = StreamError> + Unpin {
        count(body, &self.bytes.up)
    }

    /// Returns the bytes to the client, counted.
    pub(super) fn count_down(
        &self,
        body: StreamReceiver,
    ) -> impl Body<Data = Bytes, Error = StreamError> + Unpin {
        count(body, &self.bytes.down)
    }
}

fn count(
    body: StreamReceiver,
    counter: &AtomicU64,
) -> impl Body<Data = Bytes, Error = StreamError> + Unpin {
    body.map_frame(|frame| {
        let length = frame.data_ref().map_or(0, Bytes::len);
        counter.fetch_add(u64::try_from(length).unwrap_or(u64::MAX), Relaxed);
        frame
    })
}

impl Drop for ForwardedRecord {
    fn drop(&mut self) {
        let failure = self.failure.take().or_else(|| {
            let detail = "the gateway that forwarded the request reset it, or was lost";
            let is_complete = self.is_complete.load(Acquire);
            (!is_complete).then(|| (Reason::ClientClosed, detail.to_owned()))
        });
        if !self.access_log.includes(failure.is_some()) {
            return;
        }
        let Self { route, answer, .. } = &*self;
        let (status, first_byte) = answer.get().copied().unzip();
        let failed_status = failure.as_ref().map(|(reason, _)| reason.status());
        let rule = self.matched_rule.get();
        tracing::info!(
            target: "access",
            forwarded_by = %self.forwarded_by.address,
            gateway_serial = &*self.forwarded_by.serial,
            peer = self.client_address.map(tracing::field::display),
            client = self.client,
            node = route.node.as_str(),
            service = route.service(),
            port = route.port(),
            method = self.method,
            path = self.path,
            rule = rule.map(|by| &*by.rule),
            rule_line = rule_line(rule),
            pod = route.pod.name(),
            status = status.or(failed_status).map(|status| status.as_u16()),
            reason = failure.as_ref().map(|(reason, _)| reason.word()),
            detail = failure.as_ref().map(|(_, detail)| detail.as_str()),
            up = self.bytes.up.load(Relaxed),
            down = self.bytes.down.load(Relaxed),
            ms = millis(self.started_at.elapsed()),
            first_byte_ms = first_byte.map(millis),
            tunnel = self.tunnel.get().map(|tunnel| tunnel.0),
            trace = self.trace.as_str(),
        );
    }
}
