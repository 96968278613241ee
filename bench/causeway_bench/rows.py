"""The rows of the benchmark: their contestants, their measurements, and the names of their figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from . import measures, replicas
from .bed import App, Bed
from .callers import Figures
from .causeway import Before, Causeway
from .contestant import Contestant, Direct
from .cost import instructions, system_calls, waits
from .haproxy import Haproxy, HaproxyHops
from .konnectivity import Konnectivity
from .link import Link, outage, over_link
from .readers import ApiServer, reading
from .tunnels import Chisel, Frp, Rathole

CONTESTANTS: dict[str, type[Contestant]] = {
    "haproxy": Haproxy,
    "haproxy-hops": HaproxyHops,
    "causeway": Causeway,
    "before": Before,
    "causeway-3": replicas.Gateways,
    "konnectivity": Konnectivity,
    "konnectivity-3": replicas.KonnectivityServers,
    "frp": Frp,
    "chisel": Chisel,
    "rathole": Rathole,
    # The app without a tunnel, for the rows whose limit is the link.
    "plain": Direct,
    # Watches of the cluster's API without a tunnel, for reads of the cluster.
    "apiserver": ApiServer,
}
TUNNELS = ("causeway", "konnectivity", "frp", "chisel", "rathole")
# Contestants that wrk and h2load can use: Konnectivity requires a CONNECT.
DIRECT = ("haproxy", "haproxy-hops", "causeway", "frp", "chisel", "rathole")
PAIR = ("haproxy", "causeway")
CONNECTS = ("haproxy", "causeway", "konnectivity")
OWN = ("causeway",)
THREE = ("rathole", "causeway-3", "konnectivity-3")
# The smoke run has those that need no compiler.
SMOKE = ("haproxy", "haproxy-hops", "causeway")
PER_REQUEST = ("requests_per_s", "cpu_all_us_per_request", "cpu_front_us_per_request", "cpu_edge_us_per_request")
LINK = ("mb_per_s", "share_of_link", "p50_beside_ratio", "round_trips")
BESIDE = ("kept", "kib_per_reader", "p99_ratio")
COUNTED = ("instructions", "allocations")
PER_GB = ("mb_per_s", "cpu_all_s_per_gb", "cpu_front_s_per_gb", "cpu_edge_s_per_gb")

# `together`: all run during the whole row. `fresh`: each is started again for every round, `renewed`: and warms up as well.
# `own`: the measurement starts it.
Start = Literal["together", "fresh", "renewed", "own"]


@dataclass(frozen=True)
class Row:
    """One measurement; `figures` are those of its results that the table shows, the first of them in the progress too."""

    name: str
    title: str
    measure: Callable[[Bed, Contestant], Figures]
    figures: tuple[str, ...]
    contestants: tuple[str, ...]
    start: Start = "together"
    app: App = "files"
    # Contestants by whose figures the others are divided, round by round; `None` without a comparison.
    references: tuple[str, ...] = ("haproxy", "haproxy-hops")
    # Contestants of `--smoke`; `None` if the row is not part of it.
    smoke: tuple[str, ...] = ()
    # Whether `--before` measures it if no rows are named.
    before: bool = False
    # The link that it uses; `None` is loopback.
    link: Link | None = None
    needs: tuple[str, ...] = ()
    # Takes minutes: fewer rounds, unless all are requested.
    long: bool = False


def _requests() -> list[Row]:
    rows = [
        Row(f"http1-{callers}", f"HTTP/1.1, {callers} connections, 1 KiB", partial(measures.http1, callers=callers),
            (*PER_REQUEST, "p99_us"), DIRECT, smoke=SMOKE if callers == 64 else (), before=callers == 64)
        for callers in (1, 64, 256)
    ]  # fmt: skip
    for connections, streams in ((1, 1), (64, 1), (256, 1), (16, 10)):
        several = streams > 1
        rows.append(
            Row(f"http2-{connections * streams}", f"HTTP/2, {connections} connections with {streams} streams each, 1 KiB",
                partial(measures.http2, connections=connections, streams=streams), PER_REQUEST, DIRECT,
                smoke=OWN if several else (), before=several)
        )  # fmt: skip
    rows.extend(
        Row(f"connect-{callers}", f"HTTP/1.1 inside CONNECT, {callers} clients, 1 KiB",
            partial(measures.connect, callers=callers), PER_REQUEST, CONNECTS, smoke=OWN if callers == 64 else (),
            references=("haproxy", "konnectivity"), needs=("bench-load",))
        for callers in (1, 64, 256)
    )  # fmt: skip
    rows.append(
        Row("connections", "a new TLS connection for each request, 64 clients",
            partial(measures.connections, callers=64), PER_REQUEST, DIRECT)
    )  # fmt: skip
    rows.append(
        Row("connections-connect", "a new TLS connection and CONNECT for each request, 64 clients",
            partial(measures.connect_new, callers=64), PER_REQUEST, CONNECTS,
            references=("haproxy", "konnectivity"), needs=("bench-load",))
    )  # fmt: skip
    return rows


def _transfers() -> list[Row]:
    rows = []
    everybody = ("haproxy", "haproxy-hops", *TUNNELS)
    for count in (1, 8):
        word = "one" if count == 1 else "eight"
        rows.append(
            Row(f"down-{count}", f"download, {word} at once", partial(measures.down, count=count), PER_GB, everybody,
                before=True)
        )  # fmt: skip
        rows.append(
            Row(f"up-{count}", f"upload, {word} at once", partial(measures.up, count=count), PER_GB, everybody,
                app="load", smoke=OWN if count == 1 else (), before=count == 1, needs=("bench-load",))
        )  # fmt: skip
    upgrades = tuple(name for name in DIRECT if name != "haproxy-hops")
    for way, who in (("connect", CONNECTS), ("upgrade", upgrades)):
        word = "CONNECT" if way == "connect" else "an upgrade"
        rows.extend(
            Row(f"{way}-{'up' if is_up else 'down'}", f"{'upload' if is_up else 'download'} inside of {word}",
                partial(measures.within, way=way, is_up=is_up), PER_GB, who, app="load", references=("haproxy",),
                needs=("bench-load",))
            for is_up in (False, True)
        )  # fmt: skip
    return rows


def _neighbours() -> list[Row]:
    readable = ("haproxy", *TUNNELS)
    return [
        Row("stalled-1", "64 clients beside one reader that reads nothing",
            partial(measures.beside_stalled, readers=1), BESIDE, readable, start="fresh", references=(), long=True,
            needs=("bench-load",)),
        Row("stalled-64", "64 clients beside 64 readers that read nothing",
            partial(measures.beside_stalled, readers=64), BESIDE, readable, start="fresh", references=(),
            long=True, needs=("bench-load",)),
        Row("stalled-2000", "64 clients beside 2,000 readers that read nothing",
            partial(measures.beside_stalled, readers=2000), BESIDE, PAIR, start="fresh", references=(),
            long=True, needs=("bench-load",)),
        Row("slow-1", "64 clients beside one reader at 1 MB/s", partial(measures.beside_slow, readers=1), BESIDE,
            readable, start="fresh", references=(), long=True, needs=("bench-load",)),
    ]  # fmt: skip


def _standing() -> list[Row]:
    rows = [
        Row(f"idle-edges-{count}", f"gateway with {count:,} idle edges", partial(measures.fleet_memory, count=count),
            ("kib_per_edge", "idle_cpu_share"), OWN, start="own", references=(), smoke=OWN if count == 1 else (),
            before=count == 1000, long=count > 1000, needs=("bench-load",))
        for count in (1, 1000, 10000)
    ]  # fmt: skip
    rows.append(
        Row("idle-upgrades", "1,000 idle upgrades", partial(measures.idle_upgrades, count=1000), ("kib_per_upgrade",),
            ("haproxy", "causeway", "frp", "chisel", "rathole"), start="fresh", app="load", references=("haproxy",),
            needs=("bench-load",))
    )  # fmt: skip
    for name, resume in (("full", False), ("resumed", True)):
        rows.append(
            Row(f"handshakes-{name}", f"edges' {name} handshakes, with hello", partial(measures.storm, resume=resume),
                ("per_s_and_core", "resumed_share"), OWN, start="own", references=(), needs=("bench-load",))
        )  # fmt: skip
    rows.extend(
        Row(f"restart-{count}", f"{count:,} edges after a gateway's restart", partial(measures.restart, count=count),
            ("seconds_from_start", "gateway_cpu_s"), OWN, start="own", references=(), long=count > 1000,
            needs=("bench-load",))
        for count in (1000, 10000)
    )  # fmt: skip
    rows.append(
        Row("back", "a request after edge, then gateway, was killed and started again", measures.back,
            ("edge_s", "gateway_s"), OWN, start="own", references=())
    )  # fmt: skip
    rows.extend(
        Row(f"graceful-{name}", f"outage by SIGTERM and a new start of the {name}, with an open session",
            partial(measures.graceful_restart, role=role), ("outage_s", "drain_s"), OWN, start="own", app="load",
            references=(), long=True, needs=("bench-load",))
        for name, role in (("gateway", "front"), ("edge", "edge"))
    )  # fmt: skip
    rows.extend(
        Row(f"growth-{count}", f"HTTP/1.1, 64 clients of one node, {count:,} others registered",
            partial(measures.growth, count=count), PER_REQUEST, OWN, start="own", references=(),
            long=count > 1000, needs=("bench-load",))
        for count in (0, 100, 1000, 10000)
    )  # fmt: skip
    rows.extend(
        Row(f"nodes-{nodes}", f"HTTP/1.1, 64 clients of {nodes} nodes in turn",
            partial(measures.many_nodes, nodes=nodes), PER_REQUEST, OWN, start="own", references=(),
            needs=("bench-load",))
        for nodes in (1, 100)
    )  # fmt: skip
    rows.extend(
        Row(f"streams-{count}", f"64 clients beside {count:,} idle upgrades on the same tunnel",
            partial(measures.beside_idle, count=count), PER_REQUEST, PAIR, start="fresh", app="load",
            references=("haproxy",), needs=("bench-load",))
        for count in (0, 1000, 4000)
    )  # fmt: skip
    rows += [
        Row("cores", "64 clients of a gateway with two workers: the node named by SNI, by Host alone, and by CONNECT",
            measures.cores, ("cpu_host_to_own",), OWN, start="own", references=(), needs=("bench-load",)),
        Row("turning", "64 clients that change to another of 8 nodes with each request, on two workers and on one",
            measures.turning, ("cpu_turning_to_one_core",), OWN, start="own", references=(),
            needs=("bench-load",)),
        Row("rules", "64 clients of a gateway with 10 rules, and of one with 10,000, of which the last matches",
            measures.rules, ("cpu_10000_to_10",), OWN, start="own", references=()),
        Row("instructions", "instructions and allocations for a request: gateway by HTTP/1.1 and HTTP/2, edge by HTTP/1.1",
            instructions, tuple(f"{of}{what}_per_request" for of in ("", "http2_", "edge_") for what in COUNTED), OWN,
            start="own", references=(), needs=("valgrind",)),
        Row("system-calls", "system calls of a gateway with two workers for a request, HTTP/1.1, 64 clients", system_calls,
            ("system_calls_per_request",), OWN, start="own", references=(), needs=("strace",)),
        Row("waits", "locks and wakes of a gateway with two workers, 64 clients that change nodes with each request",
            waits, ("futexes_per_request",), OWN, start="own", references=(), needs=("bench-load", "perf")),
    ]  # fmt: skip
    return rows


def _replicas() -> list[Row]:
    hop = ("cpu_hop_to_direct", "p50_us_hop_to_direct", "p99_us_hop_to_direct", "requests_per_s_hop_to_direct")
    rows = [
        Row("forwarded", "64 clients of a gateway that forwards to the node's gateway, against the latter's own clients",
            replicas.forwarded, hop, OWN, start="own", references=(), smoke=OWN),
        Row("three-killed", "16 clients with a new CONNECT for each request, while one of three servers is killed",
            replicas.one_dies, ("errors", "requests_per_s", "p999_us"), THREE[1:], start="fresh", references=(),
            needs=("bench-load",)),
    ]  # fmt: skip
    for name, new, way in (("64", False, "kept connections"), ("connections", True, "a new connection for each request")):
        rows.append(
            Row(f"three-{name}", f"64 clients of three servers, inside of CONNECT, {way}; rathole has one server",
                partial(replicas.requests, new=new), (*PER_REQUEST[:2], "p99_us"), THREE,
                references=("rathole", "konnectivity-3"), needs=("bench-load",))
        )  # fmt: skip
    return rows


def _long() -> list[Row]:
    rows = [
        Row("outage", "the link of an idle tunnel falls silent, and returns", outage, ("both_know_s", "again_s"), OWN,
            references=(), needs=("bench-load",), link=Link(20, 125), long=True)
    ]  # fmt: skip
    for name, link, who in (
        ("link-50", Link(50, 50), TUNNELS),
        ("link-125", Link(50, 125), TUNNELS),
        ("link-far", Link(100, 50), ("causeway", "konnectivity")),
        ("link-near", Link(0.1, 125), ("causeway", "konnectivity")),
    ):
        over = f"{link.round_trip_ms:g} ms and {link.mb_per_s} MB/s"
        rows.append(
            Row(name, f"one stream, and small requests beside it, over {over}", partial(over_link, link=link), LINK,
                ("plain", *who), references=("plain",), needs=("bench-load",), link=link, long=True)
        )  # fmt: skip
    return rows


def _reading() -> list[Row]:
    who = ("apiserver", "causeway")
    return [
        Row("readers", "1,000 EndpointSlices with 100 changes/s, and 200 readers in 4 pools of 5 edges with 10 each",
            reading, ("link_bytes_per_change", "delay_p99_ms", "mib_leader_more"), who, start="own",
            references=("apiserver",), long=True, needs=("bench-load", "kube-apiserver", "etcd")),
    ]  # fmt: skip


ROWS: tuple[Row, ...] = (*_requests(), *_transfers(), *_neighbours(), *_standing(), *_replicas(), *_long(), *_reading())
