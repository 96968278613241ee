//! Client of a pool member's relay: one connection, on which it asks for a nonce and delivers one heartbeat.

use crate::control::api_cache::member_source::MemberPeer;
use bytes::Bytes;
use causeway_rt::task::TaskGroup;
use causeway_tunnel::heartbeat::{DelegatedHeartbeat, HeartbeatNonce, MAX_NONCE, PATH};
use http::{
    Method, Request, StatusCode,
    header::{CONTENT_TYPE, HOST},
};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::time::timeout;
use tracing::info_span;

/// Time limit for a connection with a nonce, and for the delivery of a heartbeat; a site network has no slow links.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of an answer: a nonce, or a reason.
const MAX_ANSWER: usize = 1024;

/// Connection to a member, with the nonce that the member has answered.
pub(super) struct OpenMember {
    pub(super) node: String,
    pub(super) nonce: String,
    requests: http1::SendRequest<Full<Bytes>>,
    _connection: TaskGroup,
}

impl OpenMember {
    /// Connects to a member and asks it for a nonce.
    pub(super) async fn open(member: MemberPeer) -> Result<Self, String> {
        let node = member.node().to_owned();
        let opened = timeout(REQUEST_TIMEOUT, Self::open_to(&member)).await;
        let opened = opened.unwrap_or_else(|_| Err(timeout_message()));
        opened.map_err(|why| format!("node {node}: {why}"))
    }

    async fn open_to(member: &MemberPeer) -> Result<Self, String> {
        let io = member.connect().await?;
        let handshake = http1::handshake(TokioIo::new(io)).await;
        let (requests, connection) = handshake.map_err(|error| error.to_string())?;
        let tasks = TaskGroup::default();
        tasks.spawn(info_span!("heartbeat"), async move {
            // The request receives the error.
            let _ = connection.await;
        });
        let mut open = Self {
            node: member.node().to_owned(),
            nonce: String::new(),
            requests,
            _connection: tasks,
        };
        let (status, text) = open.request(Method::GET, Bytes::new()).await?;
        if status != StatusCode::OK {
            return Err(refusal(status, &text));
        }
        let answer: Result<HeartbeatNonce, _> = serde_json::from_slice(&text);
        open.nonce = answer.map_err(|error| error.to_string())?.nonce;
        if open.nonce.is_empty() || open.nonce.len() > MAX_NONCE {
            return Err("the nonce has an invalid length".to_owned());
        }
        Ok(open)
    }

    /// Delivers a heartbeat. Returns once the member has queued it for its gateway.
    pub(super) async fn deliver(&mut self, heartbeat: &DelegatedHeartbeat) -> Result<(), String> {
        let body = serde_json::to_vec(heartbeat).map_err(|error| error.to_string())?;
        let delivered = timeout(REQUEST_TIMEOUT, self.request(Method::POST, body.into())).await;
        let delivered = delivered.unwrap_or_else(|_| Err(timeout_message()));
        match delivered {
            Ok((StatusCode::ACCEPTED, _)) => Ok(()),
            Ok((status, text)) => Err(format!("node {}: {}", self.node, refusal(status, &text))),
            Err(why) => Err(format!("node {}: {why}", self.node)),
        }
    }

    async fn request(
        &mut self,
        method: Method,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), String> {
        let request = Request::builder()
            .method(method)
            .uri(PATH)
            .header(HOST, &self.node)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let answer = self.requests.send_request(request).await;
        let (head, body) = answer.map_err(|error| error.to_string())?.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await;
        let body = body.map_err(|error| error.to_string())?;
        Ok((head.status, body.to_bytes()))
    }
}

fn timeout_message() -> String {
    format!("no response within {REQUEST_TIMEOUT:?}")
}

fn refusal(status: StatusCode, text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    format!("{status}: {}", text.trim())
}
