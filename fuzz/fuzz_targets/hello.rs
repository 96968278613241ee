//! Lines of the control stream, as either end receives them.

#![no_main]

use causeway_tunnel::control_stream::{EdgeMessage, GatewayMessage, parse_message};
use libfuzzer_sys::fuzz_target;
use serde_json::to_vec;

fuzz_target!(|line: &[u8]| {
    if let Ok(message) = parse_message::<EdgeMessage>(line) {
        let again = to_vec(&message).expect("a line can be written");
        assert_eq!(
            parse_message::<EdgeMessage>(&again).expect("it can be read"),
            message
        );
    }
    if let Ok(message) = parse_message::<GatewayMessage>(line) {
        let again = to_vec(&message).expect("a line can be written");
        assert_eq!(
            parse_message::<GatewayMessage>(&again).expect("it can be read"),
            message
        );
    }
});
