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
