//! `causeway man`: a manual page for each command, generated from the clap tree and the configurations' schemas.
//!
//! This module adds the parts that the tree does not contain: variables, files, exit codes, signals. Each page repeats all of
//! them for its command, because a user does not read two pages at once.

use std::fs;
use std::path::Path;

use anyhow::Context;
use causeway_edge::config::Config as EdgeConfig;
use causeway_gateway::config::Config as GatewayConfig;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::Cli;
use crate::config_loader::{ConfigKey, keys};

/// A term and what it means.
type Term = (String, String);

const CODES: &[(&str, &str)] = &[
    (
        "0",
        "Done, or stopped by a signal after everything had ended in order.",
    ),
    (
        "1",
        "Failed. The last line on standard error says what, and starting again may mend it.",
    ),
    (
        "2",
        "Arguments or configuration cannot be used. Each fault is a line on standard error, with its place.",
    ),
    (
        "78",
        "Failed, and will again until somebody changes something: a gateway without a CA, an edge without an identity, a token that was refused.",
    ),
];
const VARIABLES: &[(&str, &str)] = &[
    ("RUST_LOG", "Log filter; wins over log.filter."),
    (
        "NO_COLOR",
        "If it is not empty, the log has no colours on a terminal.",
    ),
    (
        "NOTIFY_SOCKET, WATCHDOG_USEC",
        "Set by systemd for units with Type=notify and WatchdogSec=; see sd_notify(3).",
    ),
];
const PROXIES: &[(&str, &str)] = &[
    (
        "HTTPS_PROXY",
        "Proxy on the way to the gateways where nothing else names one.",
    ),
    ("NO_PROXY", "What is dialled without that proxy."),
];
const SIGNALS: &[(&str, &str)] = &[(
    "SIGTERM, SIGINT",
    "Drain for up to timeouts.drain, then end. A second one ends at once.",
)];
const GATEWAY_FILES: &[(&str, &str)] = &[
    (
        "/etc/causeway/gateway.yaml",
        "The configuration that causeway-gateway.service reads.",
    ),
    (
        "/etc/causeway/gateway.env",
        "Variables for that unit; not there at first.",
    ),
    (
        "/var/lib/causeway",
        "CA, hashes of tokens, nodes, the secret of session tickets. Whoever has ca.json can be any edge and any client; who has tickets.key, any edge and this gateway.",
    ),
    (
        "/var/lib/causeway/ca.pem",
        "The CA's certificate, by which clients know the gateway.",
    ),
];
const EDGE_FILES: &[(&str, &str)] = &[
    (
        "/etc/causeway/edge.yaml",
        "The configuration that causeway-edge.service reads.",
    ),
    (
        "/etc/causeway/edge.env",
        "Variables for that unit, such as CAUSEWAY_JOIN; not there at first.",
    ),
    (
        "/var/lib/causeway-edge",
        "The node's key and certificate, and the gateways that it has heard of.",
    ),
];
const DATA_FILES: &[(&str, &str)] = &[(
    "/var/lib/causeway",
    "The gateway's data directory, unless --data-dir says otherwise.",
)];

/// Writes all pages.
pub(crate) fn run(directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let mut tree = Cli::command().disable_help_subcommand(true);
    tree.build();
    for command in shown(&tree) {
        let path = directory.join(format!("{}.1", name(command)));
        fs::write(&path, page(command)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// A command and all below it, but those that are hidden.
fn shown(command: &Command) -> Vec<&Command> {
    let below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    std::iter::once(command)
        .chain(below.flat_map(shown))
        .collect()
}

/// `causeway-token-create`.
fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

fn page(command: &Command) -> anyhow::Result<Vec<u8>> {
    let source = concat!("causeway ", env!("CARGO_PKG_VERSION"));
    // Its version is in the title; a section of its own would say it again.
    let man = Man::new(command.clone()).source(source).manual("Causeway");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut more = Roff::new();
    sections(command, &mut more);
    more.to_writer(&mut page)?;
    Ok(page)
}

fn sections(command: &Command, page: &mut Roff) {
    let (keys, files, runs) = match name(command) {
        "causeway-gateway" => (keys::<GatewayConfig>(), GATEWAY_FILES, true),
        "causeway-edge" => (keys::<EdgeConfig>(), EDGE_FILES, true),
        _ => (Vec::new(), DATA_FILES, false),
    };
    let inner = keys.iter().filter(|key| !key.settable);
    let inner: Vec<Term> = inner.map(|key| (key.name.clone(), meaning(key))).collect();
    terms(page, "KEYS INSIDE LISTS AND MAPS", inner);
    terms(page, "ENVIRONMENT", variables(command, &keys));
    let takes_data = command
        .get_arguments()
        .any(|arg| arg.get_id() == "data_dir");
    if runs || takes_data {
        terms(page, "FILES", owned(files));
    }
    if runs {
        terms(page, "SIGNALS", owned(SIGNALS));
    }
    terms(page, "EXIT STATUS", owned(CODES));
    if name(command) != "causeway" {
        page.control("SH", ["SEE ALSO"]);
        page.text([bold("causeway"), roman("(1)")]);
    }
}

/// All variables that a command reads, in words.
fn variables(command: &Command, keys: &[ConfigKey]) -> Vec<Term> {
    let flags = command.get_arguments().filter_map(|arg| {
        let flag = format!("As --{}.", arg.get_long()?);
        Some((arg.get_env()?.to_str()?.to_owned(), flag))
    });
    let settable = keys.iter().filter(|key| key.settable);
    let settable = settable.map(|key| {
        (
            key.variable(),
            format!("The key {}; as --{}.", key.name, key.flag()),
        )
    });
    let common = match name(command) {
        "causeway-gateway" => owned(VARIABLES),
        "causeway-edge" => [owned(PROXIES), owned(VARIABLES)].concat(),
        _ => Vec::new(),
    };
    flags.chain(settable).chain(common).collect()
}

fn meaning(key: &ConfigKey) -> String {
    key.help.replace('\n', " ")
}

fn owned(terms: &[(&str, &str)]) -> Vec<Term> {
    let own = |(term, meaning): &(&str, &str)| ((*term).to_owned(), (*meaning).to_owned());
    terms.iter().map(own).collect()
}

/// A section of terms; none if there are none.
fn terms(page: &mut Roff, title: &str, terms: Vec<Term>) {
    if terms.is_empty() {
        return;
    }
    page.control("SH", [title]);
    for (term, meaning) in terms {
        page.control("TP", []);
        page.text([bold(term)]);
        page.text([roman(meaning)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_that_says_how_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        run(folder.path()).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        for name in ["causeway.1", "causeway-status.1", "causeway-token-create.1"] {
            assert!(read(name).contains("EXIT STATUS"), "{name}");
        }
        assert!(!folder.path().join("causeway-reference.1").exists());
        let gateway = read("causeway-gateway.1");
        for part in [
            "CAUSEWAY_TUNNEL_LISTEN",
            "CAUSEWAY_CONFIG",
            "\\-\\-tunnel\\-listen",
            "listeners[].client_auth.tokens",
            "/var/lib/causeway/ca.pem",
            "SIGTERM",
        ] {
            assert!(gateway.contains(part), "{part}");
        }
        assert!(read("causeway-edge.1").contains("HTTPS_PROXY"));
    }
}
