"""The rows of the benchmark: who takes part, what is done, and how its figures are named."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from . import measures
from .bed import App, Bed
from .callers import Figures
from .causeway import Before, Causeway
from .contestant import Contestant, Direct
from .cost import instructions, system_calls, waits
from .haproxy import Haproxy
from .konnectivity import Konnectivity
from .link import Link, outage, over_link
from .readers import ApiServer, reading
from .tunnels import Chisel, Frp, Rathole

CONTESTANTS: dict[str, Callable[[str], Contestant]] = {
    "haproxy": Haproxy,
    "causeway": Causeway,
    "before": Before,
    "konnectivity": Konnectivity,
    "frp": Frp,
    "chisel": Chisel,
    "rathole": Rathole,
    # The app without any road, for the rows whose limit is the link.
    "plain": Direct,
    # Watches of the cluster's API without any road, for what is read of it.
    "apiserver": ApiServer,
}
ALL = ("haproxy", "causeway", "konnectivity", "frp", "chisel", "rathole")
# Those that wrk and h2load can call: Konnectivity wants a CONNECT.
DIRECT = ("haproxy", "causeway", "frp", "chisel", "rathole")
PAIR = ("haproxy", "causeway")
CONNECTS = ("haproxy", "causeway", "konnectivity")
OWN = ("causeway",)

# `together`: all stand for the whole row. `fresh`: each is started anew for every round. `own`: the measure starts it.
Start = Literal["together", "fresh", "own"]


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    name: str
    title: str
    measure: Callable[[Bed, Contestant], Figures]
    # The figure that stands for the row, and whether more of it is better.
    headline: str
    contestants: tuple[str, ...]
    higher: bool = True
    start: Start = "together"
    app: App = "files"
    reference: str = "haproxy"
    # Part of `--quick`, and with whom; none is not at all.
    quick: tuple[str, ...] = ()
    # What it goes over; none is loopback.
    link: Link | None = None
    needs: tuple[str, ...] = ()
    # Takes minutes: fewer rounds, unless somebody asks for all.
    long: bool = False


def _requests() -> list[Row]:
    rows = []
    for callers in (1, 64, 256):
        quick = PAIR if callers > 1 else ()
        rows.append(
            Row(f"http1-{callers}", f"HTTP/1.1, {callers} callers, 1 KiB", partial(measures.http1, callers=callers),
                "requests_per_s", DIRECT, quick=quick)
        )  # fmt: skip
    for callers in (1, 64, 256):
        rows.append(
            Row(f"http2-{callers}", f"HTTP/2, {callers} callers, 1 KiB", partial(measures.http2, callers=callers),
                "requests_per_s", DIRECT, quick=PAIR if callers == 64 else ())
        )  # fmt: skip
    for callers in (1, 64, 256):
        rows.append(
            Row(f"connect-{callers}", f"HTTP/1.1 inside CONNECT, {callers} callers, 1 KiB",
                partial(measures.connect, callers=callers), "requests_per_s", CONNECTS,
                quick=CONNECTS if callers == 64 else (), needs=("bench-load",))
        )  # fmt: skip
    rows.append(
        Row("connections", "a new TLS connection for each request, 64 callers",
            partial(measures.connections, callers=64), "requests_per_s", DIRECT, quick=PAIR)
    )  # fmt: skip
    rows.append(
        Row("connections-connect", "a new TLS connection and CONNECT for each request, 64 callers",
            partial(measures.connect_new, callers=64), "requests_per_s", CONNECTS, needs=("bench-load",))
    )  # fmt: skip
    return rows


def _transfers() -> list[Row]:
    rows = []
    for count in (1, 8):
        word = "one" if count == 1 else "eight"
        rows.append(
            Row(f"down-{count}", f"download, {word} at once", partial(measures.down, count=count), "mb_per_s", ALL,
                quick=CONNECTS if count == 1 else ())
        )  # fmt: skip
        rows.append(
            Row(f"up-{count}", f"upload, {word} at once", partial(measures.up, count=count), "mb_per_s", ALL,
                app="load", quick=PAIR if count == 1 else (), needs=("bench-load",))
        )  # fmt: skip
    for way, who in (("connect", CONNECTS), ("upgrade", DIRECT)):
        word = "CONNECT" if way == "connect" else "an upgrade"
        rows.extend(
            Row(f"{way}-{'up' if is_up else 'down'}", f"{'upload' if is_up else 'download'} inside of {word}",
                partial(measures.within, way=way, is_up=is_up), "mb_per_s", who, app="load", needs=("bench-load",))
            for is_up in (False, True)
        )  # fmt: skip
    return rows


def _neighbours() -> list[Row]:
    return [
        Row("stalled-1", "64 callers beside one reader that reads nothing",
            partial(measures.beside_stalled, readers=1), "kept", ALL, start="fresh", long=True, needs=("bench-load",)),
        Row("stalled-64", "64 callers beside 64 readers that read nothing",
            partial(measures.beside_stalled, readers=64), "kept", ALL, start="fresh", quick=PAIR,
            long=True, needs=("bench-load",)),
        Row("slow-1", "64 callers beside one reader at 1 MB/s", partial(measures.beside_slow, readers=1), "kept", ALL,
            start="fresh", quick=PAIR, long=True, needs=("bench-load",)),
    ]  # fmt: skip


def _standing() -> list[Row]:
    rows = [
        Row(f"idle-edges-{count}", f"gateway with {count:,} idle edges", partial(measures.fleet_memory, count=count),
            "kib_per_edge", OWN, higher=False, start="own", reference="", quick=OWN if count == 1000 else (),
            long=count > 1000, needs=("bench-load",))
        for count in (1, 1000, 10000)
    ]  # fmt: skip
    rows.append(
        Row("idle-upgrades", "1,000 idle upgrades", partial(measures.idle_upgrades, count=1000), "kib_per_upgrade",
            DIRECT, higher=False, start="fresh", app="load", quick=OWN, needs=("bench-load",))
    )  # fmt: skip
    for name, resume in (("full", False), ("resumed", True)):
        rows.append(
            Row(f"handshakes-{name}", f"edges' {name} handshakes, with hello", partial(measures.storm, resume=resume),
                "per_s_and_core", OWN, start="own", reference="", quick=() if resume else OWN, needs=("bench-load",))
        )  # fmt: skip
    rows.extend(
        Row(f"restart-{count}", f"{count:,} edges after a gateway's restart", partial(measures.restart, count=count),
            "seconds_from_start", OWN, higher=False, start="own", reference="", long=count > 1000,
            needs=("bench-load",))
        for count in (1000, 10000)
    )  # fmt: skip
    rows.append(
        Row("back", "a request after edge, then gateway, was killed and started again", measures.back, "gateway_s", OWN,
            higher=False, start="own", reference="")
    )  # fmt: skip
    rows.extend(
        Row(f"growth-{count}", f"HTTP/1.1, 64 callers of one node, {count:,} others registered",
            partial(measures.growth, count=count), "requests_per_s", OWN, start="own", reference="",
            long=count > 1000, needs=("bench-load",))
        for count in (0, 100, 1000, 10000)
    )  # fmt: skip
    rows.extend(
        Row(f"nodes-{nodes}", f"HTTP/1.1, 64 callers that ask {nodes} nodes in turn",
            partial(measures.many_nodes, nodes=nodes), "requests_per_s", OWN, start="own", reference="",
            needs=("bench-load",))
        for nodes in (1, 100)
    )  # fmt: skip
    rows.extend(
        Row(f"streams-{count}", f"64 callers beside {count:,} idle upgrades on the same tunnel",
            partial(measures.beside_idle, count=count), "requests_per_s", PAIR, start="fresh", app="load",
            needs=("bench-load",))
        for count in (0, 1000, 4000)
    )  # fmt: skip
    rows += [
        Row("cores", "64 callers of a gateway with two cores: the node named by SNI, by Host alone, and by CONNECT",
            measures.cores, "cpu_host_to_own", OWN, higher=False, start="own", reference="", needs=("bench-load",)),
        Row("turning", "64 callers that turn to another of 8 nodes with each request, on two cores and on one",
            measures.turning, "cpu_turning_to_one_core", OWN, higher=False, start="own", reference="",
            needs=("bench-load",)),
        Row("rules", "64 callers of a gateway with 10 rules, and of one with 10,000, of which the last matches",
            measures.rules, "cpu_10000_to_10", OWN, higher=False, start="own", reference=""),
        Row("instructions", "instructions and allocations of the gateway for a request, HTTP/1.1", instructions,
            "instructions_per_request", OWN, higher=False, start="own", reference="", needs=("bench-load", "valgrind")),
        Row("system-calls", "system calls of a gateway with two cores for a request, HTTP/1.1, 64 callers", system_calls,
            "system_calls_per_request", OWN, higher=False, start="own", reference="", needs=("bench-load", "strace")),
        Row("waits", "locks and wakes of a gateway with two cores, 64 callers that turn to another node with each request",
            waits, "futexes_per_request", OWN, higher=False, start="own", reference="", needs=("bench-load", "perf")),
    ]  # fmt: skip
    return rows


def _long() -> list[Row]:
    rows = [
        Row("outage", "the link of an idle tunnel falls silent, and returns", outage, "both_know_s", OWN, higher=False,
            reference="", needs=("bench-load",), link=Link(20, 125), long=True)
    ]  # fmt: skip
    for name, link, who in (
        ("link-50", Link(50, 50), ALL[1:]),
        ("link-125", Link(50, 125), ALL[1:]),
        ("link-far", Link(100, 50), CONNECTS[1:]),
        ("link-near", Link(0.1, 125), CONNECTS[1:]),
    ):
        over = f"{link.round_trip_ms:g} ms and {link.mb_per_s} MB/s"
        rows.append(
            Row(name, f"one stream, and small requests beside it, over {over}", partial(over_link, link=link), "mb_per_s",
                ("plain", *who), reference="plain", needs=("bench-load",), link=link, long=True)
        )  # fmt: skip
    return rows


def _reading() -> list[Row]:
    who = ("apiserver", "causeway")
    # Network namespaces are not everybody's to make, and what is quick is for everybody.
    quick = who if os.geteuid() == 0 else ()
    return [
        Row("readers", "1,000 EndpointSlices with 100 changes/s, and 200 readers in 4 pools of 5 edges with 10 each",
            reading, "link_bytes_per_change", who, higher=False, start="own", reference="apiserver", quick=quick, long=True,
            needs=("bench-load", "kube-apiserver", "etcd")),
    ]  # fmt: skip


ROWS: tuple[Row, ...] = (*_requests(), *_transfers(), *_neighbours(), *_standing(), *_long(), *_reading())
