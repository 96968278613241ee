//! Errors for kube-apiserver as a client: an unknown one, and one that requests a thing from a listener which it does not
//! serve.
//!
//! kubectl's user reads the error message. If TLS already ends with an alert, the user sees only kube-apiserver's own
//! message, and the gateway's log has the reason.

use std::path::Path;

use libtest_mimic::Trial;

use super::{REQUESTS, UPGRADES, each_says, each_says_one_of, exec};
use crate::{
    steps::by,
    world::{Way, World, process::until},
};

/// Returns the trial of an API server whose egress selector shows a certificate.
pub(crate) fn over_tcp() -> Trial {
    let run = |world: &mut World| {
        an_unauthenticated_egress_selector_gets_the_reason(world);
        an_egress_selector_at_the_wrong_listener_gets_the_reason(world);
    };
    let title = "egress::over_tcp_an_api_server_is_told_what_is_wrong_with_it";
    by(title.to_owned(), Way::Tcp, run)
}

/// Message of Go about a connection for HTTP/2 whose alert arrived before the request was begun; it does not mention the
/// alert.
const ENDED: &str = "http2: client conn could not be established";

/// Checks that all commands get this message, or that requests get one of the others.
fn told(world: &World, wanted: &str, rest: &[&str]) {
    // Streams of an open connection are not ended.
    for line in [UPGRADES[0], REQUESTS[0], REQUESTS[1]] {
        until(wanted, || {
            let ran = world.cluster.kubectl(line).run();
            ran.code != Some(0) && ran.stderr.contains(wanted)
        });
    }
    each_says(world, wanted, &UPGRADES);
    each_says_one_of(world, &[&[wanted], rest].concat(), &REQUESTS);
}

pub(super) fn an_unauthenticated_api_server_gets_the_reason(world: &mut World) {
    let road = world.the_road();
    let of = |ca: &Path| format!("client_ca: [{}]", ca.display());
    let cluster = of(Path::new(&world.cluster.pki.path("ca.pem")));
    let other = of(&road.ca());
    road.gateway_anew(|text| text.replace(&cluster, &other));
    let alert = "remote error: unknown certificate authority";
    told(world, alert, &[ENDED]);
    let message = road.output();
    let why = "a client's certificate is refused listener=\"kubelets\" peer=10.97.0.1:";
    assert!(
        message.contains(why) && message.contains("UnknownIssuer"),
        "{message}"
    );

    let tokens = "token_review: {}";
    road.gateway_anew(|text| text.replace(&other, tokens));
    told(
        world,
        "no credentials were presented; this listener requires a bearer token",
        &[],
    );
    road.gateway_anew(|text| text.replace(tokens, &cluster));
    until("the client is known again", || exec(world).code == Some(0));
}

/// Setup by names, except for the kind of the listener to which the names lead.
pub(super) fn a_connect_listener_reports_that_it_serves_connect_only(world: &mut World, way: Way) {
    let kubelets = "    protocol: https\n    listen: 0.0.0.0:10250\n";
    let connect = kubelets.replace("https", "connect");
    world.otherwise(way, |text| text.replace(kubelets, &connect));
    let all = [UPGRADES, REQUESTS].concat();
    each_says(world, "this listener serves CONNECT only", &all);
}

/// The listener that this way uses, with a change.
fn listener(text: &str, change: impl Fn(&str) -> String) -> String {
    let line = |line: &str| {
        let ours = line.contains("\"name\":\"tcp\"");
        let changed = ours.then(|| change(line));
        changed.unwrap_or_else(|| line.to_owned()) + "\n"
    };
    text.lines().map(line).collect()
}

fn an_unauthenticated_egress_selector_gets_the_reason(world: &mut World) {
    let (cluster, other) = (world.cluster.pki.path("ca.pem"), world.the_road().ca());
    let other = other.display().to_string();
    // The gateway starts with it. After a reload an open connection to the kubelet would stay, and the API server would
    // continue to use it.
    world.otherwise(Way::Tcp, |text| {
        listener(&text, |line| line.replace(&cluster, &other))
    });
    // The API server shows no certificate to a listener that does not request one of its CA.
    each_says(
        world,
        "code 502: 502 no credentials were presented; this listener requires a client certificate (a client does not send a certificate",
        &[UPGRADES, REQUESTS].concat(),
    );
    let road = world.the_road();
    road.gateway_anew(|text| listener(&text, |line| line.replace(&other, &cluster)));
    until("the client is known again", || exec(world).code == Some(0));
}

fn an_egress_selector_at_the_wrong_listener_gets_the_reason(world: &mut World) {
    let https = "\"kind\":\"https\",\"port\":10250";
    world.otherwise(Way::Tcp, |text| {
        listener(&text, |line| line.replace("\"kind\":\"connect\"", https))
    });
    each_says(
        world,
        "code 502: 502 CONNECT is served by a listener with protocol connect only",
        &[UPGRADES, REQUESTS].concat(),
    );
}
