//! Report on standard output: one JSON object per line, written at once.

use serde_json::Value;
use std::{
    io::{self, Write},
    time::{SystemTime, UNIX_EPOCH},
};

/// Says one line. A reader that is gone is the end of this process's input too, which ends it.
pub(crate) fn say(line: &Value) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Now, in milliseconds of the Unix epoch: to be held against what other processes say.
pub(crate) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| rounded(since.as_secs_f64() * 1e3, 1))
}

/// A figure with this many digits behind the point.
pub(crate) fn rounded(figure: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (figure * scale).round() / scale
}
