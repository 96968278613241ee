//! Run with: cargo run --example authorizer
//!
//! An `Authorize` of one's own, which decides at every stream, before the edge hears of it: the group
//! `ops` may do everything, `readers` may only GET. Two callers with bearer tokens show an allow and
//! a deny; no edge runs here, so what is allowed ends at a node that is not connected.

use std::{error::Error, net::SocketAddr, sync::Arc, time::Duration};

use causeway_certs::{Access, Ca, CallerTokens, NodeName, Store, TrustDomain};
use causeway_gateway::Gateway;
use causeway_gateway::config::{Front, Kind, Listen};
use causeway_gateway::proxy::authorize::{Act, Ask, Authorize, Verdict};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

