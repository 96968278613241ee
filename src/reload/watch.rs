//! The files of a configuration: whether they say something else, and whether whoever writes them has come to an end.
//!
//! Files are watched by their folders, since editors and Kubernetes put new ones in their place, and count as changed
//! when what they say has. `generate >file` empties a file first and fills it later: one that is open for
//! writing is waited for. Nothing here reads a disk on the thread that asks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use ::notify::{Event, RecommendedWatcher, RecursiveMode, Watcher};
use sha2::{Digest, Sha256};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

/// What a file says must be the same for so long. Files that belong together are rarely written at once: a
/// certificate, then its key.
const SETTLED: Duration = Duration::from_millis(300);
/// A writer that has not come to an end by then has forgotten the file.
const WRITING: Duration = Duration::from_secs(10);
/// How often files are looked at where nobody tells of changes, as on NFS.
const LOOK: Duration = Duration::from_mins(1);
/// The same where the system has nobody left to tell: Linux has 128 for each user.
const LOOK_OURSELVES: Duration = Duration::from_secs(5);

/// Files, and what each says as a hash; nothing where it cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Noted(BTreeMap<PathBuf, Option<[u8; 32]>>);

impl Noted {
    /// Notes what the files say now. Blocks on the disk.
    pub(crate) fn files(&mut self, files: impl IntoIterator<Item = PathBuf>) {
        for file in files {
            let said = said(&file);
            self.0.insert(file, said);
        }
    }

    /// Both; where both know a file, `other` knows it better.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// What the same files say now. Blocks on the disk.
    pub(super) fn anew(&self) -> Self {
        let mut now = Self::default();
        now.files(self.0.keys().cloned());
        now
    }

    /// The same, on a thread that may block.
    async fn now(&self) -> Self {
        let noted = self.clone();
        // It does not panic; and what cannot be looked at has not changed.
        let read = spawn_blocking(move || noted.anew()).await;
        read.unwrap_or_else(|_| self.clone())
    }
}

/// Of a directory it is the names in it that count.
fn said(file: &Path) -> Option<[u8; 32]> {
    if let Ok(entries) = std::fs::read_dir(file) {
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        let names: BTreeSet<_> = names.collect();
        return Some(Sha256::digest(format!("{names:?}")).into());
    }
    let bytes = std::fs::read(file).ok()?;
    Some(Sha256::digest(bytes).into())
}

/// What the watcher's thread tells.
#[derive(Debug, Default)]
struct Told {
    touched: Notify,
    /// Files that are being written.
    writing: Mutex<BTreeSet<PathBuf>>,
}

impl Told {
    fn writing(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, event: &Event, files: &BTreeSet<PathBuf>) {
        let of_ours = event.paths.iter().filter(|path| files.contains(*path));
        match event.kind {
            EventKind::Modify(ModifyKind::Data(_)) => self.writing().extend(of_ours.cloned()),
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => {
                of_ours.for_each(|path| {
                    self.writing().remove(path);
                });
            }
            // Reading them is an event too, of which this would be a circle.
            EventKind::Access(_) => return,
            _ => {}
        }
        self.touched.notify_one();
    }
}

/// The files that count, and what they said last.
pub(crate) struct Files {
    noted: Noted,
    told: Arc<Told>,
    /// Ends with its last owner.
    watcher: Option<RecommendedWatcher>,
}

impl Files {
    pub(super) fn watch(noted: Noted) -> Self {
        let told = Arc::default();
        let watcher = watcher(&noted, Arc::clone(&told)).inspect_err(|error| {
            tracing::info!(%error, "the system tells of no changed files: looking each {LOOK_OURSELVES:?}");
        });
        Self {
            noted,
            told,
            watcher: watcher.ok(),
        }
    }

    /// The same files or others, as they were when they were read.
    pub(super) fn replaced(mut self, noted: Noted) -> Self {
        if self.noted.0.keys().eq(noted.0.keys()) {
            self.noted = noted;
            return self;
        }
        Self::watch(noted)
    }

    /// What they said last.
    pub(super) fn noted(&self) -> Noted {
        self.noted.clone()
    }

    /// Returns once what they say is not what they said.
    pub(super) async fn changed(&self) {
        let each = self.watcher.as_ref().map_or(LOOK_OURSELVES, |_| LOOK);
        let mut look = interval_at(Instant::now() + each, each);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.noted.now().await == self.noted {
            tokio::select! {
                () = self.told.touched.notified() => sleep(SETTLED).await,
                _ = look.tick() => {}
            }
        }
    }

    /// Waits until nobody writes them and they say the same twice, within a bound.
    pub(super) async fn settled(&self) {
        let end = Instant::now() + WRITING;
        let mut last = self.noted.now().await;
        loop {
            sleep(SETTLED).await;
            let now = self.noted.now().await;
            if (now == last && self.told.writing().is_empty()) || Instant::now() >= end {
                self.told.writing().clear();
                return;
            }
            last = now;
        }
    }
}

fn watcher(noted: &Noted, told: Arc<Told>) -> ::notify::Result<RecommendedWatcher> {
    let files: BTreeSet<PathBuf> = noted.0.keys().map(|file| in_folder(file)).collect();
    let folders: BTreeSet<PathBuf> = files.iter().filter_map(|file| folder(file)).collect();
    let mut watcher = ::notify::recommended_watcher(move |event: ::notify::Result<Event>| {
        if let Ok(event) = event {
            told.hear(&event, &files);
        }
    })?;
    for folder in folders {
        watcher.watch(&folder, RecursiveMode::NonRecursive)?;
    }
    Ok(watcher)
}

/// As events name it: with its folder.
fn in_folder(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if folder != Path::new("") => file.to_owned(),
        _ => Path::new(".").join(file),
    }
}

/// Where its changes are told; a directory's own are told there itself.
fn folder(file: &Path) -> Option<PathBuf> {
    if file.is_dir() {
        return Some(file.to_owned());
    }
    file.parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::io::Write;
    use tokio::time::timeout;

    fn noted(files: &[&Path]) -> Noted {
        let mut noted = Noted::default();
        noted.files(files.iter().map(|file| file.to_path_buf()));
        noted
    }

    #[tokio::test]
    async fn a_file_that_is_being_written_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "before").unwrap();
        let files = Files::watch(noted(&[&file]));
        let mut slow = File::create(&file).unwrap();
        files.changed().await;
        let early = timeout(5 * SETTLED, files.settled()).await;
        assert!(early.is_err(), "it is empty and open");
        slow.write_all(b"after").unwrap();
        drop(slow);
        timeout(WRITING * 9 / 10, files.settled()).await.unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"after");
    }

    #[tokio::test]
    async fn a_folder_that_is_swapped_by_a_link_is_a_change_and_so_is_a_file_that_goes_and_comes() {
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
        let files = Files::watch(noted(&[&file]));
        std::os::unix::fs::symlink("v2", path("..new")).unwrap();
        fs::rename(path("..new"), path("..data")).unwrap();
        timeout(LOOK / 2, files.changed()).await.unwrap();

        let files = files.replaced(noted(&[&file]));
        fs::remove_file(&file).unwrap();
        timeout(LOOK / 2, files.changed()).await.unwrap();
        let files = files.replaced(noted(&[&file]));
        fs::write(&file, "three").unwrap();
        timeout(LOOK / 2, files.changed()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_tells_of_is_seen_at_the_next_look() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "one").unwrap();
        let files = Files {
            noted: noted(&[&file]),
            told: Arc::default(),
            watcher: None,
        };
        fs::write(&file, "two").unwrap();
        timeout(2 * LOOK, files.changed()).await.unwrap();
    }
}
