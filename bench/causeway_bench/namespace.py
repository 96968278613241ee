"""Two network namespaces with a long link between them, for the rows with a distance."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .process import Trouble, run

_NEW_NETWORK = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Moves this thread and its children into that namespace, and back afterwards."""
    with ExitStack() as files:
        home = files.enter_context(Path("/proc/thread-self/ns/net").open("rb"))
        away = files.enter_context(Path(f"/run/netns/{name}").open("rb"))
        _enter(away.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    # Python has os.setns from 3.12 on.
    if _LIBC.setns(descriptor, _NEW_NETWORK) != 0:
        raise Trouble(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Makes them, each with its loopback up and buffers for a long link, and removes them at the end."""
    if os.geteuid() != 0:
        raise Trouble("network namespaces require root")
    with ExitStack() as made:
        for name in names:
            run(["ip", "netns", "add", name])
            made.callback(run, ["ip", "netns", "delete", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
            # The usual 4 MiB of send buffer are 2.4 MB a round trip: rows of a long link would measure that.
            run(["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_wmem=4096 16384 67108864",
                 "net.ipv4.tcp_rmem=4096 131072 67108864"])  # fmt: skip
        yield
