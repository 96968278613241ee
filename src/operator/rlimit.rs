//! Limit of open files of this process, and so of client connections.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Files reserved for uses other than client connections: tunnels, listeners, the data directory.
const RESERVED_FILES: usize = 256;

/// Raises the limit of open files to the system's maximum. Returns the limit, if it is known.
pub(super) fn raise_limit() -> Option<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    let files = if raised { hard } else { soft };
    Some(usize::try_from(files).unwrap_or(usize::MAX))
}

/// Raises the limit of open files to the system's maximum. Returns the number of connections that fit, at most `connections`.
pub(super) fn limit_connections(connections: usize) -> usize {
    let Some(files) = raise_limit() else {
        return connections;
    };
    // With a low limit, half is for connections and half for all other uses.
    let max_connections = files.saturating_sub(RESERVED_FILES).max(files / 2);
    let max_connections = max_connections.max(1);
    if connections > max_connections {
        tracing::warn!(
            files,
            connections = max_connections,
            "the gateway accepts fewer connections than limits.connections, because the limit of open files is too low; raise it (LimitNOFILE, ulimit -n)"
        );
    }
    connections.min(max_connections)
}
