//! `causeway status`: the edges of a running gateway, or the tunnels of a running edge, as a table or as JSON.
//!
//! Prints the content of `/api/v1/edges` or of an edge's `/status`, and computes only ages and units. Fields that this build
//! does not know, or that an older gateway does not send, cause no error.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use comfy_table::{Cell, CellAlignment, Table, presets};
use hyper::StatusCode;
use serde_json::Value;

use super::admin_client::{self, AdminAddress};
use super::ca_rotate;
use super::health::{self, DEFAULT_DATA_DIRS};
use crate::cli::operator::{Output, Status};
use crate::output::outln;

/// Queries the gateway or edge and prints the result.
pub(crate) async fn run(status: Status) -> anyhow::Result<()> {
    let (address, source) = find_address(status.admin, status.data_dir.as_deref())?;
    let (code, body) = admin_client::get(&address, "/api/v1/edges")
        .await
        .with_context(|| format!("the admin address is {address} ({source})"))?;
    if code == StatusCode::NOT_FOUND {
        return print_edge(&address, status.output).await;
    }
    if !code.is_success() {
        bail!(
            "{address} responds to /api/v1/edges with {code}; is it the admin address of a gateway?"
        );
    }
    if status.output == Output::Json {
        outln!("{}", String::from_utf8_lossy(&body).trim_end())?;
        return Ok(());
    }
    let edges: Vec<Value> = serde_json::from_slice(&body).with_context(|| {
        format!("the response of {address} to /api/v1/edges is not a list of edges")
    })?;
    outln!(
        "{}",
        render_edges(&edges, status.output == Output::Wide, SystemTime::now())
    )?;
    for remark in readiness_lines(&address).await {
        outln!("\n{remark}")?;
    }
    if let Some(table) = peer_report(&address).await {
        outln!("\n{table}")?;
    }
    for remark in conflict_lines(&edges)
        .into_iter()
        .chain(unhealthy_lines(&edges))
    {
        outln!("\n{remark}")?;
    }
    if let Some(remark) = delegated_line(&edges) {
        outln!("\n{remark}")?;
    }
    if let Some(table) = certificate_report(&address).await {
        outln!("\n{table}")?;
    }
    if let Some(remark) = api_cache_line(&address).await {
        outln!("\n{remark}")?;
    }
    if let Some(remark) = ca_rotate::status_line(&address).await {
        outln!("\n{remark}")?;
    }
    Ok(())
}

/// Returns the admin address, and a description of its origin. The gateway's default data directory comes first. If both run,
/// the edge is one of those that the gateway shows.
fn find_address(
    admin_flag: Option<String>,
    data_dir: Option<&Path>,
) -> anyhow::Result<(AdminAddress, String)> {
    if admin_flag.is_none() && data_dir.is_none() {
        let mut running = health::find_running(&DEFAULT_DATA_DIRS.map(Path::new))?;
        return Ok((running.swap_remove(0), "from its data directory".into()));
    }
    admin_client::find_address(
        admin_flag,
        data_dir.unwrap_or(Path::new(DEFAULT_DATA_DIRS[0])),
    )
}

/// Prints the status of an edge.
async fn print_edge(address: &AdminAddress, output: Output) -> anyhow::Result<()> {
    let (code, body) = admin_client::get(address, "/status").await?;
    if !code.is_success() {
        bail!(
            "{address} responds to /status with {code}; is it the admin address of a gateway or edge?"
        );
    }
    if output == Output::Json {
        return outln!("{}", String::from_utf8_lossy(&body).trim_end());
    }
    let status: Value = serde_json::from_slice(&body)
        .with_context(|| format!("the response of {address} to /status is not that of an edge"))?;
    outln!("{}", render_edge(&status, SystemTime::now()))
}

/// Returns the state of an edge, a table of its tunnels, its certificate, and its last error.
fn render_edge(status: &Value, now: SystemTime) -> String {
    let to_word = |value: &Value| text_cell(value).content();
    let mut parts = vec![format!(
        "{} is {} (version {})",
        to_word(&status["node"]),
        to_word(&status["state"]),
        to_word(&status["version"])
    )];
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "GATEWAY", "STATE", "SINCE", "RTT", "STREAMS", "SENT", "RECEIVED", "ADDRESS",
    ]);
    let tunnels = status["tunnels"].as_array().map(Vec::as_slice);
    for tunnel in tunnels.unwrap_or_default() {
        let round_trip = tunnel["round_trip_us"].as_f64();
        let round_trip = round_trip.map(|micros| format!("{:.1} ms", micros / 1e3).into());
        table.add_row([
            text_cell(&tunnel["gateway"]),
            text_cell(&tunnel["state"]),
            age_cell(&rfc3339_time(&tunnel["since"]), now),
            text_cell(&round_trip.unwrap_or_default()),
            number_cell(&tunnel["streams"]),
            bytes_cell(&tunnel["sent"]),
            bytes_cell(&tunnel["received"]),
            text_cell(&tunnel["address"]),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    if !table.is_empty() {
        parts.push(format!("\n{}", table.trim_fmt()));
    }
    let certificate = &status["certificate"];
    let expiry = rfc3339_time(&certificate["not_after"]);
    if !expiry.is_null() {
        let (expiry, remaining) = (to_word(&expiry), time_left(&expiry, now).content());
        parts.push(format!("\ncertificate: until {expiry}, {remaining}"));
    }
    parts.extend(heartbeat_line(status));
    parts.extend(egress_lines(status));
    for problem in [&status["trouble"], &certificate["trouble"]] {
        if !problem["what"].is_null() {
            parts.push(format!("trouble: {}", to_word(&problem["what"])));
        }
    }
    parts.join("\n")
}

/// Returns a time in milliseconds since the Unix epoch as an RFC 3339 time.
fn rfc3339_time(millis: &Value) -> Value {
    millis.as_u64().map_or(Value::Null, |millis| {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        humantime::format_rfc3339_seconds(time).to_string().into()
    })
}

/// Returns one line for each reason for which the gateway is not ready, and for each fault that does not affect clients.
async fn readiness_lines(address: &AdminAddress) -> Vec<String> {
    let Ok((code, body)) = admin_client::get(address, "/readyz").await else {
        return Vec::new();
    };
    let text = String::from_utf8_lossy(&body);
    let lines = text.lines().enumerate();
    let line = |(index, line): (usize, &str)| match index {
        0 if code.is_success() => None,
        0 => Some(format!("not ready: {line}")),
        _ => Some(line.to_owned()),
    };
    lines.filter_map(line).collect()
}

/// Returns a line that names the nodes whose Leases are renewed by delegated heartbeats.
fn delegated_line(edges: &[Value]) -> Option<String> {
    let delegated = edges
        .iter()
        .filter(|edge| edge["heartbeat_delegated"] == true);
    let names: Vec<&str> = delegated.filter_map(|edge| edge["node"].as_str()).collect();
    (!names.is_empty()).then(|| {
        let names = text_cell(&names.join(", ").into()).content();
        format!("delegated heartbeats: members of their pools report that these nodes are alive: {names}")
    })
}

/// Returns a line for each node with ports whose health checks fail.
fn unhealthy_lines(edges: &[Value]) -> Vec<String> {
    let line = |edge: &Value| {
        let ports = edge["unhealthy_ports"].as_array()?;
        let ports: Vec<String> = ports.iter().map(Value::to_string).collect();
        let node = text_cell(&edge["node"]).content();
        let noun = if ports.len() == 1 { "port" } else { "ports" };
        Some(format!(
            "unhealthy: the health check fails at {node}, {noun} {}",
            ports.join(", ")
        ))
    };
    edges.iter().filter_map(line).collect()
}

/// Returns the state of the heartbeats of an edge, if they are configured.
fn heartbeat_line(status: &Value) -> Option<String> {
    let heartbeat = status.get("heartbeat")?;
    let kubelet = match heartbeat["kubelet"].as_str() {
        Some("alive") => "the kubelet is alive",
        Some("not_alive") => "the kubelet is not alive",
        _ => "the kubelet has not been checked yet",
    };
    let delegation = match (&heartbeat["delegate"], &heartbeat["last_error"]) {
        (Value::String(node), _) => format!(", delegated through {node}"),
        (_, Value::String(why)) => format!(", not delegated: {why}"),
        _ => String::new(),
    };
    let line = format!("heartbeat: {kubelet}{delegation}");
    Some(text_cell(&line.into()).content())
}

/// Returns the listeners of an edge for the cloud, their gateway and their last failure, if they are configured.
fn egress_lines(status: &Value) -> Vec<String> {
    let Some(egress) = status.get("egress") else {
        return Vec::new();
    };
    let listeners = egress["listeners"].as_array().map(Vec::as_slice);
    let listeners = listeners.unwrap_or_default().iter().map(|listener| {
        let listen = listener["listen"].as_str().unwrap_or_default();
        match listener["to"].as_str() {
            Some(to) => format!("{listen} to {to}"),
            None => format!("{listen} (proxy)"),
        }
    });
    let listeners = listeners.collect::<Vec<_>>().join(", ");
    let listeners = if listeners.is_empty() {
        "no listener is open".to_owned()
    } else {
        listeners
    };
    let gateway = match egress["gateway"].as_str() {
        Some(gateway) => format!("through {gateway}"),
        None => "not connected (a connection is opened when a program needs it)".to_owned(),
    };
    let mut lines = vec![format!("egress: {listeners}; {gateway}")];
    lines.extend(
        egress["trouble"]["what"]
            .as_str()
            .map(|what| format!("last egress failure: {what}")),
    );
    let clean = |line: String| text_cell(&line.into()).content();
    lines.into_iter().map(clean).collect()
}

/// Returns a line for each address that several nodes have.
fn conflict_lines(edges: &[Value]) -> Vec<String> {
    let mut conflicts: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for edge in edges {
        for (address, others) in edge["address_conflicts"].as_object().into_iter().flatten() {
            let nodes = conflicts.entry(address).or_default();
            nodes.extend(edge["node"].as_str());
            nodes.extend(
                others
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(Value::as_str),
            );
        }
    }
    let line = |(address, nodes): (&str, BTreeSet<&str>)| {
        let nodes: Vec<_> = nodes.into_iter().collect();
        let nodes = nodes.join(", ");
        format!(
            "conflict: {address} is an address of {nodes}; at most one of them can be reached by this address (see the gateway's log), the others only by name"
        )
    };
    conflicts.into_iter().map(line).collect()
}

/// Returns the address of an edge, or the other gateways that have its tunnels.
fn place_cell(edge: &Value) -> Cell {
    let gateways = edge["gateways"].as_array().map(Vec::as_slice);
    let gateways: Vec<&str> = gateways
        .unwrap_or_default()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    if edge["tunnels"] != 0 || gateways.is_empty() {
        return text_cell(&edge["address"]);
    }
    text_cell(&format!("at gateway {}", gateways.join(", ")).into())
}

/// Returns a table of the other gateways, if there are any.
async fn peer_report(address: &AdminAddress) -> Option<String> {
    let (code, body) = admin_client::get(address, "/api/v1/peers").await.ok()?;
    // Older gateways do not report this.
    let all: Vec<Value> = serde_json::from_slice(&body)
        .ok()
        .filter(|_| code.is_success())?;
    (!all.is_empty()).then(|| peer_table(&all, SystemTime::now()))
}

fn peer_table(peers: &[Value], now: SystemTime) -> String {
    let mut table = Table::new();
    let header = [
        "OTHER GATEWAY",
        "STATE",
        "SINCE",
        "NODES",
        "RTT",
        "LAG",
        "VERSION",
    ];
    table.load_style(presets::NOTHING).set_header(header);
    for peer in peers {
        let round_trip = peer["rtt_ms"].as_f64();
        let round_trip = round_trip.map(|millis| format!("{millis:.1} ms").into());
        // Older gateways do not report the lag.
        let lag = peer["lag_ms"].as_f64();
        let lag = lag.map(|millis| format!("{:.1} s", millis / 1e3).into());
        table.add_row([
            text_cell(&peer["address"]),
            text_cell(&peer["state"]),
            age_cell(&peer["since"], now),
            number_cell(&peer["nodes"]),
            text_cell(&round_trip.unwrap_or_default()),
            text_cell(&lag.unwrap_or_default()),
            text_cell(&peer["version"]),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Returns a table of the certificates that the gateway uses.
async fn certificate_report(address: &AdminAddress) -> Option<String> {
    let (code, body) = admin_client::get(address, "/api/v1/certificates")
        .await
        .ok()?;
    // Older gateways do not report this.
    let all: Vec<Value> = serde_json::from_slice(&body)
        .ok()
        .filter(|_| code.is_success())?;
    Some(certificate_table(&all, SystemTime::now()))
}

fn certificate_table(certificates: &[Value], now: SystemTime) -> String {
    let mut table = Table::new();
    let header = ["CERTIFICATE", "SUBJECT", "EXPIRES", "LEFT", "FROM"];
    table.load_style(presets::NOTHING).set_header(header);
    for certificate in certificates {
        let from = match certificate["own"].as_bool() {
            Some(true) => "renewed by the gateway".into(),
            _ => text_cell(&certificate["file"]),
        };
        table.add_row([
            text_cell(&certificate["used_for"]),
            text_cell(&certificate["subject"]),
            text_cell(&certificate["not_after"]),
            time_left(&certificate["not_after"], now),
            from,
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Returns the time until an RFC 3339 time, in whole days or hours.
fn time_left(value: &Value, now: SystemTime) -> Cell {
    let time = value
        .as_str()
        .and_then(|time| humantime::parse_rfc3339_weak(time).ok());
    let Some(time) = time else {
        return text_cell(value);
    };
    match time.duration_since(now) {
        Err(_) => "expired".into(),
        Ok(left) if left.as_secs() < 2 * 86_400 => format!("{}h", left.as_secs() / 3_600).into(),
        Ok(left) => format!("{}d", left.as_secs() / 86_400).into(),
    }
}

/// Returns one line about the objects that edges can read at this gateway, if there are any.
async fn api_cache_line(address: &AdminAddress) -> Option<String> {
    let (code, body) = admin_client::get(address, "/api/v1/pool").await.ok()?;
    // Older gateways, and gateways without an API cache, do not report this.
    let cache_status: Value = serde_json::from_slice(&body)
        .ok()
        .filter(|_| code.is_success())?;
    Some(describe_cache(&cache_status))
}

fn describe_cache(cache_status: &Value) -> String {
    let resources = cache_status["resources"].as_array().map(Vec::as_slice);
    let resources = resources.unwrap_or_default();
    let count = |key: &str| resources.iter().filter_map(|one| one[key].as_u64()).sum();
    let lost_since = resources
        .iter()
        .filter_map(|one| one["lost"].as_u64())
        .min();
    let disconnected = resources.iter().filter(|one| !one["lost"].is_null());
    let names: Vec<&str> = disconnected
        .filter_map(|one| one["resource"].as_str())
        .collect();
    // A missing permission affects some resources, an unreachable API server affects all.
    let affected = if names.len() == resources.len() {
        "API".to_owned()
    } else {
        names.join(", ")
    };
    let state = match lost_since {
        None => "connected".to_owned(),
        // Never connected.
        Some(0) => format!("{affected} not read yet; see the gateway's log for the reason"),
        Some(millis) => {
            let since = SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
            format!(
                "{affected} unreachable since {}",
                humantime::format_rfc3339_seconds(since)
            )
        }
    };
    format!(
        "API cache: {} resources, {} objects, {state}",
        resources.len(),
        group_thousands(count("objects"))
    )
}

/// Formats a number with separators of thousands.
fn group_thousands(number: u64) -> String {
    if number < 1000 {
        return number.to_string();
    }
    format!("{},{:03}", group_thousands(number / 1000), number % 1000)
}

fn render_edges(edges: &[Value], wide: bool, now: SystemTime) -> String {
    if edges.is_empty() {
        return "no edges; create a token with: causeway token create --node NODE\n(if an external CA issues the edges' certificates, admit each node with: causeway node add NODE)".into();
    }
    let mut header = vec![
        "NODE",
        "STATE",
        "SINCE",
        "RTT",
        "STREAMS",
        "BYTES UP",
        "BYTES DOWN",
        "VERSION",
        "ADDRESS",
    ];
    if wide {
        header.extend([
            "TUNNELS",
            "EGRESS",
            "POOL",
            "READS AS",
            "INSTANCE",
            "LAST SEEN",
        ]);
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for edge in edges {
        let mut row = vec![
            text_cell(&edge["node"]),
            text_cell(&edge["state"]),
            age_cell(&edge["since"], now),
            edge["rtt_ms"].as_f64().map_or_else(
                || "-".into(),
                |rtt| text_cell(&format!("{rtt:.1} ms").into()),
            ),
            number_cell(&edge["streams"]),
            bytes_cell(&edge["bytes_up"]),
            bytes_cell(&edge["bytes_down"]),
            text_cell(&edge["version"]),
            place_cell(edge),
        ];
        if wide {
            row.extend([
                number_cell(&edge["tunnels"]),
                number_cell(&edge["egress_connections"]),
                text_cell(&edge["pool"]),
                text_cell(&edge["reading"]),
                text_cell(&edge["instance"]),
                age_cell(&edge["last_seen"], now),
            ]);
        }
        table.add_row(row);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    // No trailing or leading blanks, so that lines can be pasted and compared.
    table.trim_fmt()
}

fn text_cell(value: &Value) -> Cell {
    match value {
        Value::Null => "-".into(),
        Value::String(text) if text.is_empty() => "-".into(),
        // Text from an edge is shown in a terminal, so control characters are removed.
        Value::String(text) => text
            .chars()
            .filter(|c| !c.is_control())
            .collect::<String>()
            .into(),
        other => other.to_string().into(),
    }
}

fn number_cell(value: &Value) -> Cell {
    let count = value
        .as_array()
        .map_or_else(|| value.clone(), |list| list.len().into());
    text_cell(&count).set_alignment(CellAlignment::Right)
}

/// Returns the age of an RFC 3339 time, in its two largest units.
fn age_cell(value: &Value, now: SystemTime) -> Cell {
    let time = value
        .as_str()
        .and_then(|time| humantime::parse_rfc3339_weak(time).ok());
    let Some(time) = time else {
        return text_cell(value);
    };
    let seconds = now.duration_since(time).unwrap_or_default().as_secs();
    let rounded = match seconds {
        0..3_600 => seconds,
        3_600..86_400 => seconds - seconds % 60,
        _ => seconds - seconds % 3_600,
    };
    humantime::format_duration(Duration::from_secs(rounded))
        .to_string()
        .into()
}

fn bytes_cell(value: &Value) -> Cell {
    let Some(bytes) = value.as_u64() else {
        return number_cell(value);
    };
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = units.into_iter().find(|(_, unit)| bytes >= *unit);
    let text = match unit {
        // Integer tenths, because counters exceed the exact range of floats.
        Some((name, unit)) => format!("{}.{} {name}", bytes / unit, bytes % unit * 10 / unit),
        None => format!("{bytes} B"),
    };
    Cell::new(text).set_alignment(CellAlignment::Right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn edges() -> Vec<Value> {
        vec![
            json!({
                "node": "edge-1", "state": "connected", "since": "2026-01-01T00:00:00Z", "rtt_ms": 1.26,
                "streams": 3, "bytes_up": 1536, "bytes_down": 5_368_709_120_u64, "version": "0.1.0",
                "address": "10.0.0.1:5000", "tunnels": 2, "pool": "north", "reading": "leader",
                "egress_connections": 17,
            }),
            json!({ "node": "edge\u{1b}[2J-2", "state": "away", "version": "" }),
        ]
    }

    #[test]
    fn nodes_whose_health_checks_fail_have_a_line_each() {
        let edges = [
            json!({ "node": "edge-1" }),
            json!({ "node": "edge-2", "unhealthy_ports": [9100] }),
            json!({ "node": "edge-3", "unhealthy_ports": [443, 9100] }),
        ];
        let expected = [
            "unhealthy: the health check fails at edge-2, port 9100",
            "unhealthy: the health check fails at edge-3, ports 443, 9100",
        ];
        assert_eq!(unhealthy_lines(&edges), expected);
    }

    #[test]
    fn an_edge_shows_its_egress_listeners_and_the_last_failure() {
        let listeners = json!([
            { "listen": "127.0.0.1:6443", "to": "kube-apiserver:443" },
            { "listen": "127.0.0.1:1080", "to": null },
        ]);
        let what = "evil.example:443: no rule\u{1b}[2J allows it";
        let egress =
            json!({ "gateway": "gw:10262", "listeners": listeners, "trouble": { "what": what } });
        let lines = egress_lines(&json!({ "egress": egress }));
        assert_eq!(
            lines[0],
            "egress: 127.0.0.1:6443 to kube-apiserver:443, 127.0.0.1:1080 (proxy); through gw:10262"
        );
        assert!(lines[1].starts_with("last egress failure: evil.example:443: no rule"));
        assert!(!lines[1].contains('\u{1b}'), "no control characters");
        assert_eq!(egress_lines(&json!({})), Vec::<String>::new());
    }

    fn rendered(wide: bool) -> String {
        render_edges(
            &edges(),
            wide,
            humantime::parse_rfc3339("2026-01-03T01:10:30Z").unwrap(),
        )
    }

    #[test]
    fn the_table_shows_ages_and_units_that_people_read() {
        let table = rendered(false);
        let line = table.lines().nth(1).unwrap();
        for part in [
            "edge-1",
            "connected",
            "2days 1h",
            "1.3 ms",
            "1.5 KiB",
            "5.0 GiB",
            "10.0.0.1:5000",
        ] {
            assert!(line.contains(part), "{part}: {table}");
        }
        assert!(table.starts_with("NODE") && line.starts_with("edge-1"));
        assert!(!table.contains("POOL"));
    }

    #[test]
    fn an_edge_shows_its_tunnels_its_certificate_and_its_trouble() {
        let began = 1_767_225_600_000_u64;
        let status = json!({
            "node": "edge-1", "state": "connected", "version": "0.1.0",
            "tunnels": [{
                "gateway": "gw.example:10262", "state": "active", "since": began, "round_trip_us": 1260,
                "streams": 3, "sent": 1536, "received": 5, "address": "10.0.0.1:10262",
            }],
            "certificate": { "not_after": began + 864_000_000, "trouble": { "what": "late" } },
        });
        let now = humantime::parse_rfc3339("2026-01-03T01:10:30Z").unwrap();
        let shown = render_edge(&status, now);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], "edge-1 is connected (version 0.1.0)");
        let row: Vec<&str> = lines[3]
            .split("  ")
            .filter(|cell| !cell.is_empty())
            .collect();
        let row: Vec<&str> = row.iter().map(|cell| cell.trim()).collect();
        let expected = "gw.example:10262|active|2days 1h|1.3 ms|3|1.5 KiB|5 B|10.0.0.1:10262";
        assert_eq!(row.join("|"), expected, "{shown}");
        assert_eq!(
            lines[5..],
            [
                "certificate: until 2026-01-11T00:00:00Z, 7d",
                "trouble: late"
            ]
        );
        let away =
            json!({ "node": "edge-1", "state": "refused", "trouble": { "what": "gone\u{1b}" } });
        assert_eq!(
            render_edge(&away, now),
            "edge-1 is refused (version -)\ntrouble: gone"
        );
    }

    #[test]
    fn wide_adds_tunnels_egress_connections_and_pool() {
        let table = rendered(true);
        let line = |number| table.lines().nth(number).unwrap();
        let words = |number| line(number).split_whitespace().collect::<Vec<_>>();
        let header = words(0).join(" ");
        let added = "TUNNELS EGRESS POOL READS AS INSTANCE LAST SEEN";
        assert!(header.ends_with(&format!(" ADDRESS {added}")), "{table}");
        assert!(
            words(1).ends_with(&["2", "17", "north", "leader", "-", "-"]),
            "{table}"
        );
        // The edge is not connected for its programs.
        assert!(words(2).ends_with(&["-"; 6]), "{table}");
    }

    #[test]
    fn edge_cache_state_is_one_line() {
        let kept = |lost: Option<u64>| {
            let resources = [1_230_000, 4]
                .map(|objects| json!({ "resource": "v1/nodes", "objects": objects, "lost": lost }));
            describe_cache(&json!({ "resources": resources }))
        };
        let begin = "API cache: 2 resources, 1,230,004 objects, ";
        assert_eq!(kept(None), format!("{begin}connected"));
        assert_eq!(
            kept(Some(1_767_225_600_000)),
            format!("{begin}API unreachable since 2026-01-01T00:00:00Z")
        );
        assert!(kept(Some(0)).contains("API not read yet"));
        let one = json!({ "resource": "v1/services", "objects": 0, "lost": 0 });
        let some = describe_cache(&json!({ "resources": [one, { "resource": "v1/nodes" }] }));
        assert!(some.contains("v1/services not read yet"), "{some}");
    }

    #[test]
    fn delegated_heartbeats_are_shown_at_both_ends() {
        let edges = [
            json!({ "node": "edge-1", "heartbeat_delegated": true }),
            json!({ "node": "edge-2" }),
        ];
        let line = delegated_line(&edges).unwrap();
        assert!(line.ends_with("alive: edge-1"), "{line}");
        assert_eq!(delegated_line(&edges[1..]), None);
        let line = |heartbeat: Value| heartbeat_line(&json!({ "heartbeat": heartbeat })).unwrap();
        assert_eq!(
            line(json!({ "kubelet": "alive", "delegate": "edge-2", "last_error": null })),
            "heartbeat: the kubelet is alive, delegated through edge-2"
        );
        assert_eq!(
            line(json!({ "kubelet": "not_alive", "delegate": null, "last_error": "a\u{1b}b" })),
            "heartbeat: the kubelet is not alive, not delegated: ab"
        );
        assert_eq!(heartbeat_line(&json!({})), None);
    }

    #[test]
    fn an_address_of_several_nodes_is_one_line_with_all_of_them() {
        let edges = [
            json!({ "node": "edge-2", "address_conflicts": { "10.0.0.5": ["cloud-1", "edge-1"] } }),
            json!({ "node": "edge-1", "address_conflicts": { "10.0.0.5": ["cloud-1", "edge-2"] } }),
            json!({ "node": "edge-3" }),
        ];
        let lines = conflict_lines(&edges);
        let named = "conflict: 10.0.0.5 is an address of cloud-1, edge-1, edge-2;";
        assert!(lines.len() == 1 && lines[0].starts_with(named), "{lines:?}");
    }

    #[test]
    fn edge_text_cannot_control_the_terminal() {
        assert!(!rendered(true).contains('\u{1b}'));
    }

    #[test]
    fn no_edges_says_how_to_get_one() {
        assert!(render_edges(&[], false, SystemTime::now()).contains("token create"));
    }
}
