//! Standard output and standard error of the commands.
//!
//! `println!` panics if the reader of a pipe has closed it or a device is full. The macros here do not: [`outln!`] returns an
//! error if standard output cannot be written, and [`errln!`] ignores errors of standard error.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

use anyhow::Context;

/// Writes a line to standard output; see [`write()`].
macro_rules! outln {
    ($($format:tt)*) => {
        $crate::output::write(format_args!("{}\n", format_args!($($format)*)))
    };
}

/// Writes a line to standard error, and ignores errors.
macro_rules! errln {
    ($($format:tt)*) => {
        $crate::output::error_line(format_args!($($format)*))
    };
}

pub(crate) use {errln, outln};

/// Writes a text to standard output.
///
/// A reader that has closed the pipe is no error, as with `| head -1`. The reader needs no more, and the command completes
/// the rest of its work. A full device is an error.
pub(crate) fn write(text: Arguments<'_>) -> anyhow::Result<()> {
    ignore_broken_pipe(write_to(&mut io::stdout().lock(), text))
        .context("cannot write to standard output")
}

/// Treats a closed pipe as a successful write to standard output.
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

/// Writes the text in one piece, and flushes it. A failure of a later flush at the end of the process would go unnoticed.
fn write_to(out: &mut impl Write, text: Arguments<'_>) -> io::Result<()> {
    out.write_all(text.to_string().as_bytes())?;
    out.flush()
}
