//! The command line: the clap tree, nothing else.

use causeway_config::ListenAddr;
use clap::{Args, Parser, Subcommand, builder::ArgPredicate};
use rustls_pki_types::ServerName;
use serde::de::{
    IntoDeserializer,
    value::{Error, StrDeserializer},
};
use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

/// Load generators for Causeway's benchmarks; one JSON object per line on standard output.
#[derive(Debug, Parser)]
#[command(name = "causeway-bench-load", version)]
pub(crate) struct Cli {
    /// Worker threads; one is cheapest for each request
    #[arg(long, global = true, default_value_t = 1, value_parser = threads)]
    pub(crate) threads: usize,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a plain HTTP/1.1 app: /1k, /N, /sink, and by Upgrade /echo, /source/N, /drain
    App(App),
    /// Make identities of edges in a gateway's data directory, before that gateway starts
    Mint(Mint),
    /// Run many light edges: TLS 1.3, HTTP/2, hello, and an answer of 1 KiB to each stream
    Fleet(Fleet),
    /// Join many nodes at once with tokens, at a gateway whose data directory is here
    Join(Join),
    /// Create a link with a delay and a rate between two network namespaces
    Link(Link),
    /// Open upgrades and keep them open
    Idle(Idle),
    /// Load in a closed loop, inside a CONNECT or directly: requests, or bytes
    Connect(Connect),
    /// Make `EndpointSlices` in a cluster, or change them at a rate
    Slices(EndpointSlices),
    /// Watch `EndpointSlices` with many readers, and report how long changes took to reach them
    Readers(Readers),
}

#[derive(Debug, Args)]
pub(crate) struct App {
    /// Address to listen on
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: SocketAddr,
}

#[derive(Debug, Args)]
pub(crate) struct Mint {
    /// The gateway's data directory; it and its CA are made if absent
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
    /// Number of nodes
    #[arg(long, value_name = "N")]
    pub(crate) nodes: usize,
    /// Prefix of the names; a number follows, from 1
    #[arg(long, default_value = "node-")]
    pub(crate) prefix: String,
    /// File of the identities, for `fleet`
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Lifetime of the certificates
    #[arg(long, default_value = "24h", value_parser = duration)]
    pub(crate) lifetime: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Fleet {
    /// The gateways' tunnel ports. Each node has one tunnel: the nodes begin at the gateways in turn, and go to the next gateway
    /// after a failure
    #[arg(
        long = "gateway",
        value_name = "ADDR",
        value_delimiter = ',',
        required = true
    )]
    pub(crate) gateways: Vec<SocketAddr>,
    /// File of identities that `mint` wrote
    #[arg(long, value_name = "FILE")]
    pub(crate) identities: PathBuf,
    /// Number of identities to leave out, from the first on, because another process uses them
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) skip: usize,
    /// Number of nodes to use, from the first one that is not left out; all if absent
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<usize>,
    /// Number of simultaneous dials at the beginning
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) at_once: usize,
    /// Only dial and hang up, repeatedly
    #[arg(long, requires = "for_")]
    pub(crate) handshakes_only: bool,
    /// Duration
    #[arg(long = "for", id = "for_", value_parser = duration, requires = "handshakes_only")]
    pub(crate) lasting: Option<Duration>,
    /// Number of simultaneous dials
    #[arg(
        long,
        value_name = "N",
        default_value_t = 32,
        requires = "handshakes_only"
    )]
    pub(crate) clients: usize,
    /// Whether TLS sessions are resumed: yes or no
    #[arg(long, default_value = "yes", value_parser = yes_or_no, action = clap::ArgAction::Set)]
    pub(crate) resume: bool,
    /// Hang up only after the registration, not after TLS
    #[arg(long, requires = "handshakes_only")]
    pub(crate) hello: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Join {
    /// The gateway's tunnel port
    #[arg(long, value_name = "ADDR")]
    pub(crate) gateway: SocketAddr,
    /// The gateway's data directory, in which the tokens are created
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
    /// Number of nodes
    #[arg(long, value_name = "N")]
    pub(crate) nodes: usize,
    /// Prefix of the names; a number follows, from 1
    #[arg(long, default_value = "joins-")]
    pub(crate) prefix: String,
    /// Give each node a token of its own; otherwise one token is for all
    #[arg(long)]
    pub(crate) tokens_of_their_own: bool,
    /// Longest time until all have joined
    #[arg(long, default_value = "5m", value_parser = duration)]
    pub(crate) within: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Link {
    /// The two network namespaces, as `ip netns` names them
    #[arg(
        long,
        value_name = "NETNS,NETNS",
        value_delimiter = ',',
        required = true
    )]
    pub(crate) between: Vec<String>,
    /// The addresses of the link's ends, in the same order
    #[arg(long, value_name = "IP,IP", value_delimiter = ',', required = true)]
    pub(crate) addresses: Vec<IpAddr>,
    /// The interface's name in both
    #[arg(long, default_value = "road0")]
    pub(crate) name: String,
    /// Largest packet
    #[arg(long, default_value_t = 1500)]
    pub(crate) mtu: u16,
    #[command(flatten)]
    pub(crate) conditions: LinkConditions,
}

/// Conditions that a link imposes on the bytes, in each direction separately.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LinkConditions {
    /// Delay of each direction; a round trip takes twice that
    #[arg(long, default_value = "25ms", value_parser = duration)]
    pub(crate) delay: Duration,
    /// Bytes per second in each direction, such as 50MB/s; no limit if absent
    #[arg(long, value_parser = rate)]
    pub(crate) rate: Option<u64>,
    /// Longest queue before the link, as time at its rate
    #[arg(long, default_value = "100ms", value_parser = duration)]
    pub(crate) queue: Duration,
}

/// Identity of the client: a client certificate.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ClientIdentity {
    /// PEM of the client certificate
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// PEM of its key; may be the same file
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Idle {
    /// URL for the upgrade and the echo; over https any certificate is accepted
    #[arg(long)]
    pub(crate) url: http::Uri,
    /// Address to dial instead of the URL's
    #[arg(long, value_name = "ADDR")]
    pub(crate) to: Option<SocketAddr>,
    /// Number of upgrades
    #[arg(long, value_name = "N")]
    pub(crate) count: usize,
    /// Number of upgrades that are opened at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) at_once: usize,
    #[command(flatten)]
    pub(crate) caller: ClientIdentity,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("route").required(true))]
#[command(group = clap::ArgGroup::new("bytes"))]
pub(crate) struct Connect {
    /// Proxy for the CONNECT to the target: an address, or `unix:/path`
    #[arg(long, value_name = "ADDR", group = "route")]
    pub(crate) proxy: Option<ListenAddr>,
    /// Address to dial directly, as if it were the target: an https listener, or an app
    #[arg(long, value_name = "ADDR", group = "route")]
    pub(crate) listener: Option<ListenAddr>,
    /// The app, as clients name it
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) target: String,
    /// Number of concurrent clients
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) clients: usize,
    /// Duration
    #[arg(long = "for", default_value = "10s", value_parser = duration)]
    pub(crate) lasting: Duration,
    /// Path of the requests
    #[arg(long, default_value = "/1k")]
    pub(crate) path: String,
    /// Use a new connection for each request; otherwise each client has one
    #[arg(long)]
    pub(crate) new: bool,
    /// Each client downloads this many bytes once, instead of making requests
    #[arg(long, value_name = "BYTES", value_parser = size, group = "bytes")]
    pub(crate) download: Option<u64>,
    /// Each client uploads this many bytes once, instead of making requests
    #[arg(long, value_name = "BYTES", value_parser = size, group = "bytes")]
    pub(crate) upload: Option<u64>,
    /// The bytes pass inside an upgrade with this path: /source/N or /drain
    #[arg(long, value_name = "PATH", requires = "bytes")]
    pub(crate) upgrade: Option<String>,
    /// TLS with the proxy or the listener
    #[arg(long, default_value_ifs = [("ca", ArgPredicate::IsPresent, "true"), ("cert", ArgPredicate::IsPresent, "true")])]
    pub(crate) tls: bool,
    /// PEM of the CA of its certificate; without it any certificate is accepted
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// Name in its certificate; if absent, the proxy's address, or the target's host for a listener
    #[arg(long, value_parser = server_name)]
    pub(crate) server_name: Option<ServerName<'static>>,
    /// Whether new connections resume TLS sessions: yes or no
    #[arg(long, default_value = "no", value_parser = yes_or_no, action = clap::ArgAction::Set)]
    pub(crate) resume: bool,
    #[command(flatten)]
    pub(crate) caller: ClientIdentity,
}

#[derive(Debug, Args)]
pub(crate) struct EndpointSlices {
    /// The cluster's API; over https any certificate is accepted
    #[arg(long)]
    pub(crate) url: http::Uri,
    /// Number of slices
    #[arg(long, value_name = "N")]
    pub(crate) count: usize,
    /// Number of changes, one after the other, in several rounds if necessary; without it the slices are made
    #[arg(long, value_name = "N")]
    pub(crate) changes: Option<usize>,
    /// Changes per second
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) rate: u32,
    /// Index of the endpoint in each slice that the first change sets to not ready; it must not be one that is already not
    /// ready
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) step: usize,
    /// Marker of each change, in addition to the time
    #[arg(long, default_value_t = 'm')]
    pub(crate) mark: char,
    /// Number of connections
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) clients: usize,
    #[command(flatten)]
    pub(crate) caller: ClientIdentity,
}

#[derive(Debug, Args)]
pub(crate) struct Readers {
    /// URL to read from; may be given several times; over https any certificate is accepted
    #[arg(long, required = true)]
    pub(crate) url: Vec<http::Uri>,
    /// Number of readers at each of these
    #[arg(long, value_name = "N")]
    pub(crate) count: usize,
    /// A reader is done when it has seen this many changes with the mark
    #[arg(long, value_name = "N")]
    pub(crate) changes: u64,
    /// Marker of the changes that are counted
    #[arg(long, default_value_t = 'm')]
    pub(crate) mark: char,
    /// Read JSON, instead of protobuf as kube-proxy does
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) caller: ClientIdentity,
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=256) => Ok(number),
        _ => Err("a number from 1 to 256".into()),
    }
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("yes or no".into()),
    }
}

fn words(text: &str) -> StrDeserializer<'_, Error> {
    text.into_deserializer()
}

fn duration(text: &str) -> Result<Duration, Error> {
    causeway_config::DurationStr::deserialize(words(text))
}

fn size(text: &str) -> Result<u64, Error> {
    let bytes = causeway_config::ByteSize::deserialize(words(text))?;
    Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
}

fn rate(text: &str) -> Result<u64, String> {
    let each = text.strip_suffix("/s").unwrap_or(text);
    match size(each).map_err(|error| error.to_string())? {
        0 => Err("nothing a second is no rate".into()),
        bytes => Ok(bytes),
    }
}

fn server_name(text: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(text.to_owned()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_rate_is_a_size_a_second() {
        assert_eq!(rate("50MB/s"), Ok(50_000_000));
        assert_eq!(rate("1MiB"), Ok(1 << 20));
        assert!(rate("0").is_err() && rate("fast").is_err());
    }

    #[test]
    fn a_certificate_means_tls() {
        let line = "load connect --proxy 127.0.0.1:1 --target a:1 --cert c --key k";
        let Command::Connect(connect) = Cli::parse_from(line.split(' ')).command else {
            panic!("it is connect");
        };
        assert!(connect.tls && !connect.resume);
    }
}
