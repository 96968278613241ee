//! The generated pages of the reference: configuration keys, commands, error reasons, metrics, ports.
//!
//! The pages are in `docs/reference`; a test checks that each is equal to the output of this code.

mod ports;
#[cfg(test)]
#[cfg(feature = "k8s")]
mod rbac;

use std::fmt::Write;

use causeway_config::RestartKeys;
use causeway_gateway::Reason;
use clap::CommandFactory;
use serde_json::Value;

use crate::cli::Cli;
use crate::cli::operator::{ConfigKind, ReferencePage};
use crate::operator::config_loader::{ProcessConfig, keys, plain_text};

/// Returns the page as Markdown.
pub(crate) fn page(page: ReferencePage) -> String {
    match page {
        ReferencePage::Gateway => configuration("gateway", &causeway_gateway::RESTART_KEYS),
        ReferencePage::Edge => configuration("edge", &causeway_edge::RESTART_KEYS),
        ReferencePage::Commands => commands_page(),
        ReferencePage::Errors => errors_page(),
        ReferencePage::Metrics => metrics_page(),
        ReferencePage::Ports => ports::page(),
    }
}

/// Returns the OpenAPI document of an admin listener.
pub(crate) fn openapi(side: ConfigKind) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let document = match side {
        ConfigKind::Gateway => causeway_gateway::control::admin::openapi(version),
        ConfigKind::Edge => causeway_edge::openapi(version),
    };
    format!("{document:#}\n")
}

/// Columns of the table of keys.
const TYPES: &str = "\
Types:

| type | examples |
| --- | --- |
| duration | `500ms`, `5s`, `1m 30s`, `12h`, `7days` |
| size | `65536` (bytes), `64KiB`, `16MiB`, `2MB` |
| address | `127.0.0.1:10265`, `[::]:10263`; `unix:/path` if the meaning says so |
| IP address | `10.0.0.1`, `2001:db8::1` |
| port | `9100` |
| list of: … | `[a, b]` |
| map of … to: … | `{ 9100: … }`; `KEY.*.NAME` are the keys of the values |
| map | the keys `KEY.NAME` follow |

The column \"change\" says when a changed value takes effect:

- `reload`: at a reload (`causeway reload`, SIGHUP, a changed file).
- `restart`: at the next start. A reload prints the names of such keys that have changed.
- For a map, the column is about adding and removing the key. The keys below it have their own value.
";

/// Returns the page of all keys of a configuration: key, type, default, effect of a change, description.
fn configuration<C: ProcessConfig>(side: &str, restart: &RestartKeys<C>) -> String {
    let mut text = format!(
        "# Configuration of the {side}\n\n\
         This page lists all keys of the {side}'s YAML file. Each key is also a flag and an environment variable, except keys inside of lists and\n\
         maps: `log.filter` is `--log-filter` and `CAUSEWAY_LOG_FILTER`. Flags override variables, which override the file.\n\
         Unknown keys are errors.\n\n\
         - In flags, maps and lists of maps are YAML: `--ports '{{9100: {{}}}}'`.\n\
         - In an address to listen at, `$(NAME)` is an environment variable: `listen: $(POD_IP):10255` is a pod's own address, if its manifest sets it\n  (`status.podIP`).\n\
         - `causeway config schema {side}` prints the JSON Schema of the file. Save it as `{side}.schema.json`, and begin the YAML file with\n  \
         `# yaml-language-server: $schema={side}.schema.json`. An editor then completes keys, shows their meaning and marks errors.\n\
         - `causeway {side} --check-config` prints all errors with file, line and column.\n\n\
         {TYPES}\n\
         | key | type | default | change | meaning |\n| --- | --- | --- | --- | --- |\n"
    );
    for key in keys::<C>() {
        let default = key
            .default
            .as_ref()
            .map(|value: &Value| format!("`{}`", plain_text(value)));
        let change = if restart.contains(&key.name) {
            "restart"
        } else {
            "reload"
        };
        // Writing into a String cannot fail.
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {change} | {} |",
            key.name,
            key.kind,
            default.unwrap_or_default(),
            escape_cell(&key.help)
        );
    }
    text
}

/// Returns the page of all commands with their help. Flags that are configuration keys are left out.
fn commands_page() -> String {
    let mut text = "# Commands\n\nThis page has the help of each command. `causeway gateway` and `causeway edge` also have a flag for each\n\
         [key of the gateway](gateway-configuration.md) and [of the edge](edge-configuration.md).\n"
        .to_owned();
    let mut root = Cli::command().term_width(100);
    root.build();
    describe_command(&mut text, &root, "causeway");
    text
}

fn describe_command(text: &mut String, command: &clap::Command, name: &str) {
    let mut documented = command.clone().mut_args(|arg| {
        let is_key = arg.get_help_heading() == Some("Configuration keys");
        arg.hide(is_key).hide_env_values(true)
    });
    let help = documented.render_long_help().to_string();
    let lines: Vec<_> = help.lines().map(str::trim_end).collect();
    let _ = write!(
        text,
        "\n## `{name}`\n\n```text\n{}\n```\n",
        lines.join("\n").trim_end()
    );
    for child in command.get_subcommands() {
        if !child.is_hide_set() && child.get_name() != "help" {
            describe_command(text, child, &format!("{name} {}", child.get_name()));
        }
    }
}

/// Returns the page of all reasons of [`Reason::ALL`] with their meanings.
fn errors_page() -> String {
    let mut text = "# Errors\n\nEvery failure has one of these reasons. The reason is in the body (`application/problem+json`, RFC 9457), in `Proxy-Status` (RFC 9209), in\n\
         the access record, and in the label `outcome` of `causeway_gateway_streams_total`. `causeway errors` prints the same table.\n\
         [Troubleshoot](../howto/troubleshoot.md) has the details for each reason.\n\n\
         | reason | status | gRPC | meaning | what to do |\n| --- | --- | --- | --- | --- |\n"
        .to_owned();
    for reason in Reason::ALL {
        let code = reason.word();
        let _ = writeln!(
            text,
            "| [`{code}`](../howto/troubleshoot.md#{code}) | {} | {} | {} | {} |",
            reason.status().as_u16(),
            reason.grpc_status(),
            escape_cell(reason.explanation()),
            escape_cell(reason.remedy()),
        );
    }
    text
}

/// Returns the table of error reasons for a terminal.
pub(crate) fn errors_table() -> String {
    let mut text = String::new();
    for reason in Reason::ALL {
        let (code, status) = (reason.word(), reason.status().as_u16());
        let _ = writeln!(
            text,
            "{code} ({status})\n    {}\n    Do: {}\n",
            reason.explanation(),
            reason.remedy()
        );
    }
    text.trim_end().to_owned()
}

/// Returns the page of all metrics of both processes, from their exposition.
fn metrics_page() -> String {
    let mut text = "# Metrics\n\nThis page lists the metrics of a gateway and of an edge. [Monitor](../howto/monitor.md) says which ones to watch.\n".to_owned();
    for (side, exposition) in [
        ("gateway", causeway_gateway::metrics::describe()),
        ("edge", causeway_edge::describe_metrics()),
    ] {
        let _ = write!(
            text,
            "\n## Metrics of the {side}\n\n| metric | type | meaning |\n| --- | --- | --- |\n"
        );
        for (name, kind, help) in parse_families(&exposition) {
            let _ = writeln!(text, "| `{name}` | {kind} | {} |", escape_cell(help));
        }
    }
    text
}

/// Returns name, type and help of each family of an `OpenMetrics` text.
fn parse_families(exposition: &str) -> Vec<(String, &str, &str)> {
    let comments = exposition
        .lines()
        .filter_map(|line| line.strip_prefix("# "));
    let mut rows: Vec<(String, &str, &str)> = Vec::new();
    let mut help = "";
    for line in comments {
        match line.split_once(' ') {
            Some(("HELP", rest)) => help = rest.split_once(' ').map_or("", |(_, help)| help),
            Some(("TYPE", rest)) => {
                let (name, metric_type) = rest.split_once(' ').unwrap_or((rest, ""));
                let suffix = if metric_type == "counter" {
                    "_total"
                } else {
                    ""
                };
                rows.push((format!("{name}{suffix}"), metric_type, help));
            }
            _ => {}
        }
    }
    rows.sort();
    rows
}

/// Returns the text as a cell of a Markdown table.
fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use causeway_config::ConfigError;
    use serde_json::json;

    use super::*;
    #[cfg(feature = "k8s")]
    use clap::ValueEnum;

    #[cfg(feature = "k8s")]
    fn file(page: ReferencePage) -> &'static str {
        match page {
            ReferencePage::Gateway => "gateway-configuration.md",
            ReferencePage::Edge => "edge-configuration.md",
            ReferencePage::Commands => "commands.md",
            ReferencePage::Errors => "errors.md",
            ReferencePage::Metrics => "metrics.md",
            ReferencePage::Ports => "ports.md",
        }
    }

    /// Sets the value at a key, in one entry of each list and map on the path.
    fn set(config: &mut Value, key: &str, value: Value) {
        let mut place = config;
        for step in key.split('.') {
            let (name, in_list) = step.strip_suffix("[]").map_or((step, false), |n| (n, true));
            place = &mut place[if name == "*" { "9100" } else { name }];
            if in_list {
                if place.is_null() {
                    *place = json!([{}]);
                }
                place = &mut place[0];
            }
        }
        *place = value;
    }

    /// Returns two values of a type.
    fn values(kind: &str) -> Option<[Value; 2]> {
        Some(match kind {
            "duration" => [json!("71s"), json!("72s")],
            "size" | "number" | "port" => [json!(7001), json!(7002)],
            "address" => [json!("127.0.0.1:7001"), json!("127.0.0.1:7002")],
            "IP address" => [json!("10.0.0.1"), json!("10.0.0.2")],
            "boolean" => [json!(false), json!(true)],
            "text" => [json!("a"), json!("b")],
            _ if kind.starts_with('`') => {
                let mut words = kind.split(", ").map(|word| json!(word.trim_matches('`')));
                [words.next()?, words.next()?]
            }
            _ => values(kind.strip_prefix("list of: ")?)?.map(|value| json!([value])),
        })
    }

    /// Compares two configurations that differ in one key, for each key, and returns how many keys could be set.
    fn check_restart_keys<C: ProcessConfig>(restart: &RestartKeys<C>, base: &Value) -> usize {
        let mut count = 0;
        for key in keys::<C>() {
            let Some(values) = values(&key.kind) else {
                continue;
            };
            let configs = values.map(|value| {
                let mut config = json!({});
                let parents = base.as_object().unwrap().iter();
                for (parent, content) in parents.filter(|(parent, _)| key.name.starts_with(*parent))
                {
                    set(&mut config, parent.trim_end_matches('.'), content.clone());
                }
                set(&mut config, &key.name, value);
                serde_json::from_value::<C>(config)
            });
            let [Ok(one), Ok(two)] = configs else {
                continue;
            };
            let changed = restart.changed(&one, &two);
            assert_eq!(
                restart.contains(&key.name),
                !changed.is_empty(),
                "{}: {changed:?}",
                key.name
            );
            count += 1;
        }
        count
    }

    #[test]
    fn a_reload_warns_of_each_changed_key_that_needs_a_restart() {
        let base = json!({
            "upstream_tls.*.": { "signer": "a/b" },
            "listeners[].": { "name": "l", "protocol": "https", "listen": "127.0.0.1:1" },
            "listeners[].client_auth.jwt[].": { "issuer": "https://i", "audiences": ["a"], "jwks": "/k" },
        });
        let count = check_restart_keys(&causeway_gateway::RESTART_KEYS, &base);
        assert!(count > 125, "{count}");
        let base = json!({
            "identity.": { "chain": "c", "key": "k", "ca": "a" },
            "api_cache.tls.": { "certificate": "c", "key": "k" },
            "api_cache.yurthub.": { "listen": "10.0.0.1:1", "certificate": "c", "key": "k", "ca": "a" },
        });
        let count = check_restart_keys(&causeway_edge::RESTART_KEYS, &base);
        assert!(count > 55, "{count}");
    }

    /// Words of messages that only look like keys: hosts, and a key of the gateway in a fault of the edge.
    const NO_KEYS: [&str; 5] = [
        "gateway.example",
        "nodes.example.internal",
        "printer.local",
        "example.com",
        "kubernetes.certificates.signer",
    ];

    /// Returns the words of a fault that are no keys: its path, and names in its message.
    fn unknown_names(keys: &[String], path: &str, message: &str) -> Vec<String> {
        let plain = |path: &str| {
            let named = path.split('.').filter_map(|step| step.split('[').next());
            let named = named.filter(|step| *step != "*" && step.parse::<u32>().is_err());
            format!(".{}.", named.collect::<Vec<_>>().join("."))
        };
        let keys: Vec<_> = keys.iter().map(|key| plain(key)).collect();
        let words = message.split_whitespace();
        let words = words.map(|word| word.trim_matches(|c: char| !c.is_ascii_alphanumeric()));
        let mut unknown: Vec<_> = words
            .filter(|word| {
                word.contains(['.', '_'])
                    && !word.contains(|c: char| !c.is_ascii_lowercase() && !"._".contains(c))
                    && !NO_KEYS.contains(word)
                    && !keys.iter().any(|key| key.contains(&plain(word)))
            })
            .collect();
        if !keys.iter().any(|key| key.starts_with(&plain(path))) {
            unknown.push(path);
        }
        let place = |word: &str| format!("{word} is no key: {path}: {message}");
        unknown.into_iter().map(place).collect()
    }

    fn names<C: ProcessConfig>() -> Vec<String> {
        keys::<C>().into_iter().map(|key| key.name).collect()
    }

    /// Returns the faults of configurations in which one key is empty or too large, for each key: path and message.
    fn faults_of_values<C: ProcessConfig>(parents: &Value) -> Vec<ConfigError> {
        let names = names::<C>();
        let bad = [json!(0), json!("0s"), json!(""), json!([0]), json!([""])];
        let bad = bad.into_iter().chain([json!(u32::MAX), json!("9h")]);
        let pairs = bad.flat_map(|bad| names.iter().map(move |name| (name, bad.clone())));
        let faults = pairs.flat_map(|(name, value)| {
            let mut config = parents.clone();
            set(&mut config, name, value);
            let config = serde_json::from_value::<C>(config);
            config.map(|config| config.validate()).unwrap_or_default()
        });
        faults.collect()
    }

    #[test]
    fn faults_of_configurations_name_present_keys() {
        let (gateway, edge) = (
            names::<causeway_gateway::Config>(),
            names::<causeway_edge::Config>(),
        );
        let parents =
            json!({ "listeners": [{ "name": "l", "protocol": "https", "listen": "127.0.0.1:1" }] });
        let of_gateway = faults_of_values::<causeway_gateway::Config>(&parents);
        let of_edge = faults_of_values::<causeway_edge::Config>(&json!({}));
        let counts = (of_gateway.len(), of_edge.len());
        assert!(counts.0 > 200 && counts.1 > 40, "{counts:?}");
        let mut unknown = BTreeSet::new();
        for (keys, faults) in [(&gateway, of_gateway), (&edge, of_edge)] {
            let names = |it: ConfigError| unknown_names(keys, &it.path, &it.message);
            unknown.extend(faults.into_iter().flat_map(names));
        }
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/config/invalid");
        for file in std::fs::read_dir(folder).unwrap() {
            let file = file.unwrap().path();
            let is_edge = file
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("edge");
            let text = std::fs::read_to_string(&file).unwrap();
            let is_expected = file.extension().is_some_and(|kind| kind == "expected");
            for line in text.lines().filter(|_| is_expected) {
                let mut parts = line.splitn(3, ": ").skip(1);
                let (path, message) = (parts.next().unwrap(), parts.next().unwrap());
                // The path of such a fault has a key that the user has made up.
                let made_up =
                    message.starts_with("unknown key") || message.contains("is not a port");
                let is_key = path != "not YAML" && !made_up;
                let path = if is_key { path } else { "log" };
                unknown.extend(unknown_names(
                    if is_edge { &edge } else { &gateway },
                    path,
                    message,
                ));
            }
        }
        assert!(unknown.is_empty(), "{unknown:#?}");
    }

    /// With `CAUSEWAY_TEST_BLESS` set the pages are written instead of compared.
    #[cfg(feature = "k8s")]
    #[test]
    fn reference_pages_equal_the_code() {
        let pages = ReferencePage::value_variants().iter();
        let pages = pages.map(|each| (file(*each), page(*each)));
        let documents = [
            ("rbac.md", rbac::page()),
            ("openapi-gateway.json", openapi(ConfigKind::Gateway)),
            ("openapi-edge.json", openapi(ConfigKind::Edge)),
        ];
        for (name, expected) in pages.chain(documents) {
            let path = format!("{}/docs/reference/{name}", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("CAUSEWAY_TEST_BLESS").is_some() {
                std::fs::write(&path, expected).unwrap();
                continue;
            }
            let written = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                written == expected,
                "{path} is not what the code says; run CAUSEWAY_TEST_BLESS=1 cargo test -p causeway --bin causeway reference"
            );
        }
    }

    /// Returns the names of all properties of an OpenAPI document's schemas.
    fn properties(document: &str) -> BTreeSet<String> {
        let document: Value = serde_json::from_str(document).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let named = schemas
            .values()
            .filter_map(|schema| schema["properties"].as_object());
        named.flat_map(|named| named.keys().cloned()).collect()
    }

    #[test]
    fn the_admin_page_names_each_path_and_each_field() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/admin-api.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (gateway, edge) = text.split_once("\n## Edge\n").unwrap();
        // The edge's part refers to the gateway's for resources.
        let (_, resources) = gateway.split_once("\n### API cache\n").unwrap();
        let edge = format!("{edge}{resources}");
        for (side, kind) in [(gateway, ConfigKind::Gateway), (&edge, ConfigKind::Edge)] {
            let document = openapi(kind);
            let fields = properties(&document);
            assert!(fields.len() > 20, "{fields:?}");
            for field in fields {
                let forms = ["`", "."].map(|before| format!("{before}{field}`"));
                assert!(forms.iter().any(|form| side.contains(form)), "{field}");
            }
            let document: Value = serde_json::from_str(&document).unwrap();
            for (path, item) in document["paths"].as_object().unwrap() {
                for method in item.as_object().unwrap().keys() {
                    let row = format!("| {} | `{path}` |", method.to_uppercase());
                    assert!(side.contains(&row), "{row}");
                }
            }
        }
    }

    #[test]
    fn troubleshooting_has_a_section_for_each_reason() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/howto/troubleshoot.md");
        let page = std::fs::read_to_string(path).unwrap();
        for reason in Reason::ALL {
            let heading = format!("`{}`\n", reason.word());
            assert!(page.contains(&heading), "{heading}");
        }
    }
}
