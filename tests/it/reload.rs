//! Reload: changed parts are replaced, the rest keeps its connections, and an invalid configuration changes nothing.

use crate::world::{
    World,
    app::{App, PauseGate, answer},
    client::{ListenerAddress, Wire, whole},
    frames::{END_HEADERS, END_STREAM, HEADERS, PREFACE, fields, frame, next, send, settings},
    gateway::{anonymous, listener},
    process::{GatewayProcess, OPEN, causeway},
    until,
};
use causeway_gateway::{
    ListenerDiff,
    config::{ClientAuth, Config, Listener, ListenerProtocol},
};
use http_body_util::BodyExt;
use hyper::Request;
use std::{
    fs,
    io::{ErrorKind, Write as _},
    path::Path,
    time::Duration,
};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
};

const URL: &str = "https://edge-1:9100/";

fn turnover(opened: &[&str], replaced: &[&str], closed: &[&str]) -> ListenerDiff {
    let [opened, replaced, closed] = [opened, replaced, closed]
        .map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    ListenerDiff {
        opened,
        replaced,
        closed,
    }
}

#[tokio::test]
async fn listeners_open_and_close_and_others_keep_connections() {
    let build = World::build().listener(anonymous("goes", ListenerProtocol::Https));
    let mut world = build.start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut kept = world.client().connect("edge-1").await.unwrap();
    assert_eq!(kept.get(URL).await.unwrap().text(), "it");
    let gone = world.listener("goes");
    assert_eq!(world.client_at("goes").nobody().get(URL).await.status, 200);

    let changed = world.reload(|config| {
        config.listeners.retain(|listener| listener.name != "goes");
        config
            .listeners
            .push(anonymous("comes", ListenerProtocol::Https));
    });
    let changed = changed.unwrap();
    assert_eq!(changed.listeners, turnover(&["comes"], &[], &["goes"]));
    assert_eq!(changed.to_string(), "listeners: opened comes; closed goes");
    assert_eq!(world.client_at("comes").nobody().get(URL).await.status, 200);
    let answer = kept.get(URL).await.unwrap();
    assert_eq!(answer.text(), "it", "the same connection");
    until("the old listener is closed", async || {
        TcpStream::connect(gone).await.is_err()
    })
    .await;
    let again = world.reload(|_| {}).unwrap();
    assert_eq!(again.listeners, ListenerDiff::default());
    assert_eq!(again.to_string(), "listeners unchanged");
}

#[tokio::test]
async fn a_client_that_connects_while_a_listener_is_replaced_is_served() {
    let build = World::build().workers(1);
    let build = build.listener(anonymous("web", ListenerProtocol::Http));
    let mut world = build.start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let address = world.listener("web");
    let mut client = None;
    // This thread does not serve the edge meanwhile, so that there is no response yet.
    let connect = || {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n";
        stream.write_all(request).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let read = stream.peek(&mut [0]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::WouldBlock), "the client must wait");
        client = Some(stream);
    };
    let change = |config: &mut Config| {
        let mut all = config.listeners.iter_mut();
        let web = all.find(|listener| listener.name == "web").unwrap();
        web.port = Some(9100);
    };
    let changed = world.reload_with(change, Some(connect)).unwrap();
    assert_eq!(changed.listeners, turnover(&[], &["web"], &[]));
    let stream = client.unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut response = String::new();
    let mut stream = TcpStream::from_std(stream).unwrap();
    stream.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
}

/// A listener that only accepts the tokens of a file.
fn by_tokens(tokens: &Path) -> Listener {
    Listener {
        client_auth: ClientAuth {
            own_ca: false,
            tokens: Some(tokens.to_owned()),
            ..ClientAuth::default()
        },
        ..listener("tokens", ListenerProtocol::Https)
    }
}

#[tokio::test]
async fn a_removed_token_starts_no_streams_and_ends_its_open_ones() {
    let build = World::build();
    let (stays, tokens) = (build.token("stays"), build.tokens());
    let only_stays = fs::read_to_string(&tokens).unwrap();
    let old = build.token("old");
    let before = fs::read_to_string(&tokens).unwrap();
    let new = build.token("new");
    let both = fs::read_to_string(&tokens).unwrap();
    let without_old = only_stays + both.strip_prefix(&before).unwrap();
    fs::write(&tokens, &before).unwrap();
    let mut world = build.listener(by_tokens(&tokens)).start().await;
    // One for each download: the script of a cut download continues to wait.
    let gates: [PauseGate; 4] = std::array::from_fn(|_| PauseGate::new());
    let held = gates.clone();
    let app = App::http(move |head| match head.path()[1..].parse::<usize>() {
        Ok(gate) => answer::parts("text/plain", &["first ", "last"], &held[gate]),
        Err(_) => answer::ok("it"),
    });
    let app = app.await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for http2 in [false, true] {
        fs::write(&tokens, &before).unwrap();
        world.reload(|_| {}).unwrap();
        let client = |token: &str| world.client_at("tokens").nobody().bearer(token);
        let (with_old, with_new) = (client(&old), client(&new));
        let with_old = if http2 { with_old.http2() } else { with_old };
        assert_eq!(with_new.get(URL).await.status, 401);
        let with_stays = client(&stays);
        let with_stays = if http2 {
            with_stays.http2()
        } else {
            with_stays
        };
        let mut slow = with_old.connect("edge-1").await.unwrap();
        let mut finished = with_stays.connect("edge-1").await.unwrap();
        let mut idle = with_old.connect("edge-1").await.unwrap();
        assert_eq!(idle.get(URL).await.unwrap().status, 200);
        let [of_old, of_stays] = if http2 { [0, 1] } else { [2, 3] };
        let request = |gate: usize| {
            gates[gate].open();
            let request = Request::get(format!("https://edge-1:9100/{gate}"));
            request.body(whole("")).unwrap()
        };
        let begun = slow.open(request(of_old)).await.unwrap();
        let kept = finished.open(request(of_stays)).await.unwrap();

        fs::write(&tokens, &without_old).unwrap();
        let changed = world.reload(|_| {}).unwrap();
        assert_eq!(changed.listeners, turnover(&[], &["tokens"], &[]));
        assert_eq!(with_old.get(URL).await.status, 401);
        assert_eq!(with_new.get(URL).await.status, 200);
        until(
            "a connection with the old token accepts no new request",
            async || idle.get(URL).await.is_err(),
        )
        .await;
        let cut = begun.into_body().collect().await;
        assert!(cut.is_err(), "a stream by the old token goes on");
        // The last part, and the end.
        gates[of_stays].open();
        gates[of_stays].open();
        let all = kept.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(all, "first last", "another's download is whole");
    }
}

#[tokio::test]
async fn an_unusable_configuration_changes_no_state_and_says_why() {
    let mut world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut kept = world.client().connect("edge-1").await.unwrap();
    assert_eq!(kept.get(URL).await.unwrap().status, 200);
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    let missing = world.folder().join("nowhere");
    let at_taken = Listener {
        anonymous: true,
        ..Listener::new("late", ListenerProtocol::Http, address.into())
    };
    let by_missing = Listener {
        client_auth: ClientAuth {
            tokens: Some(missing.clone()),
            ..ClientAuth::default()
        },
        ..listener("late", ListenerProtocol::Https)
    };
    for (late, word) in [
        (at_taken, address.to_string()),
        (by_missing, missing.display().to_string()),
    ] {
        let refused = world.reload(|config| {
            // Both, or none.
            config.listeners[0] = anonymous("https", ListenerProtocol::Https);
            config.listeners.push(late);
        });
        let message = refused.unwrap_err().to_string();
        assert!(
            message.contains("late") && message.contains(&word),
            "{message}"
        );
        assert_eq!(kept.get(URL).await.unwrap().status, 200);
        let nobody = world.client().nobody().get(URL).await;
        assert_eq!(nobody.status, 401, "still closed");
    }
    let changed =
        world.reload(|config| config.listeners[0] = anonymous("https", ListenerProtocol::Https));
    let changed = changed.unwrap();
    assert_eq!(changed.listeners, turnover(&[], &["https"], &[]));
    assert_eq!(world.client().nobody().get(URL).await.status, 200);
}

#[tokio::test]
async fn a_client_that_ignores_its_goaway_starts_no_new_streams() {
    let build = World::build().listener(anonymous("open", ListenerProtocol::Https));
    let mut world = build.start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let nobody = world.client_at("open").nobody().http2();
    let mut wire = nobody.wire("edge-1", &["h2"]).await.unwrap();
    // Without a header table (SETTINGS_HEADER_TABLE_SIZE) each answer has its status as a literal.
    let begun = [PREFACE, &settings(&[(1, 0)])].concat();
    send(&mut *wire, &begun).await.unwrap();
    assert_eq!(ask(&mut *wire, 1).await, Some(200));
    let changed = world.reload(|config| {
        config.listeners.retain(|listener| listener.name != "open");
        config
            .listeners
            .push(listener("open", ListenerProtocol::Https));
    });
    assert_eq!(changed.unwrap().listeners, turnover(&[], &["open"], &[]));
    // It does not acknowledge PINGs, so that the final GOAWAY never arrives; and it continues to send requests.
    let mut stream = 1;
    until("it is refused", async || {
        stream += 2;
        matches!(ask(&mut *wire, stream).await, None | Some(503))
    })
    .await;
    for _ in 0..20 {
        stream += 2;
        assert_ne!(ask(&mut *wire, stream).await, Some(200));
    }
}

/// Requests `/` on this stream and reads the status, if one arrives before the connection's end.
async fn ask(wire: &mut dyn Wire, stream: u32) -> Option<u16> {
    let get = fields(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "edge-1:9100"),
        (":path", "/"),
    ]);
    let head = frame(HEADERS, END_HEADERS | END_STREAM, stream, &get);
    send(wire, &head).await.ok()?;
    loop {
        let frame = next(wire).await.ok()?;
        if frame.kind == HEADERS && frame.stream == stream {
            return Some(frame.status());
        }
    }
}

#[tokio::test]
async fn new_advertised_names_reach_the_certificate_and_edges() {
    let mut world = World::start().await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let tunnel = world.tunnel();
    let joining = world.client().nobody().at(ListenerAddress::Tls(tunnel));
    assert!(joining.tls_stream("new.test", &["h2"]).await.is_err());
    let new = format!("new.test:{}", tunnel.port());
    let changed = world.reload(|config| config.tunnel.advertise = vec![new.clone()]);
    assert!(changed.unwrap().advertised);
    joining.tls_stream("new.test", &["h2"]).await.unwrap();
    until("the edge knows the new address", async || {
        edge.status().gateways.contains(&new)
    })
    .await;
    assert_eq!(world.client().get(URL).await.status, 200);
}

#[tokio::test]
async fn signal_file_change_and_command_reload_and_refuse_bad_files() {
    let app = App::saying("it").await;
    let mut site = GatewayProcess::with_listeners(OPEN).await;
    let _edge = site.join("edge-1", app.port()).await;
    let client = site.nobody();
    let url = "http://edge-1:9100/";
    assert_eq!(client.get(url).await.status, 200);
    let (file, rules) = (site.path("gateway.yaml"), site.path("policy.yaml"));
    let before = fs::read_to_string(&file).unwrap();
    let with_policy = format!("{before}policy: {}\n", rules.display());
    let data = site.data();
    let ask = || causeway("reload").flag("--data-dir", &data).run();
    let becomes = async |status: u16| {
        until("the rules are in effect", async || {
            // A request that the new rules do not allow may be cut before its end.
            let request = Request::get(url).body(whole("")).unwrap();
            let answer = client.try_send(request).await;
            answer.is_ok_and(|answer| answer.status == status)
        })
        .await;
    };

    // Only the file; the policy that it names is loaded first.
    fs::write(&rules, "rules: []\n").unwrap();
    fs::write(&file, &with_policy).unwrap();
    becomes(403).await;
    // The policy's file is watched from then on.
    fs::write(&rules, "rules:\n  - { then: allow }\n").unwrap();
    becomes(200).await;
    // As editors and Kubernetes write files.
    fs::write(site.path("new"), "rules: []\n").unwrap();
    fs::rename(site.path("new"), &rules).unwrap();
    becomes(403).await;

    // An invalid configuration changes nothing. The requester and the log get the position of the fault.
    fs::write(&rules, "rules:\n  - { then: perhaps }\n").unwrap();
    let message = ask().await.with_code(2).stderr;
    assert!(
        message.contains("policy.yaml:2:") && message.contains("perhaps"),
        "{message}"
    );
    site.gateway
        .wait_for_line("the configuration was rejected")
        .await;
    assert_eq!(client.get(url).await.status, 403, "the old rules hold");
    let metrics = site.metrics().await;
    assert_eq!(metrics.sum("last_reload_successful", &[]), 0);

    fs::write(&rules, "rules: [{ then: allow }]\n").unwrap();
    let message = ask().await.ok().stdout;
    // The first of the two, the watcher or the command, has reported it.
    assert!(message.ends_with("listeners unchanged\n"), "{message}");
    let taken_up = format!(
        "policy: 1 rule from {}; listeners unchanged",
        rules.display()
    );
    site.gateway
        .wrote(&taken_up, 1, crate::world::PATIENCE)
        .await;
    assert_eq!(client.get(url).await.status, 200);
    assert_eq!(site.metrics().await.sum("last_reload_successful", &[]), 1);

    what_is_about_to_be_written_and_what_waits(&site, &before).await;
}

/// A file that is not complete yet opens nothing; and faults are named.
async fn what_is_about_to_be_written_and_what_waits(site: &GatewayProcess, before: &str) {
    let (file, data, client) = (site.path("gateway.yaml"), site.data(), site.nobody());
    let url = "http://edge-1:9100/";
    let ask = || causeway("reload").flag("--data-dir", &data).run();
    fs::write(&file, "").unwrap();
    let message = ask().await.with_code(2).stderr;
    assert!(
        message.contains("gateway.yaml:1:1: the file is empty"),
        "{message}"
    );
    assert_eq!(client.get(url).await.status, 200);

    let restart = format!("{before}workers: 7\n");
    fs::write(&file, restart).unwrap();
    let message = ask().await.ok().stdout;
    assert!(
        message.contains("takes effect at the next start: workers"),
        "{message}"
    );
    let open = "may do everything on every node; listeners unchanged; takes effect";
    site.gateway.wrote(open, 1, crate::world::PATIENCE).await;
    let times = site.gateway.written().count("why=\"SIGHUP\"");
    site.gateway.signal("HUP").await;
    site.gateway
        .wrote("why=\"SIGHUP\"", times + 1, crate::world::PATIENCE)
        .await;
    assert_eq!(client.get(url).await.status, 200);
}

#[tokio::test]
async fn an_edge_takes_up_other_ports_while_its_streams_go_on() {
    let gate = PauseGate::new();
    let held = gate.clone();
    let first = App::http(move |head| match head.path().as_str() {
        "/slow" => answer::parts("text/plain", &["first ", "last"], &held),
        _ => answer::ok("first"),
    });
    let first = first.await;
    let second = App::saying("second").await;
    let site = GatewayProcess::with_listeners(OPEN).await;
    let token = site.token("--node edge-1").await;
    let file = site.path("edge.yaml");
    let ports = |app: u16| format!("ports: {{ 9100: {{ target: \"127.0.0.1:{app}\" }} }}\n");
    fs::write(&file, ports(first.port())).unwrap();
    let edge = causeway("edge --admin-listen 127.0.0.1:0").flag("--config", &file);
    let edge = edge
        .flag("--gateway", &site.tunnel)
        .flag("--data-dir", site.edge_data("edge-1"))
        .flag("--join", token);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    let client = site.nobody();
    let mut slow = client.connect("edge-1").await.unwrap();
    let request = Request::get("http://edge-1:9100/slow");
    let request = request.body(whole("")).unwrap();
    gate.open();
    let begun = slow.open(request).await.unwrap();

    fs::write(&file, ports(second.port())).unwrap();
    until("the new app gets the request", async || {
        client.get("http://edge-1:9100/").await.text() == "second"
    })
    .await;
    gate.open();
    gate.open();
    let all = begun.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(all, "first last", "a download that had begun is whole");

    fs::write(&file, "ports: { 9100: { target: 12 } }\n").unwrap();
    let ask = causeway("reload").flag("--data-dir", site.edge_data("edge-1"));
    let message = ask.run().await.with_code(2).stderr;
    assert!(message.contains("edge.yaml:1:"), "{message}");
    let answer = client.get("http://edge-1:9100/").await;
    assert_eq!(answer.text(), "second", "the old ports are served");
}
