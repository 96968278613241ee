//! Status of egress.

use super::{StatusWriter, now};
use schemars::JsonSchema;
use serde::Serialize;
use std::net::SocketAddr;

/// State of the connections that programs on this node open through egress listeners.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct EgressStatus {
    /// Gateway of the connection for new streams; absent if none is open. The edge connects when a program needs it.
    pub gateway: Option<String>,
    /// Listeners that are open.
    pub listeners: Vec<EgressListenerStatus>,
    /// Last failure.
    pub trouble: Option<EgressErrorStatus>,
}

/// Open listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct EgressListenerStatus {
    /// Address at which programs connect.
    pub listen: SocketAddr,
    /// Destination; absent for the proxy.
    pub to: Option<String>,
}

/// Failure of egress.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct EgressErrorStatus {
    /// Time of the failure, in milliseconds since the Unix epoch.
    pub at: u64,
    /// Description of the failure in plain English.
    pub what: String,
}

impl StatusWriter {
    /// Changes the state of egress.
    pub(crate) fn change_egress(&self, change: impl FnOnce(&mut EgressStatus)) {
        self.change(|table| change(table.egress.get_or_insert_default()));
    }

    /// Sets the last failure of egress.
    pub(crate) fn set_egress_error(&self, what: &str) {
        self.change_egress(|status| {
            status.trouble = Some(EgressErrorStatus {
                at: now(),
                what: what.to_owned(),
            });
        });
    }
}
