//! The text of an error.

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
