//! Suggestion of the word that was meant.

/// The nearest word, if it is near enough to have been meant.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase().replace('-', "_");
    // A third of the letters: `prot` is `port`, `colour` is not `cores`.
    let enough = (word.len() / 3).max(1);
    let score = |known: &&str| {
        let begun = word.len() > 2 && known.starts_with(&word);
        if begun {
            1
        } else {
            strsim::damerau_levenshtein(&word, known)
        }
    };
    known.min_by_key(score).filter(|near| score(near) <= enough)
}
