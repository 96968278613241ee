//! Files with secrets that commands write for other programs.

use std::io::Write;
use std::path::Path;

use anyhow::Context;

/// Replaces a file with a new private file (0600). The new file is written beside the old one, synced to the disk and
/// renamed.
pub(super) fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let write_and_rename = || {
        let directory = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        anyhow::Ok(())
    };
    write_and_rename().with_context(|| format!("cannot write {}", path.display()))
}
