//! One record per stream: filled along the way, written when the last part of the stream is gone.
//!
//! The record also owns the stream's permit, so that what is counted, logged and limited is one and the
//! same stream. A path is logged without its query, which may hold secrets.

use crate::{
    config::AccessLog,
    error::{Error, Reason},
    metrics::{StreamGuard, StreamOver},
    proxy::{
        Proxy, Shared,
        caller::Caller,
        front::{Connection, Front},
        limits::Permit,
        route::Route,
    },
    state::TunnelId,
};
use causeway_tunnel::{copy::Passed, listener::Peer};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};
use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// W3C Trace Context, level 1.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The record of one stream.
#[derive(Debug)]
pub struct Record {
    shared: Arc<Shared>,
    front: Arc<Front>,
    peer: Peer,
    began: Instant,
    method: String,
    path: String,
    trace: String,
    /// Bytes both ways: up is from the caller, down is to it.
    pub passed: Arc<Passed>,
    filled: Mutex<Filled>,
}

#[derive(Debug, Default)]
struct Filled {
    caller: Option<Caller>,
    route: Option<Route>,
    tunnel: Option<TunnelId>,
    status: u16,
    reason: Option<Reason>,
    detail: String,
    first_byte: Option<Duration>,
    permit: Option<Permit>,
    _open: Option<StreamGuard>,
}

impl Record {
    /// Begins the record of an HTTP request.
    pub fn begin<B>(proxy: &Proxy, connection: &Connection, request: &Request<B>) -> Arc<Self> {
        let path = match request.uri().authority() {
            Some(authority) if super::is_connect(request.method()) => authority.as_str(),
            _ => request.uri().path(),
        };
        let trace = trace_id(request.headers()).unwrap_or_else(new_trace);
        Self::new(proxy, connection, (request.method().as_str(), path), trace)
    }

    /// Begins the record of a TCP session.
    pub fn session(proxy: &Proxy, connection: &Connection) -> Arc<Self> {
        Self::new(proxy, connection, ("TCP", ""), new_trace())
    }

    fn new(
        proxy: &Proxy,
        connection: &Connection,
        (method, path): (&str, &str),
        trace: String,
    ) -> Arc<Self> {
        let filled = Filled {
            _open: Some(proxy.front.metrics.stream()),
            ..Filled::default()
        };
        Arc::new(Self {
            shared: proxy.shared.clone(),
            front: proxy.front.clone(),
            peer: connection.peer,
            began: Instant::now(),
            method: method.to_owned(),
            path: path.to_owned(),
            trace,
            passed: Arc::default(),
            filled: Mutex::new(filled),
        })
    }

    /// Notes who called.
    pub fn caller(&self, caller: &Caller) {
        self.filled().caller = Some(caller.clone());
    }

    /// Notes where to.
    pub fn route(&self, route: &Route) {
        self.filled().route = Some(route.clone());
    }

    /// Notes on which tunnel.
    pub fn tunnel(&self, tunnel: TunnelId) {
        self.filled().tunnel = Some(tunnel);
    }

    /// Keeps the permit for as long as the stream lives.
    pub fn permit(&self, permit: Permit) {
        self.filled().permit = Some(permit);
    }

    /// Notes the answer's head.
    pub fn answered(&self, status: StatusCode) {
        let mut filled = self.filled();
        filled.status = status.as_u16();
        filled
            .first_byte
            .get_or_insert_with(|| self.began.elapsed());
    }

    /// Notes why the stream failed; the first reason stands.
    pub fn failed(&self, error: &Error) {
        let mut filled = self.filled();
        if filled.reason.is_none() {
            filled.reason = Some(error.reason);
            filled.detail = error.to_string();
            if let Some(cause) = &error.cause {
                let _ = write!(filled.detail, ": {cause}");
            }
        }
    }

    /// Why the stream failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        let filled = self.filled();
        filled
            .reason
            .map(|reason| reason.says(filled.detail.clone()))
    }

    /// The trace that this stream belongs to, 32 hex digits.
    pub fn trace(&self) -> &str {
        &self.trace
    }

    /// Passes `traceparent` on as it came, or makes one where the caller sent none. Its value never comes again: in
    /// HPACK's table it would push out what does (RFC 7541 §6.2.3).
    pub fn put_trace(&self, fields: &mut HeaderMap) {
        if trace_id(fields).is_none() {
            let span = rand::random::<u64>();
            let made = format!("00-{}-{span:016x}-01", self.trace);
            if let Ok(made) = HeaderValue::try_from(made) {
                fields.insert(TRACEPARENT, made);
            }
        }
        if let Some(value) = fields.get_mut(TRACEPARENT) {
            value.set_sensitive(true);
        }
    }

    fn filled(&self) -> MutexGuard<'_, Filled> {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The trace id of a sound `traceparent` (W3C Trace Context §3.2).
fn trace_id(fields: &HeaderMap) -> Option<String> {
    let text = fields.get(TRACEPARENT)?.to_str().ok()?;
    let mut parts = text.split('-');
    let (version, trace, span) = (parts.next()?, parts.next()?, parts.next()?);
    let flags = parts.next()?;
    let is_hex = |part: &str, length: usize| {
        part.len() == length
            && part
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let zero = |part: &str| part.bytes().all(|byte| byte == b'0');
    let sound = is_hex(version, 2)
        && version != "ff"
        && is_hex(trace, 32)
        && is_hex(span, 16)
        && is_hex(flags, 2);
    (sound && !zero(trace) && !zero(span)).then(|| trace.to_owned())
}

/// A new trace id: 32 hex digits.
fn new_trace() -> String {
    format!("{:032x}", rand::random::<u128>())
}

impl Drop for Record {
    fn drop(&mut self) {
        let filled = std::mem::take(&mut *self.filled());
        let duration = self.began.elapsed();
        let (up, down) = (self.passed.up.load(Relaxed), self.passed.down.load(Relaxed));
        self.front.metrics.stream_ended(&StreamOver {
            reason: filled.reason,
            status: filled.status,
            duration,
            first_byte: filled.first_byte,
            up,
            down,
        });
        let wanted = match self.shared.access_log {
            AccessLog::All => true,
            AccessLog::Failures => filled.reason.is_some(),
            AccessLog::None => false,
        };
        if wanted {
            self.write(&filled, duration, (up, down));
        }
    }
}

impl Record {
    fn write(&self, filled: &Filled, duration: Duration, (up, down): (u64, u64)) {
        let caller = filled.caller.as_ref();
        tracing::info!(
            target: "access",
            front = self.front.name,
            peer = %self.peer,
            caller = caller.map_or("-", |caller| &caller.name),
            by = caller.map_or("-", |caller| caller.method.word()),
            node = filled.route.as_ref().map_or("-", |route| route.node.as_str()),
            port = filled.route.as_ref().map(|route| route.target.port),
            method = self.method,
            path = self.path,
            status = filled.status,
            reason = filled.reason.map(Reason::word),
            detail = (!filled.detail.is_empty()).then_some(filled.detail.as_str()),
            up,
            down,
            ms = millis(duration),
            first_byte_ms = filled.first_byte.map(millis),
            tunnel = filled.tunnel.map(|tunnel| tunnel.0),
            trace = self.trace,
        );
    }
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sound_traceparent_is_passed_on() {
        let of = |text: &str| {
            let mut fields = HeaderMap::new();
            fields.insert(TRACEPARENT, HeaderValue::from_str(text).unwrap());
            trace_id(&fields)
        };
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        assert_eq!(
            of(&format!("00-{trace}-00f067aa0ba902b7-01")).as_deref(),
            Some(trace)
        );
        assert_eq!(of(&format!("00-{trace}-0000000000000000-01")), None);
        assert_eq!(of(&format!("ff-{trace}-00f067aa0ba902b7-01")), None);
        assert_eq!(
            of(&format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase())),
            None
        );
        assert_eq!(of("nonsense"), None);
    }
}
