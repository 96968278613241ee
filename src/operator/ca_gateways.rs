//! `causeway ca gateways` and `causeway ca revoke-gateway`: the certificates of gateways, and their revocation.
//!
//! The list of revocations is in the data directory and is changed first. Then the gateway that runs there is notified, and refuses
//! the certificate from then on. An external CA revokes the certificates that it issues itself.

use std::path::Path;

use anyhow::{Context, anyhow, bail};
use causeway_certs::parse_serial;
use comfy_table::{Table, presets};
use hyper::StatusCode;
use rustls::pki_types::UnixTime;
use serde::{Deserialize, de::DeserializeOwned};

use super::{admin_client, data_dir, token::format_date};
use crate::cli::operator::{CaGateways, CaRevokeGateway};
use crate::output::outln;

/// Maximum length of a reason, in bytes.
const MAX_REASON_BYTES: usize = 512;
/// Use of a gateway's certificate for edges and other gateways, in the admin API.
const TUNNEL_USE: &str = "tunnel";

/// Certificate that the running gateway uses.
#[derive(Debug, Deserialize)]
struct CertificateInUse {
    used_for: String,
    #[serde(default)]
    serial: String,
    #[serde(default)]
    own: bool,
}

/// Another gateway that the running gateway is connected to.
#[derive(Debug, Deserialize)]
struct PeerGateway {
    address: String,
    #[serde(default)]
    serial: String,
}

/// Number of the nodes at the running gateway, and at the gateways that it is connected to, that know all its revocations.
#[derive(Debug, Deserialize)]
struct InformedNodes {
    revoked: usize,
    connected: usize,
    informed: usize,
    #[serde(default)]
    uncounted: Vec<UncountedGateway>,
}

/// Gateway whose nodes have not been counted as informed.
#[derive(Debug, Deserialize)]
struct UncountedGateway {
    address: String,
    error: String,
}

/// The gateway that runs on a data directory, and the other gateways that it knows.
#[derive(Debug)]
struct RunningGateways {
    address: admin_client::AdminAddress,
    own: CertificateInUse,
    peers: Vec<PeerGateway>,
}

impl RunningGateways {
    /// Asks the gateway that runs on the directory. Returns `None` if none runs there.
    async fn query(directory: &Path) -> anyhow::Result<Option<Self>> {
        let Some(address) = admin_client::address_from_data_dir(directory)? else {
            return Ok(None);
        };
        let certificates: Vec<CertificateInUse> = get(&address, "/api/v1/certificates").await?;
        let own = certificates
            .into_iter()
            .find(|it| it.used_for == TUNNEL_USE);
        Ok(Some(Self {
            own: own.context("the gateway reports no certificate of its tunnel port")?,
            peers: get(&address, "/api/v1/peers").await?,
            address,
        }))
    }

    /// Asks the gateway how many nodes know its revocations. Returns `None` if the gateway has an earlier version.
    async fn query_informed_nodes(&self) -> anyhow::Result<Option<InformedNodes>> {
        const PATH: &str = "/api/v1/ca/revocations";
        let (status, body) = admin_client::get(&self.address, PATH).await?;
        parse_informed_nodes(status, &body)
            .with_context(|| format!("cannot ask the gateway at {} for {PATH}", self.address))
    }

    /// Returns each gateway with the serial number of its certificate.
    fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        let own = ("this gateway", self.own.serial.as_str());
        let peers = self.peers.iter();
        let peers = peers.map(|peer| (peer.address.as_str(), peer.serial.as_str()));
        [own].into_iter().chain(peers)
    }
}

async fn get<T: DeserializeOwned>(
    address: &admin_client::AdminAddress,
    path: &str,
) -> anyhow::Result<T> {
    let (status, body) = admin_client::get(address, path).await?;
    if !status.is_success() {
        bail!("the gateway at {address} answers {path} with {status}");
    }
    serde_json::from_slice(&body).with_context(|| {
        format!("the answer of the gateway at {address} to {path} cannot be parsed")
    })
}

fn parse_informed_nodes(status: StatusCode, body: &[u8]) -> anyhow::Result<Option<InformedNodes>> {
    match status {
        StatusCode::NOT_FOUND => Ok(None),
        _ if status.is_success() => Ok(Some(serde_json::from_slice(body)?)),
        _ => bail!("the answer is {status}"),
    }
}

/// Revokes the certificate of a gateway.
pub(super) async fn revoke(args: &CaRevokeGateway) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    let (store, _) = data_dir::open_with_ca(directory)?;
    let serial = parse_serial(&args.serial).ok_or_else(|| {
        anyhow!(
            "{:?} is not the serial number of a certificate in hexadecimal; `causeway ca gateways` shows those of the gateways",
            args.serial
        )
    })?;
    let reason = args.reason.trim();
    if reason.is_empty() || reason.len() > MAX_REASON_BYTES || reason.contains(char::is_control) {
        bail!("--reason must be one line of 1 to {MAX_REASON_BYTES} bytes");
    }
    let running = RunningGateways::query(directory).await?;
    let is_revoked = store.revoked_gateways()?.iter().any(|(it, _)| it == serial);
    check(running.as_ref(), &serial, args.force || is_revoked)?;
    let state = if store.revoke_gateway(&serial, reason)? {
        "is revoked"
    } else {
        "was revoked before"
    };
    data_dir::notify_gateway(directory, &format!("the certificate {serial} {state}")).await
}

/// Refuses a revocation that the gateway cannot apply. Unless `is_forced`, also refuses one that concerns this gateway itself, or no
/// gateway that is known: the serial number may be mistyped, and edges keep a revocation until the certificate has expired.
fn check(running: Option<&RunningGateways>, serial: &str, is_forced: bool) -> anyhow::Result<()> {
    let own = running.map(|running| &running.own);
    if own.is_some_and(|own| !own.own) {
        bail!(
            "an external CA issues the certificates of this gateway (tunnel.identity), so only that CA can revoke one, and Causeway reads no revocation list of it; remove the CA from tunnel.identity.client_ca and from identity.ca of the edges, or replace it by another issuer"
        );
    }
    if is_forced {
        return Ok(());
    }
    let Some(running) = running else {
        bail!(
            "no gateway runs on this data directory, so it is not known whether a gateway has the certificate {serial}; a revocation cannot be undone: use --force if the serial number is correct"
        );
    };
    if running.own.serial == serial {
        bail!(
            "{serial} is the certificate of this gateway itself; with --force the gateway replaces it, and its edges and the other gateways connect again"
        );
    }
    if running.all().all(|(_, known)| known != serial) {
        let known = running.all().filter(|(_, known)| !known.is_empty());
        let known = known.map(|(gateway, serial)| format!("{serial} ({gateway})"));
        let known = known.collect::<Vec<_>>().join(", ");
        bail!(
            "no gateway that is known here has the certificate {serial}; known are {known}; a revocation cannot be undone: use --force if the serial number is correct, as of a gateway that is away or of its earlier certificate"
        );
    }
    Ok(())
}

/// Prints the certificates of the running gateways, and those that are revoked.
pub(super) async fn list(args: &CaGateways) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    let (store, _) = data_dir::open_with_ca(directory)?;
    let revoked = store.revoked_gateways()?;
    let running = RunningGateways::query(directory).await?;
    let now = UnixTime::now().as_secs();
    let mut table = Table::new();
    let header = ["SERIAL", "GATEWAY", "STATE", "REVOKED", "REASON"];
    table.load_style(presets::NOTHING).set_header(header);
    let of_gateway = |serial: &str| {
        let mut gateways = running.iter().flat_map(RunningGateways::all);
        gateways
            .find(|(_, it)| *it == serial)
            .map(|(gateway, _)| gateway)
    };
    let in_use = running.iter().flat_map(RunningGateways::all);
    let is_revoked = |serial: &str| revoked.iter().any(|(it, _)| it == serial);
    for (gateway, serial) in in_use.filter(|(_, serial)| !is_revoked(serial)) {
        table.add_row([serial, gateway, "in use", "-", "-"]);
    }
    for (serial, revocation) in revoked.iter() {
        let state = if revocation.not_after < now {
            "expired"
        } else {
            "revoked"
        };
        let gateway = of_gateway(serial).unwrap_or("-");
        let at = format_date(revocation.at);
        table.add_row([serial, gateway, state, &at, &revocation.reason]);
    }
    if table.is_empty() {
        return outln!(
            "no gateway runs in {}, and no certificate is revoked",
            directory.display()
        );
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    outln!("{}", table.trim_fmt())?;
    let Some(running) = running.filter(|_| revoked.iter().next().is_some()) else {
        return Ok(());
    };
    match running.query_informed_nodes().await? {
        // A gateway with certificates of an external CA has no revocations.
        Some(nodes) if nodes.revoked > 0 => {
            let InformedNodes {
                connected,
                informed,
                uncounted,
                ..
            } = nodes;
            outln!("{informed} of {connected} connected nodes have confirmed all revocations")?;
            for UncountedGateway { address, error } in uncounted {
                outln!("the confirmations of the gateway at {address} are not counted: {error}")?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(is_own_ca: bool) -> RunningGateways {
        let peer = |address: &str, serial: &str| PeerGateway {
            address: address.to_owned(),
            serial: serial.to_owned(),
        };
        RunningGateways {
            address: "127.0.0.1:1".to_owned().into(),
            own: CertificateInUse {
                used_for: TUNNEL_USE.to_owned(),
                serial: "40aa".to_owned(),
                own: is_own_ca,
            },
            // An earlier version does not report the serial number.
            peers: vec![peer("192.0.2.1:10262", "40bb"), peer("192.0.2.2:10262", "")],
        }
    }

    #[test]
    fn only_a_gateway_of_an_earlier_version_may_count_no_nodes() {
        let body = br#"{"revoked":1,"connected":3,"informed":2}"#;
        let nodes = parse_informed_nodes(StatusCode::OK, body).unwrap().unwrap();
        assert_eq!((nodes.revoked, nodes.connected, nodes.informed), (1, 3, 2));
        assert!(nodes.uncounted.is_empty());
        let earlier = parse_informed_nodes(StatusCode::NOT_FOUND, b"");
        assert!(earlier.unwrap().is_none());
        parse_informed_nodes(StatusCode::INTERNAL_SERVER_ERROR, body).unwrap_err();
        parse_informed_nodes(StatusCode::OK, b"{}").unwrap_err();
    }

    #[test]
    fn the_own_certificate_is_revoked_by_force_only_and_no_external_one() {
        let gateways = running(true);
        assert!(check(Some(&gateways), "40bb", false).is_ok());
        assert!(check(Some(&gateways), "40aa", true).is_ok());
        let refused = check(Some(&gateways), "40aa", false).unwrap_err();
        assert!(refused.to_string().contains("of this gateway itself"));
        let refused = check(Some(&running(false)), "40bb", true).unwrap_err();
        assert!(refused.to_string().contains("tunnel.identity"));
    }

    #[test]
    fn an_unknown_serial_number_is_revoked_by_force_only() {
        let gateways = running(true);
        for serial in ["40bc", "40"] {
            let refused = check(Some(&gateways), serial, false).unwrap_err();
            let refused = refused.to_string();
            let known = "40aa (this gateway), 40bb (192.0.2.1:10262);";
            assert!(refused.contains(known), "{refused}");
            assert!(check(Some(&gateways), serial, true).is_ok());
        }
        let refused = check(None, "40bb", false).unwrap_err().to_string();
        assert!(refused.contains("no gateway runs"), "{refused}");
        assert!(check(None, "40bb", true).is_ok());
    }
}
