//! Client of an etcd cluster: sends each request to the first member that answers.
//!
//! A request that may have been executed is only repeated if it reads. A write whose answer was lost is an error, because
//! its repetition could not tell the own write from another gateway's.

use std::{
    fmt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{config::Etcd, shared_state::engine::EngineError};
use bytes::Bytes;
use causeway_certs::Secret;
use causeway_rt::task::{TaskExecutor, TaskGroup};
use http::{
    Request, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, USER_AGENT},
};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as HttpClient, Error as HttpError},
    rt::TokioTimer,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{
    sync::Mutex,
    time::{error::Elapsed, timeout},
};
use tracing::debug_span;

use super::{
    connector::{Connector, FileError, TlsFiles},
    messages::{
        self, AuthenticateResponse, FAILED_PRECONDITION, PERMISSION_DENIED, Status, UNAVAILABLE,
    },
};

/// Time limit of a request to one member.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which an unused connection is closed.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of a response or a message in bytes. Pages have less than 6 MiB.
pub(crate) const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The request reads. It may be repeated at any time.
    Read,
    /// The request writes. It may be repeated only if it was not sent.
    Write,
}

/// Client of an etcd cluster.
pub(crate) struct Client {
    endpoints: Vec<String>,
    /// Index of the member that answered last.
    current: AtomicUsize,
    http: HttpClient<Connector, Full<Bytes>>,
    tls: TlsFiles,
    credentials: Option<Credentials>,
    token: Mutex<Option<Secret>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Client")
            .field("endpoints", &self.endpoints)
            .field("credentials", &self.credentials)
            .finish_non_exhaustive()
    }
}

/// User and the file of the password.
#[derive(Debug)]
struct Credentials {
    user: String,
    password_file: PathBuf,
}

impl Credentials {
    fn password(&self) -> Result<Secret, FileError> {
        let text = std::fs::read_to_string(&self.password_file);
        let text = text.map_err(|error| FileError::new(&self.password_file, &error))?;
        Ok(Secret::new(text.trim_end_matches(['\r', '\n'])))
    }
}

/// Failure of a request at one member.
#[derive(Debug)]
struct Failure {
    message: String,
    /// Whether another member may answer.
    is_of_member: bool,
    /// Whether etcd may have executed the request.
    is_ambiguous: bool,
    /// Whether the token must be renewed.
    is_unauthenticated: bool,
}

impl Failure {
    /// Returns a failure that is the same at each member.
    fn of_cluster(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            is_of_member: false,
            is_ambiguous: false,
            is_unauthenticated: false,
        }
    }

    /// Returns the failure of a member that did not answer.
    fn of_member(message: impl Into<String>, is_ambiguous: bool) -> Self {
        Self {
            is_of_member: true,
            is_ambiguous,
            ..Self::of_cluster(message)
        }
    }

    fn timeout(_: Elapsed) -> Self {
        let message =
            format!("no answer within {REQUEST_TIMEOUT:?}; check with: etcdctl endpoint health");
        Self::of_member(message, true)
    }
}

impl Client {
    /// Returns a client, which is not yet connected.
    ///
    /// # Errors
    /// If a file of the configuration cannot be read.
    pub(crate) fn new(config: &Etcd) -> Result<Self, EngineError> {
        let tls = TlsFiles::new(config);
        let credentials = config.user.clone().zip(config.password_file.clone());
        let credentials = credentials.map(|(user, password_file)| Credentials {
            user,
            password_file,
        });
        let is_tls = |endpoint: &String| endpoint.starts_with("https:");
        if config.endpoints.iter().any(is_tls) {
            tls.load()
                .map_err(|error| EngineError(format!("state.etcd: {error}")))?;
        }
        if let Some(credentials) = &credentials {
            let password = credentials.password();
            password.map_err(|error| EngineError(format!("state.etcd.password_file: {error}")))?;
        }
        let tasks = Arc::new(TaskGroup::default());
        let executor = TaskExecutor::new(tasks, || debug_span!("etcd connection"));
        let http = HttpClient::builder(executor)
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .build(Connector::new(tls.clone()));
        let endpoints = config.endpoints.iter();
        Ok(Self {
            endpoints: endpoints
                .map(|url| url.trim_end_matches('/').to_owned())
                .collect(),
            current: AtomicUsize::new(0),
            http,
            tls,
            credentials,
            token: Mutex::new(None),
        })
    }

    /// Returns the URLs of the members.
    pub(crate) fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Sends a request, and returns its parsed response.
    ///
    /// # Errors
    /// If no member answers, or one refuses.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        access: Access,
        path: &str,
        body: &Value,
    ) -> Result<T, EngineError> {
        let body = Bytes::from(body.to_string());
        let mut attempts = Attempts::new(self, access);
        while let Some(endpoint) = attempts.next_endpoint() {
            match self.call_member(endpoint, path, &body).await {
                Ok(response) => return Ok(response),
                Err(failure) => attempts.record(&failure),
            }
        }
        Err(attempts.into_error())
    }

    /// Opens a stream of messages. Returns the URL of the member too.
    ///
    /// # Errors
    /// If no member answers, or one refuses.
    pub(crate) async fn open_stream(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<(String, Incoming), EngineError> {
        let body = Bytes::from(body.to_string());
        let mut attempts = Attempts::new(self, Access::Read);
        while let Some(endpoint) = attempts.next_endpoint() {
            match self.open_stream_of_member(endpoint, path, &body).await {
                Ok(stream) => return Ok((endpoint.to_owned(), stream)),
                Err(failure) => attempts.record(&failure),
            }
        }
        Err(attempts.into_error())
    }

    /// Sends a request to a member, again with a new token if the token is not valid.
    async fn call_member<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        path: &str,
        body: &Bytes,
    ) -> Result<T, Failure> {
        let token = self.token(endpoint, None).await?;
        match self.call_once(endpoint, path, body, token.as_ref()).await {
            Err(failure) if failure.is_unauthenticated => {
                let token = self.token(endpoint, token.as_ref()).await?;
                self.call_once(endpoint, path, body, token.as_ref()).await
            }
            result => result,
        }
    }

    /// Opens a stream at a member. The token was renewed before, if necessary, by the request that loaded the entries.
    async fn open_stream_of_member(
        &self,
        endpoint: &str,
        path: &str,
        body: &Bytes,
    ) -> Result<Incoming, Failure> {
        let token = self.token(endpoint, None).await?;
        let response = self.send(endpoint, path, body, token.as_ref());
        let response = timeout(REQUEST_TIMEOUT, response).await;
        Ok(response.map_err(Failure::timeout)??.into_body())
    }

    /// Lets the next requests begin with another member than this one.
    pub(crate) fn avoid(&self, endpoint: &str) {
        let index = self.endpoints.iter().position(|each| each == endpoint);
        if let Some(index) = index {
            self.advance(index);
        }
    }

    fn advance(&self, index: usize) {
        let next = (index + 1) % self.endpoints.len();
        // Another request may have found a member meanwhile.
        let _ = self
            .current
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the current token, or a new one if that is the rejected one. `None` if there is no user.
    async fn token(
        &self,
        endpoint: &str,
        rejected: Option<&Secret>,
    ) -> Result<Option<Secret>, Failure> {
        let Some(credentials) = &self.credentials else {
            return Ok(None);
        };
        let mut current = self.token.lock().await;
        if let Some(token) = current.as_ref().filter(|token| Some(*token) != rejected) {
            return Ok(Some(token.clone()));
        }
        let password = credentials.password();
        let password = password.map_err(|error| Failure::of_cluster(error.to_string()))?;
        let body = messages::authenticate(&credentials.user, password.expose());
        let body = Bytes::from(body.to_string());
        let response: AuthenticateResponse = self
            .call_once(endpoint, "/v3/auth/authenticate", &body, None)
            .await
            .map_err(|failure| Failure {
                // The request itself was not sent.
                is_ambiguous: false,
                ..failure
            })?;
        let token = Secret::new(response.token);
        *current = Some(token.clone());
        Ok(Some(token))
    }

    /// Sends a request to a member, and reads the response.
    async fn call_once<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        path: &str,
        body: &Bytes,
        token: Option<&Secret>,
    ) -> Result<T, Failure> {
        let exchange = async {
            let response = self.send(endpoint, path, body, token).await?;
            let text = read_body(response).await?;
            serde_json::from_slice(&text).map_err(|error| {
                Failure::of_member(format!("its answer cannot be parsed: {error}"), true)
            })
        };
        timeout(REQUEST_TIMEOUT, exchange)
            .await
            .map_err(Failure::timeout)?
    }

    /// Sends a request to a member. Returns a response of status 200 whose body has not been read.
    async fn send(
        &self,
        endpoint: &str,
        path: &str,
        body: &Bytes,
        token: Option<&Secret>,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::post(format!("{endpoint}{path}"))
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("causeway/", env!("CARGO_PKG_VERSION")))
            // A member without a leader refuses, rather than to wait for one. Its watches end.
            .header("grpc-metadata-hasleader", "true");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.expose());
        }
        let request = request
            .body(Full::new(body.clone()))
            .map_err(|error| Failure::of_cluster(error.to_string()))?;
        let response = self.http.request(request).await;
        let response = response.map_err(|error| self.transport_failure(&error))?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        let text = read_body(response).await?;
        let error: Status = serde_json::from_slice(&text).unwrap_or_default();
        Err(self.refusal(status, &error))
    }

    fn transport_failure(&self, error: &HttpError) -> Failure {
        let reason = self.tls.reason(error);
        if error.is_connect() {
            return Failure::of_member(format!("cannot connect: {reason}"), false);
        }
        Failure::of_member(format!("the connection failed: {reason}"), true)
    }

    /// Returns the failure for an error that etcd returned.
    fn refusal(&self, status: StatusCode, error: &Status) -> Failure {
        let user = self.credentials.as_ref();
        let message = error.message.as_str();
        if message.is_empty() {
            let message = format!(
                "it answers {status} without a message of etcd; check that it is etcd 3.4 or later, with the JSON gateway (--enable-grpc-gateway)"
            );
            return Failure::of_member(message, true);
        }
        let explained = match (error.code, user) {
            (_, Some(user)) if message.contains("authentication failed") => format!(
                "it refuses the password of the user {}; correct state.etcd.user, or the file {}",
                user.user,
                user.password_file.display()
            ),
            (FAILED_PRECONDITION, Some(user))
                if message.contains("authentication is not enabled") =>
            {
                format!(
                    "it has no authentication for the user {}; run: etcdctl auth enable, or remove state.etcd.user",
                    user.user
                )
            }
            (_, None) if message.contains("user name is empty") => {
                "it requires a user; set state.etcd.user and state.etcd.password_file".to_owned()
            }
            (PERMISSION_DENIED, Some(user)) => format!(
                "the user {} may not use these keys; run: etcdctl role grant-permission ROLE readwrite PREFIX --prefix=true, with a role of the user and state.etcd.prefix",
                user.user
            ),
            _ => message.to_owned(),
        };
        Failure {
            is_unauthenticated: error.is_unauthenticated(),
            // etcd may still execute a request that it stopped waiting for.
            ..if error.code == UNAVAILABLE || status.is_server_error() {
                Failure::of_member(explained, true)
            } else {
                Failure::of_cluster(explained)
            }
        }
    }
}

/// Attempts to send a request, at one member after the other.
struct Attempts<'a> {
    client: &'a Client,
    access: Access,
    first: usize,
    /// Number of members that were tried.
    count: usize,
    is_over: bool,
    failures: Vec<String>,
}

impl<'a> Attempts<'a> {
    fn new(client: &'a Client, access: Access) -> Self {
        Self {
            client,
            access,
            first: client.current.load(Ordering::Relaxed),
            count: 0,
            is_over: false,
            failures: Vec::new(),
        }
    }

    /// Returns the member to try next.
    fn next_endpoint(&mut self) -> Option<&'a str> {
        let endpoints = &self.client.endpoints;
        if self.is_over || self.count == endpoints.len() {
            return None;
        }
        self.count += 1;
        Some(&endpoints[self.index()])
    }

    /// Returns the index of the member that was tried last.
    fn index(&self) -> usize {
        (self.first + self.count - 1) % self.client.endpoints.len()
    }

    fn record(&mut self, failure: &Failure) {
        let endpoint = &self.client.endpoints[self.index()];
        let message = format!("etcd at {endpoint}: {}", failure.message);
        self.failures.push(message);
        if failure.is_of_member {
            self.client.advance(self.index());
        }
        let may_repeat = self.access == Access::Read || !failure.is_ambiguous;
        self.is_over = !(failure.is_of_member && may_repeat);
    }

    fn into_error(self) -> EngineError {
        EngineError(self.failures.join("; "))
    }
}

async fn read_body(response: Response<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(response.into_body(), MAX_MESSAGE_BYTES);
    let body = body.collect().await.map_err(|error| {
        let message =
            format!("its answer is larger than {MAX_MESSAGE_BYTES} bytes, or incomplete: {error}");
        Failure::of_member(message, true)
    })?;
    Ok(body.to_bytes())
}
