//! A company that has a CA: clients that trust its root alone accept the listeners' certificates, and nothing else changes.
//!
//! The company's certificates are made by openssl, with a name as directories have them; clients are curl.

use crate::world::{
    app::App,
    process::{Ended, Site, causeway},
    tool::{Ran, Tool, need},
    until,
};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// Makes, in `$1`, a root and a CA below it; a root that ends soon; and what cannot sign.
const FOUND: &str = r#"
set -e; cd "$1"
name=/DC=com/DC=example/DC=corp/OU=IT/OU=Keys
may='basicConstraints=critical,CA:TRUE%s\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n'
make() { # NAME PATHLEN DAYS SIGNER, and the kind of key
    printf "$may" "$2" >"$1.ext"
    by=$4; file=$1; days=$3; shift 4
    openssl req -new "$@" -nodes -keyout "$file.key" -subj "$name/CN=$file" -out "$file.csr"
    if [ "$by" = itself ]; then
        openssl x509 -req -in "$file.csr" -signkey "$file.key" -days "$days" -extfile "$file.ext" -out "$file.pem"
    else
        printf 'authorityKeyIdentifier=keyid\n' >>"$file.ext"
        openssl x509 -req -in "$file.csr" -CA "$by.pem" -CAkey "$by.key" -days "$days" -extfile "$file.ext" -out "$file.pem"
    fi
}
make Root '' 3650 itself -newkey rsa:2048
make Issuing ,pathlen:3 1000 Root -newkey ec -pkeyopt ec_paramgen_curve:P-384
cat Issuing.pem Root.pem >chain.pem
make Ending '' 20 itself -newkey ed25519
make Narrow ,pathlen:0 1000 Root -newkey rsa:2048
openssl pkey -in Issuing.key -aes256 -passout pass:secret -out locked.key
openssl rsa -in Root.key -traditional -out pkcs1.key
"#;

struct Company(TempDir);

impl Company {
    async fn found() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let found = Tool::new("sh").args(["-c", FOUND, "sh"]);
        found.args([folder.path()]).run().await.ok();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// An order to which its CA is given.
    async fn signs(
        &self,
        order: &str,
        data: impl AsRef<Path>,
        (certificate, key): (&str, &str),
    ) -> Ended {
        causeway(order)
            .flag("--from-certificate", self.path(certificate))
            .flag("--from-key", self.path(key))
            .flag("--data-dir", data.as_ref())
            .run()
            .await
    }
}

const ISSUING: (&str, &str) = ("chain.pem", "Issuing.key");

/// alice's curl, which trusts what is in this file and nothing else.
async fn trusting(site: &Site, roots: PathBuf) -> Ran {
    let curl = site.curl("edge-1", "");
    curl.args(["--cacert".into(), roots]).run().await
}

async fn rotate(data: impl AsRef<Path>, step: &str) -> Ended {
    let order = causeway("ca rotate").args(step.split(' '));
    order.flag("--data-dir", data.as_ref()).run().await
}

/// Stores the current roots, so that a client trusts only those.
fn keep(site: &Site, name: &str) -> PathBuf {
    let kept = site.path(name);
    fs::copy(site.data().join("ca.pem"), &kept).unwrap();
    kept
}

#[tokio::test]
async fn callers_that_trust_a_companys_root_alone_believe_fronts_through_a_whole_rotation() {
    need!("openssl", "curl");
    let (company, app) = (Company::found().await, App::saying("it").await);
    let mut site = Site::start().await;
    let mut edge = site.join("edge-1", app.port()).await;
    let all = async |site: &Site, roots: &[&PathBuf]| {
        for root in roots {
            let ran = trusting(site, (*root).clone()).await.ok();
            assert_eq!(ran.text(), "it", "{}", root.display());
        }
    };
    let (root, old) = (company.path("Root.pem"), keep(&site, "old.pem"));
    let curl = trusting(&site, root.clone()).await;
    assert_eq!(curl.status.code(), Some(60), "it is not signed yet");

    let ending = company.signs("ca init", site.data(), ("Ending.pem", "Ending.key"));
    ending.await.ok();
    site.gateway
        .said("have it sign again: causeway ca init")
        .await;
    all(&site, &[&company.path("Ending.pem"), &old]).await;
    let signed = company.signs("ca init", site.data(), ISSUING).await.ok();
    assert!(
        signed.stdout.contains("is signed by Issuing, until "),
        "{signed:?}"
    );
    all(&site, &[&root, &old]).await;
    assert!(edge.written().ended().is_empty(), "edges are not concerned");

    rotate(site.data(), "prepare").await.ok();
    let refused = rotate(site.data(), "activate").await;
    refused.failed(&["ca rotate prepare --from-certificate", "--force"]);
    let prepared = company.signs("ca rotate prepare", site.data(), ISSUING);
    prepared.await.ok();
    all(&site, &[&root, &old]).await;
    until("edges believe both", async || {
        rotate(site.data(), "activate").await.code == Some(0)
    })
    .await;
    all(&site, &[&root, &old, &keep(&site, "both.pem")]).await;
    edge.said("certificate is renewed").await;
    until("edges have renewed", async || {
        rotate(site.data(), "retire").await.code == Some(0)
    })
    .await;
    let alice = causeway("ca caller --name alice").flag("--out", site.path("."));
    alice.flag("--data-dir", site.data()).run().await.ok();
    all(&site, &[&root, &keep(&site, "new.pem")]).await;
    assert_eq!(trusting(&site, old).await.status.code(), Some(60));
    let shown = fs::read_to_string(site.data().join("ca.json")).unwrap();
    let key = fs::read_to_string(company.path("Issuing.key")).unwrap();
    assert!(
        !shown.contains(key.lines().nth(1).unwrap()),
        "its key is not kept"
    );
}

#[tokio::test]
async fn a_company_that_cannot_sign_is_told_why_and_no_ca_is_made() {
    need!("openssl");
    let company = Company::found().await;
    let data = company.path("gateway");
    for (files, words) in [
        (
            ("chain.pem", "locked.key"),
            ["is encrypted", "openssl pkey"],
        ),
        (("chain.pem", "Root.key"), ["Root.key", "not the key"]),
        (
            ("Narrow.pem", "Narrow.key"),
            ["Narrow permits 0 CAs", "pathlen:3"],
        ),
        (("Root.key", "Root.key"), ["Root.key", "no certificate"]),
        (("nowhere", "Root.key"), ["cannot read", "nowhere"]),
    ] {
        company.signs("ca init", &data, files).await.failed(&words);
        assert!(!data.join("ca.json").exists());
    }
    let half = causeway("ca init").flag("--from-key", company.path("Root.key"));
    half.flag("--data-dir", &data).run().await.with_code(2);
    let old = company.signs("ca init", &data, ("Root.pem", "pkcs1.key"));
    assert!(old.await.ok().stdout.contains("made a CA"));
}

#[tokio::test]
async fn a_root_that_the_company_has_not_signed_takes_the_place_of_one_that_it_has_by_force_only() {
    need!("openssl");
    let company = Company::found().await;
    let data = company.path("gateway");
    company.signs("ca init", &data, ISSUING).await.ok();
    let prepared = rotate(&data, "prepare").await.ok();
    assert!(
        prepared.stdout.contains("have it signed by"),
        "{prepared:?}"
    );
    let refused = rotate(&data, "activate").await;
    refused.failed(&["ca rotate prepare --from-certificate"]);
    rotate(&data, "activate --force").await.ok();
    rotate(&data, "activate").await.ok();
    let refused = rotate(&data, "retire").await;
    refused.failed(&["ca init --from-certificate"]);
    company.signs("ca init", &data, ISSUING).await.ok();
    rotate(&data, "retire").await.ok();
}
