"""Resource usage of a process, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .process import Process

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of all threads, including ended ones; in steps of 10 ms."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    # The name in brackets may contain blanks; fields are counted from the state, field 3.
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


@dataclass(frozen=True)
class Memory:
    """Returns resident bytes: with a share of shared memory (pss), and in full (rss)."""

    pss: int
    rss: int


def memory(pid: int) -> Memory:
    found = {"Pss": 0, "Rss": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in found:
            found[key] = int(rest.split()[0]) * 1024
    return Memory(pss=found["Pss"], rss=found["Rss"])


def peak(pid: int) -> int:
    """Returns the peak of resident memory, in bytes, including shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Meter:
    """CPU time by role between its creation and `read`."""

    def __init__(self, processes: dict[str, Process]) -> None:
        self._processes = processes
        self._begin = {role: cpu_seconds(process.pid) for role, process in processes.items()}

    def read(self) -> dict[str, float]:
        return {role: cpu_seconds(process.pid) - self._begin[role] for role, process in self._processes.items()}
