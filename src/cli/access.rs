//! The arguments of the commands that users run on their own machines, against a gateway's `connect` listener.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use causeway_config::host_port;
use causeway_tls::Fingerprint;
use clap::{Args, Subcommand, ValueEnum, error::ErrorKind};

/// Commands that use a profile.
#[derive(Debug, Subcommand)]
pub(crate) enum AccessCommand {
    /// Store a gateway and your credential for it as a profile, for the commands from `nodes` to `proxy`
    ///
    /// Tests both before it stores them. The profile is a file in ~/.config/causeway (on Windows %APPDATA%\causeway); it names the
    /// files or the command of the credential and contains no secret.
    Login(Login),
    /// List the nodes, ports and services that you may reach
    Nodes(Nodes),
    /// Connect standard input and output to a port of a node, as the `ProxyCommand` of ssh does
    Connect(Connect),
    /// Log in to a node with the system's ssh
    Ssh(Ssh),
    /// Print a section for ~/.ssh/config, by which ssh, scp, rsync and git reach nodes
    SshConfig(SshConfig),
    /// Forward local ports to ports of a node
    Forward(Forward),
    /// Run a proxy on loopback for programs that can use an HTTP or SOCKS5 proxy
    #[command(name = "proxy")]
    LocalProxy(LocalProxy),
}

/// Profile that a command uses.
#[derive(Debug, Args)]
pub(crate) struct ProfileArg {
    /// Name of the profile; if absent, `default` or the only one
    #[arg(long, value_name = "NAME", env = "CAUSEWAY_PROFILE")]
    pub(crate) profile: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Login {
    /// Address of a connect listener of the gateway, HOST or HOST:PORT; the default port is 443
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: String,
    /// Name of the profile
    #[arg(
        long,
        value_name = "NAME",
        env = "CAUSEWAY_PROFILE",
        default_value = "default"
    )]
    pub(crate) profile: String,
    /// CA certificates (PEM) that verify the gateway, such as its ca.pem; copied to the profile. The system's CAs if absent
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// SHA-256 of the gateway's CA, `sha256:` and 64 hexadecimal digits; the CA itself is then read from the gateway
    #[arg(long, value_name = "FINGERPRINT", conflicts_with = "ca", value_parser = fingerprint)]
    pub(crate) ca_pin: Option<Fingerprint>,
    /// Client certificate (PEM); the file is read at each use
    #[arg(long, value_name = "FILE", requires = "key", conflicts_with_all = ["token_file", "token_command"])]
    pub(crate) cert: Option<PathBuf>,
    /// Key of the client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
    /// File with a bearer token; read at each use
    #[arg(long, value_name = "FILE", conflicts_with = "token_command")]
    pub(crate) token_file: Option<PathBuf>,
    /// Command that prints a bearer token or an `ExecCredential` as for kubeconfig files; all words after it are its arguments
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true)]
    pub(crate) token_command: Vec<String>,
}

/// Parses a fingerprint with or without the name of its algorithm.
fn fingerprint(text: &str) -> Result<Fingerprint, String> {
    let digits = text.strip_prefix("sha256:").unwrap_or(text);
    digits
        .replace(':', "")
        .parse()
        .map_err(|error| format!("{error}"))
}

#[derive(Debug, Args)]
pub(crate) struct Connect {
    /// Node and port, such as edge-1:22
    #[arg(value_name = "HOST:PORT")]
    pub(crate) target: String,
    #[command(flatten)]
    pub(crate) profile: ProfileArg,
}

#[derive(Debug, Args)]
pub(crate) struct Ssh {
    /// Node, or USER@NODE
    #[arg(value_name = "DESTINATION")]
    pub(crate) destination: String,
    /// Arguments for ssh: options, and the command to run on the node
    #[arg(last = true, value_name = "SSH-ARGS")]
    pub(crate) arguments: Vec<OsString>,
    #[command(flatten)]
    pub(crate) profile: ProfileArg,
}

#[derive(Debug, Args)]
pub(crate) struct SshConfig {
    /// Nodes, or patterns of `ssh_config(5)` such as 'edge-*'; if absent, the nodes that you may reach now
    #[arg(value_name = "NODE")]
    pub(crate) nodes: Vec<String>,
    #[command(flatten)]
    pub(crate) profile: ProfileArg,
}

#[derive(Debug, Args)]
pub(crate) struct Forward {
    /// Name of the node, optionally with a port to forward, as in edge-1:5432
    #[arg(value_name = "NODE[:PORT]", value_parser = ForwardNode::parse)]
    pub(crate) node: ForwardNode,
    /// Ports: 5432 for the same port on both sides, 8080:80 for another local port, :9100 for any free local port
    #[arg(value_name = "[LOCAL:]REMOTE", value_parser = PortPair::parse)]
    pub(crate) ports: Vec<PortPair>,
    /// Local address; other machines can connect if it is not a loopback address
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
    /// Time that a new connection waits for a node that is away; 0s: one attempt
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub(crate) wait: Duration,
    /// Print each event as a line of JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) profile: ProfileArg,
}

impl Forward {
    /// Returns the ports to forward, that of the node first.
    pub(crate) fn pairs(&self) -> Vec<PortPair> {
        let of_node = self.node.port.map(|port| PortPair {
            local: port,
            remote: port,
        });
        of_node
            .into_iter()
            .chain(self.ports.iter().copied())
            .collect()
    }

    /// Checks that there is a port.
    ///
    /// # Errors
    /// An error of the command line, which says what to write.
    pub(crate) fn check(&self) -> Result<(), clap::Error> {
        if self.pairs().is_empty() {
            let message = "no port to forward; write the node and a port, such as: edge-1 5432\n";
            return Err(clap::Error::raw(
                ErrorKind::MissingRequiredArgument,
                message,
            ));
        }
        Ok(())
    }
}

/// Node of `forward`, and the port that is written with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForwardNode {
    /// Name of the node, or of another host that the gateway reaches, or an address without brackets.
    pub(crate) host: String,
    /// Port to forward.
    pub(crate) port: Option<u16>,
}

impl ForwardNode {
    fn parse(text: &str) -> Result<Self, String> {
        let is_name = || host_port(&format!("{text}:1")).is_ok_and(|(host, _)| host == text);
        if text.parse::<IpAddr>().is_ok() || is_name() {
            return Ok(Self {
                host: text.to_owned(),
                port: None,
            });
        }
        let (host, port) = host_port(text)
            .map_err(|_| "write NODE or NODE:PORT, and further ports as arguments of their own, such as: edge-1:5432 8080:80")?;
        Ok(Self {
            host: host.to_owned(),
            port: Some(port),
        })
    }
}

/// Local port and port of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortPair {
    /// Local port; 0 is any free port.
    pub(crate) local: u16,
    /// Port of the node.
    pub(crate) remote: u16,
}

impl PortPair {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let pair = match text.split_once(':') {
            Some(("", remote)) => number(remote).map(|remote| (0, remote)),
            Some((local, remote)) => number(local).zip(number(remote)),
            None => number(text).map(|port| (port, port)),
        };
        let pair = pair.map(|(local, remote)| Self { local, remote });
        pair.ok_or_else(|| {
            "write REMOTE, LOCAL:REMOTE or :REMOTE, with ports from 1 to 65535".into()
        })
    }
}

#[derive(Debug, Args)]
pub(crate) struct LocalProxy {
    /// Address of the proxy, on a loopback interface
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:1080")]
    pub(crate) listen: SocketAddr,
    /// Print each event as a line of JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) profile: ProfileArg,
}

#[derive(Debug, Args)]
pub(crate) struct Nodes {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = NodesFormat::Table)]
    pub(crate) output: NodesFormat,
    #[command(flatten)]
    pub(crate) profile: ProfileArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NodesFormat {
    /// One line for each node
    Table,
    /// The gateway's answer
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn ports_are_written_as_for_kubectl() {
        let parsed = |text| PortPair::parse(text).map(|pair| (pair.local, pair.remote));
        assert_eq!(parsed("5432"), Ok((5432, 5432)));
        assert_eq!(parsed("8080:80"), Ok((8080, 80)));
        assert_eq!(parsed(":9100"), Ok((0, 9100)));
        for bad in ["", ":", "0", "80:", "0:80", "1:2:3", "http", "65536"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_port_of_a_node_is_forwarded_before_the_others() {
        #[derive(clap::Parser)]
        struct Words {
            #[command(flatten)]
            forward: Forward,
        }
        let parsed = |words: &str| {
            let forward = Words::parse_from(words.split(' ')).forward;
            let pairs = forward.pairs().into_iter();
            let pairs: Vec<_> = pairs.map(|pair| (pair.local, pair.remote)).collect();
            (pairs, forward.check().is_ok())
        };
        let both = vec![(5432, 5432), (8080, 80)];
        assert_eq!(parsed("forward edge-1:5432 8080:80"), (both, true));
        assert_eq!(parsed("forward edge-1 8080:80"), (vec![(8080, 80)], true));
        assert_eq!(parsed("forward edge-1"), (Vec::new(), false));
    }

    #[test]
    fn a_node_may_have_a_port() {
        let parsed = |text| ForwardNode::parse(text).map(|node| (node.host, node.port));
        for name in ["edge-1", "printer.edge-1", "10.0.3.7", "2001:db8::1"] {
            assert_eq!(parsed(name), Ok((name.to_owned(), None)));
        }
        assert_eq!(parsed("edge-1:5432"), Ok(("edge-1".to_owned(), Some(5432))));
        let address = ("2001:db8::1".to_owned(), Some(80));
        assert_eq!(parsed("[2001:db8::1]:80"), Ok(address));
        for bad in [
            "edge-1:",
            "edge-1:0",
            "[2001:db8::1]",
            "root@edge-1",
            "edge-1/",
            "",
        ] {
            let error = parsed(bad).unwrap_err();
            assert!(error.contains("edge-1:5432 8080:80"), "{bad}: {error}");
        }
    }

    #[test]
    fn fingerprints_are_read_in_the_forms_of_other_programs() {
        let digits = "ab".repeat(32);
        let plain = fingerprint(&digits).unwrap();
        let colons = vec!["AB"; 32].join(":");
        for text in [format!("sha256:{digits}"), colons] {
            assert_eq!(fingerprint(&text).unwrap(), plain, "{text}");
        }
        assert!(fingerprint("sha1:ab").is_err());
    }
}
