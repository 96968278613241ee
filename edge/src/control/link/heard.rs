//! How TLS ended a tunnel's connection.
//!
//! HTTP/2 above sees a failed read and knows no alerts, yet an alert decides how long an edge stays away: a
//! gateway that does not know its certificate is not to be asked every two seconds. With TLS 1.3 it says so
//! only after the edge's handshake is done.

use super::super::trouble::{self, Trouble};
use causeway_tunnel::{Ended, tap::Listen};
use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

/// TLS's own error, where it was the end of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Fault(Arc<Mutex<Option<rustls::Error>>>);

impl Fault {
    pub(super) fn trouble(&self, ended: &Ended) -> Trouble {
        let fault = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Trouble::ended(ended, fault.as_ref())
    }
}

impl Listen for Fault {
    fn failed(&mut self, error: &io::Error) {
        if let Some(error) = trouble::inner(error) {
            let mut fault = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *fault = Some(error.clone());
        }
    }
}
