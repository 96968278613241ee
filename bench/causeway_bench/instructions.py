"""Instructions per request, counted by callgrind: the one figure that a busy machine does not change."""

from __future__ import annotations

import re
from pathlib import Path

from . import load
from .bed import Bed
from .callers import Figures
from .causeway import Causeway
from .contestant import Contestant
from .process import Trouble, run

_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_CALLERS = 8


def per_request(bed: Bed, contestant: Contestant) -> Figures:
    """The gateway's, as the difference of a long and a short load: that takes handshakes out."""
    if not isinstance(contestant, Causeway):
        raise Trouble(f"{contestant.name} is not Causeway")
    folder = bed.scratch / "callgrind"
    folder.mkdir(exist_ok=True)
    contestant.under = (bed.tools.path("valgrind"), "--tool=callgrind", f"--callgrind-out-file={folder}/%p")
    contestant.start(bed, bed.apps["files"])
    load.requests(bed, contestant, _CALLERS, 2)
    short = _count(bed, contestant, folder, 2)
    long = _count(bed, contestant, folder, 2 + 2 * bed.pace.seconds)
    requests = long[1] - short[1]
    if requests <= 0:
        raise Trouble(f"{short[1]:.0f} requests in the short load, {long[1]:.0f} in the long one")
    return {"instructions_per_request": (long[0] - short[0]) / requests, "requests": requests}


def _count(bed: Bed, contestant: Causeway, folder: Path, seconds: float) -> tuple[float, float]:
    """Instructions of the gateway and requests that were answered meanwhile."""
    pid = str(contestant.processes["front"].pid)
    control = str(Path(bed.tools.path("valgrind")).with_name("callgrind_control"))
    run([control, "-z", pid])
    found = load.requests(bed, contestant, _CALLERS, seconds)
    run([control, "-d", pid])
    dumps = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
    total = _TOTAL.search(dumps[-1].read_text(errors="replace")) if dumps else None
    if total is None:
        raise Trouble("callgrind wrote no total")
    return float(total.group(1)), found["requests_per_s"] * seconds
