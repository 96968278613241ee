//! A directory of manifests in place of a cluster's API: the objects that edges read if there is no cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use causeway_watch_cache::{WatchCache, manifests::Manifests};

use crate::operator::config_loader;

/// Extensions of manifest files.
const MANIFEST_EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Returns the manifests in a directory, by name. The directory itself comes first, since a new file in it is a change, too.
pub(super) fn manifest_files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| {
            let extension = file.extension().and_then(|end| end.to_str());
            extension.is_some_and(|end| MANIFEST_EXTENSIONS.contains(&end)) && file.is_file()
        })
        .collect();
    files.sort();
    files.insert(0, dir.to_owned());
    files
}

/// Reads all manifests of a directory into a watch cache.
///
/// # Errors
/// If a manifest is invalid. The error names the file.
pub(super) fn read_manifests(dir: &Path, cache: Arc<WatchCache>) -> anyhow::Result<Manifests> {
    // A directory that cannot be read is not an empty one.
    fs::read_dir(dir).with_context(|| format!("api_cache.manifests: {}", dir.display()))?;
    let mut manifests = Manifests::new(cache);
    for file in manifest_files(dir).iter().skip(1) {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let value = config_loader::parse_untyped(&text);
        let value = value.map_err(|fault| anyhow!("{}:{fault}", file.display()))?;
        manifests
            .add(value)
            .with_context(|| file.display().to_string())?;
    }
    Ok(manifests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_watch_cache::{CacheLimits, GroupVersionResource};

    fn pool() -> Arc<WatchCache> {
        let limits = CacheLimits {
            response_bytes: 1 << 20,
            event_buffer_bytes: 1 << 20,
        };
        WatchCache::new(&GroupVersionResource::defaults(), &limits)
    }

    #[test]
    fn manifest_faults_name_file_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write(
            "a.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: { name: a, namespace: n }\n",
        );
        write(
            "b.json",
            r#"{ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "b", "namespace": "n" } }"#,
        );
        write("README.md", "not one");
        assert_eq!(manifest_files(folder.path()).len(), 3);
        assert_eq!(read_manifests(folder.path(), pool()).unwrap().count(), 2);
        for (text, says) in [
            ("kind: Service\nkind: Service\n", "c.yaml:2:"),
            (
                "apiVersion: v1\nkind: Secret\nmetadata: { name: x }\n",
                "api_cache.resources",
            ),
            ("{", "not YAML"),
        ] {
            write("c.yaml", text);
            let error = format!("{:#}", read_manifests(folder.path(), pool()).unwrap_err());
            assert!(error.contains(says) && error.contains("c.yaml"), "{error}");
        }
        let error = read_manifests(&folder.path().join("none"), pool()).unwrap_err();
        assert!(
            format!("{error:#}").contains("api_cache.manifests"),
            "{error:#}"
        );
    }
}
