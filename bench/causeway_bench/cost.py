"""What the gateway does for a request, counted: instructions and allocations by callgrind, system calls by strace.

Counts are what a busy machine does not change. Each is the difference of a long and a short load, or begins when
connections stand: that takes handshakes out.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import load
from .bed import Bed
from .callers import Figures
from .causeway import Causeway
from .contestant import Contestant
from .process import Process, Trouble, run

_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
# callgrind gives each function a number where it names it first, and counts the calls in the line behind.
_NAMED = re.compile(r"^c?fn=\((\d+)\) (\S+)", re.MULTILINE)
_CALLED = re.compile(r"^cfn=\((\d+)\).*\ncalls=(\d+)", re.MULTILINE)
_ALLOCATES = re.compile(r"_rjem_(malloc|calloc|realloc|mallocx|rallocx|aligned_alloc|posix_memalign)$")
# `strace -c`: share, seconds, microseconds a call, calls, perhaps errors, name.
_SYSTEM_CALL = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.MULTILINE)
_CALLERS = 8
# A lock that another thread holds, or a thread that waits to be woken.
_WAITS = "futex"


def instructions(bed: Bed, contestant: Contestant) -> Figures:
    """Of the gateway, for a request over HTTP/1.1."""
    gateway = _causeway(contestant)
    folder = bed.scratch / "callgrind"
    folder.mkdir(exist_ok=True)
    gateway.under = (bed.tools.path("valgrind"), "--tool=callgrind", f"--callgrind-out-file={folder}/%p")
    gateway.start(bed, bed.apps["files"])
    load.requests(bed, gateway, _CALLERS, 2)
    short = _count(bed, gateway, folder, 2)
    long = _count(bed, gateway, folder, 2 + 2 * bed.pace.seconds)
    executed, allocations, requests = (one - other for one, other in zip(long, short, strict=True))
    if requests <= 0:
        raise Trouble(f"{short[2]:.0f} requests in the short load, {long[2]:.0f} in the long one")
    return {
        "instructions_per_request": executed / requests,
        "allocations_per_request": allocations / requests,
        "requests": requests,
    }


def _count(bed: Bed, gateway: Causeway, folder: Path, seconds: float) -> tuple[float, float, float]:
    """Instructions and allocations of the gateway, and requests that were answered meanwhile."""
    pid = str(gateway.processes["front"].pid)
    control = str(Path(bed.tools.path("valgrind")).with_name("callgrind_control"))
    run([control, "-z", pid])
    found = load.requests(bed, gateway, _CALLERS, seconds)
    run([control, "-d", pid])
    dumps = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
    text = dumps[-1].read_text(errors="replace") if dumps else ""
    total = _TOTAL.search(text)
    if total is None:
        raise Trouble("callgrind wrote no total")
    ours = {number for number, name in _NAMED.findall(text) if _ALLOCATES.match(name)}
    calls = sum(int(count) for number, count in _CALLED.findall(text) if number in ours)
    return float(total.group(1)), float(calls), found["requests_per_s"] * seconds


def system_calls(bed: Bed, contestant: Contestant) -> Figures:
    """Of a gateway with two cores, for a request whose SNI names its node, 64 callers; and how many waited for a lock."""
    gateway = _causeway(contestant)
    gateway.cores = 2
    gateway.start(bed, bed.apps["files"])
    load.requests(bed, gateway, 64, bed.pace.warm)
    out = bed.scratch / "strace.out"
    pid = str(gateway.processes["front"].pid)
    words = [bed.tools.path("strace"), "-c", "-f", "-o", str(out), "-p", pid]
    tracer = Process("strace", words, bed.scratch / "strace.log", bed.cpus("rest"))
    try:
        found = load.requests(bed, gateway, 64, bed.pace.seconds)
    finally:
        tracer.child.terminate()
        try:
            tracer.child.wait(10)
        except subprocess.TimeoutExpired:
            tracer.stop()
    calls = {name: int(count) for count, name in _SYSTEM_CALL.findall(out.read_text()) if name != "total"}
    requests = found["requests_per_s"] * bed.pace.seconds
    if not calls or not requests:
        raise Trouble(f"strace: {tracer.tail(2)}")
    figures = {
        "system_calls_per_request": sum(calls.values()) / requests,
        "waits_per_request": calls.get(_WAITS, 0) / requests,
    }
    for name, count in sorted(calls.items(), key=lambda one: -one[1])[:4]:
        figures[f"{name}_per_request"] = count / requests
    return figures


def _causeway(contestant: Contestant) -> Causeway:
    if not isinstance(contestant, Causeway):
        raise Trouble(f"{contestant.name} is not Causeway")
    return contestant
