//! The subcommands: one file each, configuration or arguments in, `run` out.
//!
//! `prepare` reads the configuration before the runtime stands, because telemetry needs
//! it, and because a fault in it must cost nothing.

mod admin;
mod bootstrap;
mod ca;
mod caller;
mod cluster;
mod data;
mod demo;
mod edge;
mod files;
mod gateway;
mod health;
#[cfg(feature = "k8s")]
mod k8s;
mod man;
mod manifests;
mod nodes;
mod operator;
mod pins;
mod policy;
mod private;
#[cfg(feature = "k8s")]
mod redirect;
mod reload;
mod rotate;
mod status;
mod token;

use std::io::Write;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;

use anyhow::Context;
use causeway_config::Log;
use causeway_gateway::redirector;
use clap::CommandFactory;

use crate::cli::{self, Cli, Command, Run, Side};
use crate::settings::{self, Settings, Sources};

/// The variables by which other programs are told of a proxy.
const PROXY: &[(&str, &str)] = &[
    ("proxy", "HTTPS_PROXY"),
    ("proxy", "https_proxy"),
    ("no_proxy", "NO_PROXY"),
    ("no_proxy", "no_proxy"),
];

/// What is left to do once the configuration is known.
pub(crate) struct Job {
    pub(crate) log: Log,
    /// The file of the audit log.
    pub(crate) audit: Option<PathBuf>,
    pub(crate) work: Pin<Box<dyn Future<Output = anyhow::Result<()>>>>,
}

impl Job {
    fn new(log: Log, work: impl Future<Output = anyhow::Result<()>> + 'static) -> Self {
        Self {
            log,
            audit: None,
            work: Box::pin(work),
        }
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

/// Reads what the command needs. `None` if it has done all there is to do.
pub(crate) fn prepare(command: Command) -> anyhow::Result<Option<Job>> {
    Ok(Some(match command {
        Command::Gateway(run) => match configure(run, &[], gateway::check)? {
            Some((config, sources)) => {
                let (log, audit) = (config.log.clone(), config.audit_log.0.clone());
                Job::new(log, gateway::run(config, sources)).audited(audit)
            }
            None => return Ok(None),
        },
        Command::Edge(cli::Edge {
            order: Some(order), ..
        }) => Job::brief(nodes::run(order)),
        Command::Edge(cli::Edge { run, rejoin, .. }) => match configure(run, PROXY, edge::check)? {
            Some((config, sources)) => {
                Job::new(config.log.clone(), edge::run(config, sources, rejoin))
            }
            None => return Ok(None),
        },
        #[cfg(feature = "k8s")]
        Command::Redirect(run) => match configure(run, &[], |_| Ok(()))? {
            Some((config, sources)) => Job::new(config.log.clone(), redirect::run(config, sources)),
            None => return Ok(None),
        },
        Command::Demo(demo) => Job::brief(demo::run(demo)),
        Command::Status(status) => Job::brief(status::run(status)),
        Command::Health(health) => Job::brief(health::run(health)),
        Command::Reload(reload) => Job::brief(reload::run(reload)),
        // Files in, files out: no runtime is needed.
        Command::Bootstrap(ask) => return bootstrap::run(&ask).map(|()| None),
        Command::Ca(order) => Job::brief(ca::run(order)),
        Command::Token(token) => return token::run(token).map(|()| None),
        Command::Caller(caller) => return caller::run(caller).map(|()| None),
        #[cfg(feature = "k8s")]
        Command::K8s(order) => return k8s::run(order).map(|()| None),
        Command::Policy(policy) => return policy::run(policy).map(|()| None),
        Command::Completions { shell } => return completions(shell).map(|()| None),
        Command::Man { directory } => return man::run(&directory).map(|()| None),
        Command::Config(cli::Config::Schema { side }) => {
            let text = match side {
                Side::Gateway => settings::json_schema::<causeway_gateway::config::Config>(),
                Side::Edge => settings::json_schema::<causeway_edge::config::Config>(),
                #[cfg(feature = "k8s")]
                Side::Redirect => settings::json_schema::<redirector::Config>(),
            };
            return print(&text).map(|()| None);
        }
        Command::Reference { side } => {
            let text = match side {
                Side::Gateway => settings::reference::<causeway_gateway::config::Config>(),
                Side::Edge => settings::reference::<causeway_edge::config::Config>(),
                #[cfg(feature = "k8s")]
                Side::Redirect => settings::reference::<redirector::Config>(),
            };
            return print(&text).map(|()| None);
        }
    }))
}

/// Writes a text to standard output. A reader that closes its end is an error, not a panic.
fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")
}

/// An error and its causes in one line; a cause that the words before it have said already is left out.
pub(crate) fn explain(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .fold(error.to_string(), |said, cause| {
            let cause = cause.to_string();
            if said.contains(&cause) {
                said
            } else {
                format!("{said}: {cause}")
            }
        })
}

/// How the process ends that failed so. A supervisor tries again after 1, and leaves it after 3: neither waiting nor
/// another attempt makes a CA or mends a token.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    let edge = error.downcast_ref::<causeway_edge::Error>();
    let gateway = error.downcast_ref::<causeway_gateway::BindError>();
    let redirector = error.downcast_ref::<redirector::Error>();
    if edge.is_some_and(causeway_edge::Error::is_final)
        || gateway.is_some_and(causeway_gateway::BindError::is_final)
        || redirector.is_some_and(redirector::Error::is_final)
    {
        ExitCode::from(3)
    } else {
        ExitCode::FAILURE
    }
}

/// A script for a shell, by which it completes commands and flags.
fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    // By way of memory, since what is given a reader that goes away would panic.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "causeway", &mut script);
    std::io::stdout()
        .write_all(&script)
        .context("cannot write the completions")
}

/// The configuration with where it came from, or `None` if it was only to be checked and is sound. `check` reads what the configuration names.
fn configure<C: Settings + Send + Sync + 'static>(
    run: Run<C>,
    fallbacks: &'static [(&'static str, &'static str)],
    check: impl FnOnce(&C) -> anyhow::Result<()>,
) -> anyhow::Result<Option<(C, Sources)>> {
    let sources = Sources {
        file: run.config,
        environment: std::env::vars_os()
            .filter_map(|(name, text)| Some((name.into_string().ok()?, text.into_string().ok()?)))
            .collect(),
        flags: run.keys.given,
        fallbacks,
    };
    let config = settings::load::<C>(&sources)?;
    if run.check_config {
        check(&config)?;
        println!("the configuration is sound");
        return Ok(None);
    }
    Ok(Some((config, sources)))
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
