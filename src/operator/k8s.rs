//! `causeway k8s`: configuration for a cluster. The command prints and changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use causeway_certs::{Ca, SharedCa, encode_chain, parse_certificates};
use causeway_k8s::egress_config::Endpoint;
use serde_json::json;

use super::data_dir;
use crate::cli::operator::{CaSecret, EgressConfig, K8s};
use crate::output::{self, outln};

pub(crate) fn run(subcommand: K8s) -> anyhow::Result<()> {
    match subcommand {
        K8s::EgressConfig(args) => {
            let endpoint = egress_endpoint(args)?;
            endpoint.check().map_err(|why| anyhow!(why))?;
            output::write(format_args!("{endpoint}"))?;
            Ok(())
        }
        K8s::CaBundle(args) => {
            let (_, ca) = data_dir::open_with_ca(&args.data.data_dir)?;
            output::write(format_args!(
                "{}",
                merge_bundles(&ca.client_bundle_pem(), &args.kubelet_ca)?
            ))?;
            Ok(())
        }
        K8s::CaSecret(args) => {
            outln!("{}", render_secret(&args)?)?;
            Ok(())
        }
    }
}

/// Returns the certificates of our own roots, then those of the files. Each certificate comes once, and all other content is
/// dropped.
fn merge_bundles(own_roots: &str, files: &[PathBuf]) -> anyhow::Result<String> {
    let mut all = parse_certificates(own_roots).map_err(|why| anyhow!(why))?;
    for file in files {
        let path_text = || file.display().to_string();
        let text = fs::read_to_string(file).with_context(path_text)?;
        let certificates = parse_certificates(&text).map_err(|why| anyhow!(why));
        for certificate in certificates.with_context(path_text)? {
            if !all.contains(&certificate) {
                all.push(certificate);
            }
        }
    }
    Ok(encode_chain(&all))
}

/// Returns the Secret in a form that kubectl accepts.
fn render_secret(args: &CaSecret) -> anyhow::Result<String> {
    let shared = if let Some(directory) = &args.data_dir {
        data_dir::open_with_ca(directory)?.0.shared()?
    } else {
        SharedCa::new(Ca::create(&args.trust_domain)?)
    };
    let files: BTreeMap<_, _> = shared.files()?.into();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": { "name": args.name, "namespace": args.namespace },
        "stringData": files,
    });
    Ok(serde_json::to_string_pretty(&secret)?)
}

fn egress_endpoint(args: EgressConfig) -> anyhow::Result<Endpoint> {
    let utf8_path = |path: &Path| {
        let text = path.to_str().map(str::to_owned);
        text.with_context(|| {
            format!(
                "{}: the path is not valid UTF-8, so YAML cannot contain it",
                path.display()
            )
        })
    };
    if let Some(path) = args.socket {
        return Ok(Endpoint::Socket(utf8_path(&path)?));
    }
    let missing_argument = "the command line requires it";
    Ok(Endpoint::Tls {
        url: args.url.context(missing_argument)?,
        ca: args.ca.as_deref().map(utf8_path).transpose()?,
        certificate: utf8_path(&args.certificate.context(missing_argument)?)?,
        key: utf8_path(&args.key.context(missing_argument)?)?,
        name: args.server_name,
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
        let all = merge_bundles(&own.bundle_pem(), &[file.clone(), file.clone()]).unwrap();
        assert_eq!(all, own.root_pem() + &kubelets.root_pem());
        fs::write(&file, key.expose()).unwrap();
        let refused = merge_bundles(&own.bundle_pem(), &[file]).unwrap_err();
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
            serde_json::from_str(&render_secret(ask).unwrap()).unwrap()
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
        store.import_shared(&shared).unwrap();
        ask.data_dir = Some(data);
        assert_eq!(made(&ask), first);
    }
}
