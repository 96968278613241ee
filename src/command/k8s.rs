//! `causeway k8s`: configuration for a cluster. The command prints and changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use causeway_certs::{Ca, SharedCa, certificates, encode_chain};
use causeway_k8s::egress_config::Endpoint;
use serde_json::json;

use super::data_dir;
use crate::cli::{CaSecret, EgressConfig, K8s};
use crate::output::{self, outln};

pub(crate) fn run(order: K8s) -> anyhow::Result<()> {
    match order {
        K8s::EgressConfig(ask) => {
            let listener = listener(ask)?;
            listener.check().map_err(|why| anyhow!(why))?;
            output::write(format_args!("{listener}"))?;
            Ok(())
        }
        K8s::CaBundle(ask) => {
            let (_, ca) = data_dir::with_ca(&ask.data.data_dir)?;
            output::write(format_args!(
                "{}",
                bundle(&ca.client_bundle_pem(), &ask.kubelet_ca)?
            ))?;
            Ok(())
        }
        K8s::CaSecret(ask) => {
            outln!("{}", secret(&ask)?)?;
            Ok(())
        }
    }
}

/// The certificates of our own roots, then those of the files, each once and nothing else of them.
fn bundle(own: &str, files: &[PathBuf]) -> anyhow::Result<String> {
    let mut all = certificates(own).map_err(|why| anyhow!(why))?;
    for file in files {
        let shown = || file.display().to_string();
        let text = fs::read_to_string(file).with_context(shown)?;
        let certificates = certificates(&text).map_err(|why| anyhow!(why));
        for certificate in certificates.with_context(shown)? {
            if !all.contains(&certificate) {
                all.push(certificate);
            }
        }
    }
    Ok(encode_chain(&all))
}

/// The Secret, as kubectl takes it.
fn secret(ask: &CaSecret) -> anyhow::Result<String> {
    let shared = if let Some(directory) = &ask.data_dir {
        data_dir::with_ca(directory)?.0.shared()?
    } else {
        SharedCa::new(Ca::create(&ask.trust_domain)?)
    };
    let texts: BTreeMap<_, _> = shared.files()?.into();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": { "name": ask.name, "namespace": ask.namespace },
        "stringData": texts,
    });
    Ok(serde_json::to_string_pretty(&secret)?)
}

fn listener(ask: EgressConfig) -> anyhow::Result<Endpoint> {
    let text = |path: &Path| {
        let text = path.to_str().map(str::to_owned);
        text.with_context(|| {
            format!(
                "{}: the path is not valid UTF-8, so YAML cannot contain it",
                path.display()
            )
        })
    };
    if let Some(path) = ask.socket {
        return Ok(Endpoint::Socket(text(&path)?));
    }
    let needed = "the command line requires it";
    Ok(Endpoint::Tls {
        url: ask.url.context(needed)?,
        ca: ask.ca.as_deref().map(text).transpose()?,
        certificate: text(&ask.certificate.context(needed)?)?,
        key: text(&ask.key.context(needed)?)?,
        name: ask.server_name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::{OpenMode, Store, TrustDomain};

    #[test]
    fn a_bundle_has_our_and_the_files_roots_once_and_no_key() {
        let ca = || Ca::create(&TrustDomain::parse("test.example").unwrap()).unwrap();
        let (own, kubelets) = (ca(), ca());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kubelets.pem");
        let key = kubelets.key_pem();
        let text = format!("{}{}{}", own.root_pem(), kubelets.root_pem(), key.expose());
        fs::write(&file, text).unwrap();
        let all = bundle(&own.bundle_pem(), &[file.clone(), file.clone()]).unwrap();
        assert_eq!(all, own.root_pem() + &kubelets.root_pem());
        fs::write(&file, key.expose()).unwrap();
        let refused = bundle(&own.bundle_pem(), &[file]).unwrap_err();
        let refused = format!("{refused:#}");
        assert!(
            refused.contains("kubelets.pem") && refused.contains("no certificate"),
            "{refused}"
        );
    }

    #[test]
    fn a_secret_has_new_shared_material_or_that_of_a_directory() {
        let folder = tempfile::tempdir().unwrap();
        let mut ask = CaSecret {
            namespace: "causeway".to_owned(),
            name: "causeway-ca".to_owned(),
            trust_domain: TrustDomain::parse("test.example").unwrap(),
            data_dir: None,
        };
        let made = |ask: &CaSecret| -> serde_json::Value {
            serde_json::from_str(&secret(ask).unwrap()).unwrap()
        };
        let first = made(&ask);
        assert_eq!(first["metadata"]["namespace"], "causeway");
        for (name, text) in first["stringData"].as_object().unwrap() {
            fs::write(folder.path().join(name), text.as_str().unwrap()).unwrap();
        }
        let shared = SharedCa::read(folder.path()).unwrap();
        assert_eq!(shared.ca().trust_domain().to_string(), "test.example");
        let data = folder.path().join("data");
        let store = Store::open(&data, OpenMode::Create).unwrap();
        store.take_up(&shared).unwrap();
        ask.data_dir = Some(data);
        assert_eq!(made(&ask), first);
    }
}
