"""HAProxy: straight to the app, which is the limit, or before a tunnel that has no front of its own."""

from __future__ import annotations

from dataclasses import dataclass

from .bed import Bed
from .contestant import Contestant, Https, fresh_name
from .process import Process, listens, wait_for


def start_haproxy(bed: Bed, port: int, target: int) -> Process:
    """One thread, TLS 1.3 with the cipher and the kind of key that Causeway uses, kept connections to the target."""
    configuration = bed.write(
        "haproxy/haproxy.cfg", _HAPROXY.format(port=port, target=target, bundle=bed.pki.server_bundle)
    )
    process = bed.spawn(fresh_name("haproxy"), [bed.tools.path("haproxy"), "-db", "-f", str(configuration)], "cloud")
    wait_for("HAProxy listens", lambda: listens(port), [process])
    return process


@dataclass
class Haproxy(Contestant):
    """HAProxy straight."""

    needs = ("haproxy",)

    def start(self, bed: Bed, app: int) -> None:
        port = bed.port()
        self.processes["front"] = start_haproxy(bed, port, app)
        self.https = Https(port, bed.pki.ca, f"localhost:{app}")


_HAPROXY = """\
global
  nbthread 1
  maxconn 8000
  ssl-default-bind-options ssl-min-ver TLSv1.3
  ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256
defaults
  mode http
  http-reuse always
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend callers
  bind 127.0.0.1:{port} ssl crt {bundle} alpn h2,http/1.1
  default_backend app
backend app
  server app 127.0.0.1:{target}
"""
