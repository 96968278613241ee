//! One `kubectl logs` and one `kubectl exec` in each of the three setups.
//!
//! Runs in place of the whole suite when neither a filter nor `CAUSEWAY_TEST_FULL` asks for that.

use libtest_mimic::Trial;

use crate::{addresses, names, steps, world::Way};

pub(crate) fn trials() -> Vec<Trial> {
    [
        ("egress", Way::Unix),
        ("names", names::CHECKED),
        ("addresses", addresses::CHECKED),
    ]
    .into_iter()
    .map(|(name, way)| {
        let title = format!("smoke::{name}_logs_and_exec");
        steps::by(title, way, steps::logs_and_exec)
    })
    .collect()
}
