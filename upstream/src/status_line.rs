//! Status line of an HTTP/1.1 answer, adapted before hyper reads it.

/// Version that is spoken, up to its last digit.
const VERSION: &[u8] = b"HTTP/1.";

/// Adapter that makes hyper read a later minor version as 1.1 (RFC 9110 section 2.5), since hyper knows 1.0 and 1.1 only. An
/// interim answer (1xx) is inspected in place of the answer behind it.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatusLine {
    /// Bytes of [`VERSION`] that were read; one more behind the line.
    position: usize,
}

impl StatusLine {
    /// Begins another answer.
    pub(crate) fn begin(&mut self) {
        self.position = 0;
    }

    /// Takes the next bytes.
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
