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

/// Loads for Causeway's benchmarks; one JSON object a line on standard output.
#[derive(Debug, Parser)]
#[command(name = "causeway-bench-load", version)]
pub(crate) struct Cli {
    /// Threads that work; one is cheapest for each request
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
    /// Be many light edges: TLS 1.3, HTTP/2, hello, and an answer of 1 KiB to each stream
    Fleet(Fleet),
    /// Lay a link with a delay and a rate between two network namespaces
    Link(Link),
    /// Open upgrades and hold them
    Idle(Idle),
    /// Load in a closed loop, inside a CONNECT or straight: requests, or bytes
    Connect(Connect),
    /// Make `EndpointSlices` in a cluster, or change them at a rate
    Slices(Slices),
    /// Watch `EndpointSlices` with many readers, and say how long changes took to reach them
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
    /// How many nodes
    #[arg(long, value_name = "N")]
    pub(crate) nodes: usize,
    /// Prefix of the names; a number follows, from 1
    #[arg(long, default_value = "node-")]
    pub(crate) prefix: String,
    /// File of the identities, for `fleet`
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// How long the certificates hold
    #[arg(long, default_value = "24h", value_parser = duration)]
    pub(crate) lifetime: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Fleet {
    /// The gateway's tunnel port
    #[arg(long, value_name = "ADDR")]
    pub(crate) gateway: SocketAddr,
    /// File of identities that `mint` wrote
    #[arg(long, value_name = "FILE")]
    pub(crate) identities: PathBuf,
    /// How many of its nodes, from the first on; all if absent
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<usize>,
    /// How many dial at once at the beginning
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) at_once: usize,
    /// Only dial and hang up, over and over
    #[arg(long, requires = "for_")]
    pub(crate) handshakes_only: bool,
    /// How long
    #[arg(long = "for", id = "for_", value_parser = duration, requires = "handshakes_only")]
    pub(crate) lasting: Option<Duration>,
    /// How many dial at once
    #[arg(
        long,
        value_name = "N",
        default_value_t = 32,
        requires = "handshakes_only"
    )]
    pub(crate) callers: usize,
    /// Whether TLS sessions are resumed: yes or no
    #[arg(long, default_value = "yes", value_parser = yes_or_no, action = clap::ArgAction::Set)]
    pub(crate) resume: bool,
    /// Hang up after the registration only, not after TLS
    #[arg(long, requires = "handshakes_only")]
    pub(crate) hello: bool,
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
    pub(crate) way: Way,
}

/// Conditions that a link imposes on the bytes, in each direction separately.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Way {
    /// Added to each direction; a round trip is twice that
    #[arg(long, default_value = "25ms", value_parser = duration)]
    pub(crate) delay: Duration,
    /// Bytes a second in each direction, such as 50MB/s; no limit if absent
    #[arg(long, value_parser = rate)]
    pub(crate) rate: Option<u64>,
    /// How much of the rate's time may queue in front of the way
    #[arg(long, default_value = "100ms", value_parser = duration)]
    pub(crate) queue: Duration,
}

/// Identity of the client: a client certificate.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Caller {
    /// PEM of the client certificate
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// PEM of its key; may be the same file
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Idle {
    /// URL that is asked to switch protocols and then to echo; over https any certificate is accepted
    #[arg(long)]
    pub(crate) url: http::Uri,
    /// The address that is dialled instead of the URL's
    #[arg(long, value_name = "ADDR")]
    pub(crate) to: Option<SocketAddr>,
    /// How many
    #[arg(long, value_name = "N")]
    pub(crate) count: usize,
    /// How many are opened at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) at_once: usize,
    #[command(flatten)]
    pub(crate) caller: Caller,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("road").required(true))]
#[command(group = clap::ArgGroup::new("bytes"))]
pub(crate) struct Connect {
    /// A proxy that is asked to CONNECT to the target: an address, or `unix:/path`
    #[arg(long, value_name = "ADDR", group = "road")]
    pub(crate) proxy: Option<ListenAddr>,
    /// An address that is called straight, as if it were the target: an https front, or an app
    #[arg(long, value_name = "ADDR", group = "road")]
    pub(crate) front: Option<ListenAddr>,
    /// The app, as a caller names it
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) target: String,
    /// How many call at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) callers: usize,
    /// How long
    #[arg(long = "for", default_value = "10s", value_parser = duration)]
    pub(crate) lasting: Duration,
    /// Path of the requests
    #[arg(long, default_value = "/1k")]
    pub(crate) path: String,
    /// A new connection for each request; without it each caller has one
    #[arg(long)]
    pub(crate) new: bool,
    /// Each caller downloads this many bytes once, instead of making requests
    #[arg(long, value_name = "BYTES", value_parser = size, group = "bytes")]
    pub(crate) download: Option<u64>,
    /// Each caller uploads this many bytes once, instead of making requests
    #[arg(long, value_name = "BYTES", value_parser = size, group = "bytes")]
    pub(crate) upload: Option<u64>,
    /// The bytes pass inside an upgrade, and this is its path: /source/N or /drain
    #[arg(long, value_name = "PATH", requires = "bytes")]
    pub(crate) upgrade: Option<String>,
    /// TLS with the proxy or the front
    #[arg(long, default_value_ifs = [("ca", ArgPredicate::IsPresent, "true"), ("cert", ArgPredicate::IsPresent, "true")])]
    pub(crate) tls: bool,
    /// PEM of the CA that signed its certificate; without it any certificate is accepted
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// The name in its certificate; the proxy's address, or the target's host before a front, if absent
    #[arg(long, value_parser = server_name)]
    pub(crate) server_name: Option<ServerName<'static>>,
    /// Whether new connections resume TLS sessions: yes or no
    #[arg(long, default_value = "no", value_parser = yes_or_no, action = clap::ArgAction::Set)]
    pub(crate) resume: bool,
    #[command(flatten)]
    pub(crate) caller: Caller,
}

#[derive(Debug, Args)]
pub(crate) struct Slices {
    /// The cluster's API; over https any certificate is accepted
    #[arg(long)]
    pub(crate) url: http::Uri,
    /// How many there are
    #[arg(long, value_name = "N")]
    pub(crate) count: usize,
    /// Change them, one after the other and over again, so many times; without it they are made
    #[arg(long, value_name = "N")]
    pub(crate) changes: Option<usize>,
    /// Changes a second
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) rate: u32,
    /// Index of the endpoint in each slice that the first change sets to not ready, so that it is none that is already not
    /// ready
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) step: usize,
    /// Marker of each change, beside the time
    #[arg(long, default_value_t = 'm')]
    pub(crate) mark: char,
    /// Connections
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) callers: usize,
    #[command(flatten)]
    pub(crate) caller: Caller,
}

#[derive(Debug, Args)]
pub(crate) struct Readers {
    /// URL to read from; may be given several times; over https any certificate is accepted
    #[arg(long, required = true)]
    pub(crate) url: Vec<http::Uri>,
    /// How many read at each of these
    #[arg(long, value_name = "N")]
    pub(crate) count: usize,
    /// As many changes with the mark make a reader's work complete
    #[arg(long, value_name = "N")]
    pub(crate) changes: u64,
    /// Marker of the changes that are counted
    #[arg(long, default_value_t = 'm')]
    pub(crate) mark: char,
    /// Read JSON, and not protobuf as kube-proxy does
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) caller: Caller,
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
