//! `causeway client certificate|token|revoke`: credentials of clients.
//!
//! A token file (a listener's `client_auth.tokens`) has one line with the hash of each token; the token itself is printed once.
//! A line is added in place under a lock, and removed again if it cannot be written completely. A new file belongs to the user of
//! its directory, so that a gateway that does not run as root can read it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use causeway_certs::{LeafCertificate, StaticTokens, store::open_private};

use super::data_dir;
use crate::cli::operator::{ClientCertificate, ClientCommand, ClientRevoke, ClientToken};
use crate::output::{errln, outln, write_private_file};

/// Runs the command.
pub(crate) fn run(client: ClientCommand) -> anyhow::Result<()> {
    match client {
        ClientCommand::Certificate(args) => issue_certificate(&args),
        ClientCommand::Token(args) => {
            let token = add_token(&args)?;
            let file = args.file.display();
            errln!("token of client {}; its hash is in {file}", args.name);
            errln!("send it as: Authorization: Bearer TOKEN");
            outln!("{token}")?;
            Ok(())
        }
        ClientCommand::Revoke(args) => {
            let tokens = revoke(&args)?;
            let (name, file) = (&args.name, args.file.display());
            outln!(
                "revoked {tokens} of {name} in {file}; a running gateway applies this at its next reload: causeway reload"
            )?;
            Ok(())
        }
    }
}

fn issue_certificate(args: &ClientCertificate) -> anyhow::Result<()> {
    let (store, ca) = data_dir::open_with_ca(&args.data.data_dir)?;
    let leaf = ca.issue_client(&args.name, &args.groups, args.ttl)?;
    let (chain, key) = write_certificate(&args.out, &args.name, &leaf)?;
    outln!("certificate {}", chain.display())?;
    outln!("key         {}", key.display())?;
    outln!(
        "use them as: curl --cacert {} --cert {} --key {} https://…",
        store.root_path().display(),
        chain.display(),
        key.display()
    )?;
    Ok(())
}

/// Writes NAME.pem and NAME-key.pem, the key first. Returns their paths.
pub(super) fn write_certificate(
    out: &Path,
    name: &str,
    leaf: &LeafCertificate,
) -> anyhow::Result<(PathBuf, PathBuf)> {
    let chain = out.join(format!("{name}.pem"));
    let key = out.join(format!("{name}-key.pem"));
    write_private_file(&key, leaf.key_pem().expose())?;
    write_private_file(&chain, &leaf.chain_pem())?;
    Ok((chain, key))
}

/// Adds a token to the file, which is created if absent. Returns the token.
fn add_token(args: &ClientToken) -> anyhow::Result<String> {
    let (token, line) = StaticTokens::generate(&args.name, &args.groups)?;
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    let (mut file, text) = open_token_file(&args.file, &options)?;
    let separator = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    append(&mut file, &format!("{separator}{line}\n"))
        .with_context(|| args.file.display().to_string())?;
    Ok(token.expose().to_owned())
}

/// Turns the lines of the client's tokens into comments, byte by byte in place, and returns their number ("2 tokens").
fn revoke(args: &ClientRevoke) -> anyhow::Result<String> {
    let path_text = || args.file.display().to_string();
    ensure!(
        args.file.exists(),
        "the file {} does not exist; give the file of a listener's client_auth.tokens with --file",
        path_text()
    );
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let (file, text) = open_token_file(&args.file, &options)?;
    let mut count = 0;
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let token = line.split('#').next().unwrap_or_default();
        if token.split_whitespace().nth(1) == Some(&args.name) {
            file.write_all_at(b"#", start).with_context(path_text)?;
            count += 1;
        }
        start += line.len() as u64;
    }
    file.sync_all().with_context(path_text)?;
    match count {
        0 => anyhow::bail!("{} contains no token of client {}", path_text(), args.name),
        1 => Ok("1 token".into()),
        count => Ok(format!("{count} tokens")),
    }
}

/// Opens a token file, locks it, and returns it with its text, which must be valid.
fn open_token_file(path: &Path, options: &OpenOptions) -> anyhow::Result<(File, String)> {
    let path_text = || path.display().to_string();
    let mut file = open_private(path, options).with_context(path_text)?;
    file.lock().with_context(path_text)?;
    let mut text = String::new();
    file.read_to_string(&mut text).with_context(path_text)?;
    StaticTokens::parse(&text).with_context(path_text)?;
    Ok((file, text))
}

fn append(file: &mut File, text: &str) -> std::io::Result<()> {
    let previous_len = file.metadata()?.len();
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .inspect_err(|_| {
            // Half a line would be refused at the next reload; this error is the one to report.
            let _ = file.set_len(previous_len);
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn ask(file: &Path, name: &str) -> ClientToken {
        ClientToken {
            name: name.into(),
            groups: vec!["ops".into()],
            file: file.to_owned(),
        }
    }

    #[test]
    fn the_file_keeps_hashes_only_and_grows_by_a_line_each() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("clients");
        let first = add_token(&ask(&file, "prometheus")).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.trim_end()).unwrap();
        let second = add_token(&ask(&file, "curl")).unwrap();

        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains(&first) && !text.contains(&second));
        let clients = StaticTokens::parse(&text).unwrap();
        assert_eq!(clients.lookup(&first).unwrap().name, "prometheus");
        assert_eq!(clients.lookup(&second).unwrap().groups, ["ops"]);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_of_another_kind_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notes");
        std::fs::write(&file, "milk, eggs\n").unwrap();
        let error = format!("{:#}", add_token(&ask(&file, "curl")).unwrap_err());
        assert!(
            error.contains("notes") && error.contains("line 1"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "milk, eggs\n");
    }

    #[test]
    fn revoke_comments_out_all_tokens_of_the_client_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("clients");
        let revoke = |name: &str| {
            let name = name.to_owned();
            revoke(&ClientRevoke {
                name,
                file: file.clone(),
            })
        };
        assert!(
            revoke("ann")
                .unwrap_err()
                .to_string()
                .contains("does not exist")
        );
        let first = add_token(&ask(&file, "ann")).unwrap();
        let other = add_token(&ask(&file, "annabel")).unwrap();
        let second = add_token(&ask(&file, "ann")).unwrap();
        assert_eq!(revoke("ann").unwrap(), "2 tokens");
        let text = std::fs::read_to_string(&file).unwrap();
        let tokens = StaticTokens::parse(&text).unwrap();
        assert!(tokens.lookup(&first).is_none() && tokens.lookup(&second).is_none());
        assert_eq!(tokens.lookup(&other).unwrap().name, "annabel");
        let again = revoke("ann").unwrap_err().to_string();
        assert!(again.contains("contains no token of client ann"), "{again}");
    }

    #[test]
    fn certificate_key_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let data = crate::cli::operator::DataDir {
            data_dir: folder.path().join("data"),
        };
        let domain = "causeway.test".parse().unwrap();
        super::super::ca::ensure_ca(&data.data_dir, &domain).unwrap();
        issue_certificate(&ClientCertificate {
            name: "curl".into(),
            groups: vec!["admins".into()],
            ttl: std::time::Duration::from_hours(1),
            out: folder.path().to_owned(),
            data,
        })
        .unwrap();
        let key = std::fs::metadata(folder.path().join("curl-key.pem")).unwrap();
        assert_eq!(key.permissions().mode() & 0o777, 0o600);
        let chain = std::fs::read_to_string(folder.path().join("curl.pem")).unwrap();
        assert!(chain.starts_with("-----BEGIN CERTIFICATE-----"));
    }
}
