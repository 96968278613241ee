//! Intermediate CA for listeners, signed by a company's CA: clients that trust only the company's root verify the
//! listeners, and nothing else changes.
//!
//! openssl makes the company's certificates, with subject names as in directories; clients are curl.

use crate::{
    laptop::command,
    world::{
        app::App,
        process::{ExitedProcess, GatewayProcess, causeway},
        tool::{Tool, ToolOutput, need},
        until,
    },
};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// Makes, in `$1`, a root, a CA below it and another root.
const CREATE: &str = r#"
set -e; cd "$1"
name=/DC=com/DC=example/DC=corp/OU=IT/OU=Keys
may='basicConstraints=critical,CA:TRUE%s\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n'
printf "$may" '' >root.ext
printf "${may}authorityKeyIdentifier=keyid\n" ,pathlen:1 >issuing.ext
printf "${may}authorityKeyIdentifier=keyid\nextendedKeyUsage=serverAuth\n" ,pathlen:0 >listeners.ext
for root in Root Other; do
    openssl req -new -newkey rsa:2048 -nodes -keyout $root.key -subj $name/CN=$root -out $root.csr
    openssl x509 -req -in $root.csr -signkey $root.key -days 3650 -extfile root.ext -out $root.pem
done
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -keyout Issuing.key -subj $name/CN=Issuing -out Issuing.csr
openssl x509 -req -in Issuing.csr -CA Root.pem -CAkey Root.key -days 1000 -extfile issuing.ext -out Issuing.pem
"#;

/// Signs the request `$2`.csr of the folder `$1` for `$3` days; and again with another subject, which cannot be copied.
const SIGN: &str = r#"
set -e; cd "$1"
openssl req -verify -noout -in "$2.csr"
openssl x509 -req -in "$2.csr" -CA Issuing.pem -CAkey Issuing.key -days "$3" -extfile listeners.ext -out "$2.signed.pem"
cat "$2.signed.pem" Issuing.pem Root.pem >"$2.pem"
(cat listeners.ext; echo 'nameConstraints=critical,excluded;IP:0.0.0.0/0.0.0.0') >limited.ext
openssl x509 -req -in "$2.csr" -CA Issuing.pem -CAkey Issuing.key -days "$3" -extfile limited.ext -out "$2.limited.signed.pem"
cat "$2.limited.signed.pem" Issuing.pem Root.pem >"$2.limited.pem"
openssl crl2pkcs7 -nocrl -certfile "$2.pem" -out "$2.p7b"
openssl crl2pkcs7 -nocrl -certfile "$2.pem" -outform der -out "$2.p7c"
openssl x509 -in "$2.signed.pem" -outform der -out "$2.der"
openssl x509 -in Root.pem -noout -fingerprint -sha256 | cut -d= -f2 | tr -d ':\n' | tr A-F a-f >Root.sha256
openssl x509 -req -in "$2.csr" -CA Issuing.pem -CAkey Issuing.key -subj /DC=com/DC=example/CN=Twice -extfile listeners.ext -out "$2.named.pem"
"#;

struct CompanyCa(TempDir);

impl CompanyCa {
    async fn create() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let create = Tool::new("sh").args(["-c", CREATE, "sh"]);
        create.args([folder.path()]).run().await.ok();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Signs the pending request of a data directory; returns the chain's file.
    async fn sign(&self, data: &Path, name: &str, days: &str) -> PathBuf {
        let request = causeway("ca csr").flag("--data-dir", data).run().await.ok();
        fs::write(self.path(&format!("{name}.csr")), request.stdout).unwrap();
        let sign = Tool::new("sh")
            .args(["-c", SIGN, "sh"])
            .args([self.0.path()]);
        sign.args([name, days]).run().await.ok();
        self.path(&format!("{name}.pem"))
    }
}

async fn import(data: &Path, chain: &Path) -> ExitedProcess {
    let order = causeway("ca import").args([chain]);
    order.flag("--data-dir", data).run().await
}

/// Imports a chain that must end at this root.
async fn import_below(data: &Path, chain: &Path, root: &Path) -> ExitedProcess {
    let order = causeway("ca import").args([chain]).flag("--root", root);
    order.flag("--data-dir", data).run().await
}

/// curl of the client alice, which trusts only the certificates of this file.
async fn trusting(site: &GatewayProcess, roots: PathBuf) -> ToolOutput {
    let curl = site.curl("edge-1", "");
    curl.args(["--cacert".into(), roots]).run().await
}

/// Asserts that clients that trust the certificates of any one of these files verify the listener.
async fn all(site: &GatewayProcess, roots: &[&PathBuf]) {
    for root in roots {
        let ran = trusting(site, (*root).clone()).await.ok();
        assert_eq!(ran.text(), "it", "{}", root.display());
    }
}

/// Asserts that clients that trust the certificates of this file reject the listener.
async fn untrusted(site: &GatewayProcess, root: &Path) {
    let curl = trusting(site, root.to_owned()).await;
    assert_eq!(curl.status.code(), Some(60), "{}", root.display());
}

/// Asserts that the output of an import of a chain for 20 days names the changes and the early end.
fn assert_warned(imported: &ExitedProcess, company: &CompanyCa, data: &Path) {
    let sha256 = fs::read_to_string(company.path("Root.sha256")).unwrap();
    for message in [
        format!(
            "Listeners now present certificates below the root 'Root' (SHA-256 {sha256}, until "
        ),
        "reject them from now on: give them".to_owned(),
        data.join("ca.pem").display().to_string(),
        "intermediate 'Causeway ".to_owned(),
        "warning: the chain ends in 19 days".to_owned(),
    ] {
        assert!(
            imported.stdout.contains(&message),
            "{message}: {imported:?}"
        );
    }
}

async fn rotate(data: impl AsRef<Path>, step: &str) -> ExitedProcess {
    let order = causeway("ca rotate").args(step.split(' '));
    order.flag("--data-dir", data.as_ref()).run().await
}

/// Stores the current roots, so that a client trusts only those.
fn keep(site: &GatewayProcess, name: &str) -> PathBuf {
    let kept = site.path(name);
    fs::copy(site.data().join("ca.pem"), &kept).unwrap();
    kept
}

#[tokio::test]
async fn company_root_clients_verify_listeners_through_changes() {
    need!("openssl", "curl");
    let (company, app) = (CompanyCa::create().await, App::saying("it").await);
    let site = GatewayProcess::start().await;
    let mut edge = site.join("edge-1", app.port()).await;
    let data = site.data().clone();
    let (root, own) = (company.path("Root.pem"), keep(&site, "own.pem"));
    untrusted(&site, &root).await;

    let chain = company.sign(&data, "ending", "20").await;
    all(&site, &[&own]).await;
    let imported = import_below(&data, &chain, &root).await.ok();
    assert_warned(&imported, &company, &data);
    assert!(edge.written().ended().is_empty(), "edges are not affected");
    let (both, key) = (keep(&site, "both.pem"), data.join("ca.json"));
    all(&site, &[&root, &both]).await;
    untrusted(&site, &own).await;
    assert_eq!(
        fs::metadata(key).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let status = causeway("status").flag("--data-dir", &data);
    let status = status.run().await.ok().stdout;
    assert!(status.contains("listener_ca "), "{status}");
    let again = import(&data, &chain).await.ok();
    assert!(again.stdout.contains("imported before"), "{again:?}");

    rotate(&data, "prepare").await.ok();
    until("edges trust both roots", async || {
        rotate(&data, "activate").await.code == Some(0)
    })
    .await;
    edge.wait_for_line("certificate is renewed").await;
    all(&site, &[&root, &both]).await;
    let renewed = company.sign(&data, "renewed", "300").await;
    let same_root = import(&data, &renewed).await.ok();
    for absent in ["reject them", "the chain ends in"] {
        assert!(!same_root.stdout.contains(absent), "{same_root:?}");
    }
    until("edges have renewed", async || {
        rotate(&data, "retire").await.code == Some(0)
    })
    .await;
    let retired = rotate(&data, "retire").await.ok();
    for message in [
        "below the root 'Root' is unchanged",
        "causeway ca csr --new",
    ] {
        assert!(retired.stdout.contains(message), "{retired:?}");
    }
    let alice = causeway("client certificate --name alice").flag("--out", site.path("."));
    alice.flag("--data-dir", &data).run().await.ok();
    all(&site, &[&root, &both, &keep(&site, "new.pem")]).await;
}

#[tokio::test]
async fn a_chain_that_is_removed_leaves_clients_with_our_own_root() {
    need!("openssl", "curl");
    let (company, app) = (CompanyCa::create().await, App::saying("it").await);
    let mut site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", app.port()).await;
    let data = site.data();
    let (root, own) = (company.path("Root.pem"), keep(&site, "own.pem"));
    let chain = company.sign(&data, "chain", "100").await;
    import(&data, &chain).await.ok();
    let logged = site
        .gateway
        .wait_for_line("certificates below an imported chain")
        .await;
    for message in ["Root", "Causeway ", "ends="] {
        assert!(logged.contains(message), "{logged}");
    }
    all(&site, &[&root, &keep(&site, "both.pem")]).await;
    untrusted(&site, &own).await;
    let remove = async || {
        let order = causeway("ca import --remove").flag("--data-dir", &data);
        order.run().await.ok().stdout
    };
    assert!(remove().await.contains("Causeway's own CA"));
    site.gateway
        .wait_for_line("the imported chain is removed")
        .await;
    assert_eq!(site.gateway.written().count("another CA is in use"), 0);
    all(&site, &[&own, &keep(&site, "after.pem")]).await;
    untrusted(&site, &root).await;
    assert!(remove().await.contains("nothing changes"));
}

#[tokio::test]
async fn login_names_the_root_of_an_imported_chain() {
    need!("openssl");
    let company = CompanyCa::create().await;
    let listener = "listeners: [{ name: laptops, protocol: connect, listen: \"127.0.0.1:0\", names: [127.0.0.1] }]";
    let mut site = GatewayProcess::with_listeners(listener).await;
    let data = site.data();
    let chain = company.sign(&data, "chain", "100").await;
    import(&data, &chain).await.ok();
    site.gateway
        .wait_for_line("certificates below an imported chain")
        .await;
    let login = async |flags: &str| {
        let login = command(
            &site.path("home"),
            &format!("login {} {flags}", site.listener),
        );
        let login = login.args([Path::new("--cert"), &site.path("alice.pem")]);
        let login = login.args([Path::new("--key"), &site.path("alice-key.pem")]);
        login.run().await
    };
    let root = fs::read_to_string(company.path("Root.sha256")).unwrap();
    let own = Tool::new("openssl").args("x509 -noout -fingerprint -sha256 -in".split(' '));
    let own = own
        .args([site.data().join("ca.pem")])
        .run()
        .await
        .ok()
        .text();
    let own = own.trim().split('=').nth(1).unwrap().to_owned();
    for flags in [String::new(), format!("--ca-pin {own}")] {
        let refused = login(&flags).await;
        let issuer = format!("fingerprint sha256:{root}");
        assert!(refused.stderr.contains(&issuer), "{}", refused.stderr);
        let hint = format!("--ca-pin sha256:{root}");
        // Who has another pin must not take this one because the gateway wants it.
        assert_eq!(refused.stderr.contains(&hint), flags.is_empty());
    }
    login(&format!("--ca-pin sha256:{root}")).await.ok();
}

#[tokio::test]
async fn names_that_a_chain_does_not_permit_are_logged_at_the_import_and_others_are_below_it() {
    need!("openssl", "curl");
    let (company, app) = (CompanyCa::create().await, App::saying("it").await);
    let mut site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", app.port()).await;
    let data = site.data();
    company.sign(&data, "chain", "100").await;
    let imported = import(&data, &company.path("chain.limited.pem")).await.ok();
    assert!(imported.stdout.contains("name constraints"), "{imported:?}");
    let logged = site
        .gateway
        .wait_for_line("does not permit these names")
        .await;
    assert!(logged.contains("127.0.0.1"), "{logged}");
    all(&site, &[&company.path("Root.pem")]).await;
}

#[tokio::test]
async fn a_chain_for_another_request_is_refused_with_the_reason() {
    need!("openssl");
    let company = CompanyCa::create().await;
    let data = company.path("gateway");
    let none = causeway("ca csr").flag("--data-dir", &data).run().await;
    none.failed(&["no CA in", "causeway ca init"]);
    let init = causeway("ca init").flag("--data-dir", &data);
    init.run().await.ok();
    let root = company.path("Root.pem");
    import(&data, &root)
        .await
        .failed(&["Root.pem is not imported", "`causeway ca csr`"]);
    let chain = company.sign(&data, "chain", "100").await;
    let before = fs::read(data.join("ca.json")).unwrap();
    let part = |names: [&str; 3]| {
        let text = names.map(|name| fs::read_to_string(company.path(name)).unwrap_or_default());
        let file = company.path("part.pem");
        fs::write(&file, text.concat()).unwrap();
        file
    };
    for (names, words) in [
        (["Root.key", "", ""], ["part.pem", "no certificate"]),
        (
            ["Issuing.pem", "Root.pem", ""],
            ["another public key", "request"],
        ),
        (
            ["chain.signed.pem", "Issuing.pem", ""],
            ["ends at Issuing", "append"],
        ),
        (
            ["chain.named.pem", "Issuing.pem", "Root.pem"],
            ["subject of Twice", "its own subject"],
        ),
        (
            ["chain.signed.pem", "Root.pem", "Issuing.pem"],
            ["signed by Issuing", "the next certificate is Root"],
        ),
        (
            ["chain.signed.pem", "Issuing.pem", "Other.pem"],
            ["signed by Root", "the next certificate is Other"],
        ),
    ] {
        import(&data, &part(names)).await.failed(&words);
    }
    import(&data, &company.path("nowhere"))
        .await
        .failed(&["cannot read", "nowhere"]);
    assert_eq!(fs::read(data.join("ca.json")).unwrap(), before);
    import(&data, &chain).await.ok();
}

#[tokio::test]
async fn a_restore_tells_of_an_older_chain_and_a_new_request_replaces_a_pending_one() {
    need!("openssl");
    let company = CompanyCa::create().await;
    let (data, root) = (company.path("gateway"), company.path("Root.pem"));
    let init = causeway("ca init").flag("--data-dir", &data);
    init.run().await.ok();
    let chain = company.sign(&data, "chain", "100").await;
    let backup = company.path("backup.json");
    let order = |verb: &str| causeway(verb).args([&backup]).flag("--data-dir", &data);
    order("ca backup").run().await.ok();
    import_below(&data, &chain, &root).await.ok();
    let restored = order("ca restore").run().await.ok();
    for message in [
        "are older: it has no imported chain",
        "below the root 'Root'",
    ] {
        assert!(restored.stdout.contains(message), "{restored:?}");
    }
    import(&data, &chain).await.ok();
    let pending = async |flag: &str| {
        let order = causeway(&format!("ca csr {flag}")).flag("--data-dir", &data);
        order.run().await.ok();
        fs::read(data.join("ca.json")).unwrap()
    };
    let first = pending("").await;
    assert_eq!(pending("").await, first);
    assert_ne!(pending("--new").await, first);
}

#[tokio::test]
async fn a_file_of_another_format_or_below_another_root_is_refused_with_what_to_do() {
    need!("openssl");
    let company = CompanyCa::create().await;
    let data = company.path("gateway");
    let init = causeway("ca init").flag("--data-dir", &data);
    init.run().await.ok();
    let chain = company.sign(&data, "chain", "100").await;
    let before = fs::read(data.join("ca.json")).unwrap();
    for (file, command) in [
        ("chain.p7b", "`openssl pkcs7 -print_certs -in "),
        ("chain.p7c", "`openssl pkcs7 -inform der -print_certs -in "),
        ("chain.der", "`openssl x509 -inform der -in "),
    ] {
        import(&data, &company.path(file))
            .await
            .failed(&[file, command]);
    }
    import_below(&data, &chain, &company.path("Other.pem"))
        .await
        .failed(&["ends at the root 'Root'", "has the root 'Other'"]);
    assert_eq!(fs::read(data.join("ca.json")).unwrap(), before);
    import_below(&data, &chain, &company.path("Root.pem"))
        .await
        .ok();
}
