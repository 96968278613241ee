//! `causeway ca`: the CA of a data directory.
//!
//! Keys are written with mode 0600, completely or not at all, and never printed. An existing CA is never replaced, because
//! every edge that trusts it would be lost.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use causeway_certs::{
    Backup, Ca as Authority, CaCertificateInfo, Certificate, HostName, ImportOutcome,
    ListenerCaInfo, OpenMode, RotationStep, SharedCa, Store, StoreError, TrustDomain,
};
use rustls::pki_types::CertificateDer;

use super::{ca_gateways, ca_rotate, data_dir};
use crate::cli::operator::{Ca, CaBackup, CaCsr, CaImport, CaInit};
use crate::output::{self, outln};

/// Runs the command.
pub(crate) async fn run(ca: Ca) -> anyhow::Result<()> {
    match ca {
        Ca::Init(args) => init(&args),
        Ca::Rotate(subcommand) => ca_rotate::run(subcommand).await,
        Ca::Backup(args) => backup(&args),
        Ca::Restore(args) => restore(&args),
        Ca::Csr(args) => csr(&args).await,
        Ca::Import(args) => import(&args).await,
        Ca::Gateways(args) => ca_gateways::list(&args).await,
        Ca::RevokeGateway(args) => ca_gateways::revoke(&args).await,
    }
}

/// Returns the store and the CA of the directory. Creates them if they do not exist.
pub(super) fn ensure_ca(
    data_dir: &Path,
    trust_domain: &TrustDomain,
) -> anyhow::Result<(Store, Authority)> {
    let store = Store::open(data_dir, OpenMode::Create)?;
    let (ca, message) = if let Some(ca) = store.ca()? {
        (ca, "a CA exists already and stays unchanged")
    } else {
        let ca = Authority::create(trust_domain)?;
        store.save_ca(&ca)?;
        (ca, "created a CA")
    };
    outln!("{message}: {}", store.root_path().display())?;
    Ok((store, ca))
}

fn init(args: &CaInit) -> anyhow::Result<()> {
    let (_, ca) = ensure_ca(&args.data.data_dir, &args.trust_domain)?;
    outln!(
        "trust domain {}, fingerprint {}",
        ca.trust_domain(),
        ca.fingerprint()
    )?;
    Ok(())
}

/// Prints the pending request. Creates a request if none is pending or `--new` is set.
async fn csr(args: &CaCsr) -> anyhow::Result<()> {
    let (store, _) = data_dir::open_with_ca(&args.data.data_dir)?;
    let (ca, _) = store.change_ca(|ca| {
        anyhow::Ok(if args.new {
            ca.renew_listener_request()?
        } else {
            ca.request_listener_ca()?
        })
    })?;
    // The key must not be lost with this gateway, so the other gateways have it before anyone signs the request.
    ca_rotate::load_in_gateway(&args.data.data_dir).await?;
    let request = ca.listener_request_pem()?.unwrap_or_default();
    output::write(format_args!("{request}"))?;
    Ok(())
}

fn backup(args: &CaBackup) -> anyhow::Result<()> {
    let (store, ca) = data_dir::open_with_ca(&args.data.data_dir)?;
    store.backup()?.save(&args.file)?;
    outln!(
        "CA {} with tickets, tokens and nodes: {}; keep it as you keep the CA itself",
        ca.fingerprint(),
        args.file.display()
    )?;
    Ok(())
}

fn restore(args: &CaBackup) -> anyhow::Result<()> {
    let backup = Backup::read(&args.file)?;
    let directory = &args.data.data_dir;
    let store = Store::open(directory, OpenMode::Create)?;
    let previous = store.ca().ok().flatten();
    store.restore(&backup).map_err(|error| match error {
        StoreError::Exists { .. } => anyhow!(
            "there is another CA in {}, and it is not overwritten; restore into an empty directory",
            directory.display()
        ),
        StoreError::InUse { .. } => anyhow!("{error} (stop the gateway that runs there first)"),
        error => error.into(),
    })?;
    let backup_time = UNIX_EPOCH + Duration::from_secs(backup.made_at());
    outln!(
        "{} is restored to its state at {}: nodes that were revoked or removed since then are admitted again, and join tokens that were used since then are valid again",
        directory.display(),
        humantime::format_rfc3339_seconds(backup_time)
    )?;
    let (previous, restored) = (previous.as_ref(), store.ca()?);
    if let (Some(previous), Some(restored)) = (previous, &restored)
        && previous.has_newer_listener_ca(restored)
    {
        outln!("{}", older_listener_ca(previous, restored))?;
    }
    Ok(())
}

/// Describes a restored chain that is older than the previous one.
fn older_listener_ca(previous: &Authority, restored: &Authority) -> String {
    let describe_chain = |ca: &Authority| {
        ca.listener_ca().map_or_else(
            || "no imported chain".to_owned(),
            |info| {
                let (intermediate, root) = (
                    describe_certificate(&info.intermediate),
                    describe_certificate(&info.root),
                );
                format!("the chain of {intermediate} below the root {root}")
            },
        )
    };
    format!(
        "warning: the backup's requests and chains of listeners are older: it has {}, and the directory had {}. To have a later chain again, make another request (`causeway ca csr --new`), have it signed and import it",
        describe_chain(restored),
        describe_chain(previous)
    )
}

async fn import(args: &CaImport) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    match (&args.from, &args.root) {
        (None, _) => remove_chain(directory)?,
        (Some(from), None) if from.is_dir() => import_shared_ca(from, directory)?,
        (Some(from), Some(_)) if from.is_dir() => bail!(
            "--root is for a chain in a file, and {} is a directory",
            from.display()
        ),
        (Some(from), root) => import_chain(from, root.as_deref(), directory)?,
    }
    ca_rotate::load_in_gateway(directory).await?;
    Ok(())
}

/// Removes the chain of listeners.
fn remove_chain(directory: &Path) -> anyhow::Result<()> {
    let (store, _) = data_dir::open_with_ca(directory)?;
    let (_, step) = store.change_ca(|ca| anyhow::Ok(ca.remove_listener_chain()))?;
    if step == RotationStep::Unchanged {
        return outln!("no chain is imported, and nothing changes");
    }
    outln!(
        "The chain and its key are removed. Listeners now present certificates of Causeway's own CA. Clients that do not have its root reject them from now on: give them {}.",
        store.root_path().display()
    )
}

/// Installs the chain of listeners, if it permits all nodes that have joined.
fn import_chain(from: &Path, root: Option<&Path>, directory: &Path) -> anyhow::Result<()> {
    let file = from.display();
    let root = root.map(|path| anyhow::Ok((path, read_root(path)?)));
    let root = root.transpose()?;
    let bytes = fs::read(from).with_context(|| format!("cannot read {file}"))?;
    if let Some(hint) = conversion_hint(&bytes, from) {
        bail!("{file} is not imported: {hint}");
    }
    let chain = String::from_utf8_lossy(&bytes);
    let (store, previous_ca) = data_dir::open_with_ca(directory)?;
    let nodes = store.nodes().all()?;
    let names: Vec<_> = nodes.iter().map(|it| HostName::from(&it.node)).collect();
    let (ca, step) = store.change_ca(|ca| {
        let (ca, step) = ca
            .import_listener_chain(&chain, &names)
            .with_context(|| format!("{file} is not imported"))?;
        let info = ca.listener_ca().context("the chain is gone again")?;
        if let Some((path, expected)) = &root
            && info.root.fingerprint != expected.fingerprint
        {
            bail!(
                "{file} is not imported: it ends at the root {}, and {} has the root {}",
                describe_certificate(&info.root),
                path.display(),
                describe_certificate(expected)
            );
        }
        Ok((ca, step))
    })?;
    let info = ca.listener_ca().context("the chain is gone again")?;
    let root_before = previous_ca.listener_ca().map(|info| info.root.fingerprint);
    let root_changed = step == RotationStep::Applied && root_before != Some(info.root.fingerprint);
    let addresses = nodes.iter().flat_map(|node| &node.addresses);
    let not_permitted = ca.names_outside_chain(addresses.map(|it| HostName::Ip(*it)).collect());
    outln!("{}", chain_report(&info, step, &not_permitted))?;
    let now = SystemTime::now();
    if let Some(warning) = expiry_warning(&info, now) {
        outln!("{warning}")?;
    }
    let ca_pem = store.root_path();
    if root_changed {
        outln!("{}", root_change_warning(&info, &ca_pem))?;
    }
    Ok(())
}

/// Reads the one certificate of a file.
fn read_root(path: &Path) -> anyhow::Result<CaCertificateInfo> {
    let file = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {file}"))?;
    let certificates =
        causeway_certs::parse_certificates(&text).map_err(|why| anyhow!("{file}: {why}"))?;
    let [root] = &certificates[..] else {
        bail!(
            "{file} has {} certificates; it must have one, the root",
            certificates.len()
        );
    };
    CaCertificateInfo::parse(root).with_context(|| format!("{file} is no CA certificate"))
}

/// Returns the command that converts a file of another format.
fn conversion_hint(bytes: &[u8], path: &Path) -> Option<String> {
    let file = path.display();
    let pkcs7 = |form: &str| {
        format!(
            "it is in PKCS#7 format; convert it by `openssl pkcs7{form} -print_certs -in {file} -out chain.pem`"
        )
    };
    if bytes.starts_with(&[0x30]) {
        let certificate = CertificateDer::from(bytes);
        return Some(if Certificate::parse(&certificate).is_ok() {
            format!(
                "it is a certificate in DER format; convert it by `openssl x509 -inform der -in {file} -out signed.pem`, and append the CAs above it"
            )
        } else {
            pkcs7(" -inform der")
        });
    }
    let text = String::from_utf8_lossy(bytes);
    ["PKCS7", "CMS"]
        .iter()
        .any(|label| text.contains(&format!("-----BEGIN {label}-----")))
        .then(|| pkcs7(""))
}

/// Describes a certificate by its subject, fingerprint and end.
fn describe_certificate(certificate: &CaCertificateInfo) -> String {
    let CaCertificateInfo {
        subject,
        fingerprint,
        ..
    } = certificate;
    format!(
        "'{subject}' (SHA-256 {fingerprint}, until {})",
        format_expiry(certificate)
    )
}

fn format_expiry(certificate: &CaCertificateInfo) -> humantime::Rfc3339Timestamp {
    let expiry = Duration::from_secs(certificate.not_after.as_secs());
    humantime::format_rfc3339_seconds(UNIX_EPOCH + expiry)
}

/// Describes the chain in use, and the addresses that it does not permit.
fn chain_report(info: &ListenerCaInfo, step: RotationStep, not_permitted: &[HostName]) -> String {
    let mut text = format!(
        "{}\nintermediate {}\nroot {}",
        if step == RotationStep::Applied {
            "imported"
        } else {
            "imported before"
        },
        describe_certificate(&info.intermediate),
        describe_certificate(&info.root)
    );
    if info.has_name_constraints {
        text += "\nThe chain has name constraints. For names that these do not permit, listeners present certificates of Causeway's own CA.";
    }
    if !not_permitted.is_empty() {
        let shown: Vec<_> = not_permitted
            .iter()
            .take(5)
            .map(ToString::to_string)
            .collect();
        let (count, shown) = (not_permitted.len(), shown.join(", "));
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\nwarning: the name constraints do not permit {count} confirmed addresses of nodes, such as {shown}"
        );
    }
    text
}

/// Returns a warning if the chain ends within 30 days.
fn expiry_warning(info: &ListenerCaInfo, now: SystemTime) -> Option<String> {
    let first = &info.first_to_expire;
    let remaining =
        (UNIX_EPOCH + Duration::from_secs(first.not_after.as_secs())).duration_since(now);
    let days = remaining.unwrap_or_default().as_secs() / (24 * 3600);
    (days < 30).then(|| {
        format!(
            "warning: the chain ends in {days} days, at {}, with the certificate '{}'; have it renewed, and import it again",
            format_expiry(first),
            first.subject
        )
    })
}

/// Describes the consequences for clients if the root changes.
fn root_change_warning(info: &ListenerCaInfo, ca_pem: &Path) -> String {
    format!(
        "Listeners now present certificates below the root {}. Clients that have only the old ca.pem reject them from now on: give them {}.",
        describe_certificate(&info.root),
        ca_pem.display()
    )
}

fn import_shared_ca(from: &Path, directory: &Path) -> anyhow::Result<()> {
    let shared = SharedCa::read(from)?;
    let store = Store::open(directory, OpenMode::Create)?;
    let outcome = store.import_shared(&shared).map_err(|error| match error {
        StoreError::Exists { .. } => anyhow!(
            "there is another CA in {}, and its edges would be lost; take up the one that it has (causeway k8s ca-secret --data-dir {} makes the Secret), or empty the directory",
            directory.display(),
            directory.display()
        ),
        error => error.into(),
    })?;
    outln!("{}", describe_import(outcome, shared.ca(), directory))?;
    Ok(())
}

/// Describes the outcome of importing the shared CA.
fn describe_import(outcome: ImportOutcome, shared: &Authority, directory: &Path) -> String {
    let ca = shared.fingerprint();
    match outcome {
        ImportOutcome::Imported => format!("CA {ca} taken up"),
        ImportOutcome::AlreadyImported => format!("CA {ca} is there already"),
        ImportOutcome::Behind => format!(
            "CA {ca} is not taken up: {directory} is ahead of it by a step of `causeway ca rotate`, a request or an imported chain, and stays as it is; let the Secret follow: `causeway k8s ca-secret --data-dir {directory} | kubectl replace -f -`",
            directory = directory.display()
        ),
        ImportOutcome::Diverged => format!(
            "CA {ca} is not taken up: it and {directory} have diverged, since a step of `causeway ca rotate`, a request or an imported chain was made in both; {directory} stays as it is. Decide for one: to keep {directory}, replace the Secret: `causeway k8s ca-secret --data-dir {directory} | kubectl replace -f -`; to keep the Secret, empty {directory} and import again",
            directory = directory.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::operator::DataDir;
    use causeway_certs::Fingerprint;
    use rustls::pki_types::UnixTime;

    #[tokio::test]
    async fn a_leftover_secret_is_not_used_and_the_remedy_is_stated() {
        let folder = tempfile::tempdir().unwrap();
        let data_dir = folder.path().join("data");
        let domain = TrustDomain::parse("causeway.test").unwrap();
        let (store, _) = ensure_ca(&data_dir, &domain).unwrap();
        for (name, text) in store.shared().unwrap().files().unwrap() {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        store.change_ca(|ca| anyhow::Ok(ca.prepare()?)).unwrap();
        let ahead = std::fs::read(data_dir.join("ca.json")).unwrap();
        let ask = CaImport {
            from: Some(folder.path().to_owned()),
            root: None,
            remove: false,
            data: DataDir {
                data_dir: data_dir.clone(),
            },
        };
        import(&ask).await.unwrap();
        assert_eq!(std::fs::read(data_dir.join("ca.json")).unwrap(), ahead);
        let shared = SharedCa::read(folder.path()).unwrap();
        let response_text = describe_import(
            store.import_shared(&shared).unwrap(),
            shared.ca(),
            Path::new("/data"),
        );
        let command = "`causeway k8s ca-secret --data-dir /data | kubectl replace -f -`";
        assert!(
            response_text.contains("is ahead") && response_text.contains(command),
            "{response_text}"
        );
    }

    #[test]
    fn a_secret_that_has_diverged_is_told_from_one_that_was_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let domain = TrustDomain::parse("causeway.test").unwrap();
        let (store, _) = ensure_ca(&folder.path().join("data"), &domain).unwrap();
        let other = Store::open(folder.path().join("other"), OpenMode::Create).unwrap();
        other.import_shared(&store.shared().unwrap()).unwrap();
        for store in [&store, &other] {
            let request = |ca: Authority| anyhow::Ok(ca.request_listener_ca()?);
            store.change_ca(request).unwrap();
        }
        let shared = other.shared().unwrap();
        let taken = store.import_shared(&shared).unwrap();
        let response_text = describe_import(taken, shared.ca(), Path::new("/data"));
        assert!(
            response_text.contains("/data have diverged"),
            "{response_text}"
        );
        assert!(!response_text.contains("is ahead"), "{response_text}");
    }

    #[test]
    fn a_chain_that_ends_within_thirty_days_is_warned_of_by_the_certificate_that_ends_first() {
        let certificate = |subject: &str, days: u64| CaCertificateInfo {
            certificate: CertificateDer::from(Vec::new()),
            subject: subject.to_owned(),
            fingerprint: Fingerprint::of_certificate(&CertificateDer::from(Vec::new())),
            not_after: UnixTime::since_unix_epoch(Duration::from_hours(24 * days)),
        };
        let info = ListenerCaInfo {
            intermediate: certificate("Listeners", 200),
            root: certificate("Root", 300),
            first_to_expire: certificate("Issuing", 100),
            has_name_constraints: false,
        };
        let at = |days: u64| expiry_warning(&info, UNIX_EPOCH + Duration::from_hours(24 * days));
        assert_eq!(at(70), None);
        let response_text = at(71).unwrap();
        assert!(
            response_text.contains("ends in 29 days, at 1970-04-11T00:00:00Z"),
            "{response_text}"
        );
        assert!(response_text.contains("'Issuing'"), "{response_text}");
    }

    #[test]
    fn a_second_init_keeps_the_ca() {
        let folder = tempfile::tempdir().unwrap();
        let data = || DataDir {
            data_dir: folder.path().join("data"),
        };
        let ask = || CaInit {
            trust_domain: "causeway.test".parse().unwrap(),
            data: data(),
        };
        init(&ask()).unwrap();
        let root = std::fs::read(folder.path().join("data/ca.pem")).unwrap();
        init(&ask()).unwrap();
        assert_eq!(
            std::fs::read(folder.path().join("data/ca.pem")).unwrap(),
            root
        );
    }
}
