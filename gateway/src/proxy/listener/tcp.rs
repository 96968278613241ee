//! TCP listener: each connection is one session with the listener's node and port.

use super::{ClientConnection, conn_io::ClientIo};
use crate::{
    error::Error,
    proxy::{
        access_log::{AccessRecord, GrantedAccess},
        authz::{Action, AuthzRequest, Destination},
        context::{Proxy, StreamContext},
        member, relay,
        route::Route,
    },
};
use causeway_rt::socket::ResetOnClose as _;
use causeway_tunnel::{StreamReceiver, StreamSender, copy, informational::ExchangeId};
use http::{Method, StatusCode};
use std::{pin::pin, sync::Arc, time::Duration};
use tokio::time::Instant;

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
    connection.condition.begin_session();
    record.session_started(StatusCode::OK);
    let relaying = pin!(copy::relay(io, send, receive, &record.bytes, false));
    if let Ok(outcome) = record.run_unless_terminated(relaying).await {
        relay::note(record, proxy.listener.name.as_str(), &outcome);
    }
    Ok(())
}

async fn open_session(
    proxy: &Proxy,
    connection: &Arc<ClientConnection>,
    record: &Arc<AccessRecord>,
) -> Result<(StreamSender, StreamReceiver), Error> {
    let route_input = proxy.listener.session_route_input(connection);
    let (client, routed) = proxy
        .authenticate_and_route(connection, None, &route_input)
        .await?;
    record.set_client(&client);
    let ask = AuthzRequest {
        client: &client,
        remote_address: connection.peer,
        destination: Destination::Node(&routed),
        action: Action::Connect,
        method: &Method::CONNECT,
        path: "",
    };
    record.record_granted_access(GrantedAccess::session());
    let Some(set) = proxy.open_node_set(&route_input, &routed) else {
        let timeout = proxy.shared.timeouts.connect;
        return open_stream(proxy, connection, (&ask, &routed), record, timeout).await;
    };
    proxy.admit_client(&client, record)?;
    let deadline = Instant::now() + proxy.shared.timeouts.connect;
    let (mut tried, mut last_error) = (Vec::new(), None);
    loop {
        let member = match proxy.select_member(set, connection, &ask, &tried).await {
            Ok(member) => member,
            Err(error) => return Err(last_error.unwrap_or(error)),
        };
        let route = member.as_ref().unwrap_or(&routed);
        // Time is left for other members.
        let timeout = deadline.saturating_duration_since(Instant::now()) / 2;
        let opening = open_stream(proxy, connection, (&ask, route), record, timeout);
        let error = match Box::pin(opening).await {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        // No server has received a byte of the client.
        let may_repeat = member::record_failure(set, connection, (route, &error));
        if !may_repeat || Instant::now() >= deadline {
            return Err(error);
        }
        tracing::debug!(node = %route.node, %error, "a TCP session goes to the next node");
        tried.push(route.node.clone());
        last_error = Some(error);
    }
}

/// Opens the stream of a session to the node of a route.
async fn open_stream(
    proxy: &Proxy,
    connection: &Arc<ClientConnection>,
    (ask, route): (&AuthzRequest<'_>, &Route),
    record: &Arc<AccessRecord>,
    timeout: Duration,
) -> Result<(StreamSender, StreamReceiver), Error> {
    let selected = proxy.admit(ask, route, record).await?;
    let ctx = StreamContext {
        proxy,
        connection,
        client: ask.client,
        route,
        tunnel: &selected.tunnel,
        peer: selected.peer.as_ref(),
        id: selected.id,
        record,
        exchange: ExchangeId::None,
    };
    relay::open_tcp_stream(ctx, Some(connection.peer), timeout).await
}
