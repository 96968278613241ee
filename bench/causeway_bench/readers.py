"""Reads of nodes from their cluster: readers at their own edges, beside the same readers at kube-apiserver.

A pool is a site of some edges, each with an equal share of the pool's readers; one edge leads. Each site has its own
link to the cloud, on which the kernel counts. Both contestants have the same cluster, the same changes, and the same
readers: like kube-proxy they request protobuf, in a watch that begins with all objects.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from . import load
from .bed import MIB, Bed
from .callers import Figures
from .causeway import Causeway, answers
from .cluster import Cluster
from .contestant import Contestant
from .process import Process, Trouble, run, wait_for
from .sites import Places, places
from .usage import Meter, memory, peak

_MILLI = 1e3
# Changes per second if there are many: as fast as the API accepts them.
_HASTE = "1000"
# CPU by role, as shares of a core.
Used = dict[str, float]


class ApiServer(Contestant):
    """No tunnel: each reader has a watch at kube-apiserver."""

    needs = ("kube-apiserver", "etcd")


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement."""

    slices: int
    changes_per_s: int
    sites: int
    edges: int
    # At each edge.
    readers: int
    # Number of changes after which all buffers of changes are full, for edges with the default configuration.
    fill: int

    @property
    def at_site(self) -> int:
        return self.edges * self.readers


_WHOLE = Scale(slices=1000, changes_per_s=100, sites=4, edges=5, readers=10, fill=10_000)
# Smaller sizes are enough to see that all of it works.
_SMALL = Scale(slices=100, changes_per_s=20, sites=2, edges=2, readers=5, fill=200)


@dataclass
class Edge:
    """A running edge, and the address at which its node's programs read."""

    process: Process
    bed: Bed
    admin: int
    port: int

    def reading(self) -> dict[str, object]:
        """Returns the edge's own status of its API cache; nothing while it does not answer."""
        try:
            with self.bed.at("rest"), urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/status", timeout=2) as reply:
                return dict(json.load(reply).get("api_cache") or {})
        except (urllib.error.URLError, OSError):
            return {}


@dataclass
class Scene:
    """A cluster with its slices, and sites that reach it; the contestant runs the rest."""

    there: Places
    scale: Scale
    contestant: Contestant
    cluster: Cluster

    def slices(self, *words: str) -> load.Event:
        """Makes all slices, or changes some."""
        asked = ["slices", "--url", self.cluster.url, *self.cluster.admin, "--count", str(self.scale.slices), *words]
        found = load.result(self.cluster.bed, asked, 300)
        if found["failed"]:
            raise Trouble(f"the API did not accept all: {found['failures']}")
        return found


def reading(bed: Bed, contestant: Contestant) -> Figures:
    """Measures bytes over the links, delays from the API to readers, and CPU and memory of all processes, while slices
    change."""
    scale = _SMALL if bed.pace.name == "smoke" else _WHOLE
    with places(bed, scale.sites) as there:
        scene = Scene(there, scale, contestant, Cluster(there.cloud, contestant.processes))
        scene.cluster.start()
        scene.slices()
        if not isinstance(contestant, Causeway):
            return _changes(scene, [[scene.cluster.url]] * scale.sites, lambda used: {})
        edges, bare = _pools(scene, contestant)
        every = [edge for site in edges for edge in site]
        urls = [[f"http://127.0.0.1:{edge.port}" for edge in site] for site in edges]
        try:
            return _changes(scene, urls, lambda used: _ours(scene, contestant, every, bare, used))
        finally:
            # One after the other they would take seconds each.
            for process in (bare, *(edge.process for edge in every)):
                process.child.kill()


def _pools(scene: Scene, gateway: Causeway) -> tuple[list[list[Edge]], Process]:
    """Starts the gateway and all edges, waits until they are connected and each pool has a leader; and an edge without
    an API cache."""
    cloud, scale = scene.there.cloud, scene.scale
    gateway.written = "readers"
    gateway.settings = f"kubernetes: {{ kubeconfig: {scene.cluster.kubeconfig()} }}\napi_cache: {{}}\n"
    gateway.bootstrap(cloud)
    gateway.start_gateway(cloud, cloud.port())
    edges = []
    for number, site in enumerate(scene.there.sites):
        pool = f"site-{number + 1}"
        token = _token(cloud, gateway, f"{pool}-*", scale.edges, ["--pool", pool])
        edges.append([_edge(site, gateway, f"{pool}-{edge + 1}", token) for edge in range(scale.edges)])
    bare = _edge(scene.there.sites[0], gateway, "bare", _token(cloud, gateway, "bare", 1, []), reads=False)
    every = [edge for site in edges for edge in site]
    with bare.bed.at("rest"):
        wait_for("the edge without a reader is connected", lambda: answers(bare.admin, "/readyz"), [bare.process], 60)

    def in_touch() -> bool:
        told = [edge.reading() for edge in every]
        leaders = [one for one in told if one.get("role") == "leader"]
        return all(one.get("ready") for one in told) and len(leaders) == scale.sites

    wait_for("all edges have read, and one of each pool leads", in_touch, [edge.process for edge in every], 120)
    return edges, bare.process


def _token(bed: Bed, gateway: Causeway, node: str, uses: int, words: list[str]) -> Path:
    made = run([bed.tools.path(gateway.program), "token", "create", "--data-dir", str(gateway.data), "--node", node,
                "--uses", str(uses), *words])  # fmt: skip
    path = gateway.folder / f"{node.rstrip('-*')}.token"
    path.write_text(made.strip())
    return path


def _edge(site: Bed, gateway: Causeway, node: str, token: Path, *, reads: bool = True) -> Edge:
    admin, port, neighbours = site.port(), site.port(), site.port()
    folder = gateway.folder / node
    folder.mkdir()
    text = _EDGE.format(data=folder / "data", node=node, cloud=site.cloud, tunnel=gateway.tunnel, token=token, admin=admin)
    if reads:
        text += _READER.format(port=port, neighbours=neighbours)
        # One represents all.
        site.configurations["readers/edge.yaml"] = text
    (folder / "edge.yaml").write_text(text)
    command = [site.tools.path(gateway.program), "edge", "--config", str(folder / "edge.yaml")]
    process = site.spawn(f"{gateway.folder.name}-{node}", command, "rest")
    gateway.processes[f"edge {node}"] = process
    return Edge(process, site, admin, port)


def _changes(scene: Scene, urls: list[list[str]], then: Callable[[Used], Figures]) -> Figures:
    """All readers begin, slices change, and each reader sees each change; `then` runs with all of them connected."""
    there, scale, pace = scene.there, scene.scale, scene.there.cloud.pace
    count = scale.changes_per_s * pace.seconds * 5
    with ExitStack() as standing:
        begun = time.monotonic()
        readers = []
        for site, at in zip(there.sites, urls, strict=True):
            words = ["readers", *(word for url in at for word in ("--url", url)), *scene.cluster.admin]
            words += ["--count", str(scale.at_site // len(at)), "--changes", str(count)]
            readers.append(standing.enter_context(load.beside(site, words, "ready", 300)))
        figures = {
            "readers": float(scale.at_site * scale.sites),
            "slices": float(scale.slices),
            "begin_s": time.monotonic() - begun,
            "link_mib_at_begin": there.crossed() / MIB,
        }
        rate = ("--rate", str(scale.changes_per_s), "--changes")
        scene.slices(*rate, str(scale.changes_per_s * pace.warm), "--mark", "w")
        time.sleep(pace.settle)
        before = there.crossed()
        time.sleep(pace.settle * 3)
        figures["link_idle_bytes_per_s"] = (there.crossed() - before) / pace.settle / 3

        before, meter, begun = there.crossed(), Meter(scene.contestant.processes), time.monotonic()
        # After the first step, which is that of the changes to warm up.
        written = scene.slices(*rate, str(count), "--step", "2")
        seen = [_seen(one) for one in readers]
        took, over = time.monotonic() - begun, there.crossed() - before
        used = {role: seconds / took for role, seconds in meter.read().items()}
        figures |= {
            "changes_per_s": float(written["per_second"]),
            "link_bytes_per_change": over / count,
            "link_kb_per_s": over / took / 1e3,
            "write_p50_ms": written["latency_us"]["p50"] / _MILLI,
            "write_p99_ms": written["latency_us"]["p99"] / _MILLI,
        }
        return figures | _read(seen) | _clusters(scene.contestant, used) | then(used)


def _read(seen: list[load.Event]) -> Figures:
    """Returns the results of the readers at all sites."""
    return {
        **_delays([one["latency_counts"] for one in seen]),
        "read_bytes_per_change": sum(one["bytes"] for one in seen) / sum(one["changes"] for one in seen),
        "watches_ended": float(sum(one["again"] for one in seen)),
    }


def _clusters(contestant: Contestant, used: Used) -> Figures:
    """Returns the use of resources of the cluster's own part."""
    figures = {}
    for role in ("apiserver", "etcd"):
        figures[f"cpu_{role}_share"] = used[role]
        figures[f"mib_{role}"] = _mib(contestant.processes[role])
    return figures | {"mib_cluster": figures["mib_apiserver"] + figures["mib_etcd"]}


def _seen(reader: Process) -> load.Event:
    """Returns the results of readers once each has seen all changes."""
    wait_for("all readers have seen all changes", lambda: load.event(reader.said(), "result") is not None, [reader], 120)
    return load.event(reader.said(), "result") or {}


def _delays(counts: list[list[list[int]]]) -> Figures:
    """Returns the delays of all readers: from before a change is sent until a reader has it."""
    joined = sorted((took, often) for one in counts for took, often in one)
    total = sum(often for _, often in joined)

    def at(share: float) -> float:
        passed = 0
        for took, often in joined:
            passed += often
            if passed >= total * share:
                return took / _MILLI
        raise Trouble("no reader has seen a change")

    return {"delay_p50_ms": at(0.5), "delay_p99_ms": at(0.99), "delay_p999_ms": at(0.999), "delay_max_ms": at(1)}


def _mib(process: Process) -> float:
    return memory(process.pid).pss / MIB


def _ours(scene: Scene, gateway: Causeway, edges: list[Edge], bare: Process, used: Used) -> Figures:
    """Returns the use of resources of Causeway's part: CPU while slices changed, and memory when all buffers of
    changes are full; for each role of the process with the most, beside an edge without an API cache."""
    by_role: dict[str, list[Process]] = {"leader": [], "follower": []}
    for edge in edges:
        by_role[str(edge.reading()["role"])].append(edge.process)
    names = {process.pid: role for role, process in gateway.processes.items()}
    figures = {"cpu_gateway_share": used["front"], "mib_leader_before": _middle(by_role["leader"])}
    for role, processes in by_role.items():
        figures[f"cpu_{role}_share"] = mean(used[names[process.pid]] for process in processes)
    scene.slices("--rate", _HASTE, "--changes", str(scene.scale.fill), "--mark", "f")
    time.sleep(scene.there.cloud.pace.settle * 3)
    figures |= {"mib_gateway": _mib(gateway.processes["front"]), "mib_bare_edge": _mib(bare)}
    for role, processes in by_role.items():
        figures |= {
            f"mib_{role}": _middle(processes),
            f"mib_{role}_more": max(_mib(process) for process in processes) - _mib(bare),
            f"mib_{role}_peak_more": (max(peak(process.pid) for process in processes) - peak(bare.pid)) / MIB,
        }
    return figures


def _middle(processes: list[Process]) -> float:
    return median(_mib(process) for process in processes)


_EDGE = """\
data_dir: {data}
node: {node}
gateways: ["{cloud}:{tunnel}"]
join_file: {token}
admin:
  listen: "127.0.0.1:{admin}"
log: {{ filter: warn }}
"""

_READER = """\
api_cache:
  listen: "127.0.0.1:{port}"
  members: {{ listen: "127.0.0.1:{neighbours}", addresses: ["127.0.0.1:{neighbours}"] }}
"""
