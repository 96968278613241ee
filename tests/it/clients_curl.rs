//! curl and netcat through every kind of listener: everything that works directly at an app must work through the gateway.

use crate::{
    testbed::{TestBed, URL},
    world::{
        GATEWAY_NAME, World,
        app::{App, PauseGate, Script, answer},
        client::read_to_end,
        gateway::listener,
        process::{GatewayProcess, binary},
        tool::{Tool, full, need},
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::ListenerProtocol;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{io::AsyncWriteExt, net::TcpListener};

/// Time limit of a transfer in the long run, for a slow machine.
const TRANSFER: Duration = Duration::from_mins(30);

#[tokio::test]
async fn clients_of_http_1_and_2_reach_the_app() {
    need!("curl");
    let app = App::saying("hello").await;
    let testbed = TestBed::to(&app).await;
    for (flag, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let output = testbed.curl([flag, "-w", " %{http_version} %{http_code}", URL]);
        assert_eq!(
            output.run().await.ok().text(),
            format!("hello {version} 200")
        );
    }
}

#[tokio::test]
async fn a_listener_without_tls_speaks_http_1_and_2() {
    need!("curl");
    let app = App::saying("hello").await;
    let testbed = TestBed::to(&app).await;
    let to = format!("::{}", testbed.listener("plain"));
    for (flag, version) in [("--http1.1", "1.1"), ("--http2-prior-knowledge", "2")] {
        let curl = Tool::curl().args([flag, "--connect-to", &to, "-w", " %{http_version}"]);
        let output = curl.args(["http://edge-1:9100/"]).run().await.ok();
        assert_eq!(output.text(), format!("hello {version}"));
    }
}

#[tokio::test]
async fn a_large_upload_waits_for_the_apps_100_continue() {
    need!("curl");
    let app = App::http(|_| answer::after_continue("taken")).await;
    let testbed = TestBed::to(&app).await;
    let file = file(&testbed, 1 << 20);
    let curl = testbed.curl(["--http1.1", "-v", "--expect100-timeout", "120", "-T"]);
    let output = curl
        .args([&file])
        .args(["-H", "Expect: 100-continue", URL])
        .run()
        .await
        .ok();
    assert_eq!(output.text(), "taken");
    assert!(
        output.stderr.contains("HTTP/1.1 100 Continue"),
        "{output:?}"
    );
    let head = app.head().await;
    assert_eq!(head.value("expect").as_deref(), Some("100-continue"));
    assert_eq!(app.body().await.len(), 1 << 20);
}

#[tokio::test]
async fn an_early_refusal_spares_the_client_the_upload() {
    need!("curl");
    for refusal in ["401 Unauthorized", "413 Content Too Large"] {
        let answer = format!("HTTP/1.1 {refusal}\r\nContent-Length: 2\r\n\r\nno");
        let app = App::http(move |_| Script::new().write(answer.clone())).await;
        let testbed = TestBed::to(&app).await;
        let file = file(&testbed, 1 << 20);
        let curl = testbed.curl(["--http1.1", "-v", "--expect100-timeout", "120", "-T"]);
        let output = curl
            .args([&file])
            .args(["-H", "Expect: 100-continue"])
            .args(["-w", " %{http_code} %{size_upload}", URL])
            .run()
            .await
            .ok();
        let status = &refusal[..3];
        assert_eq!(output.text(), format!("no {status} 0"), "{}", output.stderr);
        assert!(!output.stderr.contains("100 Continue"), "{}", output.stderr);
    }
}

#[tokio::test]
async fn a_head_request_gets_a_length_without_body_and_keeps_alive() {
    need!("curl");
    let app = App::http(|_| answer::to_head(12_345)).await;
    let testbed = TestBed::to(&app).await;
    for flag in ["--http1.1", "--http2"] {
        let curl = testbed.curl([flag, "-I", "-w", "opened %{num_connects}\n", URL, URL]);
        let output = curl.run().await.ok().text().to_lowercase();
        assert_eq!(
            output.matches("content-length: 12345").count(),
            2,
            "{output}"
        );
        assert!(
            output.contains("opened 1") && output.contains("opened 0"),
            "{output}"
        );
    }
    assert_eq!(app.connections(), 1);
}

#[tokio::test]
async fn large_bodies_pass_whole_both_ways_and_leave_memory_flat() {
    need!("curl", "python:http.server", "sha256sum");
    let full = full();
    let mut app = Tool::python("bulk_server.py").start();
    let port = app.json().await["port"].as_u64().unwrap();
    let site = GatewayProcess::start().await;
    let _edge = site.join("edge-1", port.try_into().unwrap()).await;
    let file = site.path("body");
    let before = peaks(&site.path(""));
    assert_eq!(before.len(), 2, "a gateway and an edge: {before:?}");

    let long: [u64; 2] = [10 << 30, 1 << 30];
    let sizes = if full { long } else { [64 << 20; 2] };
    for (flag, bytes) in ["--http1.1", "--http2"].into_iter().zip(sizes) {
        let down = site.curl("edge-1", &bytes.to_string()).within(TRANSFER);
        down.args([flag, "-o"]).args([&file]).run().await.ok();
        let sent = app.json().await;
        let sum = Tool::new("sha256sum").args([&file]).within(TRANSFER);
        let sum = sum.run().await.ok().text();
        assert_eq!(sum[..64], sent["sha256"], "{flag} down");
        let up = site.curl("edge-1", "").within(TRANSFER);
        let up = up.args([flag, "-T"]).args([&file]).run().await.ok();
        assert_eq!(up.text(), sum[..64], "{flag} up");
    }
    if !full {
        return;
    }
    // Windows of 4 MiB at each end, without socket buffers: far from the 64 MiB of one body, and no more for 10 GiB.
    for ((process, before), (_, after)) in before.iter().zip(peaks(&site.path(""))) {
        let grown = after - before;
        assert!(grown < 32 << 10, "process {process} grew by {grown} KiB");
    }
}

#[tokio::test]
async fn an_event_arrives_before_the_next_one_is_made() {
    need!("curl");
    let gate = PauseGate::new();
    let script = gate.clone();
    let events = ["data: one\n\n", "data: two\n\n"];
    let app = App::http(move |_| answer::parts("text/event-stream", &events, &script)).await;
    let testbed = TestBed::to(&app).await;
    for flag in ["--http1.1", "--http2"] {
        let mut curl = testbed.curl([flag, "-N", URL]).start();
        for event in ["data: one", "data: two"] {
            gate.open();
            assert_eq!(curl.line().await, event);
            assert_eq!(curl.line().await, "");
        }
        gate.open();
        curl.finish().await.ok();
    }
}

#[tokio::test]
async fn clients_share_kept_connections_to_the_app() {
    need!("curl");
    let app = App::saying("hello").await;
    let testbed = TestBed::to(&app).await;
    for flag in ["--http1.1", "--http2"] {
        testbed.curl([flag, URL, URL, URL]).run().await.ok();
    }
    testbed.client().get(URL).await;
    assert_eq!((app.requests(), app.connections()), (7, 1));
}

#[tokio::test]
async fn netcat_talks_through_a_tcp_listener() {
    need!("nc");
    let app = App::tcp(Script::new().echo()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let message = answer::pattern(3 << 20);
    let output = nc(&testbed).input(message.clone()).run().await.ok();
    assert!(
        output.stdout == message,
        "{} bytes came",
        output.stdout.len()
    );
}

#[tokio::test]
async fn an_app_that_speaks_first_is_heard_through_a_tcp_listener() {
    need!("nc");
    let app = App::tcp(Script::new().write("220 ready\r\n").echo()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let mut nc = nc(&testbed).start();
    assert_eq!(nc.line().await, "220 ready");
    nc.send("QUIT\n").await;
    assert_eq!(nc.line().await, "QUIT");
    nc.finish().await.ok();
}

#[tokio::test]
async fn a_clients_half_close_leaves_the_other_half_open() {
    need!("nc");
    let script = Script::new().read_to_end().write("and this is the answer");
    let app = App::tcp(script).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let output = nc(&testbed).input("a question").run().await.ok();
    assert_eq!(output.text(), "and this is the answer");
    assert_eq!(app.body().await, b"a question");

    let mut wire = testbed.connect("edge-1:9100").await;
    wire.write_all(b"another").await.unwrap();
    wire.shutdown().await.unwrap();
    let rest = read_to_end(&mut wire).await.unwrap();
    assert_eq!(rest, b"and this is the answer");
    assert_eq!(app.body().await, b"another");
}

#[tokio::test]
async fn an_apps_half_close_leaves_the_other_half_open() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let testbed = TestBed::to_as(Protocol::Tcp, listener.local_addr().unwrap()).await;
    for connects in [false, true] {
        let mut wire = testbed.session(connects).await;
        let mut app = listener.accept().await.unwrap().0;
        app.write_all(b"all that I have to say").await.unwrap();
        app.shutdown().await.unwrap();
        let heard = read_to_end(&mut wire).await.unwrap();
        assert_eq!(heard, b"all that I have to say");
        wire.write_all(b"now I").await.unwrap();
        wire.shutdown().await.unwrap();
        assert_eq!(read_to_end(&mut app).await.unwrap(), b"now I");
    }
}

#[tokio::test]
async fn netcat_connects_over_a_unix_socket() {
    need!("nc");
    let app = App::tcp(Script::new().read_to_end().write("answered")).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let head = "CONNECT edge-1:9100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let nc = Tool::nc().args(["-U".as_ref(), testbed.socket().as_os_str()]);
    let output = nc.input(format!("{head}asked")).run().await.ok().text();
    let (head, bytes) = output.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(!head.to_lowercase().contains("content-length"), "{head}");
    assert_eq!(
        (bytes, app.body().await.as_slice()),
        ("answered", &b"asked"[..])
    );
}

#[tokio::test]
async fn curl_proxies_through_a_connect_listener_with_a_certificate() {
    need!("curl");
    let app = App::saying("hello").await;
    let build = TestBed::build().listener(listener("connect", ListenerProtocol::Connect));
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let proxied = |certificate: bool| {
        let proxy = format!("{GATEWAY_NAME}:{}", testbed.listener("connect").port());
        let curl = Tool::curl()
            .args(["-p", "--proxy", &format!("https://{proxy}")])
            .args(["--resolve", &format!("{proxy}:127.0.0.1")])
            .args(["--proxy-cacert".into(), testbed.root_path()])
            .args(["-w", " %{http_connect}", "http://edge-1:9100/"]);
        if certificate {
            curl.args(["--proxy-cert".into(), pair(&testbed)])
        } else {
            curl
        }
    };
    let output = proxied(true).run().await.ok();
    assert_eq!(output.text(), "hello 200");
    let refused = proxied(false).run().await;
    assert!(!refused.status.success());
    assert!(refused.text().ends_with(" 407"), "{refused:?}");
    assert_eq!(app.requests(), 1);
}

/// As kube-apiserver does: TLS to the proxy, and inside it TLS to the target.
#[tokio::test]
async fn tls_inside_a_connect_is_between_the_client_and_the_target() {
    need!("curl");
    let app = App::saying("hello").await;
    let world = World::build()
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let inner = world.listener("https");
    let edge = world.edge("edge-1").port_as(443, Protocol::Tcp, inner);
    let _edge = edge.port(9100, app.address()).join().await;
    let proxy = format!("{GATEWAY_NAME}:{}", world.listener("connect").port());
    let certificate = pair(&world);
    let output = Tool::curl()
        .args(["-p", "--proxy", &format!("https://{proxy}")])
        .args(["--resolve", &format!("{proxy}:127.0.0.1")])
        .args(["--proxy-cacert".into(), world.root_path()])
        .args(["--cacert".into(), world.root_path()])
        .args(["--proxy-cert".into(), certificate.clone()])
        .args(["--cert".into(), certificate])
        .args(["-H", "Host: edge-1:9100", "https://edge-1/"])
        .run()
        .await
        .ok();
    assert_eq!(output.text(), "hello");
}

fn nc(testbed: &TestBed) -> Tool {
    let address = testbed.listener("bytes");
    Tool::nc().args([address.ip().to_string(), address.port().to_string()])
}

/// A client's certificate and key in one file.
fn pair(world: &World) -> PathBuf {
    let leaf = world.client_leaf("proxied");
    world.write(&format!("{}{}", leaf.chain_pem(), leaf.key_pem().expose()))
}

fn file(testbed: &TestBed, length: usize) -> PathBuf {
    let path = testbed.folder().join("body");
    fs::write(&path, answer::pattern(length)).unwrap();
    path
}

/// Returns the peak memory of each process of a site so far, in KiB.
fn peaks(folder: &Path) -> BTreeMap<u32, u64> {
    let mut peaks = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        if !command.starts_with(binary()) || !command.contains(folder.to_str().unwrap()) {
            continue;
        }
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.unwrap().trim().trim_end_matches(" kB");
        peaks.insert(id, peak.parse().unwrap());
    }
    peaks
}
