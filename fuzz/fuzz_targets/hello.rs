//! Lines of the control stream, as either end receives them.

#![no_main]

use causeway_tunnel::control_stream::{EdgeMessage, GatewayMessage, parse};
use libfuzzer_sys::fuzz_target;
use serde_json::to_vec;

fuzz_target!(|line: &[u8]| {
    if let Ok(said) = parse::<EdgeMessage>(line) {
        let again = to_vec(&said).expect("a line can be written");
        assert_eq!(parse::<EdgeMessage>(&again).expect("it can be read"), said);
    }
    if let Ok(said) = parse::<GatewayMessage>(line) {
        let again = to_vec(&said).expect("a line can be written");
        assert_eq!(
            parse::<GatewayMessage>(&again).expect("it can be read"),
            said
        );
    }
});
