use super::*;
use crate::{Edge, Error, config};
use causeway_certs::{Ca, OpenMode, Store, TrustDomain, VerifiedPublicKey};
use rustls_pki_types::{CertificateSigningRequestDer, pem::PemObject};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::Relaxed},
};
use tokio_util::sync::CancellationToken;

/// Cluster that knows the node of each request, and signs at the third poll.
pub(in crate::control) struct Api {
    pub(in crate::control) ca: Ca,
    /// Node for which it signs every request.
    signs: &'static str,
    /// Names and certificate requests that were submitted.
    pub(in crate::control) asked: Mutex<Vec<(String, String)>>,
    looks: AtomicUsize,
    denied: AtomicUsize,
    /// The API server answers nothing until then.
    away_until: Option<Instant>,
}

impl Api {
    pub(in crate::control) fn new(signs: &'static str) -> Self {
        let domain = TrustDomain::parse("test.example").unwrap();
        Self {
            ca: Ca::create(&domain).unwrap(),
            signs,
            asked: Mutex::default(),
            looks: AtomicUsize::new(0),
            denied: AtomicUsize::new(0),
            away_until: None,
        }
    }

    fn signed(&self, name: &str) -> String {
        let asked = self.asked.lock().unwrap();
        let (_, request) = asked.iter().find(|(known, _)| known == name).unwrap();
        let der = CertificateSigningRequestDer::from_pem_slice(request.as_bytes()).unwrap();
        let node = NodeName::parse("edge-1").unwrap();
        let key = VerifiedPublicKey::verify_edge(&der, self.ca.trust_domain(), &node).unwrap();
        let node = NodeName::parse(self.signs).unwrap();
        let life = Duration::from_hours(1);
        self.ca.issue_edge(&key, &node, life).unwrap().pem()
    }
}

impl CsrClient for Api {
    fn node_name(&self) -> BoxFuture<'_, Result<String, CsrRequestError>> {
        Box::pin(async { Ok("edge-1".to_owned()) })
    }

    fn roots(&self) -> BoxFuture<'_, Result<String, CsrRequestError>> {
        let is_away = self.away_until.is_some_and(|end| Instant::now() < end);
        let answer = if is_away {
            Err(CsrRequestError::Silent("nobody is there".to_owned()))
        } else {
            Ok(self.ca.bundle_pem())
        };
        Box::pin(async { answer })
    }

    fn submit<'a>(
        &'a self,
        name: &'a str,
        request: &'a str,
    ) -> BoxFuture<'a, Result<(), CsrRequestError>> {
        let mut asked = self.asked.lock().unwrap();
        if !asked.iter().any(|(known, _)| known == name) {
            asked.push((name.to_owned(), request.to_owned()));
        }
        Box::pin(async { Ok(()) })
    }

    fn signer_profile(&self) -> Option<SignerProfile> {
        None
    }

    fn request_status<'a>(
        &'a self,
        name: &'a str,
    ) -> BoxFuture<'a, Result<CsrStatus, CsrRequestError>> {
        let looks = self.looks.fetch_add(1, Relaxed);
        let denied = self.denied.load(Relaxed) > 0;
        Box::pin(async move {
            match looks {
                0 => Err(CsrRequestError::Silent("nobody is there".to_owned())),
                1 if denied => Ok(CsrStatus::Refused("it was denied".to_owned())),
                1 => Ok(CsrStatus::Pending("it is not approved yet".to_owned())),
                _ => Ok(CsrStatus::Signed(self.signed(name))),
            }
        })
    }
}

fn config(data: &std::path::Path) -> Config {
    Config {
        data_dir: data.to_owned(),
        gateways: vec!["127.0.0.1:9".to_owned()],
        kubernetes: Some(config::Kubernetes::default()),
        ..Config::default()
    }
}

#[tokio::test(start_paused = true)]
async fn an_edge_waits_for_approval_logs_why_and_stores_the_result() {
    let (data, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let (api, told) = (Arc::new(Api::new("edge-1")), Mutex::new(Vec::new()));
    let tell = |why: &str| told.lock().unwrap().push(why.to_owned());
    let open = || Edge::open_with_csr(config(data.path()), Some(api.clone()), (&stop, &tell));
    assert_eq!(open().await.unwrap().node(), "edge-1");
    let whys = told.lock().unwrap().clone();
    assert_eq!(whys, ["nobody is there", "it is not approved yet"]);
    // The edge sends no request for a certificate that the data directory has.
    assert_eq!(open().await.unwrap().node(), "edge-1");
    assert_eq!(api.asked.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn after_a_refusal_another_request_is_for_another_key() {
    let api = Api::new("edge-1");
    api.denied.store(1, Relaxed);
    let data = tempfile::tempdir().unwrap();
    let store = Store::open(data.path(), OpenMode::Create).unwrap();
    let identity = join(&api, (&config(data.path()), &store), &|_| {}).await;
    assert_eq!(identity.node.as_str(), "edge-1");
    let asked = api.asked.lock().unwrap();
    assert!(asked.len() == 2 && asked[0] != asked[1]);
}

#[tokio::test(start_paused = true)]
async fn requests_become_rare_while_the_api_server_is_away() {
    let mut api = Api::new("edge-1");
    let returns = Instant::now() + Duration::from_mins(10);
    api.away_until = Some(returns);
    let data = tempfile::tempdir().unwrap();
    let store = Store::open(data.path(), OpenMode::Create).unwrap();
    let attempts = AtomicUsize::new(0);
    let count = |_: &str| {
        if Instant::now() < returns {
            attempts.fetch_add(1, Relaxed);
        }
    };
    join(&api, (&config(data.path()), &store), &count).await;
    let attempts = attempts.load(Relaxed);
    assert!((10..=30).contains(&attempts), "{attempts} attempts");
    let late = returns.elapsed();
    assert!(
        late <= Duration::from_secs(100),
        "{late:?} after its return"
    );
}

#[tokio::test(start_paused = true)]
async fn a_restarted_edge_waits_for_the_same_request() {
    let (data, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let api = Arc::new(Api::new("edge-1"));
    // The edge is stopped while it waits.
    let tell = |why: &str| {
        if why.contains("not approved") {
            stop.cancel();
        }
    };
    let opened = Edge::open_with_csr(config(data.path()), Some(api.clone()), (&stop, &tell));
    assert!(matches!(opened.await, Err(Error::Stopped)));
    let stop = CancellationToken::new();
    let opened = Edge::open_with_csr(config(data.path()), Some(api.clone()), (&stop, &|_| {}));
    assert_eq!(opened.await.unwrap().node(), "edge-1");
    assert_eq!(api.asked.lock().unwrap().len(), 1);
    let store = Store::open(data.path(), OpenMode::Existing).unwrap();
    assert_eq!(store.pending(Requested::Identity).unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_for_another_node_is_not_taken() {
    let api = Api::new("edge-2");
    let data = tempfile::tempdir().unwrap();
    let store = Store::open(data.path(), OpenMode::Create).unwrap();
    let trouble = submit_and_wait(&api, (&config(data.path()), &store), &|_| {})
        .await
        .unwrap_err();
    assert!(
        trouble.detail().contains("it is for node edge-2"),
        "{}",
        trouble.detail()
    );
}

#[tokio::test]
async fn an_edge_reports_that_no_gateway_knows_its_cluster() {
    let data = tempfile::tempdir().unwrap();
    let opened = Edge::open(config(data.path()), &CancellationToken::new()).await;
    assert!(matches!(opened, Err(Error::NoCluster)));
}

/// The test uses real sockets, because a running edge never becomes idle, which paused time would require.
#[tokio::test]
async fn a_certificate_expired_at_run_time_is_requested_again() {
    let (node, stop) = (NodeName::parse("edge-1").unwrap(), CancellationToken::new());
    let mut soon = Duration::from_secs(3);
    let (api, _data, store, key, bound) = loop {
        let (api, data) = (Arc::new(Api::new("edge-1")), tempfile::tempdir().unwrap());
        let key = PrivateKey::generate().unwrap();
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        let issued = api.ca.issue_edge(&csr, &node, soon).unwrap();
        let before = EdgeIdentity::new(&api.ca.bundle_pem(), &issued.pem(), &key.key_pem());
        let store = Store::open(data.path(), OpenMode::Create).unwrap();
        store.save_edge(&before.unwrap()).unwrap();
        let mut config = config(data.path());
        config.admin.listen = "127.0.0.1:0".parse().unwrap();
        let edge = Edge::open_with_csr(config, Some(api.clone()), (&stop, &|_| {}));
        let bound = edge.await.unwrap().bind().await.unwrap();
        if api.asked.lock().unwrap().is_empty() {
            break (api, data, store, key.key_pem(), bound);
        }
        // The certificate had expired before a slow machine had opened the edge.
        assert!(soon < Duration::from_mins(2), "a valid certificate is used");
        soon *= 2;
    };
    let reader = bound.status_reader();
    let is_another = |_: &_| store.edge().unwrap().unwrap().leaf.key_pem() != key;
    tokio::select! {
        _ = reader.wait_for(is_another) => {}
        ended = bound.run(stop.clone()) => panic!("{ended:?}"),
    }
    assert_eq!(api.asked.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_renamed_node_joins_anew_and_keeps_the_old_identity() {
    let (data, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let (old, api) = (Api::new("edge-2"), Arc::new(Api::new("edge-1")));
    let store = Store::open(data.path(), OpenMode::Create).unwrap();
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let (node, life) = (NodeName::parse("edge-2").unwrap(), Duration::from_hours(1));
    let issued = old.ca.issue_edge(&csr, &node, life).unwrap();
    let before = EdgeIdentity::new(&old.ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap();
    store.save_edge(&before).unwrap();
    let config = Config {
        node: Some("edge-1".to_owned()),
        ..config(data.path())
    };
    let opened = Edge::open_with_csr(config, Some(api), (&stop, &|_| {})).await;
    assert_eq!(opened.unwrap().node(), "edge-1");
    let entries = std::fs::read_dir(data.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let kept = names.filter(|name| name.starts_with("edge-replaced-"));
    assert_eq!(kept.count(), 1);
}
