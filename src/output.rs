//! Standard output and standard error of the commands.
//!
//! `println!` panics if the reader of a pipe has gone or a device is full. The macros here do not: [`outln!`] returns
//! an error if standard output takes nothing, and [`errln!`] ignores that of standard error.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

use anyhow::Context;

/// Writes a line to standard output; see [`write()`].
macro_rules! outln {
    ($($format:tt)*) => {
        $crate::output::write(format_args!("{}\n", format_args!($($format)*)))
    };
}

/// Writes a line to standard error, if it takes one.
macro_rules! errln {
    ($($format:tt)*) => {
        $crate::output::error_line(format_args!($($format)*))
    };
}

pub(crate) use {errln, outln};

/// Writes a text to standard output.
///
/// A reader that has gone is no failure: as with `| head -1`, it has what it wanted, and the command does the rest of
/// its work. A device that is full is one.
pub(crate) fn write(text: Arguments<'_>) -> anyhow::Result<()> {
    ignore_broken_pipe(write_to(&mut io::stdout().lock(), text))
        .context("cannot write to standard output")
}

/// Judges the outcome of a write to standard output.
pub(crate) fn ignore_broken_pipe(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome,
    }
}

pub(crate) fn error_line(text: Arguments<'_>) {
    // There is no other place to report to.
    let _ = write_to(&mut io::stderr().lock(), format_args!("{text}\n"));
}

/// Writes the text in one piece, and flushes it: at the end of the process a failure would stay unnoticed.
fn write_to(out: &mut impl Write, text: Arguments<'_>) -> io::Result<()> {
    out.write_all(text.to_string().as_bytes())?;
    out.flush()
}
