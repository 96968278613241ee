//! `causeway`: arguments → configuration → telemetry → runtime → command → exit code.
//!
//! Wiring only. Exit codes: 0 done, 1 failed, 2 the arguments or the configuration cannot
//! be used, 3 failed and would fail again until somebody changes something.

mod cli;
mod command;
mod notify;
mod reload;
mod settings;
mod signal;
mod telemetry;

use std::process::ExitCode;
use std::time::Duration;

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
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(2)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<settings::Refused>() => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("causeway: {}", command::explain(&error));
            command::exit_code(&error)
        }
    }
}

fn run(command: cli::Command) -> anyhow::Result<()> {
    causeway_certs::install_provider();
    let Some(job) = command::prepare(command)? else {
        return Ok(());
    };
    let _audit = telemetry::start(&job.log, job.audit.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(job.work);
    // A disk that hangs does not keep a process from its end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}
