//! The command line: the clap tree, nothing else.
//!
//! `gateway` and `edge` take a flag for each key of their configuration; those are made
//! from the configuration's schema, so that a new key cannot lack its flag.

mod ca;
mod config_flags;
mod edge;
#[cfg(feature = "k8s")]
mod k8s;
mod token;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use ca::{Ca, CaBackup, CaClient, CaCsr, CaImport, CaInit, Rotate, RotateArgs};
pub(crate) use config_flags::ConfigFlags;
pub(crate) use edge::{
    EdgeAdd, EdgeCommand, EdgeLeave, EdgeNameArg, EdgePins, EdgeRevoke, EdgeUnpin,
};
#[cfg(feature = "k8s")]
pub(crate) use k8s::{CaSecret, EgressConfig, K8s};
use token::label;
pub(crate) use token::{ListFormat, NodeAttributeArgs, Token, TokenCreate, TokenList, TokenRevoke};

/// Reach what runs behind NAT at the edge as if it stood next to you.
#[derive(Debug, Parser)]
#[command(name = "causeway", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a gateway: the cloud side, where callers and edges arrive
    Gateway(RunArgs<causeway_gateway::config::Config>),
    /// Run an edge: the agent on a node, which dials the gateway; or give up its identity; or, beside a gateway, say which edges are welcome
    Edge(Edge),
    /// Run a gateway, two edges and their apps in one process
    Demo(Demo),
    /// Show the edges of a running gateway or demo, or the tunnels of a running edge
    Status(Status),
    /// Make a CA, join tokens and callers' certificates in one go; may be run again
    Bootstrap(Bootstrap),
    /// Make the gateway's CA, and certificates for callers
    #[command(subcommand)]
    Ca(Ca),
    /// Make tokens by which edges join
    #[command(subcommand)]
    Token(Token),
    /// Make tokens by which callers are known
    #[command(subcommand)]
    Caller(ClientCommand),
    /// Describe the configuration files
    #[command(subcommand)]
    Config(Config),
    /// Ask what the rules of who may do what decide
    #[command(subcommand)]
    Policy(Policy),
    /// Say what a Kubernetes cluster has to be told
    #[cfg(feature = "k8s")]
    #[command(subcommand)]
    K8s(K8s),
    /// Ask a running gateway or edge whether it is well; exits 0 or 1
    Health(Health),
    /// Have a running gateway or edge read its configuration anew; says what that did
    Reload(Reload),
    /// Print a script by which a shell completes commands and flags
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of all commands into a directory
    Man {
        /// Directory for the pages; made if absent
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Print the reference of all configuration keys
    #[command(hide = true)]
    Reference {
        /// Side that the configuration is for.
        side: ConfigKind,
    },
}

/// Run with a configuration.
#[derive(Debug, Args)]
pub(crate) struct RunArgs<C: schemars::JsonSchema + Send + Sync + 'static> {
    /// YAML file; flags win over CAUSEWAY_… variables, and those over the file
    #[arg(long, value_name = "FILE", env = "CAUSEWAY_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Read and judge the configuration, say what is wrong with it, and exit
    #[arg(long)]
    pub(crate) check_config: bool,
    #[command(flatten)]
    pub(crate) keys: ConfigFlags<C>,
}

/// Runs, unless there is something to say of edges.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Edge {
    #[command(subcommand)]
    pub(crate) order: Option<EdgeCommand>,
    /// Replace this node's identity by the token of --join or --join-file, even though gateways accept it; the old one is kept aside
    #[arg(long)]
    pub(crate) rejoin: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs<causeway_edge::config::Config>,
}

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Keep CA, keys and addresses here; a temporary directory without it
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Address of the https front; a free port on loopback without it
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) listen: Option<SocketAddr>,
}

/// How a gateway's data directory is named on commands that only need that.
#[derive(Debug, Args)]
pub(crate) struct DataDir {
    /// The gateway's data directory
    #[arg(
        long,
        value_name = "DIR",
        env = "CAUSEWAY_DATA_DIR",
        default_value = "/var/lib/causeway"
    )]
    pub(crate) data_dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The admin address of the gateway or edge; read from the data directory without it
    #[arg(long, value_name = "HOST:PORT", env = "CAUSEWAY_ADMIN")]
    pub(crate) admin: Option<String>,
    /// Data directory of the gateway or edge; without it, /var/lib/causeway, then /var/lib/causeway-edge
    #[arg(long, value_name = "DIR", env = "CAUSEWAY_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// How much to show, and how
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// One line per edge, or per tunnel
    Table,
    /// With tunnels, pool, instance and time last seen
    Wide,
    /// The full answer of the gateway or edge, in JSON
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct Reload {
    /// The admin address; without it, whatever runs in the data directory is asked
    #[arg(long, value_name = "HOST:PORT", env = "CAUSEWAY_ADMIN")]
    pub(crate) admin: Option<String>,
    /// Data directory of the gateway or edge; without it, /var/lib/causeway and /var/lib/causeway-edge
    #[arg(long, value_name = "DIR", env = "CAUSEWAY_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Health {
    /// The admin address; without it, whatever runs in the data directory is asked
    #[arg(long, value_name = "HOST:PORT", env = "CAUSEWAY_ADMIN")]
    pub(crate) admin: Option<String>,
    /// Data directory of the gateway or edge; without it, /var/lib/causeway and /var/lib/causeway-edge
    #[arg(long, value_name = "DIR", env = "CAUSEWAY_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Ask for more: a gateway that takes callers, an edge that has a tunnel
    #[arg(long)]
    pub(crate) ready: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Bootstrap {
    /// Node that is to join; may be given several times
    #[arg(long = "node", value_name = "NODE")]
    pub(crate) nodes: Vec<String>,
    /// Caller that gets a certificate; may be given several times
    #[arg(long = "caller", value_name = "NAME")]
    pub(crate) callers: Vec<String>,
    /// Directory for ca.pem, NODE.token, NAME.pem and NAME-key.pem
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// How long a token can be used
    #[arg(long, default_value = "1h", value_parser = humantime::parse_duration)]
    pub(crate) token_ttl: Duration,
    /// Life of a caller's certificate
    #[arg(long, default_value = "30d", value_parser = humantime::parse_duration)]
    pub(crate) caller_ttl: Duration,
    /// Under which name identities stand in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Say what the policy decides for one request, and by which line; exits 0 if it may pass, 1 if not
    Check(PolicyCheck),
    /// Hold the policy against a table of expectations; exits 0 if all are met, 1 if not
    Test(PolicyTest),
}

/// Location of a policy and of the nodes that it refers to.
#[derive(Debug, Args)]
pub(crate) struct PolicyFile {
    /// The file of rules, as the gateway's key `policy` names it
    #[arg(long, value_name = "FILE", env = "CAUSEWAY_POLICY")]
    pub(crate) policy: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct PolicyCheck {
    #[command(flatten)]
    pub(crate) file: PolicyFile,
    /// Name of the caller; nobody in particular without it
    #[arg(long = "as", value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Group of the caller; may be given several times
    #[arg(long = "group", value_name = "GROUP", requires = "user")]
    pub(crate) groups: Vec<String>,
    /// URI in the caller's certificate; may be given several times
    #[arg(long = "spiffe", value_name = "URI", requires = "user")]
    pub(crate) uris: Vec<String>,
    /// Address that the caller comes from
    #[arg(long, value_name = "IP")]
    pub(crate) from: Option<IpAddr>,
    /// Pool of the node, empty for none; read from the data directory without it
    #[arg(long)]
    pub(crate) pool: Option<String>,
    /// Label of the node; may be given several times; read from the data directory without it
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Whether the request switches protocols, as kubectl exec does
    #[arg(long)]
    pub(crate) upgrade: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
    /// GET, POST and so on, or CONNECT
    #[arg(value_name = "METHOD")]
    pub(crate) method: hyper::Method,
    /// `https://edge-1:10250/exec/…`, or edge-1:22 for CONNECT; 10.96.0.10:443 for one to what a front dials itself
    #[arg(value_name = "URL")]
    pub(crate) url: String,
}

#[derive(Debug, Args)]
pub(crate) struct PolicyTest {
    /// The file of rules; without it, the one that the table names
    #[arg(long, value_name = "FILE", env = "CAUSEWAY_POLICY")]
    pub(crate) policy: Option<PathBuf>,
    /// The table: who asks for what, and what is to come of it
    #[arg(value_name = "FILE")]
    pub(crate) table: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClientCommand {
    /// Make a bearer token; the file keeps its hash, the token is shown once
    Token(ClientTokenArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ClientTokenArgs {
    /// Name of the caller
    #[arg(long)]
    pub(crate) name: String,
    /// Group of the caller; may be given several times
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    /// The file that a front names as callers.tokens; made if absent
    #[arg(long)]
    pub(crate) file: PathBuf,
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
    /// The configuration of `gateway`
    Gateway,
    /// The configuration of `edge`
    Edge,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn keys_are_flags_and_lists_have_a_singular() {
        let line = "causeway edge --join T --gateway a:1 --gateway b:2 --tunnels-max 1";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Edge(Edge { run, .. }) = cli.command else {
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
        assert_eq!(run.keys.given, given);
    }
}
