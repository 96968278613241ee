//! Programs that read over TLS, as programs in a cluster do: a certificate of the cluster's CA for their own node, under
//! the API's name.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use super::{
    scene::{BY_TLS, ENDPOINT, Edge, Scene},
    views::Readers,
};
use crate::world::{
    pki::Pki,
    process::{ToolOutput, until},
};

/// Name by which programs in a cluster know its API.
const NAME: &str = "kubernetes.default.svc";
/// The certificate's file.
const SHOWN: &str = "endpoint";

fn make(pki: &Pki) {
    pki.server(SHOWN, &[NAME], &[IpAddr::V4(Ipv4Addr::LOCALHOST)]);
}

/// Writes the configuration of a program: the CA, and credentials for the API, which the edge does not check. kubectl
/// prompts for credentials if there are none.
fn kubeconfig(edge: &Edge, pki: &Pki) -> PathBuf {
    let path = edge.folder.join("tls.kubeconfig");
    let ca = pki.path("ca.pem");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: it\n\
         clusters: [{{ name: it, cluster: {{ server: '{BY_TLS}', certificate-authority: {ca} }} }}]\n\
         users: [{{ name: it, user: {{ token: nobodys }} }}]\n\
         contexts: [{{ name: it, context: {{ cluster: it, user: it }} }}]\n"
    );
    fs::write(&path, text).unwrap();
    path
}

/// curl by a name that leads to the node itself.
fn by_name(edge: &Edge, pki: &Pki, (name, options): (&str, &str)) -> ToolOutput {
    let curl = edge.site.at("curl").words("-q -sS --max-time 5");
    let to = format!("{name}:10270:127.0.0.1");
    curl.args(["--resolve", &to, "--cacert", &pki.path("ca.pem")])
        .words(options)
        .args([format!("https://{name}:10270/version")])
        .run()
}

/// Returns the serial number of the certificate that the edge shows now.
fn serial(edge: &Edge) -> String {
    let asked = edge.site.at("openssl");
    let asked = asked.words("s_client -connect 127.0.0.1:10270 -showcerts");
    let text = asked.input("").run().text();
    let begin = text
        .find("-----BEGIN")
        .expect("the edge shows a certificate");
    let reads = edge.site.at("openssl").words("x509 -noout -serial");
    reads.input(&text[begin..]).run().ok().text()
}

pub(super) fn programs_can_read_over_tls(scene: &mut Scene) {
    let number = 1;
    make(&scene.cluster.pki);
    let edge = &mut scene.edges[number];
    edge.shows(Some((&scene.cluster.pki, SHOWN)));
    edge.starts(None);
    let (edge, cluster) = (&scene.edges[number], &scene.cluster);

    let at = kubeconfig(edge, &cluster.pki).display().to_string();
    for line in ["endpointslices -A -o json", "svc -A -o yaml"] {
        let here = || edge.part("kubectl").args(["--kubeconfig", &at, "get"]);
        let cloud = || cluster.kubectl("get").words(line).run().ok().text();
        until("kubectl reads there what it reads in the cloud", || {
            here().words(line).run().ok().text() == cloud()
        });
    }
    for version in ["--http1.1", "--http2"] {
        let message = by_name(edge, &cluster.pki, (NAME, version)).ok().text();
        assert!(message.contains("gitVersion"), "{message}");
    }
    // A name that the certificate does not have, with a client that does not verify it.
    let refused = by_name(edge, &cluster.pki, ("page.example", "--insecure")).text();
    assert!(refused.contains("the Host header must be"), "{refused}");
    let plain = edge.site.at("curl").words("-q -sS --max-time 5");
    let plain = plain.args([format!("{ENDPOINT}/version")]).run();
    assert_ne!(plain.code, Some(0), "{}", plain.text());

    let mut views = Readers::default();
    views.start_at(&scene.edges[number..=number], &at);
    views.agree(cluster, |_| true).unwrap();
    let before = serial(edge);
    make(&cluster.pki);
    until("the certificate that was renewed is shown", || {
        serial(edge) != before
    });
    views.change_a_few(cluster, 20);
    views.agree(cluster, |_| true).unwrap();

    scene.edges[number].shows(None);
    scene.edges[number].starts(None);
    scene.agree();
}
