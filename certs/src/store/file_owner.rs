//! Ownership of new files: a new file belongs to the user of its directory.
//!
//! A gateway uses its data directory as a user of its own, and its administrator creates tokens there as root. The gateway
//! could not read a file of root with mode 0600. So if root creates a file in another user's directory, this module gives the
//! file to that user. Only files that this call has created are given away. The directory's user can put links to anything
//! there, and a link that root follows must not change the owner of its target.

use nix::{fcntl::OFlag, unistd::geteuid};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

/// User id of root.
const ROOT_UID: u32 = 0;

/// Opens a private file for writing. Creates it if it does not exist, with mode 0600 and owned by the directory's user.
///
/// # Errors
/// The error of the operating system.
pub fn open_private(path: &Path, options: &OpenOptions) -> io::Result<File> {
    match options.clone().create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            // A file owned by root must not stay in another user's directory.
            chown_to_parent(&file, parent(path)).inspect_err(|_| drop(fs::remove_file(path)))?;
            Ok(file)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if is_foreign_owner(parent(path))? {
                // The user's file may be a symbolic link or a FIFO.
                let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
                return options.clone().custom_flags(flags).open(path);
            }
            options.open(path)
        }
        Err(error) => Err(error),
    }
}

/// Gives a file that was just created to the user of its directory, if the file is root's and the directory is not.
pub(super) fn chown_to_parent(file: &File, directory: &Path) -> io::Result<()> {
    if file.metadata()?.uid() != ROOT_UID || !is_foreign_owner(directory)? {
        return Ok(());
    }
    // A user who could replace this directory must not become the owner of the file.
    let parent_metadata = fs::metadata(fs::canonicalize(directory)?.parent().unwrap_or(directory))?;
    if parent_metadata.uid() != ROOT_UID
        || parent_metadata.mode() & 0o022 != 0 && parent_metadata.mode() & 0o1000 == 0
    {
        return Ok(());
    }
    let owner = fs::metadata(directory)?;
    fchown(file, Some(owner.uid()), Some(owner.gid()))
}

/// Whether this process runs as root and the directory belongs to another user.
fn is_foreign_owner(directory: &Path) -> io::Result<bool> {
    Ok(geteuid().is_root() && fs::metadata(directory)?.uid() != ROOT_UID)
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    /// Returns a directory of another user, if this user may give one away.
    fn of_another() -> Option<tempfile::TempDir> {
        let folder = tempfile::tempdir().unwrap();
        let given = chown(folder.path(), Some(12_345), Some(23_456));
        if given.is_err() {
            println!("skipped: needs root");
        }
        given.ok().map(|()| folder)
    }

    fn owner(path: &Path) -> (u32, u32) {
        let found = fs::metadata(path).unwrap();
        (found.uid(), found.gid())
    }

    fn writing() -> OpenOptions {
        let mut options = OpenOptions::new();
        options.write(true);
        options
    }

    #[test]
    fn files_that_root_creates_belong_to_the_directory_owner() {
        let Some(folder) = of_another() else { return };
        let path = folder.path().join("new");
        open_private(&path, &writing()).unwrap();
        assert_eq!(owner(&path), (12_345, 23_456));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn existing_files_keep_their_owner_and_links_are_not_followed() {
        let Some(folder) = of_another() else { return };
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "").unwrap();
        let before = owner(&target);
        symlink(&target, &link).unwrap();
        assert!(open_private(&link, &writing()).is_err());
        open_private(&target, &writing()).unwrap();
        assert_eq!(owner(&target), before);
    }

    #[test]
    fn ones_own_directory_needs_no_gift() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        open_private(&path, &writing()).unwrap();
        assert_eq!(owner(&path).0, owner(folder.path()).0);
    }
}
