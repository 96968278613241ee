//! Identities for a fleet: the files that `token create` and joining would leave, for thousands of nodes at once.
//!
//! All nodes share one key. To make a key is the node's work and not measured, and a gateway's work is the same for every
//! key that it verifies. The nodes are added to the gateway's directory, which it reads when it starts.

use crate::{cli, report};
use anyhow::Context;
use causeway_certs::{
    Ca, Certificate, EdgeIdentity, NodeName, NodeRecord, OpenMode, PrivateKey, Secret, Store,
    TrustDomain, VerifiedPublicKey, verify,
};
use rustls::{
    ClientConfig,
    client::{ResolvesClientCert, Resumption},
    sign::CertifiedKey,
};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Trust domain of a CA that is made here.
const DOMAIN: &str = "bench.causeway";
/// Size of the cache of TLS sessions for the one gateway that a node dials; rustls keeps eight tickets in each.
const SESSIONS: usize = 8;

/// The file of a fleet's identities.
#[derive(Serialize, Deserialize)]
struct File {
    root: String,
    key: String,
    nodes: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    node: String,
    certificate: String,
}

/// Makes them.
pub(super) fn run(asked: &cli::Mint) -> anyhow::Result<()> {
    let place = asked.data_dir.display().to_string();
    let store = Store::open(&asked.data_dir, OpenMode::Create)?;
    let ca = if let Some(ca) = store.ca()? {
        ca
    } else {
        let ca = Ca::create(&TrustDomain::parse(DOMAIN)?)?;
        store.save_ca(&ca)?;
        ca
    };
    // Gateways with a copy of this directory resume each other's sessions.
    store.ticket_secret()?;
    let key = PrivateKey::generate()?;
    let csr = VerifiedPublicKey::verify(&key.request()?)?;
    let enrolled_at = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let (mut nodes, mut records) = (Vec::new(), Vec::new());
    for number in 1..=asked.nodes {
        let node = NodeName::parse(&format!("{}{number}", asked.prefix))?;
        let issued = ca.issue_edge(&csr, &node, asked.lifetime)?;
        nodes.push(Entry {
            node: node.to_string(),
            certificate: issued.pem(),
        });
        records.push(NodeRecord {
            node,
            addresses: Vec::new(),
            pool: None,
            labels: BTreeMap::new(),
            enrolled_at,
            order: None,
            serial: Certificate::parse(&issued.certificate)?.serial_hex(),
            root: Some(issued.root),
            not_after: Some(issued.not_after.as_secs()),
            revoked: None,
            follows_cluster: false,
            join_key: None,
            other: causeway_certs::OtherFields::new(),
        });
    }
    store.nodes().put_all(records)?;
    let file = File {
        root: ca.root_pem(),
        key: key.key_pem().expose().to_owned(),
        nodes,
    };
    write(&asked.out, &serde_json::to_string(&file)?)
        .with_context(|| format!("cannot write {}", asked.out.display()))?;
    report::say(&json!({"event": "minted", "nodes": asked.nodes, "data_dir": place}));
    Ok(())
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())
}

/// A node that can dial.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// The node's name.
    pub(super) node: Arc<str>,
    /// Position in the file, from 0.
    pub(super) number: u32,
    /// TLS with its certificate, and with tickets of its own.
    pub(super) tls: Arc<ClientConfig>,
}

/// Returns `most` identities of a file after the first `skip` ones, all others if `None`.
pub(super) fn read(
    path: &Path,
    (skip, most): (usize, Option<usize>),
    resume: bool,
) -> anyhow::Result<Vec<Identity>> {
    let place = || format!("{}", path.display());
    let text = std::fs::read_to_string(path).with_context(place)?;
    let file: File = serde_json::from_str(&text).with_context(place)?;
    let available = file.nodes.len().saturating_sub(skip);
    let most = most.unwrap_or(available);
    anyhow::ensure!(
        (1..=available).contains(&most),
        "{} has {} nodes, not {most} after the first {skip}",
        path.display(),
        file.nodes.len()
    );
    let first = file.nodes.first().with_context(place)?;
    let first = EdgeIdentity::new(&file.root, &first.certificate, &Secret::new(file.key))?;
    let base = verify::tunnel_client(&first)?;
    let key = &first.leaf.certified_key().key;
    let identity = |(number, entry): (u32, Entry)| {
        let certificate = CertificateDer::from_pem_slice(entry.certificate.as_bytes())?;
        let mut tls = ClientConfig::clone(&base);
        let certified = CertifiedKey::new(vec![certificate], key.clone());
        tls.client_auth_cert_resolver = Arc::new(FixedCertificate(Arc::new(certified)));
        tls.resumption = if resume {
            Resumption::in_memory_sessions(SESSIONS)
        } else {
            Resumption::disabled()
        };
        Ok(Identity {
            node: entry.node.into(),
            number,
            tls: Arc::new(tls),
        })
    };
    (0..)
        .zip(file.nodes)
        .skip(skip)
        .take(most)
        .map(identity)
        .collect()
}

/// Shows one certificate to every client.
#[derive(Debug)]
struct FixedCertificate(Arc<CertifiedKey>);

impl ResolvesClientCert for FixedCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
