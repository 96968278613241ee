//! `causeway`: arguments → configuration → telemetry → runtime → command → exit code.
//!
//! Wiring only. Exit codes: 0 done, 1 failed, 2 the arguments or the configuration cannot be used, 78 failed and would fail
//! again until an operator changes something.

// These macros panic if writing fails; `output` has the replacements.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod cli;
mod command;
mod config_loader;
mod error_text;
mod output;
mod reference;
mod reload;
mod signal;
mod systemd;
mod telemetry;

use std::process::ExitCode;
use std::time::Duration;

use causeway_config::LogFormat;
use clap::Parser;

/// Tunnels allocate and free in bursts, which glibc's allocator keeps for itself.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" too, with exit code 0.
            let printed = output::ignore_broken_pipe(error.print());
            return match (error.use_stderr(), printed) {
                (true, _) => ExitCode::from(2),
                (false, Ok(())) => ExitCode::SUCCESS,
                (false, Err(_)) => ExitCode::FAILURE,
            };
        }
    };
    causeway_certs::install_provider();
    let (format, done) = match command::prepare(cli.command) {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(job)) => (job.log.format, run(job)),
        Err(error) => (LogFormat::Text, Err(error)),
    };
    let Err(error) = done else {
        return ExitCode::SUCCESS;
    };
    if let Some(refused) = error.downcast_ref::<config_loader::RejectedConfig>() {
        for fault in &refused.faults {
            telemetry::report(refused.format, fault);
        }
        return ExitCode::from(2);
    }
    let said = error_text::explain(&error);
    match format {
        LogFormat::Text => telemetry::report(format, &format!("causeway: {said}")),
        LogFormat::Json => telemetry::report(format, &said),
    }
    command::exit_code(&error)
}

fn run(job: command::PreparedCommand) -> anyhow::Result<()> {
    let _logs = telemetry::start(&job.log, job.audit.as_deref())?;
    for warning in &job.warnings {
        tracing::warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(job.work);
    // A hanging disk must not prevent the process from exiting.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}
