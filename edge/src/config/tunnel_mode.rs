//! Number of gateways to which an edge has tunnels.

use causeway_tunnel::wire::MAX_GATEWAYS_PER_EDGE;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::str::FromStr;

/// Gateways to which an edge opens tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelMode {
    /// At one gateway, and at another gateway if the first one fails.
    One,
    /// At this number of gateways, from 1 to 64: those with the highest rank for this node.
    Count(u32),
    /// At each address that the gateways' names resolve to, and at each gateway behind it.
    Every,
}

impl Default for TunnelMode {
    /// At two gateways: no request is lost with one of them, and the cost does not grow with the number of gateways.
    fn default() -> Self {
        Self::Count(2)
    }
}

impl TunnelMode {
    /// Returns the maximum number of gateways with tunnels.
    pub(crate) fn max_gateways(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Count(count) => count,
            Self::Every => u32::MAX,
        }
    }

    /// Returns the number of gateways, if it is configured as a number.
    pub(crate) fn count(self) -> Option<u32> {
        match self {
            Self::Count(count) => Some(count),
            Self::One | Self::Every => None,
        }
    }

    fn from_count(count: i64) -> Option<Self> {
        let count = u32::try_from(count).ok()?;
        (1..=MAX_GATEWAYS_PER_EDGE)
            .contains(&count)
            .then_some(Self::Count(count))
    }
}

impl FromStr for TunnelMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "one" => Ok(Self::One),
            "every" => Ok(Self::Every),
            // Flags and variables are texts.
            _ => text
                .parse()
                .ok()
                .and_then(Self::from_count)
                .ok_or_else(|| unknown_mode(text)),
        }
    }
}

fn unknown_mode(text: &str) -> String {
    format!("\"{text}\" is not one, every or a number from 1 to {MAX_GATEWAYS_PER_EDGE}")
}

impl Serialize for TunnelMode {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::One => to.serialize_str("one"),
            Self::Every => to.serialize_str("every"),
            Self::Count(count) => to.serialize_u32(*count),
        }
    }
}

impl<'de> Deserialize<'de> for TunnelMode {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(i64),
            Text(String),
        }
        let mode = match Written::deserialize(from)? {
            Written::Number(count) => {
                Self::from_count(count).ok_or_else(|| unknown_mode(&count.to_string()))
            }
            Written::Text(text) => text.parse(),
        };
        mode.map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for TunnelMode {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TunnelMode".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": ["string", "integer"],
            "format": "gateway-count",
            "pattern": "^(one|every|[1-9]|[1-5][0-9]|6[0-4])$",
            "minimum": 1,
            "maximum": MAX_GATEWAYS_PER_EDGE,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_mode_is_a_word_or_a_number_from_1_to_64() {
        let parse = |value| serde_json::from_value::<TunnelMode>(value);
        for (value, mode) in [
            (json!("one"), TunnelMode::One),
            (json!("every"), TunnelMode::Every),
            (json!(1), TunnelMode::Count(1)),
            (json!(64), TunnelMode::Count(64)),
        ] {
            assert_eq!(parse(value.clone()).unwrap(), mode);
            assert_eq!(serde_json::to_value(mode).unwrap(), value);
        }
        assert_eq!(parse(json!("2")).unwrap(), TunnelMode::Count(2));
        for wrong in [
            json!(0),
            json!(65),
            json!("all"),
            json!("0"),
            json!(1_u64 << 32),
            json!(-1),
        ] {
            let error = parse(wrong.clone()).unwrap_err().to_string();
            assert!(error.contains("a number from 1 to 64"), "{error}");
        }
        assert!(parse(json!(1.5)).is_err());
    }
}
