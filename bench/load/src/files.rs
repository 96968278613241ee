//! Limit of open files of this process, and the error if it is too low.

use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};
use std::io;

/// Raises the soft limit to the hard one.
pub(crate) fn raise() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // A process without the right gets the error of `enough`.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Number of sockets of a process besides the requested ones.
const OWN: usize = 64;

/// Checks that files for that many sockets are available.
///
/// # Errors
///
/// If not, with both numbers.
pub(crate) fn enough(sockets: usize) -> anyhow::Result<()> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let needed = u64::try_from(sockets.saturating_add(OWN)).unwrap_or(u64::MAX);
    anyhow::ensure!(
        needed <= limit,
        "{sockets} connections need {needed} open files, and this process may have {limit}: \
         ask for less, spread them over processes, or raise the limit (ulimit -Hn)"
    );
    Ok(())
}

/// Whether it failed because files ran out, here or in the whole system.
pub(crate) fn ran_out(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE))
}
