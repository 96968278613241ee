"""Programs that run beside the measurement: started, awaited with a time limit, and ended by their own pid.

A program ends with the benchmark even if the benchmark is killed (`setpriv --pdeathsig`). This holds only for programs
that the main thread starts: start none from another thread.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path


class Trouble(Exception):
    """A program did not do its task; the message is for the reader of the results."""


class Process:
    """One program, its log and its end."""

    def __init__(self, name: str, command: list[str], log: Path, cpus: str | None = None) -> None:
        self.name = name
        self.log = log
        before = ["setpriv", "--pdeathsig", "KILL"]
        if cpus is not None:
            before += ["taskset", "-c", cpus]
        with log.open("ab") as out:
            # A separate session: Ctrl-C at the terminal is for the benchmark, which ends its programs in order.
            self.child = subprocess.Popen(
                before + command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.child.pid

    def alive(self) -> bool:
        return self.child.poll() is None

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 6) -> str:
        text = self.said()
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, grace: float = 3.0) -> None:
        """Requests its end, waits, and kills it."""
        for sign, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            if not self.alive():
                return
            os.kill(self.pid, sign)
            try:
                self.child.wait(wait)
            except subprocess.TimeoutExpired:
                continue


def wait_for(what: str, ready: Callable[[], bool], processes: Iterable[Process] = (), seconds: float = 20.0) -> None:
    """Returns once `ready` returns true; a process that ends, or a timeout, raises an error with the log's last lines.
    """
    watched = list(processes)
    end = time.monotonic() + seconds
    while not ready():
        for process in watched:
            if not process.alive():
                raise Trouble(f"{process.name} ended with {process.child.returncode}: {process.tail()}")
        if time.monotonic() > end:
            logs = " | ".join(f"{process.name}: {process.tail(3)}" for process in watched)
            raise Trouble(f"{what}: not within {seconds:.0f} s: {logs}")
        time.sleep(0.02)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a process accepts on that port, of loopback by default."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def run(command: list[str], seconds: float = 60.0, cpus: str | None = None) -> str:
    """Runs a program to its end and returns its output."""
    before = ["taskset", "-c", cpus] if cpus is not None else []
    try:
        done = subprocess.run(
            before + command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Trouble(f"{Path(command[0]).name}: not done within {seconds:.0f} s") from error
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).splitlines()[-5:])
        raise Trouble(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout
