//! Prints which tests of this run were skipped, and how to run them.

use test_summary::Skipped;

fn main() {
    for line in Skipped::of_this_run(env!("CARGO_TARGET_TMPDIR")).take() {
        println!("{line}");
    }
}
