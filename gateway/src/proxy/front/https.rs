//! TLS of a front: the ClientHello names the core, the handshake ends there, and the peer is checked.
//!
//! After every handshake, resumed or not, a certificate that was shown is judged again: presence of what the
//! front demands, dates, purpose, whose CA made it. An edge's certificate is no caller's.

use super::{Arrival, Door, io::Io, serve};
use crate::{
    audit,
    config::Serial,
    core::CoreId,
    proxy::{
        Proxy,
        caller::{Caller, Method, UID, Validity},
    },
};
use causeway_certs::{
    Identity,
    verify::{PeerRefused, Purpose, none_revoked, prove_peer},
};
use causeway_tunnel::{linger, socket::Socket, wire};
use rustls::server::{Accepted, Acceptor};
use rustls_pki_types::UnixTime;
use std::{pin::pin, sync::Arc};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, server::TlsStream};

/// Reads the ClientHello, moves the socket to the core that it names, and serves it there.
pub(super) async fn welcome(door: Door, core: CoreId, socket: Socket, arrival: Arrival) {
    let proxy = &door.proxies[core.0];
    let deadline = Instant::now() + proxy.shared.timeouts.tls;
    let hello = timeout_at(
        deadline,
        LazyConfigAcceptor::new(Acceptor::default(), socket),
    )
    .await;
    let start = match hello {
        Ok(Ok(start)) => start,
        Ok(Err(error)) => return failed(proxy, "hello", &error),
        Err(_) => return failed(proxy, "slow", &"no ClientHello in time"),
    };
    let home = door.home(core, start.client_hello().server_name(), arrival.original);
    let accepted = start.accepted;
    door.hand_over((core, home), start.io, move |door, socket| async move {
        let proxy = door.proxies[home.0].clone();
        let place = arrival.room.clone();
        let serving = pin!(async {
            let shaken = finish(&proxy, accepted, (socket, &arrival), deadline).await;
            if let Some(stream) = shaken {
                begin(stream, arrival, door, home).await;
            }
        });
        place.run(serving).await;
    });
}

async fn finish(
    proxy: &Proxy,
    accepted: Accepted,
    (socket, arrival): (Socket, &Arrival),
    deadline: Instant,
) -> Option<TlsStream<Socket>> {
    let tls = proxy.front.tls.as_ref()?.load();
    let config = tls.shown(arrival.original, &proxy.shared.nodes);
    drop(tls);
    let start = StartHandshake::from_parts(accepted, socket);
    match timeout_at(deadline, start.into_stream(config).into_fallible()).await {
        Ok(Ok(mut stream)) => {
            stream.get_mut().1.set_buffer_limit(Some(wire::TLS_BUFFER));
            Some(stream)
        }
        Ok(Err((error, socket))) => {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            if let Some(rustls::Error::InvalidCertificate(_)) = inner {
                audit::refused_caller(&proxy.front.name, arrival.peer, &error);
            }
            failed(proxy, "handshake", &error);
            linger::close(socket).await;
            None
        }
        Err(_) => {
            failed(proxy, "slow", &"the handshake took too long");
            None
        }
    }
}

async fn begin(stream: TlsStream<Socket>, arrival: Arrival, door: Door, home: CoreId) {
    // The front may have become another during the handshake: then whoever comes is judged by that one.
    let Some(door) = door.by_now() else {
        return;
    };
    let proxy = &door.proxies[home.0];
    let (_, session) = stream.get_ref();
    let sni = session.server_name().map(str::to_owned);
    // Whoever speaks HTTP is told why in words; the record of what is refused then says it too.
    let caller = caller(proxy, session).inspect_err(|refused| {
        failed(proxy, "certificate", refused);
    });
    let connection = Arc::new(arrival.connection(proxy, sni, true, caller));
    let io = Io::tls(stream, &connection.condition);
    serve(proxy, io, connection, door.stop.clone()).await;
}

/// The caller that the certificate names, if one was shown.
fn caller(
    proxy: &Proxy,
    session: &rustls::ServerConnection,
) -> Result<Option<Caller>, PeerRefused> {
    let (Some(tls), Some(chain)) = (&proxy.front.tls, session.peer_certificates()) else {
        return Ok(None);
    };
    let tls = tls.load();
    let trust = &tls.trust;
    let proven = prove_peer(
        Some(chain),
        Purpose::Caller,
        UnixTime::now(),
        trust,
        &none_revoked,
    )?;
    let (name, groups, uris) = match proven.identity {
        Identity::Caller { name, groups } => {
            let uri = trust.caller_uri(&name);
            (name, groups, vec![uri])
        }
        Identity::Foreign {
            common_name,
            organizations,
            mut uris,
        } => {
            // Names of ours are given by our own root, and uids by the kernel.
            uris.retain(|uri| !trust.is_own_uri(uri));
            let name = uris.first().cloned().or(common_name);
            let name = name.filter(|name| !name.starts_with(UID));
            let name = name.unwrap_or_else(|| "unnamed".to_owned());
            (name, organizations, uris)
        }
        // `check_peer` lets neither through for this purpose.
        Identity::Edge(_) | Identity::Gateway => return Ok(None),
    };
    let caller = Caller::new(&name, groups, Method::Certificate, &proxy.shared);
    Ok(Some(Caller {
        root: proven.root,
        serial: Serial::try_from(proven.serial).ok(),
        validity: Some(Validity::until(proven.not_after)),
        ..caller.with_uris(uris)
    }))
}

fn failed(proxy: &Proxy, why: &'static str, error: &dyn std::fmt::Display) {
    proxy
        .shared
        .metrics
        .handshake_failed(proxy.front.kind.as_str(), why);
    tracing::debug!(front = proxy.front.name, why, %error, "a caller's TLS handshake failed");
}
