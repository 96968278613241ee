//! One file for each subcommand: arguments in, lines out, until the command is done or asked to stop.

mod app;
mod connect;
mod fleet;
mod idle;
mod join;
mod link;
mod link_queue;
mod mint;
mod readers;
mod slices;

use crate::{cli::Command, stop::Stop};

/// Runs one command.
///
/// # Errors
///
/// Returns the failure, with the address or the file.
pub(crate) async fn run(command: Command, stop: Stop) -> anyhow::Result<()> {
    match command {
        Command::App(asked) => app::run(&asked, stop).await,
        Command::Mint(asked) => mint::run(&asked),
        Command::Fleet(asked) => Box::pin(fleet::run(asked, stop)).await,
        Command::Join(asked) => Box::pin(join::run(asked, stop)).await,
        Command::Link(asked) => link::run(&asked, stop).await,
        Command::Idle(asked) => idle::run(asked, stop).await,
        Command::Connect(asked) => connect::run(asked, stop).await,
        Command::Slices(asked) => slices::run(asked, stop).await,
        Command::Readers(asked) => readers::run(asked, stop).await,
    }
}
