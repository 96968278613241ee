use super::*;
use bytes::BytesMut;
use http::HeaderName;
use rand::{RngExt, SeedableRng, rngs::StdRng};

mod against_h2;
mod hostile_blocks;
mod indexing;
mod rfc_examples;

/// Field as the encoder takes it: name, value and whether it is sensitive.
type Sent = (String, Vec<u8>, bool);

fn sent(name: &str, value: &str) -> Sent {
    (name.to_owned(), value.as_bytes().to_vec(), false)
}

fn encode(encoder: &mut Encoder, fields: &[Sent]) -> Vec<u8> {
    let mut block = BytesMut::new();
    encoder.begin(&mut block);
    for (name, value, is_sensitive) in fields {
        let header;
        let name = match name.as_str() {
            ":method" => Name::Method,
            ":scheme" => Name::Scheme,
            ":authority" => Name::Authority,
            ":path" => Name::Path,
            ":status" => Name::Status,
            ":protocol" => Name::Protocol,
            name => {
                header = HeaderName::from_bytes(name.as_bytes()).unwrap();
                Name::Field(&header)
            }
        };
        encoder.encode(name, value, *is_sensitive, &mut block);
    }
    block.to_vec()
}

/// Name and value of a decoded field, and whether its value is marked as sensitive.
fn received(field: &Field) -> Sent {
    let (name, value, is_sensitive) = match field {
        Field::Method(method) => (":method", method.as_str().as_bytes(), false),
        Field::Scheme(value) => (":scheme", value.as_ref(), false),
        Field::Authority(value) => (":authority", value.as_ref(), false),
        Field::Path(value) => (":path", value.as_ref(), false),
        Field::Status(status) => (":status", status.as_str().as_bytes(), false),
        Field::Protocol(value) => (":protocol", value.as_ref(), false),
        Field::Header(name, value) => (name.as_str(), value.as_bytes(), value.is_sensitive()),
    };
    (name.to_owned(), value.to_vec(), is_sensitive)
}

/// Decodes a block and checks the sizes that the decoder reports.
fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<Sent>, DecodeError> {
    let mut fields = Vec::new();
    decoder.decode(block, |field, size| {
        let field = received(&field);
        assert_eq!(size, field.0.len() + field.1.len() + 32);
        fields.push(field);
    })?;
    Ok(fields)
}

/// Writes an integer after a pattern, like the encoder but for any pattern and prefix.
fn integer(pattern: u8, prefix: u32, value: usize) -> Vec<u8> {
    let max = (1 << prefix) - 1;
    if value < max {
        return vec![pattern | u8::try_from(value).unwrap()];
    }
    let mut octets = vec![pattern | u8::try_from(max).unwrap()];
    let mut rest = value - max;
    while rest > 127 {
        octets.push(u8::try_from(rest & 127).unwrap() | 128);
        rest >>= 7;
    }
    octets.push(u8::try_from(rest).unwrap());
    octets
}

/// A literal with a literal name. The pattern is 0x40 for newly indexed, 0x00 for not indexed, 0x10 for never indexed.
fn literal(pattern: u8, name: &str, value: &[u8]) -> Vec<u8> {
    let mut block = vec![pattern];
    block.extend(integer(0, 7, name.len()));
    block.extend(name.as_bytes());
    block.extend(integer(0, 7, value.len()));
    block.extend(value);
    block
}

const REQUEST: [(&str, &str); 14] = [
    (":method", "GET"),
    (":scheme", "https"),
    (":authority", "machine-17.example.com"),
    (":path", "/api/v1/orders/4711?limit=100"),
    (
        "user-agent",
        "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
    ),
    ("accept", "application/json, text/plain, */*"),
    ("accept-language", "en-US,en;q=0.5"),
    ("accept-encoding", "gzip, deflate, br, zstd"),
    (
        "cookie",
        "session=2c1b7c58a3e94d6f8b0a1e5d7f3c9b24; theme=dark",
    ),
    ("authorization", "Bearer abcdefghijklmnopqrstuvwxyz"),
    ("x-forwarded-for", "203.0.113.195"),
    ("x-forwarded-proto", "https"),
    ("x-request-id", "f2f5c8a0-6d3e-4f0e-9d56-0b1a7f1c2d3e"),
    ("causeway-target", "127.0.0.1:8080"),
];

fn request() -> Vec<Sent> {
    REQUEST
        .iter()
        .map(|(name, value)| sent(name, value))
        .collect()
}

/// `authorization` arrives as sensitive.
fn received_request() -> Vec<Sent> {
    let mut fields = request();
    fields[9].2 = true;
    fields
}

#[test]
fn a_repeated_request_is_short() {
    let (mut encoder, mut decoder) = (Encoder::new(4096), Decoder::new(4096));
    let first = encode(&mut encoder, &request());
    let second = encode(&mut encoder, &request());
    let third = encode(&mut encoder, &request());
    for block in [&first, &second, &third] {
        assert_eq!(decode(&mut decoder, block).unwrap(), received_request());
    }
    let literals = [3, 8, 9, 12]
        .map(|field| REQUEST[field].1.len() + 3)
        .iter()
        .sum::<usize>();
    assert!(second.len() <= literals + 10, "{} octets", second.len());
    assert_eq!(second, third);
}

#[test]
fn random_fields_arrive() {
    for seed in 0..40 {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut encoder, mut decoder) = (Encoder::new(4096), Decoder::new(4096));
        for _ in 0..60 {
            if random.random_ratio(1, 8) {
                // The decoder's limit may be smaller at first only if both learn it in the same moment, as here.
                let size = random.random_range(0..9000);
                encoder.set_max_size(size);
                decoder.set_max_size(size);
            }
            let fields = random_fields(&mut random);
            let block = encode(&mut encoder, &fields);
            let mut expected = fields.clone();
            for (name, value, is_sensitive) in &mut expected {
                let is_short_cookie = name == "cookie" && value.len() < 20;
                *is_sensitive |= name.ends_with("authorization") || is_short_cookie;
                *is_sensitive &= !name.starts_with(':');
            }
            assert_eq!(
                decode(&mut decoder, &block).unwrap(),
                expected,
                "seed {seed}"
            );
        }
    }
}

/// Fields of few names and values, so that many come again, and of some random ones.
fn random_fields(random: &mut StdRng) -> Vec<Sent> {
    let names = [
        ":method",
        ":scheme",
        ":authority",
        ":path",
        ":status",
        ":protocol",
        "accept",
        "accept-encoding",
        "age",
        "authorization",
        "content-length",
        "cookie",
        "set-cookie",
        "etag",
        "x-request-id",
        "user-agent",
        "a",
        "ab",
        "abc",
        "abcd",
        "x-some-long-name-0123456789-a",
        "x-some-long-name-9876543210-a",
    ];
    let mut fields = Vec::new();
    for _ in 0..random.random_range(0..30) {
        let name = if random.random_ratio(1, 10) {
            format!("x-{}", random.random_range(0..200))
        } else {
            names[random.random_range(0..names.len())].to_owned()
        };
        let value = match name.as_str() {
            ":method" => {
                ["GET", "POST", "PUT", "PATCH", "PURGE"][random.random_range(0..5)].to_owned()
            }
            ":status" => random.random_range(100..600).to_string(),
            ":scheme" => ["http", "https", "ws"][random.random_range(0..3)].to_owned(),
            ":path" => ["/", "/index.html", "/a"][random.random_range(0..3)].to_owned(),
            _ if random.random_ratio(1, 60) => "long ".repeat(random.random_range(0..1000)),
            _ if random.random_ratio(1, 4) => "v".repeat(random.random_range(0..200)),
            _ => [
                "",
                "gzip, deflate",
                "value",
                "other",
                "0123456789abcdefghij",
            ][random.random_range(0..5)]
            .to_owned(),
        };
        fields.push((name, value.into_bytes(), random.random_ratio(1, 10)));
    }
    fields
}

/// All octets, coded by another implementation (the Python package `hpack`, version 4.2.0).
const ALL_OCTETS: &str = "\
    ffc7fffd8fffffe2fffffe3fffffe4fffffe5fffffe6fffffe7fffffe8ffffeafffffff3fffffa7fffffabffffffdfffffeb \
    fffffecfffffedfffffeefffffefffffff0ffffff1ffffff2fffffffbfffffcffffffd3fffffd7fffffdbfffffdffffffe3f \
    ffffe7fffffebfffffed4fe3f9ffaffcabf1febfafefe7fdfd2cbb00089969b71d79fb9f7fff20ffbff3ff50ddbd7f061c58 \
    f265cd9f469d5af66dddbf871e5f9cff7ff7fffc3ff9ffe45fff4719242cb34e6e9d68a6a3d7dac426defe3cfaf7fffbfe7f \
    fbffdffffffcfffe6ffff4bfff9ffffa3fffd3ffff53fffd5ffffb3fffeb7fffdaffffb7ffff73fffeeffffdeffffebffffb \
    fffffd9ffffdbfffebffffe0ffffeeffffc3ffff8bffff1ffffe4fffee7fffb1ffff97fffd9ffffcdffff9fffffbffffdaff \
    feeffff4ffffb7fffee7fffe8ffffd3fffdeffffd5fffeeffffbdffffe1fffdfffff7fffff5ffffecffff07fff87fffe0fff \
    f17fffedffff87ffff77fffeffffeaffff8bfffe3ffff93ffff87fffcbffff37ffff1fffff83ffffe1fffebfffe3ffff3fff \
    ff2ffffa3ffffd9fffff17ffffc7fffff27ffffdefffffbffffff2fffff8fffffb7fff97fff8fffffe6fffffc1fffff87fff \
    fe7fffffc5ffffe5fffe4ffff2fffffd1fffff4ffffffefffffe3fffffc9fffff97fffb3ffffcffffb7fffcdffff4ffff9ff \
    ffd1ffffcffffeaffffafffffddffffeffffff4fffff5fffffabffffa7ffffd7fffff9bffffecfffffb7fffff3fffffe8fff \
    ffd3fffffabfffff5fffffff7ffffecfffffdbfffffbbfffff7ffffff0fffffbbf";

#[test]
fn huffman_code_of_all_octets() {
    let code = rfc_examples::octets(ALL_OCTETS);
    let mut output = Vec::new();
    let length = huffman::decode(&code, &mut output).unwrap();
    assert_eq!(output[..length], (0..=255).collect::<Vec<u8>>());
    // No prefix decodes to all octets. Most end within a symbol, and the others in valid padding.
    for end in 0..code.len() {
        assert_ne!(huffman::decode(&code[..end], &mut output), Ok(256));
    }
}
