//! Checks of an edge's configuration that no type can express.
//!
//! Each check adds its errors to one list, so a user sees all errors at once. TLS to an upstream is never silently
//! unverified: `https` requires a CA or `verify: false`. A missing gateway is not an error here, because the data directory
//! may contain one.

use std::net::IpAddr;

use causeway_certs::{NodeName, SignerProfile};
use causeway_config::{ConfigError, ConfigErrors, Secret, Validate, host_port};
use causeway_tunnel::{load::BULK_SPAN, target::is_service_name, wire::MAX_TUNNELS_PER_EDGE};
use http::uri::PathAndQuery;

use super::{
    Allow, Config, HealthCheck, MAX_HEALTH_CHECKS, MIN_HEALTH_INTERVAL, Port, Protocol, Service,
};

impl Validate for Config {
    fn validate(&self) -> Vec<ConfigError> {
        let mut errors = ConfigErrors::default();
        for (index, text) in self.gateways.iter().enumerate() {
            if let Err(message) = host_port(text) {
                errors.add(format!("gateways[{index}]"), message);
            }
        }
        if let Some(node) = &self.node
            && let Err(error) = NodeName::parse(node)
        {
            errors.add("node", error.to_string());
        }
        if self.join.is_some() && self.join_file.is_some() {
            errors.add(
                "join_file",
                "join already contains a token; keep one of the two keys",
            );
        }
        let token = [
            ("join", self.join.is_some()),
            ("join_file", self.join_file.is_some()),
        ];
        for (key, is_set) in token {
            if is_set && self.identity.is_some() {
                errors.add(
                    key,
                    "identity already configures this node's certificate; keep one of the two keys",
                );
            }
        }
        self.validate_kubernetes(&mut errors);
        if let Some(proxy) = &self.proxy
            && let Err(message) = proxy_address(proxy)
        {
            errors.add("proxy", message);
        }
        self.validate_limits(&mut errors);
        self.validate_api_cache(&mut errors);
        if let Some(egress) = &self.egress {
            egress.validate(self.admin.listen, &mut errors);
        }
        if let Some(heartbeat) = &self.heartbeat {
            let api_cache = self.api_cache.as_ref();
            let members = api_cache.is_some_and(|api_cache| api_cache.members.is_some());
            heartbeat.validate(members, &mut errors);
        }
        self.validate_ports(&mut errors);
        errors.into_vec()
    }

    fn validate_files(&self) -> Vec<ConfigError> {
        let mut errors = ConfigErrors::default();
        if let Some(files) = &self.identity {
            errors.check_file("identity.chain", &files.chain);
            errors.check_file("identity.key", &files.key);
            errors.check_file("identity.ca", &files.ca);
        }
        if let Some(cluster) = &self.kubernetes
            && let Some(file) = &cluster.kubeconfig
        {
            errors.check_file("kubernetes.kubeconfig", file);
        }
        let Some(api_cache) = &self.api_cache else {
            return errors.into_vec();
        };
        if let Some(tls) = &api_cache.tls {
            errors.check_file("api_cache.tls.certificate", &tls.certificate);
            errors.check_file("api_cache.tls.key", &tls.key);
        }
        if let Some(yurthub) = &api_cache.yurthub {
            errors.check_file("api_cache.yurthub.certificate", &yurthub.certificate);
            errors.check_file("api_cache.yurthub.key", &yurthub.key);
            errors.check_file("api_cache.yurthub.ca", &yurthub.ca);
        }
        errors.into_vec()
    }
}

impl Config {
    /// Checks that only one of a token, files and a cluster identifies this node.
    fn validate_kubernetes(&self, errors: &mut ConfigErrors) {
        let Some(cluster) = &self.kubernetes else {
            return;
        };
        let others = [
            ("join", self.join.is_some()),
            ("join_file", self.join_file.is_some()),
            ("identity", self.identity.is_some()),
        ];
        for (key, is_set) in others {
            if is_set {
                let message = "the cluster (kubernetes) already provides this node's certificate; keep one of the two keys";
                errors.add(key, message);
            }
        }
        let is_kubernetes_signer = cluster.signer.contains("kubernetes.io/");
        if !cluster.signer.contains('/')
            || is_kubernetes_signer && SignerProfile::from_signer_name(&cluster.signer).is_none()
        {
            let message = format!(
                "\"{}\" is not a signer that this edge can use; write the same value as the gateway's kubernetes.certificates.signer, such as causeway.io/edge or kubernetes.io/kube-apiserver-client",
                cluster.signer
            );
            errors.add("kubernetes.signer", message);
        }
        for (key, name) in [("namespace", &cluster.namespace), ("name", &cluster.name)] {
            if let Err(error) = NodeName::parse(name) {
                errors.add(format!("kubernetes.{key}"), error.to_string());
            }
        }
    }

    fn validate_ports(&self, errors: &mut ConfigErrors) {
        let checks = self
            .ports
            .values()
            .filter(|port| port.health_check.is_some());
        if checks.count() > MAX_HEALTH_CHECKS {
            let message = format!("at most {MAX_HEALTH_CHECKS} ports can have a health check");
            errors.add("ports", message);
        }
        for (number, port) in &self.ports {
            let path = format!("ports.{number}");
            if *number == 0 {
                errors.add(path.as_str(), "0 is not a port; ports are 1 to 65535");
                continue;
            }
            let target = port.target(*number);
            PortValidator { port, path, errors }.run(&target, &self.allow);
        }
        for (name, Service(port)) in &self.services {
            let path = format!("services.{name}");
            if !is_service_name(name) {
                errors.add(path.as_str(), "is not the name of a service; write one label of a DNS name, with lower-case letters, digits and '-'");
            }
            if port.health_check.is_some() {
                errors.add(
                    format!("{path}.health_check"),
                    "is for ports only; remove the key",
                );
            }
            match &port.target {
                Some(target) => PortValidator { port, path, errors }.run(target, &self.allow),
                None => errors.add(path, "has no target; write HOST:PORT"),
            }
        }
    }

    fn validate_limits(&self, errors: &mut ConfigErrors) {
        let timeouts = &self.timeouts;
        errors.check_not_zero("tunnels", &[("resolve_after", self.tunnels.resolve_after)]);
        errors.check_not_zero(
            "timeouts",
            &[
                ("tcp", timeouts.tcp),
                ("tls", timeouts.tls),
                ("hello", timeouts.hello),
                ("silence", timeouts.silence),
                ("dial", timeouts.dial),
                ("upgrade", timeouts.upgrade),
                ("upstream_idle", timeouts.upstream_idle),
                ("drain", timeouts.drain),
            ],
        );
        let backoff = &self.backoff;
        errors.check_not_zero(
            "backoff",
            &[
                ("silent_max", backoff.silent_max),
                ("refused_max", backoff.refused_max),
            ],
        );
        let tunnels = &self.tunnels;
        errors.check_at_least_one(
            "tunnels",
            &[("max", tunnels.max), ("bulk_after", tunnels.bulk_after)],
        );
        let limits = &self.limits;
        errors.check_at_least_one(
            "limits",
            &[
                ("streams", limits.streams),
                ("max_headers", limits.max_headers),
                ("stalled", limits.stalled),
            ],
        );
        if tunnels.bulk_idle < BULK_SPAN {
            let detail = format!(
                "must be at least {BULK_SPAN:?}, the time over which bulk is measured: else the additional tunnel would close during the transfer"
            );
            errors.add("tunnels.bulk_idle", detail);
        }
        if !u32::try_from(tunnels.max).is_ok_and(|max| max <= MAX_TUNNELS_PER_EDGE) {
            let detail = format!(
                "must be at most {MAX_TUNNELS_PER_EDGE}, because a gateway accepts no more tunnels of one edge"
            );
            errors.add("tunnels.max", detail);
        }
    }
}

/// Validator of one port or service.
struct PortValidator<'a> {
    port: &'a Port,
    path: String,
    errors: &'a mut ConfigErrors,
}

impl PortValidator<'_> {
    fn run(mut self, target: &str, allow: &Allow) {
        self.target(target, allow);
        if self.port.proxy_protocol && self.port.scheme != Protocol::Tcp {
            let message = format!(
                "needs scheme: tcp; apps with the scheme {} read the client's address in forwarding headers",
                self.port.scheme.as_str()
            );
            self.add("proxy_protocol", message);
        }
        if let Some(check) = &self.port.health_check {
            self.health_check(check);
        }
        if self.port.scheme == Protocol::Https {
            self.https();
        } else {
            self.without_tls();
        }
    }

    fn add(&mut self, key: &str, message: impl Into<String>) {
        self.errors.add(format!("{}.{key}", self.path), message);
    }

    fn target(&mut self, target: &str, allow: &Allow) {
        match host_port(target).map(|(host, _)| host.parse::<IpAddr>()) {
            Err(message) => self.add("target", message),
            Ok(Ok(address)) if !allow.permits(address) => {
                let message = format!(
                    "`allow` does not permit connections to {address}; add it to allow.hosts"
                );
                self.errors
                    .add_against(format!("{}.target", self.path), "allow.hosts", message);
            }
            Ok(_) => {}
        }
    }

    fn health_check(&mut self, check: &HealthCheck) {
        let section = format!("{}.health_check", self.path);
        let times = [("interval", check.interval), ("timeout", check.timeout)];
        self.errors.check_not_zero(&section, &times);
        if !check.interval.is_zero() && check.interval < MIN_HEALTH_INTERVAL {
            let message = format!("must be at least {MIN_HEALTH_INTERVAL:?}");
            self.add("health_check.interval", message);
        }
        for (key, threshold) in [
            ("unhealthy_threshold", check.unhealthy_threshold),
            ("healthy_threshold", check.healthy_threshold),
        ] {
            if threshold == 0 {
                self.add(&format!("health_check.{key}"), "must be at least 1");
            }
        }
        let Some(path) = &check.path else { return };
        if !path.starts_with('/') || path.parse::<PathAndQuery>().is_err() {
            let message = format!("{path:?} is not a path; write /healthz");
            self.add("health_check.path", message);
        }
        if !matches!(self.port.scheme, Protocol::Http | Protocol::Https) {
            let message = format!(
                "the scheme {} has no HTTP/1.1 request; remove this key to check the connection only",
                self.port.scheme.as_str()
            );
            self.add("health_check.path", message);
        }
    }

    fn https(&mut self) {
        let port = self.port;
        match (&port.ca, port.verify) {
            (None, true) => self.errors.add(
                self.path.as_str(),
                "https needs \"ca\", the file of the CA that issued the app's certificate; to accept any \
                 certificate, write verify: false",
            ),
            (Some(_), false) => {
                self.add("verify", "false accepts any certificate, so \"ca\" has no effect; remove one of the two keys");
            }
            _ => {}
        }
        match (&port.certificate, &port.key) {
            (Some(_), None) => self.add(
                "certificate",
                "needs \"key\", the file of the certificate's private key",
            ),
            (None, Some(_)) => {
                self.add(
                    "key",
                    "needs \"certificate\", the file of the key's certificate",
                );
            }
            _ => {}
        }
        let files = [
            ("ca", &port.ca),
            ("certificate", &port.certificate),
            ("key", &port.key),
        ];
        for (key, file) in files {
            if let Some(file) = file {
                self.errors.check_file(format!("{}.{key}", self.path), file);
            }
        }
    }

    fn without_tls(&mut self) {
        let port = self.port;
        let message = format!(
            "requires scheme https, but the scheme is {}; set scheme: https or remove this key",
            port.scheme.as_str()
        );
        for (key, is_set) in [
            ("ca", port.ca.is_some()),
            ("server_name", port.server_name.is_some()),
            ("certificate", port.certificate.is_some()),
            ("key", port.key.is_some()),
            ("verify", !port.verify),
        ] {
            if is_set {
                self.add(key, message.as_str());
            }
        }
    }
}

/// Checks the address of a proxy. Errors never contain the text, because it may contain a password.
fn proxy_address(proxy: &Secret) -> Result<(), String> {
    let hint = "write http://HOST:PORT or socks5://HOST:PORT, with USER:PASSWORD@ before the host if the proxy requires authentication";
    let (scheme, rest) = proxy
        .expose()
        .split_once("://")
        .ok_or_else(|| format!("the scheme is missing; {hint}"))?;
    if !matches!(scheme, "http" | "socks5" | "socks5h") {
        return Err(format!(
            "the proxy scheme \"{scheme}\" is not supported; {hint}"
        ));
    }
    let address = rest.rsplit_once('@').map_or(rest, |(_, address)| address);
    host_port(address.trim_end_matches('/'))
        .map(drop)
        .map_err(|_| hint.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn faults(config: Value) -> Vec<String> {
        let config: Config = serde_json::from_value(config).unwrap();
        let faults = config.validate();
        faults
            .into_iter()
            .map(|fault| format!("{}: {}", fault.path, fault.message))
            .collect()
    }

    fn one_fault(config: Value, path: &str, part: &str) {
        let faults = faults(config);
        assert_eq!(faults.len(), 1, "{faults:#?}");
        assert!(
            faults[0].starts_with(&format!("{path}: ")) && faults[0].contains(part),
            "{faults:#?}"
        );
    }

    #[test]
    fn the_default_is_sound_and_reads_back() {
        assert_eq!(Config::default().validate(), []);
        let text = serde_json::to_value(Config::default()).unwrap();
        assert_eq!(
            serde_json::from_value::<Config>(text).unwrap(),
            Config::default()
        );
    }

    #[test]
    fn tls_to_an_app_is_never_silently_unverified() {
        let port = |port: Value| json!({ "ports": { "10250": port } });
        one_fault(
            port(json!({ "scheme": "https" })),
            "ports.10250",
            "verify: false",
        );
        one_fault(
            port(json!({ "verify": false })),
            "ports.10250.verify",
            "scheme: https",
        );
        let output = port(json!({ "scheme": "https", "verify": false }));
        assert_eq!(faults(output), Vec::<String>::new());
        let absent = json!({ "scheme": "https", "ca": "/nowhere/ca.pem" });
        one_fault(port(absent), "ports.10250.ca", "cannot read");
    }

    #[test]
    fn a_health_check_fits_the_scheme_of_its_port() {
        let port = |scheme: &str, check: Value| {
            let port = json!({ "scheme": scheme, "health_check": check });
            json!({ "ports": { "9100": port } })
        };
        let path = json!({ "path": "/healthz?full", "interval": "1s" });
        assert_eq!(faults(port("http", path.clone())), Vec::<String>::new());
        assert_eq!(faults(port("tcp", json!({}))), Vec::<String>::new());
        let key = |key: &str| format!("ports.9100.health_check.{key}");
        for scheme in ["tcp", "h2c"] {
            one_fault(port(scheme, path.clone()), &key("path"), "connection only");
        }
        for (check, name, words) in [
            (json!({ "path": "healthz" }), "path", "write /healthz"),
            (json!({ "path": "/a b" }), "path", "write /healthz"),
            (json!({ "interval": "0s" }), "interval", "zero"),
            (json!({ "interval": "999ms" }), "interval", "at least 1s"),
            (
                json!({ "healthy_threshold": 0 }),
                "healthy_threshold",
                "at least 1",
            ),
        ] {
            one_fault(port("http", check), &key(name), words);
        }
        let ports = (1..=33).map(|port| (port.to_string(), json!({ "health_check": {} })));
        let ports: Value = ports.collect::<serde_json::Map<_, _>>().into();
        one_fault(json!({ "ports": ports }), "ports", "at most 32");
    }

    #[test]
    fn a_proxy_header_is_for_ports_of_bytes_only() {
        let port = |scheme: &str| {
            let port = json!({ "scheme": scheme, "proxy_protocol": true });
            json!({ "ports": { "22": port } })
        };
        assert_eq!(faults(port("tcp")), Vec::<String>::new());
        for scheme in ["http", "h2c"] {
            one_fault(port(scheme), "ports.22.proxy_protocol", "scheme: tcp");
        }
    }

    #[test]
    fn a_target_off_the_allow_list_is_refused_before_the_dial() {
        let config = json!({ "ports": { "80": { "target": "10.0.0.7:80" } } });
        one_fault(config, "ports.80.target", "allow.hosts");
        let config = json!({
            "allow": { "hosts": ["10.0.0.0/8"] },
            "ports": { "80": { "target": "10.0.0.7:80" } },
        });
        assert_eq!(faults(config), Vec::<String>::new());
        one_fault(
            json!({ "ports": { "80": { "target": "10" } } }),
            "ports.80.target",
            "HOST:PORT",
        );
    }

    #[test]
    fn a_service_has_a_name_and_an_allowed_target() {
        let config = |name: &str, service: Value| json!({ "allow": { "hosts": ["10.0.3.0/24"] }, "services": { name: service } });
        for service in [
            json!("10.0.3.7:631"),
            json!("printer.local:631"),
            json!({ "target": "10.0.3.7:22", "scheme": "tcp", "proxy_protocol": true }),
        ] {
            let faults = faults(config("printer", service.clone()));
            assert_eq!(faults, Vec::<String>::new(), "{service}");
        }
        let misspelt =
            json!({ "services": { "camera": { "target": "10.0.3.9:443", "shceme": "https" } } });
        let error = serde_json::from_value::<Config>(misspelt).unwrap_err();
        assert!(
            error.to_string().contains("unknown field `shceme`"),
            "{error}"
        );
        for name in ["Printer", "a.b", "-a", ""] {
            let path = format!("services.{name}");
            one_fault(config(name, json!("10.0.3.7:631")), &path, "DNS name");
        }
        for (service, path, part) in [
            (json!({}), "services.a", "HOST:PORT"),
            (json!("10.0.3.7"), "services.a.target", "HOST:PORT"),
            (json!("10.0.4.7:631"), "services.a.target", "allow.hosts"),
            (
                json!({ "target": "10.0.3.7:1", "health_check": {} }),
                "services.a.health_check",
                "ports only",
            ),
            (
                json!({ "target": "10.0.3.7:1", "scheme": "https" }),
                "services.a",
                "verify: false",
            ),
        ] {
            one_fault(config("a", service), path, part);
        }
    }

    #[test]
    fn a_cluster_excludes_token_and_files_and_needs_a_valid_signer() {
        assert_eq!(faults(json!({ "kubernetes": {} })), Vec::<String>::new());
        for (more, key) in [
            (json!({ "join": "x" }), "join"),
            (json!({ "join_file": "x" }), "join_file"),
            (
                json!({ "identity": { "chain": "a", "key": "b", "ca": "c" } }),
                "identity",
            ),
        ] {
            let mut config = json!({ "kubernetes": {} });
            config
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            one_fault(config, key, "keep one of the two");
        }
        let signer = |signer: &str| json!({ "kubernetes": { "signer": signer } });
        one_fault(
            signer("kubernetes.io/kubelet-serving"),
            "kubernetes.signer",
            "causeway.io/edge",
        );
        one_fault(signer("edge"), "kubernetes.signer", "causeway.io/edge");
        one_fault(
            json!({ "kubernetes": { "name": "A_b" } }),
            "kubernetes.name",
            "A_b",
        );
    }

    #[test]
    fn a_proxys_password_is_in_no_message() {
        for bad in ["ftp://u:hunter2@p:1", "http://u:hunter2@p", "u:hunter2@p:1"] {
            let faults = faults(json!({ "proxy": bad }));
            assert_eq!(faults.len(), 1);
            assert!(
                faults[0].contains("socks5://") && !faults[0].contains("hunter2"),
                "{faults:?}"
            );
        }
        for good in [
            "http://u:p@proxy:3128",
            "http://proxy:3128/",
            "socks5://[::1]:1080",
        ] {
            assert_eq!(faults(json!({ "proxy": good })), Vec::<String>::new());
        }
    }

    #[test]
    fn zero_waits_and_bad_gateways_come_together() {
        let config = json!({
            "gateways": ["gateway.example"],
            "node": "edge_1",
            "timeouts": { "dial": "0s" },
            "backoff": { "silent_max": "0s" },
            "tunnels": { "max": 0 },
        });
        assert_eq!(faults(config).len(), 5);
        assert_eq!(faults(json!({ "tunnels": { "max": 17 } })).len(), 1);
    }
}
