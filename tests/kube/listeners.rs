//! Listeners for other clients than kube-apiserver: kubelets with TLS passthrough.

use std::fs;

use libtest_mimic::Trial;
use serde_json::Value;

use crate::{
    steps::{NODES, by},
    world::{
        Way, World,
        process::{Program, until},
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![by(
        "listeners::a_kubelet_ends_tls_itself_behind_passthrough".to_owned(),
        Way::Unix,
        a_kubelet_ends_tls_itself_behind_passthrough,
    )]
}

const PASSTHROUGH: &str = "127.0.0.1:10273";

/// Adds a listener to the gateway, and waits until it is open.
fn open(world: &World, listener: &str, address: &str) {
    let more = format!("\nlisteners:\n  - {listener}\n");
    let road = world.the_road();
    road.gateway_anew(|text| text.replacen("\nlisteners:\n", &more, 1));
    until("the listener is open", || {
        std::net::TcpStream::connect(address).is_ok()
    });
}

/// Returns the fingerprint of the first certificate in this text.
fn fingerprint(pem: Vec<u8>) -> String {
    let openssl = Program::new("openssl").words("x509 -noout -fingerprint -sha256");
    openssl.input(pem).run().ok().text()
}

fn a_kubelet_ends_tls_itself_behind_passthrough(world: &mut World) {
    let listener = format!(
        "{{ name: passthrough, protocol: passthrough, listen: \"{PASSTHROUGH}\", port: 10250, anonymous: true }}"
    );
    open(world, &listener, PASSTHROUGH);
    let pki = |name: &str| world.cluster.pki.path(name);
    for (namespace, node) in NODES {
        let client = Program::new("openssl").words("s_client -verify_return_error -CAfile");
        let client = client.args([pki("ca.pem")]);
        let client = client.args(["-connect", PASSTHROUGH, "-servername", node]);
        let shown = fingerprint(client.run().ok().stdout);
        let own = fs::read(pki(&format!("{node}-kubelet.pem"))).unwrap();
        assert_eq!(shown, fingerprint(own), "{node}");

        let get = |more: &[String]| {
            let curl = Program::new("curl").words("-q -sS -w %{stderr}%{http_code} --cacert");
            let curl = curl.args([pki("ca.pem")]).args(more);
            let to = format!("{node}:10250:{PASSTHROUGH}");
            let curl = curl.args(["--connect-to", &to]);
            curl.args([format!("https://{node}:10250/pods")]).run().ok()
        };
        let with = ["--cert", "--key"].map(str::to_owned);
        let [cert, key] = with;
        let answer = get(&[
            cert,
            pki("kubelet-client.pem"),
            key,
            pki("kubelet-client.key"),
        ]);
        let pods: Value = serde_json::from_slice(&answer.stdout).unwrap();
        let pods = pods["items"].as_array().unwrap();
        let is_ours = |pod: &&Value| pod["metadata"]["namespace"] == namespace;
        assert!(pods.iter().filter(is_ours).count() >= 3, "{pods:?}");
        // The kubelet refuses this client: the gateway has no certificate to show in its place.
        assert_eq!(get(&[]).stderr, "401");
    }
}
