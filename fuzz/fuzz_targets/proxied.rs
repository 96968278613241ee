//! A PROXY v2 header, and the bytes after it, through the parser of listeners.

#![no_main]

use causeway_gateway::proxy_protocol;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut left = bytes;
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("a runtime without drivers needs nothing");
    let Ok(message) = runtime.block_on(proxy_protocol::read(&mut left)) else {
        return;
    };
    let told = usize::from(u16::from_be_bytes([bytes[14], bytes[15]]));
    assert_eq!(
        bytes.len() - left.len(),
        16 + told,
        "nothing behind it is read"
    );
    if let Some(message) = message {
        assert_eq!(message.source.is_ipv4(), message.destination.is_ipv4());
    }
});
