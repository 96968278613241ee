//! The subcommands: one file each, configuration or arguments in, `run` out.
//!
//! `prepare` reads the configuration before the runtime stands, because telemetry needs
//! it, and because a fault in it must cost nothing.

mod admin_client;
mod bootstrap;
mod ca;
mod ca_rotate;
mod client;
mod data_dir;
mod demo;
mod edge;
mod gateway;
mod health;
#[cfg(feature = "k8s")]
mod k8s;
mod kubernetes;
mod man;
mod manifests;
mod node;
mod pins;
mod policy;
mod private_file;
mod reload;
mod rlimit;
mod status;
mod token;

use std::fs;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;

use causeway_config::Log;
use clap::CommandFactory;

use crate::cli::{self, Cli, Command, ConfigKind, RunArgs};
use crate::config_loader::{self, ConfigKey, ConfigSources, ProcessConfig, RejectedConfig, keys};
use crate::error_text::explain;
use crate::output::{self, errln, outln};
use crate::reference;
use crate::telemetry;

/// Environment variables that name a proxy to other programs.
const PROXY: &[(&str, &str)] = &[
    ("proxy", "HTTPS_PROXY"),
    ("proxy", "https_proxy"),
    ("no_proxy", "NO_PROXY"),
    ("no_proxy", "no_proxy"),
];

/// Command that is ready to run once the configuration is known.
pub(crate) struct PreparedCommand {
    pub(crate) log: Log,
    /// Settings of the log at the start.
    pub(crate) warnings: Vec<String>,
    /// The file of the audit log.
    pub(crate) audit: Option<PathBuf>,
    pub(crate) work: Pin<Box<dyn Future<Output = anyhow::Result<()>>>>,
}

impl PreparedCommand {
    fn new(log: Log, work: impl Future<Output = anyhow::Result<()>> + 'static) -> Self {
        Self {
            log,
            warnings: Vec::new(),
            audit: None,
            work: Box::pin(work),
        }
    }

    fn warning(self, warnings: Vec<String>) -> Self {
        Self { warnings, ..self }
    }

    fn audited(self, audit: Option<PathBuf>) -> Self {
        Self { audit, ..self }
    }

    /// A command that ends by itself: its output is its answer, so only trouble is logged.
    fn brief(work: impl Future<Output = anyhow::Result<()>> + 'static) -> Self {
        let log = Log {
            filter: "warn".into(),
            ..Log::default()
        };
        Self::new(log, work)
    }
}

/// Whether the command runs a process with a configuration, whose log warns of variables that are not its own.
fn runs(command: &Command) -> bool {
    match command {
        Command::Gateway(_) => true,
        Command::Edge(edge) => edge.command.is_none(),
        _ => false,
    }
}

/// Reads what the command needs. `None` if it has done all there is to do.
pub(crate) fn prepare(command: Command) -> anyhow::Result<Option<PreparedCommand>> {
    if !runs(&command) {
        warn_of_unknown_variables();
    }
    Ok(Some(match command {
        Command::Gateway(run) => match configure(run, &[], gateway::check)? {
            Some((config, sources, warnings)) => {
                let (log, audit) = (config.log.clone(), config.audit_log.0.clone());
                PreparedCommand::new(log, gateway::run(config, sources))
                    .audited(audit)
                    .warning(warnings)
            }
            None => return Ok(None),
        },
        Command::Edge(cli::Edge {
            command: Some(cli::EdgeCommand::Leave(ask)),
            ..
        }) => return edge::leave(&ask).map(|()| None),
        Command::Edge(cli::Edge { run, rejoin, .. }) => match configure(run, PROXY, edge::check)? {
            Some((config, sources, warnings)) => {
                PreparedCommand::new(config.log.clone(), edge::run(config, sources, rejoin))
                    .warning(warnings)
            }
            None => return Ok(None),
        },
        Command::Demo(demo) => PreparedCommand::brief(demo::run(demo)),
        Command::Status(status) => PreparedCommand::brief(status::run(status)),
        Command::Health(health) => PreparedCommand::brief(health::run(health)),
        Command::Reload(reload) => PreparedCommand::brief(reload::run(reload)),
        // Files in, files out: no runtime is needed.
        Command::Bootstrap(ask) => return bootstrap::run(&ask).map(|()| None),
        Command::Ca(order) => PreparedCommand::brief(ca::run(order)),
        Command::Node(node) => PreparedCommand::brief(node::run(node)),
        Command::Token(token) => return token::run(token).map(|()| None),
        Command::Client(client) => return client::run(client).map(|()| None),
        #[cfg(feature = "k8s")]
        Command::K8s(order) => return k8s::run(order).map(|()| None),
        Command::Policy(policy) => return policy::run(policy).map(|()| None),
        Command::Completions { shell } => return completions(shell).map(|()| None),
        Command::Man { directory } => return man::run(&directory).map(|()| None),
        Command::Config(cli::Config::Schema { side }) => return schema(side).map(|()| None),
        Command::Errors => {
            outln!("{}", reference::errors_table())?;
            return Ok(None);
        }
        Command::Openapi { side } => {
            output::write(format_args!("{}", reference::openapi(side)))?;
            return Ok(None);
        }
        Command::Reference { page } => {
            output::write(format_args!("{}", reference::page(page)))?;
            return Ok(None);
        }
    }))
}

/// Prints the JSON Schema of a configuration.
fn schema(side: ConfigKind) -> anyhow::Result<()> {
    let text = match side {
        ConfigKind::Gateway => config_loader::json_schema::<causeway_gateway::config::Config>(),
        ConfigKind::Edge => config_loader::json_schema::<causeway_edge::config::Config>(),
    };
    output::write(format_args!("{text}"))
}

/// `EX_CONFIG` of `sysexits.h`, which systemd shows as `CONFIG`.
const FINAL: u8 = 78;

/// How the process ends that failed so. A supervisor tries again after 1, and leaves it after [`FINAL`]: neither waiting
/// nor another attempt makes a CA or mends a token.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    let edge = error.downcast_ref::<causeway_edge::Error>();
    let gateway = error.downcast_ref::<causeway_gateway::BindError>();
    if edge.is_some_and(causeway_edge::Error::is_final)
        || gateway.is_some_and(causeway_gateway::BindError::is_final)
    {
        ExitCode::from(FINAL)
    } else {
        ExitCode::FAILURE
    }
}

/// A script for a shell, by which it completes commands and flags.
fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    // By way of memory: the generator panics if it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "causeway", &mut script);
    output::write(format_args!("{}", String::from_utf8(script)?))
}

/// The configuration with where it came from, or `None` if it was only to be checked and is sound. `check` reads what the configuration names.
fn configure<C: ProcessConfig + Send + Sync + 'static>(
    run: RunArgs<C>,
    fallbacks: &'static [(&'static str, &'static str)],
    check: impl FnOnce(&C) -> anyhow::Result<()>,
) -> anyhow::Result<Option<(C, ConfigSources, Vec<String>)>> {
    let sources = ConfigSources {
        file: run.config,
        environment: environment(),
        flags: run.keys.given,
        fallbacks,
    };
    let warnings = unknown_variables::<C>(&sources);
    if run.check_config {
        for warning in warnings {
            errln!("warning: {warning}");
        }
        // A single configuration is printed for people.
        let loaded = config_loader::load_with_files::<C>(&sources);
        let config = loaded.map_err(|refused| RejectedConfig::from(refused.faults))?;
        telemetry::wanted(config.as_ref())?;
        check(&config).map_err(refused)?;
        outln!("the configuration is valid")?;
        return Ok(None);
    }
    let config = config_loader::load::<C>(&sources)?;
    Ok(Some((config, sources, warnings)))
}

/// Returns an error in a file that a configuration names as a fault of that configuration.
fn refused(error: anyhow::Error) -> RejectedConfig {
    error
        .downcast()
        .unwrap_or_else(|error| RejectedConfig::from(vec![explain(&error)]))
}

fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, text)| Some((name.into_string().ok()?, text.into_string().ok()?)))
        .collect()
}

/// Returns a sentence for each variable that a process of this configuration does not read.
fn unknown_variables<C: ProcessConfig>(sources: &ConfigSources) -> Vec<String> {
    let own = keys::<C>().into_iter().filter(|key| key.settable);
    let known: Vec<_> = own.map(|key| key.variable()).chain(of_commands()).collect();
    let file = sources
        .file
        .as_ref()
        .and_then(|file| fs::read_to_string(file).ok());
    let flags = sources.flags.iter().flat_map(|(_, texts)| texts);
    let texts: Vec<&str> = flags.chain(file.as_ref()).map(String::as_str).collect();
    config_loader::unknown(&sources.environment, &known, &texts)
}

/// Returns the variables that flags of commands are taken from, other than keys.
fn of_commands() -> Vec<String> {
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
    let mut known = of_commands();
    let mut add = |keys: Vec<ConfigKey>| known.extend(keys.iter().map(ConfigKey::variable));
    add(keys::<causeway_gateway::config::Config>());
    add(keys::<causeway_edge::config::Config>());
    for warning in config_loader::unknown(&environment, &known, &[]) {
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
