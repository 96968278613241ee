//! Descriptions of errors of an upstream's response over HTTP/1.1, or over hyper's HTTP/2.

use std::{
    error::Error,
    io::{self, ErrorKind::UnexpectedEof},
};

/// Returns a description of the upstream's error, as the end of a sentence whose subject is the upstream. `when` states the
/// time ("before it sent a response"), `limits` the limits of a response head.
pub fn describe(error: &hyper::Error, when: &str, limits: &str) -> String {
    if error.is_parse_too_large() {
        return format!("answered with {limits}");
    }
    if error.is_parse() {
        return format!("sent a response that is not HTTP: {error}");
    }
    // Many apps end without a close_notify.
    let is_truncated = find::<io::Error>(error).is_some_and(|error| error.kind() == UnexpectedEof);
    if is_truncated || error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        return format!("closed the connection {when}");
    }
    let cause = error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string);
    format!("broke the connection {when}: {cause}")
}

/// Returns an error of this type among the causes. An `io::Error` does not return its inner error as its source.
pub fn find<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    if let Some(found) = error.downcast_ref::<T>() {
        return Some(found);
    }
    if let Some(io) = error.downcast_ref::<io::Error>() {
        return find(io.get_ref()?);
    }
    find(error.source()?)
}
