//! Choices of the encoder.

use super::*;

fn encode_one(encoder: &mut Encoder, name: &str, value: &str) -> Vec<u8> {
    encode(encoder, &[sent(name, value)])
}

#[test]
fn sensitive_fields_are_never_indexed() {
    let mut encoder = Encoder::new(4096);
    for _ in 0..2 {
        for (name, value) in [
            ("authorization", "Bearer abcdefghijklmnopqrstuvwxyz"),
            ("proxy-authorization", ""),
            ("cookie", "short=1"),
        ] {
            let block = encode_one(&mut encoder, name, value);
            assert_eq!(block[0] & 0xf0, 0x10, "{name}");
        }
        let block = encode(
            &mut encoder,
            &[("x-secret".to_owned(), b"1".to_vec(), true)],
        );
        assert_eq!(block[0], 0x10);
    }
    // The name may be indexed, and a sensitive value is not indexed although it is in the table.
    encode_one(&mut encoder, "x-secret", "1");
    let block = encode(
        &mut encoder,
        &[("x-secret".to_owned(), b"1".to_vec(), true)],
    );
    assert_eq!(block, [0x1f, 62 - 15, 1, b'1']);
}

#[test]
fn changing_values_are_not_indexed() {
    let mut encoder = Encoder::new(4096);
    assert_eq!(encode_one(&mut encoder, ":path", "/a"), b"\x04\x02/a");
    assert_eq!(
        encode_one(&mut encoder, "content-length", "10"),
        b"\x0f\x0d\x0210"
    );
    assert_eq!(
        encode_one(&mut encoder, "content-length", "10"),
        b"\x0f\x0d\x0210"
    );
    // The name of the first one becomes an entry, as it is not in the static table.
    assert_eq!(
        encode_one(&mut encoder, "x-request-id", "1"),
        b"\x40\x0cx-request-id\x011"
    );
    assert_eq!(
        encode_one(&mut encoder, "x-request-id", "2"),
        b"\x0f\x2f\x012"
    );
    assert_eq!(encode_one(&mut encoder, "x-request-id", "1"), [0x80 + 62]);
    // Exact values of the static table need no entry.
    assert_eq!(encode_one(&mut encoder, ":path", "/index.html"), [0x85]);
    assert_eq!(
        encode_one(&mut encoder, "accept-encoding", "gzip, deflate"),
        [0x90]
    );
}

#[test]
fn many_values_of_a_field_leave_room_for_others() {
    let mut encoder = Encoder::new(4096);
    let mut decoder = Decoder::new(4096);
    let mut found = 0;
    for client in 0..1000 {
        let agent = format!("an agent of a client with the number {client}");
        let fields = [sent("user-agent", &agent), sent("x-gateway", "gateway-1")];
        let block = encode(&mut encoder, &fields);
        assert_eq!(decode(&mut decoder, &block).unwrap(), fields);
        found += usize::from(block[block.len() - 1] & 0x80 != 0);
    }
    assert!(found >= 990, "{found} of 1000");
    // New values replace old ones in the end.
    let blocks: Vec<_> = (0..30)
        .map(|_| encode_one(&mut encoder, "user-agent", "new"))
        .collect();
    assert_eq!(blocks[29].len(), 1);
}

#[test]
fn names_with_equal_keys_differ() {
    // Equal lengths, first and last octets.
    let (mut encoder, mut decoder) = (Encoder::new(4096), Decoder::new(4096));
    for _ in 0..3 {
        for middle in ["aa", "bb", "cc"] {
            let fields = [sent(&format!("x-prefix{middle}suffixed"), "value")];
            let block = encode(&mut encoder, &fields);
            assert_eq!(decode(&mut decoder, &block).unwrap(), fields);
        }
    }
    assert_eq!(
        encode_one(&mut encoder, "x-prefixaasuffixed", "value").len(),
        1
    );
}

#[test]
fn changes_of_the_size_are_announced() {
    let field = [sent("a", "1")];
    let mut encoder = Encoder::new(8192);
    assert_eq!(encode(&mut encoder, &field)[0], 0x40);
    assert_eq!(encode(&mut encoder, &field), [0x80 + 62]);
    encoder.set_max_size(10_000);
    assert_eq!(encode(&mut encoder, &field), [0x80 + 62]);
    // Both the smallest and the last size, once.
    encoder.set_max_size(0);
    encoder.set_max_size(50);
    assert_eq!(encode(&mut encoder, &[]), [0x20, 0x3f, 50 - 31]);
    assert!(encode(&mut encoder, &[]).is_empty());
    // 34 octets are more than half of the table.
    assert_eq!(encode(&mut encoder, &field), b"\x00\x01a\x011");
    encoder.set_max_size(100);
    assert_eq!(encode(&mut encoder, &[]), [0x3f, 100 - 31]);
    // A table that has never been larger than 20 octets.
    assert_eq!(encode(&mut Encoder::new(20), &field), b"\x34\x00\x01a\x011");
}
