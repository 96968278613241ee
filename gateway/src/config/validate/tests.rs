use serde_json::{Value, json};
use std::path::PathBuf;

use super::*;

fn faults(config: Value) -> Vec<String> {
    let config: Config = serde_json::from_value(config).unwrap();
    let faults = config.validate();
    faults
        .into_iter()
        .map(|fault| format!("{}: {}", fault.path, fault.message))
        .collect()
}

/// Returns the only fault, which names `path` and contains `part`.
fn one_fault(config: Value, path: &str, part: &str) {
    let faults = faults(config);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    assert!(
        faults[0].starts_with(&format!("{path}: ")) && faults[0].contains(part),
        "{faults:#?}"
    );
}

#[test]
fn the_default_is_sound_and_opens_one_authenticated_listener() {
    assert_eq!(Config::default().validate(), []);
    assert!(
        Config::default()
            .listeners
            .iter()
            .all(|listener| !listener.anonymous && listener.has_tls())
    );
}

#[test]
fn written_configuration_parses_back() {
    let text = serde_json::to_value(Config::default()).unwrap();
    assert_eq!(
        serde_json::from_value::<Config>(text).unwrap(),
        Config::default()
    );
}

#[test]
fn listeners_of_all_kinds_are_held_against_each_other() {
    let listener =
        |listen| json!({ "listeners": [{ "name": "a", "protocol": "https", "listen": listen }] });
    one_fault(
        listener("127.0.0.1:10265"),
        "listeners[0].listen",
        "admin.listen",
    );
    one_fault(
        listener("[::]:10262"),
        "listeners[0].listen",
        "tunnel.listen",
    );
    assert_eq!(faults(listener("0.0.0.0:0")), Vec::<String>::new());
}

#[test]
fn upstream_is_never_silently_unverified() {
    let app = |app: Value| json!({ "upstream_tls": { "10250": app } });
    one_fault(app(json!({})), "upstream_tls.10250", "verify: false");
    let any = json!({ "verify": false });
    assert_eq!(faults(app(any.clone())), Vec::<String>::new());
    one_fault(
        json!({ "upstream_tls": { "0": any } }),
        "upstream_tls.0",
        "1 to 65535",
    );
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let both = json!({ "ca": manifest, "verify": false });
    one_fault(app(both), "upstream_tls.10250.verify", "remove one");
    let pinned = json!({ "pin": true });
    assert_eq!(faults(app(pinned)), Vec::<String>::new());
    let both = json!({ "ca": manifest, "pin": true });
    one_fault(app(both), "upstream_tls.10250.pin", "remove one");
    let both = json!({ "pin": true, "verify": false });
    one_fault(app(both), "upstream_tls.10250.verify", "remove one");
    let keyless = json!({ "ca": manifest, "certificate": manifest });
    one_fault(app(keyless), "upstream_tls.10250.certificate", "key");
}

#[test]
fn client_certificate_by_csr_needs_a_signer_for_clients() {
    let app = |app: Value| json!({ "upstream_tls": { "10250": app } });
    let asked = |app: Value| {
        let mut app = app;
        app["pin"] = json!(true);
        json!({ "kubernetes": {}, "upstream_tls": { "10250": app } })
    };
    let clients = "kubernetes.io/kube-apiserver-client";
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let sound: Config = serde_json::from_value(asked(json!({ "signer": clients }))).unwrap();
    assert_eq!(sound.validate(), []);
    for (app, key, words) in [
        (json!({ "approve": true }), "approve", "no signer is set"),
        (json!({ "signer": "clients" }), "signer", "DOMAIN/NAME"),
        (
            json!({ "signer": format!("{clients}-kubelet") }),
            "signer",
            "only for nodes",
        ),
        (
            json!({ "signer": clients, "certificate": file, "key": file }),
            "signer",
            "keep one of the two",
        ),
        (
            json!({ "signer": clients, "user": "system:admin" }),
            "user",
            "that a gateway may use",
        ),
    ] {
        one_fault(asked(app), &format!("upstream_tls.10250.{key}"), words);
    }
    let nobody = json!({ "pin": true, "signer": clients });
    one_fault(
        app(nobody),
        "upstream_tls.10250.signer",
        "section kubernetes",
    );
    let all = json!({ "ca": "/none", "key": "/nor/this" });
    assert_eq!(faults(app(all)).len(), 3);
    let files: Config =
        serde_json::from_value(app(json!({ "ca": "a", "certificate": "b", "key": "c" }))).unwrap();
    let named = files.files();
    for file in ["a", "b", "c"] {
        assert!(named.contains(&file.into()), "{named:?}");
    }
}

#[test]
fn a_name_serves_one_listener() {
    let config = json!({ "listeners": [
        { "name": "a", "protocol": "https", "listen": "127.0.0.1:0" },
        { "name": "a", "protocol": "https", "listen": "127.0.0.1:0" },
    ]});
    one_fault(config, "listeners[1].name", "earlier listener");
}

#[test]
fn a_tcp_listener_names_its_clients() {
    let listener = |more: Value| {
        let mut listener = json!({ "name": "ssh", "protocol": "tcp", "listen": "127.0.0.1:0" });
        listener
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        json!({ "listeners": [listener] })
    };
    assert_eq!(faults(listener(json!({}))).len(), 2);
    one_fault(
        listener(json!({ "node": "edge-1" })),
        "listeners[0]",
        "\"port\"",
    );
    one_fault(
        listener(json!({ "node": "Edge_1", "port": 22 })),
        "listeners[0].node",
        "Edge_1",
    );
    one_fault(
        listener(json!({ "node": "edge-1", "port": 0 })),
        "listeners[0].port",
        "1 to 65535",
    );
    assert_eq!(
        faults(listener(json!({ "node": "edge-1", "port": 22 }))),
        Vec::<String>::new()
    );
}

#[test]
fn a_tcp_listener_with_open_access_has_no_tls() {
    let certificate = json!({ "chain": "chain.pem", "key": "key.pem" });
    let listener = |anonymous: bool| {
        json!({ "listeners": [{
            "name": "ssh", "protocol": "tcp", "listen": "127.0.0.1:0", "node": "edge-1", "port": 22,
            "anonymous": anonymous,
        }]})
    };
    for anonymous in [false, true] {
        let config: Config = serde_json::from_value(listener(anonymous)).unwrap();
        assert_eq!(config.listeners[0].has_tls(), !anonymous);
    }
    let mut shows = listener(true);
    shows["listeners"][0]["certificate"] = certificate;
    one_fault(
        shows,
        "listeners[0].certificate",
        "an anonymous tcp listener is served without TLS",
    );
}

#[test]
fn a_passthrough_listener_is_anonymous_and_has_a_port() {
    let listener = |more: Value| {
        let mut listener = json!({
            "name": "a", "protocol": "passthrough", "listen": "127.0.0.1:0", "port": 10250, "anonymous": true,
        });
        let more = more.as_object().unwrap().clone();
        listener.as_object_mut().unwrap().extend(more);
        json!({ "listeners": [listener] })
    };
    for sound in [json!({}), json!({ "node": "edge-1" })] {
        assert_eq!(faults(listener(sound)), Vec::<String>::new());
    }
    let tokens = json!({ "tokens": concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml") });
    for (more, path, part) in [
        (json!({ "anonymous": false }), "", "anonymous: true"),
        (
            json!({ "anonymous": false, "listen": "unix:/run/it.sock" }),
            "",
            "anonymous: true",
        ),
        (json!({ "port": null }), "", "needs \"port\""),
        (json!({ "names": ["gw"] }), ".names", "remove"),
        (json!({ "nodes": ["edge-1"] }), ".nodes", "name the node"),
        (
            json!({ "client_auth": tokens }),
            ".client_auth.tokens",
            "cannot carry",
        ),
    ] {
        one_fault(listener(more), &format!("listeners[0]{path}"), part);
    }
}

#[test]
fn a_listener_without_tls_stays_in_the_private_networks_that_it_names() {
    let proxy = |listen: &str, networks: &[&str], more: Value| {
        let mut listener = json!({
            "name": "proxy", "protocol": "connect", "listen": listen, "plaintext_networks": networks,
            "anonymous": true,
        });
        listener
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        json!({ "listeners": [listener] })
    };
    let none = json!({});
    for (listen, networks) in [
        ("127.0.0.1:3128", &["127.0.0.0/8"][..]),
        ("10.0.0.5:3128", &["10.0.0.0/24", "192.168.0.0/16"]),
        ("172.31.0.1:3128", &["172.16.0.0/12"]),
        (
            "[fd00::1]:3128",
            &["fc00::/7", "fe80::/10", "169.254.0.0/16"],
        ),
    ] {
        let config: Config = serde_json::from_value(proxy(listen, networks, none.clone())).unwrap();
        assert!(config.validate().is_empty(), "{listen}");
        assert!(!config.listeners[0].has_tls());
    }
    for network in [
        "0.0.0.0/0",
        "10.0.0.0/7",
        "172.0.0.0/11",
        "::/0",
        "192.0.2.0/24",
    ] {
        let networks = ["127.0.0.0/8", network];
        let path = "listeners[0].plaintext_networks[1]";
        one_fault(
            proxy("127.0.0.1:3128", &networks, none.clone()),
            path,
            "no private network",
        );
    }
    for listen in ["0.0.0.0:3128", "10.0.1.1:3128", "[::]:3128"] {
        let config = proxy(listen, &["10.0.0.0/24"], none.clone());
        one_fault(config, "listeners[0].listen", "in none of the networks");
    }
    let key = "listeners[0].plaintext_networks";
    let near = &["127.0.0.0/8"];
    let http = proxy("127.0.0.1:0", near, json!({ "protocol": "http" }));
    one_fault(http, key, "only a connect listener");
    let unix = proxy("unix:/run/proxy.sock", near, none.clone());
    one_fault(unix, key, "no IP address");
    let closed = proxy("127.0.0.1:3128", near, json!({ "anonymous": false }));
    one_fault(closed, "listeners[0]", "set client_auth.tokens");
    let certificate = json!({ "certificate": { "chain": "a", "key": "b" } });
    let shows = proxy("127.0.0.1:3128", near, certificate);
    let words = "a connect listener with plaintext_networks is served without TLS";
    one_fault(shows, "listeners[0].certificate", words);
}

#[test]
fn a_listener_is_open_only_by_explicit_configuration() {
    let http = |more: Value| {
        let mut listener = json!({ "name": "plain", "protocol": "http", "listen": "127.0.0.1:0" });
        listener
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        json!({ "listeners": [listener] })
    };
    one_fault(http(json!({})), "listeners[0]", "anonymous: true");
    assert_eq!(
        faults(http(json!({ "anonymous": true }))),
        Vec::<String>::new()
    );
    one_fault(
        json!({ "listeners": [{
            "name": "a", "protocol": "https", "listen": "127.0.0.1:0", "anonymous_from": ["10.0.0.0/8"],
        }]}),
        "listeners[0].anonymous_from",
        "restricts",
    );
}

#[test]
fn a_listener_without_certificates_and_tokens_is_refused() {
    let https = json!({ "listeners": [{
        "name": "a", "protocol": "https", "listen": "127.0.0.1:0", "client_auth": { "own_ca": false },
    }]});
    one_fault(https, "listeners[0]", "no method to authenticate clients");
}

#[test]
fn missing_files_zero_waits_and_zero_limits_come_together() {
    let config = json!({
        "timeouts": { "connect": "0s" },
        "limits": { "per_node": 0 },
        "tunnel": { "advertise": ["gateway.example"], "replicas": 65 },
        "listeners": [{
            "name": "a", "protocol": "https", "listen": "127.0.0.1:0",
            "client_auth": { "client_ca": ["/nowhere/ca.pem"], "tokens": "/" },
        }],
    });
    let found = faults(config);
    let paths: Vec<_> = found
        .iter()
        .filter_map(|fault| fault.split(':').next())
        .collect();
    let expected = [
        "timeouts.connect",
        "tunnel.replicas",
        "limits.per_node",
        "tunnel.advertise[0]",
        "listeners[0].client_auth.client_ca[0]",
        "listeners[0].client_auth.tokens",
    ];
    assert_eq!(paths, expected, "{found:#?}");
}

fn issuer(more: &Value) -> Value {
    let mut jwt = json!({ "issuer": "https://id.test", "audiences": ["causeway"], "jwks": "https://id.test/keys" });
    let fields = jwt.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    jwt
}

fn with_issuers(protocol: &str, issuers: &[Value]) -> Value {
    json!({ "listeners": [{
        "name": "a", "protocol": protocol, "listen": "127.0.0.1:0", "node": "edge-1", "port": 9100,
        "client_auth": { "own_ca": protocol == "tcp", "jwt": issuers },
    }] })
}

#[test]
fn only_listeners_that_read_headers_accept_jwts() {
    for protocol in ["https", "http", "connect"] {
        let sound = with_issuers(protocol, &[issuer(&json!({}))]);
        assert_eq!(faults(sound), Vec::<String>::new(), "{protocol}");
    }
    let bytes = with_issuers("tcp", &[issuer(&json!({}))]);
    one_fault(
        bytes,
        "listeners[0].client_auth.jwt",
        "cannot carry a token",
    );
    let mut socket = with_issuers("http", &[issuer(&json!({}))]);
    socket["listeners"][0]["listen"] = json!("unix:/run/a.sock");
    one_fault(
        socket,
        "listeners[0].client_auth.jwt",
        "identified by the kernel",
    );
}

#[test]
fn an_issuer_needs_audiences_and_a_key_source() {
    let at = |key: &str| format!("listeners[0].client_auth.jwt[0].{key}");
    for (more, key, part) in [
        (json!({ "audiences": [] }), "audiences", "any other service"),
        (json!({ "issuer": "" }), "issuer", "empty"),
        (
            json!({ "algorithms": [] }),
            "algorithms",
            "would accept no token",
        ),
        (json!({ "username_claim": "" }), "username_claim", "empty"),
        (
            json!({ "username_prefix": "uid:" }),
            "username_prefix",
            "Unix",
        ),
        (json!({ "groups_prefix": "uid:0" }), "groups_prefix", "Unix"),
        (
            json!({ "jwks": "/nowhere" }),
            "jwks",
            "cannot read /nowhere",
        ),
        (
            json!({ "jwks_ca": "/nowhere" }),
            "jwks_ca",
            "cannot read /nowhere",
        ),
        (
            json!({ "jwks_refresh": "9s" }),
            "jwks_refresh",
            "at least 10s",
        ),
        (
            json!({ "jwks_max_age": "9m" }),
            "jwks_max_age",
            "shorter than jwks_refresh",
        ),
        (
            json!({ "jwks": "http://127.0.0.1/", "jwks_ca": "/dev/null" }),
            "jwks_ca",
            "uses no certificate",
        ),
        (
            json!({ "jwks": "/dev/null", "jwks_ca": "/dev/null" }),
            "jwks_ca",
            "only if jwks is a URL",
        ),
    ] {
        one_fault(with_issuers("http", &[issuer(&more)]), &at(key), part);
    }
    let twice = [issuer(&json!({})), issuer(&json!({}))];
    one_fault(
        with_issuers("http", &twice),
        "listeners[0].client_auth.jwt[1].issuer",
        "listed earlier as an issuer",
    );
    for unsafe_one in ["HS256", "none"] {
        let jwt = issuer(&json!({ "algorithms": [unsafe_one] }));
        let config = serde_json::from_value::<Config>(with_issuers("http", &[jwt]));
        assert!(config.unwrap_err().to_string().contains(unsafe_one));
    }
}

#[test]
fn identity_fields_need_unique_names_and_an_http_listener() {
    let listener = |protocol: &str, fields: Value| {
        json!({ "listeners": [{
            "name": "a", "protocol": protocol, "listen": "127.0.0.1:0", "node": "edge-1", "port": 9100,
            "anonymous": true, "identity_headers": fields,
        }] })
    };
    let both = json!({ "user": "X-Remote-User", "groups": "X-Remote-Group" });
    assert_eq!(faults(listener("https", both)), Vec::<String>::new());
    let user = json!({ "user": "X-Remote-User" });
    one_fault(
        listener("tcp", user),
        "listeners[0].identity_headers.user",
        "does not parse what it forwards",
    );
    let host = json!({ "groups": "Host" });
    one_fault(
        listener("http", host),
        "listeners[0].identity_headers.groups",
        "another meaning",
    );
    let same = json!({ "user": "X-Who", "groups": "x-who" });
    one_fault(
        listener("http", same),
        "listeners[0].identity_headers.groups",
        "other field",
    );
    let prefixes = |prefix: &str| json!({ "strip_prefixes": [prefix] });
    let at = "listeners[0].identity_headers.strip_prefixes[0]";
    assert_eq!(
        faults(listener("http", prefixes("X-Remote-"))),
        Vec::<String>::new()
    );
    one_fault(
        listener("tcp", prefixes("X-Remote-")),
        at,
        "does not parse what it forwards",
    );
    one_fault(listener("http", prefixes("X-")), at, "longer prefix");
}

#[test]
fn forwarding_headers_need_requests_and_addresses() {
    let listener = |protocol: &str, listen: &str, (key, value): (&str, Value)| {
        json!({ "listeners": [{
            "name": "a", "protocol": protocol, "listen": listen, "node": "edge-1", "port": 9100,
            "anonymous": true, key: value,
        }] })
    };
    let trusted = || ("trusted_proxies", json!(["10.0.0.0/8", "192.0.2.1"]));
    let some = || {
        (
            "forwarding_headers",
            json!(["X-Forwarded-For", "x-real-ip"]),
        )
    };
    for protocol in ["http", "https"] {
        assert_eq!(
            faults(listener(protocol, "127.0.0.1:0", trusted())),
            Vec::<String>::new()
        );
        assert_eq!(
            faults(listener(protocol, "127.0.0.1:0", some())),
            Vec::<String>::new()
        );
    }
    for (key, more) in [
        ("trusted_proxies", trusted()),
        ("forwarding_headers", some()),
    ] {
        let at = format!("listeners[0].{key}");
        let words = "does not parse what it forwards";
        one_fault(listener("tcp", "127.0.0.1:0", more), &at, words);
    }
    let unix = listener("http", "unix:/run/a.sock", trusted());
    one_fault(unix, "listeners[0].trusted_proxies", "have no IP address");
    let unknown = listener(
        "http",
        "127.0.0.1:0",
        ("forwarding_headers", json!(["X-Client-IP"])),
    );
    assert!(serde_json::from_value::<Config>(unknown).is_err());
}

#[test]
fn an_identity_that_admits_no_client_is_a_fault() {
    let identity = |client_ca: &[&str]| json!({ "tunnel": { "identity": { "chain": "a.pem", "key": "a.key", "client_ca": client_ca } } });
    one_fault(
        identity(&[]),
        "tunnel.identity.client_ca",
        "no edge would be admitted",
    );
    let config: Config = serde_json::from_value(identity(&["ca.pem"])).unwrap();
    assert_eq!(config.validate(), []);
    let files = ["a.pem", "a.key", "ca.pem"].map(PathBuf::from);
    assert!(files.iter().all(|file| config.files().contains(file)));
}

#[test]
fn names_are_explicit_or_the_listen_addresses_of_all_listeners() {
    let config = |addresses: Value, listens: &[&str]| {
        let listener = |(index, listen): (usize, &&str)| json!({ "name": index.to_string(), "protocol": "https", "listen": listen });
        let listeners: Vec<Value> = listens.iter().enumerate().map(listener).collect();
        json!({ "dns": { "zones": ["."], "addresses": addresses }, "listeners": listeners })
    };
    let named = |config: Value| {
        let config: Config = serde_json::from_value(config).unwrap();
        assert_eq!(config.validate(), []);
        let named = config.node_name_addresses();
        named.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let wild = ["0.0.0.0:1", "127.0.0.1:2"];
    one_fault(config(json!([]), &wild), "dns.addresses", "all addresses");
    one_fault(config(json!(["::"]), &wild), "dns.addresses[0]", "reach");
    one_fault(config(json!([]), &[]), "dns.addresses", "are not known");
    let output = json!(["10.0.0.2", "fd00::2", "::ffff:10.0.0.2"]);
    assert_eq!(named(config(output, &wild)), ["10.0.0.2", "fd00::2"]);
    let definite = ["127.0.0.1:1", "10.0.0.7:1", "10.0.0.7:2"];
    assert_eq!(named(config(json!([]), &definite)), ["10.0.0.7"]);
    let local = ["127.0.0.1:1", "unix:/run/a"];
    assert_eq!(named(config(json!([]), &local)), ["127.0.0.1"]);
}

#[test]
fn the_dns_server_needs_zones_that_are_names_and_whole_seconds() {
    let dns = |more: Value| {
        let mut dns = json!({ "addresses": ["10.0.0.2"], "zones": ["Nodes.example.", "."] });
        let more = more.as_object().unwrap().clone();
        dns.as_object_mut().unwrap().extend(more);
        json!({ "dns": dns })
    };
    assert_eq!(faults(dns(json!({}))), Vec::<String>::new());
    one_fault(dns(json!({ "zones": [] })), "dns.zones", "no name");
    for zone in ["", "a..b", "..", "no zone", &"a.".repeat(100)] {
        one_fault(dns(json!({ "zones": [zone] })), "dns.zones[0]", "");
    }
    let twice = json!({ "zones": ["a.b", "A.b."] });
    one_fault(dns(twice), "dns.zones[1]", "earlier");
    one_fault(dns(json!({ "ttl": "1500ms" })), "dns.ttl", "whole seconds");
    let taken = json!({ "listen": "127.0.0.1:10265" });
    one_fault(dns(taken), "dns.listen", "admin.listen");
}

#[test]
fn cluster_reviews_need_a_cluster_and_their_answers_are_cached() {
    let asking = |more: &Value| {
        let mut config = json!({ "listeners": [{
            "name": "a", "protocol": "https", "listen": "127.0.0.1:0", "subject_access_review": [10250],
            "client_auth": { "own_ca": false, "token_review": { "audiences": ["causeway"] } },
        }]});
        let own = config.as_object_mut().unwrap();
        own.extend(more.as_object().unwrap().clone());
        config
    };
    assert_eq!(faults(asking(&json!({ "kubernetes": {} }))).len(), 0);
    let alone = faults(asking(&json!({})));
    assert_eq!(alone.len(), 2, "{alone:?}");
    for key in [
        "review_allowed_for",
        "review_refused_for",
        "token_allowed_for",
        "token_refused_for",
    ] {
        let never = asking(&json!({ "kubernetes": { key: "0s" } }));
        one_fault(never, &format!("kubernetes.{key}"), "greater than zero");
    }
}

#[test]
fn a_listener_says_once_which_nodes_it_serves() {
    let with = |protocol: &str, more: Value| {
        let mut listener =
            json!({ "name": "api", "protocol": protocol, "listen": "127.0.0.1:0", "port": 6443 });
        let fields = listener.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        json!({ "listeners": [listener] })
    };
    let sets = [
        json!({ "nodes": ["edge-1", "edge-2"] }),
        json!({ "pool": "mill" }),
        json!({ "node_selector": "site=north,tier in (a,b),!spare" }),
    ];
    for set in sets {
        for protocol in ["tcp", "https"] {
            let sound = with(protocol, set.clone());
            assert_eq!(faults(sound), Vec::<String>::new(), "{set}");
        }
        let key = set.as_object().unwrap().keys().next().unwrap();
        let path = format!("listeners[0].{key}");
        one_fault(with("connect", set.clone()), &path, "name the node");
        let mut both = set.clone();
        both["node"] = json!("edge-1");
        one_fault(with("tcp", both), &path, "keep one of the two");
        let mut original = set.clone();
        original["original_destination"] = json!(true);
        one_fault(with("tcp", original), &path, "remove one of the two");
        let mut without_port = set.clone();
        without_port["port"] = json!(null);
        without_port["anonymous"] = json!(true);
        one_fault(with("http", without_port), "listeners[0]", "needs \"port\"");
    }
    one_fault(with("tcp", json!({})), "listeners[0]", "node_selector");
    for (set, path, words) in [
        (json!({ "nodes": [] }), "nodes", "at least one node"),
        (
            json!({ "nodes": ["edge-1", "Edge 2"] }),
            "nodes[1]",
            "Edge 2",
        ),
        (json!({ "pool": "" }), "pool", "is empty"),
        (
            json!({ "node_selector": "" }),
            "node_selector",
            "at least one label",
        ),
        (
            json!({ "node_selector": "a in b" }),
            "node_selector",
            "a in b",
        ),
    ] {
        one_fault(with("tcp", set), &format!("listeners[0].{path}"), words);
    }
}

#[test]
fn egress_rules_name_their_destinations_and_no_empty_lists() {
    let rule = |rule: Value| json!({ "egress": { "destinations": { "api": "10.0.0.1:6443" }, "rules": [rule] } });
    for to in [
        json!({ "destinations": ["api"] }),
        json!({ "names": ["*.example.com"], "ports": [443, "8000-8999"] }),
        json!({ "networks": ["10.0.0.0/8", "127.0.0.1"] }),
        json!({ "nodes": ["edge-*"] }),
    ] {
        assert_eq!(faults(rule(json!({ "to": to }))), Vec::<String>::new());
    }
}

#[test]
fn namespaces_of_pods_in_egress_rules_are_names() {
    let with = |namespace: &str| {
        let rules = json!([{ "to": { "pod_namespaces": [namespace] } }]);
        let kubernetes = json!({ "pod_networks": ["10.244.0.0/16"], "pods": {} });
        faults(json!({ "egress": { "rules": rules }, "kubernetes": kubernetes }))
    };
    assert_eq!(with("shop-*"), Vec::<String>::new());
    let rules = json!([{ "to": { "pod_namespaces": ["shop"] } }]);
    let path = "egress.rules[0].to.pod_namespaces";
    one_fault(
        json!({ "egress": { "rules": rules } }),
        path,
        "set kubernetes.pods",
    );
    let long = "a".repeat(64);
    for namespace in ["web.shop", "Shop", "", "-bank", "bank-", "*-", &long] {
        let faults = with(namespace);
        let path = "egress.rules[0].to.pod_namespaces[0]: ";
        assert!(
            faults.len() == 1 && faults[0].starts_with(path),
            "{faults:?}"
        );
    }
}

#[test]
fn faults_of_egress_rules_name_their_keys() {
    let rule = |rule: Value| json!({ "egress": { "destinations": { "api": "10.0.0.1:6443" }, "rules": [rule] } });
    let to = || json!({ "destinations": ["api"] });
    for (faulty, path, part) in [
        (
            json!({ "to": {} }),
            "egress.rules[0].to",
            "lists no destination",
        ),
        (
            json!({ "to": { "destinations": ["ap"] } }),
            "egress.rules[0].to.destinations[0]",
            "not a key of egress.destinations",
        ),
        (
            json!({ "to": { "names": ["Example.com"] } }),
            "egress.rules[0].to.names[0]",
            "lower-case",
        ),
        (
            json!({ "to": { "names": ["10.0.0.1"] } }),
            "egress.rules[0].to.names[0]",
            "write it in networks",
        ),
        (
            json!({ "to": { "destinations": ["api"], "ports": [] } }),
            "egress.rules[0].to.ports",
            "is empty",
        ),
        (
            json!({ "who": {}, "to": to() }),
            "egress.rules[0].who",
            "is empty",
        ),
        (
            json!({ "who": { "nodes": [] }, "to": to() }),
            "egress.rules[0].who.nodes",
            "is empty",
        ),
        (
            json!({ "who": { "labels": {} }, "to": to() }),
            "egress.rules[0].who.labels",
            "is empty",
        ),
        (
            json!({ "name": " ", "to": to() }),
            "egress.rules[0].name",
            "one or more words",
        ),
    ] {
        one_fault(rule(faulty), path, part);
    }
    let address = json!({ "egress": { "destinations": { "api": "10.0.0.1" } } });
    one_fault(address, "egress.destinations.api", "HOST:PORT");
    let nothing = json!({ "egress": { "limits": { "connections": 0 } } });
    one_fault(nothing, "egress.limits.connections", "at least 1");
    let slow = json!({ "egress": { "limits": { "bytes_per_second": 9_999 } } });
    one_fault(slow, "egress.limits.bytes_per_second", "at least 10kB");
}

#[test]
fn only_connect_listeners_have_lists_of_nodes() {
    let config = |protocol: &str| {
        json!({ "listeners": [{
            "name": "one", "protocol": protocol, "listen": "127.0.0.1:0", "node_list": false,
        }] })
    };
    assert_eq!(faults(config("connect")), Vec::<String>::new());
    one_fault(
        config("https"),
        "listeners[0].node_list",
        "connect listeners",
    );
}
