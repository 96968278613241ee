//! Asking a process that runs to read its configuration anew: from wherever that is asked to whoever can do it.

use tokio::sync::{mpsc, oneshot};

/// What has been done, or everything that is wrong with the configuration, in words.
pub type ReloadResult = Result<String, String>;

/// Where to ask; by default nobody answers. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct ReloadSender(Option<mpsc::Sender<ReloadRequest>>);

/// Who is asked.
#[derive(Debug)]
pub struct ReloadReceiver(mpsc::Receiver<ReloadRequest>);

/// One that asked, and waits.
#[derive(Debug)]
pub struct ReloadRequest(oneshot::Sender<ReloadResult>);

/// Both ends.
pub fn reloads() -> (ReloadSender, ReloadReceiver) {
    let (ask, asked) = mpsc::channel(1);
    (ReloadSender(Some(ask)), ReloadReceiver(asked))
}

impl ReloadSender {
    /// Asks, and waits for the outcome. None where nobody can do it.
    pub async fn ask(&self) -> Option<ReloadResult> {
        let (answer, answered) = oneshot::channel();
        self.0.as_ref()?.send(ReloadRequest(answer)).await.ok()?;
        answered.await.ok()
    }

    /// What an admin listener answers that was asked: an HTTP status, and a line or more for people. Every browser says
    /// where a page that posts comes from (`Origin`), and no other program does: a page may not ask.
    pub async fn answer(&self, is_page: bool) -> (u16, String) {
        let (code, said) = if is_page {
            (403, "a page in a browser may not ask for this".to_owned())
        } else {
            match self.ask().await {
                Some(Ok(done)) => (200, done),
                Some(Err(why)) => (422, why),
                None => (501, "this process reads no configuration anew".to_owned()),
            }
        };
        (code, format!("{said}\n"))
    }
}

impl ReloadReceiver {
    /// The next that asks. Never, once nobody can ask any more.
    pub async fn next(&mut self) -> ReloadRequest {
        match self.0.recv().await {
            Some(asked) => asked,
            None => std::future::pending().await,
        }
    }
}

impl ReloadRequest {
    /// Answers; whoever has gone meanwhile does not hear it.
    pub fn answer(self, outcome: ReloadResult) {
        let _ = self.0.send(outcome);
    }
}
