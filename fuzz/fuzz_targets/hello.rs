//! Lines of the control stream, as either end hears them.

#![no_main]

use causeway_tunnel::hello::{ToEdge, ToGateway, parse};
use libfuzzer_sys::fuzz_target;
use serde_json::to_vec;

fuzz_target!(|line: &[u8]| {
    if let Ok(said) = parse::<ToGateway>(line) {
        let again = to_vec(&said).expect("a line can be written");
        assert_eq!(parse::<ToGateway>(&again).expect("it can be read"), said);
    }
    if let Ok(said) = parse::<ToEdge>(line) {
        let again = to_vec(&said).expect("a line can be written");
        assert_eq!(parse::<ToEdge>(&again).expect("it can be read"), said);
    }
});
