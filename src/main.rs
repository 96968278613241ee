//! `causeway`: arguments → configuration → telemetry → runtime → command → exit code.
//!
//! Wiring only. Exit codes: 0 done, 1 failed, 2 the arguments or the configuration cannot be used, 78 failed and would fail
//! again until an operator changes something.

// These macros panic if writing fails; `output` has the replacements.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod cli;
mod command;
// Gateway and edge run on Linux. Other systems have only the commands of users.
#[cfg(target_os = "linux")]
mod operator;
mod output;
mod prepared_command;
mod signal;
mod suggestion;
mod telemetry;
mod variables;

use std::process::ExitCode;
use std::time::Duration;

use causeway_config::LogFormat;
use prepared_command::PreparedCommand;

/// jemalloc, because tunnels allocate and free in bursts, and glibc's allocator would keep that memory.
#[cfg(all(feature = "jemalloc", target_os = "linux"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse_as_called() {
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
    causeway_tls::install_provider();
    let (format, outcome) = match command::prepare(cli.command) {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(prepared)) => (prepared.log.format, run(prepared)),
        Err(error) => (LogFormat::Text, Err(error)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => command::report(&error, format),
    }
}

fn run(prepared: PreparedCommand) -> anyhow::Result<()> {
    let _logs = telemetry::start(&prepared.log, prepared.audit_log_path.as_deref())?;
    for warning in &prepared.warnings {
        tracing::warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(prepared.future);
    if prepared.reads_stdin {
        // The read ends only when another program writes or ends.
        runtime.shutdown_background();
    } else {
        // A hanging disk must not prevent the process from exiting.
        runtime.shutdown_timeout(Duration::from_secs(1));
    }
    outcome
}
