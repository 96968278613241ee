"""The bars that the design sets, and which figures of a run stand against them.

Two numbers in one bar (one / eight) are two parts. What a part says is better when it is higher, unless the bar says
otherwise. The columns for the others are what the design's authors measured once; a run measures its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .rounds import Outcome, Spread

Outcomes = dict[str, Outcome]
Part = Callable[[Outcomes], Spread | None]


@dataclass(frozen=True)
class Bar:
    """One line of the design's table. Without parts it is measured elsewhere, or not yet."""

    measure: str
    konnectivity: str
    best_other: str
    must: tuple[float, ...]
    aim: tuple[float, ...]
    parts: tuple[Part, ...] = ()
    higher: bool = True
    unit: str = ""
    elsewhere: str = "no row of this run measures it"
    # Names the file under bench/why that says why it falls short, where it does.
    why: str = ""

    def verdict(self, index: int, found: Spread) -> str:
        """Of one part, by its median."""

        def reaches(wanted: float) -> bool:
            return found.median >= wanted if self.higher else found.median <= wanted

        if reaches(self.aim[index]):
            return "meets aim"
        return "meets must" if reaches(self.must[index]) else "falls short"


def ratio(row: str, figure: str, reference: str | None = None) -> Part:
    """Causeway's figure against the row's reference, or another contestant's."""
    return lambda rows: rows[row].ratio("causeway", figure, reference) if row in rows else None


def value(row: str, figure: str) -> Part:
    return lambda rows: rows[row].spread("causeway", figure) if row in rows else None


BARS = (
    Bar("requests/s, 64 callers, against HAProxy straight", "0.54 (0.62 at `-v=0`)", "0.48 rathole", (0.60,), (0.80,),
        (ratio("http1-64", "requests_per_s"),)),
    Bar("CPU per request, gateway / edge, against Konnectivity's server / agent", "1 / 1", "1.9 / 0.7", (0.85, 0.70),
        (0.60, 0.50), (ratio("connect-64", "cpu_front_us_per_request", "konnectivity"),
                       ratio("connect-64", "cpu_edge_us_per_request", "konnectivity")), higher=False),
    Bar("gateway CPU per request against HAProxy's, HTTP/1.1 / HTTP/2 callers", "1.1 / –", "–", (1.0, 1.5), (0.8, 1.1),
        (ratio("http1-64", "cpu_front_us_per_request"), ratio("http2-64", "cpu_front_us_per_request")), higher=False,
        why="gateway-cpu"),
    Bar("p99 at 256 callers, against HAProxy straight", "1.7", "2.2", (1.7,), (1.3,),
        (ratio("http1-256", "p99_us"),), higher=False, why="p99"),
    Bar("a new TLS connection per request, connections/s against HAProxy straight", "0.52", "0.87", (0.9,), (1.0,),
        (ratio("connections", "requests_per_s"),)),
    Bar("1 GiB download, one / eight, against HAProxy straight", "0.32 / 0.23", "0.52 / 0.44", (0.85, 0.63),
        (1.0, 0.9), (ratio("down-1", "mb_per_s"), ratio("down-8", "mb_per_s")), why="bulk"),
    Bar("1 GiB upload, against HAProxy straight", "0.45", "0.47", (0.62,), (0.85,), (ratio("up-1", "mb_per_s"),),
        why="bulk"),
    Bar("CPU seconds per GB down, gateway", "3.6", "2.25", (1.1,), (0.8,), (value("down-1", "cpu_front_s_per_gb"),),
        higher=False, why="cpu-per-gb"),
    Bar("the same against Konnectivity's server in this run", "1", "0.63", (0.31,), (0.22,),
        (ratio("down-1", "cpu_front_s_per_gb", "konnectivity"),), higher=False),
    Bar("64 stalled readers: what 64 callers beside them keep", "0; hangs", "1.0", (0.9,), (0.98,),
        (value("stalled-64", "kept"),)),
    Bar("memory per stalled stream", "–", "9.4 MB (frp)", (1024.0,), (256.0,), (value("stalled-64", "kib_per_reader"),),
        higher=False, unit=" KiB", why="stalled"),
    Bar("one reader at 1 MB/s beside 64 callers: what they keep", "0.004", "0.91 frp, 1.2 chisel", (0.95,), (1.0,),
        (value("slow-1", "kept"),), why="slow"),
    Bar("link of 50 ms and 50 MB/s, one stream, against plain TCP / the same at 1 Gbit/s", "0.95 / 0.93", "1.0 / 0.85",
        (0.95, 0.92), (1.0, 1.0), (ratio("link-50", "mb_per_s", "plain"), ratio("link-125", "mb_per_s", "plain")),
        why="link"),
    Bar("p50 of small requests beside a bulk transfer there, against idle", "6", "1.04 chisel, 1.5 frp", (1.5,),
        (1.05,), (value("link-50", "p50_beside_ratio"),), higher=False, why="link"),
    Bar("round trips of a new request on a live tunnel", "2", "1", (1.0,), (1.0,),
        (value("link-50", "round_trips"),), higher=False),
    Bar("memory at the gateway per idle edge (one tunnel) / per open idle upgrade", "76 / 65 KiB", "82 / 30 KiB",
        (42.0, 20.0), (20.0, 12.0), (value("idle-edges-1000", "kib_per_edge"),
                                     value("idle-upgrades", "kib_per_upgrade")), higher=False, unit=" KiB"),
    Bar("silent death of an idle link: both ends know after", "20 s, agent never", "33 to 44 s", (15.0,), (10.0,),
        (value("outage", "both_know_s"),), higher=False, unit=" s"),
    Bar("requests succeed again after the network's return", "1.2 s or never", "3.8 s", (2.0,), (1.0,),
        (value("outage", "again_s"),), higher=False, unit=" s"),
    Bar("after a restart of the edge / of the gateway", "0.05 / 0.7 s", "0.05 / 0.3 s", (0.2, 1.5), (0.1, 0.5),
        (value("back", "edge_s"), value("back", "gateway_s")), higher=False, unit=" s"),
    Bar("reconnect storm: full handshakes per second and core", "–", "–", (2500.0,), (3300.0,),
        (value("handshakes-full", "per_s_and_core"),), why="handshakes"),
    Bar("10,000 edges back after a gateway restart (the design says 19,000, with two cores for the gateway)", "–", "–",
        (10.0,), (5.0,), (value("restart-10000", "seconds_from_start"),), higher=False, unit=" s"),
    # One stream for each pool of fifty is the must; that no stream repeats what did not change is the aim.
    Bar("200 readers in pools of 50: bytes over the cloud link, against 200 watches at kube-apiserver", "–", "–", (0.02,),
        (0.005,), (ratio("readers", "link_bytes_per_change", "apiserver"),), higher=False),
    Bar("memory of a pool's leader more than of an edge that reads nothing", "–", "320 MiB (kube-apiserver and etcd)",
        (32.0,), (16.0,), (value("readers", "mib_leader_more"),), higher=False, unit=" MiB", why="readers"),
)  # fmt: skip
