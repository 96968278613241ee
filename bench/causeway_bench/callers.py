"""The generators: wrk, h2load and curl, each as a function that returns figures."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Literal

from .bed import Bed
from .contestant import Contestant, Https, Plain, Way
from .process import Process, Trouble, run
from .usage import Meter

Figures = dict[str, float]
Named = int | Literal["sni", "host"]
MICRO = 1e6
# How often the memory of the callers' side is looked at while transfers are under way, in seconds.
_LOOK = 0.25
_BOUND = 330
_FINISHED = re.compile(r"finished in ([\d.]+)(us|ms|s), ([\d.]+) req/s")
_OUTCOMES = re.compile(r"requests: .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")


def https_of(contestant: Contestant) -> Https:
    if contestant.https is None:
        raise Trouble(f"{contestant.name} has no https front")
    return contestant.https


def wrk(
    bed: Bed, contestant: Contestant, callers: int, seconds: float, *, close: bool = False, named: Named = "sni"
) -> Figures:
    """HTTP/1.1 requests for 1 KiB, over kept connections or, with `close`, over a new one each.

    The node is `named` by SNI, or by Host alone. A number goes to node-1 … node-N in turn, by Host alone, since a
    connection's SNI can name only one.
    """
    front = https_of(contestant)
    scripts = Path(__file__).parent
    words = [bed.tools.path("wrk"), "-t1", f"-c{callers}", f"-d{seconds:.0f}s", "--timeout", "10s"]
    if close:
        words += ["-H", "Connection: close"]
    if isinstance(named, int):
        words += ["-s", str(scripts / "nodes.lua"), f"https://127.0.0.1:{front.port}/1k", "--", str(named)]
    else:
        name = "localhost" if named == "sni" else "127.0.0.1"
        words += ["-s", str(scripts / "wrk.lua"), "-H", "Host: localhost", f"https://{name}:{front.port}/1k"]
    meter = Meter(contestant.processes)
    said = run(words, seconds + 30, bed.cpus("rest"))
    answer = json.loads(said.splitlines()[-1])
    if not answer["requests"]:
        raise Trouble(f"wrk got no answer: {said}")
    return {
        "requests_per_s": answer["requests"] / answer["microseconds"] * MICRO,
        "p50_us": answer["p50"],
        "p99_us": answer["p99"],
        "p999_us": answer["p999"],
        "errors": answer["errors"],
        **cpu_per("request", meter, answer["requests"], MICRO),
    }


def cpu_per(what: str, meter: Meter, count: float, scale: float) -> Figures:
    """CPU by role and, under `all`, of the road as a whole, for each of what was counted."""
    used = meter.read()
    used["all"] = sum(used.values())
    unit = "us" if scale == MICRO else "s"
    return {f"cpu_{role}_{unit}_per_{what}": seconds * scale / count for role, seconds in used.items()}


def h2load(bed: Bed, contestant: Contestant, callers: int, seconds: float) -> Figures:
    """HTTP/2 requests for 1 KiB: each caller has a connection of its own and asks one thing at a time."""
    front = https_of(contestant)
    log = bed.scratch / "h2load.log"
    log.unlink(missing_ok=True)
    meter = Meter(contestant.processes)
    said = run(
        [bed.tools.path("h2load"), "-t1", f"-c{callers}", "-m1", f"-D{seconds:.0f}", "--npn-list=h2",
         f"--log-file={log}", "-H", ":authority: localhost", f"--connect-to=127.0.0.1:{front.port}",
         "https://localhost/1k"],
        seconds + 30,
        bed.cpus("rest"),
    )  # fmt: skip
    finished, outcomes = _FINISHED.search(said), _OUTCOMES.search(said)
    if not finished or not outcomes or not int(outcomes.group(1)):
        raise Trouble(f"h2load: {said[-400:]}")
    times = sorted(int(line.split("\t")[2]) for line in log.read_text().splitlines() if line.count("\t") == 2)
    requests = int(outcomes.group(1))
    return {
        "requests_per_s": requests / seconds,
        **percentiles(times),
        "errors": float(sum(int(outcomes.group(group)) for group in (2, 3, 4))),
        **cpu_per("request", meter, requests, MICRO),
    }


def percentiles(ordered: list[int]) -> Figures:
    """Of times that are in order, in microseconds."""
    if not ordered:
        return {}

    def at(share: float) -> float:
        return float(ordered[min(len(ordered) - 1, int(len(ordered) * share))])

    return {"p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999)}


def curl_words(bed: Bed, way: Way, path: str) -> list[str]:
    """How curl reaches a path of the app by that way; HTTP/1.1, everything verified."""
    words = [bed.tools.path("curl"), "-sS", "--fail", "--http1.1", "-o", "/dev/null", "--max-time", "300"]
    if isinstance(way, Https):
        return [*words, "--cacert", str(way.ca), "--connect-to", f"localhost:443:127.0.0.1:{way.port}",
                f"https://localhost/{path}"]  # fmt: skip
    if isinstance(way, Plain):
        return [*words, f"http://{way.target}/{path}"]
    shown = []
    if way.certificate is not None:
        shown = ["--proxy-cert", str(way.certificate), "--proxy-key", str(way.key)]
    return [*words, "-p", "-x", f"https://localhost:{way.port}", "--proxy-cacert", str(way.ca), *shown,
            f"http://{way.target}/{path}"]  # fmt: skip


def way_of(contestant: Contestant, connect: bool = False) -> Way:
    """The https front where there is one, unless CONNECT was asked for."""
    way = contestant.connect if connect else contestant.https or contestant.connect or contestant.plain
    if way is None:
        raise Trouble(f"{contestant.name} has no such front")
    return way


def transfer(bed: Bed, contestant: Contestant, count: int, up: bool, connect: bool = False) -> Figures:
    """So many downloads or uploads of one bulk at once: bytes a second from the first's start to the last's end."""
    name, size = ("bulk", bed.pace.bulk) if count == 1 else ("bulk8", bed.pace.bulk_of_eight)
    words = curl_words(bed, way_of(contestant, connect), "sink" if up else name)
    if up:
        # An upload begins at once, as other clients' do, and not after a second of waiting for 100.
        words += ["-H", "Expect:", "-T", str(bed.scratch / "files" / name)]
    before = contestant.memory()
    meter = Meter(contestant.processes)
    begin = time.monotonic()
    curls = [Process(f"curl-{index}", words, bed.scratch / f"curl-{index}.log", bed.cpus("rest")) for index in range(count)]
    held: list[int] = []
    try:
        for curl in curls:
            while not _done(curl):
                held.append(contestant.memory() - before)
                if time.monotonic() - begin > _BOUND:
                    raise Trouble(f"curl: not done within {_BOUND} s")
        seconds = time.monotonic() - begin
    finally:
        for curl in curls:
            curl.stop()
            curl.log.unlink(missing_ok=True)
    figures = {"mb_per_s": size * count / seconds / 1e6, **cpu_per("gb", meter, size * count / 1e9, 1.0)}
    if held:
        # Of the whole time.
        figures |= {"kib_per_stream": median(held) / 1024 / count, "kib_per_stream_most": max(held) / 1024 / count}
    return figures


def _done(curl: Process) -> bool:
    """Whether it ends before the next look."""
    try:
        code = curl.child.wait(_LOOK)
    except subprocess.TimeoutExpired:
        return False
    if code != 0:
        raise Trouble(f"curl ended with {code}: {curl.tail()}")
    return True
