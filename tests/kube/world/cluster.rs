//! The control plane: etcd, kube-apiserver and kube-controller-manager, and kubectl to use it.
//!
//! etcd and the certificates stay for all tests; the API server is restarted if a test needs it with other flags, and keeps
//! its address. RBAC is on, and kubelets know the API server as `system:kubelet-api-admin`, no more. There is no scheduler:
//! pods name their node.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::{Value, json};

use super::{
    net::{self, CLOUD, MACHINE},
    pki::Pki,
    process::{PATIENCE, Process, Program, ToolOutput, must, until, within},
};

/// User as which the API server connects to API servers of others.
const AGGREGATOR: &str = "listener-proxy-client";

/// How it connects to them: nothing of this cloud leads to Services.
const AGGREGATION: &str = "--enable-aggregator-routing=true --requestheader-username-headers=X-Remote-User \
     --requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra-";

/// Flags of an API server in addition to the common ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Flags {
    /// The egress selector's configuration.
    pub(crate) egress: Option<PathBuf>,
    /// The CAs by which kubelets' certificates are verified; without them they are not verified.
    pub(crate) authority: Option<PathBuf>,
    /// The order in which a node's addresses are tried.
    pub(crate) addresses: &'static str,
    /// A `resolv.conf` of its own, and no names of nodes in its `hosts`.
    pub(crate) resolver: Option<PathBuf>,
    /// An audit policy. The audit log is beside it, with the ending `log`.
    pub(crate) audit: Option<PathBuf>,
}

/// A running control plane.
pub(crate) struct Cluster {
    folder: PathBuf,
    pub(crate) assets: PathBuf,
    pub(crate) pki: Pki,
    flags: Flags,
    api: Option<Process>,
    /// Number of starts of the API server.
    pub(crate) started: usize,
    _etcd: Process,
    controllers: Option<Process>,
}

impl Cluster {
    /// Starts all of it.
    pub(crate) fn start(folder: &Path, assets: &Path) -> Self {
        let pki = Pki::new(&folder.join("pki"));
        certify(&pki, &[]);
        pki.client("kubelet-client", "kube-apiserver-kubelet-client", None);
        pki.client("egress", "kube-apiserver", None);
        pki.client("aggregator", AGGREGATOR, None);
        pki.client("admin", "admin", Some("system:masters"));
        let server = format!("https://{CLOUD}:6443");
        pki.kubeconfig("admin", &server);
        let etcd = Program::new(assets.join("etcd"))
            .args([format!("--data-dir={}", folder.join("etcd").display())])
            .words("--unsafe-no-fsync --log-level=warn")
            .args([format!(
                "--listen-client-urls=http://127.0.0.1:2379,http://{CLOUD}:2379"
            )])
            .words("--advertise-client-urls=http://127.0.0.1:2379")
            .words("--listen-peer-urls=http://127.0.0.1:2380")
            .start(&folder.join("etcd.log"));
        let flags = Flags {
            authority: Some(pki.path("ca.pem").into()),
            addresses: "Hostname",
            ..Flags::default()
        };
        let mut cluster = Self {
            folder: folder.to_owned(),
            assets: assets.to_owned(),
            pki,
            api: None,
            flags,
            started: 0,
            _etcd: etcd,
            controllers: None,
        };
        cluster.restart();
        // It ends if no API server answers within 10 s of its start.
        cluster.controllers = Some(controllers(folder, assets, &cluster.pki));
        cluster.furnish();
        cluster
    }

    fn furnish(&self) {
        let bind = "create clusterrolebinding kubelet-client --clusterrole=system:kubelet-api-admin \
             --user=kube-apiserver-kubelet-client";
        self.kubectl(bind).run().ok();
        // A node of the cloud: no kubelet, an address that can be dialled.
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "cloud-1", "labels": { "openyurt.io/is-edge-worker": "false" } },
        }));
        let status = json!({ "status": { "addresses": [
            { "type": "InternalIP", "address": MACHINE }, { "type": "Hostname", "address": "cloud-1" },
        ] } });
        self.kubectl("patch node cloud-1 --subresource=status --type=merge -p")
            .args([status.to_string()])
            .run()
            .ok();
        for namespace in ["a", "b"] {
            self.kubectl("create namespace")
                .args([namespace])
                .run()
                .ok();
        }
    }

    /// Returns the API server unchanged, or restarts it with these flags.
    pub(crate) fn with(&mut self, flags: Flags) {
        if self.flags != flags {
            self.flags = flags;
            self.restart();
        }
    }

    /// Stops the API server.
    pub(crate) fn stop(&mut self) {
        if let Some(api) = self.api.take() {
            // It would wait for the kubelets' watches, up to a minute.
            api.stop(Duration::from_secs(2));
        }
    }

    /// A kubeconfig for a client of the cluster's CA.
    pub(crate) fn kubeconfig(&self, client: &str) -> String {
        self.pki
            .kubeconfig(client, &format!("https://{CLOUD}:6443"))
    }

    /// Gives the gateways' account the rights of an example, and no others.
    pub(crate) fn grant(&self, example: &str) {
        self.apply_example(&format!("{example}/rbac.yaml"));
    }

    /// Creates the objects of a file of the examples.
    pub(crate) fn apply_example(&self, file: &str) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("examples")
            .join(file);
        self.kubectl("apply -f").args([file]).run().ok();
    }

    /// Returns a kubeconfig for the gateways' account with the rights of an example.
    pub(crate) fn account(&self, example: &str) -> String {
        self.grant(example);
        let secret = "get -n kube-system secret causeway-gateway -o jsonpath={.data.token}";
        let mut token = String::new();
        until("the service account has a token", || {
            token = self.kubectl(secret).run().text();
            !token.is_empty()
        });
        let token = data_encoding::BASE64.decode(token.as_bytes()).unwrap();
        let token = String::from_utf8(token).unwrap();
        self.with_token("gateway", &token)
    }

    /// Returns a kubeconfig for the holder of this token.
    pub(crate) fn with_token(&self, name: &str, token: &str) -> String {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{ "name": "it", "cluster": {
                "server": format!("https://{CLOUD}:6443"), "certificate-authority": self.pki.path("ca.pem"),
            } }],
            "users": [{ "name": "it", "user": { "token": token } }],
            "contexts": [{ "name": "it", "context": { "cluster": "it", "user": "it" } }],
        });
        let file = self.folder.join(format!("{name}.kubeconfig"));
        fs::write(&file, config.to_string()).unwrap();
        file.display().to_string()
    }

    /// A token of a service account, like the token of its pods.
    pub(crate) fn token(&self, namespace: &str, account: &str) -> String {
        let line = format!("create token -n {namespace} {account}");
        let made = self.kubectl(&line).run().ok();
        made.text().trim().to_owned()
    }

    /// A client's certificate, `FILE.pem`, which the cluster has signed after an administrator's approval.
    pub(crate) fn signs(&self, file: &str, user: &str) {
        let request = self.pki.request(file, user);
        // A certificate left by a failed test has another key.
        let left = format!("delete csr {user} --ignore-not-found");
        self.kubectl(&left).run().ok();
        self.apply(&json!({
            "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": { "name": user },
            "spec": {
                "signerName": "kubernetes.io/kube-apiserver-client", "usages": ["client auth"],
                "request": data_encoding::BASE64.encode(request.as_bytes()),
            },
        }));
        let approve = format!("certificate approve {user}");
        self.kubectl(&approve).run().ok();
        // A controller manager that has lost its API server in an earlier test retries after up to a minute.
        let wait = "--for=jsonpath={.status.certificate} --timeout=280s";
        let wait = self.kubectl(&format!("wait csr/{user} {wait}"));
        wait.run().ok();
        let line = format!("get csr {user} -o jsonpath={{.status.certificate}}");
        let signed = self.kubectl(&line).run().ok().text();
        let signed = data_encoding::BASE64.decode(signed.as_bytes()).unwrap();
        fs::write(self.pki.path(&format!("{file}.pem")), signed).unwrap();
    }

    /// Restarts the API server with a certificate that is valid for these addresses as well.
    pub(crate) fn certifies(&mut self, addresses: &[IpAddr]) {
        certify(&self.pki, addresses);
        self.restart();
    }

    /// Restarts the API server.
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.started += 1;
        let log = self.folder.join(format!("api-{}.log", self.started));
        let mut command = always(self.program().args(self.arguments()));
        if let Some(egress) = &self.flags.egress {
            let file = egress.display();
            command = command.args([format!("--egress-selector-config-file={file}")]);
        }
        if let Some(audit) = &self.flags.audit {
            let (policy, log) = (audit.display(), audit.with_extension("log"));
            command = command.args([
                format!("--audit-policy-file={policy}"),
                format!("--audit-log-path={}", log.display()),
            ]);
        }
        self.api = Some(command.start(&log));
        let ready = within(PATIENCE, || {
            let asked = self.kubectl("get --raw /readyz").run();
            asked.code == Some(0)
        });
        assert!(ready, "{}", fs::read_to_string(log).unwrap_or_default());
    }

    /// Starts the controllers that judge nodes and evict pods, with their defaults.
    pub(crate) fn node_lifecycle(&self, folder: &Path) -> Process {
        Program::new(self.assets.join("kube-controller-manager"))
            .args([
                format!("--kubeconfig={}", self.pki.path("admin.kubeconfig")),
                "--controllers=node-lifecycle-controller,taint-eviction-controller".to_owned(),
            ])
            .words("--leader-elect=false --secure-port=0")
            .start(&folder.join("lifecycle.log"))
    }

    /// Stops the API server's process, with its connections open, until the value is dropped.
    pub(crate) fn hangs(&self) -> Hung {
        let api = self.api.as_ref().expect("it runs").id();
        must(&format!("kill -STOP {api}"));
        Hung(api)
    }

    /// The API server, which sees its own files of names if the flags require it.
    fn program(&self) -> Program {
        let api = self.assets.join("kube-apiserver");
        let Some(resolver) = &self.flags.resolver else {
            return Program::new(api);
        };
        net::asking(resolver, &api)
    }

    fn arguments(&self) -> Vec<String> {
        let path = |name| self.pki.path(name);
        let mut arguments = vec![
            format!("--bind-address={CLOUD}"),
            format!("--advertise-address={CLOUD}"),
            format!("--tls-cert-file={}", path("apiserver.pem")),
            format!("--tls-private-key-file={}", path("apiserver.key")),
            format!("--client-ca-file={}", path("ca.pem")),
            format!("--service-account-key-file={}", path("sa.pub")),
            format!("--service-account-signing-key-file={}", path("sa.key")),
            format!(
                "--kubelet-client-certificate={}",
                path("kubelet-client.pem")
            ),
            format!("--kubelet-client-key={}", path("kubelet-client.key")),
            format!("--requestheader-client-ca-file={}", path("ca.pem")),
            format!("--requestheader-allowed-names={AGGREGATOR}"),
            format!("--proxy-client-cert-file={}", path("aggregator.pem")),
            format!("--proxy-client-key-file={}", path("aggregator.key")),
            format!("--kubelet-preferred-address-types={}", self.flags.addresses),
        ];
        if let Some(authority) = &self.flags.authority {
            let file = authority.display();
            arguments.push(format!("--kubelet-certificate-authority={file}"));
        }
        arguments
    }

    /// Sets the network of a node's pods, as the cluster's allocator of networks would.
    pub(crate) fn gives_pods(&self, node: &str, network: &str) {
        let spec = json!({ "spec": { "podCIDR": network, "podCIDRs": [network] } });
        let patch = self.kubectl(&format!("patch node {node} --type=merge -p"));
        patch.args([spec.to_string()]).run().ok();
    }

    /// kubectl with these arguments, as an administrator.
    pub(crate) fn kubectl(&self, line: &str) -> Program {
        self.kubectl_of(&self.assets.join("kubectl"), line)
    }

    /// Another program of kubectl.
    pub(crate) fn kubectl_of(&self, program: &Path, line: &str) -> Program {
        Program::new(program)
            .args(self.access())
            .words(line)
            .env("HOME", &self.folder)
    }

    /// A command line for `script`, which gives kubectl a terminal: this kubectl, or the one of the cluster's version.
    pub(crate) fn kubectl_line(&self, program: Option<PathBuf>, line: &str) -> String {
        let program = program.unwrap_or_else(|| self.assets.join("kubectl"));
        let [config] = self.access();
        format!("{} {config} {line}", program.display())
    }

    fn access(&self) -> [String; 1] {
        [format!(
            "--kubeconfig={}",
            self.pki.path("admin.kubeconfig")
        )]
    }

    /// Creates an object.
    pub(crate) fn apply(&self, object: &Value) {
        self.kubectl("apply -f -")
            .input(object.to_string())
            .run()
            .ok();
    }

    /// Returns an object, if it exists.
    pub(crate) fn get(&self, line: &str) -> Option<Value> {
        let ran: ToolOutput = self.kubectl("get -o json").words(line).run();
        (ran.code == Some(0)).then(|| serde_json::from_slice(&ran.stdout).unwrap())
    }

    /// Waits until an object has a condition.
    pub(crate) fn wait(&self, namespace: &str, what: &str, condition: &str) {
        let line = format!("wait -n {namespace} {what} --for=condition={condition} --timeout=280s");
        let waited = self.kubectl(&line).run();
        if waited.code != Some(0) {
            let shown = self.kubectl(&format!("describe -n {namespace} {what}"));
            panic!("{}{}", waited.stderr, shown.run().text());
        }
    }

    /// A pod on a node, of our image, which runs this script. Waits for its service account.
    pub(crate) fn pod(&self, namespace: &str, name: &str, node: &str, script: &str) {
        until("the service account is there", || {
            self.get(&format!("serviceaccount -n {namespace} default"))
                .is_some()
        });
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": namespace, "labels": { "app": name } },
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": 0, "dnsPolicy": "Default",
                "containers": [{
                    "name": "it", "image": super::image::NAME, "imagePullPolicy": "Never",
                    "command": ["sh", "-c", script], "stdin": true,
                }],
            },
        }));
    }
}

/// A stopped process, which continues when the value is dropped.
pub(crate) struct Hung(u32);

impl Drop for Hung {
    fn drop(&mut self) {
        must(&format!("kill -CONT {}", self.0));
    }
}

/// Makes the certificate of the API server for its names and addresses, and for these addresses.
fn certify(pki: &Pki, addresses: &[IpAddr]) {
    let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"];
    let own = [CLOUD.into(), IpAddr::from([10, 96, 0, 1])];
    pki.server("apiserver", &names, &[&own, addresses].concat());
}

/// Adds the flags that every API server has.
fn always(api: Program) -> Program {
    api.args([format!("--etcd-servers=http://{CLOUD}:2379")])
        .words("--secure-port=6443 --service-cluster-ip-range=10.96.0.0/16")
        .words("--authorization-mode=Node,RBAC")
        .words("--service-account-issuer=https://kubernetes.default.svc")
        .words(AGGREGATION)
}

fn controllers(folder: &Path, assets: &Path, pki: &Pki) -> Process {
    let path = |name| pki.path(name);
    let which = [
        "serviceaccount-controller",
        "serviceaccount-token-controller",
        "root-ca-certificate-publisher-controller",
        "endpoints-controller",
        "endpointslice-controller",
        "namespace-controller",
        "certificatesigningrequest-signing-controller",
        "certificatesigningrequest-approving-controller",
    ];
    Program::new(assets.join("kube-controller-manager"))
        .args([
            format!("--kubeconfig={}", path("admin.kubeconfig")),
            format!("--service-account-private-key-file={}", path("sa.key")),
            format!("--root-ca-file={}", path("ca.pem")),
            format!("--cluster-signing-cert-file={}", path("ca.pem")),
            format!("--cluster-signing-key-file={}", path("ca.key")),
            format!("--controllers={}", which.join(",")),
        ])
        .words("--leader-elect=false --use-service-account-credentials --secure-port=0")
        .start(&folder.join("controllers.log"))
}
