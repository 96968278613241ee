//! HTTP/2 by hand: frames that no library would write, and the reading that tests need.
//!
//! Field lists are literals without indexing and without Huffman code, so that each byte is at a position that a test
//! chooses. Of a peer's field lists only the `:status` is read, which is the first field.

use super::client::Wire;
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

/// Flag of DATA and HEADERS.
pub(crate) const END_STREAM: u8 = 1;
/// Flag of SETTINGS and PING.
pub(crate) const ACK: u8 = 1;
/// Flag of HEADERS and CONTINUATION.
pub(crate) const END_HEADERS: u8 = 4;

/// The field list of a 200 without further fields.
pub(crate) const STATUS_200: &[u8] = &[0x88];

/// A frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    /// Whether it ends its stream.
    pub(crate) fn ends(&self) -> bool {
        matches!(self.kind, DATA | HEADERS) && self.flags & END_STREAM != 0
    }

    /// The `:status` of HEADERS.
    pub(crate) fn status(&self) -> u16 {
        // The static table (RFC 7541, appendix A), or a literal whose name is in that table. A peer that was sent an empty
        // table acknowledges it in its field list first.
        let list = self.payload.strip_prefix(&[0x20]).unwrap_or(&self.payload);
        match *list {
            [index @ 0x88..=0x8e, ..] => {
                [200, 204, 206, 304, 400, 404, 500][usize::from(index) - 0x88]
            }
            [0x08 | 0x18 | 0x48..=0x4e, length, ref rest @ ..] => {
                let value = &rest[..usize::from(length & 0x7f)];
                let plain = || std::str::from_utf8(value).unwrap().parse().unwrap();
                if length & 0x80 == 0 {
                    plain()
                } else {
                    digits(value)
                }
            }
            ref other => panic!("HEADERS do not begin with a status: {other:?}"),
        }
    }
}

/// Three digits in Huffman code (RFC 7541, appendix B): 0 to 2 in five bits, the others in six.
fn digits(value: &[u8]) -> u16 {
    let bits = value
        .iter()
        .fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
    let mut left = 8 * u32::try_from(value.len()).unwrap();
    let mut number = 0;
    for _ in 0..3 {
        let five = bits >> (left - 5) & 0x1f;
        let (digit, used) = if five <= 2 {
            (five, 5)
        } else {
            ((bits >> (left - 6) & 0x3f) - 0x19 + 3, 6)
        };
        number = number * 10 + digit;
        left -= used;
    }
    u16::try_from(number).unwrap()
}

/// The bytes of a frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// SETTINGS with these values.
pub(crate) fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let pair =
        |(name, value): &(u16, u32)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(
        SETTINGS,
        0,
        0,
        &values.iter().flat_map(pair).collect::<Vec<_>>(),
    )
}

/// A field list of literals.
pub(crate) fn fields<N: AsRef<[u8]>, V: AsRef<[u8]>>(list: &[(N, V)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in list {
        block.push(0);
        for text in [name.as_ref(), value.as_ref()] {
            length(&mut block, text.len());
            block.extend_from_slice(text);
        }
    }
    block
}

/// An integer of seven bits' prefix (RFC 7541 section 5.1).
fn length(into: &mut Vec<u8>, mut number: usize) {
    if number < 0x7f {
        return into.push(number.to_le_bytes()[0]);
    }
    into.push(0x7f);
    number -= 0x7f;
    while number >= 0x80 {
        into.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    into.push(number.to_le_bytes()[0]);
}

/// The next frame.
pub(crate) async fn next(wire: &mut (impl Wire + ?Sized)) -> io::Result<Frame> {
    let mut head = [0; 9];
    wire.read_exact(&mut head).await?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; usize::try_from(length).unwrap()];
    wire.read_exact(&mut payload).await?;
    Ok(Frame {
        kind: head[3],
        flags: head[4],
        stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff,
        payload,
    })
}

/// Writes all of it.
pub(crate) async fn send(wire: &mut (impl Wire + ?Sized), bytes: &[u8]) -> io::Result<()> {
    wire.write_all(bytes).await?;
    wire.flush().await
}
