//! `causeway man`: a manual page for each command, generated from the clap tree and, on Linux, the configurations' schemas.
//!
//! This module adds the parts that the tree does not contain: variables, files, exit codes, signals. Each page repeats all of
//! them for its command, because a user does not read two pages at once.

#[cfg(target_os = "linux")]
mod operator;

use std::fs;
use std::path::Path;

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::Cli;

/// Term and its meaning.
type Term = (String, String);

const EXIT_CODES: &[(&str, &str)] = &[
    (
        "0",
        "Success, or stopped by a signal after all streams had ended.",
    ),
    (
        "1",
        "Failure. The last line on standard error describes it. A restart may succeed.",
    ),
    (
        "2",
        "The arguments or the configuration are invalid. Standard error has one line for each error, with file and line.",
    ),
    (
        "78",
        "Failure that a restart cannot resolve: a gateway without a CA, an edge without an identity, a refused token. An operator must act.",
    ),
];
/// Writes the pages of all commands.
pub(crate) fn run(directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create the directory {}", directory.display()))?;
    let mut tree = Cli::command().disable_help_subcommand(true);
    tree.build();
    for command in visible_commands(&tree) {
        let path = directory.join(format!("{}.1", display_name(command)));
        fs::write(&path, page(command)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns a command and all its subcommands except hidden ones.
fn visible_commands(command: &Command) -> Vec<&Command> {
    let subcommands = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    std::iter::once(command)
        .chain(subcommands.flat_map(visible_commands))
        .collect()
}

/// Returns the full name of a command, such as `causeway-token-create`.
fn display_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

fn page(command: &Command) -> anyhow::Result<Vec<u8>> {
    let source = concat!("causeway ", env!("CARGO_PKG_VERSION"));
    // The title already contains the version, so there is no version section.
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
    let mut extra_sections = Roff::new();
    add_sections(command, &mut extra_sections);
    extra_sections.to_writer(&mut page)?;
    Ok(page)
}

/// Parts of a page that the clap tree does not contain.
#[derive(Default)]
struct Sections {
    nested_keys: Vec<Term>,
    variables: Vec<Term>,
    files: Vec<Term>,
    signals: Vec<Term>,
}

fn add_sections(command: &Command, page: &mut Roff) {
    let sections = Sections {
        variables: flag_variables(command),
        ..Sections::default()
    };
    #[cfg(target_os = "linux")]
    let sections = operator::complete(sections, command);
    add_terms(page, "KEYS INSIDE LISTS AND MAPS", sections.nested_keys);
    add_terms(page, "ENVIRONMENT", sections.variables);
    add_terms(page, "FILES", sections.files);
    add_terms(page, "SIGNALS", sections.signals);
    add_terms(page, "EXIT STATUS", to_terms(EXIT_CODES));
    if display_name(command) != "causeway" {
        page.control("SH", ["SEE ALSO"]);
        page.text([bold("causeway"), roman("(1)")]);
    }
}

/// Returns a description of each variable that sets a flag.
fn flag_variables(command: &Command) -> Vec<Term> {
    let flags = command.get_arguments().filter_map(|arg| {
        let flag = format!("As --{}.", arg.get_long()?);
        Some((arg.get_env()?.to_str()?.to_owned(), flag))
    });
    flags.collect()
}

fn to_terms(terms: &[(&str, &str)]) -> Vec<Term> {
    let to_term = |(term, meaning): &(&str, &str)| ((*term).to_owned(), (*meaning).to_owned());
    terms.iter().map(to_term).collect()
}

/// Adds a section of terms, unless there are none.
fn add_terms(page: &mut Roff, title: &str, terms: Vec<Term>) {
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
    fn every_command_has_a_page_with_its_exit_codes() {
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
