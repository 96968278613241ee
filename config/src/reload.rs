//! Requests to reload the configuration of a running process: a channel from the code that requests to the code that reloads.

use tokio::sync::{mpsc, oneshot};

/// Outcome of a reload: a description of the changes, or of every fault of the configuration.
pub type ReloadResult = Result<String, String>;

/// Sender of reload requests; by default there is no receiver. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct ReloadSender(Option<mpsc::Sender<ReloadRequest>>);

/// Receiver of reload requests.
#[derive(Debug)]
pub struct ReloadReceiver(mpsc::Receiver<ReloadRequest>);

/// A reload request that waits for its outcome.
#[derive(Debug)]
pub struct ReloadRequest(oneshot::Sender<ReloadResult>);

/// Returns both ends of the channel.
pub fn reload_channel() -> (ReloadSender, ReloadReceiver) {
    let (sender, receiver) = mpsc::channel(1);
    (ReloadSender(Some(sender)), ReloadReceiver(receiver))
}

impl ReloadSender {
    /// Sends a request, and waits for the outcome. Returns `None` if there is no receiver.
    pub async fn request_reload(&self) -> Option<ReloadResult> {
        let (result_sender, result_receiver) = oneshot::channel();
        self.0
            .as_ref()?
            .send(ReloadRequest(result_sender))
            .await
            .ok()?;
        result_receiver.await.ok()
    }

    /// Returns the response of an admin listener to a reload request: an HTTP status, and one or more lines of text. Every
    /// browser sends the origin of a page that posts (`Origin`), and no other program does: a page may not request a reload.
    pub async fn handle_admin_request(&self, is_page: bool) -> (u16, String) {
        let (code, body) = if is_page {
            (403, "a web page may not request this".to_owned())
        } else {
            match self.request_reload().await {
                Some(Ok(done)) => (200, done),
                Some(Err(why)) => (422, why),
                None => (
                    501,
                    "this process does not support reloading its configuration".to_owned(),
                ),
            }
        };
        (code, format!("{body}\n"))
    }
}

impl ReloadReceiver {
    /// Returns the next request. Waits forever once all senders are gone.
    pub async fn recv(&mut self) -> ReloadRequest {
        match self.0.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }
}

impl ReloadRequest {
    /// Sends the outcome. It is lost if the requester has gone meanwhile.
    pub fn respond(self, outcome: ReloadResult) {
        let _ = self.0.send(outcome);
    }
}

/// Key that takes effect at the next start, with all keys below it.
#[derive(Debug)]
pub struct RestartKey<C: 'static> {
    /// Name of the key.
    pub name: &'static str,
    /// Keys below it that a reload changes.
    pub reloads: &'static [&'static str],
    /// Whether the key differs between two configurations, apart from `reloads`.
    pub differs: fn(&C, &C) -> bool,
}

impl<C> RestartKey<C> {
    /// Returns a key that a reload changes in no part.
    pub const fn whole(name: &'static str, differs: fn(&C, &C) -> bool) -> Self {
        Self {
            name,
            reloads: &[],
            differs,
        }
    }
}

/// All such keys of a configuration. A reload warns of them, and the reference lists them.
#[derive(Debug)]
pub struct RestartKeys<C: 'static>(pub &'static [RestartKey<C>]);

impl<C> RestartKeys<C> {
    /// Returns the keys that differ between the configuration `began`, with which the process started, and `now`.
    pub fn changed(&self, began: &C, now: &C) -> Vec<&'static str> {
        let differs = self.0.iter().filter(|key| (key.differs)(began, now));
        differs.map(|key| key.name).collect()
    }

    /// Whether a change of this key takes effect at the next start. For a key with keys below it, this is about adding and
    /// removing it.
    pub fn contains(&self, key: &str) -> bool {
        let below = |name: &str| {
            let rest = key.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let nearest = self.0.iter().filter(|entry| below(entry.name));
        let nearest = nearest.max_by_key(|entry| entry.name.len());
        nearest.is_some_and(|entry| !entry.reloads.iter().any(|name| below(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_decides() {
        let entry = |name, reloads| RestartKey::<()> {
            name,
            reloads,
            differs: |(), ()| false,
        };
        let entries: &'static [RestartKey<()>] = Box::leak(Box::new([
            entry("tunnel", &["tunnel.advertise", "tunnel.identity"]),
            entry("tunnel.identity", &["tunnel.identity.chain"]),
        ]));
        let keys = RestartKeys(entries);
        for (key, restart) in [
            ("tunnel", true),
            ("tunnel.listen", true),
            ("tunnel.advertise", false),
            ("tunnel.identity", true),
            ("tunnel.identity.signer", true),
            ("tunnel.identity.chain", false),
            ("tunnels", false),
            ("policy", false),
        ] {
            assert_eq!(keys.contains(key), restart, "{key}");
        }
    }
}
