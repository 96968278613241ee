"""The cost of a request, as counts: instructions and allocations of gateway and edge by callgrind, system calls of the
gateway by strace and perf.

A busy machine does not change counts. Each is the difference of a long and a short load, which removes handshakes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from . import load
from .bed import Bed
from .callers import Figures, h2load, wrk
from .causeway import Causeway
from .contestant import Contestant, fresh_name
from .measures import TURNED
from .process import Process, Trouble, run, wait_for

_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
# callgrind gives each function a number at its first name, and counts the calls in the next line.
_NAMED = re.compile(r"^c?fn=\((\d+)\) (\S+)", re.MULTILINE)
_CALLED = re.compile(r"^cfn=\((\d+)\).*\ncalls=(\d+)", re.MULTILINE)
_ALLOCATES = re.compile(r"_rjem_(malloc|calloc|realloc|mallocx|rallocx|aligned_alloc|posix_memalign)$")
# `strace -c`: share, seconds, microseconds a call, calls, perhaps errors, name.
_SYSTEM_CALL = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.MULTILINE)
# perf's output for an event with `-x,`: count, unit, event.
_COUNTED = re.compile(r"^(\d+),[^,]*,syscalls:sys_enter_(\w+),", re.MULTILINE)
# Costs of crossing: locks that another thread holds, or for which one waits, and writes that wake the other thread.
_CROSSING = {"futex": "futexes_per_request", "write": "wakes_per_request"}
_CALLERS = 8
# Connections of HTTP/2 clients, which share the callers as streams.
_HTTP2_CONNECTIONS = 2
# A lock that another thread holds, or a thread that waits to be woken.
_WAITS = "futex"


def instructions(bed: Bed, contestant: Contestant) -> Figures:
    """Counts the gateway's cost of a request over HTTP/1.1 and over HTTP/2, and the edge's over HTTP/1.1. The gateway and
    the edge run under callgrind one after the other, so that the other one is as fast as usual."""
    causeway = _causeway(contestant)
    folder = bed.scratch / "callgrind"
    folder.mkdir(exist_ok=True)
    callgrind = (bed.tools.path("valgrind"), "--tool=callgrind", f"--callgrind-out-file={folder}/%p")

    def http1(seconds: float) -> Figures:
        return wrk(bed, causeway, _CALLERS, seconds)

    def http2(seconds: float) -> Figures:
        return h2load(bed, causeway, _HTTP2_CONNECTIONS, _CALLERS // _HTTP2_CONNECTIONS, seconds)

    causeway.under = callgrind
    causeway.start(bed, bed.apps["files"])
    figures = _cost(bed, causeway.processes["front"], folder, http1)
    figures |= _prefixed("http2", _cost(bed, causeway.processes["front"], folder, http2))
    causeway.stop()
    causeway.under, causeway.edge_under = (), callgrind
    causeway.start(bed, bed.apps["files"])
    return figures | _prefixed("edge", _cost(bed, causeway.processes["edge"], folder, http1))


def _prefixed(prefix: str, figures: Figures) -> Figures:
    return {f"{prefix}_{name}": value for name, value in figures.items()}


def _cost(bed: Bed, process: Process, folder: Path, send: Callable[[float], Figures]) -> Figures:
    """Returns instructions and allocations of a process under callgrind for a request of a load."""
    send(2)
    short = _count(bed, process, folder, lambda: send(2))
    long = _count(bed, process, folder, lambda: send(2 + 2 * bed.pace.seconds))
    executed, allocations, requests = (one - other for one, other in zip(long, short, strict=True))
    if requests <= 0:
        raise Trouble(f"{short[2]:.0f} requests in the short load, {long[2]:.0f} in the long one")
    return {
        "instructions_per_request": executed / requests,
        "allocations_per_request": allocations / requests,
        "requests": requests,
    }


def _count(bed: Bed, process: Process, folder: Path, send: Callable[[], Figures]) -> tuple[float, float, float]:
    """Returns instructions and allocations of the process during a load, and the requests answered meanwhile."""
    control = str(Path(bed.tools.path("valgrind")).with_name("callgrind_control"))
    run([control, "-z", str(process.pid)])
    found = send()
    run([control, "-d", str(process.pid)])
    dumps = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
    text = dumps[-1].read_text(errors="replace") if dumps else ""
    total = _TOTAL.search(text)
    if total is None:
        raise Trouble("callgrind wrote no total")
    ours = {number for number, name in _NAMED.findall(text) if _ALLOCATES.match(name)}
    calls = sum(int(count) for number, count in _CALLED.findall(text) if number in ours)
    return float(total.group(1)), float(calls), found["requests"]


def system_calls(bed: Bed, contestant: Contestant) -> Figures:
    """Counts the cost of a request whose SNI names its node, for a gateway with two workers and 64 clients; and how
    many waited for a lock."""
    gateway = _causeway(contestant)
    gateway.cores = 2
    gateway.start(bed, bed.apps["files"])
    wrk(bed, gateway, 64, bed.pace.warm)
    short, few = _traced(bed, gateway, 1)
    long, many = _traced(bed, gateway, 1 + bed.pace.seconds)
    requests = many - few
    if requests <= 0:
        raise Trouble(f"{few:.0f} requests in the short load, {many:.0f} in the long one")
    calls = {name: (count - short.get(name, 0)) / requests for name, count in long.items()}
    figures = {"system_calls_per_request": sum(calls.values()), "waits_per_request": calls.get(_WAITS, 0.0)}
    for name in sorted(calls, key=lambda name: -calls[name])[:4]:
        figures[f"{name}_per_request"] = calls[name]
    return figures


def waits(bed: Bed, contestant: Contestant) -> Figures:
    """Counts the cost of a request for a gateway with two workers, if each client changes to another node with each
    request: both workers have tunnels, and streams cross between them. perf counts, and not strace, under which a
    lock is held for as long as it takes to report the system call to the tracer."""
    gateway = _causeway(contestant)
    gateway.cores = 2
    gateway.bootstrap(bed)
    identities = load.mint(bed, gateway.data, TURNED)
    gateway.start_gateway(bed, bed.apps["files"])
    with load.beside(bed, load.fleet(gateway.tunnel, identities, TURNED), "up", 300):
        wrk(bed, gateway, 64, bed.pace.warm, named=TURNED)
        counter = _counter(bed, gateway.processes["front"].pid)
        try:
            found = wrk(bed, gateway, 64, bed.pace.seconds, named=TURNED)
            counter.child.wait(10)
        except subprocess.TimeoutExpired as error:
            raise Trouble("perf does not end") from error
        finally:
            counter.stop()
    counted = {name: int(count) for count, name in _COUNTED.findall(counter.said())}
    if counted.keys() != _CROSSING.keys():
        raise Trouble(f"perf counted only {counted}: {counter.tail(3)}")
    requests = found["requests"]
    return {_CROSSING[name]: count / requests for name, count in counted.items()}


def _counter(bed: Bed, pid: int) -> Process:
    """Starts perf, which counts already, and for as long as requests are sent."""
    name = fresh_name("perf")
    events = ",".join(f"syscalls:sys_enter_{call}" for call in _CROSSING)
    words = [bed.tools.path("perf"), "stat", "-x,", "-e", events, "-p", str(pid), "--", "sleep", str(bed.pace.seconds)]
    counter = Process(name, words, bed.scratch / f"{name}.log", bed.cpus("rest"))
    # perf starts the given command once its counters run.
    sleeps = Path(f"/proc/{counter.pid}/task/{counter.pid}/children")
    wait_for("perf counts", lambda: bool(sleeps.read_text().strip()), [counter])
    return counter


def _traced(bed: Bed, gateway: Causeway, seconds: float) -> tuple[dict[str, int], float]:
    """Returns system calls of the gateway by name, and the requests answered meanwhile."""
    name = fresh_name("strace")
    out = bed.scratch / f"{name}.out"
    words = [bed.tools.path("strace"), "-c", "-f", "-o", str(out), "-p", str(gateway.processes["front"].pid)]
    tracer = Process(name, words, bed.scratch / f"{name}.log", bed.cpus("rest"))
    try:
        wait_for("strace is attached", lambda: "attached" in tracer.said(), [tracer])
        found = wrk(bed, gateway, 64, seconds)
    finally:
        # It writes its table when it is asked to end.
        tracer.stop(10)
    calls = {name: int(count) for count, name in _SYSTEM_CALL.findall(out.read_text()) if name != "total"}
    if not calls:
        raise Trouble(f"strace wrote no table: {tracer.tail(2)}")
    return calls, found["requests"]


def _causeway(contestant: Contestant) -> Causeway:
    if not isinstance(contestant, Causeway):
        raise Trouble(f"{contestant.name} is not Causeway")
    return contestant
