//! Report on standard output: one JSON object per line, written at once.

use serde_json::Value;
use std::{
    io::{self, Write},
    time::{SystemTime, UNIX_EPOCH},
};

/// Prints one line. If the reader is gone, this process's input ends too, which ends the process.
pub(crate) fn say(line: &Value) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The present time, in milliseconds since the Unix epoch, for comparison with other processes.
pub(crate) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| rounded(since.as_secs_f64() * 1e3, 1))
}

/// Rounds a figure to this many digits after the point.
pub(crate) fn rounded(figure: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (figure * scale).round() / scale
}
