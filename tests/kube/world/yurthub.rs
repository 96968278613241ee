//! `YurtHub`s on nodes, with certificates that they request from the cluster.

use std::{fs, path::Path, time::Duration};

use serde_json::{Value, json};

use super::{
    cluster::Cluster,
    node::Node,
    process::{Process, within},
};

/// URL to which kubelets behind a YurtHub send their requests.
pub(crate) const URL: &str = "http://127.0.0.1:10261";
/// Maximum time that a YurtHub takes to start: it waits for two certificates and asks for each every few seconds.
const STARTS: Duration = Duration::from_secs(90);

/// Creates the objects that `OpenYurt`'s chart gives to YurtHubs.
pub(crate) fn create_objects(cluster: &Cluster) {
    cluster.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": "yurt-hub" },
        "rules": [
            { "apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"] },
            { "apiGroups": ["", "discovery.k8s.io"], "resources": ["endpoints", "endpointslices", "services"], "verbs": ["get", "list", "watch"] },
        ],
    }));
    cluster.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": "yurt-hub" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "yurt-hub" },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes" }],
    }));
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "hub-bootstrap", "namespace": "kube-system" },
    }));
    cluster.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": "hub-bootstrap" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-bootstrapper" },
        "subjects": [{ "kind": "ServiceAccount", "name": "hub-bootstrap", "namespace": "kube-system" }],
    }));
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {
            "name": "yurt-hub-cfg", "namespace": "kube-system",
            "labels": { "openyurt.io/configmap-name": "yurt-hub-cfg" },
        },
        "data": { "cache_agents": "", "servicetopology": "", "discardcloudservice": "", "masterservice": "" },
    }));
}

/// Starts a YurtHub on a node, with these flags, for the API server at this URL. Returns when the YurtHub is healthy.
pub(crate) fn start(
    (cluster, node): (&Cluster, &Node),
    (hub, flags): (&Path, &str),
    server: &str,
    folder: &Path,
) -> Process {
    // Another test may have made both.
    let account = "create serviceaccount -n kube-system hub-bootstrap";
    cluster.kubectl(account).run();
    let bind = "create clusterrolebinding hub-bootstrap --clusterrole=system:node-bootstrapper \
         --serviceaccount=kube-system:hub-bootstrap";
    cluster.kubectl(bind).run();
    fs::create_dir_all(folder).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    let process = node
        .site
        .at(hub)
        .args([
            format!("--node-name={}", node.name),
            format!("--server-addr={server}"),
            format!("--bootstrap-file={}", bootstrap(cluster, server)),
            format!("--root-dir={}", path("root")),
            format!("--disk-cache-path={}", path("cache")),
        ])
        .words("--working-mode=edge --enable-dummy-if=false --enable-resource-filter=false --v=2")
        .words(flags)
        .env("HOME", folder)
        .start(&folder.join("log"));
    let up = within(STARTS, || {
        approve_requests(cluster);
        let ask = node.site.at("curl").words("-q -sS --max-time 2 --fail");
        let ask = ask.words("http://127.0.0.1:10267/v1/healthz");
        ask.run().code == Some(0)
    });
    assert!(up, "{}", process.output());
    process
}

/// Returns the file with which YurtHubs request their certificates from the API server at this URL. The file contains the CA instead of
/// naming a file.
pub(crate) fn bootstrap(cluster: &Cluster, server: &str) -> String {
    let file = cluster.with_token("hub", &cluster.token("kube-system", "hub-bootstrap"));
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let ca = fs::read(cluster.pki.path("ca.pem")).unwrap();
    let api = config["clusters"][0]["cluster"].as_object_mut().unwrap();
    api.remove("certificate-authority");
    let ca = data_encoding::BASE64.encode(&ca);
    api.insert("certificate-authority-data".into(), ca.into());
    api.insert("server".into(), server.into());
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
