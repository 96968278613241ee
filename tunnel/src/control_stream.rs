//! Control stream of a tunnel: hello messages of both ends, and all later messages.
//!
//! The gateway opens it with the first request on a tunnel, and it stays open as long as the tunnel. Each direction carries
//! one JSON object per line. The gateway begins with [`GatewayHello`]. Until the edge's [`EdgeHello`] is checked, the tunnel
//! takes no other stream. An edge's statements about itself are data; its identity comes from its certificate. An edge cannot
//! open streams, so it sends a message here when it is going to leave.

use crate::{
    error::StreamError,
    heartbeat::DelegatedHeartbeat,
    stream::{StreamReceiver, StreamSender},
    target::is_service_name,
    wire::{MAX_MESSAGE, MAX_REPORTED_SERVICES},
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
    /// Random for each gateway process. An edge that reaches one gateway by several addresses recognises it by this value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The node that the edge's certificate names.
    pub node: String,
    /// All addresses (`host:port`) of gateways.
    pub gateways: Vec<String>,
    /// Number of gateways, if it is known. One address may lead to several gateways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Whether this gateway has no fewer edges than the others. An edge that searches for a replacement of another gateway
    /// ([`GatewayMessage::Rebalance`]) leaves it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub crowded: bool,
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
    /// Start of this process, in milliseconds since the Unix epoch, for people.
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
    /// Port of each service that the edge serves, by name, of at most [`crate::wire::MAX_REPORTED_SERVICES`]. Edges of earlier
    /// versions do not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_ports: Option<BTreeMap<String, u16>>,
    /// Whether the edge has other gateways to use. A drain then waits for less.
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
    /// Whether the earlier tunnel of this process with the same slot is still open. The streams of that tunnel continue until
    /// they end.
    #[serde(default)]
    pub takes_over: bool,
    /// Number of bytes. The edge counts a stream as bulk once it has moved more bytes than this within two seconds. The edge
    /// then dials another tunnel, and the gateway should open small streams on another tunnel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_after: Option<u64>,
    /// SHA-256 of each root that the edge trusts, in hexadecimal. An edge that sends this field accepts
    /// [`GatewayMessage::Roots`] and [`GatewayMessage::Renew`]. Any other edge would read no further message behind these
    /// two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roots: Option<Vec<String>>,
    /// Whether the edge takes [`GatewayMessage::Crls`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub crls: bool,
    /// Addresses at which the members of the edge's node pool read its API cache, each `host:port`, if the edge takes
    /// [`GatewayMessage::Pool`]. An edge without an address serves no members and cannot be the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<Vec<String>>,
    /// Address at which `YurtHub`s read the edge's API cache, if the edge serves them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hubs: Option<Box<YurtHubAddr>>,
    /// Whether the edge takes [`GatewayMessage::HeartbeatNonce`], and carries heartbeats of other nodes of its pool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub heartbeats: bool,
    /// Whether the edge found this gateway behind an address that leads to several gateways, so that it takes
    /// [`GatewayMessage::Rebalance`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub movable: bool,
    /// Ports whose health checks fail, as in [`EdgeMessage::Health`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unhealthy: Vec<u16>,
}

impl EdgeHello {
    /// Returns the services that the edge reports, each with its port. Leaves out entries with an invalid name or port 0.
    pub fn services(&self) -> impl Iterator<Item = (&str, u16)> {
        let reported = self
            .service_ports
            .iter()
            .flatten()
            .take(MAX_REPORTED_SERVICES);
        let services = reported.map(|(name, port)| (name.as_str(), *port));
        services.filter(|(name, port)| is_service_name(name) && *port > 0)
    }
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
    /// Ports of upstreams that use raw TCP: the gateway itself speaks TLS with the upstream.
    pub tcp: Vec<u16>,
}

impl AnnouncedPorts {
    /// Maximum number of ports. So many ports leave more than half of a line of either end for the other fields.
    pub const MAX_PORTS: usize = 4096;
}

/// Members of a node pool that read the cluster's objects together. The leader reads at the gateway for the whole pool, and
/// the other members read at the leader. An edge without a confirmed pool receives no such message, and reads at the gateway
/// itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePoolMembers {
    /// The edge's confirmed pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Node of the leader, which reads at the gateway for all members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Members of the pool that serve other members, at most [`NodePoolMembers::MAX_MEMBERS`]. The edge itself is among them
    /// if it serves members.
    #[serde(default)]
    pub members: Vec<NodePoolMember>,
}

impl NodePoolMembers {
    /// Maximum number of members. So many members fit into one line, with names of a hundred letters and two addresses each.
    pub const MAX_MEMBERS: usize = 256;
}

/// Address of one member of a node pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePoolMember {
    /// Node of the member.
    pub node: String,
    /// Addresses at which the member serves the other members, each `host:port`.
    #[serde(default)]
    pub at: Vec<String>,
}

/// Reason for which a gateway dismisses a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoAway {
    /// Another process with this node's certificate connected later.
    Superseded,
    /// The node is not admitted (revoked, unknown to the gateway).
    #[serde(rename = "unwelcome")]
    NotAdmitted,
    /// The hello is invalid.
    Malformed,
    /// The gateway has its maximum number of edges, or has not yet loaded the admitted nodes. The edge should try again.
    Full,
}

impl GoAway {
    /// Returns the reason as a word, for logs and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::NotAdmitted => "not_admitted",
            Self::Malformed => "malformed",
            Self::Full => "full",
        }
    }
}

/// Message from the gateway: one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum GatewayMessage {
    /// First message of the control stream.
    Hello(GatewayHello),
    /// The hello was accepted: the tunnel is registered.
    Registered,
    /// The gateways' addresses or their number changed.
    Gateways {
        /// All addresses of gateways, each `host:port`.
        gateways: Vec<String>,
        /// Number of gateways, as in [`GatewayHello::replicas`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        replicas: Option<u32>,
    },
    /// All node ports that the gateway's cluster lists, at most [`AnnouncedPorts::MAX_PORTS`]. An edge serves those ports
    /// that its configuration permits to be listed.
    Ports(AnnouncedPorts),
    /// Members with which the edge reads the objects of its cluster from now on.
    Pool(NodePoolMembers),
    /// The edge must trust these roots from now on, and no others. The edge responds with [`EdgeMessage::Roots`].
    Roots {
        /// All trusted roots, as PEM.
        pem: String,
    },
    /// Revocations of gateways' certificates. The edge keeps those of all lists, uses no gateway in them, and responds with
    /// [`EdgeMessage::Crls`].
    Crls {
        /// CRLs (RFC 5280 section 5) as PEM, each behind the certificate of its issuer.
        pem: String,
    },
    /// The edge must request a new certificate.
    Renew {
        /// Maximum time until that request, in milliseconds. The edge chooses a moment within it.
        within_ms: u64,
    },
    /// Nonce for heartbeats of nodes of the edge's pool that have lost their gateways. The gateway accepts it for a few seconds
    /// more than the interval in which it sends the next one.
    HeartbeatNonce {
        /// Random, and at most [`crate::heartbeat::MAX_NONCE`] bytes.
        nonce: String,
    },
    /// The gateway has more edges than others: the edge should look for another gateway, and leave this one once it is connected
    /// to that.
    Rebalance,
    /// The gateway stops: the edge must connect to another gateway, and serves new streams of both until this one closes the
    /// tunnel. A second message may follow once there is a successor.
    Drain {
        /// Time that open streams get, in milliseconds.
        grace_ms: u64,
        /// Whether another process of this gateway already accepts tunnels at the same address, to which the edge connects.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        successor: bool,
    },
    /// The edge must close the tunnel.
    Dismiss {
        /// Reason, as one of the known kinds.
        why: GoAway,
        /// Reason, for people.
        detail: String,
        /// Minimum time before the edge connects again, in milliseconds.
        retry_after_ms: u64,
    },
    /// Message of a later gateway version.
    #[serde(other)]
    Unknown,
}

/// Message from the edge: one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EdgeMessage {
    /// Response to the gateway's hello.
    Welcome(Box<EdgeHello>),
    /// The edge is going to leave, or is connected to another gateway while this one drains. The gateway must open no further
    /// streams, except for those that `serves` allows.
    Leave {
        /// Reason, for people.
        detail: String,
        /// Whether open streams may continue without a time limit, because the edge itself keeps running.
        #[serde(default)]
        until_idle: bool,
        /// Whether the edge still accepts new streams if the node has no other tunnel. A second message with `false` follows.
        #[serde(default)]
        serves: bool,
    },
    /// Roots that the edge trusts now.
    Roots {
        /// The SHA-256 of each root, in hexadecimal.
        roots: Vec<String>,
    },
    /// The edge keeps the revocations of these CRLs. Edges of earlier versions do not report it.
    Crls {
        /// SHA-256 of the text in [`GatewayMessage::Crls`], in hexadecimal.
        digest: String,
    },
    /// Health of the upstreams has changed. Gateways of earlier versions ignore it.
    Health {
        /// Node ports whose health checks fail, at most [`crate::wire::MAX_UNHEALTHY_PORTS`].
        unhealthy: Vec<u16>,
    },
    /// Heartbeat of another node of the edge's pool, which has lost its gateways.
    DelegatedHeartbeat(Box<DelegatedHeartbeat>),
    /// Message of a later edge version.
    #[serde(other)]
    Unknown,
}

/// Error of a control stream.
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
    /// A line is not a valid message.
    #[error("a control message is malformed: {0}")]
    Malformed(#[from] serde_json::Error),
    /// No message arrived within this time.
    #[error("no response to the hello within {0:?}")]
    TooSlow(Duration),
}

/// One end of a control stream. Reading is cancel-safe.
#[derive(Debug)]
pub struct ControlStream {
    pub(crate) sender: StreamSender,
    receiver: StreamReceiver,
    /// Lines that are not sent yet, because the other end's window is full.
    write_buffer: Bytes,
    read_buffer: BytesMut,
    /// Number of bytes of `read_buffer` that are known to contain no end of a line.
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
    /// If the stream is gone, or the line is too long.
    pub async fn send<M: Serialize>(&mut self, message: &M) -> Result<(), ControlStreamError> {
        self.enqueue(message)?;
        poll_fn(|cx| self.poll_send(cx)).await
    }

    /// Sends bytes as they are. For tests of the other end: the bytes need not be a valid line.
    ///
    /// # Errors
    /// If the stream is gone.
    #[doc(hidden)]
    pub async fn send_raw(&mut self, bytes: Bytes) -> Result<(), ControlStreamError> {
        Ok(self.sender.send_data(bytes).await?)
    }

    /// Queues one line, which [`ControlStream::exchange`] sends.
    ///
    /// # Errors
    /// If the line cannot be written, or is longer than [`MAX_MESSAGE`]: the other end would end the stream because of it. The queued
    /// lines are unchanged then.
    pub fn enqueue<M: Serialize>(&mut self, message: &M) -> Result<(), ControlStreamError> {
        let mut buffer = Vec::from(std::mem::take(&mut self.write_buffer));
        let queued = buffer.len();
        let written = serde_json::to_writer(&mut buffer, message).map_err(Into::into);
        let result = written.and_then(|()| {
            if buffer.len() - queued > MAX_MESSAGE {
                return Err(ControlStreamError::TooLong);
            }
            Ok(())
        });
        match result {
            Ok(()) => buffer.push(b'\n'),
            Err(_) => buffer.truncate(queued),
        }
        self.write_buffer = buffer.into();
        result
    }

    /// Whether queued lines are not sent yet.
    pub fn has_unsent(&self) -> bool {
        !self.write_buffer.is_empty()
    }

    /// Returns the next message.
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
                if self.read_buffer.is_empty() {
                    // An idle tunnel keeps no memory for it.
                    self.read_buffer = BytesMut::new();
                }
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

    /// Returns the next message like [`ControlStream::receive`], within a time limit.
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

/// Parses one line of a control stream.
///
/// # Errors
/// If the line is too long or is not the expected message.
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
        assert!(
            !silent.contains("site") && !silent.contains("service_ports"),
            "{silent}"
        );
        let EdgeMessage::Welcome(heard) = parse_message(silent.as_bytes()).unwrap() else {
            panic!("a welcome is one");
        };
        assert_eq!(heard.site, None);
        // An edge of an older version handles this as a message of a later gateway, like any unknown message.
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
    fn dismissals_keep_their_words_on_the_wire() {
        let words = ["superseded", "unwelcome", "malformed", "full"];
        let reasons = [
            GoAway::Superseded,
            GoAway::NotAdmitted,
            GoAway::Malformed,
            GoAway::Full,
        ];
        assert_eq!(serde_json::json!(reasons), serde_json::json!(words));
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
