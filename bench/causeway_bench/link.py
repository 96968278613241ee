"""The rows over a link of 50 ms: clients and gateway in one network namespace, edge and app in another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from . import load
from .bed import MIB, Bed
from .callers import Figures, curl_words, transfer, way_of
from .causeway import Causeway, answers
from .contestant import Contestant, fresh_name
from .namespace import inside, namespaces
from .process import Process, Trouble, wait_for

# Size of one body over it: seconds, not half a minute.
_BULK = 256 * MIB
# Time limit in seconds to detect a silent link, after which the row fails.
_OUTAGE = 60
# Below this a request's work takes longer than its round trips.
_COUNTABLE_MS = 10
_CLOUD, _NODE = "10.207.113.1", "10.207.113.2"


@dataclass(frozen=True)
class Link:
    """Properties of the link between the cloud and the node."""

    round_trip_ms: float
    mb_per_s: int


@contextmanager
def long_bed(bed: Bed, link: Link) -> Iterator[Bed]:
    """A separate bed over a link; inside the block this thread is on the cloud's side."""
    cloud, node = (f"causeway-bench-{side}-{os.getpid()}" for side in ("cloud", "node"))
    with namespaces(cloud, node):
        scratch = bed.scratch / fresh_name("link")
        scratch.mkdir()
        far = replace(bed, scratch=scratch, pace=replace(bed.pace, bulk=min(bed.pace.bulk, _BULK)), cloud=_CLOUD,
                      node=_NODE, namespaces={"cloud": cloud, "rest": node},
                      apps={}, _processes=[])  # fmt: skip
        words = ["link", "--between", f"{cloud},{node}", "--addresses", f"{_CLOUD},{_NODE}", "--delay",
                 f"{link.round_trip_ms * 500:.0f}us", "--rate", f"{link.mb_per_s}MB/s"]  # fmt: skip
        with load.beside(bed, words, "ready") as relay, inside(cloud):
            far.relay = relay
            try:
                far.prepare()
                yield far
            finally:
                far.stop()


def outage(bed: Bed, contestant: Contestant) -> Figures:
    """The link of an idle tunnel falls silent: measures the seconds until both ends have detected it, and from its
    return until a request succeeds."""
    if not isinstance(contestant, Causeway) or bed.relay is None:
        raise Trouble("an outage requires Causeway over a link")
    silent: dict[str, Callable[[], bool]] = {
        "gateway_knows_s": lambda: contestant.tunnels() == 0,
        "edge_knows_s": lambda: not answers(contestant.edge_admin, "/readyz"),
    }
    figures: Figures = {}
    os.kill(bed.relay.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        while len(figures) < len(silent):
            if time.monotonic() - begin > _OUTAGE:
                raise Trouble(f"not detected within {_OUTAGE} s: {sorted(silent.keys() - figures.keys())}")
            for name, knows in silent.items():
                with bed.at("rest" if name.startswith("edge") else "cloud"):
                    if name not in figures and knows():
                        # The resolution of this measurement.
                        figures[name] = round(time.monotonic() - begin, 1)
            time.sleep(0.05)
    finally:
        os.kill(bed.relay.pid, signal.SIGCONT)
    begin = time.monotonic()
    wait_for("a request succeeds again", contestant.serves, contestant.processes.values(), 60)
    return figures | {"both_know_s": max(figures.values()), "again_s": time.monotonic() - begin}


def over_link(bed: Bed, contestant: Contestant, link: Link) -> Figures:
    """Measures one stream's share of the link, and the latency of small requests, alone and beside it."""
    moved = transfer(bed, contestant, 1, up=False)
    seconds = max(3, bed.pace.seconds)
    alone = load.requests(bed, contestant, 1, seconds)
    words = curl_words(bed, way_of(contestant), "endless")
    bulk = Process("curl-bulk", words, bed.scratch / "curl-bulk.log", bed.cpus("rest"))
    try:
        beside = load.requests(bed, contestant, 1, seconds)
    finally:
        bulk.stop()
    # The client has no connection to the gateway, which is near it; the distance is counted in round trips.
    anew = load.requests(bed, contestant, 1, seconds, new=True)
    figures = {"mb_per_s": moved["mb_per_s"], "share_of_link": moved["mb_per_s"] / link.mb_per_s}
    if anew.get("p50_us"):
        figures["p50_new_us"] = anew["p50_us"]
        if link.round_trip_ms >= _COUNTABLE_MS:
            figures["round_trips"] = float(round(anew["p50_us"] / link.round_trip_ms / 1e3))
    if alone.get("p50_us") and beside.get("p50_us"):
        figures["p50_us"] = alone["p50_us"]
        figures["p50_beside_us"] = beside["p50_us"]
        figures["p50_beside_ratio"] = beside["p50_us"] / alone["p50_us"]
    return figures
