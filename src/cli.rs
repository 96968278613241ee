//! The command line: the clap tree, nothing else.

mod access;
#[cfg(target_os = "linux")]
pub(crate) mod operator;

use std::path::PathBuf;

pub(crate) use access::{
    AccessCommand, Connect, Forward, LocalProxy, Login, Nodes, NodesFormat, ProfileArg, Ssh,
    SshConfig,
};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Last paragraph of the help. Only Linux has the command `errors`.
const AFTER_HELP: &str = if cfg!(target_os = "linux") {
    "If a command fails, search the page \"Troubleshoot\" of the book (docs/howto/troubleshoot.md) for the words of its message. \
        `causeway errors` explains the reasons in responses."
} else {
    "If a command fails, search the page \"Troubleshoot\" of the book (docs/howto/troubleshoot.md) for the words of its message."
};

/// Reverse tunnel and proxy: reach servers on nodes behind NAT by HTTPS, as if they were local.
#[derive(Debug, Parser)]
#[command(
    name = "causeway",
    version,
    max_term_width = 100,
    after_help = AFTER_HELP
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Name of the program as a plugin of kubectl.
const KUBECTL_PLUGIN: &str = "kubectl-causeway";

impl Cli {
    /// Parses the arguments of this process. The usage texts have the name by which the user has called the program: `causeway`,
    /// or `kubectl causeway` for a plugin of kubectl.
    pub(crate) fn try_parse_as_called() -> Result<Self, clap::Error> {
        let program = std::env::args_os().next().map(PathBuf::from);
        let name = program.as_deref().and_then(|program| program.file_stem());
        let mut command = Self::command();
        if name.is_some_and(|name| name == KUBECTL_PLUGIN) {
            command = command.bin_name("kubectl causeway");
        }
        let cli = Self::from_arg_matches_mut(&mut command.try_get_matches()?)?;
        if let Command::Access(AccessCommand::Forward(forward)) = &cli.command {
            forward.check()?;
        }
        Ok(cli)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[cfg(target_os = "linux")]
    #[command(flatten)]
    Operator(operator::OperatorCommand),
    #[command(flatten)]
    Access(AccessCommand),
    /// Print a completion script for a shell
    Completions {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of all commands to a directory
    Man {
        /// Directory for the pages; created if absent
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }
}
