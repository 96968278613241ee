//! Parser of the ports in a `ConfigMap`: comma-separated, by the keys of OpenYurt's `yurt-tunnel-server-cfg`.

use causeway_gateway::config::NodePorts;
use std::collections::{BTreeMap, BTreeSet};

/// Ports that have listeners of their own in OpenYurt's tunnel server. The list does not concern them.
const RESERVED_PORTS: [u16; 2] = [10250, 10255];
/// HTTP port of OpenYurt's tunnel server, to which the older key mapped ports.
const INSECURE_PORT: &str = "10264";
/// The older key.
const PAIRS_KEY: &str = "dnat-ports-pair";
/// Maximum number of ports. Each port is a listener, and a longer list is a mistake.
const MAX_PORTS: usize = 256;

/// Returns the ports under these keys, and each entry that is not a port, with its key.
///
/// # Errors
/// If there are too many ports.
pub(super) fn parse_ports(
    data: &BTreeMap<String, String>,
) -> Result<(NodePorts, Vec<String>), String> {
    let mut faults = Vec::new();
    let mut parse_key = |key: &str| -> BTreeSet<u16> {
        let mut ports = BTreeSet::new();
        for part in split_entries(data, key) {
            match parse_port(key, part) {
                Ok(port) if RESERVED_PORTS.contains(&port) => {}
                Ok(port) => {
                    ports.insert(port);
                }
                Err(fault) => faults.push(fault),
            }
        }
        ports
    };
    let mut ports = NodePorts {
        http: parse_key("http-proxy-ports"),
        https: parse_key("https-proxy-ports"),
        loopback: parse_key("localhost-proxy-ports"),
    };
    for pair in split_entries(data, PAIRS_KEY) {
        match mapped_port(pair) {
            Ok(from) => ports.http.extend(from),
            Err(fault) => faults.push(fault),
        }
    }
    let conflicting: Vec<u16> = ports.http.intersection(&ports.https).copied().collect();
    for port in conflicting {
        ports.http.remove(&port);
        ports.https.remove(&port);
        faults.push(format!("{port} is listed both as http and as https"));
    }
    let count = ports.served().count();
    if count > MAX_PORTS {
        return Err(format!(
            "{count} ports are listed, but at most {MAX_PORTS} are allowed"
        ));
    }
    Ok((ports, faults))
}

/// Returns the port of a pair that maps it to the listener for HTTP.
fn mapped_port(pair: &str) -> Result<Option<u16>, String> {
    let Some((from, to)) = pair.split_once('=') else {
        return Err(format!(
            "{PAIRS_KEY}: \"{pair}\" is not a valid pair; write 9100={INSECURE_PORT}"
        ));
    };
    let from = parse_port(PAIRS_KEY, from.trim())?;
    Ok((to.trim() == INSECURE_PORT && !RESERVED_PORTS.contains(&from)).then_some(from))
}

fn split_entries<'a>(
    data: &'a BTreeMap<String, String>,
    key: &str,
) -> impl Iterator<Item = &'a str> {
    let value = data.get(key).map_or("", String::as_str);
    let parts = value.split(',').map(str::trim);
    parts.filter(|part| !part.is_empty())
}

fn parse_port(key: &str, text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| {
        format!("{key}: \"{text}\" is not a valid port; write numbers from 1 to 65535, separated by commas")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(pairs: &[(&str, &str)]) -> Result<(NodePorts, Vec<String>), String> {
        let pairs = pairs.iter();
        parse_ports(
            &pairs
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn openyurts_keys_are_read_as_they_are() {
        let ports = read_of(&[
            ("http-proxy-ports", "9051, 9100,10250 , "),
            ("https-proxy-ports", "9443"),
            ("localhost-proxy-ports", "10266, 10267"),
            ("dnat-ports-pair", "9101=10264, 9102=10263"),
            ("somebody's", "x"),
        ]);
        let (ports, faults) = ports.unwrap();
        assert!(faults.is_empty(), "{faults:?}");
        assert_eq!(ports.http, [9051, 9100, 9101].into());
        assert_eq!(
            (ports.https, ports.loopback),
            ([9443].into(), [10266, 10267].into())
        );
        assert_eq!(read_of(&[]).unwrap().0, NodePorts::default());
    }

    #[test]
    fn entries_that_are_no_port_are_named_and_the_others_read() {
        for (key, value, says) in [
            (
                "http-proxy-ports",
                "9051,x",
                "http-proxy-ports: \"x\" is not a valid port",
            ),
            ("https-proxy-ports", "0", "\"0\" is not a valid port"),
            (
                "localhost-proxy-ports",
                "70000",
                "\"70000\" is not a valid port",
            ),
            (
                "http-proxy-ports",
                "9051 9052",
                "\"9051 9052\" is not a valid port",
            ),
            ("dnat-ports-pair", "9100", "is not a valid pair"),
        ] {
            let good = ("https-proxy-ports", "9443");
            let (ports, message) = read_of(&[good, (key, value)]).unwrap();
            assert!(message[0].contains(says), "{message:?}");
            assert!(ports.https.contains(&9443) || key == good.0, "{ports:?}");
        }
        let pairs = [
            ("http-proxy-ports", "9051,x,9100"),
            ("https-proxy-ports", "9100"),
        ];
        let (ports, message) = read_of(&pairs).unwrap();
        assert_eq!((ports.http, ports.https), ([9051].into(), [].into()));
        assert_eq!(message[1], "9100 is listed both as http and as https");
        let many: Vec<_> = (2000..2300).map(|port| port.to_string()).collect();
        let message = read_of(&[("http-proxy-ports", &many.join(","))]).unwrap_err();
        assert!(message.contains("300 ports"), "{message}");
    }
}
