//! Tests of an edge that receives revocations of gateways' certificates.

use super::*;
use causeway_certs::{Certificate, Fingerprint, MAX_CRL_TEXT};

/// Gateway, and the serial number of its certificate.
async fn gateway(ca: &Arc<Ca>) -> (Gateway, String) {
    let leaf = issue_leaf(ca);
    let serial = Certificate::parse(&leaf.chain()[0]).unwrap().serial_hex();
    let says = Says {
        instance: serial.clone(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: None,
    };
    (
        Gateway::start_on(reserved_address(), acceptor_with(&leaf, ca), says).await,
        serial,
    )
}

/// Store of the revocations of a gateway.
struct Revocations {
    store: Store,
    _folder: TempDir,
}

impl Revocations {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        Self {
            store,
            _folder: folder,
        }
    }

    /// Returns the message that revokes this certificate and all earlier ones.
    fn with(&self, ca: &Ca, serial: &str) -> GatewayMessage {
        self.store.revoke_gateway(serial, "stolen").unwrap();
        let list = self.store.revoked_gateways().unwrap();
        let pem = ca.sign_crls(&list).unwrap().unwrap();
        GatewayMessage::Crls { pem }
    }
}

#[tokio::test]
async fn a_revoked_gateway_is_left_and_refused_also_after_a_restart() {
    let ca = ca();
    let (mut good, _) = gateway(&ca).await;
    let (mut stolen, serial) = gateway(&ca).await;
    let world = World::joined(&ca);
    let addresses = [good.address.to_string(), stolen.address.to_string()];
    let more = json!({ "tunnels": { "gateways": "every", "resolve_after": "1s" } });
    let edge = world.run(&addresses, more.clone()).await;
    let (mut to_good, mut to_stolen) = (good.next().await, stolen.next().await);
    assert!(to_good.welcome.crls);
    edge.until(|status| status.tunnels.len() == 2).await;
    let message = Revocations::new().with(&ca, &serial);
    to_good.control.send(&message).await.unwrap();
    let ended = timeout(SOON, to_stolen.control.receive::<EdgeMessage>()).await;
    assert!(ended.unwrap().is_err());
    let is_revoked = |status: &crate::status::Status| {
        let trouble = status.trouble.as_ref();
        trouble.is_some_and(|it| it.what.contains("the gateway's certificate is revoked"))
    };
    let status = edge.until(is_revoked).await;
    assert_eq!(status.tunnels.len(), 1);
    edge.kill().await;
    let edge = world.run(&addresses[1..], more).await;
    edge.until(is_revoked).await;
    assert!(stolen.registered.try_recv().is_err());
}

#[tokio::test]
async fn revocations_that_are_not_valid_change_nothing() {
    let (ca, other_ca) = (ca(), ca());
    let (mut own, serial) = gateway(&ca).await;
    let world = World::joined(&ca);
    let _edge = world.run(&[own.address.to_string()], json!({})).await;
    let mut tunnel = own.next().await;
    let list = Revocations::new();
    let GatewayMessage::Crls { pem: older } = list.with(&ca, "40aa") else {
        panic!("no revocations");
    };
    let GatewayMessage::Crls { pem: newer } = list.with(&ca, "40bb") else {
        panic!("no revocations");
    };
    let foreign = Revocations::new().with(&other_ca, &serial);
    let GatewayMessage::Crls { pem: own_serial } = Revocations::new().with(&ca, &serial) else {
        panic!("no revocations");
    };
    let invalid = [
        own_serial.clone() + &" ".repeat(MAX_CRL_TEXT),
        own_serial.replace("X509 CRL", "X509 LIST"),
        "no list".to_owned(),
    ];
    let valid = [newer.clone(), older.clone()];
    for pem in invalid.into_iter().chain([newer, older]) {
        tunnel
            .control
            .send(&GatewayMessage::Crls { pem })
            .await
            .unwrap();
    }
    tunnel.control.send(&foreign).await.unwrap();
    // The edge handles one message after the other, and answers this one too.
    let pem = ca.bundle_pem();
    let roots = GatewayMessage::Roots { pem };
    tunnel.control.send(&roots).await.unwrap();
    let mut answers = Vec::new();
    while !matches!(answers.last(), Some(EdgeMessage::Roots { .. })) {
        let answer = timeout(SOON, tunnel.control.receive::<EdgeMessage>()).await;
        answers.push(answer.unwrap().unwrap());
    }
    answers.pop();
    // Only the valid lists are acknowledged.
    let acknowledged = valid.map(|pem| EdgeMessage::Crls {
        digest: Fingerprint::digest(pem.as_bytes()).to_string(),
    });
    assert_eq!(answers, acknowledged);
    let store = Store::open(world.data.path(), OpenMode::Existing).unwrap();
    let kept = store.edge().unwrap().unwrap().revoked_gateways.serials();
    assert_eq!(kept, ["40aa".to_owned(), "40bb".to_owned()].into());
}
