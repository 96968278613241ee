//! Durations and sizes as people write them: `5s`, `1m 30s`, `64MiB`.
//!
//! Both are types for `#[serde(with = "…")]`, so a struct has a plain `Duration` or `usize`, and its schema says which of the two
//! it is. A duration always has a unit: a bare number is refused, since it could mean seconds or milliseconds.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serializer};

/// `#[serde(with = "DurationStr")]` for a `Duration`.
#[derive(Debug)]
pub struct DurationStr;

impl DurationStr {
    /// Writes `1m 30s`.
    pub fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*value))
    }

    /// Reads `1m 30s`.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        from.deserialize_any(DurationVisitor)
    }
}

impl schemars::JsonSchema for DurationStr {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Duration".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "human-duration" })
    }
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str("a duration with its unit, such as \"5s\", \"500ms\" or \"1m 30s\"")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        humantime::parse_duration(text).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }
}

/// `#[serde(with = "ByteSize")]` for a `usize` of bytes.
#[derive(Debug)]
pub struct ByteSize;

/// Units, the largest first, so that a size is written with the shortest number.
const BINARY_UNITS: [(&str, usize); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
const DECIMAL_UNITS: [(&str, usize); 4] = [
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

impl ByteSize {
    /// Writes `64MiB`.
    pub fn serialize<S: Serializer>(value: &usize, to: S) -> Result<S::Ok, S::Error> {
        match BINARY_UNITS
            .iter()
            .find(|(_, unit)| *value > 0 && value.is_multiple_of(*unit))
        {
            Some((name, unit)) => to.collect_str(&format_args!("{}{name}", value / unit)),
            None => to.collect_str(&format_args!("{value}B")),
        }
    }

    /// Reads `64MiB`. A size is a whole number of a unit, so fractions such as `1.5MB` are refused.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
        from.deserialize_any(SizeVisitor)
    }

    fn parse(text: &str) -> Option<usize> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
        let unit = text[digits.len()..].trim_start();
        let number: usize = digits.parse().ok()?;
        if unit.is_empty() {
            return Some(number);
        }
        let (_, factor) = BINARY_UNITS
            .iter()
            .chain(&DECIMAL_UNITS)
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
        number.checked_mul(*factor)
    }
}

impl schemars::JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Size".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["string", "integer"], "format": "size" })
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = usize;

    fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str("a number of bytes, such as \"64KiB\", \"16MiB\" or 65536")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<usize, E> {
        usize::try_from(number).map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<usize, E> {
        ByteSize::parse(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

/// `#[serde(with = "IpNetList")]` for a `Vec<IpNet>`, which may hold plain addresses.
#[derive(Debug)]
pub struct IpNetList;

impl IpNetList {
    /// Writes `10.0.0.0/8`.
    pub fn serialize<S: Serializer>(value: &[IpNet], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(value)
    }

    /// Reads `10.0.0.0/8` and `192.168.1.7`.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<IpNet>, D::Error> {
        let networks = Vec::<Network>::deserialize(from)?;
        Ok(networks.into_iter().map(|network| network.0).collect())
    }
}

impl schemars::JsonSchema for IpNetList {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Networks".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "array", "items": { "type": "string" } })
    }
}

struct Network(IpNet);

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let network = text.parse::<IpNet>();
        let network = network.or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        let network = network.map_err(|_| {
            D::Error::custom(format!(
                "\"{text}\" is not a network; write 10.0.0.0/8, 2001:db8::/32 or 192.168.1.7"
            ))
        })?;
        canonical_network(network)
            .map(Self)
            .map_err(D::Error::custom)
    }
}

/// Checks that a network has no host bits. `10.1.2.3/8` could mean one address or the whole network, and the author must
/// decide.
///
/// # Errors
/// A message with the text to write instead.
pub fn canonical_network(network: IpNet) -> Result<IpNet, String> {
    let truncated = network.trunc();
    if truncated == network {
        return Ok(network);
    }
    let address = network.addr();
    Err(format!(
        "\"{network}\" is an address within a network; write {truncated} for the whole network, or {address} for this one address"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;
    use serde_json::{Value, from_value, json, to_value};

    #[derive(Serialize, Deserialize, Debug, PartialEq)]
    struct Sample {
        #[serde(with = "DurationStr")]
        wait: Duration,
        #[serde(with = "ByteSize")]
        size: usize,
    }

    fn read(wait: &Value, size: &Value) -> Result<Sample, String> {
        from_value(json!({ "wait": wait, "size": size })).map_err(|error| error.to_string())
    }

    #[test]
    fn formatted_units_parse_back() {
        for (wait, size) in [(90, 64 << 20), (5, 1000), (1, 0)] {
            let wait = Duration::from_secs(wait);
            let sample = Sample { wait, size };
            let text = to_value(&sample).unwrap();
            assert_eq!(from_value::<Sample>(text).unwrap(), sample);
        }
    }

    #[derive(Deserialize, Debug)]
    struct Nets(#[serde(with = "IpNetList")] Vec<IpNet>);

    #[test]
    fn a_network_is_meant_as_it_is_written() {
        let read = |text: &str| from_value::<Nets>(json!([text])).map(|nets| nets.0[0].to_string());
        assert_eq!(read("10.0.0.0/8").unwrap(), "10.0.0.0/8");
        assert_eq!(read("192.168.1.7").unwrap(), "192.168.1.7/32");
        let output = read("10.1.2.3/8").unwrap_err().to_string();
        assert!(
            output.contains("write 10.0.0.0/8")
                && output.contains("or 10.1.2.3 for this one address"),
            "{output}"
        );
    }

    #[test]
    fn units_are_read_in_any_case_and_with_a_space() {
        for (text, size) in [
            ("64kib", 65536),
            ("1 MiB", 1 << 20),
            ("2MB", 2_000_000),
            ("7", 7),
        ] {
            assert_eq!(read(&json!("1s"), &json!(text)).unwrap().size, size);
        }
        assert_eq!(
            read(&json!("1m 30s"), &json!(9)).unwrap().wait.as_secs(),
            90
        );
    }

    #[test]
    fn faults_state_the_expected_format() {
        let message = read(&json!(5), &json!(1)).unwrap_err();
        assert!(
            message.contains("integer `5`") && message.contains("\"5s\""),
            "{message}"
        );
        for bad in [
            json!("64 apples"),
            json!("-1"),
            json!("99999999999GiB"),
            json!("é"),
        ] {
            let message = read(&json!("5s"), &bad).unwrap_err();
            assert!(message.contains("64KiB"), "{message}");
        }
    }
}
