//! What every edge that is here is told when it changes.

use crate::state::{Edge, ListedPorts, Registry, registry::Admitted};
use causeway_tunnel::hello::ToEdge;

/// Tells each edge that is here the lines that are for it.
pub(crate) fn announce<L: IntoIterator<Item = ToEdge>>(
    registry: &Registry,
    lines: impl Fn(&Edge) -> L,
) {
    for (_, edge) in registry.all() {
        for line in lines(&edge) {
            // One that does not take it is about to end, and hears it when it comes back.
            let _ = edge.admitted.control.try_send(Box::new(line));
        }
    }
}

/// What an edge is told of the ports that the cluster lists, if it takes that.
pub(crate) fn listing(admitted: &Admitted, listed: &ListedPorts) -> Option<ToEdge> {
    let takes = admitted.welcome.listed;
    listed.all().filter(|_| takes).map(ToEdge::Ports)
}
