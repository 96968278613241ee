//! Suggestion of the word that a user may have meant.

/// Returns the nearest word, if it is near enough.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = word.to_lowercase().replace('-', "_");
    // A third of the letters: `prot` is `port`, `colour` is not `cores`.
    let max_distance = (word.len() / 3).max(1);
    let distance = |known: &&str| {
        let is_prefix = word.len() > 2 && known.starts_with(&word);
        if is_prefix {
            1
        } else {
            strsim::damerau_levenshtein(&word, known)
        }
    };
    candidates
        .min_by_key(distance)
        .filter(|near| distance(near) <= max_distance)
}
