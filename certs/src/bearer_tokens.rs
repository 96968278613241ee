//! Bearer tokens of clients: a file of hashes, one line per client.
//!
//! A line is `sha256:<hex> <name> [group,group]`; `#` begins a comment. The file never holds a token itself. A presented token is
//! hashed and the hash is looked up, so the time of the lookup reveals nothing about the tokens. The binary reads the file; this
//! module only has its grammar.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use causeway_tls::{Fingerprint, NameError, name::check_client};
use thiserror::Error;

use crate::secret::random_secret;
use causeway_config::Secret;

/// Prefix of each generated token: its kind and version.
const PREFIX: &str = "cwc1";

/// A client that is identified by a bearer token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticToken {
    /// The client's name.
    pub name: String,
    /// The groups that the client belongs to.
    pub groups: Vec<String>,
}

/// The first bad line of a file of bearer tokens.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {message}")]
pub struct StaticTokensError {
    /// Number of the line, from 1.
    pub line: usize,
    /// Description of the fault, and what to write instead.
    pub message: String,
}

/// All bearer-token clients of one file.
#[derive(Debug, Clone, Default)]
pub struct StaticTokens(HashMap<Fingerprint, Arc<StaticToken>>);

impl StaticTokens {
    /// Parses the text of a file.
    pub fn parse(text: &str) -> Result<Self, StaticTokensError> {
        let mut clients = HashMap::new();
        for (index, line) in text.lines().enumerate() {
            let fault = |message| StaticTokensError {
                line: index + 1,
                message,
            };
            let line = line.split('#').next().unwrap_or_default();
            if line.trim().is_empty() {
                continue;
            }
            let (hash, client) = parse_line(line).map_err(fault)?;
            match clients.entry(hash) {
                Entry::Vacant(free) => free.insert(Arc::new(client)),
                Entry::Occupied(taken) => {
                    let owner = &taken.get().name;
                    return Err(fault(format!(
                        "the same token is already listed for '{owner}'"
                    )));
                }
            };
        }
        Ok(Self(clients))
    }

    /// Returns the client that this token belongs to.
    pub fn lookup(&self, presented: &str) -> Option<Arc<StaticToken>> {
        self.0
            .get(&Fingerprint::digest(presented.as_bytes()))
            .cloned()
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no client can authenticate by token.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Generates a new token for the client, and the token's line for the file.
    pub fn generate(name: &str, groups: &[String]) -> Result<(Secret, String), NameError> {
        check_client(name)?;
        groups.iter().try_for_each(|group| check_client(group))?;
        let token = Secret::new(format!("{PREFIX}.{}", random_secret().expose()));
        let hash = Fingerprint::digest(token.expose().as_bytes());
        let mut line = format!("sha256:{hash} {name}");
        if !groups.is_empty() {
            line.push(' ');
            line.push_str(&groups.join(","));
        }
        Ok((token, line))
    }
}

fn parse_line(line: &str) -> Result<(Fingerprint, StaticToken), String> {
    let mut words = line.split_whitespace();
    let hash = words
        .next()
        .and_then(|word| word.strip_prefix("sha256:"))
        .ok_or("a line must begin with 'sha256:' and the hash of the token")?
        .parse()
        .map_err(|_| "'sha256:' must be followed by 64 hexadecimal digits")?;
    let name = words
        .next()
        .ok_or("the name of the client is missing after the hash")?;
    check_client(name).map_err(|error| error.to_string())?;
    let groups: Vec<_> = words
        .next()
        .into_iter()
        .flat_map(|groups| groups.split(','))
        .collect();
    groups
        .iter()
        .try_for_each(|group| check_client(group))
        .map_err(|error| error.to_string())?;
    if words.next().is_some() {
        return Err("write the groups without spaces: group,group".into());
    }
    let groups = groups.into_iter().map(str::to_owned).collect();
    Ok((
        hash,
        StaticToken {
            name: name.to_owned(),
            groups,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> StaticTokensError {
        StaticTokens::parse(text).unwrap_err()
    }

    #[test]
    fn a_generated_token_is_found_by_its_line() {
        let (token, line) = StaticTokens::generate("ann", &["ops".into(), "dev".into()]).unwrap();
        let clients = StaticTokens::parse(&format!("# clients\n\n{line} # laptop\n")).unwrap();
        let found = clients.lookup(token.expose()).unwrap();
        assert_eq!(
            (found.name.as_str(), found.groups.join("+")),
            ("ann", "ops+dev".into())
        );
        assert!(clients.lookup("cwc1.other").is_none() && clients.lookup("").is_none());
        assert!(token.expose().starts_with("cwc1.") && !line.contains(&token.expose()[5..]));
        assert_eq!((clients.len(), clients.is_empty()), (1, false));
    }

    #[test]
    fn a_bad_line_is_named() {
        let (_, good) = StaticTokens::generate("ann", &[]).unwrap();
        let hash = good.split(' ').next().unwrap();
        for bad in [
            "ann",
            "sha256:12 ann",
            hash,
            &format!("{hash} a/b"),
            &format!("{hash} a b c"),
            &format!("{hash} a b,,c"),
        ] {
            assert_eq!(refused(&format!("# x\n{bad}")).line, 2, "{bad}");
        }
        let twice = refused(&format!("{good}\n{good}"));
        assert!(
            twice.line == 2 && twice.message.contains("'ann'"),
            "{twice}"
        );
    }

    #[test]
    fn a_name_that_would_break_the_file_is_refused() {
        assert!(StaticTokens::generate("a b", &[]).is_err());
        assert!(StaticTokens::generate("a", &["b,c".into()]).is_err());
    }
}
