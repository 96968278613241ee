//! Listener that carries TCP: each connection is one session with the listener's node and port.

use super::{ClientConnection, conn_io::ClientIo};
use crate::{
    error::Error,
    proxy::{
        access_log::{AccessRecord, GrantedAccess},
        authz::{Action, AuthzRequest, Destination},
        context::{Proxy, StreamContext},
        relay,
    },
};
use causeway_rt::socket::ResetOnClose as _;
use causeway_tunnel::{StreamReceiver, StreamSender, copy, informational::ExchangeId};
use http::{Method, StatusCode};
use std::{pin::pin, sync::Arc};

/// Relays one connection. A session that cannot begin ends with a reset: TCP has no error message.
pub(super) async fn serve(proxy: &Proxy, io: ClientIo, connection: Arc<ClientConnection>) {
    let record = AccessRecord::session(
        &proxy.shared.streams,
        (&proxy.listener, proxy.worker),
        &connection,
    );
    if let Err(error) = session(proxy, io, &connection, &record).await {
        tracing::debug!(%error, "a TCP session could not begin");
        record.failed(&error);
    }
}

/// Runs the session of a TCP listener: the request path, for a connection that is one session.
///
/// # Errors
/// If the session could not begin; the connection then ends with a reset.
async fn session(
    proxy: &Proxy,
    io: ClientIo,
    connection: &Arc<ClientConnection>,
    record: &Arc<AccessRecord>,
) -> Result<(), Error> {
    let begun = begin(proxy, connection, record).await;
    let (send, receive) = begun.inspect_err(|_| io.abort())?;
    record.opened(StatusCode::OK);
    let work = pin!(copy::relay(io, send, receive, record.passed.clone(), false));
    if let Some(outcome) = record.session_unless_ended(work).await {
        relay::note(record, proxy.listener.name.as_str(), &outcome);
    }
    Ok(())
}

async fn begin(
    proxy: &Proxy,
    connection: &Arc<ClientConnection>,
    record: &Arc<AccessRecord>,
) -> Result<(StreamSender, StreamReceiver), Error> {
    let asked = proxy.listener.asked(connection, None);
    let shared = &proxy.shared;
    let nothing = http::HeaderMap::new();
    let (client, route) = proxy
        .authenticate_and_route(connection, &nothing, &asked)
        .await?;
    record.client(&client);
    record.route(&route);
    let ask = AuthzRequest {
        client: &client,
        from: connection.peer,
        destination: Destination::Node(&route),
        act: Action::Connect,
        method: &Method::CONNECT,
        path: "",
    };
    record.allow(GrantedAccess::session());
    proxy.authorize(&ask, record).await?;
    let picked = proxy.select_tunnel(&route).await?;
    record.permit(shared.limits.admit(&client.open, &picked.streams)?);
    record.tunnel(picked.id);
    relay::open(StreamContext {
        proxy,
        connection,
        client: &client,
        route: &route,
        tunnel: &picked.tunnel,
        id: picked.id,
        record,
        exchange: ExchangeId::None,
    })
    .await
}
