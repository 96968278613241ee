"""Flame graphs of the gateway's CPU time while a row is measured, recorded by perf, drawn by inferno (`cargo install
inferno`)."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .bed import Bed
from .causeway import Causeway
from .contestant import fresh_name
from .process import Trouble, wait_for
from .rows import Row

# perf runs beside the gateway and not as its parent: the gateway keeps its own process id, and perf ends with it.
_BESIDE = (
    'perf record -q -e cpu-clock -F 499 --call-graph dwarf,16384 -p $$ -o "$0" 2>/dev/null & echo $! >"$0.pid"; exec "$@"'
)
_NEEDS = ("perf", "inferno-collapse-perf", "inferno-flamegraph")


@dataclass
class Profiled(Causeway):
    """Causeway with perf beside its gateway."""

    samples: Path = Path()

    def start_gateway(self, bed: Bed, app: int) -> None:
        self.samples = bed.scratch / f"{fresh_name('perf')}.data"
        self.under = ("sh", "-c", _BESIDE, str(self.samples))
        super().start_gateway(bed, app)


def draw(bed: Bed, row: Row, out: Path) -> Path:
    """Runs one round of a row with Causeway alone, and draws its gateway's whole CPU time."""
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if missing:
        raise Trouble(f"{', '.join(missing)} missing: Debian's linux-perf, and `cargo install inferno`")
    contestant = Profiled("causeway")
    try:
        if row.start != "own":
            contestant.start(bed, bed.apps[row.app])
        row.measure(bed, contestant)
    finally:
        contestant.stop()
    perf = int(Path(f"{contestant.samples}.pid").read_text())
    wait_for("perf has written its samples", lambda: not Path(f"/proc/{perf}").exists(), seconds=60)
    picture = out / f"{row.name}.svg"
    out.mkdir(parents=True, exist_ok=True)
    script = subprocess.Popen(
        ["perf", "script", "-i", str(contestant.samples)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    collapse = subprocess.Popen(["inferno-collapse-perf"], stdin=script.stdout, stdout=subprocess.PIPE)
    title = f"The gateway in {row.name}: {row.title}"
    with picture.open("wb") as drawn:
        words = ["inferno-flamegraph", "--title", title, "--minwidth", "0.3", "--hash"]
        failed = subprocess.run(words, stdin=collapse.stdout, stdout=drawn, check=False, timeout=600).returncode
    if failed or script.wait(60) or collapse.wait(60):
        raise Trouble("perf or inferno failed")
    return picture
