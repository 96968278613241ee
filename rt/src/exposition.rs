//! Text formats in which metrics are exposed, and the metrics that every process has.

use std::fmt::Write as _;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use crate::process;

/// Text format in which metrics are exposed to a scraper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// `OpenMetrics` 1.0.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Prometheus,
}

impl Exposition {
    /// Returns the format that a field `Accept` prefers (RFC 9110 section 12.5.1), `OpenMetrics` if it names neither.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let mut best = (0, Self::OpenMetrics);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let format = match media.as_str() {
                "application/openmetrics-text" | "application/*" | "*/*" => Self::OpenMetrics,
                "text/plain" | "text/*" => Self::Prometheus,
                _ => continue,
            };
            let weight = parse_weight(parts.find_map(|part| part.strip_prefix("q=")));
            if weight > best.0 {
                best = (weight, format);
            }
        }
        best.1
    }

    /// Returns the format's content type.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Returns the metrics of these registries and those of the process as text.
    pub fn encode(self, registries: &[&Registry]) -> String {
        let mut text = String::new();
        let process = process_registry();
        let mut all = registries.iter().copied().chain([&process]);
        let encoded = all.try_for_each(|registry| encode_registry(&mut text, registry));
        encoded
            .and_then(|()| encode_eof(&mut text))
            .expect("writing to a String cannot fail");
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => to_prometheus(&text),
        }
    }
}

/// Returns the weight of a media range in thousandths, or 1000 if it has none or an invalid one.
fn parse_weight(weight: Option<&str>) -> u16 {
    let parse_number = |text: &str| text.parse().ok();
    let parse = |text: &str| match text.split_once('.') {
        None => parse_number(text).map(|whole: u16| whole.saturating_mul(1000)),
        Some((whole, fraction)) => {
            let (whole, fraction) = (
                parse_number(whole)?,
                parse_number(&format!("{fraction:0<3.3}"))?,
            );
            Some(whole.saturating_mul(1000).saturating_add(fraction))
        }
    };
    weight.and_then(parse).unwrap_or(1000).min(1000)
}

/// Converts `OpenMetrics` into Prometheus' text format. A counter is declared by the name of its samples, and there are no
/// units and no end mark.
fn to_prometheus(text: &str) -> String {
    let mut all = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        if let Some(declared) = line.strip_prefix("# HELP ") {
            help = declared.split_once(' ');
        } else if let Some(declared) = line.strip_prefix("# TYPE ") {
            let (name, kind) = declared.split_once(' ').unwrap_or((declared, "untyped"));
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            // Writing to a String cannot fail.
            if let Some((_, help)) = help.take() {
                let _ = writeln!(all, "# HELP {name}{suffix} {help}");
            }
            let _ = writeln!(all, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with("# ") {
            all.extend([line, "\n"]);
        }
    }
    all
}

/// Returns the metrics of the process and its build at this time.
fn process_registry() -> Registry {
    let mut registry = Registry::default();
    let build = Family::<[(&str, &str); 1], Gauge>::default();
    build
        .get_or_create(&[("version", env!("CARGO_PKG_VERSION"))])
        .set(1);
    registry.register("causeway_build_info", "Version of this build", build);
    let dropped =
        Family::<[(&str, &str); 1], prometheus_client::metrics::counter::Counter>::default();
    for (log, lines) in process::dropped_log_lines() {
        dropped.get_or_create(&[("log", log)]).inc_by(lines);
    }
    registry.register(
        "causeway_log_lines_dropped",
        "Log lines that were dropped because the reader or disk was too slow, by log",
        dropped,
    );
    let Some(usage) = process::Usage::now() else {
        return registry;
    };
    registry.register(
        "process_cpu_seconds",
        "User and system CPU time",
        ConstCounter::new(usage.cpu_seconds),
    );
    registry.register(
        "process_start_time_seconds",
        "Start time of the process, in Unix time",
        ConstGauge::new(usage.start_time_seconds),
    );
    for (name, help, value) in [
        ("open_fds", "Open file descriptors", usage.open_fds),
        (
            "max_fds",
            "Maximum number of open file descriptors",
            usage.max_fds,
        ),
        ("threads", "Threads", usage.threads),
        (
            "resident_memory_bytes",
            "Resident memory size",
            usage.resident_bytes,
        ),
        (
            "virtual_memory_bytes",
            "Virtual memory size",
            usage.virtual_bytes,
        ),
    ] {
        let name = format!("process_{name}");
        registry.register(name, help, ConstGauge::new(value));
    }
    registry
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;

    #[test]
    fn the_format_is_the_one_that_a_scraper_prefers() {
        let (open, prometheus) = (Exposition::OpenMetrics, Exposition::Prometheus);
        for (accept, format) in [
            (None, open),
            (Some("*/*"), open),
            (Some("text/plain;version=0.0.4"), prometheus),
            (Some("text/plain; version=0.0.4; charset=utf-8"), prometheus),
            (Some("TEXT/PLAIN"), prometheus),
            (Some("text/html"), open),
            (Some("text/plain;q=0"), open),
            // Prometheus 2.
            (
                Some(
                    "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
                ),
                open,
            ),
            (
                Some(
                    "application/openmetrics-text;q=0.25,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
                ),
                prometheus,
            ),
        ] {
            assert_eq!(Exposition::negotiate(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn the_text_format_names_counters_by_samples_without_end_mark() {
        let mut registry = Registry::with_prefix("x");
        let counter: Counter = Counter::default();
        registry.register("requests", "Requests", counter.clone());
        counter.inc();
        let text = Exposition::Prometheus.encode(&[&registry]);
        let requests = "# HELP x_requests_total Requests.\n# TYPE x_requests_total counter\nx_requests_total 1\n";
        assert!(text.contains(requests), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"));
        assert!(text.contains("# TYPE process_open_fds gauge\nprocess_open_fds "));

        let text = Exposition::OpenMetrics.encode(&[&registry]);
        assert!(text.contains("# TYPE x_requests counter\nx_requests_total 1\n"));
        assert!(text.ends_with("# EOF\n"));
        let version = concat!(
            "causeway_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\"} 1\n"
        );
        assert!(text.contains(version), "{text}");
    }
}
