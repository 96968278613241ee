//! Commands of gateways, edges and their operators: one file each, which takes configuration or arguments and has a function
//! `run`. These need Linux.
//!
//! `prepare` reads the configuration before the runtime starts, because telemetry needs it, and because an invalid
//! configuration must have no effects.

pub(crate) mod config_loader;
mod config_reload;
mod reference;
mod systemd;

mod admin_client;
mod bootstrap;
mod ca;
mod ca_gateways;
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
mod manifests;
mod node;
mod pins;
mod policy;
mod reload;
mod rlimit;
mod state;
mod status;
mod supervise;
mod token;

use std::fs;
use std::process::ExitCode;

use causeway_config::LogFormat;

use crate::cli::operator::{self as cli, ConfigKind, OperatorCommand, RunArgs};
use crate::output::{self, errln, explain, outln};
use crate::prepared_command::PreparedCommand;
use crate::{telemetry, variables};
use config_loader::{ConfigSources, ProcessConfig, RejectedConfig, keys};

/// Environment variables that name a proxy for other programs.
const PROXY_VARIABLES: &[(&str, &str)] = &[
    ("proxy", "HTTPS_PROXY"),
    ("proxy", "https_proxy"),
    ("no_proxy", "NO_PROXY"),
    ("no_proxy", "no_proxy"),
];

/// Whether the command runs a process with a configuration. The log of such a process warns of variables that the process
/// does not read.
pub(crate) fn is_long_running(command: &OperatorCommand) -> bool {
    match command {
        OperatorCommand::Gateway(_) => true,
        OperatorCommand::Edge(edge) => edge.command.is_none(),
        _ => false,
    }
}

/// Reads the inputs of the command. Returns `None` if the command has already finished.
pub(crate) fn prepare(command: OperatorCommand) -> anyhow::Result<Option<PreparedCommand>> {
    Ok(Some(match command {
        OperatorCommand::Gateway(args) => return prepare_gateway(args),
        OperatorCommand::Supervise(args) => PreparedCommand::one_shot(supervise::run(args)),
        OperatorCommand::Edge(args) => return prepare_edge(args),
        OperatorCommand::Demo(demo) => PreparedCommand::one_shot(demo::run(demo)),
        OperatorCommand::Status(status) => PreparedCommand::one_shot(status::run(status)),
        OperatorCommand::Health(health) => PreparedCommand::one_shot(health::run(health)),
        OperatorCommand::Reload(reload) => PreparedCommand::one_shot(reload::run(reload)),
        // The command reads and writes files only, so it needs no runtime.
        OperatorCommand::Bootstrap(args) => return bootstrap::run(&args).map(|()| None),
        OperatorCommand::Ca(subcommand) => PreparedCommand::one_shot(ca::run(subcommand)),
        OperatorCommand::Node(node) => PreparedCommand::one_shot(node::run(node)),
        OperatorCommand::Token(token) => PreparedCommand::one_shot(token::run(token)),
        OperatorCommand::State(state) => PreparedCommand::one_shot(state::run(state)),
        OperatorCommand::Client(client) => return client::run(client).map(|()| None),
        #[cfg(feature = "k8s")]
        OperatorCommand::K8s(subcommand) => return k8s::run(subcommand).map(|()| None),
        OperatorCommand::Policy(policy) => return policy::run(policy).map(|()| None),
        OperatorCommand::Config(cli::Config::Schema { side }) => {
            return print_schema(side).map(|()| None);
        }
        OperatorCommand::Errors => {
            outln!("{}", reference::errors_table())?;
            return Ok(None);
        }
        OperatorCommand::Openapi { side } => return print(&reference::openapi(side)),
        OperatorCommand::Reference { page } => return print(&reference::page(page)),
    }))
}

fn prepare_gateway(args: cli::Gateway) -> anyhow::Result<Option<PreparedCommand>> {
    let cli::Gateway {
        take_over,
        await_stop,
        run,
    } = args;
    let Some((config, sources, warnings)) = load_config(run, &[], gateway::check)? else {
        return Ok(None);
    };
    let (log, audit_log_path) = (config.log.clone(), config.audit_log.0.clone());
    let future = gateway::run(config, sources, (take_over, await_stop));
    Ok(Some(PreparedCommand {
        warnings,
        audit_log_path,
        ..PreparedCommand::new(log, future)
    }))
}

fn prepare_edge(args: cli::Edge) -> anyhow::Result<Option<PreparedCommand>> {
    let cli::Edge {
        command,
        rejoin,
        run,
    } = args;
    if let Some(cli::EdgeCommand::Leave(args)) = command {
        return edge::leave(&args).map(|()| None);
    }
    let loaded = load_config(run, PROXY_VARIABLES, edge::check)?;
    Ok(loaded.map(|(config, sources, warnings)| PreparedCommand {
        warnings,
        ..PreparedCommand::new(config.log.clone(), edge::run(config, sources, rejoin))
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

/// Exit code of a process whose arguments or configuration are invalid.
const EXIT_USAGE: u8 = 2;
/// `EX_CONFIG` of `sysexits.h`, which systemd shows as `CONFIG`.
const EXIT_CONFIG: u8 = 78;

/// Reports a failure that has an exit code of its own, and returns this code. A supervisor restarts the process after 1 and not
/// after [`EXIT_CONFIG`]: neither waiting nor another attempt creates a CA or repairs a token.
pub(crate) fn report(error: &anyhow::Error, format: LogFormat) -> Option<ExitCode> {
    if let Some(rejected) = error.downcast_ref::<RejectedConfig>() {
        for fault in &rejected.faults {
            telemetry::report_error(rejected.format, fault);
        }
        return Some(ExitCode::from(EXIT_USAGE));
    }
    if let Some(child) = error.downcast_ref::<supervise::ChildFailed>() {
        // The child has already logged its failure: its reason stays the last line of the log.
        return child.exit_code().map(ExitCode::from);
    }
    let edge = error.downcast_ref::<causeway_edge::Error>();
    let gateway = error.downcast_ref::<causeway_gateway::BindError>();
    let is_final = edge.is_some_and(causeway_edge::Error::is_final)
        || gateway.is_some_and(causeway_gateway::BindError::is_final);
    is_final.then(|| {
        telemetry::report_failure(format, error);
        ExitCode::from(EXIT_CONFIG)
    })
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
        environment: variables::environment(),
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

/// Returns a warning for each variable that a process of this configuration does not read.
fn unknown_variables<C: ProcessConfig>(sources: &ConfigSources) -> Vec<String> {
    let settable_keys = keys::<C>().into_iter().filter(|key| key.settable);
    let known_variables: Vec<_> = settable_keys
        .map(|key| key.variable())
        .chain(variables::of_commands())
        .collect();
    let file = sources
        .file
        .as_ref()
        .and_then(|file| fs::read_to_string(file).ok());
    let flags = sources.flags.iter().flat_map(|(_, texts)| texts);
    let texts: Vec<&str> = flags.chain(file.as_ref()).map(String::as_str).collect();
    variables::unknown_warnings(&sources.environment, &known_variables, &texts)
}
