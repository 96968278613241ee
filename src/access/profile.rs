//! Profiles: the gateways that a user has logged in to, each in a file of the user's configuration directory.
//!
//! A file is `profiles/NAME.json` in `$XDG_CONFIG_HOME/causeway` or `~/.config/causeway`, on Windows in `%APPDATA%\causeway`, private
//! to the user. It contains no secret itself: keys and tokens stay in the files, or come from the commands, that it names.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};

use super::credential::CredentialSource;
use crate::output::write_private_file;

/// Name of the profile that is used if none is named.
pub(crate) const DEFAULT_NAME: &str = "default";
/// Maximum number of characters of a profile's name.
const MAX_NAME: usize = 64;

/// Gateway with the user's credential.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Profile {
    /// Address of a `connect` listener, `HOST:PORT`.
    pub(crate) gateway: String,
    /// Trusted CA certificates as PEM; those of the system if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<String>,
    /// Source of the credential.
    pub(crate) credential: CredentialSource,
}

/// Directory with the profiles of a user.
pub(crate) struct ProfileDirectory(PathBuf);

impl ProfileDirectory {
    /// Returns the directory of the user who runs this process. It may not exist yet.
    ///
    /// # Errors
    /// If the user has no home directory.
    pub(crate) fn of_user() -> anyhow::Result<Self> {
        let (variable, in_home) = if cfg!(windows) {
            ("APPDATA", "AppData/Roaming")
        } else {
            ("XDG_CONFIG_HOME", ".config")
        };
        let named = env::var_os(variable).map(PathBuf::from);
        // The XDG specification tells programs to ignore a relative path.
        let config = named.filter(|path| path.is_absolute());
        let config = config.or_else(|| Some(env::home_dir()?.join(in_home)));
        let config = config.with_context(|| format!("neither {variable} nor HOME is set"))?;
        Ok(Self(config.join("causeway").join("profiles")))
    }

    /// Returns the path of a profile.
    ///
    /// # Errors
    /// If the name cannot be that of a file.
    pub(crate) fn path(&self, name: &str) -> anyhow::Result<PathBuf> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty()
            || name.len() > MAX_NAME
            || name.starts_with('.')
            || !name.bytes().all(is_allowed)
        {
            bail!("a profile's name has 1 to {MAX_NAME} of the characters a-z A-Z 0-9 - _ .");
        }
        Ok(self.0.join(format!("{name}.json")))
    }

    /// Stores a profile. An older one of the same name is replaced.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn save(&self, name: &str, profile: &Profile) -> anyhow::Result<PathBuf> {
        let path = self.path(name)?;
        create_private_directory(&self.0)
            .with_context(|| format!("cannot create {}", self.0.display()))?;
        let text = serde_json::to_string_pretty(profile)? + "\n";
        write_private_file(&path, &text)?;
        Ok(path)
    }

    /// Returns the named profile, or without a name the default one: `default`, or the only one.
    ///
    /// # Errors
    /// If there is no such profile, or it cannot be read.
    pub(crate) fn select(&self, name: Option<&str>) -> anyhow::Result<(String, Profile)> {
        let names = self.names()?;
        let name = match (name, names.as_slice()) {
            (Some(name), _) => name,
            (None, [only]) => only,
            (None, _) => DEFAULT_NAME,
        };
        let path = self.path(name)?;
        if !names.iter().any(|known| known == name) {
            return Err(missing(name, &names));
        }
        let text = fs::read_to_string(&path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let profile = serde_json::from_str(&text)
            .with_context(|| format!("{} is not a profile", path.display()))?;
        Ok((name.to_owned(), profile))
    }

    /// Returns the names of all profiles, in order.
    fn names(&self) -> anyhow::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("cannot read {}", self.0.display()))?,
        };
        let names = entries.filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let name = name.strip_suffix(".json")?.to_owned();
            self.path(&name).ok().map(|_| name)
        });
        let mut names: Vec<_> = names.collect();
        names.sort();
        Ok(names)
    }
}

fn missing(name: &str, names: &[String]) -> anyhow::Error {
    if names.is_empty() {
        anyhow!("you have not logged in to a gateway; run: causeway login ADDRESS")
    } else if name == DEFAULT_NAME {
        anyhow!(
            "there are several profiles and none is named {DEFAULT_NAME}; select one with --profile: {}",
            names.join(", ")
        )
    } else {
        anyhow!(
            "there is no profile {name}; there are: {}",
            names.join(", ")
        )
    }
}

/// Creates a directory with its parents. Only the user may open it; on Windows it inherits the access list of its parent.
fn create_private_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(gateway: &str) -> Profile {
        Profile {
            gateway: gateway.into(),
            ca: Some("PEM".into()),
            credential: CredentialSource::TokenFile {
                file: "/run/token".into(),
            },
        }
    }

    fn directory() -> (tempfile::TempDir, ProfileDirectory) {
        let folder = tempfile::tempdir().unwrap();
        let directory = ProfileDirectory(folder.path().join("causeway/profiles"));
        (folder, directory)
    }

    #[test]
    fn a_stored_profile_is_private_and_read_back() {
        use std::os::unix::fs::PermissionsExt;
        let (_folder, directory) = directory();
        let path = directory.save("work", &profile("gw:443")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(&directory.0), 0o700);
        let expected = ("work".to_owned(), profile("gw:443"));
        assert_eq!(directory.select(Some("work")).unwrap(), expected);
        assert_eq!(directory.select(None).unwrap(), expected);
    }

    #[test]
    fn without_a_name_the_default_profile_is_selected() {
        let (_folder, directory) = directory();
        let error = |name| directory.select(name).unwrap_err().to_string();
        assert!(error(None).contains("causeway login"));
        directory.save("a", &profile("a:1")).unwrap();
        directory.save("b", &profile("b:1")).unwrap();
        assert!(error(None).contains("--profile: a, b"));
        assert!(error(Some("c")).contains("no profile c; there are: a, b"));
        directory.save(DEFAULT_NAME, &profile("c:1")).unwrap();
        assert_eq!(directory.select(None).unwrap().1.gateway, "c:1");
    }

    #[test]
    fn a_name_cannot_leave_the_directory() {
        let (_folder, directory) = directory();
        for name in ["", "..", ".hidden", "a/b", "a b", &"a".repeat(65)] {
            assert!(directory.save(name, &profile("gw:1")).is_err(), "{name}");
        }
    }
}
