"""The programs that `bench/tools` found or built, and their versions."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from .process import Trouble

_VERSION = re.compile(r"v?\d+\.\d+(\.\d+)?[-+.\w]*")
# Command by which each prints its version; for missing entries the folder's name has it.
_ASK = {
    "haproxy": "-v",
    "nginx": "-v",
    "wrk": "-v",
    "h2load": "--version",
    "curl": "--version",
    "openssl": "version",
    "valgrind": "--version",
    "strace": "--version",
    "perf": "--version",
    "kube-apiserver": "--version",
    "etcd": "--version",
    "causeway": "--version",
    "before": "--version",
}


@dataclass
class Tools:
    """Paths by name, and the reason for each missing program."""

    paths: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def gather(cls, bench: Path, names: set[str]) -> Tools:
        """Runs `bench/tools` for these programs: the first time it may build for minutes, which it reports on standard
        error."""
        tools = cls()
        said = subprocess.run(
            [str(bench / "tools"), *sorted(names)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
        for line in said.stdout.splitlines():
            name, _, value = line.partition("=")
            if value.startswith("missing: "):
                tools.missing[name] = value.removeprefix("missing: ")
                print(f"bench: {name} is missing: {tools.missing[name]}", file=sys.stderr)
            elif value:
                tools.paths[name] = value
        return tools

    def add(self, name: str, path: Path, why: str) -> None:
        """Returns a program that is built here, or the reason why it is missing."""
        if path.is_file():
            self.paths[name] = str(path)
        else:
            self.missing[name] = why

    def path(self, name: str) -> str:
        if name not in self.paths:
            raise Trouble(f"{name} is missing: {self.missing.get(name, 'not asked for')}")
        return self.paths[name]

    def version(self, name: str) -> str:
        path = self.paths.get(name)
        if path is None:
            return f"missing: {self.missing.get(name, 'not asked for')}"
        if name not in _ASK:
            found = _VERSION.search(Path(path).parent.name)
            return found.group() if found else "of this tree"
        # wrk exits with 1 after it prints its version; nginx prints it on standard error.
        done = subprocess.run([path, _ASK[name]], capture_output=True, text=True, timeout=10, check=False)
        found = _VERSION.search(done.stdout + done.stderr)
        return found.group() if found else "unknown"
