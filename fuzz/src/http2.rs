//! Whole HTTP/2 conversations with the tunnel's engine: the input says what the peer writes and what the engine's user does.

mod checker;
mod conversation;
mod frame;
mod h2_reader;
mod input;
mod peer;
mod transport;
mod user;

pub use checker::Role;
pub use conversation::run;
pub use h2_reader::H2Reader;
pub use input::Input;
