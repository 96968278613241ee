"""The measurement of a row with one contestant in one round: each function returns figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Literal

from . import load
from .bed import Bed
from .callers import Figures, Named, curl_words, h2load, transfer, way_of, wrk
from .causeway import Causeway, counted
from .contestant import Contestant
from .process import Trouble, wait_for
from .stalled import stalled
from .usage import Meter, cpu_seconds

KIB = 1024.0
# Streams whose client was on another worker than their node.
CROSSED = "causeway_gateway_streams_crossed_total"
# Number of nodes that clients use in turn in rows about two workers: each worker has the tunnels of some.
TURNED = 8
# Longer than the 30 s that a drain takes by default, in seconds.
_DRAINED = 60.0


def http1(bed: Bed, contestant: Contestant, callers: int) -> Figures:
    # wrk's clock runs during its handshakes, one client after the other, and clients that have finished wait for the
    # others: with many clients the time is longer, so that less than one request in a hundred is from that phase.
    return wrk(bed, contestant, callers, bed.pace.seconds * max(1, callers // 50))


def http2(bed: Bed, contestant: Contestant, connections: int, streams: int) -> Figures:
    return h2load(bed, contestant, connections, streams, bed.pace.seconds)


def connections(bed: Bed, contestant: Contestant, callers: int) -> Figures:
    """A new TLS connection for each request, without resumption."""
    return wrk(bed, contestant, callers, bed.pace.seconds, close=True)


def connect(bed: Bed, contestant: Contestant, callers: int) -> Figures:
    """Requests inside of CONNECT; HAProxy directly gets the same requests from the same client, without a CONNECT."""
    through = contestant.connect is not None
    return load.requests(bed, contestant, callers, bed.pace.seconds, connect=through)


def connect_new(bed: Bed, contestant: Contestant, callers: int) -> Figures:
    through = contestant.connect is not None
    return load.requests(bed, contestant, callers, bed.pace.seconds, connect=through, new=True)


def down(bed: Bed, contestant: Contestant, count: int) -> Figures:
    return transfer(bed, contestant, count, up=False)


def up(bed: Bed, contestant: Contestant, count: int) -> Figures:
    return transfer(bed, contestant, count, up=True)


def within(bed: Bed, contestant: Contestant, way: str, is_up: bool) -> Figures:
    """One bulk inside of a CONNECT or an upgrade."""
    through = way == "connect" and contestant.connect is not None
    return load.transfers(bed, contestant, is_up, connect=through, upgrade=way == "upgrade")


def beside_stalled(bed: Bed, contestant: Contestant, readers: int) -> Figures:
    """64 clients alone, then beside readers that read nothing; and the cost of these at the front."""

    def begin() -> AbstractContextManager[int]:
        return stalled(way_of(contestant), readers, "endless")

    return _beside(bed, contestant, begin)


def beside_slow(bed: Bed, contestant: Contestant, readers: int) -> Figures:
    """The same beside readers that read 1 MB per second each."""

    @contextmanager
    def begin() -> Iterator[int]:
        words = [*curl_words(bed, way_of(contestant), "endless"), "--limit-rate", "1000000"]
        curls = [bed.spawn(f"curl-slow-{index}", words, "rest") for index in range(readers)]
        try:
            yield readers
        finally:
            for curl in curls:
                curl.stop()

    # The memory that one slow reader takes is less than the variation of the machine.
    return middle([_beside(bed, contestant, begin) for _ in range(bed.pace.rounds)])


def middle(turns: list[Figures]) -> Figures:
    """Returns the median of each figure that all turns have."""
    return {name: median(turn[name] for turn in turns) for name in turns[0] if all(name in turn for turn in turns)}


def _beside(bed: Bed, contestant: Contestant, begin: Callable[[], AbstractContextManager[int]]) -> Figures:
    def callers() -> Figures:
        try:
            return load.requests(bed, contestant, 64, bed.pace.seconds)
        except Trouble as error:
            if "not done within" not in str(error):
                raise
            # Even kept connections could not be opened: the tunnel hangs.
            return {"requests_per_s": 0.0}

    alone = callers()
    if not alone["requests_per_s"]:
        raise Trouble("no request was answered, even before a reader stalled")
    before = contestant.memory()
    with begin() as standing:
        time.sleep(bed.pace.settle)
        held = contestant.memory() - before
        beside = callers()
    figures = {
        "readers": float(standing),
        "alone_requests_per_s": alone["requests_per_s"],
        "requests_per_s": beside["requests_per_s"],
        "kept": beside["requests_per_s"] / alone["requests_per_s"],
        "kib_per_reader": held / KIB / max(1, standing),
    }
    if "p99_us" in beside:
        figures["p99_ratio"] = beside["p99_us"] / alone["p99_us"]
    return figures


def idle_upgrades(bed: Bed, contestant: Contestant, count: int) -> Figures:
    """Memory at the front for each open and silent upgrade."""
    before = contestant.memory()
    with load.beside(bed, load.idle(contestant, count), "ready"):
        time.sleep(bed.pace.settle)
        during = contestant.memory()
    time.sleep(bed.pace.settle)
    return {"kib_per_upgrade": (during - before) / KIB / count} | _mib(before, during, contestant.memory())


def _mib(before: int, during: int, after: int) -> Figures:
    return {"mib_before": before / KIB / KIB, "mib_during": during / KIB / KIB, "mib_after": after / KIB / KIB}


def fleet_memory(bed: Bed, contestant: Contestant, count: int) -> Figures:
    """Memory of a gateway for each idle edge, and after all have gone."""
    gateway = _causeway(contestant)
    gateway.bootstrap(bed)
    identities = load.mint(bed, gateway.data, count)
    gateway.start_gateway(bed, bed.apps["files"])
    before = gateway.memory()
    with load.beside(bed, load.fleet(gateway.tunnel, identities, count), "up", 300) as fleet:
        up_event = load.event(fleet.said(), "up") or {}
        time.sleep(bed.pace.settle)
        during = gateway.memory()
        meter = Meter(gateway.processes)
        time.sleep(bed.pace.settle * 3)
        idle_cpu = meter.read()["front"] / (bed.pace.settle * 3)
    time.sleep(bed.pace.settle)
    return {
        "kib_per_edge": (during - before) / KIB / count,
        **_mib(before, during, gateway.memory()),
        "idle_cpu_share": idle_cpu,
        "up_seconds": float(up_event.get("seconds", 0.0)),
    }


def storm(bed: Bed, contestant: Contestant, resume: bool) -> Figures:
    """Edges that dial, send the hello and hang up: the number per second, and the number per core."""
    gateway = _causeway(contestant)
    gateway.bootstrap(bed)
    identities = load.mint(bed, gateway.data, 32)
    gateway.start_gateway(bed, bed.apps["files"])
    before = gateway.memory()
    meter = Meter(gateway.processes)
    found = load.handshakes(bed, gateway.tunnel, identities, bed.pace.seconds, resume=resume)
    count = found["handshakes"]
    if not count:
        raise Trouble(f"no handshake: {found}")
    used = meter.read()["front"]
    time.sleep(bed.pace.settle)
    return {
        "per_s": float(found["per_second"]),
        "per_s_and_core": count / max(used, 0.01),
        "resumed_share": found["resumed"] / max(1, found["resumed"] + found["full"]),
        "p99_us": float(found["latency_us"]["p99"]),
        "mib_before": before / KIB / KIB,
        "mib_after": gateway.memory() / KIB / KIB,
    }


def restart(bed: Bed, contestant: Contestant, count: int) -> Figures:
    """A gateway is killed and starts again: seconds until all edges are back."""
    gateway = _causeway(contestant)
    gateway.bootstrap(bed)
    identities = load.mint(bed, gateway.data, count)
    gateway.start_gateway(bed, bed.apps["files"])
    with load.beside(bed, load.fleet(gateway.tunnel, identities, count), "up", 300) as fleet:
        gateway.processes["front"].child.kill()
        gateway.stop()
        begin = time.time()
        gateway.start_gateway(bed, bed.apps["files"])
        ready = time.time()
        end = time.monotonic() + 300
        while (back := load.event(fleet.said(), "back")) is None:
            if time.monotonic() > end or not fleet.alive():
                raise Trouble(f"not all edges are back within 300 s: {fleet.tail(2)}")
            time.sleep(0.05)
        used = cpu_seconds(gateway.processes["front"].pid)
        time.sleep(bed.pace.settle)
        standing = gateway.memory()
    return {
        "seconds_from_start": back["complete_ms"] / 1e3 - begin,
        "seconds_from_ready": back["complete_ms"] / 1e3 - ready,
        "gateway_cpu_s": used,
        "resumed_share": back["resumed"] / max(1, back["resumed"] + back["full"]),
        "kib_per_edge_after": standing / KIB / count,
    }


def back(bed: Bed, contestant: Contestant) -> Figures:
    """Edge, then gateway, is killed and starts again: seconds from its start until a request succeeds."""
    gateway = _causeway(contestant)
    app = bed.apps["files"]
    gateway.start(bed, app)
    figures: Figures = {}
    restarts: dict[str, tuple[str, Callable[[Bed, int], object]]] = {
        "edge": ("edge", gateway.start_edge),
        "gateway": ("front", gateway.start_gateway),
    }
    for name, (role, start) in restarts.items():
        process = gateway.processes[role]
        process.child.kill()
        process.child.wait()
        begin = time.monotonic()
        start(bed, app)
        wait_for("a request succeeds", gateway.serves, gateway.processes.values())
        figures[f"{name}_s"] = time.monotonic() - begin
    return figures


def graceful_restart(bed: Bed, contestant: Contestant, role: Literal["front", "edge"]) -> Figures:
    """Restarts a gateway or an edge that has an open session: SIGTERM, and a new start once the process has ended.

    Returns the longest time between two requests that succeeded, of a client that asks over and over.
    """
    gateway = _causeway(contestant)
    app = bed.apps["load"]
    gateway.start(bed, app)
    with load.beside(bed, load.idle(contestant, 1), "ready"), _succeeding(gateway) as successes:
        time.sleep(bed.pace.settle)
        begin = time.monotonic()
        gateway.processes[role].stop(_DRAINED)
        ended = time.monotonic()
        (gateway.start_gateway if role == "front" else gateway.start_edge)(bed, app)
        started = time.monotonic()
        wait_for("a request succeeds", lambda: successes[-1] > started, gateway.processes.values(), 60)
        found = list(successes)
    return {
        "outage_s": max(later - earlier for earlier, later in pairwise(found)),
        "drain_s": ended - begin,
        "start_s": started - ended,
    }


@contextmanager
def _succeeding(gateway: Causeway) -> Iterator[list[float]]:
    """Sends one request after the other until the block is left, and records when each success ended."""
    successes = [time.monotonic()]
    over = threading.Event()

    def ask() -> None:
        # A short pause between two requests leaves the CPU to the measured processes.
        while not over.wait(0.01):
            if gateway.serves():
                successes.append(time.monotonic())

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield successes
    finally:
        over.set()
        client.join()


def growth(bed: Bed, contestant: Contestant, count: int) -> Figures:
    """Requests of 64 clients to the one real node, while this many others are registered."""
    gateway = _causeway(contestant)
    gateway.bootstrap(bed)
    identities = load.mint(bed, gateway.data, max(count, 1))
    gateway.start_gateway(bed, bed.apps["files"])
    gateway.start_edge(bed, bed.apps["files"])
    wrk(bed, gateway, 64, bed.pace.warm)
    if not count:
        return wrk(bed, gateway, 64, bed.pace.seconds)
    with load.beside(bed, load.fleet(gateway.tunnel, identities, count), "up", 300):
        return wrk(bed, gateway, 64, bed.pace.seconds)


def beside_idle(bed: Bed, contestant: Contestant, count: int) -> Figures:
    """64 clients while this many upgrades are open and silent on the same tunnel."""
    if not count:
        return wrk(bed, contestant, 64, bed.pace.seconds)
    with load.beside(bed, load.idle(contestant, count), "ready"):
        return wrk(bed, contestant, 64, bed.pace.seconds)


def cores(bed: Bed, contestant: Contestant) -> Figures:
    """Compares a request whose SNI names the node, which is served at the node's tunnel, with a request whose Host
    alone names it. A part of the latter arrives at the other of the gateway's two workers. The same is true of the
    requests inside of CONNECT; a gateway with one worker is measured for comparison."""
    two, one = _pair(contestant)
    two.cores = 2
    turns: list[Figures] = []
    try:
        for gateway in (two, one):
            gateway.start(bed, bed.apps["files"])
            wrk(bed, gateway, 64, bed.pace.warm)
        # In turns, because one run of each would compare two states of the machine.
        for _ in range(3):
            turn: Figures = {}
            ways: dict[str, Named] = {"own": "sni", "host": "host"}
            for name, named in ways.items():
                turn |= _crossing(two, name, partial(wrk, bed, two, 64, bed.pace.seconds, named=named), bed.pace.seconds)
            # A CONNECT is one stream, independent of the number of requests inside.
            asks = partial(load.requests, bed, two, 64, bed.pace.seconds, connect=True)
            turn |= _crossing(two, "connect", asks, 64)
            alone = load.requests(bed, one, 64, bed.pace.seconds, connect=True)
            turn["cpu_us_connect_one_core"] = alone["cpu_front_us_per_request"]
            turn["cpu_host_to_own"] = turn["cpu_us_host"] / turn["cpu_us_own"]
            turn["cpu_connect_to_one_core"] = turn["cpu_us_connect"] / turn["cpu_us_connect_one_core"]
            turns.append(turn)
    finally:
        one.stop()
    return middle(turns)


def _crossing(gateway: Causeway, name: str, asks: Callable[[], Figures], streams: float) -> Figures:
    """The cost of a request, and the share of streams that crossed workers: of all, or, by the second, of one per
    request."""
    before = counted(gateway.admin, CROSSED)
    found = asks()
    crossed = counted(gateway.admin, CROSSED) - before
    opened = streams if name == "connect" else streams * found["requests_per_s"]
    return {
        f"crossed_share_{name}": crossed / opened,
        f"requests_per_s_{name}": found["requests_per_s"],
        f"cpu_us_{name}": found["cpu_front_us_per_request"],
    }


def turning(bed: Bed, contestant: Contestant) -> Figures:
    """64 kept-alive clients that change to another node with each request: a gateway with two workers, each of which
    has the tunnels of some nodes, and one with a single worker. Light edges answer."""
    two, one = _pair(contestant)
    turns: list[Figures] = []
    with ExitStack() as standing:
        standing.callback(one.stop)
        for gateway, count in ((two, 2), (one, 1)):
            gateway.cores = count
            gateway.bootstrap(bed)
            identities = load.mint(bed, gateway.data, TURNED)
            gateway.start_gateway(bed, bed.apps["files"])
            standing.enter_context(load.beside(bed, load.fleet(gateway.tunnel, identities, TURNED), "up", 300))
            wrk(bed, gateway, 64, bed.pace.warm, named=TURNED)
        for _ in range(3):
            asks = partial(wrk, bed, two, 64, bed.pace.seconds, named=TURNED)
            turn = _crossing(two, "turning", asks, bed.pace.seconds)
            alone = wrk(bed, one, 64, bed.pace.seconds, named=TURNED)
            turn["cpu_us_turning_one_core"] = alone["cpu_front_us_per_request"]
            turn["cpu_turning_to_one_core"] = turn["cpu_us_turning"] / turn["cpu_us_turning_one_core"]
            turns.append(turn)
    return middle(turns)


def rules(bed: Bed, contestant: Contestant) -> Figures:
    """The cost of a request for a gateway with 10 rules and one with 10,000, of which the last is the one that
    matches."""
    few, many = _pair(contestant)
    costs: dict[int, list[Figures]] = {10: [], 10_000: []}
    try:
        for gateway, count in ((few, 10), (many, 10_000)):
            gateway.rules = count
            gateway.start(bed, bed.apps["files"])
            wrk(bed, gateway, 64, bed.pace.warm)
        # In turns, because one run of each would compare two states of the machine.
        for _ in range(3):
            for gateway in (few, many):
                costs[gateway.rules].append(wrk(bed, gateway, 64, bed.pace.seconds))
    finally:
        many.stop()
    figures: Figures = {}
    for name in ("requests_per_s", "cpu_front_us_per_request"):
        for count, found in costs.items():
            figures[f"{name}_{count}"] = median(one[name] for one in found)
    figures["cpu_10000_to_10"] = figures["cpu_front_us_per_request_10000"] / figures["cpu_front_us_per_request_10"]
    return figures


def many_nodes(bed: Bed, contestant: Contestant, nodes: int) -> Figures:
    """64 clients that send requests to this many nodes in turn; light edges answer by themselves, without an app."""
    gateway = _causeway(contestant)
    gateway.bootstrap(bed)
    identities = load.mint(bed, gateway.data, nodes)
    gateway.start_gateway(bed, bed.apps["files"])
    with load.beside(bed, load.fleet(gateway.tunnel, identities, nodes), "up", 300):
        wrk(bed, gateway, 64, bed.pace.warm, named=nodes)
        return wrk(bed, gateway, 64, bed.pace.seconds, named=nodes)


def _pair(contestant: Contestant) -> tuple[Causeway, Causeway]:
    """Returns the contestant and a second one of the same build."""
    return _causeway(contestant), type(_causeway(contestant))(contestant.name)


def _causeway(contestant: Contestant) -> Causeway:
    if not isinstance(contestant, Causeway):
        raise Trouble(f"{contestant.name} is not Causeway")
    return contestant
