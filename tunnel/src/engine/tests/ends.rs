//! Ends of streams and connections, and the calls of the handles that depend on them.

use super::{
    super::{
        Error, Ping, Reason, client,
        error::Initiator,
        frame::{PREFACE, kind},
        server,
        streams::Half,
    },
    raw::{Peer, data, frame, headers, request, settings},
};
use bytes::Bytes;
use futures_util::future::join;
use http::{Request, Response};
use std::{
    future::{Future, poll_fn},
    io,
    pin::{Pin, pin},
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

fn get() -> Request<()> {
    Request::get("http://a/").body(()).unwrap()
}

/// Transport from which these bytes can be read, and to which nothing can be written.
struct Broken(&'static [u8]);

impl AsyncRead for Broken {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.is_empty() {
            return Poll::Pending;
        }
        let (now, later) = self.0.split_at(self.0.len().min(buf.remaining()));
        buf.put_slice(now);
        self.0 = later;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Broken {
    fn poll_write(
        self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        _buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

async fn body_of(response: client::ResponseFuture) -> Result<usize, Error> {
    let mut body = response.await?.into_body();
    let mut length = 0;
    while let Some(chunk) = poll_fn(|cx| body.poll_data(cx)).await {
        length += chunk?.len();
    }
    Ok(length)
}

#[tokio::test]
async fn a_response_that_has_arrived_outlives_a_failed_write() {
    let mut bytes = settings(&[]);
    bytes.extend(headers(1, false, &[(":status", "200")]));
    for _ in 0..3 {
        bytes.extend(data(1, false, &[0; 16_000]));
    }
    bytes.extend(data(1, true, &[0; 100]));
    let io = Broken(bytes.leak());
    let (mut sender, connection) = client::handshake(io).await.unwrap();
    let (response, _send) = sender.send_request(&get(), true).unwrap();
    let (end, length) = join(connection, body_of(response)).await;
    assert_eq!(length.unwrap(), 48_100);
    let error = end.unwrap_err();
    assert_eq!(error.get_io().unwrap().kind(), io::ErrorKind::BrokenPipe);
}

#[tokio::test]
async fn a_transport_that_ends_inside_a_frame_is_an_error() {
    for (tail, is_error) in [(&[][..], false), (&[0, 0, 9, 0][..], true)] {
        let (near, mut far) = tokio::io::duplex(10_000);
        let (mut sender, connection) = client::handshake(near).await.unwrap();
        let (response, _send) = sender.send_request(&get(), true).unwrap();
        far.write_all(&settings(&[])).await.unwrap();
        far.write_all(tail).await.unwrap();
        drop(far);
        let (end, response) = join(connection, body_of(response)).await;
        assert_eq!(end.is_err(), is_error);
        assert!(response.unwrap_err().is_io());
        assert!(sender.send_request(&get(), true).is_err());
        assert!(sender.ready().await.is_err());
    }
}

#[tokio::test]
async fn a_server_needs_the_preface() {
    let (near, far) = tokio::io::duplex(1_000);
    drop(far);
    let error = server::handshake(near).await.unwrap_err();
    assert_eq!(error.get_io().unwrap().kind(), io::ErrorKind::UnexpectedEof);
    let (near, mut far) = tokio::io::duplex(1_000);
    far.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let error = server::handshake(near).await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::PROTOCOL_ERROR));
    assert!(error.is_go_away() && !error.is_remote());
}

#[tokio::test]
async fn a_client_without_handles_closes_in_order() {
    let (near, mut far) = tokio::io::duplex(10_000);
    let (sender, connection) = client::handshake(near).await.unwrap();
    drop(sender);
    connection.await.unwrap();
    let mut bytes = Vec::new();
    far.read_to_end(&mut bytes).await.unwrap();
    let last = [0, 0, 8, kind::GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert!(bytes.starts_with(PREFACE) && bytes.ends_with(&last));
}

#[tokio::test]
async fn handles_outlive_their_connection() {
    let (near, _far) = tokio::io::duplex(10_000);
    let (mut sender, mut connection) = client::handshake(near).await.unwrap();
    let mut ping_pong = connection.ping_pong().unwrap();
    assert!(connection.ping_pong().is_none());
    let (response, mut send) = sender.send_request(&get(), false).unwrap();
    ping_pong.send_ping(Ping::opaque()).unwrap();
    assert!(ping_pong.send_ping(Ping::opaque()).is_err());
    drop(connection);
    assert!(body_of(response).await.unwrap_err().is_io());
    assert!(poll_fn(|cx| send.poll_reset(cx)).await.unwrap_err().is_io());
    assert!(poll_fn(|cx| send.poll_capacity(cx)).await.is_none());
    assert!(send.send_data(Bytes::from_static(b"x"), false).is_err());
    assert!(poll_fn(|cx| ping_pong.poll_pong(cx)).await.is_err());
    assert_eq!(send.capacity(), 0);
}

#[tokio::test]
async fn a_peer_that_does_not_read_the_last_frames_is_given_up() {
    let (near, mut far) = tokio::io::duplex(16);
    let (_sender, mut connection) = client::handshake(near).await.unwrap();
    let mut ping_pong = connection.ping_pong().unwrap();
    ping_pong.send_ping(Ping::opaque()).unwrap();
    let flood = async {
        far.write_all(&data(1, true, b"no SETTINGS")).await.unwrap();
        for _ in 0..4_000 {
            far.write_all(&[0; 1_000]).await.unwrap();
        }
    };
    tokio::select! {
        end = &mut connection => assert_eq!(end.unwrap_err().reason(), Some(Reason::PROTOCOL_ERROR)),
        () = flood => panic!("all was read and discarded"),
    }
}

#[tokio::test]
async fn a_ping_fails_only_after_the_last_frames_are_written() {
    let (near, mut far) = tokio::io::duplex(40);
    let (_sender, mut connection) = client::handshake(near).await.unwrap();
    let mut ping_pong = connection.ping_pong().unwrap();
    ping_pong.send_ping(Ping::opaque()).unwrap();
    far.write_all(&data(1, true, b"no SETTINGS")).await.unwrap();
    let mut cx = Context::from_waker(std::task::Waker::noop());
    // The write of GOAWAY is blocked.
    assert!(pin!(&mut connection).poll(&mut cx).is_pending());
    assert!(ping_pong.poll_pong(&mut cx).is_pending());
    let mut bytes = Vec::new();
    let (end, error) = tokio::select! {
        all = join(&mut connection, poll_fn(|cx| ping_pong.poll_pong(cx))) => all,
        _ = far.read_to_end(&mut bytes) => unreachable!("the connection is not dropped"),
    };
    assert_eq!(end.unwrap_err().reason(), Some(Reason::PROTOCOL_ERROR));
    assert!(error.is_err() && ping_pong.send_ping(Ping::opaque()).is_err());
}

#[test]
fn waiting_requests_end_when_the_peer_leaves() {
    let mut peer = Peer::of_client();
    peer.feed(&settings(&[(3, 1)]));
    let keys = [(); 2].map(|()| peer.state.send_request(&get(), true).unwrap());
    let last = [0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0];
    peer.feed(&frame(kind::GOAWAY, 0, 0, &last));
    let errors = keys.map(|key| peer.state.store.get(key).unwrap().error.clone());
    assert!(errors[0].is_none());
    assert!(errors[1].as_ref().unwrap().is_go_away());
    // A repetition changes nothing but the reason.
    let mut repetition = last;
    repetition[7] = 1;
    peer.feed(&frame(kind::GOAWAY, 0, 0, &repetition));
    peer.feed(&headers(1, true, &[(":status", "200")]));
    let end = peer.state.end.clone().unwrap();
    assert_eq!(end.unwrap_err().reason(), Some(Reason::PROTOCOL_ERROR));
}

/// Returns the code of the only `RST_STREAM` frame that the state machine writes.
#[test]
fn a_stream_that_is_reset_inside_a_frame_has_no_orderly_end() {
    let mut peer = Peer::of_server(|_| {});
    peer.feed(&request(1, false, &[]));
    let (key, _) = peer.state.next_request().unwrap();
    let last = data(1, true, b"the whole");
    peer.feed(&last[..12]);
    peer.state.reset(key, Reason::CANCEL, Initiator::User);
    peer.feed(&last[12..]);
    let stream = peer.state.store.get(key).unwrap();
    assert_eq!(
        stream.recv,
        Half::Open,
        "a reader would take a part for all"
    );
}

fn reset_code(peer: &mut Peer) -> Option<Reason> {
    let frames = peer.take();
    let mut resets = frames.iter().filter(|frame| frame.kind == kind::RST_STREAM);
    let code = resets.next()?.payload[..].try_into().unwrap();
    assert!(resets.next().is_none());
    Some(Reason::from(u32::from_be_bytes(code)))
}

#[tokio::test]
async fn a_stream_without_handles_is_reset() {
    let mut peer = Peer::of_client();
    let key = peer.state.send_request(&get(), true).unwrap();
    peer.state.drop_handle(key);
    assert_eq!(reset_code(&mut peer), None);
    peer.state.drop_handle(key);
    assert_eq!(reset_code(&mut peer), Some(Reason::CANCEL));
    // A server's complete response needs no more of the request.
    for (is_complete, code) in [(true, Reason::NO_ERROR), (false, Reason::CANCEL)] {
        let mut peer = Peer::of_server(|_| {});
        peer.feed(&request(1, false, &[]));
        let (key, _) = peer.state.next_request().unwrap();
        let stream = peer.state.store.get(key).unwrap();
        let half = super::super::streams::Half::Ended;
        stream.send = if is_complete {
            half
        } else {
            super::super::streams::Half::Open
        };
        stream.queue.push_back(Bytes::from_static(b"last"));
        (stream.queued, peer.state.queued) = (4, 4);
        peer.state.schedule.add(key, stream);
        peer.state.drop_handle(key);
        peer.state.drop_handle(key);
        let queued = peer.state.store.get(key).map(|stream| stream.queued);
        assert_eq!(
            queued,
            is_complete.then_some(4),
            "an incomplete body is freed at once"
        );
        assert_eq!(reset_code(&mut peer), Some(code));
        assert_eq!(peer.state.store.len(), 0);
    }
}

#[tokio::test]
async fn forbidden_fields_are_not_sent() {
    let (near, far) = tokio::io::duplex(10_000);
    let (mut sender, connection) = client::handshake(near).await.unwrap();
    let upgrade = Request::get("http://a/").header("connection", "upgrade");
    assert!(
        sender
            .send_request(&upgrade.body(()).unwrap(), true)
            .is_err()
    );
    let (response, send) = sender.send_request(&get(), true).unwrap();
    let serve = async {
        let mut server = server::handshake(far).await.unwrap();
        let (_request, mut respond) = server.accept().await.unwrap().unwrap();
        let chunked = Response::builder().header("transfer-encoding", "chunked");
        assert!(
            respond
                .send_response(chunked.body(()).unwrap(), true)
                .is_err()
        );
        assert!(respond.send_informational(Response::new(())).is_err());
        respond.send_response(Response::new(()), true).unwrap();
        assert!(respond.send_response(Response::new(()), true).is_err());
        drop(respond);
        assert!(server.accept().await.is_none());
    };
    let receive = async {
        let length = body_of(response).await;
        drop((sender, send));
        length
    };
    let (end, ((), length)) = join(connection, join(serve, receive)).await;
    end.unwrap();
    assert_eq!(length.unwrap(), 0);
}
