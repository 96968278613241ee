//! `causeway k8s`: what a cluster has to be told. Prints; touches nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use causeway_certs::{certificates, encode_chain};
use causeway_k8s::egress::Front;

use super::data;
use crate::cli::{EgressConfig, K8s};

pub(crate) fn run(order: K8s) -> anyhow::Result<()> {
    match order {
        K8s::EgressConfig(ask) => {
            let front = front(ask)?;
            front.check().map_err(|why| anyhow!(why))?;
            print!("{front}");
            Ok(())
        }
        K8s::CaBundle(ask) => {
            let (_, ca) = data::with_ca(&ask.data.data_dir)?;
            print!("{}", bundle(&ca.bundle_pem(), &ask.kubelet_ca)?);
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

fn front(ask: EgressConfig) -> anyhow::Result<Front> {
    let text = |path: &Path| {
        let text = path.to_str().map(str::to_owned);
        text.with_context(|| format!("{}: no text that YAML can hold", path.display()))
    };
    if let Some(path) = ask.socket {
        return Ok(Front::Socket(text(&path)?));
    }
    let needed = "the command line has asked for it";
    Ok(Front::Tls {
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
    use causeway_certs::{Ca, TrustDomain};

    #[test]
    fn a_bundle_has_our_roots_and_those_of_the_files_each_once_and_no_key() {
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
}
