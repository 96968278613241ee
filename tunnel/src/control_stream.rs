//! Control stream of a tunnel: hello messages of both ends, and all later messages.
//!
//! The gateway's first request on a tunnel opens it, and it stays open as long as the tunnel: one JSON object a line in each
//! direction. The gateway begins with [`GatewayHello`]. Until the edge's [`EdgeHello`] is checked, the tunnel takes no other
//! stream. An edge's statements about itself are data; its identity comes from its certificate. An edge cannot open streams,
//! so it sends a message here when it wants to leave.

use crate::{
    error::StreamError,
    heartbeat::DelegatedHeartbeat,
    stream::{StreamReceiver, StreamSender},
    wire::MAX_MESSAGE,
};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::BTreeMap,
    future::poll_fn,
    net::IpAddr,
    task::{Context, Poll, ready},
    time::Duration,
};

/// First message of the gateway, which describes the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayHello {
    /// [`crate::wire::VERSION`] of the gateway.
    pub protocol: u32,
    /// The gateway's own version, for people.
    pub version: String,
    /// The gateway's name, for people.
    pub gateway: String,
    /// Random for each gateway's process: by it an edge knows a gateway that it reaches by several addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The node that the edge's certificate names.
    pub node: String,
    /// All addresses (`host:port`) at which gateways can be had.
    pub gateways: Vec<String>,
    /// How many gateways there are, where that is known: one address may lead to several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

/// First message of the edge, which describes the edge.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct EdgeHello {
    /// [`crate::wire::VERSION`] of the edge.
    pub protocol: u32,
    /// The edge's own version, for people.
    pub version: String,
    /// Random for each edge process: a restart or a clone has another.
    pub instance: String,
    /// When this process began, in milliseconds since the Unix epoch, for people.
    pub started: u64,
    /// Index of this tunnel among those of the process, from 0.
    pub slot: u32,
    /// Addresses of the node, as the edge sees them; routable only when confirmed.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Labels, as configured on the edge.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The pool, as configured on the edge; counts only when confirmed.
    #[serde(default)]
    pub pool: Option<String>,
    /// The node ports that the edge's allow-list names.
    #[serde(default)]
    pub ports: Vec<u16>,
    /// Whether the edge takes [`GatewayMessage::Window`].
    #[serde(default)]
    pub turns: bool,
    /// Whether the edge has other gateways to go to (a drain then waits for less).
    #[serde(default)]
    pub elsewhere: bool,
    /// Whether the edge takes [`GatewayMessage::Ports`].
    #[serde(default)]
    pub listed: bool,
    /// Whether the edge takes targets that are longer than 65,534 bytes ([`crate::request_target`]).
    #[serde(default)]
    pub long_targets: bool,
    /// Whether the edge takes upgrades with a body ([`crate::wire::CONTENT`]).
    #[serde(default)]
    pub upgrade_bodies: bool,
    /// Whether the process's tunnel before this one, of the same slot, lives: its streams go on until they end.
    #[serde(default)]
    pub takes_over: bool,
    /// A stream that has moved more than this many bytes within two seconds is bulk to the edge: then it dials a further tunnel, and
    /// the gateway is to open small streams elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_after: Option<u64>,
    /// The SHA-256 of each root that the edge believes, in hexadecimal. An edge that says it takes [`GatewayMessage::Roots`] and
    /// [`GatewayMessage::Renew`]; one that does not would hear nothing more behind them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roots: Option<Vec<String>>,
    /// Addresses at which the members of the edge's node pool read its API cache, each `host:port`, if the edge takes
    /// [`GatewayMessage::Pool`]. An edge without an address serves no members, and leads none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<Vec<String>>,
    /// Address at which `YurtHub`s read the edge's API cache, if they may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hubs: Option<Box<YurtHubAddr>>,
    /// Whether the edge takes [`GatewayMessage::HeartbeatNonce`], and carries heartbeats of other nodes of its pool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub heartbeats: bool,
}

/// Address and resources of an edge's listener for `YurtHub`s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct YurtHubAddr {
    /// IP address. `YurtHub`s have a port of their own for it.
    pub at: IpAddr,
    /// Resources that they can read there, each `GROUP/VERSION/PLURAL` or `VERSION/PLURAL`.
    pub resources: Vec<String>,
}

/// The node ports that a gateway's cluster lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnouncedPorts {
    /// Ports of upstreams that speak HTTP in the clear.
    pub http: Vec<u16>,
    /// Ports for bytes alone: the gateway itself speaks TLS with the upstream.
    pub tcp: Vec<u16>,
}

impl AnnouncedPorts {
    /// As many as there may be: in a line of either end they leave room for more than half of what else it says.
    pub const MAX_PORTS: usize = 4096;
}

/// Members with which an edge reads the cluster's objects: one of a pool reads for all of it, at the gateway, and the others
/// at that one. An edge without a confirmed pool receives none of this, and reads at the gateway itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePoolMembers {
    /// The edge's confirmed pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The node that reads at the gateway for all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Those of the pool that serve other members, the edge itself with them if it is one: [`NodePoolMembers::MAX_MEMBERS`] at
    /// most.
    #[serde(default)]
    pub members: Vec<NodePoolMember>,
}

impl NodePoolMembers {
    /// As many as there may be: with names of a hundred letters and two addresses each they fit into a line.
    pub const MAX_MEMBERS: usize = 256;
}

/// Address of one member of a node pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePoolMember {
    /// Its node.
    pub node: String,
    /// Addresses at which it serves the other members, each `host:port`.
    #[serde(default)]
    pub at: Vec<String>,
}

/// Why a gateway sends a tunnel away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoAway {
    /// Another process with this node's certificate came later.
    Superseded,
    /// The node is not admitted (revoked, unknown to the gateway).
    Unwelcome,
    /// The hello was not acceptable.
    Malformed,
    /// The gateway has as many edges as it may have, or cannot tell yet which are admitted: the edge should try again.
    Full,
}

impl GoAway {
    /// The word, for logs and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::Unwelcome => "not_admitted",
            Self::Malformed => "malformed",
            Self::Full => "full",
        }
    }
}

/// A line from the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum GatewayMessage {
    /// The first line.
    Hello(GatewayHello),
    /// The hello was accepted: the tunnel is registered.
    Registered,
    /// The gateways' addresses changed, or their number.
    Gateways {
        /// All of them, `host:port`.
        gateways: Vec<String>,
        /// As in the hello.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        replicas: Option<u32>,
    },
    /// The edge may change its window once, and answers with [`EdgeMessage::Window`].
    Window {
        /// To this many bytes at most.
        bytes: u32,
    },
    /// The node ports that the gateway's cluster lists, all of them and [`AnnouncedPorts::MAX_PORTS`] at most: an edge serves those that its
    /// owner lets be listed.
    Ports(AnnouncedPorts),
    /// With whom the edge reads what its cluster has, from now on.
    Pool(NodePoolMembers),
    /// Believe these roots from now on, and no others. The edge answers with [`EdgeMessage::Roots`].
    Roots {
        /// All of them, as PEM.
        pem: String,
    },
    /// Ask for a new certificate.
    Renew {
        /// At some moment within this time, in milliseconds.
        within_ms: u64,
    },
    /// Nonce for heartbeats of nodes of the edge's pool that have lost their gateways. The gateway accepts it for a few seconds
    /// more than the interval in which it sends the next one.
    HeartbeatNonce {
        /// Random, and at most [`crate::heartbeat::MAX_NONCE`] bytes.
        nonce: String,
    },
    /// The gateway stops: connect elsewhere first.
    Drain {
        /// Time that open streams get, in milliseconds.
        grace_ms: u64,
    },
    /// Go away.
    Dismiss {
        /// Why, as one of the known kinds.
        why: GoAway,
        /// Why, for people.
        detail: String,
        /// Do not come back before, in milliseconds.
        retry_after_ms: u64,
    },
    /// Message of a later gateway version.
    #[serde(other)]
    Unknown,
}

/// A line from the edge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EdgeMessage {
    /// The answer to the hello.
    Welcome(Box<EdgeHello>),
    /// The edge has taken its turn.
    Window {
        /// Its window now, in bytes.
        bytes: u32,
    },
    /// The edge wants to leave, or has connected elsewhere after a drain: open no further streams.
    Leave {
        /// Why, for people.
        detail: String,
        /// Whether what is open may take as long as it likes: the edge itself stays.
        #[serde(default)]
        until_idle: bool,
        /// Whether the edge still takes new streams if no other tunnel of the node does. A second line without this follows.
        #[serde(default)]
        serves: bool,
    },
    /// Roots that the edge trusts now.
    Roots {
        /// The SHA-256 of each root, in hexadecimal.
        roots: Vec<String>,
    },
    /// Heartbeat of another node of the edge's pool, which has lost its gateways.
    DelegatedHeartbeat(Box<DelegatedHeartbeat>),
    /// Message of a later edge version.
    #[serde(other)]
    Unknown,
}

/// Why a control stream failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlStreamError {
    /// The stream or the tunnel ended.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The other end closed the control stream.
    #[error("the other end closed the control stream")]
    Closed,
    /// A line is longer than [`MAX_MESSAGE`].
    #[error("a control message is longer than {MAX_MESSAGE} bytes")]
    TooLong,
    /// A line is not what it should be.
    #[error("a control message is malformed: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Nothing came in time.
    #[error("no response to the hello within {0:?}")]
    TooSlow(Duration),
}

/// One end of a control stream. Reading is cancel-safe.
#[derive(Debug)]
pub struct ControlStream {
    pub(crate) sender: StreamSender,
    receiver: StreamReceiver,
    /// Lines that the other end's window has not taken yet.
    write_buffer: Bytes,
    read_buffer: BytesMut,
    /// How much of it holds no end of a line.
    scanned: usize,
}

impl ControlStream {
    pub(crate) fn new(sender: StreamSender, receiver: StreamReceiver) -> Self {
        Self {
            sender,
            receiver,
            write_buffer: Bytes::new(),
            read_buffer: BytesMut::new(),
            scanned: 0,
        }
    }

    /// Sends one line, behind those that are queued.
    ///
    /// # Errors
    /// If the stream is gone.
    pub async fn send<M: Serialize>(&mut self, message: &M) -> Result<(), ControlStreamError> {
        self.enqueue(message)?;
        poll_fn(|cx| self.poll_send(cx)).await
    }

    /// Queues one line, which [`ControlStream::exchange`] sends.
    ///
    /// # Errors
    /// If the line cannot be written.
    pub fn enqueue<M: Serialize>(&mut self, message: &M) -> Result<(), ControlStreamError> {
        let mut buffer = Vec::from(std::mem::take(&mut self.write_buffer));
        serde_json::to_writer(&mut buffer, message)?;
        buffer.push(b'\n');
        self.write_buffer = buffer.into();
        Ok(())
    }

    /// Whether queued lines are not sent yet.
    pub fn has_unsent(&self) -> bool {
        !self.write_buffer.is_empty()
    }

    /// The next line.
    ///
    /// # Errors
    /// If the stream is gone, or the line is too long or malformed.
    pub async fn receive<M: DeserializeOwned>(&mut self) -> Result<M, ControlStreamError> {
        poll_fn(|cx| self.poll_receive(cx)).await
    }

    /// Sends the queued lines and waits for the next line, which it returns, or `None` once all queued lines are sent.
    /// Cancel-safe.
    ///
    /// # Errors
    /// As [`ControlStream::receive`].
    pub async fn exchange<M: DeserializeOwned>(&mut self) -> Result<Option<M>, ControlStreamError> {
        poll_fn(|cx| {
            if self.has_unsent()
                && let Poll::Ready(sent) = self.poll_send(cx)
            {
                return Poll::Ready(sent.map(|()| None));
            }
            self.poll_receive(cx).map_ok(Some)
        })
        .await
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ControlStreamError>> {
        self.sender
            .poll_send_data(cx, &mut self.write_buffer)
            .map_err(Into::into)
    }

    fn poll_receive<M: DeserializeOwned>(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<M, ControlStreamError>> {
        loop {
            // Only new bytes are searched, so a line that arrives byte by byte stays cheap.
            let unscanned = self.read_buffer.get(self.scanned..).unwrap_or_default();
            if let Some(end) = unscanned.iter().position(|byte| *byte == b'\n') {
                let line = self.read_buffer.split_to(self.scanned + end + 1);
                self.scanned = 0;
                return Poll::Ready(parse_message(&line));
            }
            self.scanned = self.read_buffer.len();
            if self.read_buffer.len() > MAX_MESSAGE {
                return Poll::Ready(Err(ControlStreamError::TooLong));
            }
            let chunk = ready!(self.receiver.poll_data(cx)).ok_or(ControlStreamError::Closed)??;
            self.read_buffer.extend_from_slice(&chunk);
        }
    }

    /// As [`ControlStream::receive`], within a bound.
    ///
    /// # Errors
    /// As [`ControlStream::receive`], and [`ControlStreamError::TooSlow`].
    pub async fn receive_within<M: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> Result<M, ControlStreamError> {
        tokio::time::timeout(timeout, self.receive())
            .await
            .map_err(|_| ControlStreamError::TooSlow(timeout))?
    }

    /// Ends this side of the stream in order.
    pub fn close(&mut self) {
        // A lost stream counts as closed.
        let _ = self.sender.end();
    }
}

/// One line of a control stream.
///
/// # Errors
/// If it is too long or not the message that is expected here.
pub fn parse_message<M: DeserializeOwned>(line: &[u8]) -> Result<M, ControlStreamError> {
    if line.len() > MAX_MESSAGE + 1 {
        return Err(ControlStreamError::TooLong);
    }
    Ok(serde_json::from_slice(line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written<M: Serialize>(line: &M) -> String {
        serde_json::to_string(line).unwrap()
    }

    #[test]
    fn an_edge_hello_without_neighbours_keeps_the_old_format() {
        let silent = written(&EdgeMessage::Welcome(Box::default()));
        assert!(!silent.contains("site"), "{silent}");
        let EdgeMessage::Welcome(heard) = parse_message(silent.as_bytes()).unwrap() else {
            panic!("a welcome is one");
        };
        assert_eq!(heard.site, None);
        // For an older edge this is a message of a later gateway, like any unknown message.
        let later = br#"{"type":"of_a_later_gateway","members":[1]}"#;
        assert_eq!(
            parse_message::<GatewayMessage>(later).unwrap(),
            GatewayMessage::Unknown
        );
    }

    #[test]
    fn a_pool_message_round_trips_and_parses_with_fewer_fields() {
        let members = NodePoolMembers {
            pool: Some("north-1".to_owned()),
            leader: Some("edge-1".to_owned()),
            members: vec![NodePoolMember {
                node: "edge-1".to_owned(),
                at: vec!["10.1.0.5:10271".to_owned(), "[fd00::5]:10271".to_owned()],
            }],
        };
        let line = written(&GatewayMessage::Pool(members.clone()));
        assert!(
            line.starts_with(r#"{"type":"pool","pool":"north-1","#),
            "{line}"
        );
        assert_eq!(
            parse_message::<GatewayMessage>(line.as_bytes()).unwrap(),
            GatewayMessage::Pool(members)
        );
        let none = parse_message::<GatewayMessage>(br#"{"type":"pool"}"#).unwrap();
        assert_eq!(none, GatewayMessage::Pool(NodePoolMembers::default()));
        let site = br#"{"type":"welcome","protocol":1,"version":"1","instance":"a","started":0,"slot":0,"site":[]}"#;
        let EdgeMessage::Welcome(leads_none) = parse_message(site).unwrap() else {
            panic!("a welcome is one");
        };
        assert_eq!(leads_none.site, Some(Vec::new()));
    }

    #[test]
    fn a_large_site_fits_into_a_line() {
        let member = |nth| NodePoolMember {
            node: format!("{nth:03}-{}", "n".repeat(96)),
            at: vec!["[2001:0db8:0000:0000:0000:0000:0000:0001]:10271".to_owned(); 2],
        };
        let line = GatewayMessage::Pool(NodePoolMembers {
            pool: Some("p".repeat(63)),
            leader: Some(member(0).node),
            members: (0..NodePoolMembers::MAX_MEMBERS).map(member).collect(),
        });
        assert!(written(&line).len() < MAX_MESSAGE);
    }
}
