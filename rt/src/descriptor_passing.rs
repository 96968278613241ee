//! Passing of file descriptors to another process over a unix stream socket (`SCM_RIGHTS`, `unix(7)`).
//!
//! Each descriptor travels with one byte, so that a receiver that reads one byte at a time gets exactly one descriptor.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

/// Byte that accompanies a descriptor.
const MARK: [u8; 1] = [b'F'];

/// Sends a descriptor. Blocks until the socket accepts it.
///
/// # Errors
/// The error of the system.
pub fn send_descriptor(stream: &UnixStream, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // The buffer has space for one descriptor.
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(
        stream,
        &[IoSlice::new(&MARK)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    if sent == MARK.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Receives a descriptor that [`send_descriptor`] has sent. It is closed when this process executes another program.
///
/// # Errors
/// The error of the system, or that the next byte comes without a descriptor.
pub fn receive_descriptor(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let missing = || io::Error::new(io::ErrorKind::InvalidData, "a descriptor was expected");
    descriptors.next().ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        os::fd::AsFd,
    };

    #[test]
    fn a_passed_listening_socket_accepts_after_the_sender_has_closed_it() {
        let (near, far) = UnixStream::pair().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        send_descriptor(&near, listener.as_fd()).unwrap();
        drop(listener);
        let inherited = TcpListener::from(receive_descriptor(&far).unwrap());
        assert_eq!(inherited.local_addr().unwrap(), address);
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"hello").unwrap();
        let mut received = [0; 5];
        inherited
            .accept()
            .unwrap()
            .0
            .read_exact(&mut received)
            .unwrap();
        assert_eq!(&received, b"hello");
    }

    #[test]
    fn a_byte_without_a_descriptor_is_an_error() {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(b"F").unwrap();
        let error = receive_descriptor(&far).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(near);
        let error = receive_descriptor(&far).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
