//! One caller's connection: where it was going, the gateway that takes it, and its bytes.
//!
//! 1. The kernel says where the caller was going; without that there is nobody to pass it on to.
//! 2. A gateway is dialled, and told in a PROXY v2 header who calls and where to. One that does not answer a TLS handshake is
//!    given up for the next one (`first_flight`).
//! 3. Bytes go both ways as they are: TLS is the caller's and the gateway's. A half that ends in order ends the other
//!    side's half; whatever else happens is a reset on both sides.

use super::{
    Passing,
    first_flight::{FirstFlight, Met},
    gateways::{Dialled, Gateways},
};
use causeway_tunnel::{
    listener::{Peer, original_destination},
    socket::{Abort, Socket},
};
use proxy_header::{ProxiedAddress, ProxyHeader};
use std::{io, net::SocketAddr};
use tokio::{
    io::{AsyncWriteExt, copy_bidirectional_with_sizes},
    net::TcpStream,
    time::timeout,
};

/// Bytes that are read at once, each way.
const CHUNK: usize = 16 * 1024;

/// Both connections, which are reset unless they end in order.
struct Session {
    caller: Socket,
    gateway: Option<TcpStream>,
    in_order: bool,
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.in_order {
            self.caller.abort();
            if let Some(gateway) = &self.gateway {
                gateway.abort();
            }
        }
    }
}

/// Passes a caller on until both sides have ended.
pub(super) async fn serve(passing: &Passing, caller: Socket, peer: Peer) {
    let original = original_destination(&caller);
    let mut session = Session {
        caller,
        gateway: None,
        in_order: false,
    };
    let (Peer::Tcp(from), Some(to)) = (peer, original) else {
        passing.metrics.failed("not_redirected");
        return tracing::debug!("a connection that no rule has led here");
    };
    let takers = passing.takers.load();
    let Some(gateways) = takers.for_destination(to, &passing.nodes) else {
        passing.metrics.failed("not_redirected");
        return tracing::debug!(%to, "a connection to what is not led here");
    };
    drop(takers);
    if let Err(error) = session.pass((from, to), passing, &gateways).await {
        tracing::debug!(%error, "a connection broke off");
    }
}

impl Session {
    async fn pass(
        &mut self,
        (from, to): (SocketAddr, SocketAddr),
        passing: &Passing,
        gateways: &Gateways,
    ) -> io::Result<()> {
        let header = header(from, to)?;
        let (timeouts, metrics) = (&passing.timeouts, &passing.metrics);
        let (mut flight, mut tried) = (FirstFlight::default(), Vec::new());
        loop {
            let dialled = gateways.dial(timeouts.open, &tried, (&passing.nodes, metrics));
            let Dialled { tcp, place } = match dialled.await {
                Ok(dialled) => dialled,
                Err(why) => {
                    lost(passing, to, &why);
                    return Ok(());
                }
            };
            let gateway = self.gateway.insert(tcp);
            timeout(timeouts.open, gateway.write_all(&header)).await??;
            let met = flight.pass(&mut self.caller, gateway, timeouts.answer);
            if met.await? == Met::Answer {
                gateways.answers(place);
                break;
            }
            metrics.gateway_failed();
            gateways.hangs(place);
            gateway.abort();
            tried.push(place);
        }
        let Some(gateway) = &mut self.gateway else {
            return Ok(());
        };
        passing.metrics.passed_on();
        copy_bidirectional_with_sizes(&mut self.caller, gateway, CHUNK, CHUNK).await?;
        self.in_order = true;
        Ok(())
    }
}

/// Counts a client whom no gateway takes, and says so now and then.
fn lost(passing: &Passing, to: SocketAddr, why: &str) {
    passing.metrics.failed("no_gateway");
    if let Some(callers) = passing.lost.happened() {
        let why = if why.is_empty() {
            "none answers in time (timeouts.answer)"
        } else {
            why
        };
        tracing::warn!(
            %to, callers, why,
            "no gateway takes callers of nodes' addresses: they are reset"
        );
    }
}

/// Who calls and where to, as a PROXY v2 header.
fn header(from: SocketAddr, to: SocketAddr) -> io::Result<Vec<u8>> {
    let canonical =
        |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let addresses = ProxiedAddress::stream(canonical(from), canonical(to));
    let mut bytes = Vec::with_capacity(52);
    let made = ProxyHeader::with_address(addresses).encode_v2(&mut bytes);
    made.map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::front::proxied;

    #[tokio::test]
    async fn a_front_reads_of_the_header_who_calls_and_where_to() {
        for (from, to) in [
            ("10.77.0.2:4000", "10.0.0.11:10250"),
            ("[fd77::2]:4000", "[fd00::11]:22"),
        ] {
            let bytes = header(from.parse().unwrap(), to.parse().unwrap()).unwrap();
            let read = proxied::read(&mut bytes.as_slice()).await;
            let read = read.unwrap().unwrap();
            assert_eq!(read.source.to_string(), from);
            assert_eq!(read.destination.to_string(), to);
        }
        // As a listener on [::] knows callers by IPv4.
        let mapped = header(
            "[::ffff:10.77.0.2]:4000".parse().unwrap(),
            "10.0.0.11:10250".parse().unwrap(),
        );
        let read = proxied::read(&mut mapped.unwrap().as_slice()).await;
        assert_eq!(read.unwrap().unwrap().source.to_string(), "10.77.0.2:4000");
    }
}
