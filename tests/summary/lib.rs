//! Record of skipped tests, shared by the test programs of one `cargo test`; and ports for their servers.
//!
//! libtest hides the output of a test that passes, so a skipped test appends a line to a file below cargo's target
//! directory. The test `summary` of this package runs last and prints what the file has.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

mod ports;

pub use ports::unused_port;

/// Names the file of the run, for test programs that cargo does not start itself.
const RUN: &str = "CAUSEWAY_TEST_SKIPPED";

/// File with the skipped tests of one run.
///
/// Test programs of one `cargo test` have cargo as their parent process, and its id tells the runs apart.
#[derive(Clone, Debug)]
pub struct Skipped(PathBuf);

impl Skipped {
    /// Returns the file of this run in `folder`, which is `env!("CARGO_TARGET_TMPDIR")` of the client.
    pub fn of_this_run(folder: &str) -> Self {
        let parent = std::os::unix::process::parent_id();
        let named = env::var_os(RUN).map(PathBuf::from);
        Self(named.unwrap_or_else(|| Path::new(folder).join(format!("skipped-{parent}"))))
    }

    /// Returns the variable that makes a child process use the same file.
    pub fn variable(self) -> (&'static str, PathBuf) {
        (RUN, self.0)
    }

    /// Records that `test` was skipped, why (such as "needs root"), and the command that runs it.
    pub fn add(&self, test: &str, reason: &str, command: &str) -> io::Result<()> {
        let line = format!("{test}\t{reason}\t{command}\n");
        // One write, so that lines of several processes do not mix.
        self.open()?.write_all(line.as_bytes())
    }

    /// Whether long runs and measurements are wanted. Records `test` as skipped if they are not.
    pub fn full(&self, test: &str) -> bool {
        let full = env::var_os("CAUSEWAY_TEST_FULL").is_some_and(|value| value == "1");
        if !full {
            let reason = "runs shorter, and measures nothing";
            let command = "CAUSEWAY_TEST_FULL=1 cargo test --workspace";
            self.add(test, reason, command)
                .expect("the target directory can be written to");
        }
        full
    }

    fn open(&self) -> io::Result<File> {
        if let Some(folder) = self.0.parent() {
            fs::create_dir_all(folder)?;
        }
        OpenOptions::new().create(true).append(true).open(&self.0)
    }

    /// Removes the file and returns one line for each reason. A test that was skipped twice counts once.
    pub fn take(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        let _ = fs::remove_file(&self.0);
        self.remove_old();
        summarize(&text)
    }

    /// Removes the files of runs that have ended without a summary.
    fn remove_old(&self) {
        let entries = self.0.parent().map(fs::read_dir);
        for entry in entries.into_iter().flatten().flatten().flatten() {
            let name = entry.file_name();
            let run = name.to_str().and_then(|name| name.strip_prefix("skipped-"));
            if run.is_some_and(|run| !Path::new("/proc").join(run).exists()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

fn summarize(text: &str) -> Vec<String> {
    let mut groups = BTreeMap::<(&str, &str), Vec<&str>>::new();
    for line in text.lines() {
        let mut fields = line.split('\t');
        if let (Some(test), Some(reason), Some(command)) =
            (fields.next(), fields.next(), fields.next())
        {
            let tests = groups.entry((reason, command)).or_default();
            if !tests.contains(&test) {
                tests.push(test);
            }
        }
    }
    let groups = groups.iter();
    groups
        .map(|((reason, command), tests)| match tests[..] {
            [only] => format!("skipped: {only}: {reason}: {command}"),
            _ => format!("skipped: {} tests: {reason}: {command}", tests.len()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_line_for_each_reason_and_each_test_counts_once() {
        let text = "a\tneeds root\tsudo it\nb\tneeds root\tsudo it\na\tneeds root\tsudo it\nc\tneeds curl\tget it\n";
        let expected = [
            "skipped: c: needs curl: get it",
            "skipped: 2 tests: needs root: sudo it",
        ];
        assert_eq!(super::summarize(text), expected);
    }
}
