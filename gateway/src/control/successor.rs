//! Progress of a handover, as the process that hands over sees it.
//!
//! 1. `ready`: the successor has bound its sockets. This process stops accepting tunnels and commands.
//! 2. `released`: this process enrols no edge any more. The successor reads the data directory again, and edges connect to it.
//! 3. `serving`: the successor accepts clients. This process closes its listeners and drains.

use tokio_util::sync::CancellationToken;

/// Progress of a handover to a successor. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Successor {
    /// Cancelled when the successor can accept tunnels.
    pub ready: CancellationToken,
    /// Cancelled when this process enrols no edge any more.
    pub released: CancellationToken,
    /// Cancelled when the successor accepts clients.
    pub serving: CancellationToken,
}
