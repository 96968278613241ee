//! Frames as the tunnel's HTTP/2 engine parses them. What it writes again means the same to h2, which agrees about what is an
//! error.

#![no_main]

use causeway_fuzz::http2::H2Reader;
use causeway_tunnel::engine::fuzzing::rewrite_frame;
use libfuzzer_sys::fuzz_target;

/// Length of a frame's head.
const HEAD: usize = 9;
/// Largest payload that h2 accepts here.
const MAX_PAYLOAD: usize = 1 << 14;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;

/// Whether the frame has an error that the engine finds elsewhere than in the frame's parser: its stream, or an increment of 0.
fn has_other_error(frame: &[u8]) -> bool {
    let (kind, flags) = (frame[3], frame[4]);
    let number = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
    let has_stream = frame[5] & 0x7f != 0 || number(&frame[6..9]);
    match kind {
        SETTINGS => has_stream || flags & ACK != 0,
        GOAWAY => has_stream,
        RST_STREAM | HEADERS => !has_stream,
        WINDOW_UPDATE => frame.len() == HEAD + 4 && frame[9] & 0x7f == 0 && !number(&frame[10..]),
        _ => true,
    }
}

/// Returns the fields of a frame as h2 reads them, as text, or `None` for an error.
fn meaning(frame: &[u8]) -> Option<String> {
    use h2::frame::Frame;
    let read = H2Reader::default().read(frame)?;
    Some(match read.ok()? {
        Frame::Headers(headers) => {
            let end = (headers.stream_id(), headers.is_end_stream());
            format!("{end:?} {:?}", headers.into_parts())
        }
        Frame::Settings(settings) => format!("{settings:?}"),
        other => format!("{other:?}"),
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Some((length, written)) = rewrite_frame(bytes) else {
        return;
    };
    let frame = &bytes[..length];
    if length > HEAD + MAX_PAYLOAD {
        return;
    }
    let Ok(written) = written else {
        assert!(
            has_other_error(frame) || meaning(frame).is_none(),
            "h2 accepts {frame:?}"
        );
        return;
    };
    let again = rewrite_frame(&written);
    assert_eq!(again, Some((written.len(), Ok(written.clone()))));
    if has_other_error(frame) {
        // The frame is written as it is, apart from reserved bits and padding.
        assert_eq!(written[3], frame[3]);
    } else if frame[3] == HEADERS {
        // h2 also waits for the rest of the block, decodes it, and checks the priority, which the engine ignores.
        if let Some(meaning_of_frame) = meaning(frame) {
            assert_eq!(Some(meaning_of_frame), meaning(&written));
        }
    } else {
        let meaning = |frame| meaning(frame).expect("h2 accepts the frame");
        assert_eq!(meaning(frame), meaning(&written));
    }
});
