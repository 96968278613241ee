//! Clients of a world: an HTTP client of the tests' own, and bare streams for heads that are exact to the byte.
//!
//! A client connects to its listener's real address, and uses the URL only as a client shows it: SNI, Host, ALPN. Each
//! request has a connection of its own unless the test keeps one (`connect`). No part of this is product code: the tests'
//! instruments must not share its faults.

mod answer;
mod wire;

pub(crate) use answer::{Answer, assert_problem};
pub(crate) use wire::{Wire, exchange, read, read_head, read_to_end};

use super::{PATIENCE, log::Log};
use causeway_certs::LeafCertificate;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    HeaderMap, Request, Response, Uri, Version,
    body::{Bytes, Incoming},
    client::conn::{http1, http2},
    ext::ReasonPhrase,
    header::{CONTENT_LENGTH, HOST},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};
use tokio::{
    net::{TcpSocket, TcpStream, UnixStream},
    task::JoinSet,
    time::{Duration, timeout},
};
use tokio_rustls::TlsConnector;

/// Body of a request.
pub(crate) type Body = BoxBody<Bytes, io::Error>;

/// Address of a listener.
#[derive(Clone, Debug)]
pub(crate) enum ListenerAddress {
    /// TCP with TLS on it.
    Tls(SocketAddr),
    /// Bare TCP.
    Plain(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// Client of a listener.
#[derive(Clone)]
pub(crate) struct Client {
    place: ListenerAddress,
    root: CertificateDer<'static>,
    leaf: Option<LeafCertificate>,
    from: Option<IpAddr>,
    version: Version,
    sni: Option<String>,
    host: Option<String>,
    fields: HeaderMap,
    log: Log,
}

impl Client {
    pub(crate) fn new(place: ListenerAddress, root: &CertificateDer<'static>, log: Log) -> Self {
        Self {
            place,
            root: root.clone(),
            leaf: None,
            from: None,
            version: Version::HTTP_11,
            sni: None,
            host: None,
            fields: HeaderMap::new(),
            log,
        }
    }

    /// Shows this certificate.
    pub(crate) fn certificate(mut self, leaf: &LeafCertificate) -> Self {
        self.leaf = Some(leaf.clone());
        self
    }

    /// Connects to another address.
    pub(crate) fn at(mut self, place: ListenerAddress) -> Self {
        self.place = place;
        self
    }

    /// Shows no certificate.
    pub(crate) fn nobody(mut self) -> Self {
        self.leaf = None;
        self
    }

    /// Connects from this address of loopback.
    pub(crate) fn from(mut self, address: &str) -> Self {
        self.from = Some(address.parse().unwrap());
        self
    }

    /// Speaks HTTP/2.
    pub(crate) fn http2(mut self) -> Self {
        self.version = Version::HTTP_2;
        self
    }

    /// Sends this server name, independent of the URL; for an address it sends none.
    pub(crate) fn sni(mut self, name: &str) -> Self {
        self.sni = Some(name.to_owned());
        self
    }

    /// Sends this Host (or `:authority`), independent of the URL.
    pub(crate) fn host(mut self, host: &str) -> Self {
        self.host = Some(host.to_owned());
        self
    }

    /// Adds a field to each request.
    pub(crate) fn field(mut self, name: &'static str, value: &str) -> Self {
        self.fields.append(name, value.parse().unwrap());
        self
    }

    /// Authenticates with this bearer token.
    pub(crate) fn bearer(self, token: &str) -> Self {
        self.field("authorization", &format!("Bearer {token}"))
    }

    /// Sends a GET on a connection of its own.
    pub(crate) async fn get(&self, url: &str) -> Answer {
        self.ask("GET", url, "").await
    }

    /// Sends any method with a body.
    pub(crate) async fn ask(&self, method: &str, url: &str, body: impl Into<Bytes>) -> Answer {
        let request = Request::builder().method(method).uri(url);
        self.send(request.body(whole(body)).unwrap()).await
    }

    /// Sends any request on a connection of its own.
    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        self.try_send(request).await.unwrap()
    }

    /// The same, for a request that may fail.
    pub(crate) async fn try_send(&self, request: Request<Body>) -> Result<Answer, CallError> {
        let sni = request.uri().host().unwrap_or_default().to_owned();
        let mut connection = self.connect(&sni).await?;
        connection.ask(request).await
    }

    /// Opens a connection that is kept.
    pub(crate) async fn connect(&self, sni: &str) -> Result<Connection, CallError> {
        let alpn: &[&str] = match self.version {
            Version::HTTP_2 => &["h2"],
            _ => &["http/1.1"],
        };
        let io = TokioIo::new(self.wire(sni, alpn).await?);
        let mut driver = JoinSet::new();
        let sender = if self.version == Version::HTTP_2 {
            let mut begun = http2::Builder::new(TokioExecutor::new());
            let begun = begun.max_header_list_size(1 << 20).handshake(io);
            let (sender, connection) = bounded(begun).await??;
            driver.spawn(async move { drop(connection.await) });
            Sender::Http2(sender)
        } else {
            let begun = http1::handshake(io);
            let (sender, connection) = bounded(begun).await??;
            driver.spawn(async move { drop(connection.with_upgrades().await) });
            Sender::Http1(sender)
        };
        Ok(Connection {
            sender,
            client: self.clone(),
            _driver: driver,
        })
    }

    /// Sends these bytes as they are, and reads one answer, whose body must have a length.
    pub(crate) async fn raw(&self, sni: &str, bytes: impl AsRef<[u8]>) -> Answer {
        let mut wire = self.wire(sni, &["http/1.1"]).await.unwrap();
        let head = exchange(&mut *wire, bytes).await;
        let mut lines = head.trim_end().split("\r\n");
        let mut status = lines.next().unwrap().splitn(3, ' ').skip(1);
        let (code, phrase) = (status.next().unwrap(), status.next());
        let split = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            let name: hyper::header::HeaderName = name.parse().unwrap();
            (name, value.trim().parse().unwrap())
        };
        let fields: HeaderMap = lines.map(split).collect();
        let length = fields
            .get(CONTENT_LENGTH)
            .map_or("0", |value| value.to_str().unwrap());
        Answer {
            status: code.parse().unwrap(),
            phrase: phrase.map(str::to_owned),
            body: read(&mut wire, length.parse().unwrap()).await.into(),
            fields,
            trailers: None,
            log: self.log.clone(),
        }
    }

    /// A bare connection to the listener, through TLS if it speaks that.
    pub(crate) async fn wire(&self, sni: &str, alpn: &[&str]) -> Result<Box<dyn Wire>, CallError> {
        Ok(match &self.place {
            ListenerAddress::Tls(_) => Box::new(self.tls_stream(sni, alpn).await?),
            ListenerAddress::Plain(_) => Box::new(self.dial().await?),
            ListenerAddress::Unix(path) => Box::new(UnixStream::connect(path).await?),
        })
    }

    /// TLS to the listener; without ALPN if the list is empty.
    pub(crate) async fn tls_stream(
        &self,
        sni: &str,
        alpn: &[&str],
    ) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let sni = self.sni.as_deref().unwrap_or(sni).to_owned();
        let name = ServerName::try_from(sni).unwrap();
        let tcp = self.dial().await?;
        let connector = TlsConnector::from(Arc::new(self.tls(alpn)));
        bounded(connector.connect(name, tcp)).await?
    }

    /// TCP to the listener.
    pub(crate) async fn tcp_stream(&self) -> TcpStream {
        self.dial().await.unwrap()
    }

    async fn dial(&self) -> io::Result<TcpStream> {
        let (ListenerAddress::Tls(address) | ListenerAddress::Plain(address)) = self.place else {
            panic!("{:?} has no address", self.place);
        };
        let socket = TcpSocket::new_v4()?;
        if let Some(from) = self.from {
            socket.bind(SocketAddr::new(from, 0))?;
        }
        let tcp = socket.connect(address).await?;
        tcp.set_nodelay(true)?;
        Ok(tcp)
    }

    fn tls(&self, alpn: &[&str]) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.root.clone()).unwrap();
        let config = ClientConfig::builder().with_root_certificates(roots);
        let mut config = match &self.leaf {
            None => config.with_no_client_auth(),
            Some(leaf) => {
                let key = PrivateKeyDer::from_pem_slice(leaf.key_pem().expose().as_bytes());
                let chain = leaf.chain().to_vec();
                config.with_client_auth_cert(chain, key.unwrap()).unwrap()
            }
        };
        let names = alpn.iter().map(|name| name.as_bytes().to_vec());
        config.alpn_protocols = names.collect();
        config
    }

    /// Returns the request in the form of this version of HTTP.
    fn prepared(&self, mut request: Request<Body>) -> Request<Body> {
        let authority = request.uri().authority().map(ToString::to_string);
        let authority = self.host.clone().or(authority).unwrap_or_default();
        request.headers_mut().extend(self.fields.clone());
        let path = request.uri().path_and_query();
        let path = path.map_or("/", |path| path.as_str()).to_owned();
        if self.version == Version::HTTP_2 {
            let uri = Uri::builder().scheme("https").authority(authority.as_str());
            *request.uri_mut() = uri.path_and_query(path.as_str()).build().unwrap();
            return request;
        }
        if !request.headers().contains_key(HOST) {
            let host = authority.parse().unwrap();
            request.headers_mut().insert(HOST, host);
        }
        *request.uri_mut() = path.parse().unwrap();
        request
    }
}

/// A body that is complete at once.
pub(crate) fn whole(body: impl Into<Bytes>) -> Body {
    Full::new(body.into())
        .map_err(|never| match never {})
        .boxed()
}

/// The reason why a call failed: the client's error, with its causes.
pub(crate) type CallError = Box<dyn std::error::Error + Send + Sync>;

/// A body of 100 MB may take longer than a head does.
const WHOLE: Duration = Duration::from_mins(3);

async fn bounded<F: Future>(work: F) -> io::Result<F::Output> {
    timeout(PATIENCE, work).await.map_err(Into::into)
}

enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

/// A client's connection; dropping it closes it at once.
pub(crate) struct Connection {
    sender: Sender,
    client: Client,
    _driver: JoinSet<()>,
}

impl Connection {
    /// Sends a request and waits for the head of its answer.
    pub(crate) async fn open(
        &mut self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, CallError> {
        let request = self.client.prepared(request);
        self.open_as_is(request).await
    }

    /// The same, for a request that is sent unchanged.
    pub(crate) async fn open_as_is(
        &mut self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, CallError> {
        let answer = bounded(async {
            match &mut self.sender {
                Sender::Http1(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
                Sender::Http2(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
            }
        });
        Ok(answer.await??)
    }

    /// Sends a request beside others, which needs HTTP/2. It continues while the set is kept.
    pub(crate) fn hold(&self, request: Request<Body>) -> JoinSet<()> {
        let request = self.client.prepared(request);
        let Sender::Http2(sender) = &self.sender else {
            panic!("HTTP/1.1 knows no requests beside others");
        };
        let mut sender = sender.clone();
        let mut held = JoinSet::new();
        held.spawn(async move {
            let answer = sender.send_request(request).await;
            std::future::pending::<()>().await;
            drop(answer);
        });
        held
    }

    /// Sends a request and waits for its whole answer.
    pub(crate) async fn ask(&mut self, request: Request<Body>) -> Result<Answer, CallError> {
        let (parts, body) = self.open(request).await?.into_parts();
        let body = timeout(WHOLE, body.collect()).await??;
        Ok(Answer {
            status: parts.status.as_u16(),
            phrase: parts
                .extensions
                .get::<ReasonPhrase>()
                .map(|phrase| String::from_utf8_lossy(phrase.as_bytes()).into_owned()),
            fields: parts.headers,
            trailers: body.trailers().cloned(),
            body: body.to_bytes(),
            log: self.client.log.clone(),
        })
    }

    /// The same, for a plain GET.
    pub(crate) async fn get(&mut self, url: &str) -> Result<Answer, CallError> {
        self.ask(Request::get(url).body(whole("")).unwrap()).await
    }
}
