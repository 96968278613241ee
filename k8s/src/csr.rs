//! Agreement between edges, which request certificates from their cluster (`node_csr`), and the gateway, which validates and
//! signs the requests (`csr_controller`).

/// Usages that edges need, since they sign a handshake as clients.
pub(crate) const CSR_USAGES: [&str; 2] = ["client auth", "digital signature"];
/// Lifetime of a certificate of the cluster's own signer, in seconds. The edge presents it once to a gateway and does not
/// need it any more.
pub(crate) const CERTIFICATE_SECONDS: i32 = 2 * 60 * 60;
/// Key in a pod's token under which the API reports the pod's node.
pub(crate) const POD_NODE_KEY: &str = "authentication.kubernetes.io/node-name";
/// Key of the roots in the `ConfigMap`, as Kubernetes itself names it in `kube-root-ca.crt`.
pub(crate) const CA_BUNDLE_KEY: &str = "ca.crt";
