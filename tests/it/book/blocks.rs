//! Blocks of code of the documentation.

use std::{fs, path::Path};

/// The repository.
pub(super) const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A block of code of a page.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// The line of its first command.
    pub(super) line: usize,
    pub(super) language: String,
    pub(super) text: String,
}

impl Block {
    /// Whether a reader types it into a shell.
    pub(super) fn is_commands(&self) -> bool {
        ["sh", "bash", "shell", "console"].contains(&self.language.as_str())
    }
}

/// Returns the blocks of a page in their order, without their indentation.
pub(super) fn blocks(page: &str) -> Vec<Block> {
    let text = fs::read_to_string(Path::new(ROOT).join(page)).unwrap();
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let indent = line.len() - line.trim_start().len();
        let inside = lines.by_ref().map(|(_, line)| line);
        let inside = inside.take_while(|line| line.trim_start() != "```");
        let mut text = String::new();
        for line in inside {
            text.push_str(line.get(indent..).unwrap_or_default());
            text.push('\n');
        }
        found.push(Block {
            line: number + 2,
            language: language.trim().to_owned(),
            text,
        });
    }
    found
}
