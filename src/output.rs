//! Output of the commands: standard output, standard error, private files, and the text of errors.
//!
//! `println!` panics if the reader of a pipe has closed it or a device is full. The macros here do not: [`outln!`] returns an
//! error if standard output cannot be written, and [`errln!`] ignores errors of standard error.

use anyhow::Context;
use std::{
    fmt::Arguments,
    io::{self, ErrorKind, Write},
    path::Path,
};

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

/// Replaces a file with a new private file (0600; on Windows the file inherits the access list of its directory). The new file is
/// written beside the old one, synced to the disk and renamed.
pub(crate) fn write_private_file(path: &Path, text: &str) -> anyhow::Result<()> {
    let write_and_rename = || {
        let directory = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        anyhow::Ok(())
    };
    write_and_rename().with_context(|| format!("cannot write {}", path.display()))
}

/// Returns an error and its causes in one line. Omits a cause whose text is already part of the line.
pub(crate) fn explain(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .fold(error.to_string(), |text, cause| {
            let cause = cause.to_string();
            if text.contains(&cause) {
                text
            } else {
                format!("{text}: {cause}")
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let full = io::Error::other("no space left");
        let error = anyhow::Error::new(full).context("cannot write x: no space left");
        let error = Err::<(), _>(error).context("cannot join").unwrap_err();
        assert_eq!(
            explain(&error),
            "cannot join: cannot write x: no space left"
        );
    }
}
