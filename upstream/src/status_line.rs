//! Status line of an HTTP/1.1 response, adapted before hyper reads it.

/// HTTP version without the last digit of its number.
const VERSION: &[u8] = b"HTTP/1.";

/// Adapter that makes hyper read a later minor version as 1.1 (RFC 9110 section 2.5), since hyper knows only 1.0 and 1.1. If
/// an interim response (1xx) comes first, its line is adapted instead of the final response's.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatusLine {
    /// Number of bytes of [`VERSION`] that were read, or one more after the version.
    position: usize,
}

impl StatusLine {
    /// Begins another response.
    pub(crate) fn begin(&mut self) {
        self.position = 0;
    }

    /// Processes the next bytes.
    pub(crate) fn rewrite(&mut self, bytes: &mut [u8]) {
        let mut bytes = bytes.iter_mut();
        while self.position <= VERSION.len()
            && let Some(byte) = bytes.next()
        {
            match VERSION.get(self.position) {
                Some(expected) if expected == byte => self.position += 1,
                Some(_) => self.position = VERSION.len() + 1,
                None => {
                    if matches!(byte, b'2'..=b'9') {
                        *byte = b'1';
                    }
                    self.position += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_minor_versions_are_read_as_1_1_however_the_line_is_cut() {
        for (line, read) in [
            ("HTTP/1.2 200 OK\r\n", "HTTP/1.1 200 OK\r\n"),
            ("HTTP/1.9 204\r\nx: HTTP/1.2", "HTTP/1.1 204\r\nx: HTTP/1.2"),
            ("HTTP/1.0 200 OK\r\n", "HTTP/1.0 200 OK\r\n"),
            ("HTTP/2.2 200 OK\r\n", "HTTP/2.2 200 OK\r\n"),
            ("XHTTP/1.2 200 OK\r\n", "XHTTP/1.2 200 OK\r\n"),
        ] {
            for cut in 1..=line.len() {
                let (mut status, mut bytes) = (StatusLine::default(), line.as_bytes().to_vec());
                for part in bytes.chunks_mut(cut) {
                    status.rewrite(part);
                }
                assert_eq!(String::from_utf8(bytes).unwrap(), read, "{cut}");
            }
        }
    }
}
