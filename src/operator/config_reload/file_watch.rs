//! Watch over the files of a configuration: detects changed content, and waits until a writer has finished.
//!
//! Folders are watched for names that are added, removed and renamed, since editors and Kubernetes replace old files with new
//! ones. The files themselves are watched for writes. Writes to other files of a folder, such as a log, wake no task. A file
//! counts as changed when its content has changed. `generate >file` empties a file first and fills it later, so the watch
//! waits for a file that is open for writing. No function here reads a disk on the calling thread.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use sha2::{Digest, Sha256};
use tokio::io::unix::AsyncFd;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

/// Time for which the content of a file must stay the same. Files that belong together are rarely written at once: a
/// certificate, then its key.
const STABLE_PERIOD: Duration = Duration::from_millis(300);
/// Maximum time to wait for the end of a write. A writer that needs longer has probably forgotten to close the file.
const MAX_WRITE_WAIT: Duration = Duration::from_secs(10);
/// Interval at which files are checked if the system does not report changes, as on NFS.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);
/// Interval of checks if the system has no watcher left: Linux has 128 for each user.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Files, each with the hash of its content, or nothing if it cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileHashes(BTreeMap<PathBuf, Option<[u8; 32]>>);

impl FileHashes {
    /// Records the present content of the files. Blocks on the disk.
    pub(crate) fn record(&mut self, files: impl IntoIterator<Item = PathBuf>) {
        for file in files {
            let hash = content_hash(&file);
            self.0.insert(file, hash);
        }
    }

    /// Returns the entries of both. For files in both, the entries of `other` win.
    pub(super) fn merge(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Returns the current hashes of the same files. Blocks on the disk.
    pub(super) fn rehash(&self) -> Self {
        let mut current = Self::default();
        current.record(self.0.keys().cloned());
        current
    }

    /// Runs [`FileHashes::rehash`] on a thread that may block.
    async fn rehash_blocking(&self) -> Self {
        let hashes = self.clone();
        // The task does not panic; if it is cancelled, nothing counts as changed.
        let result = spawn_blocking(move || hashes.rehash()).await;
        result.unwrap_or_else(|_| self.clone())
    }
}

/// Returns the hash of a file's content. The content of a directory is the names in it.
fn content_hash(file: &Path) -> Option<[u8; 32]> {
    if let Ok(entries) = std::fs::read_dir(file) {
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        let names: BTreeSet<_> = names.collect();
        return Some(Sha256::digest(format!("{names:?}")).into());
    }
    let bytes = std::fs::read(file).ok()?;
    Some(Sha256::digest(bytes).into())
}

/// Changes of a folder that the watcher receives.
const NAME_EVENTS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVE);
/// Changes of a file that the watcher receives.
const WRITE_EVENTS: AddWatchFlags = AddWatchFlags::IN_MODIFY.union(AddWatchFlags::IN_CLOSE_WRITE);

/// Watch over files and their folders by inotify(7).
#[derive(Debug)]
struct Watcher {
    inotify: AsyncFd<Source>,
    files: Vec<PathBuf>,
    /// Files that are being written.
    files_being_written: Mutex<BTreeSet<WatchDescriptor>>,
}

#[derive(Debug)]
struct Source(Inotify);

impl AsRawFd for Source {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Watcher {
    fn new(hashes: &FileHashes) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let files: Vec<PathBuf> = hashes.0.keys().cloned().collect();
        let folders: BTreeSet<PathBuf> = files
            .iter()
            .filter_map(|file| parent_folder(file))
            .collect();
        for folder in folders {
            inotify.add_watch(&folder, NAME_EVENTS)?;
        }
        #[expect(
            deprecated,
            reason = "its successor is unsafe; the descriptor is the source's own and lives as long"
        )]
        let inotify = AsyncFd::new(Source(inotify))?;
        let watcher = Self {
            inotify,
            files,
            files_being_written: Mutex::default(),
        };
        watcher.watch_files();
        Ok(watcher)
    }

    /// Watches the existing files. A file that is watched already stays so.
    fn watch_files(&self) {
        let inotify = &self.inotify.get_ref().0;
        for file in self.files.iter().filter(|file| !file.is_dir()) {
            // For a missing file, the watch on its directory reports its creation.
            let _ = inotify.add_watch(file, WRITE_EVENTS);
        }
    }

    /// Waits until a write has ended, or a name was added, removed or renamed.
    async fn changed(&self) {
        loop {
            let Ok(mut ready) = self.inotify.readable().await else {
                // The runtime is shutting down.
                return std::future::pending().await;
            };
            match ready.try_io(|source| Ok(source.get_ref().0.read_events()?)) {
                Ok(Ok(events)) if !self.process_events(&events) => {}
                Ok(_) => return,
                Err(_would_block) => {}
            }
        }
    }

    /// Processes the events so far. Returns whether a file is being written.
    fn is_writing(&self) -> bool {
        loop {
            match self.inotify.get_ref().0.read_events() {
                Ok(events) => self.process_events(&events),
                Err(Errno::EINTR) => continue,
                Err(_) => break,
            };
        }
        !self.lock_files_being_written().is_empty()
    }

    /// Records files that are being written. Returns whether there is a change other than an unfinished write.
    fn process_events(&self, events: &[InotifyEvent]) -> bool {
        let mut is_finished = false;
        for event in events {
            if event.mask.contains(AddWatchFlags::IN_MODIFY) {
                self.lock_files_being_written().insert(event.wd);
                continue;
            }
            is_finished = true;
            if event.mask.intersects(NAME_EVENTS) {
                self.watch_files();
            } else {
                // The file was closed or deleted.
                self.lock_files_being_written().remove(&event.wd);
            }
        }
        is_finished
    }

    fn lock_files_being_written(&self) -> std::sync::MutexGuard<'_, BTreeSet<WatchDescriptor>> {
        self.files_being_written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The watched files, and the hashes of their last recorded content.
pub(crate) struct WatchedFiles {
    hashes: FileHashes,
    watcher: Option<Watcher>,
}

impl WatchedFiles {
    pub(super) fn watch(hashes: FileHashes) -> Self {
        let watcher = Watcher::new(&hashes).inspect_err(|error| {
            tracing::info!(%error, "inotify is not available; checking files for changes every {POLL_INTERVAL:?}");
        });
        Self {
            hashes,
            watcher: watcher.ok(),
        }
    }

    /// Replaces the files with these, and their hashes at the time when they were read.
    pub(super) fn with_hashes(mut self, hashes: FileHashes) -> Self {
        if self.hashes.0.keys().eq(hashes.0.keys()) {
            self.hashes = hashes;
            return self;
        }
        Self::watch(hashes)
    }

    /// Returns the hashes that were recorded last.
    pub(super) fn hashes(&self) -> FileHashes {
        self.hashes.clone()
    }

    /// Waits until the content of a file differs from the recorded one.
    pub(super) async fn changed(&self) {
        let period = self
            .watcher
            .as_ref()
            .map_or(POLL_INTERVAL, |_| CHECK_INTERVAL);
        let mut ticker = interval_at(Instant::now() + period, period);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.hashes.rehash_blocking().await == self.hashes {
            match &self.watcher {
                Some(watcher) => tokio::select! {
                    () = watcher.changed() => sleep(STABLE_PERIOD).await,
                    _ = ticker.tick() => {}
                },
                None => {
                    ticker.tick().await;
                }
            }
        }
    }

    /// Waits, within a time limit, until no process writes the files and two checks find the same content.
    pub(super) async fn wait_until_stable(&self) {
        let deadline = Instant::now() + MAX_WRITE_WAIT;
        let mut previous = self.hashes.rehash_blocking().await;
        loop {
            sleep(STABLE_PERIOD).await;
            let current = self.hashes.rehash_blocking().await;
            let is_writing = self.watcher.as_ref().is_some_and(Watcher::is_writing);
            if (current == previous && !is_writing) || Instant::now() >= deadline {
                if let Some(watcher) = &self.watcher {
                    watcher.lock_files_being_written().clear();
                }
                return;
            }
            previous = current;
        }
    }
}

/// Returns the folder that reports changes of the file. A directory reports its own changes.
fn parent_folder(file: &Path) -> Option<PathBuf> {
    if file.is_dir() {
        return Some(file.to_owned());
    }
    match file.parent() {
        Some(folder) if folder == Path::new("") => Some(".".into()),
        folder => folder.map(Path::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::io::Write;
    use tokio::time::timeout;

    fn noted(files: &[&Path]) -> FileHashes {
        let mut noted = FileHashes::default();
        noted.record(files.iter().map(|file| file.to_path_buf()));
        noted
    }

    #[tokio::test]
    async fn a_file_that_is_being_written_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "before").unwrap();
        let files = WatchedFiles::watch(noted(&[&file]));
        let mut slow = File::create(&file).unwrap();
        // Another reason for a reload, such as SIGHUP.
        let early = timeout(5 * STABLE_PERIOD, files.wait_until_stable()).await;
        assert!(early.is_err(), "it is empty and open");
        slow.write_all(b"after").unwrap();
        drop(slow);
        timeout(CHECK_INTERVAL / 2, files.changed()).await.unwrap();
        timeout(MAX_WRITE_WAIT * 9 / 10, files.wait_until_stable())
            .await
            .unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"after");
    }

    #[tokio::test]
    async fn writes_to_other_or_unfinished_files_cause_no_wakeup() {
        let folder = tempfile::tempdir().unwrap();
        let (file, log) = (folder.path().join("file"), folder.path().join("log"));
        fs::write(&file, "before").unwrap();
        let mut log = File::create(log).unwrap();
        let files = WatchedFiles::watch(noted(&[&file]));
        let events = || {
            let inotify = &files.watcher.as_ref().unwrap().inotify;
            inotify.get_ref().0.read_events()
        };
        // The kernel queues an event before the write returns.
        log.write_all(b"line\n").unwrap();
        assert_eq!(events().unwrap_err(), Errno::EAGAIN);
        drop(log);
        assert_eq!(events().unwrap_err(), Errno::EAGAIN);

        let mut slow = File::create(&file).unwrap();
        slow.write_all(b"af").unwrap();
        let watcher = files.watcher.as_ref().unwrap();
        assert!(
            !watcher.process_events(&events().unwrap()),
            "it is not finished"
        );
        slow.write_all(b"ter").unwrap();
        drop(slow);
        assert!(watcher.process_events(&events().unwrap()));
        assert!(!watcher.is_writing());
    }

    #[tokio::test]
    async fn a_late_or_replaced_file_is_watched() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let files = WatchedFiles::watch(noted(&[&file]));
        let watcher = files.watcher.as_ref().unwrap();
        for other in [false, true] {
            if other {
                fs::write(folder.path().join("new"), "").unwrap();
                fs::rename(folder.path().join("new"), &file).unwrap();
            } else {
                fs::write(&file, "").unwrap();
            }
            timeout(CHECK_INTERVAL / 2, watcher.changed())
                .await
                .unwrap();
            assert!(!watcher.is_writing());
            let mut slow = fs::OpenOptions::new().append(true).open(&file).unwrap();
            slow.write_all(b"more").unwrap();
            assert!(watcher.is_writing());
            drop(slow);
            assert!(!watcher.is_writing());
        }
    }

    #[tokio::test]
    async fn a_swapped_folder_link_and_a_recreated_file_are_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (version, text) in [("v1", "one"), ("v2", "two")] {
            fs::create_dir(path(version)).unwrap();
            fs::write(path(version).join("file"), text).unwrap();
        }
        // As the kubelet mounts a ConfigMap.
        std::os::unix::fs::symlink("v1", path("..data")).unwrap();
        std::os::unix::fs::symlink("..data/file", path("file")).unwrap();
        let file = path("file");
        let files = WatchedFiles::watch(noted(&[&file]));
        std::os::unix::fs::symlink("v2", path("..new")).unwrap();
        fs::rename(path("..new"), path("..data")).unwrap();
        timeout(CHECK_INTERVAL / 2, files.changed()).await.unwrap();

        let files = files.with_hashes(noted(&[&file]));
        fs::remove_file(&file).unwrap();
        timeout(CHECK_INTERVAL / 2, files.changed()).await.unwrap();
        let files = files.with_hashes(noted(&[&file]));
        fs::write(&file, "three").unwrap();
        timeout(CHECK_INTERVAL / 2, files.changed()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn unreported_changes_are_seen_at_the_next_poll() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "one").unwrap();
        let files = WatchedFiles {
            hashes: noted(&[&file]),
            watcher: None,
        };
        fs::write(&file, "two").unwrap();
        timeout(2 * CHECK_INTERVAL, files.changed()).await.unwrap();
    }
}
