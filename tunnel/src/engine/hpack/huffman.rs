//! Decoder of the Huffman code of RFC 7541, appendix B.
//!
//! The code is canonical: codes of the same length are consecutive numbers in the order of their symbols. Therefore the
//! lengths alone define the code, and the compiler computes all tables from them.

use super::error::DecodeError;

/// Length in bits of each symbol's code. Symbol 256 is EOS (end of string).
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, //
    28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, //
    10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, //
    15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, //
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5, //
    6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, //
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, //
    23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, //
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, //
    23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, //
    26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, //
    28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, //
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

/// Length in bits of the longest code, that of EOS.
const LONGEST: usize = 30;

/// Length in bits of the shortest code, and of the longest code that `Tables::short` resolves. The code has no lengths
/// between `SHORT` and 10 bits.
const SHORTEST: usize = 5;
const SHORT: usize = 8;

struct Tables {
    /// Symbol and length of the code that begins with these eight bits. The length is 0 if the code is longer.
    short: [(u8, u8); 1 << SHORT],
    /// For each length: the lowest number that is above all codes of this and smaller lengths, as the upper 32 bits of an
    /// input that begins with it.
    limit: [u64; LONGEST + 1],
    /// For each length: the first code, and the position of its symbol in `symbols`.
    first: [(u32, u32); LONGEST + 1],
    /// All symbols but EOS in the order of their codes. EOS has the last code.
    symbols: [u8; 256],
}

static TABLES: Tables = build_tables();

#[expect(
    clippy::cast_possible_truncation,
    reason = "symbols below 256; `TryFrom` is not const"
)]
const fn build_tables() -> Tables {
    let mut tables = Tables {
        short: [(0, 0); 1 << SHORT],
        limit: [0; LONGEST + 1],
        first: [(0, 0); LONGEST + 1],
        symbols: [0; 256],
    };
    let (mut code, mut position) = (0_u32, 0_u32);
    let mut length = SHORTEST;
    while length <= LONGEST {
        tables.first[length] = (code, position);
        let mut symbol = 0;
        while symbol < 257 {
            if LENGTHS[symbol] as usize == length {
                if symbol < 256 {
                    tables.symbols[position as usize] = symbol as u8;
                }
                if length <= SHORT {
                    let start = (code as usize) << (SHORT - length);
                    let mut suffix = 0;
                    while suffix < 1 << (SHORT - length) {
                        tables.short[start + suffix] = (symbol as u8, length as u8);
                        suffix += 1;
                    }
                }
                code += 1;
                position += 1;
            }
            symbol += 1;
        }
        tables.limit[length] = (code as u64) << (32 - length);
        code <<= 1;
        length += 1;
    }
    tables
}

/// Decodes `input` into the start of `output`, which grows as necessary, and returns the number of octets. Fails on a code
/// of EOS and on padding that is longer than seven bits or is not a prefix of EOS (RFC 7541 section 5.2).
pub(super) fn decode(input: &[u8], output: &mut Vec<u8>) -> Result<usize, DecodeError> {
    let longest_output = input.len() * 8 / SHORTEST;
    if output.len() < longest_output {
        output.resize(longest_output, 0);
    }
    let output_length = output.len();
    let mut octets = output.iter_mut();
    let mut reader = BitReader {
        rest: input,
        bits: 0,
        available: 0,
    };
    loop {
        reader.refill();
        // Nearly all symbols have short codes. Eight bits are enough for them without another look at the end of the input.
        while reader.available >= SHORT {
            let (symbol, length) = reader.short_code();
            if length == 0 {
                break;
            }
            *octets.next().ok_or(DecodeError::Compression)? = symbol;
            reader.consume(length);
        }
        reader.refill();
        let (symbol, length) = match reader.short_code() {
            (_, 0) => long_code(reader.bits),
            (symbol, length) => (Some(symbol), length),
        };
        if length > reader.available {
            let is_padding = reader.available < 8 && reader.bits == u64::MAX;
            return if is_padding {
                Ok(output_length - octets.len())
            } else {
                Err(DecodeError::Compression)
            };
        }
        *octets.next().ok_or(DecodeError::Compression)? = symbol.ok_or(DecodeError::Compression)?;
        reader.consume(length);
    }
}

struct BitReader<'a> {
    rest: &'a [u8],
    /// Next bits of the input, from the highest bit down. The bits below them are 0, after the end of the input 1.
    bits: u64,
    /// Number of bits of the input in `bits`.
    available: usize,
}

impl BitReader<'_> {
    /// Makes at least 32 bits available, or all that are left.
    fn refill(&mut self) {
        if self.available >= 32 {
            return;
        }
        if let Some((chunk, rest)) = self.rest.split_first_chunk() {
            self.bits |= u64::from(u32::from_be_bytes(*chunk)) << (32 - self.available);
            self.available += 32;
            self.rest = rest;
            return;
        }
        while let [octet, rest @ ..] = self.rest {
            self.bits |= u64::from(*octet) << (56 - self.available);
            self.available += 8;
            self.rest = rest;
        }
        // Padding looks like the start of EOS, whose bits are all 1.
        self.bits |= u64::MAX >> self.available;
    }

    /// Symbol and length of the next code. The length is 0 if it is longer than eight bits.
    fn short_code(&self) -> (u8, usize) {
        let (symbol, length) = TABLES.short[(self.bits >> (64 - SHORT)) as usize];
        (symbol, usize::from(length))
    }

    fn consume(&mut self, length: usize) {
        self.bits <<= length;
        self.available -= length;
    }
}

/// Finds a code of more than eight bits. The symbol is `None` for EOS.
#[cold]
fn long_code(bits: u64) -> (Option<u8>, usize) {
    let upper = bits >> 32;
    let mut length = SHORT + 1;
    while length < LONGEST && upper >= TABLES.limit[length] {
        length += 1;
    }
    let (first_code, first_position) = TABLES.first[length];
    let code = (upper >> (32 - length)) as usize;
    let position = code - first_code as usize + first_position as usize;
    (TABLES.symbols.get(position).copied(), length)
}
