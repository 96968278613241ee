"""Base of the contestants: each routes clients at loopback to an app, in one or two ways."""

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
    # The proxy's server name; for a gateway it is no node's name.
    server_name: str = "localhost"
    certificate: Path | None = None
    key: Path | None = None


@dataclass
class Contestant:
    """One running route to one app. `processes` are by role; `front` is the role to which clients connect."""

    name: str
    processes: dict[str, Process] = field(default_factory=dict)
    https: Https | None = None
    connect: Connect | None = None
    plain: Plain | None = None

    # Programs that it requires.
    needs: ClassVar[tuple[str, ...]] = ()

    def start(self, bed: Bed, app: int) -> None:
        """Starts to route clients to the app at that port, and returns when it works."""
        raise NotImplementedError

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.stop()
        self.processes.clear()

    def memory(self) -> int:
        """Returns the bytes of all processes on the clients' side: a front, and the server of a tunnel behind it."""
        return sum(memory(process.pid).pss for role, process in self.processes.items() if role != "edge")

    def trouble(self) -> str:
        """Returns the last lines of all logs, for the message of a failure."""
        said = (f"{process.name}: {process.tail(4)}" for process in self.processes.values())
        return " | ".join(said)


Way = Https | Connect | Plain


@dataclass
class Direct(Contestant):
    """No tunnel: TCP from the client to the app, limited only by the link between them."""

    def start(self, bed: Bed, app: int) -> None:
        self.plain = Plain(f"{bed.node}:{app}")


def fresh_name(name: str) -> str:
    return f"{name}-{next(_START)}"
