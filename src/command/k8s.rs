//! `causeway k8s`: what a cluster has to be told. Prints; touches nothing.

use std::path::Path;

use anyhow::{Context, anyhow};
use causeway_k8s::egress::Front;

use crate::cli::{EgressConfig, K8s};

pub(crate) fn run(order: K8s) -> anyhow::Result<()> {
    match order {
        K8s::EgressConfig(ask) => {
            let front = front(ask)?;
            front.check().map_err(|why| anyhow!(why))?;
            print!("{front}");
            Ok(())
        }
    }
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
