"""Description of the machine on which the figures were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .tools import Tools

PROGRAMS = (
    "causeway", "before", "haproxy", "konnectivity-server", "frps", "chisel", "rathole",
    "nginx", "wrk", "h2load", "curl", "bench-load", "openssl", "valgrind", "strace", "perf",
    "kube-apiserver", "etcd",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Facts by name, and versions by program."""

    facts: dict[str, str]
    versions: dict[str, str]


def describe(tools: Tools) -> Machine:
    return Machine(
        {
            "CPU": _cpu(),
            "CPUs": str(os.cpu_count()),
            "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
            "kernel": platform.release(),
            "distribution": _distribution(),
            "congestion control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
            "load before the first row": _read("/proc/loadavg"),
            "commit": _said(["git", "rev-parse", "--short=12", "HEAD"]),
            "compiler": _said(["rustc", "--version"]),
        },
        {name: tools.version(name) for name in PROGRAMS if name in tools.paths or name in tools.missing},
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _distribution() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return "unknown"
