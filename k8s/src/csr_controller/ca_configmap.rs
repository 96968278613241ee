//! Publisher of the CA that edges are to trust, in a `ConfigMap`, so that a node finds the CA with access to its cluster only.
//!
//! The `ConfigMap` has exactly this gateway's roots when the gateway starts, and whenever they change; otherwise only missing
//! roots are restored. So several gateways that apply a new root one after the other do not overwrite each other. When the last
//! one has retired the old root, that root is gone.

use super::{BOUND, PAUSES};
use crate::{
    client::{error_message, watch_error_message},
    csr::KEY,
    log_throttle::LogThrottle,
};
use causeway_gateway::config;
use causeway_rt::backoff::Backoff;
use futures_util::{StreamExt, TryStreamExt, future::OptionFuture};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt, watcher::watch_object},
};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;
use std::{convert::Infallible, pin::pin};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

/// Field manager under which the API records writes.
const MANAGER: &str = "causeway-ca";

/// Publisher that keeps the `ConfigMap` in step with the roots.
pub(super) struct CaPublisher {
    client: Client,
    namespace: String,
    name: String,
    roots: watch::Receiver<String>,
    /// Present content, once it is known; an empty text if there is none.
    there: Option<String>,
    /// Whether the content has to be exactly our roots.
    exactly: bool,
    watching: LogThrottle,
    writing: LogThrottle,
}

impl CaPublisher {
    pub(super) fn new(
        client: Client,
        rules: &config::CsrSigning,
        roots: watch::Receiver<String>,
    ) -> Self {
        Self {
            client,
            namespace: rules.namespace.clone(),
            name: rules.name.clone(),
            roots,
            there: None,
            exactly: true,
            watching: LogThrottle::new("watching the ConfigMap of the CA"),
            writing: LogThrottle::new("publishing the CA in a ConfigMap"),
        }
    }

    /// Runs the publisher. Never returns.
    pub(super) async fn run(mut self) -> Infallible {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let states = watch_object(maps.clone(), &self.name).default_backoff();
        let mut states = pin!(states.map_err(|error| watch_error_message(&error)));
        let mut roots = self.roots.clone();
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        loop {
            let again = match self.settle(&maps).await {
                Ok(()) => {
                    backoff.reset();
                    self.writing.over();
                    None
                }
                Err(why) => {
                    self.writing.say(&why);
                    Some(Instant::now() + backoff.refused(None, rand::random()))
                }
            };
            tokio::select! {
                Some(now) = states.next() => self.heard(now),
                Ok(()) = roots.changed() => self.exactly = true,
                Some(()) = OptionFuture::from(again.map(sleep_until)) => {}
            }
        }
    }

    fn heard(&mut self, now: Result<Option<ConfigMap>, String>) {
        match now {
            Ok(map) => {
                self.watching.over();
                let data = map.and_then(|map| map.data);
                let text = data.and_then(|mut data| data.remove(KEY));
                self.there = Some(text.unwrap_or_default());
            }
            Err(why) => self.watching.say(&why),
        }
    }

    async fn settle(&mut self, maps: &Api<ConfigMap>) -> Result<(), String> {
        let Some(there) = &self.there else {
            return Ok(());
        };
        let own = self.roots.borrow_and_update().clone();
        let wanted = wanted(there, &own, self.exactly);
        if let Some(text) = wanted {
            let apply = json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": { "name": self.name, "namespace": self.namespace },
                "data": { KEY: text },
            });
            let parameters = PatchParams::apply(MANAGER).force();
            let (name, patch) = (&self.name, Patch::Apply(&apply));
            let written = timeout(BOUND, maps.patch(name, &parameters, &patch)).await;
            let written =
                written.map_err(|_| "the cluster's API did not answer in time".to_owned())?;
            written.map_err(|error| error_message(&error))?;
            tracing::info!(
                config_map = name,
                namespace = self.namespace,
                "the CA is published"
            );
            self.there = Some(text);
        }
        self.exactly = false;
        Ok(())
    }
}

/// Returns the content to write, or `None` if the present content is right.
fn wanted(there: &str, own: &str, exactly: bool) -> Option<String> {
    let known = certificates(there);
    let missing = certificates(own)
        .into_iter()
        .any(|root| !known.contains(&root));
    if exactly {
        return (there != own).then(|| own.to_owned());
    }
    missing.then(|| {
        let mut text = own.to_owned();
        let mine = certificates(own);
        let others: Vec<_> = known
            .into_iter()
            .filter(|root| !mine.contains(root))
            .collect();
        text.push_str(&causeway_certs::encode_chain(&others));
        text
    })
}

fn certificates(text: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(text.as_bytes())
        .filter_map(Result::ok)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::{Ca, TrustDomain};

    #[test]
    fn gateways_that_load_a_new_root_in_turn_do_not_overwrite() {
        let root = || {
            let domain = TrustDomain::parse("test.example").unwrap();
            Ca::create(&domain).unwrap().root_pem()
        };
        let (old, new) = (root(), root());
        let both = old.clone() + &new;
        assert_eq!(wanted("", &old, true), Some(old.clone()));
        // A gateway that has both roots adds the new one, and a gateway that has only one changes nothing.
        assert_eq!(wanted(&old, &both, true), Some(both.clone()));
        assert_eq!(wanted(&both, &old, false), None);
        // A root that is removed while a gateway still has it is added again beside the others.
        let back = wanted(&new, &old, false).unwrap();
        assert_eq!(certificates(&back).len(), 2);
        assert_eq!(wanted(&back, &new, false), None);
        // The last gateway that retires the old root removes it.
        assert_eq!(wanted(&back, &new, true), Some(new.clone()));
        assert_eq!(wanted("nonsense", &new, false), Some(new));
    }
}
