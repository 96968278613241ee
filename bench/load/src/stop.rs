//! Stop condition: SIGTERM, SIGINT, or the end of a standard input that is a pipe.
//!
//! Only a pipe counts: a script's background jobs have `/dev/null` in its place, which ends at once.

use anyhow::Context;
use causeway_rt::task::TaskGroup;
use std::{fs::File, os::fd::AsFd, os::unix::fs::FileTypeExt};
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe::Receiver,
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_util::sync::CancellationToken;
use tracing::Span;

/// Stop signal and its sources.
#[derive(Debug)]
pub(crate) struct Stop {
    /// Cancelled when the process has to stop.
    pub(crate) token: CancellationToken,
    _listening: TaskGroup,
}

/// Begins to listen.
///
/// # Errors
/// If the system refuses the signals.
pub(crate) fn listen() -> anyhow::Result<Stop> {
    let take = |kind| signal(kind).context("cannot listen to signals");
    let terminate = take(SignalKind::terminate())?;
    let interrupt = take(SignalKind::interrupt())?;
    let (token, listening) = (CancellationToken::new(), TaskGroup::default());
    let stop = token.clone();
    listening.spawn(Span::none(), async move {
        wait(terminate, interrupt).await;
        stop.cancel();
    });
    Ok(Stop {
        token,
        _listening: listening,
    })
}

async fn wait(mut terminate: Signal, mut interrupt: Signal) {
    let ended = async {
        match input() {
            Some(pipe) => exhaust(pipe).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = ended => {}
    }
}

/// Standard input, if it is a pipe.
fn input() -> Option<Receiver> {
    let own = std::io::stdin().as_fd().try_clone_to_owned().ok()?;
    let file = File::from(own);
    let kind = file.metadata().ok()?.file_type();
    if !kind.is_fifo() {
        return None;
    }
    Receiver::from_file(file).ok()
}

async fn exhaust(mut pipe: Receiver) {
    let mut scrap = [0; 256];
    while let Ok(1..) = pipe.read(&mut scrap).await {}
}
