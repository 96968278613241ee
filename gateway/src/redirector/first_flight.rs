//! The first bytes of a client, kept until a gateway has answered.
//!
//! A gateway that hangs takes connections and answers nothing. A client that begins with TLS shows that: its `ClientHello` is
//! answered by a gateway at once. As long as all that the client has sent is in memory, and no byte has come back, another
//! gateway can be given the same. That is harmless for a handshake only, so a flight with anything else (a request in the
//! clear, TLS early data) is never sent twice, and whoever speaks another protocol is passed on as ever.

use causeway_tunnel::socket::Socket;
use std::{io, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep_until, timeout},
};

/// As much of a flight is kept; a `ClientHello` has 2 KiB at most in practice.
const MOST: usize = 16 * 1024;
/// Types of TLS records (RFC 8446 section 5.1).
const CHANGE_CIPHER_SPEC: u8 = 20;
const HANDSHAKE: u8 = 22;
/// Bytes before the content of a record.
const HEADER: usize = 5;

/// Bytes that a client has sent before any answer.
#[derive(Debug, Default)]
pub(super) struct FirstFlight(Vec<u8>);

/// Outcome of giving the first flight to a gateway.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Met {
    /// The gateway answers, or this is nothing of which that could be told.
    Answer,
    /// The gateway does not answer.
    Silence,
}

impl FirstFlight {
    /// Passes the flight to a gateway until that answers, or has not for as long as `bound`.
    ///
    /// # Errors
    /// If the client or the gateway has broken off, or the gateway takes nothing.
    pub(super) async fn pass(
        &mut self,
        client: &mut Socket,
        gateway: &mut TcpStream,
        bound: Duration,
    ) -> io::Result<Met> {
        timeout(bound, gateway.write_all(&self.0)).await??;
        let mut since = Instant::now();
        let (mut chunk, mut answer) = (vec![0; MOST], [0]);
        loop {
            let judged = self.is_whole_hello();
            let room = MOST - self.0.len();
            if room == 0 || !self.may_be_hello() {
                return Ok(Met::Answer);
            }
            tokio::select! {
                // An end is an answer as well. A reset is told once, and read as an end in order from then on.
                peeked = gateway.peek(&mut answer) => return peeked.map(|_| Met::Answer),
                () = sleep_until(since + bound), if judged => return Ok(Met::Silence),
                read = client.read(&mut chunk[..room]) => {
                    let read = read?;
                    let bytes = &chunk[..read];
                    self.0.extend_from_slice(bytes);
                    timeout(bound, gateway.write_all(bytes)).await??;
                    if read == 0 {
                        return Ok(Met::Answer);
                    }
                    since = Instant::now();
                }
            }
        }
    }

    /// Whether this is the beginning of a TLS handshake, as far as it goes.
    fn may_be_hello(&self) -> bool {
        let mut rest = self.0.as_slice();
        let mut first = true;
        while let Some(kind) = rest.first() {
            let is_handshake = *kind == HANDSHAKE || (*kind == CHANGE_CIPHER_SPEC && !first);
            if !is_handshake || rest.get(1).is_some_and(|major| *major != 3) {
                return false;
            }
            first = false;
            rest = record(rest).map_or(&[], |length| &rest[length..]);
        }
        true
    }

    /// Whether it is a whole number of such records.
    fn is_whole_hello(&self) -> bool {
        let mut rest = self.0.as_slice();
        while let Some(length) = record(rest) {
            rest = &rest[length..];
        }
        rest.is_empty() && !self.0.is_empty() && self.may_be_hello()
    }
}

/// The length of the record with which these bytes begin, if it is whole.
fn record(bytes: &[u8]) -> Option<usize> {
    let header = bytes.get(..HEADER)?;
    let length = HEADER + usize::from(u16::from_be_bytes([header[3], header[4]]));
    (bytes.len() >= length).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_tunnel::socket::Abort;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_reset_before_any_byte_is_no_end_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let pair = async || {
            let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
            (near.unwrap(), far.unwrap().0)
        };
        let ((mut gateway, far_gateway), (_client, client)) = (pair().await, pair().await);
        far_gateway.abort();
        drop(far_gateway);
        let (mut flight, mut client) = (FirstFlight::default(), Socket::from(client));
        let met = flight.pass(&mut client, &mut gateway, Duration::from_hours(1));
        let broken = met.await.unwrap_err();
        assert_eq!(broken.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn only_whole_records_of_a_handshake_are_waited_for_and_sent_again() {
        let hello = [22, 3, 1, 0, 3, 1, 2, 3];
        let change = [20, 3, 3, 0, 1, 1];
        let early = [23, 3, 3, 0, 1, 9];
        let of = |parts: &[&[u8]]| {
            let flight = FirstFlight(parts.concat());
            (flight.may_be_hello(), flight.is_whole_hello())
        };
        assert_eq!(of(&[]), (true, false));
        assert_eq!(of(&[&hello[..1]]), (true, false));
        assert_eq!(of(&[&hello[..7]]), (true, false));
        assert_eq!(of(&[&hello]), (true, true));
        assert_eq!(of(&[&hello, &change]), (true, true));
        assert_eq!(of(&[&hello, &change[..4]]), (true, false));
        assert_eq!(of(&[&hello, &change, &early]), (false, false));
        assert_eq!(of(&[&change]), (false, false));
        assert_eq!(of(&[b"GET / HTTP/1.1\r\n"]), (false, false));
    }
}
