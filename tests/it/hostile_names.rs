//! Names whose meaning changes between two queries: the dialled address decides.
//!
//! The edge is the built binary in a mount namespace, where the test's own name server is the only source of names. It
//! answers each query differently from the one before.

use crate::world::{
    app::App,
    names::NameServer,
    process::{GatewayProcess, causeway_asking},
    tool::need,
};
use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

/// Address of the name server; of loopback, where no other process listens.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 53, 17, 1);
/// Allowed, and unused (RFC 5737).
const ALLOWED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
/// Not allowed, and the app's address.
const FORBIDDEN: Ipv4Addr = Ipv4Addr::LOCALHOST;
#[tokio::test]
async fn a_name_with_changing_addresses_is_judged_by_the_dialled_one() {
    need!("curl", "mounts");
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let by_turns = move || vec![[ALLOWED, FORBIDDEN][count.fetch_add(1, SeqCst) % 2]];
    let _names = NameServer::start(SERVER, by_turns).await;
    let app = App::saying("it").await;
    let site = GatewayProcess::start().await;
    let token = site.token("--node edge-1").await;
    let target = format!("{{9100: {{target: \"rebind.test:{}\"}}}}", app.port());
    let mut edge = causeway_asking(SERVER.into(), &site.path(""))
        .args(["edge", "--admin-listen", "127.0.0.1:0"])
        .flag("--gateway", &site.tunnel)
        .flag("--data-dir", site.edge_data("edge-1"))
        .flag("--ports", target)
        .flag("--allow-hosts", "[192.0.2.0/24]")
        .flag("--join", token)
        .start();
    edge.wait_for_line("tunnel registered").await;
    for turn in 0..4 {
        let message = site.curl("edge-1", "").run().await.ok().text();
        let refused = message.contains("does not allow rebind.test");
        assert_eq!(refused, turn % 2 == 1, "{turn}: {message}");
        // One query: an edge that resolved again before it dials would have checked another address.
        assert_eq!(asked.load(SeqCst), turn + 1, "{message}");
    }
    assert_eq!(app.connections(), 0);
}
