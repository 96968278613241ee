"""The rows over a link of 50 ms: callers and gateway in one network namespace, edge and app in another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from . import load
from .bed import Bed
from .callers import Figures, curl_words, transfer, way_of
from .contestant import Contestant, fresh_name
from .namespace import inside, namespaces
from .process import Process

ROUND_TRIP_US = 50_000.0
_CLOUD, _NODE = "10.207.113.1", "10.207.113.2"


@contextmanager
def long_bed(bed: Bed, rate: int) -> Iterator[Bed]:
    """A bed of its own over a link of 50 ms and so many MB/s; this thread stands at the cloud's side within."""
    cloud, node = (f"causeway-bench-{side}-{os.getpid()}" for side in ("cloud", "node"))
    with namespaces(cloud, node):
        scratch = bed.scratch / fresh_name("link")
        scratch.mkdir()
        far = replace(bed, scratch=scratch, cloud=_CLOUD, node=_NODE, namespaces={"cloud": cloud, "rest": node},
                      apps={}, _processes=[])  # fmt: skip
        words = ["link", "--between", f"{cloud},{node}", "--addresses", f"{_CLOUD},{_NODE}", "--delay", "25ms",
                 "--rate", f"{rate}MB/s"]  # fmt: skip
        with load.beside(bed, words, "ready"), inside(cloud):
            try:
                far.prepare()
                yield far
            finally:
                far.stop()


def over_link(bed: Bed, contestant: Contestant) -> Figures:
    """One stream's share of the link, and what small requests wait for, alone and beside it."""
    moved = transfer(bed, contestant, 1, up=False)
    seconds = max(3, bed.pace.seconds)
    alone = load.requests(bed, contestant, 1, seconds)
    words = curl_words(bed, way_of(contestant), "endless")
    bulk = Process("curl-bulk", words, bed.scratch / "curl-bulk.log", bed.cpus("rest"))
    try:
        beside = load.requests(bed, contestant, 1, seconds)
    finally:
        bulk.stop()
    # The caller is new to the gateway, which is near it; what is far is counted in round trips.
    anew = load.requests(bed, contestant, 1, seconds, new=True)
    figures = {"mb_per_s": moved["mb_per_s"]}
    if anew.get("p50_us"):
        figures["p50_new_us"] = anew["p50_us"]
        figures["round_trips"] = float(round(anew["p50_us"] / ROUND_TRIP_US))
    if alone.get("p50_us") and beside.get("p50_us"):
        figures["p50_us"] = alone["p50_us"]
        figures["p50_beside_us"] = beside["p50_us"]
        figures["p50_beside_ratio"] = beside["p50_us"] / alone["p50_us"]
    return figures
