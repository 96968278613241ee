//! Header blocks through the HPACK decoder of the tunnel's engine, through its encoder, and through the decoders of both the
//! engine and h2. All see the same fields, and agree about what is an error.
//!
//! The input is a sequence of blocks, each behind a byte with its length. The byte 255 stands before a number for a new size of
//! the tables.

#![no_main]

use causeway_fuzz::http2::{H2Reader, Input};
use causeway_tunnel::engine::{
    Reason,
    fuzzing::{HpackDecoder, HpackEncoder, HpackField},
};
use h2::{frame::Frame, proto::Error};
use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;

/// Verdict of h2 about a header block.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Pseudo-header fields as text, and the other fields.
    Fields([Option<String>; 6], HeaderMap),
    /// The block can be decoded, but is no message.
    Malformed,
    Failed,
}

fn ask_h2(reader: &mut H2Reader, block: &[u8]) -> Verdict {
    let length = u32::try_from(block.len())
        .expect("a short block")
        .to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], 1, 0x4, 0, 0, 0, 1];
    frame.extend_from_slice(block);
    match reader.read(&frame) {
        Some(Ok(Frame::Headers(headers))) => {
            let (pseudo, fields) = headers.into_parts();
            let text = |text: &str| text.to_owned();
            let pseudo = [
                pseudo.method.map(|method| text(method.as_str())),
                pseudo.scheme.map(|scheme| text(&scheme)),
                pseudo.authority.map(|authority| text(&authority)),
                pseudo.path.map(|path| text(&path)),
                pseudo.protocol.map(|protocol| text(protocol.as_str())),
                pseudo.status.map(|status| text(status.as_str())),
            ];
            Verdict::Fields(pseudo, fields)
        }
        Some(Err(Error::Reset(..))) => Verdict::Malformed,
        _ => Verdict::Failed,
    }
}

/// Returns the engine's fields in the form of h2's.
fn fields(list: &[HpackField]) -> Verdict {
    let names = [
        ":method",
        ":scheme",
        ":authority",
        ":path",
        ":protocol",
        ":status",
    ];
    let (mut pseudo, mut map) = ([const { None }; 6], HeaderMap::new());
    for field in list {
        if let Some(place) = names.iter().position(|name| field.name == name) {
            pseudo[place] = Some(String::from_utf8_lossy(&field.value).into_owned());
        } else {
            let name = HeaderName::from_lowercase(&field.name).expect("a valid name");
            map.append(
                name,
                HeaderValue::from_bytes(&field.value).expect("a valid value"),
            );
        }
    }
    Verdict::Fields(pseudo, map)
}

/// Encoder of the engine, and the two decoders that read what it writes.
struct Rewriter {
    encoder: HpackEncoder,
    decoder: HpackDecoder,
    h2: H2Reader,
}

impl Rewriter {
    fn check(&mut self, fields: &[HpackField]) {
        let block = self.encoder.encode(fields);
        let (again, decoded) = self.decoder.decode(&block);
        assert_eq!(decoded, Ok(()));
        assert_eq!(again.len(), fields.len());
        for (again, field) in again.iter().zip(fields) {
            let is_same =
                (&again.name, &again.value, again.size) == (&field.name, &field.value, field.size);
            assert!(is_same, "{again:?} {field:?}");
            // The encoder protects more fields than its caller demands.
            assert!(again.is_sensitive || !field.is_sensitive, "{field:?}");
        }
        if block.len() <= 1 << 14 {
            assert_ne!(ask_h2(&mut self.h2, &block), Verdict::Failed, "{block:?}");
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let mut input = Input(input);
    let (mut decoder, mut h2) = (HpackDecoder::new(4096), H2Reader::default());
    let mut rewriter = Rewriter {
        encoder: HpackEncoder::new(4096),
        decoder: HpackDecoder::new(4096),
        h2: H2Reader::default(),
    };
    let mut limit = 4096;
    // h2 allows the largest of the sizes that were set since the last block, and requires no update after a smaller one (RFC
    // 7541 section 4.2).
    let (mut h2_limit, mut largest_size, mut is_lowered) = (4096, None, false);
    while !input.is_empty() {
        let length = input.byte();
        if length == 255 {
            let size = input.choose(&[0, 40, 100, 500, 4096, 10_000]);
            is_lowered |= size < limit;
            largest_size = largest_size.max(Some(size));
            limit = size;
            decoder.set_max_size(size);
            h2.set_table_size(size);
            rewriter.encoder.set_max_size(size);
            rewriter.decoder.set_max_size(size);
            rewriter.h2.set_table_size(size);
            continue;
        }
        h2_limit = largest_size.take().unwrap_or(h2_limit);
        let block = input.bytes(length.into());
        let (list, decoded) = decoder.decode(block);
        let theirs = ask_h2(&mut h2, block);
        match decoded {
            Ok(()) => {
                assert!(decoder.table_size() <= limit);
                assert_ne!(theirs, Verdict::Failed, "{list:?}");
                if theirs != Verdict::Malformed {
                    assert_eq!(theirs, fields(&list));
                }
                rewriter.check(&list);
            }
            // h2 ends the connection, and has no table any more that could be compared.
            Err(Reason::PROTOCOL_ERROR) => {
                assert!(
                    matches!(theirs, Verdict::Malformed | Verdict::Failed),
                    "{theirs:?}"
                );
                return;
            }
            Err(_) => {
                let is_lenient = is_lowered || h2_limit > limit;
                assert!(theirs == Verdict::Failed || is_lenient, "{theirs:?}");
                return;
            }
        }
        is_lowered = false;
    }
});
