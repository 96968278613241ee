//! Copies of a session's bytes: to a local socket, or to standard input and output.
//!
//! Each direction ends by itself, so a half-closed connection works. A session that breaks is an error, and the local socket is
//! reset behind the last bytes, so that no program takes an aborted transfer for a complete one.

use std::io::{self, IsTerminal};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use causeway_rt::copy::{ByteCounters, CopyOutcome, relay_connection};
use causeway_rt::socket::ResetOnClose;
use futures_util::FutureExt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::time::timeout;

/// Size of the buffer of each direction of standard input and output.
const BUFFER_BYTES: usize = 64 * 1024;
/// Maximum time to write the last bytes of a session that accepts no more bytes.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(10);

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
    let relaying = relay_connection(local, session, Arc::<ByteCounters>::default(), false);
    relaying.map(into_result)
}

/// Returns the error of an outcome of either side.
///
/// # Errors
/// If either side broke.
pub(crate) fn into_result(outcome: CopyOutcome<io::Error>) -> io::Result<()> {
    match outcome {
        CopyOutcome::Clean => Ok(()),
        CopyOutcome::Socket(error) | CopyOutcome::Stream(error) => Err(error),
    }
}

/// Copies between standard input and output and a session. Standard output is closed as soon as the session has no more bytes.
/// The end of the session ends the relay if standard input is a terminal, because a person then waits for the prompt. It also
/// does if this process cannot close its standard output, because only the end of the process then tells the reader.
///
/// # Errors
/// If the session breaks, or standard output cannot be written.
pub(crate) async fn relay_stdio<S: AsyncRead + AsyncWrite>(session: S) -> io::Result<()> {
    let ends_with_session = io::stdin().is_terminal() || !CLOSES_STANDARD_OUTPUT;
    let stdio = (tokio::io::stdin(), tokio::io::stdout());
    relay_halves(stdio, close_standard_output, session, ends_with_session).await
}

/// Copies between an input and an output and a session. `close_output` is called as soon as the session has no more bytes. The relay
/// ends then, or also waits for the end of the input.
async fn relay_halves<S: AsyncRead + AsyncWrite>(
    (mut input, mut output): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    close_output: impl FnOnce() -> io::Result<()>,
    session: S,
    ends_with_session: bool,
) -> io::Result<()> {
    let (mut from_session, mut to_session) = split(session);
    let mut upload = pin!(async {
        copy(&mut input, &mut to_session).await?;
        to_session.shutdown().await
    });
    let mut download = pin!(async {
        copy(&mut from_session, &mut output).await?;
        close_output()
    });
    tokio::select! {
        biased;
        ended = &mut download => match ended {
            Ok(()) if !ends_with_session => upload.await,
            ended => ended,
        },
        sent = &mut upload => match sent {
            Ok(()) => download.await,
            Err(error) => {
                // The last bytes of a session that was reset can still be read.
                let _ = timeout(DELIVERY_TIMEOUT, download).await;
                Err(error)
            }
        }
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
    use tokio::io::Interest;
    use tokio::net::{TcpListener, TcpStream};

    const LAST: &[u8] = &[7; 30_000];

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

    /// The session was reset behind its last bytes, while there are bytes to write to it.
    async fn reset_session() -> TcpStream {
        let (session, mut node) = pair().await;
        node.write_all(LAST).await.unwrap();
        node.abort();
        drop(node);
        session.ready(Interest::ERROR).await.unwrap();
        session
    }

    #[tokio::test]
    async fn a_program_that_sends_gets_the_last_bytes_before_a_reset() {
        let (mut program, local) = pair().await;
        program.write_all(b"upload").await.unwrap();
        relay_socket(local, reset_session().await)
            .await
            .unwrap_err();
        let mut received = Vec::new();
        let error = program.read_to_end(&mut received).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(received, LAST);
    }

    #[tokio::test]
    async fn standard_output_gets_the_last_bytes_before_a_reset() {
        let input = vec![7; 1 << 20];
        for ends_with_session in [false, true] {
            let mut output = Vec::new();
            let ends = (&input[..], &mut output);
            let closing = || panic!("no end in order");
            let session = reset_session().await;
            let relaying = relay_halves(ends, closing, session, ends_with_session);
            relaying.await.unwrap_err();
            assert_eq!(output, LAST);
        }
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
