"""`bench/run size`: a fleet that joins at once, a fleet at two gateways of which one dies, the memory of both, and writes of
the shared state.

These are loads of one program, without a contestant, so they print one JSON object each in place of rows.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .causeway import answers, counted
from .load import event
from .process import Process, Trouble, listens, run, wait_for
from .usage import cpu_seconds, memory, peak

_MIB = 1024 * 1024
# Nodes of one process that runs light edges, each with a file.
_NODES_OF_PROCESS = 10_000
# Pause between two samples. A sample costs the gateways some milliseconds, and the lag is below a second.
_SAMPLE_SECONDS = 0.2
_TUNNELS, _PEER_NODES = "causeway_gateway_tunnels", "causeway_gateway_peer_nodes"


@dataclass
class Gateway:
    """A gateway with its own data directory, its own tunnel port and no listener that clients use."""

    bed: Bed
    name: str
    data: Path
    tunnel: int
    admin: int
    more: str = ""
    process: Process | None = None

    def start(self) -> None:
        text = _GATEWAY.format(data=self.data, tunnel=self.tunnel, admin=self.admin, more=self.more)
        configuration = self.bed.scratch / f"{self.name}.yaml"
        configuration.write_text(text)
        self.process = self.bed.spawn(self.name, [self.bed.program, "gateway", "--config", str(configuration)])
        wait_for(f"{self.name} is ready", lambda: answers(self.admin, "/readyz"), [self.process], 60)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def rss_mib(self) -> float:
        return round(memory(self.pid).rss / _MIB, 1)

    def kill(self) -> None:
        assert self.process is not None
        self.process.child.kill()
        self.process.child.wait()


@dataclass
class Bed:
    """Scratch folder, programs and processes."""

    scratch: Path
    program: str
    load: str
    processes: list[Process] = field(default_factory=list)
    ports: int = 21_000

    def spawn(self, name: str, command: list[str]) -> Process:
        process = Process(name, command, self.scratch / f"{name}.log")
        self.processes.append(process)
        return process

    def port(self) -> int:
        """Returns a free port below the ephemeral ones."""
        self.ports += 1
        while listens(self.ports):
            self.ports += 1
        return self.ports

    def gateway(self, name: str, data: Path, more: str = "") -> Gateway:
        return Gateway(self, name, data, self.port(), self.port(), more)

    def mint(self, data: Path, nodes: int) -> Path:
        out = self.scratch / "identities.json"
        run([self.load, "mint", "--data-dir", str(data), "--nodes", str(nodes), "--out", str(out)], 300)
        return out

    def fleets(self, gateways: list[Gateway], identities: Path, nodes: int, *more: str) -> list[Process]:
        """Starts light edges in as many processes as their files require, and waits until all have a tunnel."""
        ports = ",".join(f"127.0.0.1:{gateway.tunnel}" for gateway in gateways)
        fleets = []
        for skip in range(0, nodes, _NODES_OF_PROCESS):
            count = min(_NODES_OF_PROCESS, nodes - skip)
            command = [self.load, "fleet", "--gateway", ports, "--identities", str(identities)]
            command += ["--skip", str(skip), "--nodes", str(count), *more]
            fleets.append(self.spawn(f"fleet-{gateways[0].name}-{skip}", command))
        wait_for("all edges are up", lambda: all(event(fleet.said(), "up") for fleet in fleets), fleets, 300)
        return fleets

    def etcd(self) -> int:
        """Starts etcd, and returns its port."""
        port = self.port()
        url = f"http://127.0.0.1:{port}"
        program = Path(os.environ["KUBEBUILDER_ASSETS"]) / "etcd"
        command = [str(program), f"--data-dir={self.scratch / 'etcd'}", "--log-level=error", f"--listen-client-urls={url}",
                   f"--advertise-client-urls={url}", f"--listen-peer-urls=http://127.0.0.1:{self.port()}"]  # fmt: skip
        etcd = self.spawn("etcd", command)
        wait_for("etcd listens", lambda: listens(port), [etcd])
        return port


def revision(etcd: int) -> int:
    """Returns the revision of etcd, which counts the writes of all clients."""
    body = json.dumps({"key": base64.b64encode(b"\0").decode()}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{etcd}/v3/kv/range", body, timeout=10) as reply:
        return int(json.load(reply)["header"]["revision"])


def state(etcd: int | None) -> str:
    return "" if etcd is None else f'state: {{ etcd: {{ endpoints: ["http://127.0.0.1:{etcd}"] }} }}'


def joins(bed: Bed, asked: argparse.Namespace) -> dict[str, Any]:
    """All nodes join at once at one gateway: first with one token for all, then with a token each."""
    etcd = bed.etcd() if asked.etcd else None
    data = bed.scratch / "gateway"
    bed.mint(data, 1)
    gateway = bed.gateway("gateway", data, state(etcd))
    gateway.start()
    figures: dict[str, Any] = {}
    for name, flags in (("one_token", []), ("token_each", ["--tokens-of-their-own"])):
        before = cpu_seconds(gateway.pid)
        writes = revision(etcd) if etcd else 0
        command = [bed.load, "join", "--gateway", f"127.0.0.1:{gateway.tunnel}", "--data-dir", str(data),
                   "--nodes", str(asked.nodes), "--prefix", name.replace("_", "-"), *flags]  # fmt: skip
        found = event(run(command, 900), "result")
        if found is None:
            raise Trouble(f"no result: {gateway.process.tail() if gateway.process else ''}")
        wanted = ("joined", "left", "seconds", "latency_us", "failures")
        figures[name] = {key: found[key] for key in wanted}
        figures[name]["gateway_cpu_seconds"] = round(cpu_seconds(gateway.pid) - before, 2)
        if etcd:
            figures[name]["writes"] = revision(etcd) - writes
    return figures


def peers(bed: Bed, nodes: int, names: tuple[str, ...]) -> tuple[list[Gateway], Path]:
    """Starts gateways that know each other and the same nodes. Returns them and the identities of the nodes."""
    data = [bed.scratch / name for name in names]
    identities = bed.mint(data[0], nodes)
    for other in data[1:]:
        shutil.copytree(data[0], other)
    gateways = [bed.gateway(path.name, path) for path in data]
    for gateway in gateways:
        others = ", ".join(f'"127.0.0.1:{other.tunnel}"' for other in gateways if other is not gateway)
        gateway.more = f"peers: {{ addresses: [{others}] }}"
    for gateway in gateways:
        gateway.start()
    return gateways, identities


def both(bed: Bed, asked: argparse.Namespace) -> dict[str, Any]:
    """Each node has a tunnel at each of two gateways, as by default."""
    gateways, identities = peers(bed, asked.nodes, ("one", "two"))
    for gateway in gateways:
        bed.fleets([gateway], identities, asked.nodes)
    for gateway in gateways:
        known = partial(counted, gateway.admin, _PEER_NODES)
        wait_for("each gateway knows the nodes of the other one", lambda known=known: known() >= asked.nodes, [], 60)
    time.sleep(5)
    memory_mib = [gateway.rss_mib() for gateway in gateways]
    return {"nodes": asked.nodes, "rss_mib_of_two_gateways": [*memory_mib, round(sum(memory_mib), 1)]}


def fleet(bed: Bed, asked: argparse.Namespace) -> dict[str, Any]:
    """Each node has one tunnel, half of them at each of two gateways. One is killed, and its nodes go to the other one.

    A third gateway without edges is the observer: the lag of the directory is the time from the registration of the n-th
    node at the surviving gateway until the observer knows n nodes of it.
    """
    (one, two, observer), identities = peers(bed, asked.nodes, ("one", "two", "observer"))
    resume = ["--resume", "no"] if asked.full_handshakes else []
    fleets = bed.fleets([one, two], identities, asked.nodes, *resume)
    ups = [event(fleet.said(), "up") or {} for fleet in fleets]
    wait_for("the observer knows all nodes", lambda: counted(observer.admin, _PEER_NODES) >= asked.nodes, [], 60)
    time.sleep(5)
    before = [gateway.rss_mib() for gateway in (one, two)]
    used = cpu_seconds(one.pid)
    killed = time.time()
    two.kill()
    samples = sample(one, observer, asked.nodes)
    wait_for("all edges are back", lambda: all(event(fleet.said(), "back") for fleet in fleets), fleets, 300)
    backs = [event(fleet.said(), "back") or {} for fleet in fleets]
    lags = directory_lags(samples)
    return {
        "nodes": asked.nodes,
        "up_seconds": max(up["seconds"] for up in ups),
        "rss_mib_of_two_gateways": [*before, round(sum(before), 1)],
        "back_seconds": round(max(back["complete_ms"] for back in backs) / 1e3 - killed, 3),
        "handshakes": {kind: sum(back[kind] for back in backs) for kind in ("full", "resumed")},
        "cpu_seconds_of_survivor": round(cpu_seconds(one.pid) - used, 2),
        "rss_mib_of_survivor": one.rss_mib(),
        "peak_mib_of_survivor": round(peak(one.pid) / _MIB, 1),
        "directory_lag_ms": {name: lags[min(len(lags) - 1, int(len(lags) * part))]
                             for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        "samples": len(samples),
    }  # fmt: skip


Sample = tuple[float, int, float, int]


def sample(one: Gateway, observer: Gateway, nodes: int) -> list[Sample]:
    """Samples the tunnels of the survivor and the nodes that the observer knows, until both are complete."""
    samples: list[Sample] = []
    end = time.monotonic() + 300
    while time.monotonic() < end:
        tunnels = int(counted(one.admin, _TUNNELS))
        there = time.monotonic()
        # The observer is sampled after the survivor, so it is never ahead of it.
        known = int(counted(observer.admin, _PEER_NODES))
        samples.append((there, tunnels, time.monotonic(), known))
        if tunnels >= nodes and known >= nodes:
            return samples
        time.sleep(_SAMPLE_SECONDS)
    raise Trouble(f"not all nodes are known after 300 s: {samples[-1]}")


def directory_lags(samples: list[Sample]) -> list[float]:
    """Returns the lag of each node that came, in milliseconds, in order."""
    lags: list[float] = []
    arrived = samples[0][1]
    for at, tunnels, _, _ in samples[1:]:
        for number in range(arrived + 1, tunnels + 1):
            known = next(seen for _, _, seen, known in samples if known >= number and seen >= at)
            lags.append(round((known - at) * 1e3, 1))
        arrived = max(arrived, tunnels)
    return sorted(lags) or [0.0]


def writes(bed: Bed, asked: argparse.Namespace) -> dict[str, Any]:
    """Writes to etcd: in a minute without a change, and while all nodes connect again."""
    etcd = bed.etcd()
    data = bed.scratch / "gateway"
    identities = bed.mint(data, asked.nodes)
    gateway = bed.gateway("gateway", data, state(etcd))
    gateway.start()
    fleets = bed.fleets([gateway], identities, asked.nodes)
    begin = revision(etcd)
    time.sleep(60)
    steady = revision(etcd) - begin
    gateway.kill()
    gateway.start()
    wait_for("all edges are back", lambda: all(event(fleet.said(), "back") for fleet in fleets), fleets, 300)
    time.sleep(10)
    return {
        "nodes": asked.nodes,
        "writes_in_a_steady_minute": steady,
        "writes_of_all_reconnects": revision(etcd) - begin - steady,
    }


_MEASURES = {"joins": joins, "fleet": fleet, "both": both, "writes": writes}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/run size", description=__doc__)
    parser.add_argument("measure", choices=sorted(_MEASURES))
    parser.add_argument("--nodes", type=int, default=2000, help="number of nodes (default: 2000)")
    parser.add_argument("--etcd", action="store_true",
                        help="with joins: the gateway shares its state by the etcd in KUBEBUILDER_ASSETS")  # fmt: skip
    parser.add_argument("--full-handshakes", action="store_true",
                        help="with fleet: edges resume no TLS sessions, as after the loss of the secret of session tickets")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder, with all logs")
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="causeway-size."))
    bed = Bed(scratch, os.environ["BENCH_PROGRAM"], os.environ["BENCH_LOAD"])
    try:
        print(json.dumps(_MEASURES[asked.measure](bed, asked), indent=2))
    except Trouble as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        for process in reversed(bed.processes):
            process.stop()
        if asked.keep:
            print(f"bench: kept {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0


_GATEWAY = """\
data_dir: {data}
tunnel:
  listen: "127.0.0.1:{tunnel}"
  advertise: ["127.0.0.1:{tunnel}"]
admin:
  listen: "127.0.0.1:{admin}"
listeners:
  - {{ name: http, protocol: http, listen: "127.0.0.1:0", port: 9100, anonymous: true }}
access_log: none
log: {{ filter: warn }}
{more}
"""


if __name__ == "__main__":
    sys.exit(main())
