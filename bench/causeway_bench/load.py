"""`causeway-bench-load`, the program of bench/load: one function for each of its loads that rows use.

It prints one JSON object per line on standard output. The last one with `"event": "result"` has the figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .bed import Bed
from .callers import MICRO, WRONG, Figures, cpu_per, way_of
from .contestant import Contestant, Https, Plain, Way, fresh_name
from .process import Process, Trouble, run, wait_for
from .usage import Meter

NAME = "bench-load"
Event = dict[str, Any]


def events(text: str) -> list[Event]:
    """Returns the printed events; other lines are error messages for people."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                # The last line may be incomplete.
                continue
    return found


def event(text: str, name: str) -> Event | None:
    """The last event of that name."""
    return next((one for one in reversed(events(text)) if one.get("event") == name), None)


def result(bed: Bed, words: list[str], seconds: float) -> Event:
    """Runs a load that ends by itself."""
    said = run([bed.tools.path(NAME), *words], seconds, bed.cpus("rest"))
    found = event(said, "result")
    if found is None:
        raise Trouble(f"{NAME} {words[0]} gave no result: {said[-400:]}")
    return found


def road(way: Way) -> list[str]:
    """Returns the arguments for the load's route to the app."""
    if isinstance(way, Https):
        return ["--listener", f"127.0.0.1:{way.port}", "--target", way.target, "--ca", str(way.ca)]
    if isinstance(way, Plain):
        return ["--listener", way.target, "--target", way.target]
    shown = ["--cert", str(way.certificate), "--key", str(way.key)] if way.certificate else []
    return ["--proxy", f"127.0.0.1:{way.port}", "--target", way.target, "--ca", str(way.ca),
            "--server-name", way.server_name, *shown]  # fmt: skip


def requests(
    bed: Bed, contestant: Contestant, callers: int, seconds: float, *, connect: bool = False, new: bool = False
) -> Figures:
    """Requests for 1 KiB in a closed loop, over kept connections or new ones."""
    meter = Meter(contestant.processes)
    words = ["connect", *road(way_of(contestant, connect)), "--clients", str(callers),
             "--for", f"{seconds:.0f}s", "--path", "/1k", *(["--new"] if new else [])]  # fmt: skip
    found = result(bed, words, seconds + 30)
    requests_made = found["requests"]
    if not requests_made:
        # Zero is a result and not a fault: a tunnel may hang.
        print(f"bench: {contestant.name} answered nothing: {found['failures']}", file=sys.stderr)
        return {"requests_per_s": 0.0, "errors": float(found["failed"])}
    took = found["latency_us"]
    return {
        "requests_per_s": float(found["per_second"]),
        "p50_us": float(took["p50"]),
        "p99_us": float(took["p99"]),
        "p999_us": float(took["p99.9"]),
        "errors": float(found["failed"]),
        # Failures are named by their kind: answers by their status.
        WRONG: float(sum(count for name, count in found["failures"].items() if name[:3].isdigit())),
        **cpu_per("request", meter, requests_made, MICRO),
    }


def transfers(bed: Bed, contestant: Contestant, up: bool, *, connect: bool = False, upgrade: bool = False) -> Figures:
    """Moves one bulk, to or from our own app, plain or inside an upgrade."""
    size = bed.pace.bulk
    words = ["connect", *road(way_of(contestant, connect)), "--upload" if up else "--download",
             str(size)]  # fmt: skip
    if upgrade:
        words += ["--upgrade", "/drain" if up else f"/source/{size}"]
    meter = Meter(contestant.processes)
    found = result(bed, words, 330)
    return {"mb_per_s": float(found["mb_per_second"]), **cpu_per("gb", meter, size / 1e9, 1.0)}


@contextmanager
def beside(bed: Bed, words: list[str], begun: str, seconds: float = 120) -> Iterator[Process]:
    """Runs a load until the block is left; the block is entered when the load has printed `begun`."""
    process = bed.spawn(fresh_name(f"load-{words[0]}"), [bed.tools.path(NAME), *words], "rest")
    try:
        wait_for(f"{NAME} {words[0]} prints {begun}", lambda: event(process.said(), begun) is not None, [process], seconds)
        yield process
    finally:
        process.stop(15)


def idle(contestant: Contestant, count: int) -> list[str]:
    """Returns the arguments for this many idle upgrades."""
    way = way_of(contestant)
    if not isinstance(way, Https):
        raise Trouble(f"{contestant.name} has no https listener")
    return ["idle", "--url", "https://localhost/echo", "--to", f"127.0.0.1:{way.port}", "--count", str(count)]


def mint(bed: Bed, data: Path, nodes: int) -> Path:
    """Identities of edges in a gateway's data directory; returns the file for `fleet`."""
    out = data.parent / "identities.json"
    run([bed.tools.path(NAME), "mint", "--data-dir", str(data), "--nodes", str(nodes), "--out", str(out)], 300)
    return out


def fleet(tunnel: int, identities: Path, nodes: int) -> list[str]:
    """Returns the arguments for this many light edges."""
    return ["fleet", "--gateway", f"127.0.0.1:{tunnel}", "--identities", str(identities), "--nodes", str(nodes)]


def handshakes(bed: Bed, tunnel: int, identities: Path, seconds: float, *, resume: bool) -> Event:
    """Dials, sends the hello and hangs up in a closed loop."""
    words = [*fleet(tunnel, identities, 32), "--handshakes-only", "--hello", "--for", f"{seconds:.0f}s"]
    words += ["--clients", "32", "--resume", "yes" if resume else "no"]
    return result(bed, words, seconds + 30)
