//! Links with a delay: never less than configured. How much more depends on the machine.

use crate::process::Load;
use serde_json::Value;
use std::{env, process::Command};

/// Returns the shortest time of a request, which half of them took at least, in milliseconds.
fn median(result: &Value) -> u64 {
    result["latency_us"]["p50"].as_u64().unwrap() / 1000
}

/// Two network namespaces; dropping it removes them.
struct Spaces(String, String);

impl Spaces {
    /// `None` if they cannot be made, which is an error if all requirements are mandatory.
    fn new() -> Option<Self> {
        let name = |end| format!("cwbl{}-{end}", std::process::id());
        let spaces = Self(name("a"), name("b"));
        let made = ip(&["netns", "add", &spaces.0]) && ip(&["netns", "add", &spaces.1]);
        if made {
            return Some(spaces);
        }
        let required = env::var("CAUSEWAY_TEST_REQUIRE_ALL").is_ok_and(|all| all == "1");
        assert!(!required, "needs root and ip netns");
        eprintln!("skipped: needs root and ip netns");
        None
    }
}

impl Drop for Spaces {
    fn drop(&mut self) {
        ip(&["netns", "del", &self.0]);
        ip(&["netns", "del", &self.1]);
    }
}

fn ip(arguments: &[&str]) -> bool {
    let ran = Command::new("ip").args(arguments).output();
    ran.is_ok_and(|ran| ran.status.success())
}

#[tokio::test]
async fn a_link_delays_packets_limits_its_rate_and_drops_the_excess() {
    let Some(spaces) = Spaces::new() else {
        return;
    };
    let (one, two) = (&spaces.0, &spaces.1);
    let mut link = Load::start(&format!(
        "link --between {one},{two} --addresses 10.93.0.1,10.93.0.2 --delay 20ms --rate 4MB/s --queue 20ms"
    ));
    link.event("ready").await;
    let mut app = Load::start_in(one, "app --listen 10.93.0.1:8080");
    app.event("ready").await;
    let load = "connect --listener 10.93.0.1:8080 --target any:1";
    let asked = Load::start_in(two, &format!("{load} --for 300ms"))
        .wait()
        .await;
    assert!(median(asked.last()) >= 39, "{}", asked.last());
    let moved = Load::start_in(two, &format!("{load} --download 4MB"))
        .wait()
        .await;
    assert!(
        moved.last()["seconds"].as_f64() >= Some(1.0),
        "{}",
        moved.last()
    );
    app.stop().await;
    let outcome = link.stop().await;
    let carried = outcome.last();
    assert!(
        carried["forth"]["bytes"].as_u64() >= Some(4_000_000),
        "{carried}"
    );
    // With slow start, a queue of 80 kB is too short.
    assert!(carried["forth"]["dropped"].as_u64() >= Some(1), "{carried}");
}
