use std::path::{Path as FilePath, PathBuf};

use causeway_edge::config::Config as Edge;
use causeway_gateway::config::{AccessLog, Config as Gateway, ListenerProtocol};

use super::*;

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let root = FilePath::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/config")
        .join(folder);
    let entries = std::fs::read_dir(&root).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files
        .filter(|file| file.extension().is_some_and(|end| end == "yaml"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", root.display());
    files
}

/// Returns the faults of a file and of the files that it names, one per line. The first word of the file's name is the
/// process that reads it.
fn verdict(file: &FilePath) -> String {
    let sources = ConfigSources {
        file: Some(file.to_owned()),
        ..ConfigSources::default()
    };
    let name = file.file_name().unwrap().to_str().unwrap();
    let outcome = match name.split_once('-').unwrap().0 {
        "gateway" => load_with_files::<Gateway>(&sources).map(drop),
        "edge" => load_with_files::<Edge>(&sources).map(drop),
        other => panic!("{other} is no side"),
    };
    let text = outcome
        .err()
        .map_or(String::new(), |refused| format!("{refused}\n"));
    text.replace(&file.display().to_string(), name)
}

fn gateway(
    text: &str,
    environment: &[(&str, &str)],
    flags: &[(&str, &[&str])],
) -> Result<Gateway, RejectedConfig> {
    read(text, environment, flags)
}

fn read<C: ProcessConfig>(
    text: &str,
    environment: &[(&str, &str)],
    flags: &[(&str, &[&str])],
) -> Result<C, RejectedConfig> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    load(&ConfigSources {
        file: Some(file.path().to_owned()),
        environment: environment
            .iter()
            .map(|(name, text)| ((*name).into(), (*text).into()))
            .collect(),
        flags: flags
            .iter()
            .map(|(name, texts)| {
                (
                    (*name).into(),
                    texts.iter().map(|text| (*text).into()).collect(),
                )
            })
            .collect(),
        fallbacks: &[("proxy", "HTTPS_PROXY"), ("no_proxy", "NO_PROXY")],
    })
}

#[test]
fn a_valid_file_has_no_fault() {
    for file in fixtures("valid") {
        assert_eq!(verdict(&file), "", "{}", file.display());
    }
}

/// With `CAUSEWAY_TEST_BLESS` set the expected messages are written instead of compared.
#[test]
fn an_invalid_file_gets_all_its_messages() {
    for file in fixtures("invalid") {
        let beside = file.with_extension("expected");
        let verdict = verdict(&file);
        assert_ne!(verdict, "", "{}", file.display());
        if std::env::var_os("CAUSEWAY_TEST_BLESS").is_some() {
            std::fs::write(&beside, &verdict).unwrap();
        }
        let expected = std::fs::read_to_string(&beside).unwrap();
        assert_eq!(verdict, expected, "{}", file.display());
    }
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let text = "workers: 1\nadmin: { listen: '127.0.0.1:1' }\naccess_log: none\n";
    let environment = [
        ("CAUSEWAY_WORKERS", "2"),
        ("CAUSEWAY_ADMIN_LISTEN", "127.0.0.1:2"),
        ("CAUSEWAY_DATA_DIR", ""),
    ];
    let config = gateway(text, &environment, &[("workers", &["3"])]).unwrap();
    assert_eq!(config.workers, 3);
    assert_eq!(config.admin.listen.port(), 2);
    assert_eq!(config.access_log, AccessLog::None);
    assert_eq!(config.data_dir, Gateway::default().data_dir);
}

#[test]
fn where_to_listen_may_be_a_variables_word() {
    let text =
        "listeners: [{ name: a, protocol: http, listen: '$(POD_IP):10255', anonymous: true }]";
    let config = gateway(text, &[("POD_IP", "10.244.1.7")], &[]).unwrap();
    assert_eq!(config.listeners[0].listen.to_string(), "10.244.1.7:10255");
    let admin = [("CAUSEWAY_ADMIN_LISTEN", "$(POD_IP):1"), ("POD_IP", "::1")];
    let config = gateway("", &admin, &[]).unwrap();
    assert_eq!(config.admin.listen.to_string(), "[::1]:1");
    let refused = gateway(text, &[], &[]).unwrap_err().to_string();
    assert!(
        refused.contains(":1:48: listeners[0].listen: the environment variable POD_IP is not set"),
        "{refused}"
    );
    assert_eq!(refused.lines().count(), 1, "{refused}");
    // In other places it is ordinary text.
    let name = "node: '$(POD_IP)'";
    let refused = read::<Edge>(name, &[("POD_IP", "edge-1")], &[]).unwrap_err();
    assert!(refused.to_string().contains("$(POD_IP)"), "{refused}");
}

#[test]
fn lists_and_structures_can_be_given_as_text() {
    let listeners = "[{ name: a, protocol: http, listen: 'unix:/run/a' }]";
    let config = gateway(
        "tunnel: { advertise: ['old:1'] }",
        &[("CAUSEWAY_TUNNEL_GATEWAYS", "a:1, b:2")],
        &[
            ("tunnel.advertise", &["c:3", "d:4,e:5"]),
            ("listeners", &[listeners]),
        ],
    );
    let config = config.unwrap();
    assert_eq!(config.tunnel.gateways, ["a:1", "b:2"]);
    assert_eq!(config.tunnel.advertise, ["c:3", "d:4", "e:5"]);
    assert_eq!(config.listeners[0].protocol, ListenerProtocol::Http);
}

#[test]
fn a_fault_names_the_flag_or_the_variable_that_it_came_from() {
    let refused = gateway(
        "workers: x\n",
        &[("CAUSEWAY_TUNNEL_PING_AFTER", "5")],
        &[
            ("admin.listen", &["nowhere"]),
            (
                "listeners",
                &["[{ name: a, protocol: htp, listen: '127.0.0.1:0' }]"],
            ),
        ],
    );
    let lines = refused.unwrap_err().faults;
    assert_eq!(lines.len(), 4, "{lines:#?}");
    assert!(
        lines[0].contains(":1:10: workers: must be a whole number"),
        "{lines:#?}"
    );
    assert!(
        lines[1].starts_with("environment CAUSEWAY_TUNNEL_PING_AFTER: tunnel.ping_after: "),
        "{lines:#?}"
    );
    assert!(
        lines[2].starts_with("flag --admin-listen: admin.listen: ") && lines[2].contains("IP:PORT"),
        "{lines:#?}"
    );
    assert!(
        lines[3].starts_with("flag --listeners: listeners[0].protocol: ")
            && lines[3].contains("\"http\"?"),
        "{lines:#?}"
    );
}

#[test]
fn a_missing_file_is_one_clear_fault() {
    let file = Some(PathBuf::from("/nowhere/gateway.yaml"));
    let refused = load::<Gateway>(&ConfigSources {
        file,
        ..ConfigSources::default()
    })
    .unwrap_err();
    assert_eq!(
        refused.faults,
        ["/nowhere/gateway.yaml: cannot be read: No such file or directory (os error 2)"]
    );
}

#[test]
fn common_proxy_variables_apply_without_explicit_configuration() {
    let environment = [
        ("HTTPS_PROXY", "http://one:1"),
        ("NO_PROXY", "localhost,.example"),
    ];
    let edge: Edge = read("", &environment, &[]).unwrap();
    assert_eq!(edge.proxy.unwrap().expose(), "http://one:1");
    assert_eq!(edge.no_proxy, ["localhost", ".example"]);
    let edge: Edge = read("proxy: 'socks5://two:2'", &environment, &[]).unwrap();
    assert_eq!(edge.proxy.unwrap().expose(), "socks5://two:2");
}

#[test]
fn no_text_makes_the_reader_panic() {
    for file in fixtures("valid").into_iter().chain(fixtures("invalid")) {
        let text = std::fs::read_to_string(file).unwrap();
        for (end, _) in text.char_indices().step_by(23) {
            let (_, _) = (
                read::<Gateway>(&text[..end], &[], &[]),
                read::<Edge>(&text[end..], &[], &[]),
            );
        }
    }
}

#[test]
fn a_secret_is_in_no_message() {
    let environment = [("HTTPS_PROXY", "ftp://user:hunter2@proxy")];
    let refused = read::<Edge>("", &environment, &[]).unwrap_err();
    assert!(
        refused.faults[0].starts_with("environment HTTPS_PROXY: proxy: "),
        "{refused}"
    );
    assert!(!refused.to_string().contains("hunter2"), "{refused}");
}

#[test]
fn empty_sections_and_bare_ports_are_defaults() {
    assert_eq!(
        gateway("tunnel:\nlimits:\n", &[], &[]).unwrap(),
        Gateway::default()
    );
    let edge: Edge = read("ports:\n  9100:\n", &[], &[]).unwrap();
    assert_eq!(edge.ports[&9100].target(9100), "127.0.0.1:9100");
}
