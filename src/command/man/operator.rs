//! Sections of the pages of commands of gateways, edges and their operators.

use causeway_edge::config::Config as EdgeConfig;
use causeway_gateway::config::Config as GatewayConfig;
use clap::Command;

use super::{Sections, Term, display_name, to_terms};
use crate::operator::config_loader::{ConfigKey, keys};

const VARIABLES: &[(&str, &str)] = &[
    ("RUST_LOG", "Log filter; overrides log.filter."),
    (
        "NO_COLOR",
        "If not empty, the log has no colours on a terminal.",
    ),
    (
        "NOTIFY_SOCKET, WATCHDOG_USEC",
        "Set by systemd for units with Type=notify and WatchdogSec=; see sd_notify(3).",
    ),
];
const PROXY_VARIABLES: &[(&str, &str)] = &[
    (
        "HTTPS_PROXY",
        "Proxy to the gateways if the configuration names none.",
    ),
    (
        "NO_PROXY",
        "Hosts, domains and networks that are connected to without that proxy.",
    ),
];
const SIGNALS: &[(&str, &str)] = &[(
    "SIGTERM, SIGINT",
    "Drain for at most timeouts.drain, then exit. A second signal exits at once.",
)];
const GATEWAY_FILES: &[(&str, &str)] = &[
    (
        "/etc/causeway/gateway.yaml",
        "The configuration that causeway-gateway.service reads.",
    ),
    (
        "/etc/causeway/gateway.env",
        "Environment variables for that unit; absent by default.",
    ),
    (
        "/var/lib/causeway",
        "CA, hashes of tokens, nodes, the secret of session tickets. Keep it private: ca.json allows its reader to act as any edge and any client, tickets.key as any edge and as this gateway.",
    ),
    (
        "/var/lib/causeway/ca.pem",
        "The CA certificate with which clients verify the gateway.",
    ),
];
const EDGE_FILES: &[(&str, &str)] = &[
    (
        "/etc/causeway/edge.yaml",
        "The configuration that causeway-edge.service reads.",
    ),
    (
        "/etc/causeway/edge.env",
        "Environment variables for that unit, such as CAUSEWAY_JOIN; absent by default.",
    ),
    (
        "/var/lib/causeway-edge",
        "The node's key and certificate, and the gateway addresses that gateways have announced.",
    ),
];
const DATA_FILES: &[(&str, &str)] = &[(
    "/var/lib/causeway",
    "The gateway's data directory, unless --data-dir names another one.",
)];

/// Adds the keys, variables, files and signals of a process, and the files of a command that has a data directory.
pub(super) fn complete(sections: Sections, command: &Command) -> Sections {
    match display_name(command) {
        "causeway-gateway" => {
            let variables = to_terms(VARIABLES);
            complete_process(sections, &keys::<GatewayConfig>(), variables, GATEWAY_FILES)
        }
        "causeway-edge" => {
            let variables = [to_terms(PROXY_VARIABLES), to_terms(VARIABLES)].concat();
            complete_process(sections, &keys::<EdgeConfig>(), variables, EDGE_FILES)
        }
        _ if command
            .get_arguments()
            .any(|arg| arg.get_id() == "data_dir") =>
        {
            Sections {
                files: to_terms(DATA_FILES),
                ..sections
            }
        }
        _ => sections,
    }
}

fn complete_process(
    sections: Sections,
    keys: &[ConfigKey],
    variables: Vec<Term>,
    files: &[(&str, &str)],
) -> Sections {
    let settable = keys.iter().filter(|key| key.settable);
    let settable = settable.map(|key| {
        let meaning = format!("The key {}; same as --{}.", key.name, key.flag());
        (key.variable(), meaning)
    });
    let nested = keys.iter().filter(|key| !key.settable);
    let nested = nested.map(|key| (key.name.clone(), key.help.replace('\n', " ")));
    Sections {
        nested_keys: nested.collect(),
        variables: sections
            .variables
            .into_iter()
            .chain(settable)
            .chain(variables)
            .collect(),
        files: to_terms(files),
        signals: to_terms(SIGNALS),
    }
}
