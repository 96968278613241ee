//! The subcommands of every system: one file each, which takes arguments and has a function `run`.
//!
//! `prepare` reads the inputs of a command before the runtime starts. On Linux it also prepares those of `operator`.

mod connect;
mod forward;
mod local_proxy;
mod login;
mod man;
mod nodes;
mod ssh;

use std::process::ExitCode;

use causeway_config::LogFormat;
use clap::CommandFactory;

use crate::cli::{AccessCommand, Cli, Command};
#[cfg(target_os = "linux")]
use crate::operator;
use crate::output;
use crate::prepared_command::PreparedCommand;
use crate::{telemetry, variables};

/// Reads the inputs of the command. Returns `None` if the command has already finished.
pub(crate) fn prepare(command: Command) -> anyhow::Result<Option<PreparedCommand>> {
    if !is_long_running(&command) {
        variables::warn_of_unknown();
    }
    match command {
        #[cfg(target_os = "linux")]
        Command::Operator(command) => operator::prepare(command),
        Command::Access(command) => prepare_access(command),
        Command::Completions { shell } => print_completions(shell).map(|()| None),
        Command::Man { directory } => man::run(&directory).map(|()| None),
    }
}

/// Whether the command runs a process with a configuration, whose log warns of unknown variables.
fn is_long_running(command: &Command) -> bool {
    match command {
        #[cfg(target_os = "linux")]
        Command::Operator(command) => operator::is_long_running(command),
        _ => false,
    }
}

/// Reports the failure of a command, and returns its exit code.
pub(crate) fn report(error: &anyhow::Error, format: LogFormat) -> ExitCode {
    #[cfg(target_os = "linux")]
    if let Some(code) = operator::report(error, format) {
        return code;
    }
    telemetry::report_failure(format, error);
    ExitCode::FAILURE
}

/// Prepares a command of a user's own machine.
fn prepare_access(command: AccessCommand) -> anyhow::Result<Option<PreparedCommand>> {
    Ok(Some(match command {
        AccessCommand::Login(login) => PreparedCommand::one_shot(login::run(login)),
        AccessCommand::Nodes(nodes) => PreparedCommand::one_shot(nodes::run(nodes)),
        AccessCommand::Connect(connect) => {
            PreparedCommand::one_shot(connect::run(connect)).reading_stdin()
        }
        AccessCommand::Ssh(args) => return ssh::run(&args).map(|()| None),
        AccessCommand::SshConfig(args) => PreparedCommand::one_shot(ssh::print_config(args)),
        AccessCommand::Forward(forward) => PreparedCommand::one_shot(forward::run(forward)),
        AccessCommand::LocalProxy(args) => PreparedCommand::one_shot(local_proxy::run(args)),
    }))
}

/// Prints the completion script of a shell for commands and flags.
fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    // Written to memory first: the generator panics if it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "causeway", &mut script);
    output::write(format_args!("{}", String::from_utf8(script)?))
}
