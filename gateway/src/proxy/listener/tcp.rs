//! TCP listener: each connection is one session with the listener's node and port.

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

/// Relays one connection. A session that cannot begin ends with a reset, because TCP has no error messages.
pub(super) async fn serve(proxy: &Proxy, io: ClientIo, connection: Arc<ClientConnection>) {
    let record = AccessRecord::session(
        &proxy.shared.streams,
        (&proxy.listener, proxy.worker),
        &connection,
    );
    if let Err(error) = session(proxy, io, &connection, &record).await {
        tracing::debug!(%error, "a TCP session could not begin");
        record.record_failure(&error);
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
    let opened = open_session(proxy, connection, record).await;
    let (send, receive) = opened.inspect_err(|_| io.abort())?;
    record.session_started(StatusCode::OK);
    let relaying = pin!(copy::relay(io, send, receive, record.bytes.clone(), false));
    if let Some(outcome) = record.run_session_unless_terminated(relaying).await {
        relay::note(record, proxy.listener.name.as_str(), &outcome);
    }
    Ok(())
}

async fn open_session(
    proxy: &Proxy,
    connection: &Arc<ClientConnection>,
    record: &Arc<AccessRecord>,
) -> Result<(StreamSender, StreamReceiver), Error> {
    let route_input = proxy.listener.route_input(connection, None);
    let shared = &proxy.shared;
    let no_headers = http::HeaderMap::new();
    let (client, route) = proxy
        .authenticate_and_route(connection, &no_headers, &route_input)
        .await?;
    record.set_client(&client);
    record.set_route(&route);
    let ask = AuthzRequest {
        client: &client,
        remote_address: connection.peer,
        destination: Destination::Node(&route),
        action: Action::Connect,
        method: &Method::CONNECT,
        path: "",
    };
    record.record_granted_access(GrantedAccess::session());
    proxy.authorize(&ask, record).await?;
    let selected = proxy.select_tunnel(&route).await?;
    record.set_permit(
        shared
            .limits
            .admit_stream(&client.open_streams, &selected.streams)?,
    );
    record.set_tunnel(selected.id);
    relay::open_tcp_stream(StreamContext {
        proxy,
        connection,
        client: &client,
        route: &route,
        tunnel: &selected.tunnel,
        peer: selected.peer.as_ref(),
        id: selected.id,
        record,
        exchange: ExchangeId::None,
    })
    .await
}
