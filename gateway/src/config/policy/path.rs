//! Canonical form of request paths for authorization.
//!
//! Upstreams read paths in many ways: they decode, join `//`, follow `..`, and cut at `;`. A path that an upstream may read as
//! another path has no canonical form. Authorization by path then assumes the worst case. The path that is sent to the upstream
//! is never changed.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// Returns the path as every upstream reads it, decoded once; `None` if upstreams may differ.
pub fn canonical(path: &str) -> Option<Cow<'_, str>> {
    // Some apps decode an encoded slash to a separator, and others treat it as a character.
    let is_encoded_separator = |triple: &[u8]| {
        let [b'%', high, low] = triple else {
            return false;
        };
        matches!(
            (high, low.to_ascii_lowercase()),
            (b'2', b'f') | (b'5', b'c')
        )
    };
    if path.contains('%') && path.as_bytes().windows(3).any(is_encoded_separator) {
        return None;
    }
    let text = percent_decode_str(path).decode_utf8().ok()?;
    let is_ambiguous = |c: char| c.is_control() || matches!(c, '%' | '\\' | ';' | '?' | '#');
    let mut segments = text.strip_prefix('/')?.split('/').peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        if matches!(segment, "." | "..")
            || (segment.is_empty() && !last)
            || segment.contains(is_ambiguous)
        {
            return None;
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_apps_read_alike_is_decoded() {
        for (sent, means) in [
            ("/", "/"),
            ("/metrics", "/metrics"),
            ("/logs/", "/logs/"),
            ("/%65xec/a%20b", "/exec/a b"),
            ("/a:b@c,d=e+f~g!$&'()*", "/a:b@c,d=e+f~g!$&'()*"),
            ("/%C3%A9", "/é"),
        ] {
            assert_eq!(canonical(sent).as_deref(), Some(means), "{sent}");
        }
    }

    #[test]
    fn an_ambiguous_path_is_not_normalized() {
        for sent in [
            "",
            "*",
            "metrics",
            "//exec",
            "/a//b",
            "/a/../exec",
            "/a/%2e%2e/exec",
            "/./exec",
            "/..",
            "/a%2fexec",
            "/a%2Fexec",
            "/a%5cexec",
            "/a\\exec",
            "/exec;x=1",
            "/exec%3bx",
            "/%2565xec",
            "/exec%00",
            "/exec%0a",
            "/%ff",
            "/exec%3fx",
            "/a%",
            "/a%zz",
        ] {
            assert_eq!(canonical(sent), None, "{sent}");
        }
    }
}
