//! The text of an error.

/// An error and its causes in one line; a cause that the words before it have said already is left out.
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
