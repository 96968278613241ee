//! Runtime pieces, no protocol of ours.
//!
//! `cache` is a bounded cache with a time to live for each entry and one fetch for all concurrent callers. `resolve`
//! turns host names into addresses.

mod cache;
mod resolve;

pub use cache::{Cache, CachedValue};
pub use resolve::resolve;
