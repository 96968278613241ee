//! Pool member as a source: each request has its own connection, over TLS with the certificates of the nodes.
//!
//! A site has no slow links, so one short timeout covers everything until the response head has arrived. After that, TCP
//! detects a silent member.

use super::{
    list_watch_http::{build_request, error_chain, to_source_response},
    member_server::MemberTls,
    membership::Membership,
    source_policy::Freshness,
};
use crate::control::http_server::set_keepalive;
use causeway_config::host_port;
use causeway_rt::{happy_eyeballs, task::TaskGroup};
use causeway_tunnel::control_stream::NodePoolMember;
use causeway_watch_cache::{ListWatch, SourceResponse};
use futures_util::{StreamExt, future::BoxFuture};
use http::{
    HeaderMap, StatusCode,
    header::{AGE, HOST, HeaderValue},
};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use std::{sync::Arc, time::Duration};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::client::TlsStream;
use tracing::info_span;

/// Time within which a member must answer. A member that does not is considered unreachable.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to connect to one address of a member, because not every address is reachable from this node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of a response to a list of one object, in bytes. The version of the list is in that text.
const MAX_LIST_BYTES: usize = 4 << 20;

/// Pool member as a source. Cheap to clone.
#[derive(Clone)]
pub(super) struct MemberSource {
    pub(super) member: NodePoolMember,
    tls: MemberTls,
    tasks: Arc<TaskGroup>,
}

impl MemberSource {
    pub(super) fn new(member: NodePoolMember, tls: MemberTls, tasks: Arc<TaskGroup>) -> Self {
        Self { member, tls, tasks }
    }

    async fn send_request(&self, path_and_query: &str) -> Result<SourceResponse, String> {
        let io = self.dial().await?;
        let handshake = http1::handshake(TokioIo::new(io)).await;
        let (mut sender, connection) = handshake.map_err(|error| error_chain(&error))?;
        self.tasks.spawn(info_span!("neighbour"), async move {
            // The reader of the response receives the error.
            let _ = connection.await;
        });
        let host = HeaderValue::try_from(&self.member.node).map_err(|error| error.to_string())?;
        let request = build_request(path_and_query, HeaderMap::from_iter([(HOST, host)]))?;
        let response = sender.send_request(request).await;
        response
            .map(to_source_response)
            .map_err(|error| error_chain(&error))
    }

    /// Connects to the first reachable address of the member.
    pub(super) async fn dial(&self) -> Result<TlsStream<TcpStream>, String> {
        let server_name = ServerName::try_from(self.member.node.clone());
        let server_name = server_name.map_err(|error| error.to_string())?;
        let connector = self.tls.current()?.connector.clone();
        let mut last_error = "the node has no address".to_owned();
        for at in &self.member.at {
            let connected = match connect(at).await {
                Ok(tcp) => connector.connect(server_name.clone(), tcp).await,
                Err(error) => Err(error),
            };
            match connected {
                Ok(io) => return Ok(io),
                Err(error) => last_error = format!("{at}: {error}"),
            }
        }
        Err(last_error)
    }

    async fn get_with_timeout(&self, path_and_query: &str) -> Result<SourceResponse, String> {
        let response = timeout(RESPONSE_TIMEOUT, self.send_request(path_and_query)).await;
        let response = response.unwrap_or_else(|_| Err("no response in time".to_owned()));
        response.map_err(|why| format!("node {}: {why}", self.member.node))
    }

    /// Returns the freshness of the member's view of the resource at `path`, or `None` if the member has no view or does not
    /// answer.
    pub(super) async fn freshness(&self, path: &str) -> Option<Freshness> {
        let request = async {
            let response = self
                .get_with_timeout(&format!("{path}?limit=1"))
                .await
                .ok()?;
            if response.status != StatusCode::OK {
                return None;
            }
            let age = response.headers.get(AGE);
            let age = age.and_then(|age| age.to_str().ok()?.parse().ok());
            let (mut text, mut body) = (Vec::new(), response.body);
            while let Some(bytes) = body.next().await {
                text.extend_from_slice(&bytes.ok()?);
                if text.len() > MAX_LIST_BYTES {
                    return None;
                }
            }
            let version = version_of(&text)?;
            Some(Freshness { age, version })
        };
        timeout(RESPONSE_TIMEOUT, request).await.ok().flatten()
    }
}

impl ListWatch for MemberSource {
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        Box::pin(async move { self.get_with_timeout(&path_and_query).await })
    }
}

async fn connect(at: &str) -> std::io::Result<TcpStream> {
    let (host, port) = host_port(at).map_err(std::io::Error::other)?;
    let connecting = happy_eyeballs::connect(host, port, CONNECT_TIMEOUT);
    let timeout_error = |_| Err(std::io::ErrorKind::TimedOut.into());
    let tcp = timeout(CONNECT_TIMEOUT, connecting)
        .await
        .unwrap_or_else(timeout_error)?;
    set_keepalive(&tcp);
    Ok(tcp)
}

/// Returns the resource version of a list.
fn version_of(list: &[u8]) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct List {
        metadata: Metadata,
    }
    #[derive(serde::Deserialize)]
    struct Metadata {
        #[serde(rename = "resourceVersion")]
        version: String,
    }
    let list: List = serde_json::from_slice(list).ok()?;
    list.metadata.version.parse().ok()
}

/// The other members of the pool, as a gateway announced them last, for requests that do not concern the cache.
pub(crate) struct MemberPeers {
    own_node: String,
    membership: Membership,
    tls: MemberTls,
    tasks: Arc<TaskGroup>,
}

/// One of the other members.
pub(crate) struct MemberPeer(MemberSource);

impl MemberPeers {
    pub(super) fn new(
        own_node: &str,
        (membership, tls): (Membership, MemberTls),
        tasks: &Arc<TaskGroup>,
    ) -> Self {
        Self {
            own_node: own_node.to_owned(),
            membership,
            tls,
            tasks: tasks.clone(),
        }
    }

    /// Returns the other members that have an address.
    pub(crate) fn all(&self) -> Vec<MemberPeer> {
        let mut members = self.membership.current().members;
        members.retain(|member| member.node != self.own_node && !member.at.is_empty());
        let peer = |member| MemberSource::new(member, self.tls.clone(), self.tasks.clone());
        members.into_iter().map(peer).map(MemberPeer).collect()
    }
}

impl MemberPeer {
    pub(crate) fn node(&self) -> &str {
        &self.0.member.node
    }

    /// Connects to the first address of the member that answers.
    ///
    /// # Errors
    /// If none answers.
    pub(crate) async fn connect(&self) -> Result<TlsStream<TcpStream>, String> {
        self.0.dial().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lists_version_is_its_own_and_not_an_objects() {
        let list = br#"{"kind":"ServiceList","items":[{"metadata":{"resourceVersion":"5"}}],"metadata":{"resourceVersion":"9","continue":"x"}}"#;
        assert_eq!(version_of(list), Some(9));
        assert_eq!(version_of(b"{}"), None);
    }
}
