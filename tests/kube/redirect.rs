//! `causeway redirect` beside a kube-apiserver on a host where no gateway runs, for the way of addresses.
//!
//! A second API server of the same cluster, with a host of its own: rules there lead what it dials to the redirector, which
//! passes it on to a front of the gateway elsewhere, as the README has the two sides.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    time::Duration,
};

use libtest_mimic::Trial;
use serde_json::json;

use crate::{
    addresses,
    steps::{NODES, by},
    world::{
        World,
        causeway::BINARY,
        net::{CLOUD, Machine},
        process::{Process, Program, Ran, until},
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![by(
        "redirect::an_api_server_without_a_gateway_on_its_host_reaches_nodes".to_owned(),
        addresses::CHECKED,
        an_api_server_without_a_gateway_on_its_host_reaches_nodes,
    )]
}

/// Where the second API server is.
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 60);
/// The fronts that take what the redirector passes on, of kubelets and of pods.
const FRONTS: [u16; 2] = [10273, 10274];

/// kubectl at the second API server: of two such flags the last one counts.
fn kubectl(world: &World, line: &str) -> Program {
    let config = world.cluster.pki.path("second-admin.kubeconfig");
    world
        .cluster
        .kubectl(&format!("--kubeconfig={config} {line}"))
}

fn redirect(world: &World, host: &Machine) -> Process {
    let file = world.path("redirect.yaml");
    let [kubelets, pods] = FRONTS;
    let config = json!({
        "ports": { "10250": [format!("{CLOUD}:{kubelets}")] }, "pods": [format!("{CLOUD}:{pods}")],
        "kubernetes": {
            "kubeconfig": world.cluster.account("addresses"), "pod_networks": ["10.244.0.0/16"],
        },
        "timeouts": { "drain": "1s" },
    });
    fs::write(&file, config.to_string()).unwrap();
    let redirect = host.at(BINARY).words("redirect --config").args([file]);
    let mut redirect = redirect.start(&world.path("redirect.log"));
    redirect.says("the cluster's nodes are known");
    redirect
}

fn logs_and_exec(world: &World) {
    for (namespace, node) in NODES {
        let logs = format!("logs -n {namespace} ticker");
        let said = kubectl(world, &logs).run().ok().text();
        assert!(said.starts_with(&format!("ticker on {node}\n")), "{said}");
        assert_eq!(exec(world, namespace).ok().text(), format!("{node}\n"));
    }
}

fn exec(world: &World, namespace: &str) -> Ran {
    let exec = format!("exec -n {namespace} ticker -- cat /tmp/node");
    kubectl(world, &exec).run()
}

fn an_api_server_without_a_gateway_on_its_host_reaches_nodes(world: &mut World) {
    let [kubelets, pods] = FRONTS;
    let led = json!({
        "name": "led", "kind": "https", "listen": format!("{CLOUD}:{kubelets}"), "port": 10250,
        "original_destination": true, "proxy_protocol": [format!("{SECOND}/32")], "errors": "kubernetes",
        "callers": { "own_ca": false, "client_ca": [world.cluster.pki.path("ca.pem")] },
    });
    let pods = json!({
        "name": "led-pods", "kind": "tcp", "listen": format!("{CLOUD}:{pods}"),
        "original_destination": true, "proxy_protocol": [format!("{SECOND}/32")], "anonymous": true,
    });
    world.otherwise(addresses::CHECKED, |text| {
        text.replace(
            "\nfronts:\n",
            &format!("\nfronts:\n  - {led}\n  - {pods}\n"),
        )
    });
    let world = &*world;
    let host = Machine::called("second", SECOND);
    host.leads_on(CLOUD);
    let _api = world.cluster.second(&host, SECOND);
    let first = redirect(world, &host);
    until("callers are led", || exec(world, "a").code == Some(0));
    logs_and_exec(world);
    let forward = "port-forward -n b pod/echo 18082:8080";
    let mut forward = kubectl(world, forward).start(&world.path("second-forward.log"));
    forward.says("Forwarding from 127.0.0.1:18082");
    let mut app = TcpStream::connect("127.0.0.1:18082").unwrap();
    app.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    app.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    app.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("\r\n\r\nedge-2\n"), "{answer}");
    drop(forward);

    for (namespace, node) in NODES {
        let raw = format!("get --raw /api/v1/namespaces/{namespace}/pods/echo:8080/proxy/");
        assert_eq!(kubectl(world, &raw).run().ok().text(), format!("{node}\n"));
    }

    // It ends in mid-exec, and another takes its place.
    let open = kubectl(world, "exec -n a echo -- sh -c");
    let open = open.args(["echo on; exec sleep 1000"]);
    let mut open = open.start(&world.path("second-exec.log"));
    open.says("on");
    drop(first);
    let (code, took) = open.ended();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    assert!(took < Duration::from_secs(5), "{took:?}: {}", open.said());
    let _second = redirect(world, &host);
    until("callers are led again", || exec(world, "a").code == Some(0));
    logs_and_exec(world);
}
