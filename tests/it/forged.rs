//! Forged, stolen and damaged identities, made with an attacker's tools: openssl and curl.
//!
//! openssl signs here with the gateway's own CA, so that each certificate is refused only for its single fault.

use crate::world::{
    PATIENCE,
    app::App,
    process::{GatewayProcess, causeway},
    tool::{Tool, ToolOutput, need},
};
use causeway_certs::{Ca, OpenMode, Store};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

/// Makes `$2.pem` and `$2.key` in `$1`: usage `$3`, names `$4`, made at `$5`, valid for two days, signed by `$6.pem`.
const FORGE: &str = r#"
set -e; cd "$1"
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$2.key" -subj "/CN=$2" -out "$2.csr"
printf '%s\n' 'basicConstraints=critical,CA:FALSE' 'keyUsage=critical,digitalSignature' \
    "extendedKeyUsage=$3" "subjectAltName=$4" 'authorityKeyIdentifier=keyid' >"$2.ext"
export FAKETIME="$5"
LD_PRELOAD='/usr/$LIB/faketime/libfaketime.so.1' openssl x509 -req -in "$2.csr" -CA "$6.pem" -CAkey "$6.key" -days 2 -extfile "$2.ext" -out "$2.pem"
"#;
const EDGE_1: &str = "URI:spiffe://DOMAIN/edge/edge-1";

/// A gateway whose CA's key has been stolen.
struct StolenCa {
    site: GatewayProcess,
    domain: String,
}

/// Fault of one certificate.
struct CertificateFault {
    name: &'static str,
    usage: &'static str,
    names: &'static str,
    when: &'static str,
    issuer: &'static str,
    /// Log message of the gateway about the certificate at the tunnel port.
    reason_text: &'static str,
}

/// A certificate without a fault.
const GOOD: CertificateFault = CertificateFault {
    name: "good",
    usage: "clientAuth",
    names: EDGE_1,
    when: "-1 hour",
    issuer: "edges",
    reason_text: "registered",
};

/// Each has one fault.
const SPOILT: [CertificateFault; 12] = [
    CertificateFault {
        name: "expired",
        when: "-10 days",
        reason_text: "certificate expired",
        ..GOOD
    },
    CertificateFault {
        name: "not-yet",
        when: "+10 days",
        reason_text: "certificate not valid yet",
        ..GOOD
    },
    CertificateFault {
        name: "server",
        usage: "serverAuth",
        reason_text: "does not allow extended key usage for client authentication",
        ..GOOD
    },
    CertificateFault {
        name: "stranger",
        issuer: "other-edges",
        reason_text: "UnknownIssuer",
        ..GOOD
    },
    CertificateFault {
        name: "by-clients",
        issuer: "clients",
        reason_text: "cannot issue a certificate for use as edge",
        ..GOOD
    },
    CertificateFault {
        name: "by-root",
        issuer: "root",
        reason_text: "UnknownIssuer",
        ..GOOD
    },
    CertificateFault {
        name: "elsewhere",
        names: "URI:spiffe://other.test/edge/edge-1",
        reason_text: "spiffe://other.test/edge/edge-1",
        ..GOOD
    },
    CertificateFault {
        name: "client",
        names: "URI:spiffe://DOMAIN/client/edge-1",
        reason_text: "a certificate of kind client cannot be used as edge",
        ..GOOD
    },
    CertificateFault {
        name: "gateway",
        names: "URI:spiffe://DOMAIN/gateway",
        reason_text: "a certificate of kind gateway cannot be used as edge",
        ..GOOD
    },
    CertificateFault {
        name: "both",
        names: "URI:spiffe://DOMAIN/edge/edge-1,URI:spiffe://DOMAIN/edge/edge-2",
        reason_text: "2 identities",
        ..GOOD
    },
    CertificateFault {
        name: "nobody",
        names: "DNS:edge-1",
        reason_text: "0 identities",
        ..GOOD
    },
    CertificateFault {
        name: "unknown",
        names: "URI:spiffe://DOMAIN/edge/edge-9",
        reason_text: "node edge-9 is not enrolled at this gateway",
        ..GOOD
    },
];

impl StolenCa {
    async fn start() -> Self {
        let site = GatewayProcess::with("tunnel: { hello_timeout: 1s }").await;
        let store = Store::open(site.data(), OpenMode::Existing).unwrap();
        let domain = store.ca().unwrap().unwrap().trust_domain().clone();
        let other = Store::open(site.path("elsewhere"), OpenMode::Create).unwrap();
        other.save_ca(&Ca::create(&domain).unwrap()).unwrap();
        for (folder, before) in [("gateway", ""), ("elsewhere", "other-")] {
            let text = fs::read_to_string(site.path(folder).join("ca.json")).unwrap();
            let ca: Value = serde_json::from_str(&text).unwrap();
            let root = &ca["roots"][0];
            let issuers = ["edges", "clients"].map(|name| (name, &root["issuers"][name]));
            for (name, signer) in issuers.into_iter().chain([("root", root)]) {
                for (part, kind) in [("certificate", "pem"), ("key", "key")] {
                    let file = site.path(&format!("{before}{name}.{kind}"));
                    fs::write(file, signer[part].as_str().unwrap()).unwrap();
                }
            }
        }
        Self {
            domain: domain.to_string(),
            site,
        }
    }

    async fn forge(&self, spoilt: &CertificateFault) {
        let names = spoilt.names.replace("DOMAIN", &self.domain);
        let folder = self.site.path("");
        let made = Tool::new("sh").args(["-c", FORGE, "sh"]).args([folder]);
        let about = [
            spoilt.name,
            spoilt.usage,
            &names,
            spoilt.when,
            spoilt.issuer,
        ];
        made.args(about).run().await.ok();
    }

    fn files(&self, name: &str) -> [PathBuf; 2] {
        ["pem", "key"].map(|kind| self.site.path(&format!("{name}.{kind}")))
    }

    /// Connects to the tunnel port with openssl, until the gateway closes the connection.
    fn dial(&self, name: &str) -> Tool {
        let [certificate, key] = self.files(name);
        let port = ["s_client", "-alpn", "rh2", "-ign_eof", "-connect"];
        Tool::new("openssl")
            .args(port)
            .args([&self.site.tunnel])
            .args(["-CAfile".into(), self.site.data().join("ca.pem")])
            .args(["-cert".into(), certificate])
            .args(["-key".into(), key])
    }

    /// Sends a request to the listener with curl; returns curl's messages and the status.
    async fn call(&self, name: &str) -> ToolOutput {
        let [certificate, key] = self.files(name);
        let curl = self.site.curl_as_nobody("edge-1", "");
        curl.args(["-w", " %{http_code}"])
            .args(["--cert".into(), certificate])
            .args(["--key".into(), key])
            .run()
            .await
    }
}

#[tokio::test]
async fn a_certificate_with_one_fault_is_refused_on_every_port() {
    need!("openssl", "curl", "faketime");
    let forger = StolenCa::start().await;
    let app = App::saying("it").await;
    let _edge = forger.site.join("edge-1", app.port()).await;
    for spoilt in &SPOILT {
        forger.forge(spoilt).await;
    }
    let at_the_tunnel_port = SPOILT.iter().map(async |spoilt| {
        forger.dial(spoilt.name).run().await;
        let bound = PATIENCE;
        let like = SPOILT
            .iter()
            .filter(|other| other.reason_text == spoilt.reason_text);
        let times = like.count();
        forger
            .site
            .gateway
            .wrote(spoilt.reason_text, times, bound)
            .await;
    });
    join_all(at_the_tunnel_port).await;
    for spoilt in SPOILT.iter().filter(|spoilt| spoilt.name != "client") {
        let called = forger.call(spoilt.name).await;
        assert!(called.text() != "it 200", "{}", spoilt.name);
    }
    // The gateway refuses each for its single fault.
    let client = CertificateFault {
        name: "alright",
        issuer: "clients",
        names: "URI:spiffe://DOMAIN/client/edge-1",
        ..GOOD
    };
    forger.forge(&client).await;
    assert_eq!(forger.call("alright").await.text(), "it 200");
    forger.forge(&GOOD).await;
    forger.dial("good").run().await;
    let nobody = forger
        .site
        .gateway
        .wrote("refused an edge edge=\"edge-1\"", 1, PATIENCE);
    nobody.await;
}

#[tokio::test]
async fn a_session_from_before_a_revocation_gives_no_access() {
    need!("openssl");
    let mut forger = StolenCa::start().await;
    forger.site.join("edge-1", 1).await.stop().await.ok();
    // The log of the new process has no refusals of the node's own edge, which may have answered its hello too late.
    forger.site = forger.site.restart(|_| {}).await;
    let site = &forger.site;
    forger.steal("edge-1");
    let session = site.path("session");
    let kept = ["-sess_out".into(), session.clone()];
    forger.dial("stolen").args(kept).run().await;
    let resumed = || {
        let again = ["-sess_in".into(), session.clone()];
        forger.dial("stolen").args(again).run()
    };
    let ran = resumed().await;
    assert!(ran.text().contains("Reused, TLSv1.3"), "{}", ran.text());
    // openssl sends no hello: this is the only fault.
    let why = "refused an edge edge=\"edge-1\"";
    site.gateway
        .wrote("no response to the hello", 2, PATIENCE)
        .await;
    let revoke = causeway("node revoke edge-1 --reason stolen");
    revoke.flag("--data-dir", site.data()).run().await.ok();
    let ran = resumed().await;
    assert!(ran.text().contains("Reused, TLSv1.3"), "{}", ran.text());
    site.gateway
        .wrote("why=node edge-1 is revoked: stolen", 1, PATIENCE)
        .await;
    assert_eq!(site.gateway.written().count(why), 3);
}

/// Requests a certificate from the tunnel port, by curl, with the request that openssl makes of `request`.
const ENROL: &str = r#"
set -e; cd "$1"
csr=$(openssl req -new $3 -nodes -keyout "$2.key" -outform DER 2>/dev/null | base64 -w 0)
printf '{"token":"%s","node":"%s","csr":"%s"}' "$4" "$5" "$csr" >"$2.json"
"#;
const P256: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=edge-9";

impl StolenCa {
    async fn request(&self, name: &str, request: &str, (token, node): (&str, &str)) {
        let folder = self.site.path("");
        let made = Tool::new("sh").args(["-c", ENROL, "sh"]).args([folder]);
        made.args([name, request, token, node]).run().await.ok();
    }

    /// The certificate and key of a node's edge.
    fn steal(&self, node: &str) {
        let edge = Store::open(self.site.edge_data(node), OpenMode::Existing).unwrap();
        let leaf = edge.edge().unwrap().unwrap().leaf;
        let [certificate, key] = self.files("stolen");
        fs::write(certificate, leaf.chain_pem()).unwrap();
        fs::write(key, leaf.key_pem().expose()).unwrap();
    }

    /// curl to the tunnel port.
    fn ask(&self, operation: &str, name: &str) -> Tool {
        let body = format!("@{}", self.site.path(&format!("{name}.json")).display());
        Tool::curl()
            .args(["-k", "--http1.1", "-w", " %{http_code}", "-d", &body])
            .args(["-H", "Content-Type: application/json"])
            .args([format!("https://{}/v1/{operation}", self.site.tunnel)])
    }

    /// Returns the result of the enrolment: the status and the response.
    async fn enrol(&self, name: &str) -> (u16, Value) {
        answer(&self.ask("enrol", name).run().await.ok())
    }

    /// Returns the granted certificate, as openssl reads it.
    async fn read(&self, granted: &Value) -> String {
        let pem = granted["certificate"].as_str().unwrap();
        let tool = Tool::new("openssl").args(["x509", "-noout", "-text"]);
        tool.input(pem).run().await.ok().text()
    }
}

fn answer(ran: &ToolOutput) -> (u16, Value) {
    let text = ran.text();
    let (answer, status) = text.rsplit_once(' ').unwrap();
    let answer = serde_json::from_str(answer).unwrap_or(Value::Null);
    (status.parse().unwrap(), answer)
}

#[tokio::test]
async fn a_weak_or_oversized_request_key_uses_up_no_token() {
    need!("openssl", "curl");
    let forger = StolenCa::start().await;
    let token = forger.site.token("--node edge-1").await;
    let (mine, stranger) = ((token.as_str(), "edge-1"), ("no token", "edge-1"));
    let refused = [
        (
            "rsa-1024",
            "-newkey rsa:1024 -subj /CN=x",
            "RSA-1024 keys are not accepted",
        ),
        (
            "p-192",
            "-newkey ec -pkeyopt ec_paramgen_curve:P-192 -subj /CN=x",
            "EC-192",
        ),
        ("dsa", "-newkey ed448 -subj /CN=x", "keys are not accepted"),
    ];
    for (name, request, why) in refused {
        forger.request(name, request, mine).await;
        let (status, reason_text) = forger.enrol(name).await;
        let detail = reason_text["detail"].as_str().unwrap();
        assert_eq!(
            (status, reason_text["reason"].as_str()),
            (400, Some("csr_invalid")),
            "{name}"
        );
        assert!(detail.contains(why), "{name}: {detail}");
    }
    let large = json!({ "token": token, "node": "edge-1", "csr": "A".repeat(10_000) });
    let huge = json!({ "token": token, "node": "edge-1", "csr": "A".repeat(4_000_000) });
    for (name, body, expected) in [("large", large, 400), ("huge", huge, 413)] {
        fs::write(forger.site.path(&format!("{name}.json")), body.to_string()).unwrap();
        assert_eq!(forger.enrol(name).await.0, expected, "{name}");
    }
    forger.request("stranger", P256, stranger).await;
    assert_eq!(forger.enrol("stranger").await.0, 400);
    forger.request("other", P256, (&token, "edge-2")).await;
    let (status, reason_text) = forger.enrol("other").await;
    assert_eq!(
        (status, reason_text["reason"].as_str()),
        (403, Some("token_other_node"))
    );

    forger.gets_no_more_than_its_name(&token).await;
}

impl StolenCa {
    /// The request asks for another name, for every usage, and to be a CA. The token is used up afterwards.
    async fn gets_no_more_than_its_name(&self, token: &str) {
        let (forger, mine) = (self, (token, "edge-1"));
        let greedy = format!(
            "{P256} -addext basicConstraints=critical,CA:TRUE -addext keyUsage=keyCertSign \
         -addext extendedKeyUsage=serverAuth -addext subjectAltName=DNS:edge-9,URI:spiffe://x/gateway"
        );
        forger.request("greedy", &greedy, mine).await;
        let (status, granted) = forger.enrol("greedy").await;
        assert_eq!(status, 200, "{granted}");
        let text = forger.read(&granted).await;
        for there in [
            "CA:FALSE",
            "TLS Web Client Authentication",
            "/edge/edge-1",
            "DNS:edge-1",
        ] {
            assert!(text.contains(there), "{there}: {text}");
        }
        for absent in [
            "CA:TRUE",
            "Certificate Sign",
            "Server Auth",
            "edge-9",
            "spiffe://x/gateway",
        ] {
            assert!(!text.contains(absent), "{absent}: {text}");
        }
        // The token is used up as well.
        forger.request("again", P256, mine).await;
        let (status, reason_text) = forger.enrol("again").await;
        assert_eq!(
            (status, reason_text["reason"].as_str()),
            (403, Some("token_used"))
        );
    }
}

#[tokio::test]
async fn an_edge_that_asks_for_another_nodes_certificate_gets_its_own() {
    need!("openssl", "curl");
    let forger = StolenCa::start().await;
    forger.site.join("edge-1", 1).await.stop().await.ok();
    forger.steal("edge-1");
    let other = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=edge-2 \
                 -addext subjectAltName=DNS:edge-2,URI:spiffe://causeway.local/edge/edge-2";
    forger.request("claims", other, ("", "edge-2")).await;
    let [certificate, key] = forger.files("stolen");
    let thief = forger
        .ask("renew", "claims")
        .args(["--cert".into(), certificate]);
    let (status, granted) = answer(&thief.args(["--key".into(), key]).run().await.ok());
    assert_eq!(status, 200, "{granted}");
    assert_eq!(granted["node"], "edge-1");
    let text = forger.read(&granted).await;
    assert!(
        text.contains("/edge/edge-1") && !text.contains("edge-2"),
        "{text}"
    );
}

#[tokio::test]
async fn of_those_that_race_for_one_token_one_joins() {
    need!("openssl", "curl");
    let forger = StolenCa::start().await;
    let token = forger.site.token("--node edge-1").await;
    // After five refusals, further attempts with the token are limited.
    let names: Vec<_> = (0..6).map(|racer| format!("racer-{racer}")).collect();
    for name in &names {
        forger.request(name, P256, (&token, "edge-1")).await;
    }
    let ended = join_all(names.iter().map(|name| forger.enrol(name))).await;
    let joined = ended.iter().filter(|(status, _)| *status == 200).count();
    let used = ended
        .iter()
        .filter(|(_, reason_text)| reason_text["reason"] == "token_used");
    assert_eq!((joined, used.count()), (1, 5), "{ended:?}");
}
