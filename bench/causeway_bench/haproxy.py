"""HAProxy: directly to the upstream, in two hops, or in front of a tunnel that terminates no TLS for clients."""

from __future__ import annotations

from dataclasses import dataclass

from .bed import Bed, Side
from .contestant import Contestant, Https, fresh_name
from .process import Process, listens, wait_for


def start_haproxy(bed: Bed, port: int, target: int) -> Process:
    """Starts the HAProxy that terminates the clients' TLS and forwards in the clear to a port of loopback."""
    return _start(bed, "haproxy", "cloud", _client_side(bed, port, f"127.0.0.1:{target}"), (port, "127.0.0.1"))


def start_balancer(bed: Bed, ports: dict[int, list[int]]) -> Process:
    """Starts a HAProxy that passes TCP connections at each of these ports to its servers in turn, unless one is dead."""
    text = _BALANCER
    for port, servers in ports.items():
        text += f"listen port-{port}\n  bind {bed.cloud}:{port}\n"
        text += "".join(f"  server s{server} 127.0.0.1:{server} check\n" for server in servers)
    return _start(bed, "balancer", "cloud", text, (next(iter(ports)), bed.cloud))


@dataclass
class Haproxy(Contestant):
    """HAProxy directly: TLS from the client, then the upstream."""

    needs = ("haproxy",)

    def start(self, bed: Bed, app: int) -> None:
        port = bed.port()
        self.processes["front"] = start_haproxy(bed, port, app)
        self.https = Https(port, bed.pki.ca, f"localhost:{app}")


@dataclass
class HaproxyHops(Contestant):
    """HAProxy in two hops: TLS from the client, mutual TLS with HTTP/2 to a second HAProxy, then the upstream.

    The two do the work of a gateway and an edge without being a tunnel, so their roles have the same names.
    """

    needs = ("haproxy",)

    def start(self, bed: Bed, app: int) -> None:
        port, hop = bed.port(), bed.port()
        pki = bed.pki
        second = _HAPROXY.format(
            bind=f"{bed.node}:{hop} ssl crt {pki.bundle('server')} alpn h2 ca-file {pki.ca} verify required",
            server=f"127.0.0.1:{app}",
        )
        self.processes["edge"] = _start(bed, "haproxy-hops/second", "rest", second, (hop, bed.node))
        server = (
            f"{bed.node}:{hop} ssl alpn h2 verify required ca-file {pki.ca} crt {pki.bundle('client')}"
            " sni str(localhost) verifyhost localhost"
        )
        first = _client_side(bed, port, server)
        self.processes["front"] = _start(bed, "haproxy-hops/first", "cloud", first, (port, "127.0.0.1"))
        self.https = Https(port, pki.ca, f"localhost:{app}")


def _client_side(bed: Bed, port: int, server: str) -> str:
    bind = f"127.0.0.1:{port} ssl crt {bed.pki.bundle('server')} alpn h2,http/1.1"
    return _HAPROXY.format(bind=bind, server=server)


def _start(bed: Bed, name: str, side: Side, text: str, listener: tuple[int, str]) -> Process:
    configuration = bed.write(f"{name}.cfg", text)
    command = [bed.tools.path("haproxy"), "-db", "-f", str(configuration)]
    process = bed.spawn(fresh_name(name.replace("/", "-")), command, side)
    with bed.at(side):
        wait_for("HAProxy listens", lambda: listens(*listener), [process])
    return process


# One thread, TLS 1.3 with the cipher and the kind of key that Causeway uses; idle connections to the server are kept. With
# the default HTTP/2 window of 64 KiB a transfer between two HAProxies costs a third more CPU than with 1 MiB.
_HAPROXY = """\
global
  nbthread 1
  maxconn 8000
  tune.h2.initial-window-size 1048576
  ssl-default-bind-options ssl-min-ver TLSv1.3
  ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256
  ssl-default-server-options ssl-min-ver TLSv1.3
  ssl-default-server-ciphersuites TLS_AES_128_GCM_SHA256
defaults
  mode http
  http-reuse always
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend clients
  bind {bind}
  default_backend upstream
backend upstream
  server upstream {server}
"""

# A connection that a dead server refuses goes to the next one.
_BALANCER = """\
global
  nbthread 1
  maxconn 8000
defaults
  mode tcp
  balance roundrobin
  option redispatch 1
  retries 3
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  default-server inter 500ms fall 1
"""
