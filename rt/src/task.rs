//! Tasks with an owner: the only `spawn` of the workspace.
//!
//! Dropping a [`TaskGroup`] cancels all of its tasks. Shutdown always has three stages: *request* (a token that the tasks
//! hold), *wait* (the grace period of [`TaskGroup::drain`]), *cancel*.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};
use tokio::{runtime::Handle, time::timeout};
use tokio_util::{
    future::FutureExt,
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tracing::{Instrument, Span};

type BoxedTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Group of tasks in a tree of groups. Dropping it cancels all tasks in it and below it.
#[derive(Debug, Default)]
pub struct TaskGroup {
    tracker: TaskTracker,
    cancel_token: CancellationToken,
}

impl TaskGroup {
    /// Creates a group that is cancelled with `parent`.
    pub fn new(parent: &CancellationToken) -> Self {
        Self {
            tracker: TaskTracker::new(),
            cancel_token: parent.child_token(),
        }
    }

    /// Runs `task` on this thread's runtime until it ends or the group is cancelled.
    pub fn spawn<F>(&self, span: Span, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn_on(&Handle::current(), span, task);
    }

    /// Runs `task` on another runtime.
    pub fn spawn_on<F>(&self, runtime: &Handle, span: Span, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn_boxed(runtime, span, Box::pin(task));
    }

    /// Runs a boxed task. A future is moved several times before its first poll, so its box costs less than the moves. And the code
    /// of tokio's tasks, which depends on the type of the future, exists only once.
    fn spawn_boxed(&self, runtime: &Handle, span: Span, task: BoxedTask) {
        let owned = task.with_cancellation_token_owned(self.cancel_token.clone());
        self.tracker.spawn_on(owned.instrument(span), runtime);
    }

    /// Returns `work` as a part of this group that a task of another group runs: it is waited for and cancelled like a task of both.
    /// Returns nothing if it was cancelled.
    pub fn track<F: Future>(&self, work: F) -> impl Future<Output = Option<F::Output>> + use<F> {
        let owned = work.with_cancellation_token_owned(self.cancel_token.clone());
        self.tracker.track_future(owned)
    }

    /// Returns a guard that cancels the group when it is dropped. It is for owners whose tasks hold the group themselves and
    /// so keep it alive.
    pub fn guard(&self) -> DropGuard {
        self.cancel_token.clone().drop_guard()
    }

    /// Returns the number of running tasks.
    pub fn len(&self) -> usize {
        self.tracker.len()
    }

    /// Whether no task runs.
    pub fn is_empty(&self) -> bool {
        self.tracker.is_empty()
    }

    /// Waits until no task runs.
    pub async fn wait_until_idle(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Waits for the running tasks, at most `grace`, then cancels the remaining ones. Returns the number of these.
    pub async fn drain(&self, grace: Duration) -> usize {
        self.drain_with(grace, || ()).await
    }

    /// Drains like [`TaskGroup::drain`], and calls `before_cancel` before the remaining tasks are cancelled.
    pub async fn drain_with(&self, grace: Duration, before_cancel: impl FnOnce()) -> usize {
        self.tracker.close();
        let _ = timeout(grace, self.tracker.wait()).await;
        before_cancel();
        let left = self.tracker.len();
        self.cancel_token.cancel();
        self.tracker.wait().await;
        left
    }
}

impl Drop for TaskGroup {
    fn drop(&mut self) {
        self.cancel_token.cancel();
    }
}

/// Executor by which hyper spawns the tasks of a connection in a group.
#[derive(Clone, Debug)]
pub struct TaskExecutor {
    tasks: Arc<TaskGroup>,
    span: fn() -> Span,
}

impl TaskExecutor {
    /// Returns an executor whose tasks run in `tasks`, each in a new `span`.
    pub fn new(tasks: Arc<TaskGroup>, span: fn() -> Span) -> Self {
        Self { tasks, span }
    }
}

impl<F> hyper::rt::Executor<F> for TaskExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.tasks.spawn((self.span)(), task);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::info_span;

    #[tokio::test(start_paused = true)]
    async fn drain_aborts_tasks_that_do_not_end() {
        let tasks = TaskGroup::new(&CancellationToken::new());
        tasks.spawn(info_span!("t"), std::future::pending());
        assert_eq!(tasks.drain(Duration::from_secs(30)).await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_the_work_of_other_groups_and_cancels_it() {
        let (tasks, other) = (TaskGroup::default(), TaskGroup::default());
        let second = Duration::from_secs(1);
        other.spawn(info_span!("t"), {
            let work = tasks.track(tokio::time::sleep(second));
            async move { assert!(work.await.is_some()) }
        });
        let lasting = tasks.track(std::future::pending::<()>());
        let begin = tokio::time::Instant::now();
        let (left, lasting) = tokio::join!(tasks.drain(2 * second), lasting);
        assert_eq!((left, lasting, begin.elapsed()), (1, None, 2 * second));
        other.wait_until_idle().await;
    }

    #[tokio::test]
    async fn dropping_the_owner_ends_its_tasks() {
        let tasks = TaskGroup::default();
        let (alive, mut gone) = tokio::sync::mpsc::channel::<()>(1);
        tasks.spawn(info_span!("t"), async move {
            std::future::pending::<()>().await;
            drop(alive);
        });
        drop(tasks);
        assert!(gone.recv().await.is_none());
    }
}
