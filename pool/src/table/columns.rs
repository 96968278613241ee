//! The columns of each kind, and what stands in their cells.

use Cell::{Age, At, Date, Made};
use serde_json::{Value, json};
use std::time::SystemTime;

/// How many ports or endpoints a cell names before it only counts.
const NAMED: usize = 3;

/// A column: its heading, whether it is shown only when asked for (`-o wide`), its cell.
pub(super) struct Column(&'static str, bool, Cell);

enum Cell {
    /// The text at this JSON pointer, or this where there is none or an empty one.
    At(&'static str, &'static str),
    /// How long ago the object was made.
    Age,
    /// The same, as custom resources declare it.
    Date,
    /// Whatever this makes of the object.
    Made(fn(&Value) -> Value),
}

impl Column {
    pub(super) fn cell(&self, object: &Value, now: SystemTime) -> Value {
        match self.2 {
            At(pointer, otherwise) => or(text(object, pointer), otherwise).into(),
            Age | Date => age(text(object, "/metadata/creationTimestamp"), now).into(),
            Made(make) => make(object),
        }
    }

    pub(super) fn definition(&self) -> Value {
        let format = if self.0 == "Name" { "name" } else { "" };
        let kind = if matches!(self.2, Date) {
            "date"
        } else {
            "string"
        };
        json!({
            "name": self.0,
            "type": kind,
            "format": format,
            "description": "",
            "priority": u8::from(self.1),
        })
    }
}

/// The columns of a kind; those of a custom resource if it is not known.
pub(super) fn of(api_version: &str, kind: &str) -> &'static [Column] {
    match (api_version, kind) {
        ("discovery.k8s.io/v1", "EndpointSlice") => ENDPOINT_SLICE,
        ("v1", "Endpoints") => ENDPOINTS,
        ("v1", "Service") => SERVICE,
        ("v1", "Namespace") => NAMESPACE,
        ("v1", "Node") => NODE,
        ("v1", "ConfigMap") => CONFIG_MAP,
        ("networking.k8s.io/v1", "ServiceCIDR") => SERVICE_CIDR,
        _ => ANY,
    }
}

const NAME: Column = Column("Name", false, At("/metadata/name", ""));
const AGE: Column = Column("Age", false, Age);

const ANY: &[Column] = &[NAME, Column("Age", false, Date)];

const ENDPOINT_SLICE: &[Column] = &[
    NAME,
    Column("AddressType", false, At("/addressType", "")),
    Column("Ports", false, Made(slice_ports)),
    Column("Endpoints", false, Made(slice_endpoints)),
    AGE,
];

const ENDPOINTS: &[Column] = &[NAME, Column("Endpoints", false, Made(endpoints)), AGE];

const SERVICE: &[Column] = &[
    NAME,
    Column("Type", false, At("/spec/type", "")),
    Column("Cluster-IP", false, At("/spec/clusterIPs/0", NONE)),
    Column("External-IP", false, Made(external_ip)),
    Column("Port(s)", false, Made(service_ports)),
    AGE,
    Column("Selector", true, Made(selector)),
];

const NAMESPACE: &[Column] = &[NAME, Column("Status", false, At("/status/phase", "")), AGE];

const NODE: &[Column] = &[
    NAME,
    Column("Status", false, Made(node_status)),
    Column("Roles", false, Made(node_roles)),
    AGE,
    Column("Version", false, At("/status/nodeInfo/kubeletVersion", "")),
    Column(
        "Internal-IP",
        true,
        Made(|node| node_ip(node, "InternalIP")),
    ),
    Column(
        "External-IP",
        true,
        Made(|node| node_ip(node, "ExternalIP")),
    ),
    Column("OS-Image", true, At("/status/nodeInfo/osImage", UNKNOWN)),
    Column("Kernel-Version", true, Made(kernel)),
    Column(
        "Container-Runtime",
        true,
        At("/status/nodeInfo/containerRuntimeVersion", UNKNOWN),
    ),
];

const CONFIG_MAP: &[Column] = &[NAME, Column("Data", false, Made(data)), AGE];

const SERVICE_CIDR: &[Column] = &[
    NAME,
    Column(
        "CIDRs",
        false,
        Made(|cidr| joined(items(cidr, "/spec/cidrs")).into()),
    ),
    AGE,
];

const NONE: &str = "<none>";
const UNKNOWN: &str = "<unknown>";

fn slice_ports(slice: &Value) -> Value {
    let mut ports = items(slice, "/ports").iter().map(|port| {
        match (
            number(port, "/port"),
            port.get("name").and_then(Value::as_str),
        ) {
            (Some(number), _) => number.to_string(),
            (None, Some(name)) => name.to_owned(),
            (None, None) => "*".to_owned(),
        }
    });
    or(&first(&mut ports), "<unset>").into()
}

fn slice_endpoints(slice: &Value) -> Value {
    let mut addresses = items(slice, "/endpoints")
        .iter()
        .flat_map(|endpoint| items(endpoint, "/addresses"))
        .filter_map(|address| Some(address.as_str()?.to_owned()));
    or(&first(&mut addresses), "<unset>").into()
}

fn endpoints(endpoints: &Value) -> Value {
    let subsets = items(endpoints, "/subsets");
    if subsets.is_empty() {
        return NONE.into();
    }
    let mut all = Vec::new();
    for subset in subsets {
        let addresses = items(subset, "/addresses");
        let ports = items(subset, "/ports");
        // A headless Service may have no ports.
        if ports.is_empty() {
            all.extend(addresses.iter().map(|one| text(one, "/ip").to_owned()));
        }
        for port in ports {
            let port = number(port, "/port").unwrap_or_default();
            all.extend(addresses.iter().map(|one| match text(one, "/ip") {
                ip if ip.contains(':') => format!("[{ip}]:{port}"),
                ip => format!("{ip}:{port}"),
            }));
        }
    }
    first(&mut all.into_iter()).into()
}

fn external_ip(service: &Value) -> Value {
    let given = joined(items(service, "/spec/externalIPs"));
    match text(service, "/spec/type") {
        "ClusterIP" | "NodePort" => or(&given, NONE).into(),
        "LoadBalancer" => {
            let ingress = items(service, "/status/loadBalancer/ingress").iter();
            let mut balanced = ingress
                .map(|ingress| or(text(ingress, "/ip"), text(ingress, "/hostname")).to_owned())
                .filter(|address| !address.is_empty());
            let mut all = sorted(&mut balanced);
            all.extend((!given.is_empty()).then_some(given));
            or(&all.join(","), "<pending>").into()
        }
        "ExternalName" => text(service, "/spec/externalName").into(),
        _ => UNKNOWN.into(),
    }
}

fn service_ports(service: &Value) -> Value {
    let ports: Vec<String> = items(service, "/spec/ports")
        .iter()
        .map(|port| {
            let protocol = text(port, "/protocol");
            let own = number(port, "/port").unwrap_or_default();
            match number(port, "/nodePort") {
                Some(node) if node > 0 => format!("{own}:{node}/{protocol}"),
                _ => format!("{own}/{protocol}"),
            }
        })
        .collect();
    or(&ports.join(","), NONE).into()
}

fn selector(service: &Value) -> Value {
    let mut pairs = entries(service, "/spec/selector")
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()));
    or(&sorted(&mut pairs).join(","), NONE).into()
}

fn node_status(node: &Value) -> Value {
    let ready = items(node, "/status/conditions")
        .iter()
        .rfind(|condition| text(condition, "/type") == "Ready");
    let ready = match ready.map(|condition| text(condition, "/status")) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    };
    let unschedulable = node.pointer("/spec/unschedulable") == Some(&Value::Bool(true));
    let further = if unschedulable {
        ",SchedulingDisabled"
    } else {
        ""
    };
    format!("{ready}{further}").into()
}

fn node_roles(node: &Value) -> Value {
    let mut roles = entries(node, "/metadata/labels")
        .filter_map(|(key, value)| match key.as_str() {
            "kubernetes.io/role" => value.as_str(),
            _ => key.strip_prefix("node-role.kubernetes.io/"),
        })
        .filter(|role| !role.is_empty())
        .map(str::to_owned);
    or(&sorted(&mut roles).join(","), NONE).into()
}

fn node_ip(node: &Value, kind: &str) -> Value {
    items(node, "/status/addresses")
        .iter()
        .find(|address| text(address, "/type") == kind)
        .map_or(NONE, |address| text(address, "/address"))
        .into()
}

fn kernel(node: &Value) -> Value {
    let version = or(text(node, "/status/nodeInfo/kernelVersion"), UNKNOWN);
    match text(node, "/status/nodeInfo/architecture") {
        "" => version.into(),
        architecture => format!("{version} ({architecture})").into(),
    }
}

fn data(config: &Value) -> Value {
    (entries(config, "/data").count() + entries(config, "/binaryData").count()).into()
}

/// The first few, and how many more there are.
fn first(all: &mut dyn Iterator<Item = String>) -> String {
    let named: Vec<String> = all.take(NAMED).collect();
    let named = named.join(",");
    match all.count() {
        0 => named,
        more => format!("{named} + {more} more..."),
    }
}

/// How long ago that was, in the two or three figures that kubectl gives it.
fn age(since: &str, now: SystemTime) -> String {
    let Ok(since) = humantime::parse_rfc3339(since) else {
        return UNKNOWN.to_owned();
    };
    match now.duration_since(since) {
        Ok(passed) => human(passed.as_secs()),
        // Clocks differ a little.
        Err(early) if early.duration().as_secs() < 2 => human(0),
        Err(_) => "<invalid>".to_owned(),
    }
}

fn human(seconds: u64) -> String {
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    let (days, years) = (hours / 24, hours / 24 / 365);
    let two = |large: u64, unit, small: u64, fraction| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit}{small}{fraction}"),
    };
    match (seconds, minutes, hours) {
        (..120, ..) => format!("{seconds}s"),
        (_, ..10, _) => two(minutes, 'm', seconds % 60, 's'),
        (_, ..180, _) => format!("{minutes}m"),
        (.., ..8) => two(hours, 'h', minutes % 60, 'm'),
        (.., ..48) => format!("{hours}h"),
        (.., ..192) => two(days, 'd', hours % 24, 'h'),
        _ if years < 2 => format!("{days}d"),
        _ if years < 8 => two(years, 'y', days % 365, 'd'),
        _ => format!("{years}y"),
    }
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn number(value: &Value, pointer: &str) -> Option<i64> {
    value.pointer(pointer)?.as_i64()
}

fn items<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    value
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

fn entries<'a>(value: &'a Value, pointer: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    value
        .pointer(pointer)
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
}

fn joined(texts: &[Value]) -> String {
    let texts: Vec<String> = texts
        .iter()
        .filter_map(|text| Some(text.as_str()?.to_owned()))
        .collect();
    texts.join(",")
}

/// Each once. There are few, and this is far less code than a sort or a set.
fn sorted(all: &mut dyn Iterator<Item = String>) -> Vec<String> {
    let mut sorted = Vec::new();
    for text in all {
        if let Err(at) = sorted.binary_search(&text) {
            sorted.insert(at, text);
        }
    }
    sorted
}
