//! Requests to the API server as an administrator, by curl: kubectl takes too much of a processor for many requests a second.

use std::fmt::Write;

use serde_json::{Deserializer, Value};

use crate::world::{
    cluster::Cluster,
    net::CLOUD,
    process::{Program, ToolOutput},
};

/// Access to the API server.
#[derive(Clone)]
pub(crate) struct Api {
    access: String,
}

impl Api {
    pub(crate) fn new(cluster: &Cluster) -> Self {
        let path = |name| cluster.pki.path(name);
        Self {
            access: format!(
                "cacert = {}\ncert = {}\nkey = {}\nmax-time = 10\nsilent\nshow-error\n",
                path("ca.pem"),
                path("admin.pem"),
                path("admin.key"),
            ),
        }
    }

    /// Returns the objects at these paths, or `None` if the API server does not answer.
    pub(crate) fn lists<const N: usize>(&self, paths: [&str; N]) -> Option<[Value; N]> {
        let mut config = String::new();
        for path in paths {
            self.begin(&mut config, path);
        }
        let ran = ask(&config);
        let read = Deserializer::from_slice(&ran.stdout).into_iter();
        let read: Vec<Value> = read.map_while(Result::ok).collect();
        read.try_into().ok()
    }

    /// Patches the objects at these paths, over one connection.
    pub(crate) fn patch(&self, kind: &str, patches: &[(String, Value)]) {
        let mut config = String::new();
        for (path, patch) in patches {
            self.begin(&mut config, path);
            let data = Value::String(patch.to_string());
            write!(
                config,
                "request = PATCH\nheader = \"Content-Type: application/{kind}-patch+json\"\n\
                 data = {data}\noutput = /dev/null\n"
            )
            .unwrap();
        }
        ask(&config);
    }

    fn begin(&self, config: &mut String, path: &str) {
        let next = if config.is_empty() { "" } else { "next\n" };
        let access = &self.access;
        writeln!(config, "{next}{access}url = \"https://{CLOUD}:6443{path}\"").unwrap();
    }
}

fn ask(config: &str) -> ToolOutput {
    Program::new("curl").words("-q -K -").input(config).run()
}
