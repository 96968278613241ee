//! The data directory: all state that outlives a process, typed.
//!
//! `ca.json`, `ca.pem` and `tickets.key` of the gateway, `tokens.json`, `nodes.json`, `pins.json`, `revoked-gateways.json`, `edge.json` of an edge,
//! and small `run-…` files, by which a command finds another process. `version` names the format of the files. The directory
//! has mode 0700 and each file 0600. Each file belongs to the directory's user, whichever user wrote it. The store never
//! repairs: it names a file that cannot be parsed, and the process stops. `atomic_file` reads and writes the files. Every
//! method here blocks on the disk.

pub(crate) mod atomic_file;
mod backup;
mod ca;
mod data_dir;
mod edge;
mod entries;
mod file_owner;
mod nodes;
mod pending_csr;
mod pins;
mod revoked_gateways;
mod shared_ca;

pub use atomic_file::{OtherFields, StoreError};
pub use backup::Backup;
pub use data_dir::{DirLock, OpenMode, ReleasedClaim, Store};
pub use entries::{Entries, EntryChange, EntryKey, entry_text, normalize_entry};
pub use file_owner::open_private;
pub use nodes::{NodeRecord, NodeStore, NodeUpdate, Revocation, RevocationEntry};
pub use pending_csr::{PendingCsr, Requested};
pub use pins::{Pin, PinTable, Pins};
pub(crate) use revoked_gateways::MAX_REVOKED;
pub use revoked_gateways::{RevokedGateway, RevokedGateways, parse_serial};
pub use shared_ca::{ImportOutcome, SharedCa};

#[cfg(test)]
mod tests;
