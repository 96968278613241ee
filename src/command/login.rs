//! `causeway login`: stores a gateway with the user's credential as a profile, after both have been tested.

use std::path::{Path, absolute, is_separator};

use anyhow::{Context, anyhow, bail};
use causeway_config::host_port;
use causeway_tls::{Fingerprint, encode_chain, parse_certificates};
use hyper::StatusCode;

use super::nodes;
use crate::access::credential::CredentialSource;
use crate::access::gateway_client::{GatewayClient, RequestError};
use crate::access::profile::{DEFAULT_NAME, Profile, ProfileDirectory};
use crate::cli::Login;
use crate::output::outln;

/// Port of a gateway whose address has none.
const DEFAULT_PORT: u16 = 443;
/// Maximum number of CAs of an unverified gateway that are tried.
const MAX_CAS: usize = 8;

/// Runs the command.
pub(crate) async fn run(args: Login) -> anyhow::Result<()> {
    let directory = ProfileDirectory::of_user()?;
    directory.path(&args.profile)?;
    let mut profile = Profile {
        gateway: with_port(&args.address)?,
        ca: read_ca(args.ca.as_deref())?,
        credential: credential_source(&args)?,
    };
    if let Some(pin) = args.ca_pin {
        profile.ca = Some(fetch_pinned_ca(&profile, pin).await?);
    }
    let message = test(&profile, &args).await?;
    let replaced = directory.select(Some(&args.profile)).ok();
    let path = directory.save(&args.profile, &profile)?;
    outln!("{message}; stored as {}", path.display())?;
    if let Some((name, old)) = replaced.filter(|(_, old)| old.gateway != profile.gateway) {
        outln!("the profile {name} was for {} before", old.gateway)?;
    }
    if args.profile != DEFAULT_NAME {
        outln!("select it with --profile {}", args.profile)?;
    }
    Ok(())
}

fn with_port(address: &str) -> anyhow::Result<String> {
    if host_port(address).is_ok() {
        return Ok(address.to_owned());
    }
    let complete = format!("{address}:{DEFAULT_PORT}");
    host_port(&complete).map_err(|_| anyhow!("{address:?} is not a valid HOST[:PORT]"))?;
    Ok(complete)
}

fn read_ca(file: Option<&Path>) -> anyhow::Result<Option<String>> {
    let Some(file) = file else {
        return Ok(None);
    };
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let certificates = parse_certificates(&text).map_err(anyhow::Error::msg);
    let certificates = certificates.with_context(|| file.display().to_string())?;
    Ok(Some(encode_chain(&certificates)))
}

fn credential_source(args: &Login) -> anyhow::Result<CredentialSource> {
    Ok(
        if let (Some(certificate), Some(key)) = (&args.cert, &args.key) {
            CredentialSource::Certificate {
                certificate: absolute(certificate)?,
                key: absolute(key)?,
            }
        } else if let Some(file) = &args.token_file {
            CredentialSource::TokenFile {
                file: absolute(file)?,
            }
        } else if args.token_command.is_empty() {
            CredentialSource::Anonymous
        } else {
            let mut command = args.token_command.clone();
            // A relative path would be another program in another directory.
            if let Some(program) = command
                .first_mut()
                .filter(|program| program.contains(is_separator))
            {
                let path = absolute(Path::new(program.as_str()))?;
                let path = path.into_os_string().into_string();
                *program = path.map_err(|path| anyhow!("{} is not UTF-8", path.display()))?;
            }
            CredentialSource::TokenCommand { command }
        },
    )
}

/// Returns the CAs of the gateway, after checking that one of them is the pinned one. The connection is not verified: the pin
/// verifies what comes through it.
async fn fetch_pinned_ca(profile: &Profile, pin: Fingerprint) -> anyhow::Result<String> {
    let client = GatewayClient::new(profile.clone())?;
    let text = client.unverified_ca().await?;
    let certificates = parse_certificates(&text).map_err(anyhow::Error::msg)?;
    let pinned = certificates.iter();
    let pinned = pinned.filter(|each| Fingerprint::of_certificate(each) == pin);
    let pinned: Vec<_> = pinned.cloned().collect();
    if pinned.is_empty() {
        let found = certificates.iter().map(Fingerprint::of_certificate);
        let found: Vec<_> = found.map(|each| format!("sha256:{each}")).collect();
        bail!(
            "the gateway {} has another CA than sha256:{pin}: {}",
            profile.gateway,
            found.join(", ")
        );
    }
    Ok(encode_chain(&pinned))
}

/// Sends a request with the profile. Returns a sentence about its outcome.
async fn test(profile: &Profile, args: &Login) -> anyhow::Result<String> {
    let client = GatewayClient::new(profile.clone())?;
    let gateway = &profile.gateway;
    match nodes::fetch(&client).await {
        Ok(list) => Ok(format!(
            "logged in to {gateway} as {}; nodes that you may reach: {}",
            list.client,
            list.nodes.len()
        )),
        Err(RequestError::Refused(refusal))
            if [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED]
                .contains(&refusal.status) =>
        {
            bail!(
                "{gateway} is not a connect listener of a gateway: {}",
                refusal.detail
            )
        }
        Err(error) if error.is_unknown_issuer() => Err(unknown_issuer(&client, args).await),
        Err(error) => Err(error.into()),
    }
}

/// Returns the error for a gateway whose CA is not trusted. It names the flag that pins the CA.
async fn unknown_issuer(client: &GatewayClient, args: &Login) -> anyhow::Error {
    let gateway = client.gateway();
    let remedy = "give its CA with --ca FILE (ca.pem in the data directory of the gateway), or the fingerprint of the CA with --ca-pin";
    let fetched = client.unverified_ca().await.ok();
    let certificates = fetched.and_then(|text| parse_certificates(&text).ok());
    // With an imported chain, the gateway has a CA for edges and another one for this listener.
    let mut certificates = certificates.unwrap_or_default();
    certificates.truncate(MAX_CAS);
    let issuer = client.issuer_among(certificates).await;
    let has_own_ca = args.ca.is_some() || args.ca_pin.is_some();
    let trust = if has_own_ca {
        "the CA that you gave"
    } else {
        "a CA that this system trusts"
    };
    let Some(issuer) = issuer else {
        return anyhow!("the certificate of {gateway} is not issued by {trust}; {remedy}");
    };
    let fingerprint = Fingerprint::of_certificate(&issuer);
    if has_own_ca {
        return anyhow!(
            "the certificate of {gateway} is not issued by {trust}, but by a CA with the fingerprint sha256:{fingerprint}. \
             Ask the operator of the gateway which CA is right"
        );
    }
    anyhow!(
        "the certificate of {gateway} is not issued by {trust}. Its CA has the fingerprint sha256:{fingerprint}. \
         Compare this fingerprint with the one that the operator of the gateway gives you (openssl x509 -noout -fingerprint -sha256 -in FILE). \
         If they are equal, run the same command again with this flag before the others: --ca-pin sha256:{fingerprint}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_port_gets_that_of_https() {
        let address = |text| with_port(text).ok();
        assert_eq!(
            address("gw.example.com").as_deref(),
            Some("gw.example.com:443")
        );
        assert_eq!(address("gw:10443").as_deref(), Some("gw:10443"));
        assert_eq!(address("[::1]:1").as_deref(), Some("[::1]:1"));
        assert_eq!(address("").as_deref(), None);
    }
}
