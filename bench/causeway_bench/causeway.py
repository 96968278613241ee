"""Causeway: a gateway with one worker, an `https` and a `connect` listener, and an edge whose node is called
`localhost`.

Generators without a setting for the address can request https://localhost:PORT, so that the SNI names the node. Both
listeners are anonymous, like HAProxy's.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from .bed import Bed
from .contestant import Connect, Contestant, Https, fresh_name
from .process import Process, listens, run, wait_for

NODE = "localhost"


@dataclass
class Causeway(Contestant):
    """Gateway and edge."""

    needs = ("causeway",)
    # Its program, by name.
    program = "causeway"
    tunnel: int = 0
    admin: int = 0
    edge_admin: int = 0
    cores: int = 1
    # Rules of its policy, of which the last admits clients; `None` is no policy.
    rules: int = 0
    # Further keys of its gateway's configuration, and the name under which it is quoted.
    settings: str = ""
    written: str = "causeway"
    # Further keys of its edge's configuration, and tunnel ports of other gateways that it dials.
    edge_settings: str = ""
    other_tunnels: tuple[int, ...] = ()
    folder: Path = Path()
    # Put before the gateway's command, and before the edge's: a profiler.
    under: tuple[str, ...] = ()
    edge_under: tuple[str, ...] = ()

    def start(self, bed: Bed, app: int) -> None:
        self.bootstrap(bed)
        self.start_gateway(bed, app)
        self.start_edge(bed, app)

    @property
    def data(self) -> Path:
        """The gateway's data directory."""
        return self.folder / "gateway"

    def bootstrap(self, bed: Bed) -> None:
        """Makes a new data directory, and a token for the node."""
        program = bed.tools.path(self.program)
        self.folder = bed.scratch / fresh_name("causeway")
        run([program, "bootstrap", "--node", NODE, "--out", str(self.folder / "out"), "--data-dir", str(self.data)])

    def start_gateway(self, bed: Bed, app: int) -> None:
        """Starts only the gateway, on the existing data directory."""
        # A restart has the same listeners.
        https = self.https.port if self.https else bed.port()
        connect = self.connect.port if self.connect else bed.port()
        self.tunnel = self.tunnel or bed.port()
        self.admin = bed.port()
        configuration = bed.write(
            f"{self.written}/gateway.yaml",
            _GATEWAY.format(
                data=self.data,
                cores=self.cores,
                tunnel=self.tunnel,
                cloud=bed.cloud,
                admin=self.admin,
                https=https,
                connect=connect,
                app=app,
                more=self.settings + (f"policy: {_policy(bed, self.rules)}" if self.rules else ""),
            ),
        )
        command = [*self.under, bed.tools.path(self.program), "gateway", "--config", str(configuration)]
        gateway = bed.spawn(f"{self.folder.name}-gateway", command, "cloud")
        self.processes["front"] = gateway
        bound = 120 if self.under else 20
        wait_for("the gateway is ready", lambda: answers(self.admin, "/readyz"), [gateway], bound)
        wait_for("its listener accepts", lambda: listens(https), [gateway], bound)
        ca = self.folder / "out" / "ca.pem"
        self.https = Https(https, ca, f"{NODE}:{app}")
        self.connect = Connect(connect, ca, f"{NODE}:{app}", "gateway")

    def serves(self) -> bool:
        """Whether a request succeeds now."""
        assert self.https is not None
        trust = ssl.create_default_context(cafile=self.https.ca)
        # Without a port, which would be the listener's own.
        asked = urllib.request.Request(f"https://localhost:{self.https.port}/1k", headers={"Host": NODE})
        try:
            with urllib.request.urlopen(asked, timeout=2, context=trust) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def tunnels(self) -> int:
        """Returns the number of tunnels of the node at the gateway."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/api/v1/edges/{NODE}", timeout=2) as reply:
            return int(json.load(reply)["tunnels"])

    def start_edge(self, bed: Bed, app: int) -> Process:
        """Starts the edge of the one node; returns when it has a tunnel."""
        admin = self.edge_admin = bed.port()
        configuration = bed.write(
            "causeway/edge.yaml",
            _EDGE.format(
                data=self.folder / "edge",
                gateways=", ".join(f'"{bed.cloud}:{port}"' for port in (self.tunnel, *self.other_tunnels)),
                token=self.folder / "out" / f"{NODE}.token",
                admin=admin,
                app=app,
                more=self.edge_settings,
            ),
        )
        command = [*self.edge_under, bed.tools.path(self.program), "edge", "--config", str(configuration)]
        edge = bed.spawn(f"{self.folder.name}-edge", command, "rest")
        self.processes["edge"] = edge
        with bed.at("rest"):
            bound = 120 if self.edge_under else 60
            wait_for("the edge is connected", lambda: answers(admin, "/readyz"), [edge], bound)
        return edge


def _policy(bed: Bed, rules: int) -> Path:
    """Makes this many rules; all but the last are about other clients, nodes, ports and paths."""
    others = (
        f"  - {{ who: {{ users: [user-{n}, 'team-{n}-*'], networks: [10.{n >> 8}.{n & 255}.0/24] }}, "
        f"where: {{ nodes: [node-{n}, 'site-{n}-*'] }}, "
        f"what: {{ ports: [{1024 + n}], paths: [/api/{n}], methods: [GET, POST] }}, then: allow }}\n"
        for n in range(rules - 1)
    )
    last = f"  - {{ who: {{ users: ['system:anonymous'] }}, where: {{ nodes: [{NODE}] }}, then: allow }}\n"
    return bed.write(f"causeway/policy-{rules}.yaml", "rules:\n" + "".join(others) + last)


class Before(Causeway):
    """Another build, such as that of the previous commit: the effect of a change is measured beside it."""

    needs = ("before",)
    program = "before"


def counted(port: int, metric: str) -> float:
    """The sum of a counter over all its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(metric + r"[ {]", line))


def answers(port: int, path: str) -> bool:
    """Whether an admin listener answers 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


_GATEWAY = """\
data_dir: {data}
workers: {cores}
tunnel:
  listen: "{cloud}:{tunnel}"
  advertise: ["{cloud}:{tunnel}"]
admin:
  listen: "127.0.0.1:{admin}"
listeners:
  - {{ name: https, protocol: https, listen: "127.0.0.1:{https}", port: {app}, anonymous: true }}
  - {{ name: connect, protocol: connect, listen: "127.0.0.1:{connect}", names: [localhost, gateway], anonymous: true }}
access_log: none
log: {{ filter: warn }}
{more}
"""

_EDGE = """\
data_dir: {data}
gateways: [{gateways}]
join_file: {token}
ports:
  {app}: {{}}
admin:
  listen: "127.0.0.1:{admin}"
log: {{ filter: warn }}
{more}
"""
