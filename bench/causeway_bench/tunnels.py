"""frp, chisel and rathole: tunnels for TCP with TLS between their two ends, behind HAProxy for the same job."""

from __future__ import annotations

from dataclasses import dataclass

from .bed import Bed
from .contestant import Contestant, Https, fresh_name
from .haproxy import start_haproxy
from .konnectivity import quoted
from .process import listens, wait_for


@dataclass
class Tunnel(Contestant):
    """A tunnel's two ends, and HAProxy as the listener for clients."""

    def start(self, bed: Bed, app: int) -> None:
        remote, control = bed.port(), bed.port()
        start = fresh_name(self.name)
        server = bed.spawn(f"{start}-server", self.server(bed, remote, control), "cloud")
        self.processes["server"] = server
        wait_for(f"{self.name}'s server listens", lambda: listens(control, bed.cloud), [server])
        client = bed.spawn(f"{start}-client", self.client(bed, remote, control, app), "rest")
        self.processes["edge"] = client
        wait_for(f"{self.name}'s tunnel is open", lambda: listens(remote), [server, client])
        front = bed.port()
        self.processes["front"] = start_haproxy(bed, front, remote)
        self.https = Https(front, bed.pki.ca, f"localhost:{app}")

    def server(self, bed: Bed, remote: int, control: int) -> list[str]:
        """Returns the command of the end that clients reach at `remote`."""
        raise NotImplementedError

    def client(self, bed: Bed, remote: int, control: int, app: int) -> list[str]:
        """Returns the command of the end beside the app."""
        raise NotImplementedError


@dataclass
class Frp(Tunnel):
    """frps and frpc; one connection for all streams (yamux), the default."""

    needs = ("haproxy", "frps", "frpc")

    def server(self, bed: Bed, remote: int, control: int) -> list[str]:
        pki = bed.pki
        text = _FRPS.format(cloud=bed.cloud, control=control, chain=pki.chain("server"), key=pki.key("server"))
        return [bed.tools.path("frps"), "-c", str(bed.write("frp/frps.toml", text))]

    def client(self, bed: Bed, remote: int, control: int, app: int) -> list[str]:
        text = _FRPC.format(cloud=bed.cloud, control=control, remote=remote, app=app, ca=bed.pki.ca)
        return [bed.tools.path("frpc"), "-c", str(bed.write("frp/frpc.toml", text))]


@dataclass
class Chisel(Tunnel):
    """chisel in reverse: SSH inside of a websocket inside of TLS."""

    needs = ("haproxy", "chisel")

    def server(self, bed: Bed, remote: int, control: int) -> list[str]:
        command = [
            bed.tools.path("chisel"), "server", "--host", bed.cloud, "--port", str(control), "--reverse",
            "--auth", "edge:bench", "--tls-key", str(bed.pki.key("server")), "--tls-cert", str(bed.pki.chain("server")),
        ]  # fmt: skip
        bed.configurations["chisel/server"] = quoted(command, bed)
        return command

    def client(self, bed: Bed, remote: int, control: int, app: int) -> list[str]:
        command = [
            bed.tools.path("chisel"), "client", "--tls-ca", str(bed.pki.ca), "--auth", "edge:bench",
            f"https://{bed.cloud}:{control}", f"R:127.0.0.1:{remote}:127.0.0.1:{app}",
        ]  # fmt: skip
        bed.configurations["chisel/client"] = quoted(command, bed)
        return command


@dataclass
class Rathole(Tunnel):
    """rathole with TLS: one connection for each of a client's, from a pool."""

    needs = ("haproxy", "rathole")

    def server(self, bed: Bed, remote: int, control: int) -> list[str]:
        text = _RATHOLE_SERVER.format(cloud=bed.cloud, control=control, remote=remote, pkcs12=bed.pki.server_pkcs12)
        return [bed.tools.path("rathole"), "--server", str(bed.write("rathole/server.toml", text))]

    def client(self, bed: Bed, remote: int, control: int, app: int) -> list[str]:
        text = _RATHOLE_CLIENT.format(cloud=bed.cloud, control=control, app=app, ca=bed.pki.ca)
        return [bed.tools.path("rathole"), "--client", str(bed.write("rathole/client.toml", text))]


_FRPS = """\
bindAddr = "{cloud}"
bindPort = {control}
proxyBindAddr = "127.0.0.1"
auth.token = "bench"
log.level = "warn"
transport.tls.force = true
transport.tls.certFile = "{chain}"
transport.tls.keyFile = "{key}"
"""

_FRPC = """\
serverAddr = "{cloud}"
serverPort = {control}
auth.token = "bench"
log.level = "warn"
transport.tls.enable = true
transport.tls.serverName = "localhost"
transport.tls.trustedCaFile = "{ca}"

[[proxies]]
name = "app"
type = "tcp"
localIP = "127.0.0.1"
localPort = {app}
remotePort = {remote}
"""

_RATHOLE_SERVER = """\
[server]
bind_addr = "{cloud}:{control}"
default_token = "bench"

[server.transport]
type = "tls"

[server.transport.tls]
pkcs12 = "{pkcs12}"
pkcs12_password = "bench"

[server.services.app]
bind_addr = "127.0.0.1:{remote}"
"""

_RATHOLE_CLIENT = """\
[client]
remote_addr = "{cloud}:{control}"
default_token = "bench"

[client.transport]
type = "tls"

[client.transport.tls]
trusted_root = "{ca}"
hostname = "localhost"

[client.services.app]
local_addr = "127.0.0.1:{app}"
"""
