"""Main program of `bench/run`: arguments, test bed, rows, results."""

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
from .report import Run
from .rounds import Outcome, run_row
from .rows import CONTESTANTS, ROWS, Row, Start
from .tools import Tools

# Built from this tree, or named by the caller.
_BUILT = {"causeway", "before", "bench-load"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run", description="Measures Causeway beside other proxies and tunnels.")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--smoke", action="store_true",
                      help="one short round of a few rows; fails if a contestant cannot be measured or answers wrongly, "
                      "and never by a figure; needs neither Go nor a compiler")  # fmt: skip
    pace.add_argument("--full", action="store_true", help="more and longer rounds")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="these rows; see --list")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds of every row")
    parser.add_argument("--before", type=Path, metavar="PROGRAM",
                        help="another build of causeway, measured beside this one and HAProxy in two hops")  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="DIR",
                        help="with --only: no figures, but flame graphs of the gateway in these rows")  # fmt: skip
    parser.add_argument("--placement", choices=sorted(PLACEMENTS), default="free",
                        help="free: the kernel decides; split: the cloud's side on CPU 0, the rest on CPU 1")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the results (default: a new one under target/bench)")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder, with all logs")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    return parser.parse_args()


def chosen(asked: argparse.Namespace) -> list[tuple[Row, tuple[str, ...]]]:
    """Returns the rows of this run, with the contestants of each."""
    unknown = set(asked.only) - {row.name for row in ROWS}
    if unknown:
        raise SystemExit(f"bench: no such row: {' '.join(sorted(unknown))}; --list names them")
    rows = [row for row in ROWS if not asked.only or row.name in asked.only]
    if asked.before:
        own = [row for row in rows if "causeway" in row.contestants and (asked.only or row.before)]
        return [_before(row) for row in own]
    if asked.profile:
        return [(row, ("causeway",)) for row in rows]
    if asked.smoke:
        return [(row, row.smoke or ("causeway",)) for row in rows if row.smoke or asked.only]
    return [(row, row.contestants) for row in rows]


def _before(row: Row) -> tuple[Row, tuple[str, ...]]:
    """Returns the row with another build as a reference, and its contestants."""
    other = tuple(name for name in ("haproxy-hops",) if name in row.contestants)
    # Some differences between starts (a tunnel's window, memory layout) stay until the end: two runs of one program differ
    # by up to a sixth. Therefore each round has another start.
    start: Start = "renewed" if row.start == "together" else row.start
    return replace(row, references=("before", *other), start=start), (*other, "before", "causeway")


def programs(rows: list[tuple[Row, tuple[str, ...]]]) -> set[str]:
    """Returns the names of all programs that these rows need."""
    base = {"nginx", "openssl", "curl", "wrk", "h2load"}
    return base.union(*(row.needs for row, _ in rows), *(CONTESTANTS[name].needs for _, who in rows for name in who))


def measure(bed: Bed, rows: list[tuple[Row, tuple[str, ...]]]) -> tuple[list[Outcome], bool]:
    """Runs all rows in order; returns whether all were measured. Results remain even if the run is interrupted."""
    outcomes: list[Outcome] = []
    try:
        bed.prepare()
        for row, who in rows:
            print(f"bench: {row.name}: {row.title}", file=sys.stderr, flush=True)
            outcomes.append(run_row(bed, row, who))
            print(report.line(outcomes[-1]), file=sys.stderr, flush=True)
    except (KeyboardInterrupt, SystemExit):
        print("bench: interrupted; the results so far follow", file=sys.stderr)
        return outcomes, False
    finally:
        bed.stop()
    return outcomes, True


def profile(bed: Bed, rows: list[tuple[Row, tuple[str, ...]]], out: Path) -> int:
    """Draws flame graphs in place of figures."""
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
        raise SystemExit("bench: --profile requires --only ROW")
    if asked.list:
        for row in ROWS:
            print(f"{row.name:24}{'smoke' if row.smoke else '':7}{row.title}")
        return 0
    # Ends like Ctrl-C: through every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = chosen(asked)
    bench = Path(__file__).resolve().parent.parent
    wanted = programs(rows)
    tools = Tools.gather(bench, wanted - _BUILT)
    tools.add("causeway", Path(os.environ["BENCH_PROGRAM"]), "not built")
    tools.add("bench-load", Path(os.environ["BENCH_LOAD"]), "bench/load is not built")
    if asked.before:
        tools.add("before", asked.before.resolve(), "not built")
    pace = PACES["smoke" if asked.smoke else "full" if asked.full else "default"]
    if asked.rounds:
        pace = replace(pace, rounds=asked.rounds, long_rounds=asked.rounds)

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

    run = Run(outcomes, machine, pace, asked.placement, bed.configurations, words(asked), took, scratch)
    print(f"\n{report.short(run)}")
    out = asked.out or Path(os.environ["CARGO_TARGET_DIR"]) / "bench" / time.strftime("%Y%m%d-%H%M%S")
    report.write(run, out)
    print(f"\nbench: {len(outcomes)} rows in {took:.0f} s; results in {out}", flush=True)
    return conclude(run, asked.smoke) if whole else 1


def words(asked: argparse.Namespace) -> list[str]:
    """Returns the arguments that decide the measurement, for the results."""
    said = [f"--{name}" for name in ("smoke", "full") if getattr(asked, name)]
    said += ["--only", *asked.only] if asked.only else []
    said += ["--rounds", str(asked.rounds)] if asked.rounds else []
    said += ["--before", str(asked.before)] if asked.before else []
    return said + (["--placement", asked.placement] if asked.placement != "free" else [])


def conclude(run: Run, smoke: bool) -> int:
    """Returns the exit status; a smoke run prints its faults."""
    if not smoke:
        return report.status(run)
    faults = report.faults(run)
    for fault in faults:
        print(f"bench: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
