"""What every contestant is: something that leads callers at loopback to an app, in one or two ways."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from .bed import Bed
from .process import Process
from .usage import memory

# Each start of a contestant gets a folder of its own.
_START = itertools.count(1)


@dataclass(frozen=True)
class Https:
    """TLS ends at this port; ALPN chooses HTTP/1.1 or HTTP/2; Host is `localhost`, or `target` in full."""

    port: int
    ca: Path
    target: str


@dataclass(frozen=True)
class Plain:
    """The app itself, in the clear: `target` is its address and port."""

    target: str


@dataclass(frozen=True)
class Connect:
    """HTTP CONNECT over TLS at this port, by which `target` is reached."""

    port: int
    ca: Path
    target: str
    # By which the proxy is called; of a gateway that is no node's name.
    server_name: str = "localhost"
    certificate: Path | None = None
    key: Path | None = None


@dataclass
class Contestant:
    """One running road to one app. `processes` are by role; `front` is the role that meets callers."""

    name: str
    processes: dict[str, Process] = field(default_factory=dict)
    https: Https | None = None
    connect: Connect | None = None
    plain: Plain | None = None

    # Programs without which it cannot start.
    needs: ClassVar[tuple[str, ...]] = ()

    def start(self, bed: Bed, app: int) -> None:
        """Begins to lead callers to the app at that port, and returns when it does."""
        raise NotImplementedError

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.stop()
        self.processes.clear()

    def memory(self) -> int:
        """Bytes of whatever stands on the callers' side: a front, and the server of a tunnel behind it."""
        return sum(memory(process.pid).pss for role, process in self.processes.items() if role != "edge")

    def trouble(self) -> str:
        """The last lines of all logs, for whoever reads why it failed."""
        said = (f"{process.name}: {process.tail(4)}" for process in self.processes.values())
        return " | ".join(said)


Way = Https | Connect | Plain


@dataclass
class Direct(Contestant):
    """No road at all: TCP from the caller to the app, as far as the link between them carries it."""

    def start(self, bed: Bed, app: int) -> None:
        self.plain = Plain(f"{bed.node}:{app}")


def fresh_name(name: str) -> str:
    return f"{name}-{next(_START)}"
