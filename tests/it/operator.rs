//! Everyday work of an operator: broken pipes and full devices, checks of configurations, variables, logs.

use crate::world::{
    app::App,
    process::{Causeway, GatewayProcess, address_after, binary, causeway, program},
    tool::{Tool, need},
};
use serde_json::Value;
use std::{fs, path::Path};

/// Runs a command line of the shell, in which `causeway` is the binary.
fn shell(line: &str, folder: &Path) -> Causeway {
    let script = format!("causeway() {{ \"$0\" \"$@\"; }}\n{line}");
    program("sh").args(["-c", &script, binary()]).within(folder)
}

/// Commands that write to standard output, in an order in which each works.
const COMMANDS: &[&str] = &[
    "--help",
    "ca init --data-dir data",
    "client certificate --name ann --data-dir data --out .",
    "bootstrap --node edge-9 --data-dir data --out out",
    "token create --node edge-1 --data-dir data",
    "token list --data-dir data",
    "token list --data-dir data -o json",
    "node add edge-2 --data-dir data",
    "node pins --data-dir data",
    "client token --name ann --file clients",
    "config schema gateway",
    "reference edge",
    "completions bash",
    "k8s ca-bundle --data-dir data",
    "policy check --policy policy.yaml --as ann GET https://edge-1:9100/",
    "policy test --policy policy.yaml table.yaml",
    "gateway --data-dir data --check-config",
    "edge --gateway gw.example:10262 --check-config",
];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("policy.yaml", "rules: [{ then: allow }]\n");
    let table = "expect: [{ as: ann, method: GET, url: \"https://edge-1:9100/\", then: allow }]\n";
    write("table.yaml", table);
    folder
}

#[tokio::test]
async fn no_command_panics_with_a_closed_pipe_or_full_device() {
    let folder = folder();
    for line in COMMANDS {
        let gone = shell(
            &format!("{{ causeway {line}; echo code=$? >&2; }} | true"),
            folder.path(),
        );
        let log_text = gone.run().await.stderr;
        assert!(
            !log_text.contains("panic") && log_text.contains("code="),
            "{line}: {log_text}"
        );
        let full = shell(&format!("causeway {line} >/dev/full"), folder.path())
            .run()
            .await;
        assert!(!full.stderr.contains("panic"), "{line}: {}", full.stderr);
        assert_ne!(full.code, Some(101), "{line}");
        // Error messages have no other destination.
        let both = shell(&format!("causeway {line} >/dev/full 2>&1"), folder.path())
            .run()
            .await;
        assert!(
            matches!(both.code, Some(1 | 2 | 78)),
            "{line}: {:?}",
            both.code
        );
    }
}

#[tokio::test]
async fn a_closed_pipe_is_no_failure_and_a_full_device_is_reported() {
    let folder = folder();
    let line = "causeway reference gateway";
    let gone = format!("{{ {line}; echo code=$? >&2; }} | true");
    assert_eq!(shell(&gone, folder.path()).run().await.stderr, "code=0\n");
    let full = shell(&format!("{line} >/dev/full"), folder.path())
        .run()
        .await;
    full.failed(&["cannot write to standard output", "No space left on device"]);
    let table = shell("causeway completions zsh >/dev/full", folder.path())
        .run()
        .await;
    table.failed(&["cannot write to standard output"]);
}

#[tokio::test]
async fn a_gateway_with_an_unwritable_log_serves_and_counts_it() {
    need!("curl");
    let app = App::saying("served").await;
    let site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", app.port()).await;
    let script = "exec \"$0\" \"$@\" 2>/dev/full";
    let second = program("sh").args(["-c", script, binary()]);
    let second = second.args(
        "gateway --tunnel-listen 127.0.0.1:0 --listeners [] --admin-listen 127.0.0.1:0".split(' '),
    );
    let data = site.path("second");
    causeway("ca init")
        .flag("--data-dir", &data)
        .run()
        .await
        .ok();
    let gateway = second.flag("--data-dir", &data).start();
    crate::world::until("its log lacks lines", async || {
        let Ok(admin) = fs::read_to_string(data.join("run-admin")) else {
            return false;
        };
        let metrics = crate::world::admin::get(admin.trim(), "/metrics").await;
        let line = "causeway_log_lines_dropped_total{log=\"stderr\"} ";
        let dropped = metrics.lines().find_map(|found| found.strip_prefix(line));
        dropped.is_some_and(|lines| lines != "0")
    })
    .await;
    gateway.stop().await.ok();
}

#[tokio::test]
async fn journal_lines_have_a_priority_and_no_timestamp() {
    let folder = tempfile::tempdir().unwrap();
    let journal = "touch log; export JOURNAL_STREAM=$(stat -c %d:%i log)";
    // The program warns of a variable that it does not read.
    let run = |redirected: &str| {
        let line =
            format!("{journal}; CAUSEWAY_NOTHING=1 causeway gateway --data-dir none {redirected}");
        shell(&line, folder.path()).run()
    };
    run("2>log").await.with_code(78);
    let log_text = fs::read_to_string(folder.path().join("log")).unwrap();
    let lines: Vec<&str> = log_text.lines().collect();
    let [warning, .., error] = *lines.as_slice() else {
        panic!("{log_text}");
    };
    let warned = warning.starts_with("<4> WARN ") && warning.contains("CAUSEWAY_NOTHING");
    assert!(warned && error.starts_with("<3>causeway: "), "{log_text}");
    // Output that is redirected does not go to the journal.
    let log_text = run("").await.with_code(78).stderr;
    assert!(
        !log_text.contains("<4>") && !log_text.contains("<3>"),
        "{log_text}"
    );
}

async fn refused(line: &str, folder: &Path, words: &[&str]) {
    let log_text = causeway(line).within(folder).run().await;
    assert!(
        matches!(log_text.code, Some(1 | 2 | 78)),
        "{line}: {log_text:?}"
    );
    assert_eq!(log_text.stdout, "", "{line}");
    for word in words {
        assert!(
            log_text.stderr.contains(word),
            "{line}: {}",
            log_text.stderr
        );
    }
}

#[tokio::test]
async fn check_config_refuses_unusable_configurations() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("empty.pem", "");
    let listener =
        "listeners: [{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100, ";
    for (name, text) in [
        (
            "certificate",
            format!("{listener}certificate: {{ chain: empty.pem, key: empty.pem }} }}]"),
        ),
        (
            "client_ca",
            format!("{listener}client_auth: {{ client_ca: [empty.pem] }} }}]"),
        ),
        (
            "app",
            "upstream_tls: { 10250: { ca: empty.pem } }".to_owned(),
        ),
        (
            "identity",
            "tunnel: { identity: { chain: empty.pem, key: empty.pem, client_ca: [empty.pem] } }"
                .to_owned(),
        ),
    ] {
        write(&format!("{name}.yaml"), &text);
        let line = format!("gateway --config {name}.yaml --check-config");
        refused(&line, folder.path(), &["empty.pem"]).await;
    }
    let edge = "edge --check-config --data-dir data --gateway gw.example:10262";
    write(
        "port.yaml",
        "ports: { 10250: { scheme: https, ca: empty.pem } }",
    );
    refused(
        &format!("{edge} --config port.yaml"),
        folder.path(),
        &["empty.pem"],
    )
    .await;
    write(
        "who.yaml",
        "identity: { chain: empty.pem, key: empty.pem, ca: empty.pem }",
    );
    refused(
        &format!("{edge} --config who.yaml"),
        folder.path(),
        &["empty.pem"],
    )
    .await;
    let alone = causeway("edge --check-config --data-dir data").within(folder.path());
    let told = alone.run().await.ok().stderr;
    assert!(told.contains("no gateway is configured"), "{told}");
    let named = causeway(edge).within(folder.path()).run().await.ok();
    assert_eq!(named.stderr, "");
}

#[tokio::test]
async fn a_log_filter_that_would_silence_the_log_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let edge = "edge --check-config --data-dir data --gateway gw.example:10262";
    for filter in ["verbos", "info,verbos", "causeway=loud"] {
        for side in ["gateway --check-config", "gateway", edge] {
            let line = format!("{side} --log-filter {filter}");
            refused(
                &line,
                folder.path(),
                &["log.filter", filter, "such as info"],
            )
            .await;
        }
    }
    let log_text = causeway(edge).env("RUST_LOG", "verbos").run().await;
    log_text.failed(&["RUST_LOG", "verbos"]);
}

#[tokio::test]
async fn a_policy_is_not_asked_about_a_request_without_a_scheme() {
    let folder = folder();
    let line = "policy check --policy policy.yaml --as ann GET edge-1:9100";
    let log_text = causeway(line)
        .within(folder.path())
        .run()
        .await
        .with_code(2);
    assert_eq!(log_text.stdout, "");
    assert!(
        log_text
            .stderr
            .contains("write https://edge-1:10250/metrics"),
        "{}",
        log_text.stderr
    );
}

#[tokio::test]
async fn unused_variables_cause_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let run = |line: &str| causeway(line).within(folder.path());
    let near = "CAUSEWAY_DATADIR is unknown and has no effect; did you mean CAUSEWAY_DATA_DIR?";
    for line in [
        "token list",
        "gateway --check-config",
        "gateway",
        "edge --check-config",
    ] {
        let log_text = run(line).env("CAUSEWAY_DATADIR", "x").run().await.stderr;
        assert!(log_text.contains(near), "{line}: {log_text}");
    }
    // A gateway has no key of this name.
    let log_text = run("gateway --check-config").env("CAUSEWAY_GATEWAYS", "a:1");
    let log_text = log_text.run().await.ok().stderr;
    assert!(
        log_text.contains("CAUSEWAY_GATEWAYS is unknown"),
        "{log_text}"
    );
    for known in ["CAUSEWAY_LOG_FORMAT", "CAUSEWAY_DATA_DIR"] {
        let log_text = run("gateway --check-config").env(known, "json").run().await;
        assert_eq!(log_text.ok().stderr, "");
    }
}

#[tokio::test]
async fn fatal_errors_are_json_if_the_log_is_json() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("faults.yaml"),
        "log: { format: json }\nworkers: no\nfronts: []\n",
    )
    .unwrap();
    for (line, code, messages) in [
        (
            "gateway --data-dir none",
            78,
            vec!["causeway ca init --data-dir none"],
        ),
        (
            "edge --data-dir edge --gateway 127.0.0.1:9",
            78,
            vec!["token"],
        ),
        (
            "gateway --config faults.yaml",
            2,
            vec!["faults.yaml:2:10: workers", "faults.yaml:3:1: fronts"],
        ),
    ] {
        let run = causeway(line)
            .env("CAUSEWAY_LOG_FORMAT", "json")
            .within(folder.path());
        let log_text = run.run().await.with_code(code).stderr;
        let lines: Vec<Value> = log_text
            .lines()
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {log_text}"))
            })
            .collect();
        let errors = lines.iter().filter(|line| line["level"] == "ERROR");
        let errors: Vec<&str> = errors
            .map(|line| line["message"].as_str().unwrap())
            .collect();
        assert_eq!(errors.len(), messages.len(), "{log_text}");
        for (error, message) in errors.iter().zip(messages) {
            assert!(error.contains(message), "{log_text}");
        }
        assert!(
            lines.iter().all(|line| line["timestamp"].is_string()),
            "{log_text}"
        );
    }
    // This format is for people.
    let check = causeway("gateway --config faults.yaml --check-config");
    let log_text = check.within(folder.path()).run().await.with_code(2).stderr;
    assert!(log_text.starts_with("faults.yaml:2:10: "), "{log_text}");
}

#[tokio::test]
async fn status_on_a_node_shows_its_tunnels() {
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let admin = address_after(
        edge.written()
            .line(|line| line.contains("edge is running"))
            .unwrap(),
        "admin=",
    );
    for ask in [
        causeway("status").flag("--data-dir", site.edge_data("edge-1")),
        causeway("status").flag("--admin", &admin),
    ] {
        let log_text = ask.run().await.ok().stdout;
        assert!(
            log_text.starts_with("edge-1 is connected (version "),
            "{log_text}"
        );
        assert!(
            log_text.contains("GATEWAY") && log_text.contains("active"),
            "{log_text}"
        );
        assert!(log_text.contains("certificate: until "), "{log_text}");
    }
    let json = causeway("status -o json").flag("--admin", &admin);
    let json: Value = serde_json::from_str(&json.run().await.ok().stdout).unwrap();
    assert_eq!(json["node"], "edge-1");
}

#[tokio::test]
async fn build_and_process_metrics_use_the_requested_format() {
    need!("curl");
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let admin = address_after(
        edge.written()
            .line(|line| line.contains("edge is running"))
            .unwrap(),
        "admin=",
    );
    for admin in [&site.admin, &admin] {
        let url = format!("http://{admin}/metrics");
        let scrape = |accept: &str| {
            let field = format!("accept: {accept}");
            let curl = Tool::curl().args(["-H", &field, "-w", "%{content_type}", &url]);
            async { curl.run().await.ok().text() }
        };
        let text = scrape("text/plain;version=0.0.4").await;
        assert!(
            text.ends_with("text/plain; version=0.0.4; charset=utf-8"),
            "{text}"
        );
        for line in [
            "# TYPE process_cpu_seconds_total counter\n",
            "# TYPE process_resident_memory_bytes gauge\n",
            "# TYPE process_open_fds gauge\n",
            "# TYPE process_start_time_seconds gauge\n",
            concat!(
                "causeway_build_info{version=\"",
                env!("CARGO_PKG_VERSION"),
                "\"} 1\n"
            ),
        ] {
            assert!(text.contains(line), "{line} {text}");
        }
        assert!(!text.contains("# EOF"), "{text}");
        let text = scrape("*/*").await;
        assert!(text.contains("# TYPE process_cpu_seconds counter\n") && text.contains("# EOF\n"));
    }
}

#[tokio::test]
async fn a_second_gateway_needs_only_the_ca_and_the_ticket_secret() {
    let folder = tempfile::tempdir().unwrap();
    causeway("ca init --data-dir first")
        .within(folder.path())
        .run()
        .await
        .ok();
    let place = |name: &str| folder.path().join(name);
    fs::create_dir(place("second")).unwrap();
    fs::copy(place("first/ca.json"), place("second/ca.json")).unwrap();
    let line = "gateway --data-dir second --tunnel-listen 127.0.0.1:0 --listeners [] --admin-listen 127.0.0.1:0";
    let mut gateway = causeway(line).within(folder.path()).start();
    gateway.wait_for_line("gateway ready").await;
    gateway.stop().await.ok();
    causeway("token create --node edge-1 --data-dir second")
        .within(folder.path())
        .run()
        .await
        .ok();
}

/// All examples are applied to one cluster: objects of the same name must be equal.
#[test]
fn no_example_takes_rights_of_another_away() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found = std::collections::BTreeMap::new();
    for folder in fs::read_dir(examples).unwrap() {
        let file = folder.unwrap().path().join("rbac.yaml");
        let Ok(text) = fs::read_to_string(&file) else {
            continue;
        };
        for object in text.split("\n---\n") {
            let lines: Vec<&str> = object
                .lines()
                .map(|line| line.split(" #").next().unwrap_or(line).trim_end())
                .filter(|line| !line.trim_start().starts_with('#'))
                .collect();
            let kind = lines.iter().find(|line| line.starts_with("kind: "));
            let at = lines.iter().position(|line| line.starts_with("metadata:"));
            // A name in braces, or on the lines that follow.
            let name: Vec<&str> =
                at.map_or_else(Vec::new, |at| lines[at..].iter().take(3).copied().collect());
            let name = name.join(" ");
            let name = name.split("name: ").nth(1).unwrap_or_default();
            let name = name.split([',', ' ', '}']).next().unwrap_or_default();
            let key = format!("{} {name}", kind.unwrap_or(&""));
            let text = lines.join("\n").trim().to_owned();
            let (first, before) = found
                .entry(key.clone())
                .or_insert((file.clone(), text.clone()));
            assert_eq!(
                *before,
                text,
                "{key} of {} and {}",
                first.display(),
                file.display()
            );
        }
    }
    assert!(found.contains_key("kind: ClusterRole causeway-gateway-dns"));
}

/// The user pastes the block into a shell and keeps the shell's settings.
#[test]
fn commands_of_the_readme_leave_the_readers_shell_as_it_is() {
    let tutorial = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/tutorials/cluster.md");
    let tutorial = fs::read_to_string(tutorial).unwrap();
    assert!(tutorial.contains("config use-context"), "{tutorial}");
    for word in ["export KUBECONFIG", "unset KUBECONFIG"] {
        assert!(!tutorial.contains(word), "{word}");
    }
}

/// A configuration may ask for a gateway without a policy. A gateway must not lose its policy.
#[tokio::test]
async fn no_policy_at_start_is_information_and_at_a_reload_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    fs::write(&policy, "rules: [{ then: allow }]\n").unwrap();
    let mut site = GatewayProcess::start().await;
    let line = site.gateway.wait_for_line("no policy").await;
    assert!(line.contains("INFO"), "{line}");
    let config = site.path("gateway.yaml");
    let without = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{without}policy: {}\n", policy.display())).unwrap();
    site.gateway.wait_for_line("policy: 1 rule from").await;
    fs::write(&config, without).unwrap();
    let warned = |line: &str| line.contains("no policy") && line.contains("WARN");
    site.gateway.line("a warning", warned).await;
}

/// As in an edge's pod, whose image also has a gateway's directory, of another user.
#[tokio::test]
async fn another_users_default_directory_hides_no_running_process() {
    need!("unshare", "setpriv");
    let app = App::saying("well").await;
    let usual = "mount -t tmpfs tmpfs /var/lib && \
        \"$0\" ca init --data-dir /var/lib/causeway-edge >/dev/null && \
        echo \"$1\" >/var/lib/causeway-edge/run-admin && \
        install -d -m 700 -o 65532 /var/lib/causeway && \
        exec setpriv --bounding-set=-dac_override,-dac_read_search \"$0\" health";
    let health = program("unshare").args(["-m", "sh", "-c", usual, binary()]);
    let log_text = health.args([app.address().to_string()]).run().await.ok();
    assert_eq!(log_text.stdout, "well\n");
    assert!(
        log_text.stderr.contains("/var/lib/causeway")
            && log_text.stderr.contains("ermission denied"),
        "{}",
        log_text.stderr
    );
}
