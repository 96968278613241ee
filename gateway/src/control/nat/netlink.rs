//! Netlink messages to the kernel's netfilter, and its answers.
//!
//! This module owns the socket, and does not interpret the messages. The kernel executes a message before the send returns. An
//! answer is therefore available at once or not at all, and nothing here waits.

use netlink_bindings::{builtin::Nlmsghdr, traits::NetlinkChained};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::{
    errno::Errno,
    sys::socket::{setsockopt, sockopt::SndBufForce},
};
use std::io;

/// Size of the socket buffer in bytes. A batch is one message, in which 100,000 addresses fit.
const SOCKET_BUFFER_SIZE: usize = 8 << 20;
/// Maximum size of one part of a list from the kernel.
const RECEIVE_CHUNK_SIZE: usize = 64 << 10;
/// `NLMSG_ERROR`, which is also an acknowledgement, and `NLMSG_DONE`: the last messages of an answer, which contain its result.
const RESULT_MESSAGES: [u16; 2] = [2, 3];

/// Error of a request that the kernel did not execute.
#[derive(Debug, thiserror::Error)]
#[error("{message_name}{cause}")]
pub struct NetlinkError {
    /// Name of the message, if it has one.
    message_name: String,
    /// The cause.
    pub(super) cause: io::Error,
}

impl From<io::Error> for NetlinkError {
    fn from(cause: io::Error) -> Self {
        let what = String::new();
        Self {
            message_name: what,
            cause,
        }
    }
}

/// Socket to netfilter.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens the socket, in the network namespace of this thread.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_non_blocking(true)?;
        socket.set_cap_ack(true)?;
        // Fails only for processes without permission for nftables; later operations report that error.
        let _ = setsockopt(&socket, SndBufForce, &SOCKET_BUFFER_SIZE);
        socket.set_rx_buf_sz(i32::try_from(SOCKET_BUFFER_SIZE).unwrap_or(i32::MAX))?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Reserves this many sequence numbers, and returns the first.
    pub(super) fn reserve(&mut self, messages: u32) -> u32 {
        let first = self.sequence.wrapping_add(1);
        self.sequence = self.sequence.wrapping_add(messages);
        first
    }

    /// Sends these messages and requests an acknowledgement of each.
    ///
    /// # Errors
    /// The first error of the kernel.
    pub(super) fn send_acknowledged(
        &self,
        messages: &impl NetlinkChained,
    ) -> Result<(), NetlinkError> {
        let mut answers = 0;
        let asked = self.request(messages.payload(), |_, _| answers += 1);
        asked.map_err(|(sequence, cause)| {
            let index = sequence.and_then(|sequence| messages.get_index(sequence));
            let name = index.map(|place| format!("{} ({place}): ", messages.name(place)));
            NetlinkError {
                message_name: name.unwrap_or_default(),
                cause,
            }
        })?;
        if answers == 0 {
            return Err(io::Error::other("the kernel does not answer").into());
        }
        Ok(())
    }

    /// Sends a request, and passes the kind and body of each message of the answer to `on_message`.
    ///
    /// # Errors
    /// The first error of the kernel, and the number of the faulty message if there is one.
    pub(super) fn request(
        &self,
        messages: &[u8],
        mut on_message: impl FnMut(u16, &[u8]),
    ) -> Result<(), (Option<u32>, io::Error)> {
        self.socket
            .send(messages, 0)
            .map_err(|error| (None, error))?;
        let mut first_error = None;
        let mut chunk = Vec::with_capacity(RECEIVE_CHUNK_SIZE);
        loop {
            chunk.clear();
            match self.socket.recv(&mut chunk, 0) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err((None, error)),
            }
            for_each_message(&chunk, |header, body| {
                match message_error(header.r#type, body) {
                    Some(error) => {
                        first_error.get_or_insert((Some(header.seq), error));
                    }
                    None => on_message(header.r#type, body),
                }
            });
        }
        first_error.map_or(Ok(()), Err)
    }
}

/// Returns one message with its header.
pub(super) fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut header = Nlmsghdr::new();
    header.len = u32::try_from(Nlmsghdr::len() + body.len()).unwrap_or(u32::MAX);
    header.r#type = kind;
    header.flags = flags;
    [header.as_slice(), body].concat()
}

/// Passes the header and body of each received message to `see`.
fn for_each_message(mut received: &[u8], mut see: impl FnMut(&Nlmsghdr, &[u8])) {
    while let Some(header) = received.get(..Nlmsghdr::len()) {
        let Some(header) = Nlmsghdr::new_from_slice(header) else {
            return;
        };
        let length = usize::try_from(header.len).unwrap_or(usize::MAX);
        let Some(body) = received.get(Nlmsghdr::len()..length) else {
            return;
        };
        see(&header, body);
        let next = length.next_multiple_of(4).min(received.len());
        received = &received[next..];
    }
}

/// Returns the error of a message, if it has one; an acknowledgement has none.
fn message_error(kind: u16, body: &[u8]) -> Option<io::Error> {
    let code = i32::from_ne_bytes(body.get(..4)?.try_into().ok()?);
    (RESULT_MESSAGES.contains(&kind) && code < 0).then(|| Errno::from_raw(-code).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netlink_errors_are_separated_from_acknowledgements() {
        let refused = (-1_i32).to_ne_bytes();
        let sent = [
            message(2, 0, &refused),
            message(2, 0, &[0; 4]),
            message(9, 0, b"abc\0"),
        ];
        let mut seen = Vec::new();
        for_each_message(&sent.concat(), |header, body| {
            let kind = header.r#type;
            seen.push((kind, message_error(kind, body).map(|error| error.kind())));
        });
        let denied = Some(io::ErrorKind::PermissionDenied);
        assert_eq!(seen, [(2, denied), (2, None), (9, None)]);
    }

    #[test]
    fn truncated_messages_are_skipped() {
        let whole = message(9, 0, b"abcd");
        for cut in 0..whole.len() {
            for_each_message(&whole[..cut], |_, _| panic!("{cut}"));
        }
    }
}
