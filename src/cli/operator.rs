//! The arguments of the commands of gateways, edges and their operators.
//!
//! `gateway` and `edge` take a flag for each key of their configuration; those are made
//! from the configuration's schema, so that a new key cannot lack its flag.

mod ca;
mod config_flags;
pub(crate) mod token;

pub(crate) use ca::{
    Ca, CaBackup, CaCsr, CaGateways, CaImport, CaInit, CaRevokeGateway, Rotate, RotateArgs,
};
use clap::{Args, Subcommand, ValueEnum};
pub(crate) use config_flags::{ConfigFlags, DataDir};
use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};
pub(crate) use token::{ListFormat, Token, TokenCreate, TokenList, TokenRevoke};
use token::{NodeAttributeArgs, label};

use crate::operator::config_loader::{ConfigKey, keys};

/// Commands that run a gateway or an edge, or manage their state.
#[derive(Debug, Subcommand)]
pub(crate) enum OperatorCommand {
    /// Run a gateway, the cloud side, to which clients and edges connect
    Gateway(Gateway),
    /// Run a gateway as a child process, for a service manager whose restart must not wait for open streams
    ///
    /// Passes the messages of the child to the service manager. After SIGTERM this process ends as soon as the child reports that
    /// it stops, and the child drains. The next process takes over its sockets (`gateway --take-over`). A child that reports
    /// nothing within 10 s is killed.
    Supervise(Supervise),
    /// Run an edge, the agent on a node, which connects to the gateway; or give up its identity
    Edge(Edge),
    /// Run a gateway, two edges and their apps in one process, to try it out
    Demo(Demo),
    /// Show the edges of a running gateway or demo, or the tunnels of a running edge
    Status(Status),
    /// Create a CA, join tokens and client certificates in one step; may be run again
    Bootstrap(Bootstrap),
    /// Manage the gateway's CA
    #[command(subcommand)]
    Ca(Ca),
    /// Manage join tokens for edges
    #[command(subcommand)]
    Token(Token),
    /// Manage the nodes of a gateway: list, admit, revoke
    #[command(subcommand)]
    Node(NodeCommand),
    /// Manage the durable state of gateways: nodes, revocations, join tokens, pinned keys, and the CA
    #[command(subcommand)]
    State(State),
    /// Manage credentials of clients: certificates and bearer tokens
    #[command(subcommand)]
    Client(ClientCommand),
    /// Describe the configuration files
    #[command(subcommand)]
    Config(Config),
    /// Test the access policy
    #[command(subcommand)]
    Policy(Policy),
    /// Generate Kubernetes configuration
    #[cfg(feature = "k8s")]
    #[command(subcommand)]
    K8s(K8s),
    /// Check the health of a running gateway or edge; exits 0 if healthy, 1 if not
    Health(Health),
    /// Reload the configuration of a running gateway or edge, and print the result
    Reload(Reload),
    /// Print the table of error reasons, with their meaning and what to do
    Errors,
    /// Print the OpenAPI 3.1 document of an admin listener
    Openapi {
        /// The process that has the listener
        side: ConfigKind,
    },
    /// Print a page of the reference
    #[command(hide = true)]
    Reference {
        /// Name of the page
        page: ReferencePage,
    },
}

/// Returns the variables that set configuration keys.
pub(crate) fn config_variables() -> Vec<String> {
    let gateway = keys::<causeway_gateway::config::Config>();
    let edge = keys::<causeway_edge::config::Config>();
    gateway
        .iter()
        .chain(&edge)
        .map(ConfigKey::variable)
        .collect()
}

/// Run with a configuration.
#[derive(Debug, Args)]
pub(crate) struct RunArgs<C: schemars::JsonSchema + Send + Sync + 'static> {
    /// Configuration file (YAML); flags override CAUSEWAY_… variables, which override the file
    #[arg(long, value_name = "FILE", env = "CAUSEWAY_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Check the configuration, print all errors, and exit
    #[arg(long)]
    pub(crate) check_config: bool,
    #[command(flatten)]
    pub(crate) keys: ConfigFlags<C>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum State {
    /// Copy the state from one engine to another; no gateway may be running with either of them
    ///
    /// The engine is the one that a configuration names: etcd (`state.etcd`), Secrets (`kubernetes.state`), or without both the
    /// data directory. The source stays unchanged. A destination with another state is not changed.
    Migrate(StateMigrate),
}

#[derive(Debug, Args)]
pub(crate) struct StateMigrate {
    /// Configuration of a gateway with the state
    #[arg(long, value_name = "FILE")]
    pub(crate) from: PathBuf,
    /// Configuration of a gateway that will have the state
    #[arg(long, value_name = "FILE")]
    pub(crate) to: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Directory for the CA, keys and addresses; a temporary one if absent
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Address of the https listener; a free port on loopback if absent
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Admin address of the gateway or edge; read from the data directory if absent
    #[arg(long, value_name = "HOST:PORT", env = "CAUSEWAY_ADMIN")]
    pub(crate) admin: Option<String>,
    /// Data directory of the gateway or edge; if absent, /var/lib/causeway, then /var/lib/causeway-edge
    #[arg(long, value_name = "DIR", env = "CAUSEWAY_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// One line for each edge, or each tunnel
    Table,
    /// With tunnels, egress connections, pool, instance and time last seen
    Wide,
    /// Complete status, in JSON
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct Reload {
    /// Admin address; if absent, the address of the process that runs on the data directory
    #[arg(long, value_name = "HOST:PORT", env = "CAUSEWAY_ADMIN")]
    pub(crate) admin: Option<String>,
    /// Data directory of the gateway or edge; if absent, /var/lib/causeway and /var/lib/causeway-edge
    #[arg(long, value_name = "DIR", env = "CAUSEWAY_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Health {
    /// Admin address; if absent, the address of the process that runs on the data directory
    #[arg(long, value_name = "HOST:PORT", env = "CAUSEWAY_ADMIN")]
    pub(crate) admin: Option<String>,
    /// Data directory of the gateway or edge; if absent, /var/lib/causeway and /var/lib/causeway-edge
    #[arg(long, value_name = "DIR", env = "CAUSEWAY_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Check readiness instead: the gateway accepts clients, the edge has a tunnel
    #[arg(long)]
    pub(crate) ready: bool,
    /// Fail if the process runs in another container (PID namespace) with the same data directory, as before and after a
    /// takeover (`gateway --take-over`)
    #[arg(long, conflicts_with = "admin")]
    pub(crate) same_container: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Bootstrap {
    /// Name of a node that gets a join token; may be given several times
    #[arg(long = "node", value_name = "NODE")]
    pub(crate) nodes: Vec<String>,
    /// Name of a client that gets a certificate; may be given several times
    #[arg(long = "client", value_name = "NAME")]
    pub(crate) clients: Vec<String>,
    /// Directory for ca.pem, NODE.token, NAME.pem and NAME-key.pem
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Lifetime of the tokens
    #[arg(long, default_value = "1h", value_parser = humantime::parse_duration)]
    pub(crate) token_ttl: Duration,
    /// Lifetime of the client certificates
    #[arg(long, default_value = "30d", value_parser = humantime::parse_duration)]
    pub(crate) client_ttl: Duration,
    /// Trust domain of the identities in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Evaluate the policy for one request and print the rule that decides; exits 0 if allowed, 1 if denied
    Check(Box<PolicyCheck>),
    /// Test the policy with a table of requests and expected decisions; exits 0 if all match, 1 if not
    Test(PolicyTest),
}

/// Location of a policy and of the nodes that it refers to.
#[derive(Debug, Args)]
pub(crate) struct PolicyFile {
    /// Policy file, as in the gateway's key `policy`
    #[arg(long, value_name = "FILE", env = "CAUSEWAY_POLICY")]
    pub(crate) policy: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct PolicyCheck {
    #[command(flatten)]
    pub(crate) file: PolicyFile,
    /// Name of the client; anonymous if absent
    #[arg(long = "as", value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Group of the client; may be given several times
    #[arg(long = "group", value_name = "GROUP", requires = "user")]
    pub(crate) groups: Vec<String>,
    /// URI in the client's certificate; may be given several times
    #[arg(long = "spiffe", value_name = "URI", requires = "user")]
    pub(crate) uris: Vec<String>,
    /// Source address of the client
    #[arg(long, value_name = "IP")]
    pub(crate) from: Option<IpAddr>,
    /// Pool of the node, empty for none; read from the data directory if absent
    #[arg(long)]
    pub(crate) pool: Option<String>,
    /// Label of the node; may be given several times; read from the data directory if absent
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Whether the request switches protocols, as kubectl exec does
    #[arg(long)]
    pub(crate) upgrade: bool,
    /// Service of the node to which the request goes; the URL then needs no port
    #[arg(long, value_name = "NAME")]
    pub(crate) service: Option<String>,
    /// Namespace of the pod to which the request goes; the URL then has the pod's node and the pod's port, or the address of a pod that a listener dials itself
    #[arg(long, value_name = "NAMESPACE", conflicts_with = "service")]
    pub(crate) pod_namespace: Option<String>,
    /// Node of the pod, if the URL has the name of a pod, `POD.NAMESPACE.pod`
    #[arg(long, value_name = "NODE", conflicts_with_all = ["service", "pod_namespace"])]
    pub(crate) pod_node: Option<String>,
    #[command(flatten)]
    pub(crate) data: DataDir,
    /// HTTP method, or CONNECT
    #[arg(value_name = "METHOD")]
    pub(crate) method: hyper::Method,
    /// URL such as `https://edge-1:10250/exec/…`; for CONNECT `edge-1:22`, or `10.96.0.10:443` for an address that a listener dials itself
    #[arg(value_name = "URL")]
    pub(crate) url: String,
}

#[derive(Debug, Args)]
pub(crate) struct PolicyTest {
    /// Policy file; if absent, the one that the table names
    #[arg(long, value_name = "FILE", env = "CAUSEWAY_POLICY")]
    pub(crate) policy: Option<PathBuf>,
    /// Table of requests and expected decisions (YAML)
    #[arg(value_name = "FILE")]
    pub(crate) table: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Print the JSON Schema of a configuration file, for editors that complete and check YAML
    Schema {
        /// The process that reads the file
        side: ConfigKind,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ConfigKind {
    /// The process `causeway gateway`
    Gateway,
    /// The process `causeway edge`
    Edge,
}

/// A page of the reference that is generated from the code.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ReferencePage {
    /// Configuration keys of `gateway`
    Gateway,
    /// Configuration keys of `edge`
    Edge,
    /// Commands and flags
    Commands,
    /// Error reasons
    Errors,
    /// Metrics
    Metrics,
    /// Ports and connections
    Ports,
}

/// Arguments of a running gateway.
#[derive(Debug, Args)]
pub(crate) struct Gateway {
    /// Take over the sockets of the gateway that runs on the same data directory, if there is one; it then drains and ends
    #[arg(long)]
    pub(crate) take_over: bool,
    /// After another process has taken over, end only at SIGTERM, because this one would be started again (a pod's container)
    #[arg(long)]
    pub(crate) await_stop: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs<causeway_gateway::config::Config>,
}

#[derive(Debug, Args)]
pub(crate) struct Supervise {
    /// Command of this program, with its arguments
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) command: Vec<std::ffi::OsString>,
}

/// Arguments of a running edge, or a command about its identity.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Edge {
    #[command(subcommand)]
    pub(crate) command: Option<EdgeCommand>,
    /// Replace this node's identity with the token of --join or --join-file, even if gateways accept it; the old identity is kept as a copy
    #[arg(long)]
    pub(crate) rejoin: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs<causeway_edge::config::Config>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EdgeCommand {
    /// Give up this node's identity, which is kept as a copy; the next start joins with a new token
    Leave(EdgeLeave),
}

#[derive(Debug, Args)]
pub(crate) struct EdgeLeave {
    /// Data directory of the edge
    #[arg(
        long,
        value_name = "DIR",
        env = "CAUSEWAY_DATA_DIR",
        default_value = "/var/lib/causeway-edge"
    )]
    pub(crate) data_dir: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClientCommand {
    /// Issue a client certificate, signed by the gateway's CA
    Certificate(ClientCertificate),
    /// Create a bearer token. The file keeps its hash; the token is printed once
    Token(ClientToken),
    /// Revoke all bearer tokens of a client
    ///
    /// A certificate is revoked by its serial number in the gateway's key `listeners[].client_auth.revoked`.
    Revoke(ClientRevoke),
}

#[derive(Debug, Args)]
pub(crate) struct ClientCertificate {
    /// Name of the client
    #[arg(long)]
    pub(crate) name: String,
    /// Group of the client; may be given several times
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    /// Lifetime of the certificate
    #[arg(long, default_value = "30d", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Duration,
    /// Directory for NAME.pem and NAME-key.pem
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct ClientToken {
    /// Name of the client
    #[arg(long)]
    pub(crate) name: String,
    /// Group of the client; may be given several times
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    /// Token file, the listener's `client_auth.tokens`; created if absent
    #[arg(long)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ClientRevoke {
    /// Name of the client
    #[arg(long)]
    pub(crate) name: String,
    /// Token file, the listener's `client_auth.tokens`
    #[arg(long)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum K8s {
    /// Print the egress selector configuration by which kube-apiserver uses a connect listener
    EgressConfig(EgressConfig),
    /// Print the CA file for kube-apiserver's `--kubelet-certificate-authority`, for listeners with certificates of the gateway's CA
    CaBundle(CaBundle),
    /// Print the Secret with the CA that several gateways share: a new CA, or that of a data directory
    CaSecret(CaSecret),
}

#[derive(Debug, Args)]
pub(crate) struct CaSecret {
    /// Namespace of the Secret
    #[arg(long, value_name = "NAME", default_value = "causeway")]
    pub(crate) namespace: String,
    /// Name of the Secret
    #[arg(long, default_value = "causeway-ca")]
    pub(crate) name: String,
    /// Trust domain of the identities in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    /// Data directory of the gateway whose CA is used; if absent, a new CA is created
    #[arg(long, value_name = "DIR", conflicts_with = "trust_domain")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CaBundle {
    /// CA file of kubelets that are not reached through a listener, such as those in the cloud; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) kubelet_ca: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EgressConfig {
    /// Unix socket of the listener, if kube-apiserver runs on the same host
    #[arg(long, value_name = "PATH", conflicts_with_all = ["url", "ca", "certificate", "key", "server_name"])]
    pub(crate) socket: Option<PathBuf>,
    /// URL of the listener, `https://HOST:PORT`
    #[arg(long, required_unless_present = "socket", requires_all = ["certificate", "key"])]
    pub(crate) url: Option<String>,
    /// CA file for the listener's certificate, as a path on kube-apiserver's host (`ca.pem` of the gateway)
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// Client certificate file of kube-apiserver (`causeway client certificate`)
    #[arg(long, value_name = "FILE")]
    pub(crate) certificate: Option<PathBuf>,
    /// Key file of that certificate
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// Name in the listener's certificate, if the URL has another one
    #[arg(long, value_name = "NAME")]
    pub(crate) server_name: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// List the nodes of the data directory, connected or not, and the revoked ones
    List(NodeList),
    /// Admit a node whose certificate an external CA issues, or change the confirmed attributes of a known node
    Add(NodeAdd),
    /// Close a node's tunnels within a second and refuse the node from then on
    Revoke(NodeRevoke),
    /// Admit a revoked node again
    Allow(NodeArg),
    /// Forget a node. It is admitted again with a new token, by `add`, or where any node is admitted (`any_node`); to refuse it, revoke it
    Remove(NodeArg),
    /// List the pinned keys of apps on nodes (`upstream_tls.*.pin`)
    Pins(NodeList),
    /// Forget the pinned key of an app on a node: the gateway trusts the key that the app has at the next connection
    Unpin(NodeUnpin),
}

#[derive(Debug, Args)]
pub(crate) struct NodeAdd {
    /// Name of the node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) confirmed: NodeAttributeArgs,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeRevoke {
    /// Name of the node
    pub(crate) node: String,
    /// Reason, which is sent to the edge and shown by `status`
    #[arg(long)]
    pub(crate) reason: String,
    /// Revoke the node although it has never joined this gateway
    #[arg(long)]
    pub(crate) unseen: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeArg {
    /// Name of the node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeList {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = ListFormat::Table)]
    pub(crate) output: ListFormat,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeUnpin {
    /// Name of the node
    pub(crate) node: String,
    /// Port of the app; all ports of the node if absent
    pub(crate) port: Option<u16>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    #[test]
    fn keys_are_flags_and_lists_have_a_singular() {
        let line = "causeway edge --join T --gateway a:1 --gateway b:2 --tunnels-max 1";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Operator(OperatorCommand::Edge(Edge { run, .. })) = cli.command else {
            panic!("not the edge")
        };
        let given = [
            ("gateways", vec!["a:1", "b:2"]),
            ("join", vec!["T"]),
            ("tunnels.max", vec!["1"]),
        ];
        let given = given.map(|(key, texts)| {
            (
                key.to_owned(),
                texts.into_iter().map(String::from).collect(),
            )
        });
        assert_eq!(run.keys.values, given);
    }
}
