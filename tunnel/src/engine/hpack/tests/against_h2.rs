//! Both directions against the implementation of the h2 crate, in whole connections because h2 does not export it.

use super::*;
use http::{HeaderMap, HeaderValue, Request, Response};
use std::pin::pin;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Enough for all that one end sends here, so that no test needs two tasks.
const PIPE: usize = 1 << 20;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

fn header_table_size(size: u32) -> Vec<u8> {
    let mut setting = vec![0, 1];
    setting.extend(size.to_be_bytes());
    setting
}

/// A request with few names and values, and sometimes random octets, which have Huffman codes of all lengths.
fn random_request(random: &mut StdRng) -> Request<()> {
    let method = ["GET", "POST", "PURGE"][random.random_range(0..3)];
    let host = random.random_range(0..20);
    let path = ["", "index.html", "a?b=c", "x/y/z"][random.random_range(0..4)];
    let uri = format!("https://host-{host}.example/{path}");
    let mut request = Request::builder().method(method).uri(uri).body(()).unwrap();
    *request.headers_mut() = random_headers(random);
    request
}

fn random_headers(random: &mut StdRng) -> HeaderMap {
    let names = [
        "accept",
        "accept-encoding",
        "age",
        "authorization",
        "content-language",
        "cookie",
        "date",
        "etag",
        "user-agent",
        "x-forwarded-for",
        "x-request-id",
        "traceparent",
        "x-a",
        "a",
        "zz",
    ];
    let mut headers = HeaderMap::new();
    for _ in 0..random.random_range(0..20) {
        let name = names[random.random_range(0..names.len())];
        let value: Vec<u8> = match random.random_range(0..10) {
            0 => (0..random.random_range(0..300))
                .map(|_| random.random_range(128..=255))
                .collect(),
            1 => (0..random.random_range(0..300))
                .map(|_| random.random_range(32..127))
                .collect(),
            2 => b"gzip, deflate".to_vec(),
            3 => vec![b'x'; random.random_range(0..1500)],
            _ => format!("value-{}", random.random_range(0..30)).into_bytes(),
        };
        let mut value = HeaderValue::from_bytes(&value).unwrap();
        value.set_sensitive(random.random_ratio(1, 10));
        headers.append(HeaderName::from_static(name), value);
    }
    headers
}

fn encode_request(encoder: &mut Encoder, request: &Request<()>) -> Vec<u8> {
    let mut block = BytesMut::new();
    encoder.begin(&mut block);
    let (method, uri) = (request.method().as_str(), request.uri());
    let authority = uri.authority().unwrap().as_str();
    let path = uri.path_and_query().unwrap().as_str();
    encoder.encode(Name::Method, method.as_bytes(), false, &mut block);
    encoder.encode(
        Name::Scheme,
        uri.scheme_str().unwrap().as_bytes(),
        false,
        &mut block,
    );
    encoder.encode(Name::Authority, authority.as_bytes(), false, &mut block);
    encoder.encode(Name::Path, path.as_bytes(), false, &mut block);
    for (name, value) in request.headers() {
        let is_sensitive = value.is_sensitive();
        encoder.encode(
            Name::Field(name),
            value.as_bytes(),
            is_sensitive,
            &mut block,
        );
    }
    block.to_vec()
}

#[tokio::test]
async fn h2_decodes_our_blocks() {
    for (seed, table_size) in [(1, 4096), (2, 0), (3, 100), (4, 1000), (5, 65_536)] {
        let mut random = StdRng::seed_from_u64(seed);
        let requests: Vec<_> = (0..80).map(|_| random_request(&mut random)).collect();
        let (mut near, far) = tokio::io::duplex(PIPE);
        near.write_all(PREFACE).await.unwrap();
        near.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
        let mut encoder = Encoder::new(table_size);
        for (position, request) in requests.iter().enumerate() {
            // The size may change to and fro within the limit of the peer.
            if position % 10 == 7 {
                encoder.set_max_size(random.random_range(0..=table_size));
                encoder.set_max_size(random.random_range(0..=table_size));
            }
            let stream = u32::try_from(position * 2 + 1).unwrap();
            let block = encode_request(&mut encoder, request);
            let flags = END_HEADERS | END_STREAM;
            near.write_all(&frame(HEADERS, flags, stream, &block))
                .await
                .unwrap();
        }

        let mut builder = h2::server::Builder::new();
        builder.max_header_list_size(1 << 20);
        let mut server = builder.handshake::<_, bytes::Bytes>(far).await.unwrap();
        for (position, sent) in requests.iter().enumerate() {
            let (request, mut respond) = server.accept().await.unwrap().unwrap();
            assert_eq!(request.method(), sent.method());
            assert_eq!(request.uri(), sent.uri());
            assert_eq!(
                request.headers(),
                sent.headers(),
                "seed {seed}, request {position}"
            );
            respond.send_response(Response::new(()), true).unwrap();
        }
    }
}

/// Reads frames until `count` header blocks have come. Decodes them and acknowledged changes of the table's size.
async fn read_blocks(
    near: &mut DuplexStream,
    decoder: &mut Decoder,
    table_size: usize,
    count: usize,
) -> Vec<Vec<Sent>> {
    let (mut requests, mut block) = (Vec::new(), Vec::new());
    while requests.len() < count {
        let mut head = [0; 9];
        near.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        near.read_exact(&mut payload).await.unwrap();
        match head[3] {
            SETTINGS if head[4] == ACK => decoder.set_max_size(table_size),
            HEADERS | CONTINUATION => {
                block.extend(payload);
                if head[4] & END_HEADERS != 0 {
                    requests.push(decode(decoder, &block).unwrap());
                    block.clear();
                }
            }
            _ => {}
        }
    }
    requests
}

fn check_request(received: &[Sent], sent: &Request<()>) {
    let uri = sent.uri();
    let mut headers = HeaderMap::new();
    for (name, value, _) in received {
        match name.as_str() {
            ":method" => assert_eq!(value, sent.method().as_str().as_bytes()),
            ":scheme" => assert_eq!(value, uri.scheme_str().unwrap().as_bytes()),
            ":authority" => assert_eq!(value, uri.authority().unwrap().as_str().as_bytes()),
            ":path" => assert_eq!(value, uri.path_and_query().unwrap().as_str().as_bytes()),
            name => {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.append(name, HeaderValue::from_bytes(value).unwrap());
            }
        }
    }
    assert_eq!(&headers, sent.headers());
}

#[tokio::test]
async fn our_decoder_decodes_blocks_of_h2() {
    let mut random = StdRng::seed_from_u64(7);
    let (mut near, far) = tokio::io::duplex(PIPE);
    let (send_request, connection) = h2::client::handshake(far).await.unwrap();
    let mut connection = pin!(connection);
    let mut preface = [0; PREFACE.len()];
    near.read_exact(&mut preface).await.unwrap();
    let mut decoder = Decoder::new(4096);
    let mut responses = Vec::new();
    for table_size in [4096, 1000, 0, 100, 2000, 60, 4096, 300] {
        let setting = header_table_size(table_size);
        near.write_all(&frame(SETTINGS, 0, 0, &setting))
            .await
            .unwrap();
        let requests: Vec<_> = (0..10).map(|_| random_request(&mut random)).collect();
        for request in &requests {
            let (response, _) = send_request
                .clone()
                .send_request(request.clone(), true)
                .unwrap();
            responses.push(response);
        }
        let table_size = usize::try_from(table_size).unwrap();
        let received = tokio::select! {
            received = read_blocks(&mut near, &mut decoder, table_size, requests.len()) => received,
            result = &mut connection => panic!("{result:?}"),
        };
        for (received, sent) in received.iter().zip(&requests) {
            check_request(received, sent);
        }
    }
}
