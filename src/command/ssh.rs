//! `causeway ssh` and `causeway ssh-config`: the system's ssh, with `causeway connect` as its `ProxyCommand`.
//!
//! On unix, ssh passes a `ProxyCommand` to the user's shell. OpenSSH for Windows starts it without a shell, and the ssh of Git for
//! Windows starts a POSIX shell. Both read double quotes.

use std::env;
use std::process::Command;

use anyhow::{Context, bail};

use causeway_tls::NodeName;

use super::nodes;
use crate::access::profile::ProfileDirectory;
use crate::cli::{Ssh, SshConfig};
use crate::output::outln;

/// Replaces this process with ssh, or waits for ssh where a process cannot be replaced.
pub(crate) fn run(args: &Ssh) -> anyhow::Result<()> {
    if args.destination.starts_with('-') {
        bail!("a destination does not begin with a dash; options for ssh follow after --");
    }
    let directory = ProfileDirectory::of_user()?;
    let (profile, _) = directory.select(args.profile.profile.as_deref())?;
    let mut ssh = Command::new("ssh");
    ssh.arg("-o")
        .arg(format!("ProxyCommand={}", proxy_command(&profile)?))
        .arg(&args.destination)
        .args(&args.arguments);
    execute(ssh)
}

#[cfg(unix)]
fn execute(mut ssh: Command) -> anyhow::Result<()> {
    use std::os::unix::process::CommandExt;
    let error = ssh.exec();
    Err(error).context("cannot run ssh; is OpenSSH installed?")
}

#[cfg(not(unix))]
#[expect(
    clippy::disallowed_methods,
    reason = "in place of the exec of unix: the exit code of ssh is that of the command on the node"
)]
fn execute(mut ssh: Command) -> anyhow::Result<()> {
    let status = ssh.status();
    let status = status.context("cannot run ssh; is OpenSSH installed?")?;
    std::process::exit(status.code().unwrap_or(1))
}

/// Prints a section of `ssh_config(5)`.
pub(crate) async fn print_config(args: SshConfig) -> anyhow::Result<()> {
    let (profile, hosts) = if args.nodes.is_empty() {
        let (profile, client) = nodes::open_client(&args.profile)?;
        let list = nodes::fetch(&client).await?;
        // A service is mostly no SSH server, and the list does not tell whether the user may open a session to it.
        let rows = list.nodes.into_iter();
        let reachable = rows.filter(|row| row.connect.unwrap_or(true));
        let hosts = reachable.map(|row| row.node);
        // A name such as `*` would send the user's connections to all other hosts to this gateway.
        let hosts = hosts.map(|host| NodeName::parse(&host).map(|_| host));
        let hosts: Result<Vec<_>, _> = hosts.collect();
        (
            profile,
            hosts.context("the gateway listed an invalid name")?,
        )
    } else {
        let directory = ProfileDirectory::of_user()?;
        let (profile, _) = directory.select(args.profile.profile.as_deref())?;
        (profile, args.nodes)
    };
    if hosts.is_empty() {
        bail!("the gateway allows you to connect to no node");
    }
    if let Some(host) = hosts.iter().find(|host| host.contains(char::is_whitespace)) {
        bail!("{host:?} is not a pattern of ssh_config(5)");
    }
    outln!(
        "Host {}\n  ProxyCommand {}",
        hosts.join(" "),
        proxy_command(&profile)?
    )
}

/// Returns the `ProxyCommand`. ssh replaces `%h`, `%p` and `%%` in it.
fn proxy_command(profile: &str) -> anyhow::Result<String> {
    let program = env::current_exe().context("the path of this program is unknown")?;
    let program = program
        .to_str()
        .context("the path of this program is not UTF-8")?;
    let program = quoted(program);
    // The name of a profile has no character that a shell or ssh replaces.
    Ok(format!("{program} connect --profile {profile} %h:%p"))
}

/// Returns a word for a POSIX shell that ssh has not expanded yet.
#[cfg(unix)]
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.+".contains(&byte);
    let word = word.replace('%', "%%");
    if word.bytes().all(is_plain) {
        word
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Returns a path as a word of a command line that ssh has not expanded yet. No path of Windows contains a quote.
#[cfg(not(unix))]
fn quoted(path: &str) -> String {
    format!("\"{}\"", path.replace('%', "%%"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_the_program_survives_ssh_and_the_shell() {
        assert_eq!(quoted("/usr/bin/causeway"), "/usr/bin/causeway");
        assert_eq!(quoted("/my apps/causeway"), "'/my apps/causeway'");
        assert_eq!(quoted("/50%/o'k"), r"'/50%%/o'\''k'");
    }
}
