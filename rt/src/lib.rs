//! Runtime pieces, no protocol of ours.
//!
//! `cache` is a bounded cache with a time to live for each entry and one fetch for all concurrent callers. `resolve`
//! turns host names into addresses. `exposition` writes metrics as text, with those of the process.

mod cache;
mod exposition;
mod process;
mod resolve;

pub use cache::{Cache, CachedValue};
pub use exposition::Exposition;
pub use process::count_dropped_log_lines;
pub use resolve::resolve;
