//! Announcements of changes to all connected edges.

use crate::state::{AnnouncedPortsCell, Registry, TunnelInfo, registry::NewTunnel};
use causeway_tunnel::control_stream::GatewayMessage;

/// Sends each connected edge its messages.
pub(crate) fn announce<L: IntoIterator<Item = GatewayMessage>>(
    registry: &Registry,
    lines: impl Fn(&TunnelInfo) -> L,
) {
    for (_, edge) in registry.all() {
        for line in lines(&edge) {
            // A tunnel that does not accept the message ends soon, and its edge receives the message when it reconnects.
            let _ = edge.admitted.control.try_send(Box::new(line));
        }
    }
}

/// Returns the announcement of the ports that the cluster lists, if the edge accepts it.
pub(crate) fn listing(admitted: &NewTunnel, listed: &AnnouncedPortsCell) -> Option<GatewayMessage> {
    let takes = admitted.welcome.listed;
    listed.all().filter(|_| takes).map(GatewayMessage::Ports)
}
