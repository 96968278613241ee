//! Configuration: text, then a tree with positions, then the configuration of a gateway or an edge, with all its faults.

#![no_main]

use causeway_config::Validate;
use libfuzzer_sys::fuzz_target;

// The binary has no library: its reader is compiled in here.
#[allow(dead_code, reason = "the binary uses more of it")]
#[path = "../../src/operator/config_loader/path.rs"]
mod path;
#[allow(dead_code, reason = "the binary uses more of it")]
#[path = "../../src/operator/config_loader/yaml.rs"]
mod yaml;

fuzz_target!(|text: &str| {
    let document = yaml::parse(text);
    // For YAML a lone CR ends a line as well.
    let lines = text.split(['\n', '\r']).count() + 1;
    for spots in document.positions.values() {
        assert!(
            spots.key.line <= lines && spots.value.line <= lines,
            "{spots:?}"
        );
    }
    if let Ok(config) = serde_json::from_value::<causeway_gateway::Config>(document.value.clone()) {
        let _ = (config.validate(), format!("{config:?}"));
    }
    if let Ok(config) = serde_json::from_value::<causeway_edge::Config>(document.value) {
        let _ = (config.validate(), format!("{config:?}"));
    }
});
