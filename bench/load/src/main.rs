//! `causeway-bench-load`: the loads of `bench/run` that no ready-made generator makes.
//!
//! Each subcommand writes one JSON object per line to standard output (servers begin with `{"event":"ready",…}`) and ends
//! at SIGTERM, at SIGINT, or when its standard input is a pipe that ends, so that it never outlives the process that
//! started it. Wiring only.

mod cli;
mod command;
mod files;
mod http1;
mod measure;
mod report;
mod route;
mod stop;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    causeway_certs::install_provider();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("causeway-bench-load: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: cli::Cli) -> anyhow::Result<()> {
    files::raise();
    let mut builder = match cli.threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if cli.threads > 1 {
        builder.worker_threads(cli.threads);
    }
    let runtime = builder.enable_all().build()?;
    runtime.block_on(async {
        let stop = stop::listen()?;
        command::run(cli.command, stop).await
    })
}
