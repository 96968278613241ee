//! Single ports and ranges of ports.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// One port, or a range of ports `FIRST-LAST`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRange(pub(super) RangeInclusive<u16>);

impl PortRange {
    /// Whether the range contains this port.
    pub fn contains(&self, port: u16) -> bool {
        self.0.contains(&port)
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        match (port(first), port(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Self(first..=last)),
            _ => Err(format!(
                "\"{text}\" is not a port or a range of ports; write 9100 or 9000-9999; ports are 1 to 65535"
            )),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.start(), self.0.end());
        if first == last {
            return first.fmt(f);
        }
        write!(f, "{first}-{last}")
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for PortRange {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "PortRange".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AnnouncedPortPolicy;
    use serde_json::json;

    #[test]
    fn a_written_port_or_range_parses_back() {
        for (text, inside, outside) in [
            ("9100", 9100, 9101),
            ("9000-9999", 9999, 8999),
            ("1-65535", 65535, 0),
        ] {
            let range: PortRange = text.parse().unwrap();
            assert_eq!(range.to_string(), text);
            assert!(range.contains(inside) && !range.contains(outside), "{text}");
        }
        for text in ["", "0", "0-5", "9-1", "65536", "a", "1-2-3", "-"] {
            assert!(text.parse::<PortRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_cluster_node_serves_listed_ports_within_its_owners_limits() {
        let of =
            |config| AnnouncedPortPolicy::from_config(&serde_json::from_value(config).unwrap());
        for (config, takes) in [
            (json!({}), [false; 3]),
            (json!({ "kubernetes": {} }), [true, true, false]),
            (json!({ "kubernetes": {}, "listed_ports": [] }), [false; 3]),
            (
                json!({ "kubernetes": {}, "listed_ports": ["9000-9999"] }),
                [true, false, false],
            ),
            (json!({ "listed_ports": ["1-65535"] }), [true, true, false]),
            (
                json!({ "listed_ports": ["9051", "10266"] }),
                [true, false, true],
            ),
        ] {
            let listable = of(config.clone());
            let takes_now = [9051, 22, 10266].map(|port| listable.permits(port, &[10266]));
            assert_eq!(takes_now, takes, "{config}");
            assert_eq!(listable.is_empty(), takes == [false; 3], "{config}");
            assert!(!listable.permits(0, &[10266]), "{config}");
        }
    }
}
