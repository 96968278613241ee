//! Mistakes of a new user: each message stands in the tables of the page about troubleshooting.
//!
//! Each mistake is made with real processes on a machine of its own. Its message must contain the words of one row, and each
//! row must have a mistake, so that neither a message nor a row can change alone.

use super::{
    blocks::ROOT,
    page::Page,
    scenes::{ADVERTISE, edge, gateway},
};
use crate::world::{netns, process::Process, tool::need};
use std::{collections::BTreeSet, fs};

const PAGE: &str = "docs/howto/troubleshoot.md";

/// Commands that each mistake of an edge begins with.
const EDGE: &str = r#"
new() { causeway token create "$@" 2>/dev/null; }
edge() { exec timeout 60 causeway edge --admin-listen 127.0.0.1:0 --gateway "$@"; }
clock() { export LD_PRELOAD='/usr/$LIB/faketime/libfaketimeMT.so.1' FAKETIME=$1 FAKETIME_DONT_FAKE_MONOTONIC=1; }
gw=gw.example.com
"#;

/// Words of a message of the gateway or the edge, and the commands that cause it.
#[rustfmt::skip]
const PROGRAMS: &[(&str, &str)] = &[
    ("unknown key; did you mean …", "echo 'gatways: []' >typo.yaml; causeway edge --config typo.yaml"),
    ("is not HOST:PORT", "edge $gw"),
    ("a duration with its unit", "edge $gw:10262 --timeouts-tcp 5"),
    ("cannot listen on …: Address already in use", "causeway gateway --data-dir second"),
    ("there is no CA in …", "causeway gateway --data-dir none"),
    ("Permission denied", "mkdir -m 0 shut; setpriv --bounding-set=-dac_override,-dac_read_search causeway token create --node a --data-dir shut"),
    ("is in use by another causeway process", "edge $gw:10262"),
    ("no identity in …; join with a token", "edge $gw:10262 --data-dir new"),
    ("the join token is unknown to this gateway", "CAUSEWAY_JOIN=$(new --node edge-1 | sed 's/[.][^.]*/.AAAAAAAAAAAA/') edge $gw:10262 --data-dir new"),
    ("the join token expired at …", "CAUSEWAY_JOIN=$(new --node edge-1 --ttl 1ms) edge $gw:10262 --data-dir new"),
    ("the join token was already used at …", "CAUSEWAY_JOIN=$(cat used) edge $gw:10262 --data-dir new"),
    ("the join token is for node …, not for node …", "CAUSEWAY_JOIN=$(new --node edge-7) edge $gw:10262 --data-dir new --node edge-8"),
    ("the join token is only for new nodes of …", "CAUSEWAY_JOIN=$(new --node 'edge-*') edge $gw:10262 --data-dir new --node edge-1"),
    ("the join token is incomplete", "CAUSEWAY_JOIN=cwj1.half edge $gw:10262 --data-dir new"),
    ("the gateway's CA is …, the token expects …", "CAUSEWAY_JOIN=$(new --node edge-1 --data-dir second) edge $gw:10262 --data-dir new"),
    ("was issued before the node joined again", "edge $gw:10262 --data-dir edge-2"),
    ("node … is revoked", "causeway node revoke edge-2 --reason stolen >revoked; edge $gw:10262 --data-dir edge-2-again"),
    ("could not resolve …", "edge gw.exmaple.com:10262 --data-dir new --join $(new --node edge-3)"),
    ("Connection refused", "edge $gw:10299 --data-dir new --join $(new --node edge-3)"),
    ("could not dial …: timed out", "edge 10.9.9.1:10262 --timeouts-tcp 500ms --data-dir new --join $(new --node edge-3)"),
    ("No route to host", "edge 10.9.9.2:10262 --data-dir new --join $(new --node edge-3)"),
    ("does not speak the tunnel protocol", "edge $gw:10263 --data-dir new --join $(new --node edge-3)"),
    ("is not valid at this machine's time", "token=$(new --node edge-3); clock -1d; edge $gw:10262 --data-dir new --join $token"),
];

/// The same for curl.
#[rustfmt::skip]
const CURL: &[(&str, &str)] = &[
    ("unable to get local issuer certificate", "call edge-1:9100 --capath /nowhere --cacert second/ca.pem"),
    ("alert unknown ca", "call edge-1:9100 --cert second/bob.pem --key second/bob-key.pem"),
    ("certificate is not yet valid", "clock -1d; call edge-1:9100"),
    ("unrecognized name", "call edge-9:9100"),
    ("no alternative certificate subject name matches", "at=10262; call edge-1:9100"),
    ("Could not resolve host", "curl -sS https://edge-1:9100/"),
    ("Failed to connect", "at=10299; call edge-1:9100"),
    ("This listener speaks TLS", "curl -sS http://127.0.0.1:10263/"),
];

const CALL: &str = r#"
at=10263
call() { curl -sS --cacert /var/lib/causeway/ca.pem --cert alice.pem --key alice-key.pem \
  --connect-to "$1:127.0.0.1:$at" "https://$1/" "${@:2}"; }
"#;

/// Words in the log of the gateway after the mistakes.
const LOG: &str = "an edge refuses this gateway's certificate";

/// Prepares a second CA, a token that was used, a node that has joined twice, and a firewall before two addresses.
const PREPARE: &str = r#"
causeway ca init --data-dir second; cp second/ca.pem ca-of-another-gateway.pem
causeway client certificate --name alice --out .
causeway client certificate --name bob --out second --data-dir second
join() { new --node edge-2 >used; CAUSEWAY_JOIN=$(cat used) timeout 60 causeway edge --node edge-2 --data-dir "$1" \
  --admin-listen 127.0.0.1:0 --gateway $gw:10262 >"$1.log" 2>&1 & until grep 'tunnel registered' "$1.log"; do sleep 0.1; done; kill $!; wait $! || true; }
join edge-2
# The gateway knows the times of certificates in seconds.
joined=$(date +%s); until [ "$(date +%s)" -gt "$joined" ]; do sleep 0.1; done
join edge-2-again
ip address add 10.9.9.1/32 dev lo; ip address add 10.9.9.2/32 dev lo
nft add table ip wall
nft add chain ip wall in '{ type filter hook input priority 0; }'
nft add rule ip wall in ip daddr 10.9.9.1 tcp dport 10262 drop
nft add rule ip wall in ip daddr 10.9.9.2 tcp dport 10262 reject with icmp type admin-prohibited
"#;

/// Returns the messages in the first column of the table of a section.
fn messages(section: &str) -> BTreeSet<String> {
    let page = fs::read_to_string(format!("{ROOT}/{PAGE}")).unwrap();
    let (_, rest) = page.split_once(&format!("\n## {section}\n")).unwrap();
    let rows = rest.lines().take_while(|line| !line.starts_with("## "));
    let cells = rows.filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    cells.map(|(message, _)| message.to_owned()).collect()
}

/// Whether a line contains the parts of a message between its `…`, in their order.
fn contains(line: &str, message: &str) -> bool {
    let mut parts = message.split('…').filter(|part| !part.is_empty());
    parts
        .try_fold(line, |rest, part| Some(rest.split_once(part)?.1))
        .is_some()
}

/// Makes a mistake, and waits for the line with its message.
async fn cause(page: &Page, commands: &str, message: &str) {
    let mut process = page.start_commands(&format!("{EDGE}{CALL}{commands}"));
    process.line(message, |line| contains(line, message)).await;
}

async fn log(gateway: &mut Process, message: &str) {
    gateway.line(message, |line| contains(line, message)).await;
}

#[tokio::test]
async fn each_message_of_a_mistake_stands_on_the_page() {
    need!("mounts", netns::NEED, "curl", "nft", "faketime");
    let of_programs = PROGRAMS.iter().map(|(message, _)| *message).chain([LOG]);
    let of_programs: BTreeSet<_> = of_programs.map(str::to_owned).collect();
    assert_eq!(messages("Messages of the programs"), of_programs);
    let of_curl: BTreeSet<_> = CURL
        .iter()
        .map(|(message, _)| (*message).to_owned())
        .collect();
    assert_eq!(messages("Messages of curl"), of_curl);

    let page = Page::open("docs/tutorials/two-machines.md").await;
    let mut gateway = gateway(&page, ADVERTISE).await;
    let _edge = edge(&page, "{ 9100: {} }").await;
    page.commands(&format!("{EDGE}{PREPARE}")).await;
    for (message, commands) in PROGRAMS.iter().chain(CURL) {
        cause(&page, commands, message).await;
    }
    log(&mut gateway, LOG).await;
}
