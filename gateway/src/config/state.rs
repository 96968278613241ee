//! Configuration section `state`: the engine that stores the durable state of several gateways.

use std::path::PathBuf;

use causeway_config::ConfigErrors;
use http::Uri;
use serde::{Deserialize, Serialize};

use super::{Certificate, jwt::is_loopback};

/// Engine that stores the durable state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct State {
    /// The etcd cluster that stores the state.
    // Boxed: most configurations have no such section, and all of them would be larger.
    pub etcd: Option<Box<Etcd>>,
}

/// An etcd cluster, version 3.4 or later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Etcd {
    /// URLs of its members, such as `https://etcd-1.example:2379`; `http://` on loopback only. If a member does not answer, the gateway uses the next one.
    pub endpoints: Vec<String>,
    /// Prefix of the keys. Gateways with the same prefix share their state.
    pub prefix: String,
    /// PEM file of the CAs that may sign the members' certificates. Without this key: those of the system.
    pub ca: Option<PathBuf>,
    /// Certificate that the gateway presents to etcd.
    pub certificate: Option<Certificate>,
    /// User of etcd, who needs the permission `readwrite` for the prefix. Without this key: no authentication by password. etcd does not accept the common name of `certificate` as the user.
    pub user: Option<String>,
    /// File of the user's password, in one line.
    pub password_file: Option<PathBuf>,
}

impl Default for Etcd {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            prefix: "/causeway/".to_owned(),
            ca: None,
            certificate: None,
            user: None,
            password_file: None,
        }
    }
}

impl Etcd {
    /// Returns the files that the section names, by key.
    fn named_files(&self) -> impl Iterator<Item = (&'static str, &PathBuf)> {
        let certificate = self.certificate.as_ref();
        let files = [
            ("ca", self.ca.as_ref()),
            ("certificate.chain", certificate.map(|files| &files.chain)),
            ("certificate.key", certificate.map(|files| &files.key)),
            ("password_file", self.password_file.as_ref()),
        ];
        files
            .into_iter()
            .filter_map(|(key, file)| Some((key, file?)))
    }

    fn validate(&self, faults: &mut ConfigErrors) {
        if self.endpoints.is_empty() {
            let message =
                "is empty; list the URLs of the members, such as https://etcd-1.example:2379";
            faults.add("state.etcd.endpoints", message);
        }
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            if let Err(message) = check_endpoint(endpoint) {
                faults.add(format!("state.etcd.endpoints[{index}]"), message);
            }
        }
        if !self.prefix.starts_with('/') {
            let message = format!(
                "\"{}\" does not begin with a slash; write a prefix such as /causeway/",
                self.prefix
            );
            faults.add("state.etcd.prefix", message);
        }
        let password_file = self.password_file.is_some();
        match self.user.as_deref() {
            Some("") => faults.add("state.etcd.user", "is empty; name a user of etcd"),
            Some(_) if !password_file => {
                let message = "needs \"password_file\", the file of the user's password";
                faults.add("state.etcd.user", message);
            }
            None if password_file => {
                let message = "needs \"user\", the user who has this password";
                faults.add("state.etcd.password_file", message);
            }
            _ => {}
        }
    }
}

/// Returns an error unless the text is the URL of a member of etcd.
fn check_endpoint(text: &str) -> Result<(), String> {
    // The message omits the text because it may contain a password.
    if text.contains('@') {
        return Err("must not contain a user or a password; set user and password_file".to_owned());
    }
    let invalid = |why: &str| Err(format!("\"{text}\" {why}; write https://HOST:PORT"));
    let Ok(url) = text.parse::<Uri>() else {
        return invalid("is not a valid URL");
    };
    let Some(host) = url.host().filter(|host| !host.is_empty()) else {
        return invalid("contains no host");
    };
    if !matches!(url.path(), "" | "/") || url.query().is_some() {
        return invalid("has a path");
    }
    match url.scheme_str() {
        Some("https") => Ok(()),
        Some("http") if is_loopback(host) => Ok(()),
        Some("http") => {
            invalid("would send the private key of the CA over the network without encryption")
        }
        _ => invalid("has neither https:// nor http://"),
    }
}

impl State {
    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let etcd = self.etcd.iter().flat_map(|etcd| etcd.named_files());
        etcd.map(|(_, file)| file)
    }

    /// Checks these keys. `has_secret` is whether a Secret of the cluster stores the state.
    pub(super) fn validate(&self, has_secret: bool, faults: &mut ConfigErrors) {
        let Some(etcd) = &self.etcd else {
            let message = "names no engine; add the section \"etcd\", or remove this key";
            faults.add("state", message);
            return;
        };
        etcd.validate(faults);
        if has_secret {
            let message = "stores the state in etcd, but kubernetes.state stores it in a Secret; keep one of the two";
            faults.add_against("state.etcd", "kubernetes.state", message);
        }
    }

    pub(super) fn validate_files(&self, faults: &mut ConfigErrors) {
        for (key, file) in self.etcd.iter().flat_map(|etcd| etcd.named_files()) {
            faults.check_file(format!("state.etcd.{key}"), file);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::{Value, json};
    use std::path::PathBuf;

    fn config(etcd: &Value) -> Config {
        serde_json::from_value(json!({ "state": { "etcd": etcd } })).unwrap()
    }

    fn faults(config: &Config) -> String {
        let text: Vec<_> = config.validate().iter().map(ToString::to_string).collect();
        text.join("\n")
    }

    #[test]
    fn faults_of_the_etcd_section_say_what_to_write() {
        let valid = json!({ "endpoints": ["https://e1:2379", "http://127.0.0.1:2379/"] });
        assert_eq!(faults(&config(&valid)), "");
        for (change, part) in [
            (json!({ "endpoints": [] }), "list the URLs"),
            (json!({ "endpoints": ["e1:2379"] }), "https://HOST:PORT"),
            (json!({ "endpoints": ["ftp://e1"] }), "neither https"),
            (json!({ "endpoints": ["https://e1/v3"] }), "has a path"),
            (json!({ "endpoints": ["http://e1"] }), "without encryption"),
            (
                json!({ "endpoints": ["https://a:secret@e1"] }),
                "set user and password_file",
            ),
            (json!({ "prefix": "causeway" }), "begin with a slash"),
            (json!({ "user": "ann" }), "needs \"password_file\""),
            (json!({ "user": "", "password_file": "p" }), "is empty"),
            (json!({ "password_file": "p" }), "needs \"user\""),
        ] {
            let mut wrong = valid.clone();
            let map = wrong.as_object_mut().unwrap();
            map.extend(change.as_object().unwrap().clone());
            let text = faults(&config(&wrong));
            assert!(text.contains(part), "{change}: {text}");
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn one_engine_stores_the_state() {
        let none: Config = serde_json::from_value(json!({ "state": {} })).unwrap();
        assert!(faults(&none).contains("names no engine"));
        let both = json!({
            "state": { "etcd": { "endpoints": ["https://e1:2379"] } },
            "kubernetes": { "state": "causeway/state" },
        });
        let both: Config = serde_json::from_value(both).unwrap();
        assert!(faults(&both).contains("keep one of the two"));
    }

    #[test]
    fn files_of_the_section_are_files_of_the_configuration() {
        let section = json!({
            "endpoints": ["https://e1:2379"], "ca": "/ca", "user": "ann", "password_file": "/p",
            "certificate": { "chain": "/c", "key": "/k" },
        });
        let files = ["/ca", "/c", "/k", "/p"].map(PathBuf::from);
        assert_eq!(config(&section).files(), files);
        let faults = config(&section).validate_files();
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
        let keys = [
            "ca",
            "certificate.chain",
            "certificate.key",
            "password_file",
        ];
        assert_eq!(paths, keys.map(|key| format!("state.etcd.{key}")));
    }
}
