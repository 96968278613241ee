"""Results of a run: a table for the terminal, the same with all details as Markdown, and JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from .bed import MIB, Pace
from .callers import WRONG
from .machine import Machine
from .rounds import Outcome, Spread

_PLACED = {
    "free": "No pinning: the kernel places all processes on all CPUs",
    "split": "Pinned: HAProxy, gateways and tunnels' servers on CPU 0; edges, agents, upstreams and generators on CPU 1",
}
Table = list[list[str]]


@dataclass(frozen=True)
class Run:
    """All results of a run, and its conditions."""

    outcomes: list[Outcome]
    machine: Machine
    pace: Pace
    placement: str
    configurations: dict[str, str]
    arguments: list[str]
    seconds: float
    scratch: Path

    @property
    def command(self) -> str:
        return shlex.join(["bench/run", *self.arguments])

    def clean(self, text: str) -> str:
        """Removes this machine's folders, which logs and reasons may name."""
        return text.replace(str(self.scratch), "$SCRATCH").replace(str(Path.home()), "~")


def number(value: float) -> str:
    """Formats a value with three significant digits and without an exponent."""
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or value == 0 else f"{value:.3f}"


def spread(found: Spread | None) -> str:
    if found is None:
        return "–"
    if found.low == found.high:
        return number(found.median)
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"


def line(outcome: Outcome) -> str:
    """Formats a row's first figure in one line, for the progress of a run."""
    figure = outcome.row.figures[0]
    reference = next((name for name in outcome.row.references if name in outcome.samples), None)
    cells = []
    for who in outcome.samples:
        ratio = outcome.ratio(who, figure, reference) if reference and who != reference else None
        said = outcome.spread(who, figure)
        if said is not None:
            cells.append(f"{who} {number(said.median)}" + (f" ×{number(ratio.median)}" if ratio else ""))
    cells += [f"{who} failed" for who in outcome.failed]
    return f"  {figure}: {', '.join(cells)} ({outcome.seconds:.0f} s)"


def ratios(run: Run) -> Table:
    """Returns each shown figure of each row by contestant, with its ratio to every reference of the run."""
    references = list(dict.fromkeys(name for outcome in run.outcomes for name in outcome.row.references))
    table = [["row", "figure", "contestant", "median (min–max)", *(f"× {name}" for name in references)]]
    for outcome in run.outcomes:
        row = outcome.row
        for figure in row.figures:
            for who in outcome.samples:
                found = outcome.spread(who, figure)
                if found is not None:
                    against = (
                        spread(outcome.ratio(who, figure, name)) if name in row.references and name != who else "–"
                        for name in references
                    )
                    table.append([row.name, figure, who, spread(found), *against])
        table += [[row.name, "failed", who, *("–" for _ in ["", *references])] for who in outcome.failed]
    return table


def short(run: Run) -> str:
    """Formats the table for a terminal."""
    table = ratios(run)
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)


def _markdown_table(table: Table) -> list[str]:
    rows = [f"| {' | '.join(cells)} |" for cells in table]
    return [rows[0], f"|{' --- |' * len(table[0])}", *rows[1:]]


def _details(outcome: Outcome) -> list[str]:
    """Returns all figures of a row, and the reason if a contestant has none."""
    lines = [f"### `{outcome.row.name}`: {outcome.row.title}", ""]
    who = list(outcome.samples)
    figures = dict.fromkeys(name for samples in outcome.samples.values() for sample in samples for name in sample)
    if figures:
        rows = [[figure, *(spread(outcome.spread(one, figure)) for one in who)] for figure in figures]
        lines += [*_markdown_table([["figure", *who], *rows]), ""]
    for name, why in outcome.failed.items():
        lines += [f"**{name} failed**: {' '.join(why.split())[:600]}", ""]
    return lines


def _markdown(run: Run) -> str:
    pace = run.pace
    lines = [
        "# Results of the benchmark",
        "",
        f"Written by `{run.command}` on {datetime.now(UTC):%Y-%m-%d}, in {run.seconds / 60:.0f} minutes. "
        f"Each row has {pace.rounds} rounds, long ones {pace.long_rounds}, and contestants take turns within each.",
        f"Requests last {pace.seconds} s a round after {pace.warm} s of warming up; one transfer is {pace.bulk // MIB} MiB,"
        f" each of eight {pace.bulk_of_eight // MIB} MiB. {_PLACED[run.placement]}.",
        "A figure is the median of its rounds with the least and the most; a ratio is taken round by round.",
        "`docs/explanation/performance.md` describes how rows are measured.",
        "",
        "## Ratios",
        "",
        *_markdown_table(ratios(run)),
        "",
        "## Rows",
        "",
        *(text for outcome in run.outcomes for text in _details(outcome)),
        "## Machine",
        "",
        *(f"- {name}: {value}" for name, value in run.machine.facts.items()),
        "",
        *_markdown_table([["program", "version"], *map(list, run.machine.versions.items())]),
        "",
        "## Configurations",
        "",
        "`$SCRATCH` is the run's own folder; ports are chosen at each start.",
        "",
    ]
    for name, text in sorted(run.configurations.items()):
        lines += [f"<details><summary>{name}</summary>", "", "```", text.rstrip(), "```", "", "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def write(run: Run, out: Path) -> None:
    """Writes `results.md` and `results.json` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(run.clean(_markdown(run)))
    found = {
        "command": run.command,
        "placement": run.placement,
        "pace": asdict(run.pace),
        "seconds": round(run.seconds, 1),
        "machine": asdict(run.machine),
        "rows": {outcome.row.name: outcome.plain() for outcome in run.outcomes},
        "configurations": run.configurations,
    }
    (out / "results.json").write_text(run.clean(json.dumps(found, indent=1)) + "\n")


def faults(run: Run) -> list[str]:
    """Returns every failure to measure a contestant, and every wrong answer, of a smoke."""
    found = [f"{outcome.row.name}: {who}: {why}" for outcome in run.outcomes for who, why in outcome.failed.items()]
    for outcome in run.outcomes:
        for who, samples in outcome.samples.items():
            wrong = sum(sample.get(WRONG, 0) for sample in samples)
            if wrong:
                found.append(f"{outcome.row.name}: {who}: {wrong:.0f} answers with a wrong status")
    return found


def status(run: Run) -> int:
    """Returns the exit status: 1 if Causeway could not be measured; figures are not judged."""
    broken = any("causeway" in outcome.failed for outcome in run.outcomes)
    return 1 if broken or not run.outcomes else 0
