"""What RESULTS.md says in words: when, how and with what it was measured."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .bed import MIB, Pace
from .machine import Machine
from .rounds import Outcome

PLACED = {
    "free": "No pinning: the kernel places all processes on all CPUs",
    "split": "Pinned: HAProxy, gateways and tunnels' servers on CPU 0; edges, agents, apps and generators on CPU 1",
}


@dataclass(frozen=True)
class Run:
    """All that a run found, and how it was made."""

    outcomes: list[Outcome]
    machine: Machine
    pace: Pace
    placement: str
    configurations: dict[str, str]
    arguments: list[str]
    seconds: float
    scratch: Path

    @property
    def command(self) -> str:
        return shlex.join(["bench/run", *self.arguments])

    def clean(self, text: str) -> str:
        """Without this machine's folders, which logs and reasons may name."""
        return text.replace(str(self.scratch), "$SCRATCH").replace(str(Path.home()), "~")


def opening(run: Run) -> list[str]:
    return [
        f"Written by `{run.command}` on {datetime.now(UTC):%Y-%m-%d}, in {run.seconds / 60:.0f} minutes. "
        f"Each row has {run.pace.rounds} rounds, long ones {run.pace.long_rounds}, and contestants take turns within each; "
        "a figure is the",
        "median of its rounds and, in brackets, the least and the most. A ratio is taken round by round. All of it runs on",
        "one machine over loopback, generators and apps included.",
    ]


BARS = [
    "Causeway against what its design asks for. The two columns marked *design* are figures measured once, on a machine",
    "of two cores, when the design was made; what the same programs reach in this run stands further below. A verdict is",
    "the median's. Of eight downloads each has a whole GiB with `--full` only, else an eighth of one. Where readers take",
    "nothing, `readers` says how many a contestant let in before it answered nobody.",
]


def method(run: Run) -> list[str]:
    pace = run.pace
    return [
        f"- {PLACED[run.placement]}. The gateway has one core (`cores: 1`), HAProxy one thread.",
        f"- Requests last {pace.seconds} s a round after {pace.warm} s to warm up, five times that with 256 of wrk;",
        f"  one transfer is {pace.bulk // MIB} MiB, each of eight {pace.bulk_of_eight // MIB} MiB.",
        "- Every front speaks TLS 1.3 with TLS_AES_128_GCM_SHA256 and a P-256 key, and asks callers for no certificate,",
        "  but for Konnectivity, which cannot do without. frp, chisel and rathole stand behind HAProxy, which ends TLS for",
        "  them.",
        "- `http1-*`, `growth-*`, `nodes-*`, `turning` and `connections` are wrk, `http2-*` h2load with one request at a",
        "  time on each connection, `down-*` and `up-*` curl with HTTP/1.1 (through Konnectivity inside of CONNECT); all",
        "  others are `causeway-bench-load`, for all of a row alike. HAProxy straight is asked without CONNECT in",
        "  `connect-*`.",
        "- `readers`: four sites and the cloud in network namespaces of their own; a link is a pair of veths, without a",
        "  delay and with packets of 1,500 bytes, and its bytes are the kernel's, headers of Ethernet, IP and TCP",
        "  included, in both directions. A slice has ten endpoints with what kube-controller-manager writes of them; a",
        "  change is a PUT of one, in which one endpoint stops being ready and another is again. Readers want protobuf,",
        "  over HTTP/1.1: with TLS at kube-apiserver, without at their edge's loopback. A delay is from before the PUT",
        "  until a reader has it; what is the API's own of it is what a write takes (`write_*`). etcd does not wait for",
        "  its disk. Memory is that after 10,000 further changes, when edges keep as much of changes as they are let;",
        "  `peak` is Rss, ever.",
        "- `front` is the process that meets callers (HAProxy, the gateway, Konnectivity's server), `server` a tunnel's",
        "  end behind HAProxy, `edge` the end beside the app, `all` their sum. CPU is user and system time from /proc over",
        "  the measured time, which Linux counts in steps of 10 ms. Memory is Pss.",
    ]
