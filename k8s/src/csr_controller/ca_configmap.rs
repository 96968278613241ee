//! Publisher of the CA that edges must trust, in a `ConfigMap`. A node with access to its cluster needs nothing else to find
//! the CA.
//!
//! The `ConfigMap` has exactly this gateway's roots when the gateway starts, and whenever they change. At other times only
//! missing roots are restored. So several gateways that apply a new root one after the other do not overwrite each other. The
//! old root is gone once the last gateway has retired it.

use super::{BACKOFF_RANGE, REQUEST_TIMEOUT};
use crate::{
    client::{error_message, watch_error_message},
    csr_client::CA_BUNDLE_KEY,
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
const FIELD_MANAGER: &str = "causeway-ca";

/// Publisher that synchronizes the `ConfigMap` with the roots.
pub(super) struct CaPublisher {
    client: Client,
    namespace: String,
    name: String,
    roots: watch::Receiver<String>,
    /// Present content, once it is known. The text is empty if there is no content.
    current: Option<String>,
    /// Whether the content must be exactly our roots.
    must_match: bool,
    watch_log: LogThrottle,
    write_log: LogThrottle,
}

impl CaPublisher {
    pub(super) fn new(
        client: Client,
        settings: &config::CsrSigning,
        roots: watch::Receiver<String>,
    ) -> Self {
        Self {
            client,
            namespace: settings.namespace.clone(),
            name: settings.name.clone(),
            roots,
            current: None,
            must_match: true,
            watch_log: LogThrottle::new("watching the ConfigMap of the CA"),
            write_log: LogThrottle::new("publishing the CA in a ConfigMap"),
        }
    }

    /// Runs the publisher. Never returns.
    pub(super) async fn run(mut self) -> Infallible {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let updates = watch_object(api.clone(), &self.name).default_backoff();
        let mut updates = pin!(updates.map_err(|error| watch_error_message(&error)));
        let mut roots = self.roots.clone();
        let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
        loop {
            let retry_at = match self.reconcile(&api).await {
                Ok(()) => {
                    backoff.reset();
                    self.write_log.log_recovery();
                    None
                }
                Err(why) => {
                    self.write_log.log_failure(&why);
                    Some(Instant::now() + backoff.refused(None, rand::random()))
                }
            };
            tokio::select! {
                Some(now) = updates.next() => self.handle_update(now),
                Ok(()) = roots.changed() => self.must_match = true,
                Some(()) = OptionFuture::from(retry_at.map(sleep_until)) => {}
            }
        }
    }

    fn handle_update(&mut self, update: Result<Option<ConfigMap>, String>) {
        match update {
            Ok(map) => {
                self.watch_log.log_recovery();
                let data = map.and_then(|map| map.data);
                let text = data.and_then(|mut data| data.remove(CA_BUNDLE_KEY));
                self.current = Some(text.unwrap_or_default());
            }
            Err(why) => self.watch_log.log_failure(&why),
        }
    }

    async fn reconcile(&mut self, api: &Api<ConfigMap>) -> Result<(), String> {
        let Some(current) = &self.current else {
            return Ok(());
        };
        let own_roots = self.roots.borrow_and_update().clone();
        let desired = desired_content(current, &own_roots, self.must_match);
        if let Some(text) = desired {
            let manifest = json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": { "name": self.name, "namespace": self.namespace },
                "data": { CA_BUNDLE_KEY: text },
            });
            let parameters = PatchParams::apply(FIELD_MANAGER).force();
            let (name, patch) = (&self.name, Patch::Apply(&manifest));
            let written = timeout(REQUEST_TIMEOUT, api.patch(name, &parameters, &patch)).await;
            let written =
                written.map_err(|_| "the cluster's API did not answer in time".to_owned())?;
            written.map_err(|error| error_message(&error))?;
            tracing::info!(
                config_map = name,
                namespace = self.namespace,
                "the CA is published"
            );
            self.current = Some(text);
        }
        self.must_match = false;
        Ok(())
    }
}

/// Returns the content to write, or `None` if the present content is correct.
fn desired_content(current: &str, own_roots: &str, must_match: bool) -> Option<String> {
    let current_certificates = parse_certificates(current);
    let missing = parse_certificates(own_roots)
        .into_iter()
        .any(|root| !current_certificates.contains(&root));
    if must_match {
        return (current != own_roots).then(|| own_roots.to_owned());
    }
    missing.then(|| {
        let mut text = own_roots.to_owned();
        let own_certificates = parse_certificates(own_roots);
        let other_certificates: Vec<_> = current_certificates
            .into_iter()
            .filter(|root| !own_certificates.contains(root))
            .collect();
        text.push_str(&causeway_certs::encode_chain(&other_certificates));
        text
    })
}

fn parse_certificates(text: &str) -> Vec<CertificateDer<'static>> {
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
        assert_eq!(desired_content("", &old, true), Some(old.clone()));
        // A gateway that has both roots adds the new one, and a gateway that has only one changes nothing.
        assert_eq!(desired_content(&old, &both, true), Some(both.clone()));
        assert_eq!(desired_content(&both, &old, false), None);
        // A root that is removed while a gateway still has it is added again beside the others.
        let back = desired_content(&new, &old, false).unwrap();
        assert_eq!(parse_certificates(&back).len(), 2);
        assert_eq!(desired_content(&back, &new, false), None);
        // The last gateway that retires the old root removes it.
        assert_eq!(desired_content(&back, &new, true), Some(new.clone()));
        assert_eq!(desired_content("nonsense", &new, false), Some(new));
    }
}
