//! Issuer of JWTs: it signs tokens, and serves its keys over HTTPS as long as it runs.
//!
//! A test can change the served keys. The issuer counts the requests for them.

use super::{LIFE, client::Client};
use aws_lc_rs::{rand::SystemRandom, signature::Ed25519KeyPair};
use causeway_certs::{Ca, HostName, TrustDomain, verify::provider};
use causeway_gateway::config::Jwt;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode, jwk::Jwk};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, pem::PemObject},
};
use serde_json::{Value, json};
use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

/// Audience of its tokens.
const AUDIENCE: &str = "causeway";

/// A key that signs tokens.
pub(crate) struct Key {
    id: String,
    key: EncodingKey,
}

impl Key {
    /// A new one of this id.
    pub(crate) fn new(id: &str) -> Self {
        let pair = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).unwrap();
        Self {
            id: id.to_owned(),
            key: EncodingKey::from_ed_der(pair.as_ref()),
        }
    }

    /// A token of these claims.
    pub(crate) fn sign(&self, claims: &Value) -> String {
        let mut header = Header::new(Algorithm::EdDSA);
        header.kid = Some(self.id.clone());
        encode(&header, claims, &self.key).unwrap()
    }

    /// The set of keys that contains only this one.
    pub(crate) fn set(&self) -> String {
        let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::EdDSA).unwrap();
        jwk.common.key_id = Some(self.id.clone());
        json!({ "keys": [jwk] }).to_string()
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap().as_secs()
}

/// Returns the claims that a valid token needs, and `more`.
pub(crate) fn claims(more: &Value) -> Value {
    let mut claims = json!({
        "iss": "https://id.test", "aud": AUDIENCE, "sub": "ann", "groups": ["ops", "on call"],
        "exp": now() + 600,
    });
    let Value::Object(more) = more else {
        panic!("claims are an object");
    };
    claims.as_object_mut().unwrap().extend(more.clone());
    claims
}

/// An issuer with one key.
pub(crate) struct Issuer {
    address: SocketAddr,
    set: Arc<Mutex<String>>,
    asked: Arc<AtomicUsize>,
    acceptor: TlsAcceptor,
    serving: JoinSet<()>,
    // Keeps the address while no process listens on it.
    silent: Option<TcpSocket>,
    root: String,
}

impl Issuer {
    /// It has an address and does not answer yet.
    pub(crate) fn silent(key: &Key) -> Self {
        let ca = Ca::create(&TrustDomain::parse("id.test").unwrap()).unwrap();
        let names = [HostName::parse("127.0.0.1").unwrap()];
        let leaf = ca.issue_gateway(&names, LIFE).unwrap();
        let secret = PrivateKeyDer::from_pem_slice(leaf.key_pem().expose().as_bytes());
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(leaf.chain().to_vec(), secret.unwrap());
        let silent = TcpSocket::new_v4().unwrap();
        silent.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        Self {
            address: silent.local_addr().unwrap(),
            set: Arc::new(Mutex::new(key.set())),
            asked: Arc::default(),
            acceptor: Arc::new(config.unwrap()).into(),
            serving: JoinSet::new(),
            silent: Some(silent),
            root: ca.root_pem(),
        }
    }

    /// It answers.
    pub(crate) fn start(key: &Key) -> Self {
        let mut issuer = Self::silent(key);
        issuer.answer();
        issuer
    }

    /// It answers from now on.
    pub(crate) fn answer(&mut self) {
        let silent = self.silent.take().expect("it did not answer so far");
        let listener = silent.listen(128).unwrap();
        let (set, asked) = (self.set.clone(), self.asked.clone());
        let acceptor = self.acceptor.clone();
        self.serving.spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                asked.fetch_add(1, Ordering::SeqCst);
                let set = set.lock().unwrap().clone();
                // A client that does not trust it ends the connection.
                let _ = serve(&acceptor, tcp, &set).await;
            }
        });
    }

    /// It answers no more.
    pub(crate) async fn stop(&mut self) {
        self.serving.shutdown().await;
    }

    /// From now on it has this key and no other.
    pub(crate) fn rotate(&self, key: &Key) {
        *self.set.lock().unwrap() = key.set();
    }

    /// Returns the number of requests so far.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    /// Returns a listener's configuration of this issuer; its CA goes into a file of this folder.
    pub(crate) fn jwt(&self, folder: &Path) -> Jwt {
        std::fs::create_dir_all(folder).unwrap();
        let ca = folder.join("issuer-ca.pem");
        std::fs::write(&ca, &self.root).unwrap();
        let url = format!("https://{}/keys", self.address);
        Jwt {
            jwks_ca: Some(ca),
            ..Jwt::new("https://id.test", AUDIENCE, url.parse().unwrap())
        }
    }
}

async fn serve(acceptor: &TlsAcceptor, tcp: TcpStream, set: &str) -> std::io::Result<()> {
    let mut tls = acceptor.accept(tcp).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tls.read_u8().await?);
    }
    assert!(head.starts_with(b"GET /keys HTTP/1.1\r\n"));
    let length = set.len();
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{set}");
    tls.write_all(answer.as_bytes()).await?;
    tls.shutdown().await
}

impl Client {
    /// Shows no certificate, but this token.
    pub(crate) fn only_bearer(self, token: &str) -> Self {
        self.nobody().bearer(token)
    }
}
