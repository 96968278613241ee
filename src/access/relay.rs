//! Copies of a session's bytes: to a local socket, or to standard input and output.
//!
//! Each direction ends by itself, so a half-closed connection works. A session that breaks is an error, and the local socket is
//! reset, so that no program takes an aborted transfer for a complete one.

use std::io::{self, IsTerminal};

use causeway_rt::socket::{ResetOnClose, ResetUnlessComplete};
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional_with_sizes, split,
};

/// Size of the buffer of each direction.
const BUFFER_BYTES: usize = 64 * 1024;

/// Copies between a local connection and a session until both directions have ended. If the future is dropped before, both are
/// reset.
///
/// # Errors
/// If either side breaks.
pub(crate) fn relay_socket<L, S>(local: L, session: S) -> impl Future<Output = io::Result<()>>
where
    L: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    // Not an async function, because such a function would not have the sockets in their guard before its first poll.
    let mut local = ResetUnlessComplete::new(local);
    let mut session = ResetUnlessComplete::new(session);
    async move {
        let (near, far) = (&mut local.socket, &mut session.socket);
        copy_bidirectional_with_sizes(near, far, BUFFER_BYTES, BUFFER_BYTES).await?;
        local.complete();
        session.complete();
        Ok(())
    }
}

/// Copies between standard input and output and a session. Standard output is closed as soon as the session has no more bytes.
/// The end of the session ends the relay if standard input is a terminal, because a person then waits for the prompt. It also
/// does if this process cannot close its standard output, because only the end of the process then tells the reader.
///
/// # Errors
/// If the session breaks, or standard output cannot be written.
pub(crate) async fn relay_stdio<S: AsyncRead + AsyncWrite>(session: S) -> io::Result<()> {
    let (mut from_session, mut to_session) = split(session);
    let upload = async {
        copy(&mut tokio::io::stdin(), &mut to_session).await?;
        to_session.shutdown().await
    };
    let download = async {
        copy(&mut from_session, &mut tokio::io::stdout()).await?;
        close_standard_output()
    };
    if io::stdin().is_terminal() || !CLOSES_STANDARD_OUTPUT {
        let upload_failure = async {
            match upload.await {
                Ok(()) => std::future::pending().await,
                failure => failure,
            }
        };
        tokio::select! {
            ended = download => ended,
            failure = upload_failure => failure,
        }
    } else {
        tokio::try_join!(upload, download).map(drop)
    }
}

/// Copies until the end. Each chunk is flushed, because standard output would otherwise keep an incomplete line.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
    }
}

/// Whether [`close_standard_output`] does so. Rust has no safe function for it on Windows.
const CLOSES_STANDARD_OUTPUT: bool = cfg!(unix);

/// Closes standard output, so that the program behind a pipe reads its end while this process still sends.
#[cfg(unix)]
fn close_standard_output() -> io::Result<()> {
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdout(null)?)
}

#[cfg(not(unix))]
fn close_standard_output() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (near, accepted) = tokio::join!(connecting, listener.accept());
        (near.unwrap(), accepted.unwrap().0)
    }

    #[tokio::test]
    async fn each_direction_of_a_relay_ends_by_itself() {
        let (mut program, local) = pair().await;
        let (session, mut node) = pair().await;
        let both = async {
            program.write_all(b"question").await.unwrap();
            program.shutdown().await.unwrap();
            let mut text = String::new();
            node.read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "question");
            node.write_all(b"answer").await.unwrap();
            drop(node);
            text.clear();
            program.read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "answer");
        };
        let (ended, ()) = tokio::join!(relay_socket(local, session), both);
        ended.unwrap();
    }

    #[tokio::test]
    async fn a_broken_session_resets_the_program() {
        let (mut program, local) = pair().await;
        let (session, mut node) = pair().await;
        let both = async {
            node.write_all(b"half").await.unwrap();
            let mut half = [0; 4];
            program.read_exact(&mut half).await.unwrap();
            node.abort();
            drop(node);
            let error = program.read(&mut half).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        };
        let (ended, ()) = tokio::join!(relay_socket(local, session), both);
        ended.unwrap_err();
    }

    #[tokio::test]
    async fn an_abandoned_relay_resets_both_sides() {
        let (mut program, local) = pair().await;
        let (session, mut node) = pair().await;
        drop(relay_socket(local, session));
        for side in [&mut program, &mut node] {
            let error = side.read(&mut [0; 4]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
    }
}
