//! `causeway proxy`: a proxy on loopback for programs that can use an HTTP or SOCKS5 proxy, such as browsers, curl and kubectl.
//!
//! Names are not resolved here: the gateway routes by them. So a program must leave the resolution to the proxy (`socks5h`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use causeway_rt::local_proxy::{AcceptedClient, ConnectFailure, ProxyRequest, ProxyRequestError};
use hyper::StatusCode;
use tokio::net::TcpStream;

use super::forward::{listen, serve, until_signal};
use super::nodes::open_client;
use crate::access::events::Events;
use crate::access::gateway_client::{GatewayClient, RequestError};
use crate::access::relay::{into_result, relay_socket};
use crate::cli::LocalProxy;
use crate::signal::Signals;

/// Maximum time of a program to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Proxy of one user.
struct Proxy {
    client: GatewayClient,
    events: Events,
}

/// Runs the command until a signal.
pub(crate) async fn run(args: LocalProxy) -> anyhow::Result<()> {
    if !args.listen.ip().is_loopback() {
        bail!(
            "{} is not a loopback address; every machine that reaches the proxy would use your credential",
            args.listen
        );
    }
    let (_, client) = open_client(&args.profile)?;
    // Before the line that says that it is ready.
    let signals = Signals::listen()?;
    let (listener, local) = listen(args.listen).await?;
    let proxy = Arc::new(Proxy {
        client,
        events: Events::new(args.json),
    });
    let text = format!("Proxy for HTTP and SOCKS5 on {local}");
    proxy
        .events
        .listening(local, proxy.client.gateway(), &text)?;
    let accepting = serve(listener, |local, peer| {
        let proxy = proxy.clone();
        async move { proxy.handle(local, peer).await }
    });
    until_signal(signals, accepting).await;
    Ok(())
}

impl Proxy {
    async fn handle(&self, local: TcpStream, peer: SocketAddr) {
        let request = match ProxyRequest::read(local, REQUEST_TIMEOUT).await {
            Ok(request) => request,
            // Browsers open connections that they do not use.
            Err(ProxyRequestError::Incomplete | ProxyRequestError::TimedOut(_)) => return,
            Err(error) => return self.events.refused(&peer.to_string(), &error),
        };
        let (host, port) = (request.host.clone(), request.port);
        let target = format!("{host}:{port}");
        let session = match self.client.connect(&host, port).await {
            Ok(session) => session,
            Err(error) => {
                self.events.refused(&target, &error);
                return request.refuse(failure(&error), &error.to_string()).await;
            }
        };
        let text = format!("Handling connection from {peer} to {target}");
        self.events.connection(peer, &target, &text);
        let relayed = async {
            let ended = match request.accept().await? {
                AcceptedClient::Bytes(local) => relay_socket(local, session).await,
                AcceptedClient::Http(exchange) => into_result(exchange.forward(session).await),
            };
            Ok::<_, ProxyRequestError>(ended?)
        };
        if let Err(error) = relayed.await {
            self.events.broken(&target, &error);
        }
    }
}

/// Returns the kind of failure for the answer to the program.
fn failure(error: &RequestError) -> ConnectFailure {
    let RequestError::Refused(refusal) = error else {
        return ConnectFailure::Other;
    };
    match (refusal.status, refusal.reason.as_str()) {
        (_, "target_refused") => ConnectFailure::Refused,
        (
            StatusCode::UNAUTHORIZED
            | StatusCode::PROXY_AUTHENTICATION_REQUIRED
            | StatusCode::FORBIDDEN,
            _,
        ) => ConnectFailure::Forbidden,
        (StatusCode::GATEWAY_TIMEOUT, _) => ConnectFailure::TimedOut,
        _ => ConnectFailure::Unreachable,
    }
}
