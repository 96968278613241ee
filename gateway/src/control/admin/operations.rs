//! The operations of the admin listener. The router and the OpenAPI document are made from this one table.

use super::{
    AdminState, ApiCacheSummary, certificates,
    edges::{EdgeDetail, EdgeSummary},
    get_edge, list_edges, list_targets, load_ca, other_gateways,
    peers::PeerSummary,
    pool, readyz, refresh, reload, revocations, rotation, scrape,
};
use crate::{
    config::Admin,
    control::{
        ca_rotation::RotationStatus,
        certificate_expiry::CertificateInUse,
        gateway_revocation::RevocationStatus,
        http::{PROBLEM_JSON, ProblemBody},
    },
    state::TargetGroup,
};
use axum::{
    handler::Handler,
    routing::{MethodFilter, MethodRouter, on},
};
use causeway_certs::NodeName;
use causeway_config::openapi::{self, Operation, Response};
use serde_json::Value;

/// Operation with its method's handler.
type Route = (Operation, MethodRouter<AdminState>);

/// Returns the operations.
pub(super) fn operations() -> Vec<Route> {
    let mut all = node_operations();
    all.extend(read_operations());
    all.extend(write_operations());
    all
}

/// Returns the operations that list nodes.
fn node_operations() -> Vec<Route> {
    vec![
        route(
            Operation::get("/api/v1/edges", "All nodes that are enrolled or connected").json::<Vec<
                EdgeSummary,
            >>(
                "The nodes, by name",
            ),
            list_edges,
        ),
        route(
            Operation::get(
                "/api/v1/http_sd",
                "Nodes and their services as targets for the HTTP service discovery of Prometheus; `?port=9100` for this port of every known node",
            )
            .json::<Vec<TargetGroup>>("The targets, by node")
            .response(problem(400, "`malformed`: the query is not `port=NUMBER`")),
            list_targets,
        ),
        route(
            Operation::get("/api/v1/edges/{node}", "One node with its tunnels")
                .json::<EdgeDetail>("The node")
                .response(problem(404, "`node_unknown`: no node has this name")),
            get_edge,
        ),
    ]
}

/// Returns the other operations that only read tables.
fn read_operations() -> Vec<Route> {
    vec![
        route(
            Operation::get("/healthz", "Health").text(200, "`ok`"),
            || async { "ok\n" },
        ),
        route(
            Operation::get("/readyz", "Readiness")
                .text(200, "`ready`, then `fault: …` lines")
                .text(503, "The reason, then `fault: …` lines"),
            readyz,
        ),
        route(Operation::get("/metrics", "Metrics").metrics(), scrape),
        route(
            Operation::get("/api/v1/peers", "Other gateways")
                .json::<Vec<PeerSummary>>("The gateways, by address"),
            other_gateways,
        ),
        route(
            Operation::get("/api/v1/certificates", "Certificates in use")
                .json::<Vec<CertificateInUse>>("The certificates")
                .response(problem(503, "`reloading`: a reload is in progress")),
            certificates,
        ),
        route(
            Operation::get("/api/v1/pool", "Resources of the API cache")
                .json::<ApiCacheSummary>("The resources, and the leader of each pool")
                .response(problem(404, "`path_unknown`: there is no `api_cache`")),
            pool,
        ),
        route(
            Operation::get("/api/v1/ca", "Roots, and the progress of a rotation")
                .json::<RotationStatus>("The roots"),
            rotation,
        ),
        route(
            Operation::get(
                "/api/v1/ca/revocations",
                "Revocations of gateways, and the nodes that know them",
            )
            .json::<RevocationStatus>("The numbers of revocations and of nodes"),
            revocations,
        ),
    ]
}

/// Returns the operations that change state.
fn write_operations() -> Vec<Route> {
    let unreadable_directory = "`gateway_failed`: the data directory cannot be read";
    vec![
        route(
            Operation::post("/api/v1/reload", "Reload the configuration").reload(),
            reload,
        ),
        route(
            Operation::post("/api/v1/refresh", "Read the nodes of the data directory")
                .json::<Vec<NodeName>>("Nodes whose tunnels were closed")
                .response(browser_refused())
                .response(problem(500, unreadable_directory)),
            refresh,
        ),
        route(
            Operation::post("/api/v1/ca", "Load the CA of the data directory")
                .json::<RotationStatus>("The roots, after the CA was loaded")
                .response(browser_refused())
                .response(problem(500, unreadable_directory)),
            load_ca,
        ),
    ]
}

fn route<H: Handler<T, AdminState>, T: 'static>(operation: Operation, handler: H) -> Route {
    let method = if operation.is_post {
        MethodFilter::POST
    } else {
        MethodFilter::GET
    };
    (operation, on(method, handler))
}

fn problem(status: u16, description: &'static str) -> Response {
    Response::body::<ProblemBody>(status, description, &[PROBLEM_JSON])
}

fn browser_refused() -> Response {
    problem(403, "`origin`: the request has a header `Origin`")
}

/// Returns the OpenAPI document of the admin listener.
pub fn openapi(version: &str) -> Value {
    let operations = operations();
    openapi::document(
        ("Admin API of the Causeway gateway", version),
        &Admin::default().listen.to_string(),
        operations.iter().map(|(operation, _)| operation),
        &[
            problem(421, "`misdirected`: the `Host` is another one"),
            Response::text(504, "The gateway did not answer within 10 s"),
        ],
    )
}
