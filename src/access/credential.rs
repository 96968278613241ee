//! Credential of a user at a listener: a certificate, or a bearer token from a file or from the output of a command.
//!
//! A command prints the token itself or an `ExecCredential` (client.authentication.k8s.io), as the credential plugins of kubeconfig
//! files do. The result of a command is reused until it expires, and without an expiry until the gateway refuses it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use causeway_config::Secret;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::timeout;

/// Maximum time of a command that prints a token. Its user may have to log in with a browser.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(2);
/// Time before its expiry from which a token is not used any more.
const EXPIRY_MARGIN: Duration = Duration::from_secs(10);
/// Variable that tells a credential plugin of Kubernetes which version of `ExecCredential` is expected.
const EXEC_INFO: (&str, &str) = (
    "KUBERNETES_EXEC_INFO",
    r#"{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","spec":{"interactive":false}}"#,
);

/// Source of a credential, as a profile stores it. Files are read at each use, so that they may be renewed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum CredentialSource {
    /// Client certificate with its key, as PEM files.
    Certificate { certificate: PathBuf, key: PathBuf },
    /// File with a bearer token.
    TokenFile { file: PathBuf },
    /// Program with its arguments, which prints a bearer token or an `ExecCredential`.
    TokenCommand { command: Vec<String> },
    /// No credential, for listeners that serve anonymous clients.
    Anonymous,
}

/// Credential that is ready to be presented.
#[derive(Debug, Default)]
pub(crate) struct Credential {
    /// Bearer token.
    pub(crate) token: Option<Secret>,
    /// Certificate chain with its key.
    pub(crate) certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    /// Time from which the credential is no longer valid.
    expires: Option<SystemTime>,
}

impl Credential {
    /// Whether the credential may still be presented.
    pub(crate) fn is_current(&self) -> bool {
        self.expires
            .is_none_or(|expires| SystemTime::now() + EXPIRY_MARGIN < expires)
    }
}

impl CredentialSource {
    /// Whether a credential is worth keeping between two connections.
    pub(crate) fn is_cacheable(&self) -> bool {
        matches!(self, Self::TokenCommand { .. })
    }

    /// Reads the files, or runs the command.
    ///
    /// # Errors
    /// If there is no usable credential. The error names the file or the command.
    pub(crate) async fn load(&self) -> anyhow::Result<Credential> {
        match self {
            Self::Certificate { certificate, key } => {
                let (chain, key) = (read(certificate)?, read(key)?);
                let loaded = key_pair(&chain, &key);
                let loaded = loaded.with_context(|| certificate.display().to_string())?;
                Ok(Credential {
                    certificate: Some(loaded),
                    ..Credential::default()
                })
            }
            Self::TokenFile { file } => {
                let token = bearer_token(&read(file)?);
                let token = token.with_context(|| file.display().to_string())?;
                Ok(Credential {
                    token: Some(token),
                    ..Credential::default()
                })
            }
            Self::TokenCommand { command } => run(command)
                .await
                .with_context(|| format!("the command `{}`", command.join(" "))),
            Self::Anonymous => Ok(Credential::default()),
        }
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn key_pair(
    chain: &str,
    key: &str,
) -> anyhow::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let chain = causeway_tls::parse_certificates(chain).map_err(anyhow::Error::msg)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).context("no usable private key")?;
    Ok((chain, key))
}

/// Returns a text without the white space around it, if it can be a bearer token (RFC 6750 section 2.1).
fn bearer_token(text: &str) -> anyhow::Result<Secret> {
    let token = text.trim();
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    if token.is_empty() || !token.bytes().all(is_allowed) {
        bail!("its content is not one bearer token");
    }
    Ok(Secret::new(token))
}

async fn run(command: &[String]) -> anyhow::Result<Credential> {
    let [program, arguments @ ..] = command else {
        bail!("is empty");
    };
    let running = Command::new(program)
        .args(arguments)
        .env(EXEC_INFO.0, EXEC_INFO.1)
        // Standard input has the data of a session.
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .spawn()
        .context("cannot be run")?;
    let output = timeout(COMMAND_TIMEOUT, running.wait_with_output())
        .await
        .with_context(|| format!("did not end within {COMMAND_TIMEOUT:?}"))??;
    if !output.status.success() {
        bail!("failed: {}", output.status);
    }
    parse_output(&String::from_utf8(output.stdout).context("printed binary data")?)
}

/// Object of kind `ExecCredential`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredential {
    kind: String,
    #[serde(default)]
    status: Option<ExecCredentialStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredentialStatus {
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
    expiration_timestamp: Option<String>,
}

fn parse_output(text: &str) -> anyhow::Result<Credential> {
    if !text.trim_start().starts_with('{') {
        return Ok(Credential {
            token: Some(bearer_token(text)?),
            ..Credential::default()
        });
    }
    let parsed: ExecCredential =
        serde_json::from_str(text).context("printed JSON that is no ExecCredential")?;
    let status = parsed.status.filter(|_| parsed.kind == "ExecCredential");
    let status = status.context("printed no ExecCredential with a status")?;
    let token = status.token.as_deref().map(bearer_token).transpose()?;
    let certificate = match (&status.client_certificate_data, &status.client_key_data) {
        (Some(chain), Some(key)) => Some(key_pair(chain, key)?),
        (None, None) => None,
        _ => bail!("printed a certificate without a key, or a key without a certificate"),
    };
    if token.is_none() && certificate.is_none() {
        bail!("printed an ExecCredential without a token and without a certificate");
    }
    let expires = status.expiration_timestamp.as_deref();
    let expires = expires
        .map(humantime::parse_rfc3339)
        .transpose()
        .context("printed an expirationTimestamp that is not in RFC 3339 format")?;
    Ok(Credential {
        token,
        certificate,
        expires,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(script: &str) -> CredentialSource {
        let command = ["sh", "-c", script].map(str::to_owned).to_vec();
        CredentialSource::TokenCommand { command }
    }

    fn token(credential: &Credential) -> &str {
        credential.token.as_ref().unwrap().expose()
    }

    #[tokio::test]
    async fn a_command_prints_a_token_or_an_exec_credential() {
        let plain = command("echo abc.def-1").load().await.unwrap();
        assert_eq!(token(&plain), "abc.def-1");
        assert!(plain.is_current());
        let version = r#"case "$KUBERNETES_EXEC_INFO" in *authentication.k8s.io/v1\"*) echo '{"apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential", "status": {"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"}}';; esac"#;
        let expired = command(version).load().await.unwrap();
        assert_eq!(token(&expired), "t");
        assert!(!expired.is_current());
    }

    #[tokio::test]
    async fn a_command_without_a_credential_is_an_error_that_names_it() {
        for (script, message) in [
            ("exit 3", "exit status: 3"),
            ("echo two words", "not one bearer token"),
            ("echo '{}'", "no ExecCredential"),
            (
                r#"echo '{"kind": "Pod", "status": {}}'"#,
                "no ExecCredential",
            ),
            (
                r#"echo '{"kind": "ExecCredential", "status": {}}'"#,
                "without a token",
            ),
        ] {
            let error = format!("{:#}", command(script).load().await.unwrap_err());
            assert!(error.contains(message) && error.contains(script), "{error}");
        }
    }

    #[tokio::test]
    async fn a_token_file_is_read_at_each_use() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let source = CredentialSource::TokenFile { file: file.clone() };
        let missing = format!("{:#}", source.load().await.unwrap_err());
        assert!(missing.contains("cannot read"), "{missing}");
        for text in ["first", "second"] {
            std::fs::write(&file, format!("{text}\n")).unwrap();
            assert_eq!(token(&source.load().await.unwrap()), text);
        }
    }
}
