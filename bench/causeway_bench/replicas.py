"""Several gateways: a request with a forwarded hop beside a direct one, and three servers behind a balancer.

The balancer is HAProxy in TCP mode. It passes connections to the servers in turn.
"""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, field
from functools import partial

from . import load
from .bed import Bed
from .callers import Figures, wrk
from .causeway import Causeway, counted
from .contestant import Connect, Contestant, Https
from .haproxy import start_balancer
from .konnectivity import Konnectivity
from .measures import middle
from .process import Trouble, wait_for
from .usage import Meter

_COUNT = 3
_FORWARDED = "causeway_gateway_streams_forwarded_total"
_SERVERS = "konnectivity_network_proxy_agent_open_server_connections"


def start_gateways(bed: Bed, first: Causeway, count: int, app: int, *, edge_dials_all: bool) -> list[Causeway]:
    """Starts `count` gateways with the same CA and nodes that know each other, and the edge.

    `first` is one of them; if the edge does not dial all, it has a tunnel to this one alone.
    """
    first.bootstrap(bed)
    gateways = [first, *(type(first)(first.name, written=f"causeway-{number}") for number in range(2, count + 1))]
    for gateway in gateways:
        gateway.tunnel = bed.port()
    for gateway in gateways:
        peers = ", ".join(f'"{bed.cloud}:{one.tunnel}"' for one in gateways if one is not gateway)
        gateway.settings = f"peers: {{ addresses: [{peers}] }}"
    if edge_dials_all:
        first.other_tunnels = tuple(gateway.tunnel for gateway in gateways[1:])
    else:
        first.edge_settings = "tunnels: { gateways: one }"
    first.start_gateway(bed, app)
    first.start_edge(bed, app)
    for number, gateway in enumerate(gateways[1:], start=2):
        # The node has joined, so the copies know it.
        gateway.folder = first.folder.with_name(f"{first.folder.name}-{number}")
        shutil.copytree(first.folder, gateway.folder, ignore=shutil.ignore_patterns("*.sock"))
        gateway.start_gateway(bed, app)
    running = [process for gateway in gateways for process in gateway.processes.values()]
    for gateway in gateways:
        wait_for("each gateway reaches the node", gateway.serves, running, 60)
    return gateways


def forwarded(bed: Bed, contestant: Contestant) -> Figures:
    """64 clients of one node at the gateway that holds its tunnel, and at another one that forwards requests to it."""
    assert isinstance(contestant, Causeway)
    app = bed.apps["files"]
    holder, other = start_gateways(bed, contestant, 2, app, edge_dials_all=False)
    try:
        for gateway in (holder, other):
            wrk(bed, gateway, 64, bed.pace.warm)
        # In turns, because one run of each would compare two states of the machine.
        return middle([_hop_to_direct(bed, holder, other) for _ in range(3)])
    finally:
        other.stop()


def _hop_to_direct(bed: Bed, holder: Causeway, other: Causeway) -> Figures:
    direct = wrk(bed, holder, 64, bed.pace.seconds)
    before = counted(other.admin, _FORWARDED)
    meter = Meter(holder.processes)
    hop = wrk(bed, other, 64, bed.pace.seconds)
    at_holder = meter.read()
    share = (counted(other.admin, _FORWARDED) - before) / hop["requests"]
    if share < 0.99:
        raise Trouble(f"only {share:.2f} of the requests were forwarded")
    cpu_hop = hop["cpu_all_us_per_request"] + sum(at_holder.values()) * 1e6 / hop["requests"]
    return {
        "cpu_all_us_direct": direct["cpu_all_us_per_request"],
        "cpu_all_us_hop": cpu_hop,
        "cpu_hop_to_direct": cpu_hop / direct["cpu_all_us_per_request"],
        **{f"{name}_hop_to_direct": hop[name] / direct[name] for name in ("requests_per_s", "p50_us", "p99_us")},
    }


@dataclass
class Gateways(Causeway):
    """Three gateways behind a balancer. The edge has tunnels to two of them, the default."""

    needs = ("causeway", "haproxy")
    others: list[Causeway] = field(default_factory=list)

    def start(self, bed: Bed, app: int) -> None:
        first = Causeway(self.name)
        gateways = start_gateways(bed, first, _COUNT, app, edge_dials_all=True)
        self.processes = {f"server-{number}": gateway.processes["front"] for number, gateway in enumerate(gateways, start=1)}
        self.processes["edge"] = first.processes["edge"]
        front, connect = bed.port(), bed.port()
        self.processes["balancer"] = start_balancer(bed, {
            front: [gateway.https.port for gateway in gateways if gateway.https],
            connect: [gateway.connect.port for gateway in gateways if gateway.connect],
        })  # fmt: skip
        ca = first.folder / "out" / "ca.pem"
        self.https = Https(front, ca, f"localhost:{app}")
        self.connect = Connect(connect, ca, f"localhost:{app}", "gateway")


@dataclass
class KonnectivityServers(Konnectivity):
    """Three servers behind a balancer, for clients and for the agent, which connects until it has reached all three."""

    needs = (*Konnectivity.needs, "haproxy")

    def start(self, bed: Bed, app: int) -> None:
        servers = [self.start_server(bed, f"server-{number}", _COUNT) for number in range(1, _COUNT + 1)]
        front, agents = bed.port(), bed.port()
        self.processes["balancer"] = start_balancer(bed, {
            front: [server.clients for server in servers],
            agents: [server.agents for server in servers],
        })  # fmt: skip
        admin = self.start_agent(bed, agents)
        running = self.processes.values()
        wait_for("the agent has reached all servers", lambda: counted(admin, _SERVERS) == _COUNT, running, 120)
        self.connect = self.connect_by(bed, front, app)


def one_dies(bed: Bed, contestant: Contestant) -> Figures:
    """16 clients with a new connection and CONNECT for each request, while one of three servers is killed."""
    seconds = bed.pace.seconds * 4
    victim = contestant.processes.pop("server-3")
    death = threading.Timer(seconds / 2, victim.child.kill)
    death.start()
    try:
        found = load.requests(bed, contestant, 16, seconds, connect=True, new=True)
    finally:
        death.join()
        victim.stop()
    return {name: found[name] for name in ("errors", "requests_per_s", "p99_us", "p999_us") if name in found}


def requests(bed: Bed, contestant: Contestant, *, new: bool) -> Figures:
    """64 clients, inside of CONNECT where the contestant has it: with kept connections, or a new one for each request."""
    ask = partial(load.requests, bed, contestant, 64, bed.pace.seconds)
    return ask(connect=contestant.connect is not None, new=new)
