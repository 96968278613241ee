use super::*;
use crate::config::{ListenAddr, ListenerProtocol};

fn listener(name: &str, port: u16) -> Listener {
    Listener {
        port: Some(port),
        ..Listener::new(
            name,
            ListenerProtocol::Tcp,
            ListenAddr::Tcp(SocketAddr::from(([0; 4], 0))),
        )
    }
}

#[test]
fn a_listener_receives_only_traffic_for_its_socket() {
    let redirect = Redirect {
        listeners: vec!["kubelet".to_owned(), "gone".to_owned()],
        ports: [(9100, "here".to_owned()), (9200, "both".to_owned())].into(),
        ..Redirect::default()
    };
    let listeners = [
        listener("kubelet", 10250),
        listener("here", 1),
        listener("both", 1),
        listener("gone", 2),
    ];
    let at = |name: &str, address: &str| (name.to_owned(), Some(address.parse().unwrap()));
    let standing = [
        at("kubelet", "0.0.0.0:4000"),
        at("here", "[::1]:4001"),
        at("both", "[::]:4002"),
        ("gone".to_owned(), None),
    ];
    let ports = PortMap::new(&redirect, &listeners, &standing);
    let of = |local, v4| {
        ports
            .ports_of(local, v4)
            .clone()
            .into_iter()
            .collect::<Vec<_>>()
    };
    assert_eq!(of(true, true), [(9200, 4002), (10250, 4000)]);
    assert_eq!(of(true, false), [(9100, 4001), (9200, 4002)]);
    assert_eq!(of(false, true), [(9200, 4002), (10250, 4000)]);
    assert_eq!(of(false, false), [(9200, 4002)]);
}

#[test]
fn pod_addresses_are_redirected_only_to_reachable_listeners() {
    let redirect = Redirect {
        pods: Some("pods".to_owned()),
        ..Redirect::default()
    };
    for (address, local, forwarded) in [
        ("[::]:4000", [Some(4000); 2], [Some(4000); 2]),
        ("0.0.0.0:4000", [Some(4000), None], [Some(4000), None]),
        ("[::1]:4000", [None, Some(4000)], [None; 2]),
    ] {
        let standing = [("pods".to_owned(), Some(address.parse().unwrap()))];
        let ports = PortMap::new(&redirect, &[listener("pods", 1)], &standing);
        let of = |local| [true, false].map(|v4| ports.pod_port(local, v4));
        assert_eq!((of(true), of(false)), (local, forwarded), "{address}");
        assert!(ports.redirects_pods());
    }
    assert!(!PortMap::default().redirects_pods());
}

#[test]
fn local_addresses_are_never_redirected() {
    for text in [
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
    ] {
        assert!(!is_redirectable(&text.parse().unwrap()), "{text}");
    }
    for text in ["10.0.0.1", "2001:db8::1", "fd00::1"] {
        assert!(is_redirectable(&text.parse().unwrap()), "{text}");
    }
}
