//! A node port to which the gateway itself speaks TLS, in place of the node's edge.
//!
//! So the key that the app gives much power to, such as a kubelet's client, lies in the cloud alone. The edge passes
//! bytes: its port has the scheme `tcp`. Never silently unverified: `ca`, or `pin: true`, or `verify: false`.

use std::path::PathBuf;

use causeway_config::Faults;
use serde::{Deserialize, Serialize};

/// How to speak TLS to a port of every node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct App {
    /// PEM file of the CAs that may have signed the app's certificate, which must name the node, or an address that is confirmed to be the node's.
    pub ca: Option<PathBuf>,
    /// PEM file of the client certificate shown to the app.
    pub certificate: Option<PathBuf>,
    /// PEM file of its key.
    pub key: Option<PathBuf>,
    /// Whether the app is known by the key that it has when it is first met: that is noted for each node in the data directory, and from then on no other is believed. Names and validity of its certificate, and who has signed it, do not count. `causeway edge pins` lists these keys, `causeway edge unpin` forgets one.
    pub pin: bool,
    /// Whether the app's certificate is verified. `false` accepts any.
    pub verify: bool,
}

impl Default for App {
    fn default() -> Self {
        Self {
            ca: None,
            certificate: None,
            key: None,
            // Who is between the gateway and an app when that is first met is believed for good.
            pin: false,
            // Never silently unverified.
            verify: true,
        }
    }
}

impl App {
    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let files = [&self.ca, &self.certificate, &self.key];
        files.into_iter().flatten()
    }

    /// Adds what is wrong with the app of this port.
    pub(super) fn validate(&self, port: u16, faults: &mut Faults) {
        let path = format!("apps.{port}");
        if port == 0 {
            let why = "0 is no node port; ports run from 1 to 65535";
            faults.add(path.as_str(), why);
        }
        match (&self.ca, self.pin, self.verify) {
            (None, false, true) => faults.add(
                path.as_str(),
                "needs \"ca\", the file of the CA that signed the app's certificates; to believe the key that it has \
                 when it is first met say pin: true, to accept any certificate verify: false",
            ),
            (Some(_), _, false) => faults.add(
                format!("{path}.verify"),
                "false accepts any certificate, yet \"ca\" names who signs; remove one of them",
            ),
            (Some(_), true, true) => faults.add(
                format!("{path}.pin"),
                "true goes by the app's key alone, yet \"ca\" names who signs; remove one of them",
            ),
            (None, true, false) => faults.add(
                format!("{path}.verify"),
                "false accepts any certificate, yet \"pin\" wants the one key; remove one of them",
            ),
            _ => {}
        }
        match (&self.certificate, &self.key) {
            (Some(_), None) => faults.add(
                format!("{path}.certificate"),
                "needs \"key\", the file of its key",
            ),
            (None, Some(_)) => faults.add(
                format!("{path}.key"),
                "needs \"certificate\", the file of its certificate",
            ),
            _ => {}
        }
        let files = [
            ("ca", &self.ca),
            ("certificate", &self.certificate),
            ("key", &self.key),
        ];
        for (key, file) in files {
            if let Some(file) = file {
                faults.file(format!("{path}.{key}"), file);
            }
        }
    }
}
