//! Connections to a gateway's `connect` listener: TLS, the user's credential, HTTP CONNECT and requests for the gateway itself.
//!
//! Each session has a connection of its own and uses HTTP/1.1. So a reset and a half-close are those of TCP, and no session waits
//! for another one. A connection that ends without TLS's `close_notify` is an error, because bytes may be missing.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use causeway_config::host_port;
use causeway_rt::socket::{PrefixedStream, ResetOnClose, set_client_tcp_options};
use causeway_rt::task::TaskGroup;
use causeway_rt::{forward, happy_eyeballs};
use causeway_tls::NoServerVerification;
use http_body_util::{BodyExt, Empty, Limited};
use humantime::format_duration;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::debug_span;

use super::credential::Credential;
use super::profile::Profile;
use crate::output::explain;

/// Maximum time to connect: TCP and the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for a response. The gateway bounds its own waits, which are shorter.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum size of an error response.
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// Path of the gateway's CAs at a `connect` listener.
const CA_PATH: &str = "/.well-known/causeway/ca.pem";
/// Maximum size of the gateway's CAs.
const MAX_CA_BYTES: usize = 256 * 1024;
/// Maximum size of another response: a list of 20,000 nodes has about 4 MiB.
const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;
/// Field with the reason of an error (RFC 9209).
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
/// Reason of a gateway that refuses a credential, or requires one.
const UNAUTHENTICATED: &str = "unauthenticated";
/// Reason of a gateway for a node that is away.
const NOT_CONNECTED: &str = "node_not_connected";
/// Maximum number of characters of an error that is not in JSON.
const MAX_ERROR_CHARS: usize = 512;

/// Open session to a port of a node.
pub(crate) type Session = PrefixedStream<TlsSocket>;

/// TLS connection to a gateway, which can be reset.
#[derive(Debug)]
pub(crate) struct TlsSocket(TlsStream<TcpStream>);

impl AsyncRead for TlsSocket {
    forward!(0: poll_read);
}

impl AsyncWrite for TlsSocket {
    forward!(0: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}

impl ResetOnClose for TlsSocket {
    fn abort(&self) {
        self.0.get_ref().0.abort();
    }
}

/// Answer of a gateway that refuses a request.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// Status of the response.
    pub(crate) status: StatusCode,
    /// Word of the reason, such as `target_refused`; empty if the response has none.
    pub(crate) reason: String,
    /// The gateway's sentence.
    pub(crate) detail: String,
}

/// Reason why a request to a gateway failed.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// The gateway refused the request.
    Refused(Refusal),
    /// The gateway cannot be reached, or the connection broke.
    Unreachable(anyhow::Error),
    /// The user has no usable credential.
    Credential(anyhow::Error),
}

impl RequestError {
    /// Whether a later attempt may succeed although the user changes nothing.
    pub(crate) fn is_temporary(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                refusal.status == StatusCode::SERVICE_UNAVAILABLE || refusal.reason == NOT_CONNECTED
            }
            Self::Unreachable(error) => find_tls_error(error).is_none(),
            Self::Credential(_) => false,
        }
    }

    /// Whether the credential is the reason.
    fn is_credential_refusal(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                // A proxy answers 407 where another server answers 401, and a listener for Kubernetes 502.
                let is_challenge = matches!(
                    refusal.status,
                    StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED
                );
                is_challenge || refusal.reason == UNAUTHENTICATED
            }
            Self::Unreachable(error) => matches!(
                find_tls_error(error),
                Some(rustls::Error::AlertReceived(
                    AlertDescription::CertificateExpired
                        | AlertDescription::CertificateRevoked
                        | AlertDescription::CertificateUnknown
                        | AlertDescription::BadCertificate
                        | AlertDescription::UnknownCA
                ))
            ),
            Self::Credential(_) => false,
        }
    }

    /// Whether the gateway's certificate is not issued by a trusted CA.
    pub(crate) fn is_unknown_issuer(&self) -> bool {
        let Self::Unreachable(error) = self else {
            return false;
        };
        matches!(
            find_tls_error(error),
            Some(rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer
            ))
        )
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => f.write_str(&refusal.detail),
            Self::Unreachable(error) | Self::Credential(error) => f.write_str(&explain(error)),
        }
    }
}

impl std::error::Error for RequestError {}

fn find_tls_error(error: &anyhow::Error) -> Option<&rustls::Error> {
    error.chain().find_map(|cause| {
        let io = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        let inside_io = io.and_then(|inner| inner.downcast_ref::<rustls::Error>());
        inside_io.or_else(|| cause.downcast_ref())
    })
}

/// Client of one gateway.
pub(crate) struct GatewayClient {
    profile: Profile,
    host: String,
    port: u16,
    roots: Arc<RootCertStore>,
    cache: Mutex<CredentialCache>,
}

/// Result of the last command that printed a credential.
#[derive(Default)]
struct CredentialCache {
    credential: Option<Arc<Credential>>,
    /// Time and text of a failure. It is also the result for those who waited for the command.
    failure: Option<(Instant, String)>,
}

impl GatewayClient {
    /// Creates a client for a profile.
    ///
    /// # Errors
    /// If the address or the CAs of the profile cannot be used.
    pub(crate) fn new(profile: Profile) -> anyhow::Result<Self> {
        let (host, port) = host_port(&profile.gateway).map_err(anyhow::Error::msg)?;
        Ok(Self {
            host: host.to_owned(),
            port,
            roots: Arc::new(trusted_roots(profile.ca.as_deref())?),
            cache: Mutex::default(),
            profile,
        })
    }

    /// Returns the address of the gateway.
    pub(crate) fn gateway(&self) -> &str {
        &self.profile.gateway
    }

    /// Opens a session to a port of a node, or of another host that the gateway reaches.
    ///
    /// # Errors
    /// The gateway's refusal, or the reason why there is none.
    pub(crate) async fn connect(&self, host: &str, port: u16) -> Result<Session, RequestError> {
        self.connect_within(host, port, None).await
    }

    /// The same with a maximum time, which does not include that of the command of the credential: the user may have to log in.
    ///
    /// # Errors
    /// The gateway's refusal, or the reason why there is none.
    pub(crate) async fn connect_within(
        &self,
        host: &str,
        port: u16,
        limit: Option<Duration>,
    ) -> Result<Session, RequestError> {
        let authority = if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        };
        let (response, _connection) = self.request((Method::CONNECT, &authority), limit).await?;
        let upgraded = hyper::upgrade::on(response).await;
        let upgraded = upgraded.map_err(|error| self.broken(error.into()))?;
        match upgraded.downcast::<TokioIo<TlsSocket>>() {
            Ok(parts) => Ok(PrefixedStream::new(parts.read_buf, parts.io.into_inner())),
            Err(_) => unreachable!("the connection was made with this transport"),
        }
    }

    /// Returns the body of the response to a GET request for a resource of the gateway itself.
    ///
    /// # Errors
    /// The gateway's refusal, or the reason why there is none.
    pub(crate) async fn get(&self, path: &str) -> Result<Bytes, RequestError> {
        let (response, _connection) = self.request((Method::GET, path), None).await?;
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect();
        match timeout(RESPONSE_TIMEOUT, body).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) => Err(self.broken(anyhow::Error::from_boxed(error))),
            Err(_) => Err(self.broken(silence())),
        }
    }

    /// Returns the CAs of the gateway as PEM. The connection is not verified, so the user has to verify the result. No credential
    /// is sent.
    ///
    /// # Errors
    /// If the gateway does not send them.
    pub(crate) async fn unverified_ca(&self) -> anyhow::Result<String> {
        let config = ClientConfig::builder()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(NoServerVerification))
            .with_no_client_auth();
        let request = self.build_request((Method::GET, CA_PATH), &Credential::default())?;
        let (response, _connection) = self.exchange(self.dial(config).await?, request).await?;
        let body = Limited::new(response.into_body(), MAX_CA_BYTES).collect();
        let body = timeout(RESPONSE_TIMEOUT, body).await.context("no CA")?;
        let body = body.map_err(anyhow::Error::from_boxed)?.to_bytes();
        String::from_utf8(body.into()).context("the gateway sent no CA")
    }

    /// Returns the certificate of these that verifies the gateway, if one does.
    pub(crate) async fn issuer_among(
        &self,
        certificates: Vec<CertificateDer<'static>>,
    ) -> Option<CertificateDer<'static>> {
        for certificate in certificates {
            let mut roots = RootCertStore::empty();
            let config = ClientConfig::builder();
            if roots.add(certificate.clone()).is_ok()
                && let config = config.with_root_certificates(roots).with_no_client_auth()
                && self.dial(config).await.is_ok()
            {
                return Some(certificate);
            }
        }
        None
    }

    /// Sends a request, and returns the response if it is a success. If the gateway refuses a credential of an earlier command, the
    /// command runs again.
    async fn request(
        &self,
        (method, target): (Method, &str),
        limit: Option<Duration>,
    ) -> Result<(Response<Incoming>, TaskGroup), RequestError> {
        let (credential, is_new) = self.credential().await?;
        match self.send((&method, target), &credential, limit).await {
            Err(error) if error.is_credential_refusal() => {
                self.forget(&credential).await;
                if is_new {
                    return Err(error);
                }
            }
            result => return result,
        }
        let (credential, _) = self.credential().await?;
        self.send((&method, target), &credential, limit).await
    }

    async fn send(
        &self,
        (method, target): (&Method, &str),
        credential: &Credential,
        limit: Option<Duration>,
    ) -> Result<(Response<Incoming>, TaskGroup), RequestError> {
        let request = self.build_request((method.clone(), target), credential)?;
        let config = self.tls_config(credential)?;
        let sending = async {
            let io = self.dial(config).await.map_err(RequestError::Unreachable)?;
            self.exchange(io, request).await
        };
        let Some(limit) = limit else {
            return sending.await;
        };
        let sent = timeout(limit, sending).await;
        sent.unwrap_or_else(|_| {
            let silence = format!("no answer within {}", format_duration(limit));
            Err(RequestError::Unreachable(anyhow::Error::msg(silence)))
        })
    }

    async fn exchange(
        &self,
        io: TlsSocket,
        request: Request<Empty<Bytes>>,
    ) -> Result<(Response<Incoming>, TaskGroup), RequestError> {
        let exchange = async {
            let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await?;
            let tasks = TaskGroup::default();
            tasks.spawn(debug_span!("request"), async move {
                // The request or the body receives the error of the connection.
                let _ = connection.with_upgrades().await;
            });
            Ok::<_, hyper::Error>((sender.send_request(request).await?, tasks))
        };
        let (response, tasks) = timeout(RESPONSE_TIMEOUT, exchange)
            .await
            .map_err(|_| self.broken(silence()))?
            .map_err(|error| self.broken(error.into()))?;
        if response.status().is_success() {
            return Ok((response, tasks));
        }
        Err(RequestError::Refused(read_refusal(response).await))
    }

    fn build_request(
        &self,
        (method, target): (Method, &str),
        credential: &Credential,
    ) -> Result<Request<Empty<Bytes>>, RequestError> {
        let host = if method == Method::CONNECT {
            target
        } else {
            &self.profile.gateway
        };
        let mut request = Request::builder()
            .method(&method)
            .uri(target)
            .header(HOST, host)
            .header(USER_AGENT, concat!("causeway/", env!("CARGO_PKG_VERSION")))
            .body(Empty::new())
            .with_context(|| format!("{target:?} is not a valid HOST:PORT"))
            .map_err(RequestError::Unreachable)?;
        if let Some(token) = &credential.token {
            let value = format!("Bearer {}", token.expose());
            let value = HeaderValue::try_from(value);
            let mut value = value.map_err(|error| RequestError::Credential(error.into()))?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }

    /// Returns the credential, and whether it has been loaded for this call.
    async fn credential(&self) -> Result<(Arc<Credential>, bool), RequestError> {
        let (source, began) = (&self.profile.credential, Instant::now());
        let mut cache = self.cache.lock().await;
        if let Some(credential) = cache.credential.as_ref().filter(|kept| kept.is_current()) {
            return Ok((credential.clone(), false));
        }
        if let Some((_, text)) = cache.failure.as_ref().filter(|(at, _)| *at >= began) {
            return Err(RequestError::Credential(anyhow::Error::msg(text.clone())));
        }
        match source.load().await {
            Ok(credential) => {
                let credential = Arc::new(credential);
                cache.credential = source.is_cacheable().then(|| credential.clone());
                Ok((credential, true))
            }
            Err(error) => {
                cache.failure = Some((Instant::now(), explain(&error)));
                Err(RequestError::Credential(error))
            }
        }
    }

    /// Removes a refused credential, unless another one has replaced it.
    async fn forget(&self, refused: &Arc<Credential>) {
        let mut cache = self.cache.lock().await;
        cache.credential.take_if(|kept| Arc::ptr_eq(kept, refused));
    }

    fn tls_config(&self, credential: &Credential) -> Result<ClientConfig, RequestError> {
        let builder = ClientConfig::builder().with_root_certificates(self.roots.clone());
        match &credential.certificate {
            Some((chain, key)) => builder
                .with_client_auth_cert(chain.clone(), key.clone_key())
                .context("the client certificate and its key cannot be used")
                .map_err(RequestError::Credential),
            None => Ok(builder.with_no_client_auth()),
        }
    }

    async fn dial(&self, mut config: ClientConfig) -> anyhow::Result<TlsSocket> {
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let connecting = async {
            let name = ServerName::try_from(self.host.clone())
                .with_context(|| format!("{:?} is not a valid host name", self.host))?;
            let tcp = happy_eyeballs::connect(&self.host, self.port, CONNECT_TIMEOUT).await?;
            set_client_tcp_options(&tcp);
            let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp);
            tls.await.map_err(|error| self.explain_tls(error))
        };
        let connected = timeout(CONNECT_TIMEOUT, connecting)
            .await
            .unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {CONNECT_TIMEOUT:?}")));
        connected
            .map(TlsSocket)
            .with_context(|| format!("cannot connect to the gateway {}", self.profile.gateway))
    }

    /// Adds the remedy to errors of the handshake that have one.
    fn explain_tls(&self, error: io::Error) -> anyhow::Error {
        let error = anyhow::Error::from(error);
        match find_tls_error(&error) {
            Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                error.context("its certificate is not issued by a CA that you trust")
            }
            Some(rustls::Error::AlertReceived(AlertDescription::UnrecognisedName)) => {
                let host = &self.host;
                error.context(format!(
                    "it has no certificate for {host}; `names` of its listener must list {host}"
                ))
            }
            _ => error,
        }
    }

    fn broken(&self, error: anyhow::Error) -> RequestError {
        let context = format!(
            "the connection to the gateway {} broke",
            self.profile.gateway
        );
        RequestError::Unreachable(error.context(context))
    }
}

fn silence() -> anyhow::Error {
    anyhow::anyhow!("no response within {RESPONSE_TIMEOUT:?}")
}

fn trusted_roots(ca: Option<&str>) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    if let Some(text) = ca {
        for certificate in causeway_tls::parse_certificates(text).map_err(anyhow::Error::msg)? {
            roots.add(certificate).context("a CA cannot be used")?;
        }
    } else {
        let system = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(system.certs);
    }
    Ok(roots)
}

/// Error in the form of RFC 9457.
#[derive(Deserialize)]
struct Problem {
    detail: String,
    #[serde(default)]
    reason: String,
}

async fn read_refusal(response: Response<Incoming>) -> Refusal {
    let status = response.status();
    let word = response
        .headers()
        .get(PROXY_STATUS)
        .and_then(|value| proxy_status_word(value.to_str().ok()?))
        .unwrap_or_default()
        .to_owned();
    let body = Limited::new(response.into_body(), MAX_ERROR_BYTES).collect();
    let body = match timeout(RESPONSE_TIMEOUT, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        _ => Bytes::new(),
    };
    parse_refusal((status, word), &body)
}

/// Returns the word of the reason in a gateway's `Proxy-Status` (RFC 9209), which has it in every form of errors:
/// `causeway; error=KIND; details="WORD: DETAIL"`.
fn proxy_status_word(value: &str) -> Option<&str> {
    let (_, details) = value.split_once("details=\"")?;
    Some(details.split_once(':')?.0)
}

/// Returns the start of a text without control characters, which could change what a terminal shows.
fn visible(text: &str) -> String {
    let visible = text.trim().chars().filter(|each| !each.is_control());
    visible.take(MAX_ERROR_CHARS).collect()
}

fn parse_refusal((status, word): (StatusCode, String), body: &[u8]) -> Refusal {
    if let Ok(problem) = serde_json::from_slice::<Problem>(body) {
        return Refusal {
            status,
            reason: problem.reason,
            detail: visible(&problem.detail),
        };
    }
    let text = visible(&String::from_utf8_lossy(body));
    let detail = match (status, text.is_empty()) {
        (_, true) => format!("the gateway answered {status}"),
        // A gateway with `errors: kubernetes` sends only the sentence.
        (StatusCode::BAD_GATEWAY, false) => text,
        (_, false) => format!("the gateway answered {status}: {text}"),
    };
    Refusal {
        status,
        reason: word,
        detail,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::credential::CredentialSource;
    use futures_util::future::join_all;

    #[test]
    fn a_refusal_has_the_gateways_own_sentence() {
        let away = StatusCode::SERVICE_UNAVAILABLE;
        let body = br#"{"title": "x", "reason": "node_not_connected", "detail": "edge-1 is away"}"#;
        let refusal = parse_refusal((away, String::new()), body);
        assert_eq!(refusal.reason, "node_not_connected");
        let error = RequestError::Refused(refusal);
        assert_eq!(error.to_string(), "edge-1 is away");
        assert!(error.is_temporary());
    }

    #[test]
    fn a_refusal_in_another_form_is_shown_without_control_characters() {
        let shown = |status, body: &[u8]| parse_refusal((status, String::new()), body).detail;
        assert_eq!(
            shown(StatusCode::BAD_GATEWAY, b"edge-1 is away\n"),
            "edge-1 is away"
        );
        let html = shown(StatusCode::NOT_FOUND, b"<html>\x1b[2J");
        assert_eq!(html, "the gateway answered 404 Not Found: <html>[2J");
        let empty = shown(StatusCode::FORBIDDEN, b"");
        assert_eq!(empty, "the gateway answered 403 Forbidden");
    }

    #[tokio::test]
    async fn a_failed_command_is_not_run_again_for_those_who_waited_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        let script = format!("echo run >>'{}'; exit 1", runs.display());
        let client = GatewayClient::new(Profile {
            gateway: "gateway.test:443".into(),
            ca: None,
            credential: CredentialSource::TokenCommand {
                command: ["sh", "-c", &script].map(str::to_owned).to_vec(),
            },
        })
        .unwrap();
        for count in 1..=2 {
            let results = join_all([(); 5].map(|()| client.credential())).await;
            for result in results {
                let error = result.map(drop).unwrap_err().to_string();
                assert!(error.contains("exit status: 1"), "{error}");
            }
            let text = std::fs::read_to_string(&runs).unwrap();
            assert_eq!(text.lines().count(), count);
        }
    }

    #[test]
    fn the_reason_is_known_from_proxy_status_if_the_body_has_none() {
        let status = r#"causeway; error=destination_unavailable; details="node_not_connected: edge-1: is away""#;
        let word = proxy_status_word(status).unwrap();
        assert_eq!(word, NOT_CONNECTED);
        let refusal = parse_refusal(
            (StatusCode::BAD_GATEWAY, word.to_owned()),
            b"edge-1 is away\n",
        );
        assert_eq!(refusal.detail, "edge-1 is away");
        assert!(RequestError::Refused(refusal).is_temporary());
        assert_eq!(proxy_status_word("other"), None);
    }
}
