//! Announcements of changes to all connected edges.

use crate::state::{AnnouncedPortsCell, Registry, TunnelInfo, registry::NewTunnel};
use causeway_tunnel::control_stream::GatewayMessage;

/// Sends the messages of `announce` to each connected edge.
pub(crate) fn announce<L: IntoIterator<Item = GatewayMessage>>(
    registry: &Registry,
    messages: impl Fn(&TunnelInfo) -> L,
) {
    for (_, edge) in registry.all() {
        for message in messages(&edge) {
            // A tunnel that does not accept the message ends soon. Its edge receives the message when it reconnects.
            let _ = edge.tunnel.control.try_send(Box::new(message));
        }
    }
}

/// Returns the announcement of the ports that the cluster lists, if the edge supports the message.
pub(crate) fn ports_message(
    new_tunnel: &NewTunnel,
    announced_ports: &AnnouncedPortsCell,
) -> Option<GatewayMessage> {
    let accepts_ports = new_tunnel.hello.listed;
    announced_ports
        .get()
        .filter(|_| accepts_ports)
        .map(GatewayMessage::Ports)
}
