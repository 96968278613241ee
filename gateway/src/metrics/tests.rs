use super::*;
use crate::error::Reason;

fn line(all: &str, begin: &str) -> Option<String> {
    let full = format!("causeway_gateway_{begin} ");
    let line = all.lines().find(|line| line.starts_with(&full))?;
    Some(line.trim_start_matches(&full).to_owned())
}

#[test]
fn guards_count_open_connections() {
    let metrics = Metrics::new();
    let open = r#"open_connections{listener="https"}"#;
    let connection = metrics.listener("https").connection_guard();
    let stream = metrics.listener("tcp").stream_guard();
    assert_eq!(
        line(&metrics.encode(Exposition::OpenMetrics), open).as_deref(),
        Some("1")
    );
    let streams = r#"open_streams{listener="tcp"}"#;
    assert_eq!(
        line(&metrics.encode(Exposition::OpenMetrics), streams).as_deref(),
        Some("1")
    );
    drop((connection, stream));
    let all = metrics.encode(Exposition::OpenMetrics);
    assert_eq!(line(&all, open).as_deref(), Some("0"));
    assert_eq!(line(&all, streams).as_deref(), Some("0"));
    let total = r#"connections_total{listener="https"}"#;
    assert_eq!(line(&all, total).as_deref(), Some("1"));
}

#[test]
fn an_ended_stream_is_counted_by_outcome_class_time_and_bytes() {
    let metrics = Metrics::new();
    let listener = metrics.listener("https");
    listener.stream_ended(&StreamOutcome {
        status: 200,
        duration: Duration::from_millis(70),
        first_byte: Some(Duration::from_millis(3)),
        up: 5,
        down: 70,
        ..StreamOutcome::default()
    });
    listener.stream_ended(&StreamOutcome {
        reason: Some(Reason::NodeNotConnected),
        status: 503,
        duration: Duration::from_hours(2),
        down: 9,
        ..StreamOutcome::default()
    });
    let all = metrics.encode(Exposition::OpenMetrics);
    for (begin, value) in [
        (r#"streams_total{listener="https",outcome="ok"}"#, "1"),
        (
            r#"streams_total{listener="https",outcome="node_not_connected"}"#,
            "1",
        ),
        (
            r#"streams_total{listener="https",outcome="forbidden"}"#,
            "0",
        ),
        (r#"responses_total{listener="https",class="2xx"}"#, "1"),
        (r#"responses_total{listener="https",class="5xx"}"#, "1"),
        (
            r#"stream_bytes_total{listener="https",direction="up"}"#,
            "5",
        ),
        (
            r#"stream_bytes_total{listener="https",direction="down"}"#,
            "79",
        ),
        (
            r#"stream_duration_seconds_bucket{le="0.05",listener="https"}"#,
            "0",
        ),
        (
            r#"stream_duration_seconds_bucket{le="0.1",listener="https"}"#,
            "1",
        ),
        (
            r#"stream_duration_seconds_bucket{le="3600.0",listener="https"}"#,
            "1",
        ),
        (
            r#"stream_duration_seconds_bucket{le="+Inf",listener="https"}"#,
            "2",
        ),
        (r#"stream_duration_seconds_count{listener="https"}"#, "2"),
        (r#"stream_first_byte_seconds_count{listener="https"}"#, "1"),
    ] {
        let found = line(&all, begin);
        assert_eq!(found.as_deref(), Some(value), "{begin} in\n{all}");
    }
}

#[test]
fn a_value_on_a_bound_is_below_it() {
    let metrics = Metrics::new();
    metrics.listener("http").stream_ended(&StreamOutcome {
        duration: Duration::from_micros(500),
        ..StreamOutcome::default()
    });
    let bucket = r#"stream_duration_seconds_bucket{le="0.0005",listener="http"}"#;
    assert_eq!(
        line(&metrics.encode(Exposition::OpenMetrics), bucket).as_deref(),
        Some("1")
    );
}

#[test]
fn round_trips_are_quantiles_of_the_moment() {
    let metrics = Metrics::new();
    metrics.set_round_trips((1..=100).map(Duration::from_millis).collect());
    let all = metrics.encode(Exposition::OpenMetrics);
    for (quantile, seconds) in [("0.5", "0.05"), ("0.99", "0.099"), ("1", "0.1")] {
        let begin = format!(r#"tunnel_round_trip_seconds{{quantile="{quantile}"}}"#);
        assert_eq!(line(&all, &begin).as_deref(), Some(seconds));
    }
    metrics.set_round_trips(Vec::new());
    let slowest = r#"tunnel_round_trip_seconds{quantile="1"}"#;
    assert_eq!(
        line(&metrics.encode(Exposition::OpenMetrics), slowest).as_deref(),
        Some("0.0")
    );
}

#[test]
fn the_text_has_help_for_each_metric_and_an_openmetrics_end() {
    let metrics = Metrics::new();
    metrics.handshake_failed("tunnel", "timeout");
    metrics.count_limit_reached("per_node");
    metrics.count_worker_crossing();
    metrics.count_registration("ok");
    metrics.count_tunnel_end("silent");
    metrics.count_enrolment("enrol", "ok");
    metrics.set_draining();
    drop(metrics.tunnel_guard());
    let all = metrics.encode(Exposition::OpenMetrics);
    assert!(all.ends_with("# EOF\n"));
    for metric in all.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = metric.split(' ').next().unwrap();
        assert!(all.contains(&format!("# HELP {name} ")), "{name}");
    }
    let why = r#"tunnels_ended_total{why="silent"}"#;
    assert_eq!(line(&all, why).as_deref(), Some("1"));
}

#[test]
fn two_listeners_of_one_kind_have_separate_metrics() {
    let metrics = Metrics::new();
    metrics
        .listener("ssh-1")
        .stream_ended(&StreamOutcome::default());
    metrics.listener("ssh-2");
    let all = metrics.encode(Exposition::OpenMetrics);
    let ok = |name: &str| {
        line(
            &all,
            &format!(r#"streams_total{{listener="{name}",outcome="ok"}}"#),
        )
    };
    assert_eq!(ok("ssh-1").as_deref(), Some("1"));
    assert_eq!(ok("ssh-2").as_deref(), Some("0"));
}
