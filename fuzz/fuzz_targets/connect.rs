//! The head of a CONNECT: through the parser of listeners, then through our checks.

#![no_main]

use bytes::Bytes;
use causeway_gateway::{config::ListenerProtocol, proxy::request};
use causeway_tunnel::{Target, target};
use http::{Method, Request, Response};
use http_body_util::Empty;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use std::convert::Infallible;
use tokio::io::AsyncWriteExt;

/// The default limits of a gateway.
const BOUNDS: request::RequestLimits = request::RequestLimits {
    target_bytes: 65_536,
    header_bytes: 65_536,
    max_headers: 100,
};

async fn look(request: Request<Incoming>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let connect = request.method() == Method::CONNECT;
    let checked = request::check(&request, BOUNDS)
        .and_then(|()| request::stream_kind(&request, ListenerProtocol::Connect))
        .and_then(|kind| Ok((kind, request::authority(&request)?)));
    if let Ok((kind, authority)) = checked {
        if connect {
            assert_eq!(request.uri().path(), "", "a policy is asked for no path");
        } else {
            assert_eq!(request.uri().scheme_str(), Some("http"), "{kind:?}");
        }
        let authority = authority.expect("the target of a proxy's request has an authority");
        if let Ok((host, Some(port))) = target::split_host_port(authority) {
            let target = Target::new(host, port);
            assert_eq!(target.to_string().parse(), Ok(target));
        }
    }
    Ok(Response::new(Empty::new()))
}

fuzz_target!(|bytes: &[u8]| {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("a runtime without drivers needs nothing");
    runtime.block_on(async {
        let (mut near, far) = tokio::io::duplex(bytes.len() + 65_536);
        near.write_all(bytes).await.expect("there is room for it");
        near.shutdown().await.expect("it is in memory");
        let served = http1::Builder::new().serve_connection(TokioIo::new(far), service_fn(look));
        let _ = served.await;
    });
});
