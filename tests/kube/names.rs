//! Setup by names: kube-apiserver dials nodes by name, and DNS returns the gateway's address.
//!
//! kube-apiserver's resolver queries a real `CoreDNS`, which queries the gateway. The gateway terminates the API server's
//! TLS and connects to kubelets itself. If kubelets' certificates are not verified, an upgrade names no node, and the pod
//! in its path decides.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
};

use libtest_mimic::Trial;

use crate::{
    rows::{REQUESTS, UPGRADES, each_says},
    steps::{self, by, failures_tell},
    world::{
        Checks, Way, World,
        causeway::REFUSING,
        net::CLOUD,
        node::Serving,
        process::{Program, ToolOutput, until},
    },
};

/// Setup by names, with all certificates verified.
pub(crate) const CHECKED: Way = Way::Names(Checks::On);

pub(crate) fn trials() -> Vec<Trial> {
    let unchecked = Way::Names(Checks::Off);
    let mut trials = steps::some("names_unchecked", unchecked);
    trials.push(by(
        "names_unchecked::a_pod_that_is_gone_is_said_to_be".to_owned(),
        unchecked,
        a_pod_that_is_gone_is_said_to_be,
    ));
    trials.push(by(
        "names_unchecked::rights_that_are_missing_are_named".to_owned(),
        unchecked,
        rights_that_are_missing_are_named,
    ));
    trials.push(by(
        format!("names_unchecked::{}", steps::MOVED.0),
        unchecked,
        steps::MOVED.1,
    ));
    trials.extend(steps::most("names", CHECKED));
    trials.extend(steps::variant("names", CHECKED, steps::MOVED));
    trials.extend([
        by(
            "names::cloud_targets_are_dialled_directly".to_owned(),
            CHECKED,
            steps::cloud_targets_are_dialled_directly,
        ),
        by(
            "names::failures_state_the_remedy".to_owned(),
            CHECKED,
            failures_state_the_remedy,
        ),
        by(
            "names::a_policy_without_shells_is_reported".to_owned(),
            CHECKED,
            a_policy_without_shells_is_reported,
        ),
        by(
            "names::a_kubelet_certificate_gives_no_access_to_another_kubelet".to_owned(),
            CHECKED,
            a_kubelet_certificate_gives_no_access_to_another_kubelet,
        ),
        by(
            "names::kubelets_that_sign_for_themselves_are_known_by_their_keys".to_owned(),
            CHECKED,
            kubelets_that_sign_for_themselves_are_known_by_their_keys,
        ),
        by(
            "names::kubelets_are_called_over_their_negotiated_http_version".to_owned(),
            CHECKED,
            kubelets_are_called_over_their_negotiated_http_version,
        ),
    ]);
    trials
}

/// The API server knows the pod and sends its request to the gateway; by then the pod is gone.
fn a_pod_that_is_gone_is_said_to_be(world: &mut World) {
    let message = ask(
        world,
        "kubelet-client",
        "gateway",
        "/exec/a/nobody/it?command=true",
    );
    assert_eq!(message.0, "502", "{}", message.1);
    let wanted = "the node of pod a/nobody could not be found: pods \"nobody\" not found";
    assert!(message.1.contains(wanted), "{}", message.1);
}

/// The pod in the path is the only name of the node, so an exec needs the right to look it up.
fn rights_that_are_missing_are_named(world: &mut World) {
    world.cluster.grant("egress");
    let exec = || world.cluster.kubectl("exec -n a silent -- true").run();
    let wanted = "cannot get resource \"pods\" in API group \"\" in the namespace \"a\"";
    until("the right is gone", || {
        let ran = exec();
        ran.code != Some(0) && ran.stderr.contains(wanted)
    });
    world.cluster.grant("dns");
    until("it is allowed again", || exec().code == Some(0));
}

fn failures_state_the_remedy(world: &mut World) {
    let refused = format!("https:edge-1:{REFUSING}");
    let failures = [
        (
            refused.as_str(),
            "edge-1 could not dial 127.0.0.1:9996: connection refused",
        ),
        ("https:nobody-1:10250", "nobody-1"),
    ];
    failures_tell(world, &failures);
}

fn a_policy_without_shells_is_reported(world: &mut World) {
    let way = CHECKED;
    let deny = "  - { name: no shells, where: { nodes: [edge-1] }, what: { paths: [/exec] }, then: deny }\n";
    world.road().rules_anew(way, deny);
    let exec = |world: &World, namespace: &str| {
        let line = format!("exec -n {namespace} ticker -- true");
        world.cluster.kubectl(&line).run()
    };
    let message = exec(world, "a").failed();
    exec(world, "b").ok();
    world.cluster.kubectl("logs -n a ticker").run().ok();
    let wanted = "the policy does not allow kube-apiserver-kubelet-client";
    let deny = deny.replace("/exec", "/containerLogs, /healthz");
    world.road().rules_anew(way, &deny);
    each_says(world, wanted, &REQUESTS);
    world.road().rules_anew(way, "");
    exec(world, "a").ok();
    assert!(message.contains(wanted), "{message}");
}

/// Kubelets' certificates are from the same CA as kube-apiserver's.
fn a_kubelet_certificate_gives_no_access_to_another_kubelet(world: &mut World) {
    let path = "/exec/a/echo/it?command=true";
    let (status, message) = ask(world, "edge-2", "edge-1", path);
    assert_eq!(status, "502", "{message}");
    let refused = message.contains("system:node:edge-2") && message.contains("policy");
    assert!(refused, "{message}");
    let (status, _) = ask(world, "kubelet-client", "edge-1", "/healthz");
    assert_eq!(status, "200");
}

fn kubelets_that_sign_for_themselves_are_known_by_their_keys(world: &mut World) {
    and_back(world, known_by_their_keys);
}

fn kubelets_are_called_over_their_negotiated_http_version(world: &mut World) {
    and_back(world, kubelets_are_called_over_their_chosen_http_version);
}

/// Runs the test, and restores the previous state afterwards.
fn and_back(world: &mut World, done: impl Fn(&mut World)) {
    let done = catch_unwind(AssertUnwindSafe(|| done(world)));
    world.the_road().pins(false, &world.cluster);
    serves(world, Serving::Signed);
    if let Err(failed) = done {
        resume_unwind(failed);
    }
}

fn kubelets_are_called_over_their_chosen_http_version(world: &mut World) {
    for (serving, version, other) in [
        (Serving::Http2, "2", "1.1"),
        (Serving::Http1, "1.1", "2"),
        (Serving::Signed, "1.1", "2"),
    ] {
        // Idle connections of the previous one have ended with it by then.
        serves(world, serving);
        let before = [version, other].map(connections);
        let steps = || {
            for line in [
                "logs -n a ticker",
                "get --raw /api/v1/nodes/edge-1/proxy/stats/summary",
                "get --raw /api/v1/nodes/edge-1/proxy/metrics",
            ] {
                world.cluster.kubectl(line).run().ok();
            }
        };
        std::thread::scope(|scope| (0..4).map(|_| scope.spawn(steps)).for_each(drop));
        let after = [version, other].map(connections);
        assert_eq!(before[1], after[1], "{serving:?}");
        assert!(after[0] > 0, "{serving:?}");
        if serving == Serving::Http2 {
            assert_eq!(before[0], after[0], "all streams share one connection");
        }
        // Upgrades have connections of their own, with HTTP/1.1.
        world.cluster.kubectl("exec -n a ticker -- true").run().ok();
        assert!(connections("1.1") > after[usize::from(version == "2")]);
    }
}

/// Returns the number of connections to kubelets that the gateway has made with this version of HTTP.
fn connections(version: &str) -> u64 {
    let metrics = Program::new("curl").words("-q -sS http://127.0.0.1:10265/metrics");
    let name = format!("causeway_gateway_upstream_connections_total{{http=\"{version}\"}} ");
    let metrics = metrics.run().ok().text();
    let found = metrics.lines().find_map(|line| line.strip_prefix(&name));
    found.map_or(0, |count| count.parse().unwrap())
}

/// edge-1's kubelet makes its own certificate, edge-2's has one from the cluster.
fn known_by_their_keys(world: &mut World) {
    world.the_road().pins(true, &world.cluster);
    serves(world, Serving::Own);
    let kubectl = |world: &World, line: &str| world.cluster.kubectl(line).run();
    for line in [
        "exec -n a ticker -- true",
        "logs -n b ticker",
        "get --raw /api/v1/nodes/edge-1/proxy/stats/summary",
    ] {
        kubectl(world, line).ok();
    }
    let known = |world: &World| world.the_road().orders("node pins").ok().text();
    let own = world.nodes[0].own_certificate();
    let first = format!("edge-1  10250  {}", key(&own[0]));
    let pins = known(world);
    assert!(
        pins.contains(&first) && pins.contains("edge-2  10250"),
        "{pins}"
    );

    for file in own {
        fs::remove_file(file).unwrap();
    }
    let World { nodes, cluster, .. } = world;
    nodes[0].serves(cluster, Serving::Own);
    let mut message = String::new();
    until("the other key is refused", || {
        message = kubectl(world, "logs -n a ticker").stderr;
        message.contains("has a new key")
    });
    assert!(
        message.contains("`causeway node unpin edge-1 10250`"),
        "{message}"
    );
    each_says(world, "has a new key", &[UPGRADES, REQUESTS].concat());
    assert_eq!(known(world), pins);
    world.the_road().orders("node unpin edge-1 10250").ok();
    // A kubelet that has just started does not know its pods yet.
    until("the other key is trusted", || {
        kubectl(world, "logs -n a ticker").code == Some(0)
    });
    assert!(!known(world).contains(&first));
}

/// edge-1's kubelet serves with such a certificate, and returns the output of its pod.
fn serves(world: &mut World, serving: Serving) {
    let World { nodes, cluster, .. } = world;
    nodes[0].serves(cluster, serving);
    until("edge-1's kubelet is back", || {
        let logs = cluster.kubectl("logs -n a ticker").run();
        logs.code == Some(0)
    });
}

/// SHA-256 of the public key of a certificate, computed by openssl.
fn key(certificate: &Path) -> String {
    let script =
        "openssl x509 -in \"$0\" -noout -pubkey | openssl pkey -pubin -outform der | sha256sum";
    let hashed = Program::new("sh").args(["-c".as_ref(), script.as_ref(), certificate.as_os_str()]);
    let text = hashed.run().ok().text();
    text.split(' ').next().unwrap().to_owned()
}

/// Status and message of the listener's answer to a client of the cluster's CA.
fn ask(world: &World, client: &str, name: &str, path: &str) -> (String, String) {
    let pki = |end: &str| world.cluster.pki.path(&format!("{client}.{end}"));
    let place = format!("{name}:10250:{CLOUD}");
    let asked: ToolOutput = Program::new("curl")
        .words("-q -sS -k --max-time 10 -w")
        .args(["\n%{http_code}", "--resolve"])
        .args([
            place,
            "--cert".into(),
            pki("pem"),
            "--key".into(),
            pki("key"),
        ])
        .args([format!("https://{name}:10250{path}")])
        .run()
        .ok();
    let text = asked.text();
    let (message, status) = text.rsplit_once('\n').unwrap();
    (status.to_owned(), message.to_owned())
}
