//! Client of a gateway's `connect` listener, for the commands that users run on their own machines.
//!
//! A profile has the address of a listener, the CAs that the user trusts, and the source of the credential. The gateway client
//! connects with them and opens sessions to nodes by HTTP CONNECT. A relay copies a session to standard input and output, or to a
//! local socket. These modules work on every system.

pub(crate) mod credential;
pub(crate) mod events;
pub(crate) mod gateway_client;
pub(crate) mod profile;
pub(crate) mod relay;
