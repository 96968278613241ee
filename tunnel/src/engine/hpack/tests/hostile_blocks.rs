//! Invalid and hostile blocks, and both tables at their bounds.

use super::*;

const COMPRESSION: Result<Vec<Sent>, DecodeError> = Err(DecodeError::Compression);
const MALFORMED: Result<Vec<Sent>, DecodeError> = Err(DecodeError::Malformed);

fn decode_alone(block: &[u8]) -> Result<Vec<Sent>, DecodeError> {
    decode(&mut Decoder::new(4096), block)
}

fn size_update(size: usize) -> Vec<u8> {
    integer(0x20, 5, size)
}

#[test]
fn truncated_blocks_fail() {
    let mut block = Vec::new();
    let mut ends = vec![0];
    let mut encoder = Encoder::new(4096);
    for field in request()
        .iter()
        .chain(&request())
        .chain([&sent("x-long", &"x".repeat(300))])
    {
        block.extend(encode(&mut encoder, std::slice::from_ref(field)));
        ends.push(block.len());
    }
    // Huffman-coded name and value (RFC 7541, C.4.3).
    block.extend(
        b"\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9\x5b\xb8\xe8\xb4\xbf",
    );
    ends.push(block.len());
    for length in 0..=block.len() {
        let result = decode_alone(&block[..length]);
        match ends.iter().position(|end| *end == length) {
            Some(fields) => assert_eq!(result.unwrap().len(), fields),
            None => assert_eq!(result, COMPRESSION, "{length} octets"),
        }
    }
}

#[test]
fn random_blocks_do_not_panic() {
    let mut random = StdRng::seed_from_u64(3);
    let valid = encode(&mut Encoder::new(4096), &request());
    for _ in 0..20_000 {
        let mut block = valid.clone();
        if random.random_ratio(1, 2) {
            block = (0..random.random_range(0..100))
                .map(|_| random.random())
                .collect();
        } else {
            for _ in 0..random.random_range(1..4) {
                let position = random.random_range(0..block.len());
                block[position] = random.random();
            }
        }
        let mut decoder = Decoder::new(4096);
        let _ = decode(&mut decoder, &block);
        assert!(decoder.table_size() <= 4096);
    }
}

#[test]
fn indexes_beyond_the_tables_fail() {
    assert_eq!(decode_alone(&[0x80]), COMPRESSION);
    assert_eq!(decode_alone(&integer(0x80, 7, 62)), COMPRESSION);
    assert_eq!(
        decode_alone(&[&integer(0x40, 6, 62)[..], b"\x01a"].concat()),
        COMPRESSION
    );
    assert_eq!(
        decode_alone(&[&integer(0x00, 4, 1 << 28)[..], b"\x01a"].concat()),
        COMPRESSION
    );
    assert_eq!(
        decode_alone(&integer(0x80, 7, 61)).unwrap(),
        [sent("www-authenticate", "")]
    );
    let block = [
        literal(0x40, "a", b"1"),
        integer(0x80, 7, 62),
        integer(0x80, 7, 63),
    ]
    .concat();
    assert_eq!(decode_alone(&block), COMPRESSION);
    assert_eq!(
        decode_alone(&block[..6]).unwrap(),
        [sent("a", "1"), sent("a", "1")]
    );
}

#[test]
fn long_integers_fail() {
    // 16 in a longer form than necessary, which the RFC allows within limits.
    assert_eq!(
        decode_alone(b"\x0f\x81\x80\x80\x00\x01a").unwrap(),
        [sent("accept-encoding", "a")]
    );
    assert_eq!(decode_alone(b"\x0f\x81\x80\x80\x80\x00\x01a"), COMPRESSION);
    for prefix in [
        &b"\xff"[..],
        b"\x7f",
        b"\x0f",
        b"\x3f",
        b"\x00\x7f",
        b"\x00\xff",
    ] {
        for octet in [0x80, 0xff] {
            let block = [prefix, &[octet; 20]].concat();
            assert_eq!(decode_alone(&block), COMPRESSION);
            assert_eq!(decode_alone(&[&block[..], &[0]].concat()), COMPRESSION);
        }
    }
}

#[test]
fn invalid_huffman_codes_fail() {
    let block = |string: &[u8]| {
        let mut block = b"\x00\x01a".to_vec();
        block.extend(integer(0x80, 7, string.len()));
        block.extend(string);
        block
    };
    assert_eq!(decode_alone(&block(b"")).unwrap(), [sent("a", "")]);
    // "0" is five bits 0.
    assert_eq!(decode_alone(&block(b"\x07")).unwrap(), [sent("a", "0")]);
    // Padding with a bit 0.
    assert_eq!(decode_alone(&block(b"\x06")), COMPRESSION);
    assert_eq!(decode_alone(&block(b"\x03")), COMPRESSION);
    // Padding of eight and more bits.
    for length in 1..10 {
        assert_eq!(decode_alone(&block(&vec![0xff; length])), COMPRESSION);
        assert_eq!(
            decode_alone(&block(&[&[0x07], &vec![0xff; length][..]].concat())),
            COMPRESSION
        );
    }
    // EOS with padding behind it, and between symbols.
    assert_eq!(decode_alone(&block(b"\xff\xff\xff\xff")), COMPRESSION);
    assert_eq!(
        decode_alone(&block(b"\xff\xff\xff\xfc\x00\x00\x00\x00")),
        COMPRESSION
    );
}

#[test]
fn malformed_fields_keep_the_table_right() {
    let mut decoder = Decoder::new(4096);
    let first = [
        literal(0x40, "X-Upper", b"1"),
        literal(0x40, ":unknown", b"1"),
        literal(0x40, "x-value", b"line\nbreak"),
        literal(0x40, ":method", b"a b"),
        literal(0x40, ":status", b"20"),
        literal(0x40, ":path", b"\xff"),
        literal(0x40, "", b"no name"),
        literal(0x40, "x-last", b"valid"),
    ];
    let mut valid = Vec::new();
    let result = decoder.decode(&first.concat(), |field, _| valid.push(received(&field)));
    assert_eq!(result, Err(DecodeError::Malformed));
    assert_eq!(valid, [sent("x-last", "valid")]);
    for block in &first[..7] {
        assert_eq!(decode_alone(block), MALFORMED);
    }
    // The entries have the indexes 62 (the last one) to 69. Malformed ones stay so, but their names are of use if valid.
    assert_eq!(
        decode(&mut decoder, &[0x80 + 62]).unwrap(),
        [sent("x-last", "valid")]
    );
    for index in 63..=69 {
        assert_eq!(decode(&mut decoder, &[0x80 + index]), MALFORMED);
    }
    assert_eq!(decode(&mut decoder, &[0x80 + 70]), COMPRESSION);
    let with_name_of = |index, value: &[u8]| [&integer(0, 4, index)[..], &[3], value].concat();
    assert_eq!(
        decode(&mut decoder, &with_name_of(67, b"abc")).unwrap(),
        [sent("x-value", "abc")]
    );
    assert_eq!(
        decode(&mut decoder, &with_name_of(66, b"PUT")).unwrap(),
        [sent(":method", "PUT")]
    );
    assert_eq!(
        decode(&mut decoder, &with_name_of(65, b"404")).unwrap(),
        [sent(":status", "404")]
    );
    assert_eq!(decode(&mut decoder, &with_name_of(69, b"abc")), MALFORMED);
}

#[test]
fn size_updates_have_their_place_and_bound() {
    let field = literal(0x40, "a", b"1");
    assert_eq!(decode_alone(&size_update(4097)), COMPRESSION);
    assert_eq!(
        decode_alone(&[size_update(0), size_update(4096)].concat()),
        Ok(Vec::new())
    );
    assert_eq!(
        decode_alone(&[field.clone(), size_update(0)].concat()),
        COMPRESSION
    );

    // A smaller table needs an update, the first one to at most the smallest size of the meantime.
    let reduced = || {
        let mut decoder = Decoder::new(4096);
        decode(&mut decoder, &field).unwrap();
        decoder.set_max_size(100);
        decoder.set_max_size(200);
        decoder
    };
    assert_eq!(decode(&mut reduced(), &field), COMPRESSION);
    assert_eq!(decode(&mut reduced(), &size_update(101)), COMPRESSION);
    assert_eq!(
        decode(
            &mut reduced(),
            &[size_update(100), size_update(201)].concat()
        ),
        COMPRESSION
    );
    let mut decoder = reduced();
    assert_eq!(
        decode(&mut decoder, &[size_update(100), size_update(200)].concat()),
        Ok(Vec::new())
    );
    assert_eq!(
        decode(&mut decoder, &[0x80 + 62]).unwrap(),
        [sent("a", "1")]
    );
    // A larger limit needs none.
    decoder.set_max_size(4096);
    assert_eq!(
        decode(&mut decoder, &[0x80 + 62]).unwrap(),
        [sent("a", "1")]
    );
}

#[test]
fn entries_leave_the_decoders_table() {
    let mut decoder = Decoder::new(4096);
    let value = vec![b'v'; 4096 - 32 - 1];
    let fits = literal(0x40, "a", &value);
    let too_large = literal(0x40, "ab", &value);
    for _ in 0..3 {
        decode(&mut decoder, &literal(0x40, "first", b"1")).unwrap();
        decode(&mut decoder, &fits).unwrap();
        assert_eq!(decoder.table_size(), 4096);
        assert_eq!(decode(&mut decoder, &[0x80 + 63]), COMPRESSION);
        // A field that is too large is received, and empties the table.
        assert_eq!(decode(&mut decoder, &too_large).unwrap().len(), 1);
        assert_eq!(decoder.table_size(), 0);
        assert_eq!(decode(&mut decoder, &[0x80 + 62]), COMPRESSION);
    }
    // The name comes from an entry that leaves the table for the new one (RFC 7541 section 4.4).
    decode(&mut decoder, &fits).unwrap();
    let block = [&integer(0x40, 6, 62)[..], b"\x01b", &[0x80 + 62]].concat();
    assert_eq!(
        decode(&mut decoder, &block).unwrap(),
        [sent("a", "b"), sent("a", "b")]
    );
    // 128 empty entries of one octet at most.
    let small: Vec<u8> = (0..1000).flat_map(|_| literal(0x40, "a", b"")).collect();
    decode(&mut decoder, &small).unwrap();
    assert_eq!(decoder.table_size(), 4096 / 33 * 33);
    decode(&mut decoder, &size_update(0)).unwrap();
    assert_eq!(decoder.table_size(), 0);
}

#[test]
fn a_bomb_is_counted_and_shares_its_memory() {
    let mut block = literal(0x40, "a", &[b'v'; 4000]);
    block.extend(vec![0x80 + 62; 50_000]);
    let (mut total, mut address) = (0, None);
    Decoder::new(4096)
        .decode(&block, |field, size| {
            total += size;
            let Field::Header(_, value) = field else {
                panic!()
            };
            if total > size {
                let first = address.get_or_insert(value.as_bytes().as_ptr());
                assert_eq!(*first, value.as_bytes().as_ptr());
            }
        })
        .unwrap();
    assert_eq!(total, 50_001 * 4033);
}
