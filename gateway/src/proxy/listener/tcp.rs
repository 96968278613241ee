//! Listener that carries TCP: each connection is one session with the listener's node and port.

use super::{ClientConnection, conn_io::ClientIo};
use crate::proxy::{Proxy, access_log::AccessRecord, relay};
use std::sync::Arc;

/// Relays one connection. A session that cannot begin ends with a reset: TCP has no error message.
pub(super) async fn serve(proxy: &Proxy, io: ClientIo, connection: Arc<ClientConnection>) {
    let record = AccessRecord::session(
        &proxy.shared.streams,
        (&proxy.listener, proxy.worker),
        &connection,
    );
    if let Err(error) = relay::session(proxy, io, &connection, &record).await {
        tracing::debug!(%error, "a TCP session could not begin");
        record.failed(&error);
    }
}
