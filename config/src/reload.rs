//! Asking a process that runs to read its configuration anew: from wherever that is asked to whoever can do it.

use tokio::sync::{mpsc, oneshot};

/// What has been done, or everything that is wrong with the configuration, in words.
pub type Outcome = Result<String, String>;

/// Where to ask; by default nobody answers. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Reloads(Option<mpsc::Sender<Reload>>);

/// Who is asked.
#[derive(Debug)]
pub struct Reloading(mpsc::Receiver<Reload>);

/// One that asked, and waits.
#[derive(Debug)]
pub struct Reload(oneshot::Sender<Outcome>);

/// Both ends.
pub fn reloads() -> (Reloads, Reloading) {
    let (ask, asked) = mpsc::channel(1);
    (Reloads(Some(ask)), Reloading(asked))
}

impl Reloads {
    /// Asks, and waits for the outcome. None where nobody can do it.
    pub async fn ask(&self) -> Option<Outcome> {
        let (answer, answered) = oneshot::channel();
        self.0.as_ref()?.send(Reload(answer)).await.ok()?;
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

impl Reloading {
    /// The next that asks. Never, once nobody can ask any more.
    pub async fn next(&mut self) -> Reload {
        match self.0.recv().await {
            Some(asked) => asked,
            None => std::future::pending().await,
        }
    }
}

impl Reload {
    /// Answers; whoever has gone meanwhile does not hear it.
    pub fn answer(self, outcome: Outcome) {
        let _ = self.0.send(outcome);
    }
}
