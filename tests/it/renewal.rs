//! Renewal: an edge gets its next certificate from the gateway that it serves, and reconnects with it.

use crate::world::{World, app::App, edge::Edge, until};
use causeway_certs::{Certificate, OpenMode, Store};
use std::time::Duration;

/// Certificates begin an hour before they are issued: two thirds of this lifetime are over when the edge receives it.
const DUE: Duration = Duration::from_mins(10);

fn stored(edge: &Edge) -> Certificate {
    let store = Store::open(edge.folder(), OpenMode::Existing).unwrap();
    let identity = store.edge().unwrap().unwrap();
    Certificate::parse(&identity.leaf.chain()[0]).unwrap()
}

#[tokio::test]
async fn an_edge_renews_while_serving_and_uses_the_new_certificate() {
    let mut world = World::build()
        .config(|config| config.tunnel.edge_certificate_lifetime = DUE)
        .start()
        .await;
    let app = App::saying("here").await;
    let edge = world.edge("edge-1").port(8080, app.address()).join().await;
    until("the certificate is renewed", async || {
        let status = edge.status();
        let certificate = status.certificate.as_ref();
        certificate.is_some_and(|certificate| certificate.renews_at > status.started)
    })
    .await;
    let certificate = stored(&edge);
    assert_eq!(
        world.store().nodes().all().unwrap()[0].serial,
        certificate.serial_hex()
    );
    let status = edge.status();
    let told = status.certificate.as_ref().unwrap();
    assert_eq!(
        (status.state, told.not_after),
        ("connected", certificate.not_after * 1000)
    );

    world.kill_gateway().await;
    world.start_gateway().await;
    world.until_tunnels("edge-1", 1).await;
    let answer = world.client().get("https://edge-1:8080/").await;
    assert_eq!(answer.text(), "here");
}
