//! The subcommands: one file each, which takes configuration or arguments and has a function `run`.
//!
//! `prepare` reads the configuration before the runtime starts, because telemetry needs it, and because an invalid
//! configuration must have no effects.

mod admin_client;
mod bootstrap;
mod ca;
mod ca_gateways;
mod ca_rotate;
mod client;
mod connect;
mod data_dir;
mod demo;
mod edge;
mod forward;
mod gateway;
mod health;
#[cfg(feature = "k8s")]
mod k8s;
mod kubernetes;
mod local_proxy;
mod login;
mod man;
mod manifests;
mod node;
mod nodes;
mod pins;
mod policy;
mod reload;
mod rlimit;
mod ssh;
mod state;
mod status;
mod supervise;
mod token;

use std::fs;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;

use causeway_config::Log;
use clap::CommandFactory;

use crate::cli::{self, AccessCommand, Cli, Command, ConfigKind, RunArgs};
use crate::config_loader::{self, ConfigKey, ConfigSources, ProcessConfig, RejectedConfig, keys};
use crate::output::{self, errln, explain, outln};
use crate::reference;
use crate::telemetry;

/// Environment variables that name a proxy for other programs.
const PROXY_VARIABLES: &[(&str, &str)] = &[
    ("proxy", "HTTPS_PROXY"),
    ("proxy", "https_proxy"),
    ("no_proxy", "NO_PROXY"),
    ("no_proxy", "no_proxy"),
];

/// Command that is ready to run once the configuration is known.
pub(crate) struct PreparedCommand {
    pub(crate) log: Log,
    /// Warnings to log at the start.
    pub(crate) warnings: Vec<String>,
    /// Path of the audit log's file.
    pub(crate) audit_log_path: Option<PathBuf>,
    /// Whether a thread of the command may be reading standard input when the command ends.
    pub(crate) reads_stdin: bool,
    pub(crate) future: Pin<Box<dyn Future<Output = anyhow::Result<()>>>>,
}

impl PreparedCommand {
    fn new(log: Log, future: impl Future<Output = anyhow::Result<()>> + 'static) -> Self {
        Self {
            log,
            warnings: Vec::new(),
            audit_log_path: None,
            reads_stdin: false,
            future: Box::pin(future),
        }
    }

    fn with_warnings(self, warnings: Vec<String>) -> Self {
        Self { warnings, ..self }
    }

    fn with_audit_log(self, audit_log_path: Option<PathBuf>) -> Self {
        Self {
            audit_log_path,
            ..self
        }
    }

    fn reading_stdin(self) -> Self {
        Self {
            reads_stdin: true,
            ..self
        }
    }

    /// Prepares a command that ends by itself. Its output is its result, so only errors are logged.
    fn one_shot(future: impl Future<Output = anyhow::Result<()>> + 'static) -> Self {
        let log = Log {
            filter: "warn".into(),
            ..Log::default()
        };
        Self::new(log, future)
    }
}

/// Whether the command runs a process with a configuration. The log of such a process warns of variables that the process
/// does not read.
fn is_long_running(command: &Command) -> bool {
    match command {
        Command::Gateway(_) => true,
        Command::Edge(edge) => edge.command.is_none(),
        _ => false,
    }
}

/// Reads the inputs of the command. Returns `None` if the command has already finished.
pub(crate) fn prepare(command: Command) -> anyhow::Result<Option<PreparedCommand>> {
    if !is_long_running(&command) {
        warn_of_unknown_variables();
    }
    Ok(Some(match command {
        Command::Gateway(cli::Gateway {
            take_over,
            await_stop,
            run,
        }) => match load_config(run, &[], gateway::check)? {
            Some((config, sources, warnings)) => {
                let (log, audit) = (config.log.clone(), config.audit_log.0.clone());
                PreparedCommand::new(log, gateway::run(config, sources, (take_over, await_stop)))
                    .with_audit_log(audit)
                    .with_warnings(warnings)
            }
            None => return Ok(None),
        },
        Command::Supervise(args) => PreparedCommand::one_shot(supervise::run(args)),
        Command::Edge(cli::Edge {
            command: Some(cli::EdgeCommand::Leave(args)),
            ..
        }) => return edge::leave(&args).map(|()| None),
        Command::Edge(cli::Edge { run, rejoin, .. }) => {
            match load_config(run, PROXY_VARIABLES, edge::check)? {
                Some((config, sources, warnings)) => {
                    PreparedCommand::new(config.log.clone(), edge::run(config, sources, rejoin))
                        .with_warnings(warnings)
                }
                None => return Ok(None),
            }
        }
        Command::Demo(demo) => PreparedCommand::one_shot(demo::run(demo)),
        Command::Status(status) => PreparedCommand::one_shot(status::run(status)),
        Command::Health(health) => PreparedCommand::one_shot(health::run(health)),
        Command::Reload(reload) => PreparedCommand::one_shot(reload::run(reload)),
        // The command reads and writes files only, so it needs no runtime.
        Command::Bootstrap(args) => return bootstrap::run(&args).map(|()| None),
        Command::Ca(subcommand) => PreparedCommand::one_shot(ca::run(subcommand)),
        Command::Node(node) => PreparedCommand::one_shot(node::run(node)),
        Command::Token(token) => PreparedCommand::one_shot(token::run(token)),
        Command::State(state) => PreparedCommand::one_shot(state::run(state)),
        Command::Client(client) => return client::run(client).map(|()| None),
        Command::Access(command) => return prepare_access(command),
        #[cfg(feature = "k8s")]
        Command::K8s(subcommand) => return k8s::run(subcommand).map(|()| None),
        Command::Policy(policy) => return policy::run(policy).map(|()| None),
        Command::Completions { shell } => return print_completions(shell).map(|()| None),
        Command::Man { directory } => return man::run(&directory).map(|()| None),
        Command::Config(cli::Config::Schema { side }) => return print_schema(side).map(|()| None),
        Command::Errors => {
            outln!("{}", reference::errors_table())?;
            return Ok(None);
        }
        Command::Openapi { side } => return print(&reference::openapi(side)),
        Command::Reference { page } => return print(&reference::page(page)),
    }))
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

/// Prints a text. The command has then finished.
fn print(text: &str) -> anyhow::Result<Option<PreparedCommand>> {
    output::write(format_args!("{text}")).map(|()| None)
}

/// Prints the JSON Schema of a configuration.
fn print_schema(side: ConfigKind) -> anyhow::Result<()> {
    let text = match side {
        ConfigKind::Gateway => config_loader::json_schema::<causeway_gateway::config::Config>(),
        ConfigKind::Edge => config_loader::json_schema::<causeway_edge::config::Config>(),
    };
    output::write(format_args!("{text}"))
}

/// `EX_CONFIG` of `sysexits.h`, which systemd shows as `CONFIG`.
const EXIT_CONFIG: u8 = 78;

/// Returns the exit code of a failed process. A supervisor restarts the process after 1 and not after [`EXIT_CONFIG`]:
/// neither waiting nor another attempt creates a CA or repairs a token.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    if let Some(child) = error.downcast_ref::<supervise::ChildFailed>() {
        return child.exit_code().map_or(ExitCode::FAILURE, ExitCode::from);
    }
    let edge = error.downcast_ref::<causeway_edge::Error>();
    let gateway = error.downcast_ref::<causeway_gateway::BindError>();
    if edge.is_some_and(causeway_edge::Error::is_final)
        || gateway.is_some_and(causeway_gateway::BindError::is_final)
    {
        ExitCode::from(EXIT_CONFIG)
    } else {
        ExitCode::FAILURE
    }
}

/// Whether a child process has already logged the failure: its reason stays the last line of the log.
pub(crate) fn is_reported(error: &anyhow::Error) -> bool {
    let child = error.downcast_ref::<supervise::ChildFailed>();
    child.is_some_and(|child| child.exit_code().is_some())
}

/// Prints the completion script of a shell for commands and flags.
fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    // Written to memory first: the generator panics if it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "causeway", &mut script);
    output::write(format_args!("{}", String::from_utf8(script)?))
}

/// Returns the configuration with its sources, or `None` if it was only to be checked and is valid. `check` reads the files
/// that the configuration names.
fn load_config<C: ProcessConfig + Send + Sync + 'static>(
    run_args: RunArgs<C>,
    fallbacks: &'static [(&'static str, &'static str)],
    check: impl FnOnce(&C) -> anyhow::Result<()>,
) -> anyhow::Result<Option<(C, ConfigSources, Vec<String>)>> {
    let sources = ConfigSources {
        file: run_args.config,
        environment: environment(),
        flags: run_args.keys.values,
        fallbacks,
    };
    let warnings = unknown_variables::<C>(&sources);
    if run_args.check_config {
        for warning in warnings {
            errln!("warning: {warning}");
        }
        // A single configuration is printed for people.
        let loaded = config_loader::load_with_files::<C>(&sources);
        let config = loaded.map_err(|rejected| RejectedConfig::from(rejected.faults))?;
        telemetry::effective_filter(config.as_ref())?;
        check(&config).map_err(rejected_config)?;
        outln!("the configuration is valid")?;
        return Ok(None);
    }
    let config = config_loader::load::<C>(&sources)?;
    Ok(Some((config, sources, warnings)))
}

/// Returns an error in a file that a configuration names as a fault of that configuration.
fn rejected_config(error: anyhow::Error) -> RejectedConfig {
    error
        .downcast()
        .unwrap_or_else(|error| RejectedConfig::from(vec![explain(&error)]))
}

fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, text)| Some((name.into_string().ok()?, text.into_string().ok()?)))
        .collect()
}

/// Returns a warning for each variable that a process of this configuration does not read.
fn unknown_variables<C: ProcessConfig>(sources: &ConfigSources) -> Vec<String> {
    let settable_keys = keys::<C>().into_iter().filter(|key| key.settable);
    let known_variables: Vec<_> = settable_keys
        .map(|key| key.variable())
        .chain(command_variables())
        .collect();
    let file = sources
        .file
        .as_ref()
        .and_then(|file| fs::read_to_string(file).ok());
    let flags = sources.flags.iter().flat_map(|(_, texts)| texts);
    let texts: Vec<&str> = flags.chain(file.as_ref()).map(String::as_str).collect();
    config_loader::unknown_variable_warnings(&sources.environment, &known_variables, &texts)
}

/// Returns the variables that set flags of commands and are no configuration keys.
fn command_variables() -> Vec<String> {
    fn collect(command: &clap::Command, found: &mut Vec<String>) {
        let variables = command.get_arguments().filter_map(clap::Arg::get_env);
        found.extend(variables.map(|name| name.to_string_lossy().into_owned()));
        for command in command.get_subcommands() {
            collect(command, found);
        }
    }
    let mut found = Vec::new();
    collect(&Cli::command(), &mut found);
    found
}

/// Warns of variables that no command reads.
fn warn_of_unknown_variables() {
    let environment = environment();
    if !environment
        .iter()
        .any(|(name, _)| name.starts_with("CAUSEWAY_"))
    {
        return;
    }
    let mut known_variables = command_variables();
    let mut add_keys =
        |keys: Vec<ConfigKey>| known_variables.extend(keys.iter().map(ConfigKey::variable));
    add_keys(keys::<causeway_gateway::config::Config>());
    add_keys(keys::<causeway_edge::config::Config>());
    for warning in config_loader::unknown_variable_warnings(&environment, &known_variables, &[]) {
        errln!("warning: {warning}");
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let full = std::io::Error::other("no space left");
        let error = anyhow::Error::new(full).context("cannot write x: no space left");
        let error = Err::<(), _>(error).context("cannot join").unwrap_err();
        assert_eq!(
            super::explain(&error),
            "cannot join: cannot write x: no space left"
        );
    }
}
