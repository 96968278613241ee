//! Certificates of YurtHubs, which they request from the cluster.

use std::fs;

use serde_json::Value;

use super::cluster::Cluster;

/// Returns the file with which YurtHubs request their certificates. The file contains the CA instead of naming a file.
pub(crate) fn bootstrap(cluster: &Cluster) -> String {
    let file = cluster.with_token("hub", &cluster.token("kube-system", "hub-bootstrap"));
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let ca = fs::read(cluster.pki.path("ca.pem")).unwrap();
    let api = config["clusters"][0]["cluster"].as_object_mut().unwrap();
    api.remove("certificate-authority");
    let ca = data_encoding::BASE64.encode(&ca);
    api.insert("certificate-authority-data".into(), ca.into());
    fs::write(&file, config.to_string()).unwrap();
    file
}

/// Approves each certificate request that waits.
pub(crate) fn approve_requests(cluster: &Cluster) {
    let pending = cluster.get("csr").unwrap_or_default();
    for csr in pending["items"].as_array().into_iter().flatten() {
        if csr["status"]["conditions"].is_null() {
            let name = csr["metadata"]["name"].as_str().unwrap_or_default();
            let line = format!("certificate approve {name}");
            cluster.kubectl(&line).run().ok();
        }
    }
}
