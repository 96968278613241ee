//! Attributes of a request to a kubelet for a review, as kubelet determines them (pkg/kubelet/server/auth.go, 1.36).
//!
//! The module is pure. A path that an upstream may interpret in two ways matches none of the paths with a specific attribute. Its
//! attribute is `proxy`, which grants everything that a kubelet can do. A session is `proxy` too, since its content is unknown.

use crate::{
    config::policy::{Action, canonical},
    proxy::authz::AuthzRequest,
};
use http::Method;

/// Subresource of every path that has no specific one.
const PROXY_ONLY: &[&str] = &["proxy"];

/// Returns the verb for the method, and `create` for a session.
pub(super) fn verb(authz_request: &AuthzRequest<'_>) -> &'static str {
    if authz_request.action == Action::Connect {
        return "create";
    }
    match *authz_request.method {
        // kubelet has no verb for HEAD, which reveals no more than GET.
        Method::GET | Method::HEAD => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        // `*` means all verbs (`ReviewAttributes.verb`).
        _ => "*",
    }
}

/// Returns subresources of `nodes`. Access to any one of them is enough.
pub(super) fn subresources(authz_request: &AuthzRequest<'_>) -> &'static [&'static str] {
    match authz_request.action {
        Action::Connect => PROXY_ONLY,
        Action::Request | Action::Upgrade => {
            canonical(authz_request.path).map_or(PROXY_ONLY, |path| subresources_of_path(&path))
        }
    }
}

fn subresources_of_path(path: &str) -> &'static [&'static str] {
    let mut parts = path.split('/').skip(1);
    match parts.next().unwrap_or_default() {
        "stats" => &["stats"],
        "metrics" => &["metrics"],
        "logs" => &["log"],
        "checkpoint" => &["checkpoint"],
        "statusz" => &["statusz"],
        "flagz" => &["configz"],
        // kubelet accepts these by default since 1.33. Before, `proxy` was enough, and it still is.
        "pods" | "runningpods" => &["pods", "proxy"],
        "healthz" => &["healthz", "proxy"],
        "configz" => &["configz", "proxy"],
        _ => PROXY_ONLY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::{authn::ClientIdentity, authz::Destination, route::Route};
    use causeway_certs::NodeName;
    use causeway_rt::listener::RemoteAddr;
    use causeway_tunnel::Target;

    fn asked(act: Action, method: &str, path: &str) -> (&'static str, &'static [&'static str]) {
        let node = NodeName::parse("edge-1").unwrap();
        let route = Route::new(node, Target::new("edge-1", 10250));
        let ask = AuthzRequest {
            client: &ClientIdentity::for_test("ann"),
            remote_address: RemoteAddr::Unix(0),
            destination: Destination::Node(&route),
            action: act,
            method: &method.parse().unwrap(),
            path,
        };
        (verb(&ask), subresources(&ask))
    }

    #[test]
    fn a_path_has_the_attributes_that_kubelet_assigns() {
        for (path, subresources) in [
            ("/attach/ns/pod/app", &["proxy"][..]),
            ("/checkpoint/ns/pod/app", &["checkpoint"]),
            ("/configz", &["configz", "proxy"]),
            ("/flagz", &["configz"]),
            ("/statusz", &["statusz"]),
            ("/containerLogs/ns/pod/app", &["proxy"]),
            ("/debug/flags/v", &["proxy"]),
            ("/debug/pprof/heap", &["proxy"]),
            ("/exec/ns/pod/app", &["proxy"]),
            ("/healthz", &["healthz", "proxy"]),
            ("/healthz/syncloop", &["healthz", "proxy"]),
            ("/logs/", &["log"]),
            ("/logs/syslog", &["log"]),
            ("/metrics", &["metrics"]),
            ("/metrics/", &["metrics"]),
            ("/metrics/cadvisor", &["metrics"]),
            ("/pods", &["pods", "proxy"]),
            ("/pods/", &["pods", "proxy"]),
            ("/portForward/ns/pod", &["proxy"]),
            ("/run/ns/pod/app", &["proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
            ("/stats/", &["stats"]),
            ("/stats/summary", &["stats"]),
            ("/spec/", &["proxy"]),
            ("/cri/exec/token", &["proxy"]),
            ("/", &["proxy"]),
            ("/metricsx", &["proxy"]),
            ("/Metrics", &["proxy"]),
            ("/%6detrics", &["metrics"]),
        ] {
            for (method, verb) in [
                ("GET", "get"),
                ("HEAD", "get"),
                ("POST", "create"),
                ("PUT", "update"),
                ("PATCH", "patch"),
                ("DELETE", "delete"),
                ("OPTIONS", "*"),
                ("get", "*"),
            ] {
                let is = asked(Action::Request, method, path);
                assert_eq!(is, (verb, subresources), "{method} {path}");
                assert_eq!(asked(Action::Upgrade, method, path), is, "{method} {path}");
            }
        }
    }

    #[test]
    fn ambiguous_and_unreadable_paths_need_all_attributes() {
        for path in [
            "//metrics",
            "/metrics//x",
            "/metrics/../exec/ns/pod/app",
            "/metrics/./x",
            "/metrics/%2e%2e/exec/ns/pod/app",
            "/metrics%2f..%2fexec/ns/pod/app",
            "/metrics%2Fcadvisor",
            "/metrics%5c..%5cexec",
            "/metrics;/../exec",
            "/metrics%00",
            "/%256detrics",
            "/metrics%3f",
            "metrics",
            "*",
            "",
        ] {
            assert_eq!(asked(Action::Request, "GET", path).1, PROXY_ONLY, "{path}");
        }
        let session = asked(Action::Connect, "CONNECT", "/metrics");
        assert_eq!(session, ("create", PROXY_ONLY));
    }
}
