//! `causeway caller token`: a bearer token for a client.
//!
//! The file of a listener's `callers.tokens` gets a line with the token's hash; the token
//! itself goes to standard output, once, and is kept nowhere. The line is added in place
//! under a lock, and taken back if it cannot be written whole. A new file is of its
//! directory's user, so that a gateway that is not root can read what root made for it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};

use anyhow::Context;
use causeway_certs::{StaticTokens, store::open_private};

use crate::cli::{ClientCommand, ClientTokenArgs};
use crate::output::{errln, outln};

/// Makes what was asked for.
pub(crate) fn run(caller: ClientCommand) -> anyhow::Result<()> {
    let ClientCommand::Token(ask) = caller;
    let token = add(&ask)?;
    errln!(
        "for caller {}; its hash is in {}",
        ask.name,
        ask.file.display()
    );
    errln!("use it as: Authorization: Bearer TOKEN");
    outln!("{token}")?;
    Ok(())
}

fn add(ask: &ClientTokenArgs) -> anyhow::Result<String> {
    let (token, line) = StaticTokens::generate(&ask.name, &ask.groups)?;
    let place = || format!("{}", ask.file.display());
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    let mut file = open_private(&ask.file, &options).with_context(place)?;
    file.lock().with_context(place)?;
    let mut text = String::new();
    file.read_to_string(&mut text).with_context(place)?;
    StaticTokens::parse(&text).with_context(place)?;
    let gap = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    append(&mut file, &format!("{gap}{line}\n")).with_context(place)?;
    Ok(token.expose().to_owned())
}

fn append(file: &mut File, text: &str) -> std::io::Result<()> {
    let before = file.metadata()?.len();
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .inspect_err(|_| {
            // Half a line would be refused at the next reload; this error is the one to tell.
            let _ = file.set_len(before);
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn ask(file: &Path, name: &str) -> ClientTokenArgs {
        ClientTokenArgs {
            name: name.into(),
            groups: vec!["ops".into()],
            file: file.to_owned(),
        }
    }

    #[test]
    fn the_file_keeps_hashes_only_and_grows_by_a_line_each() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("callers");
        let first = add(&ask(&file, "prometheus")).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.trim_end()).unwrap();
        let second = add(&ask(&file, "curl")).unwrap();

        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains(&first) && !text.contains(&second));
        let callers = StaticTokens::parse(&text).unwrap();
        assert_eq!(callers.lookup(&first).unwrap().name, "prometheus");
        assert_eq!(callers.lookup(&second).unwrap().groups, ["ops"]);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_is_something_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notes");
        std::fs::write(&file, "milk, eggs\n").unwrap();
        let error = format!("{:#}", add(&ask(&file, "curl")).unwrap_err());
        assert!(
            error.contains("notes") && error.contains("line 1"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "milk, eggs\n");
    }
}
