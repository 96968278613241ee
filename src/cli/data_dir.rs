//! The argument that names a gateway's data directory.

use std::path::PathBuf;

use clap::Args;

/// Data directory of a gateway, for commands that need nothing else.
#[derive(Debug, Args)]
pub(crate) struct DataDir {
    /// Data directory of the gateway
    #[arg(
        long,
        value_name = "DIR",
        env = "CAUSEWAY_DATA_DIR",
        default_value = "/var/lib/causeway"
    )]
    pub(crate) data_dir: PathBuf,
}
