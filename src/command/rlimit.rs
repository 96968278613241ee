//! Limit of open files of this process, and so of clients.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Files reserved for uses other than client connections: tunnels, listeners, the data directory.
const RESERVE: usize = 256;

/// Takes as many files as the system gives; how many there may be, where that is known.
pub(super) fn raise() -> Option<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    let files = if raised { hard } else { soft };
    Some(usize::try_from(files).unwrap_or(usize::MAX))
}

/// Takes as many files as the system gives. So many connections may there be: no more than were asked for.
pub(super) fn allow(connections: usize) -> usize {
    let Some(files) = raise() else {
        return connections;
    };
    // With a low limit, half is for connections and half for everything else.
    let most = files.saturating_sub(RESERVE).max(files / 2);
    let most = most.max(1);
    if connections > most {
        tracing::warn!(
            files,
            connections = most,
            "the gateway accepts fewer connections than limits.connections, because the limit of open files is too low; raise it (LimitNOFILE, ulimit -n)"
        );
    }
    connections.min(most)
}
