//! Traces that the OpenTelemetry SDK exports through the edge.

use super::{app_only, join, listeners, world};
use crate::world::tool::{Running, Tool, need};

/// Waits until the collector has this many distinct spans.
async fn collected(collector: &mut Running, spans: u64) {
    while collector.json().await["spans"] != spans {}
}

#[tokio::test]
async fn an_otlp_exporter_delivers_all_spans_across_a_gateway_restart() {
    need!("python:opentelemetry.exporter.otlp.proto.grpc");
    let mut collector = Tool::python("otlp_collector.py").start();
    let port = collector.json().await["port"].as_u64().unwrap();
    let port = u16::try_from(port).unwrap();
    let mut world = world(app_only(([127, 0, 0, 1], port).into())).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let mut open = listeners(&edge).into_iter();
    let (_, address) = open.find(|(to, _)| to.is_some()).unwrap();
    let exporter = Tool::python("otlp_exporter.py");
    let exporter = exporter.args(["--address", &address.to_string()]);
    let mut exporter = exporter.start();
    exporter.send("1000\n").await;
    collected(&mut collector, 1_000).await;
    world.kill_gateway().await;
    exporter.send("1000\n").await;
    world.start_gateway().await;
    collected(&mut collector, 2_000).await;
}
