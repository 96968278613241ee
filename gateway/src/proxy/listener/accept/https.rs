//! TLS of a listener: reads the ClientHello, by which `accept` selects the worker, finishes the handshake, and checks the peer.
//!
//! After every handshake, resumed or not, the client's certificate is checked again. The checks are its presence if the listener
//! requires one, its dates, its purpose, and the CA that issued it. An edge's certificate does not identify a client.

use super::{
    AcceptedSocket,
    refusal::{first_byte, handshake_failed, log_refusal, refuse_name, refuse_plaintext},
};
use crate::{
    audit,
    config::{ListenerProtocol, Serial},
    proxy::{
        Proxy,
        authn::{AuthMethod, ClientIdentity, PresentedCertificate, UID_PREFIX, Validity},
        listener::ListenerTls,
    },
};
use arc_swap::ArcSwap;
use causeway_certs::{
    Identity,
    verify::{PeerRejected, Purpose, none_revoked, verify_peer},
};
use causeway_rt::{
    lingering_close,
    read_limit::{MAX_CLIENT_HELLO, ReadLimit},
    socket::Socket,
    turns::Turns,
};
use causeway_tunnel::wire;
use rustls::{
    AlertDescription,
    server::{Accepted, Acceptor},
};
use rustls_pki_types::UnixTime;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, server::TlsStream};

/// ClientHello of a connection, and the time until which its handshake has to be finished.
pub(super) struct ClientHello {
    accepted: Accepted,
    deadline: Instant,
}

impl ClientHello {
    /// Returns the server name, if the client sent one.
    pub(super) fn server_name(&self) -> Option<String> {
        let hello = self.accepted.client_hello();
        hello.server_name().map(str::to_owned)
    }
}

/// Reads the ClientHello. Returns `None` if it was refused.
pub(super) async fn read_client_hello(
    proxy: &Proxy,
    socket: Socket,
    accepted_socket: &AcceptedSocket,
) -> Option<(Socket, ClientHello)> {
    let deadline = Instant::now() + proxy.shared.timeouts.tls;
    let first_byte_result = timeout_at(deadline, first_byte(&socket)).await;
    if proxy.listener.protocol != ListenerProtocol::Tcp
        && let Ok(Some(b'A'..=b'Z')) = first_byte_result
    {
        handshake_failed(proxy, "plaintext", &"the client speaks HTTP without TLS");
        refuse_plaintext(socket).await;
        return None;
    }
    let limited = ReadLimit::new(socket, MAX_CLIENT_HELLO);
    let reading = LazyConfigAcceptor::new(Acceptor::default(), limited);
    let (accepted, io) = match timeout_at(deadline, reading).await {
        Ok(Ok(start)) => (start.accepted, start.io.into_inner()),
        Ok(Err(error)) => {
            handshake_failed(proxy, "hello", &error);
            return None;
        }
        Err(_) => {
            handshake_failed(proxy, "slow", &"no ClientHello in time");
            return None;
        }
    };
    let hello = ClientHello { accepted, deadline };
    let server_name = hello.server_name();
    if let Some(name) = server_name.filter(|name| is_unrecognized(proxy, name, accepted_socket)) {
        handshake_failed(proxy, "unrecognized_name", &"no node has this server name");
        log_refusal(
            proxy,
            accepted_socket.peer,
            (Some(&name), "UnrecognisedName"),
            "no certificate is issued for the server name that a client requested: no node has this name",
        );
        refuse_name(io).await;
        return None;
    }
    Some((io, hello))
}

/// Returns whether the server name alone could name the node, and no node has that name. A fixed node, the original destination
/// or the authority of a CONNECT may name the node instead. Until the nodes of the cluster are loaded, the client receives that
/// error over HTTP.
fn is_unrecognized(proxy: &Proxy, server_name: &str, accepted_socket: &AcceptedSocket) -> bool {
    let listener = &proxy.listener;
    let only_by_name = matches!(
        listener.protocol,
        ListenerProtocol::Https | ListenerProtocol::Tcp
    ) && listener.node.is_none()
        && listener.node_set.is_none()
        && accepted_socket.original.is_none();
    let lacks_certificate =
        |tls: &ArcSwap<ListenerTls>| tls.load().lacks_certificate_for(server_name);
    only_by_name
        && proxy.shared.nodes.pending_reason().is_none()
        && listener.tls.as_ref().is_some_and(lacks_certificate)
}

/// Finishes the handshake, and answers when it is its turn. Returns `None` if it failed.
pub(super) async fn finish_handshake(
    (proxy, turns): (&Proxy, &Turns),
    hello: ClientHello,
    socket: Socket,
    accepted_socket: &AcceptedSocket,
) -> Option<TlsStream<Socket>> {
    let tls = proxy.listener.tls.as_ref()?.load();
    let config = tls.config_for_address(accepted_socket.original, &proxy.shared.nodes);
    drop(tls);
    let server_name = hello.server_name();
    let start = StartHandshake::from_parts(hello.accepted, socket);
    let handshake = async {
        let turn = turns.acquire().await;
        // `into_stream` computes the answer to the ClientHello.
        turn.run(async { start.into_stream(config).into_fallible().await })
            .await
    };
    match timeout_at(hello.deadline, handshake).await {
        Ok(Ok(mut stream)) => {
            stream.get_mut().1.set_buffer_limit(Some(wire::TLS_BUFFER));
            Some(stream)
        }
        Ok(Err((error, socket))) => {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            if let Some(rustls::Error::InvalidCertificate(_)) = inner {
                audit::log_rejected_client(&proxy.listener.name, accepted_socket.peer, &error);
            }
            if let Some(rustls::Error::AlertReceived(alert)) = inner
                && is_about_certificate(*alert)
            {
                log_refusal(
                    proxy,
                    accepted_socket.peer,
                    (server_name.as_deref(), alert.as_str().unwrap_or("unknown")),
                    "a client refuses the certificate of this listener: the client trusts another CA, uses a name that is not in the certificate, or has a wrong clock",
                );
            }
            handshake_failed(proxy, "handshake", &error);
            lingering_close::close(socket).await;
            None
        }
        Err(_) => {
            handshake_failed(proxy, "slow", &"the handshake took too long");
            None
        }
    }
}

/// Returns the server name of a connection, and the client that its certificate names. An HTTP client receives the reason of a
/// rejection as text, and the access log contains it too.
pub(super) fn verify_client(
    proxy: &Proxy,
    stream: &TlsStream<Socket>,
) -> (Option<String>, Result<Option<ClientIdentity>, PeerRejected>) {
    let (_, session) = stream.get_ref();
    let client = client_from_certificate(proxy, session).inspect_err(|rejection| {
        let may_have_token = proxy.listener.authentication.accepts_bearer_tokens();
        if !may_have_token || !rejection.is_unverified() {
            handshake_failed(proxy, "certificate", rejection);
        }
    });
    (session.server_name().map(str::to_owned), client)
}

/// Returns the client that the certificate names, if the client sent one.
fn client_from_certificate(
    proxy: &Proxy,
    session: &rustls::ServerConnection,
) -> Result<Option<ClientIdentity>, PeerRejected> {
    let (Some(tls), Some(chain)) = (&proxy.listener.tls, session.peer_certificates()) else {
        return Ok(None);
    };
    let tls = tls.load();
    let trust = &tls.trust;
    let verified = verify_peer(
        Some(chain),
        Purpose::Client,
        UnixTime::now(),
        trust,
        &none_revoked,
    )?;
    let (name, groups, uris) = match verified.identity {
        Identity::Client { name, groups } => {
            let uri = trust.client_uri(&name);
            (name, groups, vec![uri])
        }
        Identity::Foreign {
            common_name,
            organizations,
            mut uris,
        } => {
            // Only our own root issues URIs of this gateway, and only the kernel reports uids.
            uris.retain(|uri| !trust.is_own_uri(uri));
            let name = uris.first().cloned().or(common_name);
            let name = name.filter(|name| !name.starts_with(UID_PREFIX));
            let name = name.unwrap_or_else(|| "unnamed".to_owned());
            (name, organizations, uris)
        }
        // `verify_peer` admits neither for this purpose.
        Identity::Edge(_) | Identity::Gateway => return Ok(None),
    };
    let client = ClientIdentity::new(&name, groups, AuthMethod::Certificate, &proxy.shared.limits);
    Ok(Some(ClientIdentity {
        root: verified.root,
        certificate: Serial::try_from(verified.serial).ok().map(|serial| {
            Arc::new(PresentedCertificate {
                serial,
                chain: chain.to_vec(),
                not_after: verified.not_after,
            })
        }),
        validity: Some(Validity::until_second(verified.not_after)),
        ..client.with_uris(uris)
    }))
}

/// Whether a client sends this alert because of the presented certificate.
fn is_about_certificate(alert: AlertDescription) -> bool {
    use AlertDescription::{BadCertificate, CertificateExpired, CertificateUnknown, UnknownCA};
    matches!(
        alert,
        BadCertificate | CertificateExpired | CertificateUnknown | UnknownCA
    )
}
