//! Status of egress.

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
