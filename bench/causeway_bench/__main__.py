"""`bench/run`'s other half: arguments, bed, rows, results."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from . import report
from .bed import PACES, PLACEMENTS, Bed
from .machine import describe
from .process import Trouble
from .profile import draw
from .prose import Run
from .rounds import Outcome, run_row
from .rows import ROWS, Row
from .tools import Tools


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run", description="Measures Causeway beside other roads, on loopback.")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--quick", action="store_true", help="two minutes; prints ratios, keeps nothing in bench/")
    pace.add_argument("--full", action="store_true", help="more and longer rounds")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="these rows; see --list")
    parser.add_argument("--before", type=Path, metavar="PROGRAM",
                        help="another build of causeway: these two alone, the other as the reference")  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="DIR",
                        help="with --only: no figures, but flame graphs of the gateway in these rows")  # fmt: skip
    parser.add_argument("--placement", choices=sorted(PLACEMENTS), default="free",
                        help="free: the kernel decides; split: the cloud's side on CPU 0, the rest on CPU 1")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the results (default: bench/, and for --quick a scratch one)")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder, with all logs")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    return parser.parse_args()


def chosen(asked: argparse.Namespace) -> list[tuple[Row, tuple[str, ...]]]:
    """The rows of this run, with those who take part."""
    unknown = set(asked.only) - {row.name for row in ROWS}
    if unknown:
        raise SystemExit(f"bench: no such row: {' '.join(sorted(unknown))}; --list names them")
    if asked.before:
        named = (replace(row, reference="before") for row in ROWS if "causeway" in row.contestants)
        return [(row, ("before", "causeway")) for row in named if row.name in (asked.only or ("http1-64",))]
    if asked.only:
        return [(row, row.contestants) for row in ROWS if row.name in asked.only]
    if asked.quick:
        return [(row, row.quick) for row in ROWS if row.quick]
    return [(row, row.contestants) for row in ROWS]


def measure(bed: Bed, rows: list[tuple[Row, tuple[str, ...]]]) -> tuple[list[Outcome], bool]:
    """All rows in order, and whether there are all: what was found stands even where the run is broken off."""
    outcomes: list[Outcome] = []
    try:
        bed.prepare()
        for row, who in rows:
            print(f"bench: {row.name}: {row.title}", file=sys.stderr, flush=True)
            outcomes.append(run_row(bed, row, who))
            print(report.line(outcomes[-1]), file=sys.stderr, flush=True)
    except (KeyboardInterrupt, SystemExit):
        print("bench: broken off; what was measured so far follows", file=sys.stderr)
        return outcomes, False
    finally:
        bed.stop()
    return outcomes, True


def profile(bed: Bed, rows: list[tuple[Row, tuple[str, ...]]], out: Path) -> int:
    """Flame graphs in place of figures."""
    try:
        bed.prepare()
        for row, _ in rows:
            print(f"bench: {draw(bed, row, out)}")
    finally:
        bed.stop()
    return 0


def main() -> int:
    asked = arguments()
    if asked.profile and not asked.only:
        raise SystemExit("bench: --profile wants --only ROW")
    if asked.list:
        for row in ROWS:
            print(f"{row.name:24}{'quick' if row.quick else '':7}{row.title}")
        return 0
    # Ends as Ctrl-C does: through every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = chosen(asked)
    bench = Path(__file__).resolve().parent.parent
    tools = Tools.gather(bench)
    target = Path(os.environ["CARGO_TARGET_DIR"])
    tools.add("causeway", target / "release" / "causeway", "not built")
    tools.add("bench-load", Path(os.environ["BENCH_LOAD"]), "bench/load is not built")
    if asked.before:
        tools.add("before", asked.before.resolve(), "not built")
    pace = PACES["quick" if asked.quick else "full" if asked.full else "default"]

    scratch = Path(tempfile.mkdtemp(prefix="causeway-bench."))
    begin = time.monotonic()
    machine = describe(tools)
    try:
        bed = Bed(tools, scratch, pace, asked.placement)
        if asked.profile:
            return profile(bed, rows, asked.profile)
        outcomes, whole = measure(bed, rows)
    except Trouble as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        if asked.keep:
            print(f"bench: kept {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    took = time.monotonic() - begin

    said = [f"--{pace.name}"] if pace.name != "default" else []
    said += ["--only", *asked.only] if asked.only else []
    said += ["--before", str(asked.before)] if asked.before else []
    said += ["--placement", asked.placement] if asked.placement != "free" else []
    run = Run(outcomes, machine, pace, asked.placement, bed.configurations, said, took, scratch)
    print(report.short(run))
    # Only a whole run replaces what is checked in.
    kept = whole and not (asked.quick or asked.only or asked.before)
    out = asked.out or (bench if kept else Path(tempfile.mkdtemp(prefix="causeway-bench-results.")))
    report.write(run, out, bench / "why")
    print(f"\nbench: {len(outcomes)} rows in {took:.0f} s; results in {out}")
    return report.status(run) if whole else 1


if __name__ == "__main__":
    sys.exit(main())
