"""The generators: wrk, h2load and curl, each as a function that returns figures, and the check of an answer's bytes."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Literal

from .bed import App, Bed
from .contestant import Contestant, Https, Plain, Way
from .process import Process, Trouble, run
from .usage import Meter

Figures = dict[str, float]
Named = int | Literal["sni", "host"]
MICRO = 1e6
# Interval at which the memory of the clients' side is measured during transfers, in seconds.
_LOOK = 0.25
_BOUND = 330
_OUTCOMES = re.compile(r"requests: .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")
_STATUSES = re.compile(r"status codes: \d+ 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx")
# Answers with another status than expected: not a matter of speed.
WRONG = "wrong_answers"


def https_of(contestant: Contestant) -> Https:
    if contestant.https is None:
        raise Trouble(f"{contestant.name} has no https listener")
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
        "requests": answer["requests"],
        "requests_per_s": answer["requests"] / answer["microseconds"] * MICRO,
        "p50_us": answer["p50"],
        "p99_us": answer["p99"],
        "p999_us": answer["p999"],
        "errors": answer["errors"],
        WRONG: answer["wrong"],
        **cpu_per("request", meter, answer["requests"], MICRO),
    }


def cpu_per(what: str, meter: Meter, count: float, scale: float) -> Figures:
    """Returns the CPU time by role and, under `all`, of the whole route, for each counted unit."""
    used = meter.read()
    used["all"] = sum(used.values())
    unit = "us" if scale == MICRO else "s"
    return {f"cpu_{role}_{unit}_per_{what}": seconds * scale / count for role, seconds in used.items()}


def h2load(bed: Bed, contestant: Contestant, connections: int, streams: int, seconds: float) -> Figures:
    """Sends HTTP/2 requests for 1 KiB over so many connections, with so many streams at once on each."""
    front = https_of(contestant)
    meter = Meter(contestant.processes)
    said = run(
        [bed.tools.path("h2load"), "-t1", f"-c{connections}", f"-m{streams}", f"-D{seconds:.0f}", "--npn-list=h2",
         "-H", ":authority: localhost", f"--connect-to=127.0.0.1:{front.port}", "https://localhost/1k"],
        seconds + 30,
        bed.cpus("rest"),
    )  # fmt: skip
    outcomes, statuses = _OUTCOMES.search(said), _STATUSES.search(said)
    if not outcomes or not statuses or not int(outcomes.group(1)):
        told = [line for line in said.splitlines() if line.startswith(("requests:", "status codes:"))]
        raise Trouble(f"h2load got no answer: {' '.join(told) or said[-400:]}")
    requests = int(outcomes.group(1))
    return {
        "requests": float(requests),
        "requests_per_s": requests / seconds,
        "errors": float(sum(int(outcomes.group(group)) for group in (2, 3, 4))),
        WRONG: float(sum(int(count) for count in statuses.groups())),
        **cpu_per("request", meter, requests, MICRO),
    }


def curl_words(bed: Bed, way: Way, path: str, out: str = "/dev/null", version: str = "1.1") -> list[str]:
    """Returns the command by which curl reaches a path of the upstream that way; all certificates are verified."""
    words = [bed.tools.path("curl"), "-sS", "--fail", f"--http{version}", "-o", out, "--max-time", "300"]
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
    """Returns the https listener if there is one, unless CONNECT is requested."""
    way = contestant.connect if connect else contestant.https or contestant.connect or contestant.plain
    if way is None:
        raise Trouble(f"{contestant.name} has no such listener")
    return way


def check_answer(bed: Bed, contestant: Contestant, app: App) -> None:
    """Compares the bytes of one answer with those of the upstream, in each way and HTTP version that the rows use."""
    expected = (bed.scratch / "files" / "1k").read_text() if app == "files" else "." * 1024
    ways: list[tuple[Way | None, str]] = [
        (contestant.https, "1.1"), (contestant.https, "2"), (contestant.connect, "1.1"), (contestant.plain, "1.1"),
    ]  # fmt: skip
    for way, version in ways:
        if way is not None and run(curl_words(bed, way, "1k", "-", version), 30) != expected:
            raise Trouble(f"{contestant.name}: a wrong answer to HTTP/{version} by {type(way).__name__}")


def transfer(bed: Bed, contestant: Contestant, count: int, up: bool, connect: bool = False) -> Figures:
    """Runs this many downloads or uploads of one bulk at once: bytes per second from the first's start to the last's
    end."""
    name, size = ("bulk", bed.pace.bulk) if count == 1 else ("bulk8", bed.pace.bulk_of_eight)
    way = way_of(contestant, connect)
    if up:
        # An upload begins at once, like other clients', and not after a wait of a second for 100.
        words = [*curl_words(bed, way, "sink", "-"), "-H", "Expect:", "-T", str(bed.scratch / "files" / name)]
    else:
        words = [*curl_words(bed, way, name), "-w", "%{size_download}"]
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
        for curl in curls:
            # The upstream's count for an upload, or curl's for a download.
            if curl.said().strip() != str(size):
                raise Trouble(f"{size} bytes became {curl.tail()}")
    finally:
        for curl in curls:
            curl.stop()
            curl.log.unlink(missing_ok=True)
    figures = {"mb_per_s": size * count / seconds / 1e6, **cpu_per("gb", meter, size * count / 1e9, 1.0)}
    if held:
        # Relative to the whole time.
        figures |= {"kib_per_stream": median(held) / 1024 / count, "kib_per_stream_most": max(held) / 1024 / count}
    return figures


def _done(curl: Process) -> bool:
    """Whether it ends before the next measurement."""
    try:
        code = curl.child.wait(_LOOK)
    except subprocess.TimeoutExpired:
        return False
    if code != 0:
        raise Trouble(f"curl ended with {code}: {curl.tail()}")
    return True
