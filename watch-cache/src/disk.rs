//! Snapshots on the disk: one file per resource, so that a node that starts without the cloud serves its last state.
//!
//! A file begins with a line that names the format and the SHA-256 of the rest. The rest is gzip: a line of JSON that
//! describes the snapshot, then one object per line. The file is written to a temporary file beside it, synced and renamed,
//! so there is always the old one or the new one. An invalid file is set aside and reported. Only its own resource is lost.
//!
//! A state that does not change is not written again. The time until which each state was known to be the newest is in a
//! small separate file, which is written more often.

use crate::{
    object::{Object, TypeMeta},
    server::WatchCache,
    store::{Snapshot, Store},
};
use data_encoding::HEXLOWER;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// First word of a file.
const MAGIC: &str = "causeway-pool/1";
/// Maximum ratio between the size of a state and the size of its file.
const MAX_INFLATION: u64 = 64;

/// Name of the file with the time until which each state was known to be the newest.
const TIMES_FILE: &str = "times.json";

/// Version of each resource, and the time until which it was known to be the newest, in milliseconds since the Unix epoch.
type Times = BTreeMap<String, (u64, u64)>;

/// Directory of the snapshots.
#[derive(Clone, Debug)]
pub struct SnapshotDir {
    dir: PathBuf,
    most: u64,
}

/// Header of a snapshot file.
#[derive(Serialize, Deserialize)]
struct SnapshotHeader {
    resource: String,
    kind: String,
    namespaced: bool,
    version: u64,
    /// Time of the snapshot, in milliseconds since the Unix epoch.
    at: u64,
    objects: usize,
}

impl SnapshotDir {
    /// Returns the snapshots in this directory, with at most `max_bytes` each.
    pub fn new(dir: PathBuf, max_bytes: u64) -> Self {
        Self {
            dir,
            most: max_bytes,
        }
    }

    fn snapshot_path(&self, store: &Store) -> PathBuf {
        let name = store.resource().to_string().replace('/', "_");
        self.dir.join(format!("{name}.pool"))
    }

    /// Fills empty stores from the snapshots. Returns a description of each snapshot that could not be used.
    pub fn load(&self, cache: &WatchCache) -> Vec<String> {
        let mut faults = Vec::new();
        // Without them, the file times determine the age of the snapshots.
        let times = fs::read(self.dir.join(TIMES_FILE)).ok();
        let times = times.and_then(|text| serde_json::from_slice::<Times>(&text).ok());
        let times = times.unwrap_or_default();
        for store in cache.stores() {
            let file = self.snapshot_path(store);
            let why = match self.read_snapshot(&file, store) {
                Ok(Some(mut snapshot)) => {
                    if let Some((version, at)) = times.get(&store.resource().to_string())
                        && *version == snapshot.version
                    {
                        let at = UNIX_EPOCH + Duration::from_millis(*at);
                        snapshot.as_of = snapshot.as_of.max(at);
                    }
                    store.restore(snapshot);
                    continue;
                }
                Ok(None) => continue,
                Err(why) => why,
            };
            let bad_path = file.with_extension("bad");
            let fault = match fs::rename(&file, &bad_path) {
                Ok(()) => format!("{}: {why}; kept as {}", file.display(), bad_path.display()),
                Err(_) => format!("{}: {why}", file.display()),
            };
            faults.push(fault);
        }
        faults
    }

    fn read_snapshot(&self, file: &Path, store: &Store) -> Result<Option<Snapshot>, String> {
        let bytes = match fs::metadata(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
            Ok(meta) if meta.len() > self.most => {
                return Err(format!("larger than {} bytes", self.most));
            }
            Ok(_) => fs::read(file).map_err(|error| error.to_string())?,
        };
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let (line, compressed) = bytes.split_at(end.ok_or("not a saved snapshot")?);
        let compressed = compressed.get(1..).unwrap_or_default();
        let expected = format!("{MAGIC} {}", sha256_hex(compressed));
        if line != expected.as_bytes() {
            return Err("damaged: the checksum does not match".to_owned());
        }
        let max_inflated = self.most.saturating_mul(MAX_INFLATION);
        let mut lines = BufReader::new(GzDecoder::new(compressed).take(max_inflated)).lines();
        let mut next_line = || {
            let line = lines.next().transpose();
            line.map_err(|error| error.to_string())
        };
        let header: SnapshotHeader = serde_json::from_str(&next_line()?.unwrap_or_default())
            .map_err(|error| error.to_string())?;
        if header.resource != store.resource().to_string() || header.version == 0 {
            return Err(format!(
                "it contains {} at version {}",
                header.resource, header.version
            ));
        }
        let api_version = store.resource().api_version();
        let type_meta = TypeMeta {
            kind: &header.kind,
            api_version: &api_version,
        };
        let mut objects = Vec::new();
        while let Some(line) = next_line()? {
            let raw: &RawValue = serde_json::from_str(&line).map_err(|error| error.to_string())?;
            let object = Object::parse(raw, type_meta).map_err(|error| error.to_string())?;
            objects.push(Arc::new(object));
        }
        if objects.len() != header.objects {
            return Err(format!(
                "damaged: it has {} objects instead of {}",
                objects.len(),
                header.objects
            ));
        }
        Ok(Some(Snapshot {
            kind: header.kind,
            namespaced: header.namespaced,
            version: header.version,
            as_of: UNIX_EPOCH + Duration::from_millis(header.at),
            objects,
        }))
    }

    /// Writes the state of a store, if there is one. Blocks.
    ///
    /// # Errors
    /// If the write fails, or if the state is too large. The previous file then stays.
    pub fn write(&self, store: &Store) -> io::Result<()> {
        let Some(snapshot) = store.snapshot() else {
            return Ok(());
        };
        let compressed = compress_snapshot(store, &snapshot)?;
        let header = format!("{MAGIC} {}\n", sha256_hex(&compressed));
        if (header.len() + compressed.len()) as u64 > self.most {
            let fault = format!(
                "the snapshot of {} has {} bytes, which is more than the limit of {} (api_cache.save)",
                store.resource(),
                compressed.len(),
                self.most
            );
            return Err(io::Error::other(fault));
        }
        self.replace_file(
            &self.snapshot_path(store),
            &[header.as_bytes(), &compressed],
        )
    }

    /// Records the time until which the states of a cache were known to be the newest. Blocks.
    ///
    /// # Errors
    /// If the write fails.
    pub fn write_times(&self, cache: &WatchCache) -> io::Result<()> {
        let unix_millis = |at: SystemTime| {
            let elapsed = at.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
        };
        let synced = cache.stores().iter().map(|store| store.status());
        let synced = synced.filter(|status| status.synced);
        let times = synced.map(|status| {
            let at = status
                .lost
                .unwrap_or_else(|| unix_millis(SystemTime::now()));
            (status.resource, (status.version, at))
        });
        let times: Times = times.collect();
        if times.is_empty() {
            return Ok(());
        }
        let text = serde_json::to_vec(&times).map_err(io::Error::other)?;
        self.replace_file(&self.dir.join(TIMES_FILE), &[&text])
    }

    /// Replaces the content of a file with these bytes.
    fn replace_file(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let mut file = tempfile::Builder::new()
            .prefix(".pool-")
            .tempfile_in(&self.dir)?;
        for part in parts {
            file.write_all(part)?;
        }
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        fs::File::open(&self.dir)?.sync_all()
    }
}

fn compress_snapshot(store: &Store, snapshot: &Snapshot) -> io::Result<Vec<u8>> {
    let at = snapshot
        .as_of
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let header = SnapshotHeader {
        resource: store.resource().to_string(),
        kind: snapshot.kind.clone(),
        namespaced: snapshot.namespaced,
        version: snapshot.version,
        at: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        objects: snapshot.objects.len(),
    };
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&serde_json::to_vec(&header)?)?;
    for object in &snapshot.objects {
        encoder.write_all(b"\n")?;
        // One line each: API servers send no line breaks outside strings, and JSON escapes those inside.
        let has_line_break = object.json.contains(&b'\n');
        if has_line_break {
            encoder.write_all(object.to_value().to_string().as_bytes())?;
        } else {
            encoder.write_all(&object.json)?;
        }
    }
    encoder.finish()
}

fn sha256_hex(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    HEXLOWER.encode(&digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{resource::GroupVersionResource, server::CacheLimits, store::tests::object};

    fn pool() -> Arc<WatchCache> {
        let services: GroupVersionResource = "v1/services".parse().unwrap();
        let limits = CacheLimits {
            response_bytes: 1 << 20,
            event_buffer_bytes: 1 << 20,
        };
        WatchCache::new(&[services], &limits)
    }

    fn filled() -> Arc<WatchCache> {
        let pool = pool();
        pool.stores()[0].replace(7, vec![object("n", "a", 3), object("n", "b", 7)]);
        pool
    }

    #[test]
    fn restored_state_keeps_its_age() {
        let folder = tempfile::tempdir().unwrap();
        let saved = SnapshotDir::new(folder.path().join("pool"), 1 << 20);
        let before = filled();
        saved.write(&before.stores()[0]).unwrap();
        let after = pool();
        assert_eq!(saved.load(&after), Vec::<String>::new());
        let (old, new) = (
            before.stores()[0].snapshot().unwrap(),
            after.stores()[0].snapshot().unwrap(),
        );
        assert_eq!((old.version, old.objects), (new.version, new.objects));
        assert!(after.stores()[0].status().lost.is_some());
        // Newer data is not replaced by the older snapshot.
        after.stores()[0].replace(9, Vec::new());
        saved.load(&after);
        assert_eq!(after.stores()[0].status().version, 9);
    }

    #[test]
    fn an_unchanged_state_is_as_old_as_the_last_message() {
        let folder = tempfile::tempdir().unwrap();
        let saved = SnapshotDir::new(folder.path().join("pool"), 1 << 20);
        let age = |pool: &WatchCache| {
            let status = pool.stores()[0].status();
            let at = UNIX_EPOCH + Duration::from_millis(status.lost.unwrap());
            at.elapsed().unwrap()
        };
        let (day, hour) = (Duration::from_hours(24), Duration::from_hours(1));
        let before = filled();
        let store = &before.stores()[0];
        store.mark_connected(Some(day));
        saved.write(store).unwrap();
        let kept = pool();
        saved.load(&kept);
        assert!(age(&kept) >= day, "{:?}", age(&kept));

        store.mark_connected(Some(hour));
        saved.write_times(&before).unwrap();
        let kept = pool();
        saved.load(&kept);
        assert!(
            age(&kept) >= hour && age(&kept) < hour * 2,
            "{:?}",
            age(&kept)
        );

        // Times for another version than the file's are ignored.
        store.replace(9, Vec::new());
        saved.write_times(&before).unwrap();
        let kept = pool();
        saved.load(&kept);
        assert!(age(&kept) >= day, "{:?}", age(&kept));
    }

    #[test]
    fn each_damage_is_found_and_the_file_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let saved = SnapshotDir::new(folder.path().to_owned(), 1 << 20);
        let store = &filled().stores()[0].clone();
        let file = saved.snapshot_path(store);
        saved.write(store).unwrap();
        let whole = fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            for bytes in [damaged.as_slice(), &whole[..at]] {
                fs::write(&file, bytes).unwrap();
                let other = pool();
                assert_eq!(saved.load(&other).len(), 1, "at {at}");
                assert!(!other.stores()[0].status().synced);
                assert!(!file.exists());
            }
        }
    }

    #[test]
    fn a_state_that_is_too_large_leaves_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let store = &filled().stores()[0].clone();
        SnapshotDir::new(folder.path().to_owned(), 1 << 20)
            .write(store)
            .unwrap();
        let small = SnapshotDir::new(folder.path().to_owned(), 100);
        let error = small.write(store).unwrap_err().to_string();
        assert!(error.contains("api_cache.save"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(
            SnapshotDir::new(folder.path().to_owned(), 1 << 20)
                .load(&pool())
                .is_empty()
        );
    }
}
