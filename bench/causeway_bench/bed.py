"""The test bed: scratch folder, ports, apps, and the CPUs of processes. One bed for all rows of a run."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .namespace import inside
from .pki import Pki
from .process import Process, Trouble, listens, wait_for
from .tools import Tools

Side = Literal["cloud", "rest"]
App = Literal["files", "load"]
KIB = 1024
MIB = 1024 * KIB
# Below the ephemeral ports: a client's socket must never take a port that a process is about to bind.
_PORTS = range(20000, 32000)


@dataclass(frozen=True)
class Pace:
    """Duration of the measurements: `--smoke`, the default, `--full`."""

    name: str
    rounds: int
    # For rows that take minutes each.
    long_rounds: int
    seconds: int
    warm: int
    # Number of bodies of the rows with one transfer, and of those with eight.
    bulk: int
    bulk_of_eight: int
    settle: float


PACES = {
    "smoke": Pace("smoke", rounds=1, long_rounds=1, seconds=1, warm=1, bulk=64 * MIB, bulk_of_eight=8 * MIB, settle=0.2),
    "default": Pace(
        "default", rounds=3, long_rounds=2, seconds=3, warm=1, bulk=1024 * MIB, bulk_of_eight=128 * MIB, settle=2.0
    ),
    "full": Pace(
        "full", rounds=5, long_rounds=3, seconds=10, warm=2, bulk=1024 * MIB, bulk_of_eight=1024 * MIB, settle=5.0
    ),
}

# CPUs of each role, the same for all contestants.
PLACEMENTS: dict[str, dict[Side, str | None]] = {
    "free": {"cloud": None, "rest": None},
    "split": {"cloud": "0", "rest": "1"},
}


@dataclass
class Bed:
    """Environment with which contestants and clients are started."""

    tools: Tools
    scratch: Path
    pace: Pace
    placement: str
    # Address at which the cloud's side listens for the other one.
    cloud: str = "127.0.0.1"
    # Address of the node's app without a tunnel.
    node: str = "127.0.0.1"
    # Network namespaces of both sides, if they are separate.
    namespaces: dict[Side, str] = field(default_factory=dict)
    # The process that carries the bytes between them; if it is stopped, the link is silent.
    relay: Process | None = None
    apps: dict[App, int] = field(default_factory=dict)
    # Written configurations, which the results quote: the last one of each name.
    configurations: dict[str, str] = field(default_factory=dict)
    _processes: list[Process] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)

    @property
    def pki(self) -> Pki:
        return Pki(self.tools.path("openssl"), self.scratch / "pki")

    def cpus(self, side: Side) -> str | None:
        return PLACEMENTS[self.placement][side]

    def port(self) -> int:
        """Returns a free port of loopback, which is not returned twice."""
        for _ in range(1000):
            port = random.choice(_PORTS)
            if port in self._used:
                continue
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            self._used.add(port)
            return port
        raise Trouble("no free port between 20000 and 32000")

    def write(self, name: str, text: str) -> Path:
        """Writes a configuration, which the results contain as well."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.configurations[name] = text.replace(str(self.scratch), "$SCRATCH")
        return path

    def spawn(self, name: str, command: list[str], side: Side) -> Process:
        with self.at(side):
            process = Process(name, command, self.scratch / f"{name}.log", self.cpus(side))
        self._processes.append(process)
        return process

    @contextmanager
    def at(self, side: Side) -> Iterator[None]:
        """Runs it in that side's network, if it has its own."""
        if side not in self.namespaces:
            yield
            return
        with inside(self.namespaces[side]):
            yield

    def prepare(self) -> None:
        """Makes certificates and starts the two apps: nginx for answers, ours for uploads that are not stored and for
        upgrades, which nginx cannot do."""
        self.pki.make(self.cloud)
        self._serve_files()
        if "bench-load" in self.tools.paths:
            self._serve_load()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()

    def _serve_files(self) -> None:
        root = self.scratch / "files"
        root.mkdir()
        (root / "1k").write_bytes(bytes(random.choices(b"abcdefghijklmnopqrstuvwxyz \n", k=KIB)))
        for name, size in (("bulk", self.pace.bulk), ("bulk8", self.pace.bulk_of_eight), ("endless", 64 * 1024 * MIB)):
            with (root / name).open("wb") as sparse:
                sparse.truncate(size)
        port = self.port()
        listen = f"listen 127.0.0.1:{port} backlog=4096;"
        if self.node != "127.0.0.1":
            listen += f" listen {self.node}:{port} backlog=4096;"
        configuration = self.write("app/nginx.conf", _NGINX.format(folder=self.scratch / "app", root=root, listen=listen))
        log = str(self.scratch / "app" / "error.log")
        app = self.spawn("app", [self.tools.path("nginx"), "-e", log, "-c", str(configuration)], "rest")
        with self.at("rest"):
            wait_for("the app listens", lambda: listens(port), [app])
        self.apps["files"] = port

    def _serve_load(self) -> None:
        port = self.port()
        app = self.spawn("app-load", [self.tools.path("bench-load"), "app", "--listen", f"127.0.0.1:{port}"], "rest")
        with self.at("rest"):
            wait_for("the app for uploads and upgrades listens", lambda: listens(port), [app])
        self.apps["load"] = port


_NGINX = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_rlimit_nofile 16384;
events {{ worker_connections 16000; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_timeout 1h;
  keepalive_requests 1000000000;
  client_body_temp_path {folder};
  proxy_temp_path {folder};
  fastcgi_temp_path {folder};
  uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  server {{
    {listen}
    root {root};
  }}
}}
"""
