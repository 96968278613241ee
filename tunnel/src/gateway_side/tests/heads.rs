//! Heads of all sizes: one that a tunnel does not carry fails its own stream.

use super::*;
use crate::wire::{DETAIL, FAILURE, MAX_HEAD};

/// Octets with long codes (RFC 7541, Appendix B): 26 bits, 19, and 5.
const OCTETS: [u8; 3] = [0xf9, b'\\', b'a'];

fn field(octet: u8, length: usize) -> HeaderValue {
    HeaderValue::from_bytes(&vec![octet; length]).unwrap()
}

/// Returns a tunnel whose edge answers with the field that the path describes: `/octet/length`. The field is a trailer if the
/// path begins with `/trailers`.
async fn answering() -> (Tunnel, Tasks) {
    serving(async |asked| {
        let path = asked.head.uri().path().to_owned();
        let mut parts = path.rsplit('/');
        let length = parts.next().unwrap().parse().unwrap();
        let octet = parts.next().unwrap().parse().unwrap();
        let mut head = Response::new(());
        if path.starts_with("/trailers") {
            let mut send = asked.responder.send(head, false).unwrap();
            let trailers = [(
                http::HeaderName::from_static("x-large"),
                field(octet, length),
            )];
            let passed = send.send_trailers(trailers.into_iter().collect()).is_ok();
            assert_eq!(passed, length < MAX_HEAD);
        } else {
            head.headers_mut().insert("x-large", field(octet, length));
            let _ = asked.responder.send(head, true);
        }
    })
    .await
}

async fn answer(tunnel: &Tunnel, path: &str) -> Result<Response<StreamReceiver>, StreamError> {
    let target = target();
    let opened = tunnel.open(get(path), &StreamKind::Request, &target, true);
    opened.await?.response.await
}

#[tokio::test]
async fn a_slow_head_passes_or_fails_only_its_stream() {
    let (tunnel, _tasks) = answering().await;
    let waiting = answer(&tunnel, "/97/1").await.unwrap();
    for octet in OCTETS {
        let path = format!("/{octet}/{}", MAX_HEAD - 100);
        let passed = answer(&tunnel, &path).await.unwrap();
        assert_eq!(passed.headers()["x-large"].len(), MAX_HEAD - 100);
        let path = format!("/{octet}/{MAX_HEAD}");
        let refused = answer(&tunnel, &path).await.unwrap();
        assert_eq!(refused.headers()[FAILURE], "target-broken");
        let detail = refused.headers()[DETAIL].to_str().unwrap();
        assert!(detail.contains("a tunnel allows"), "{detail}");
    }
    assert!(tunnel.is_open());
    drop(waiting);
}

#[tokio::test]
async fn trailers_pass_or_fail_their_stream() {
    let (tunnel, _tasks) = answering().await;
    for octet in OCTETS {
        let path = format!("/trailers/{octet}/{}", MAX_HEAD - 100);
        let body = answer(&tunnel, &path).await.unwrap().into_body();
        let trailers = body.collect().await.unwrap().trailers().cloned().unwrap();
        assert_eq!(trailers["x-large"].len(), MAX_HEAD - 100);
        let path = format!("/trailers/{octet}/{MAX_HEAD}");
        let broken = match answer(&tunnel, &path).await {
            Ok(answer) => answer.into_body().collect().await.is_err(),
            Err(_) => true,
        };
        assert!(broken, "{octet}");
    }
    assert!(answer(&tunnel, "/97/1").await.is_ok());
}

#[tokio::test]
async fn a_request_that_no_tunnel_carries_is_not_sent() {
    let (tunnel, _tasks) = answering().await;
    let mut head = get("/97/1");
    head.headers_mut().insert("x-large", field(b'a', MAX_HEAD));
    let target = target();
    let opened = tunnel.open(head, &StreamKind::Request, &target, true).await;
    assert!(matches!(opened, Err(StreamError::TooLarge)), "{opened:?}");
    assert!(answer(&tunnel, "/97/1").await.is_ok());
}
