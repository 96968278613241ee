"""Results: a table of bars, a table of ratios, the details of each row, JSON, and pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from . import pictures, prose
from .bars import BARS, Bar
from .prose import Run
from .rounds import Outcome, Spread


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or value == 0 else f"{value:.3f}"


def spread(found: Spread | None) -> str:
    if found is None:
        return "–"
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"


def line(outcome: Outcome) -> str:
    """One row in one line, while a run goes on."""
    row = outcome.row
    cells = []
    for who in outcome.samples:
        ratio = outcome.ratio(who, row.headline) if row.reference and who != row.reference else None
        said = outcome.spread(who, row.headline)
        if said is not None:
            cells.append(f"{who} {number(said.median)}" + (f" ×{number(ratio.median)}" if ratio else ""))
    cells += [f"{who} failed" for who in outcome.failed]
    return f"  {row.headline}: {', '.join(cells)} ({outcome.seconds:.0f} s)"


def bar_line(bar: Bar, rows: dict[str, Outcome]) -> str:
    found = [part(rows) for part in bar.parts]
    if not any(found):
        here, verdict = "–", bar.elsewhere
    else:
        here = " / ".join(spread(one) + bar.unit if one else "–" for one in found)
        said = [bar.verdict(index, one) if one else "not measured" for index, one in enumerate(found)]
        verdict = " / ".join(said if len(set(said)) > 1 else said[:1])
    must, aim = (" / ".join(number(one) for one in limits) + bar.unit for limits in (bar.must, bar.aim))
    return f"| {bar.measure} | {bar.konnectivity} | {bar.best_other} | {must} | {aim} | {here} | {verdict} |"


def bars(run: Run) -> list[str]:
    """The design's bars. They stand against HAProxy: beside another build of ours nothing is judged."""
    if any(outcome.row.reference == "before" for outcome in run.outcomes):
        return ["| measure |", "| --- |", "| not judged: the reference is another build of Causeway |"]
    rows = {outcome.row.name: outcome for outcome in run.outcomes}
    return [
        "| measure | Konnectivity (design) | best other (design) | must | aim | here | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(bar_line(bar, rows) for bar in BARS),
    ]


def shortfalls(run: Run, why: Path) -> list[str]:
    """For each bar that is not reached: why, with its profile, as somebody who looked has written it down."""
    rows = {outcome.row.name: outcome for outcome in run.outcomes}
    short: dict[str, list[str]] = {}
    for bar in BARS:
        said = [bar.verdict(index, found) for index, part in enumerate(bar.parts) if (found := part(rows))]
        if "falls short" in said:
            short.setdefault(bar.why, []).append(bar.measure)
    lines = []
    for name, measures in short.items():
        text = why / f"{name}.md"
        lines += [f"### {'; '.join(measures)}", ""]
        lines += [text.read_text().strip() if name and text.is_file() else "Nobody has looked into it yet.", ""]
    return lines or ["Nothing.", ""]


def ratios(run: Run) -> list[str]:
    """The headline of each row, by contestant: the reference's figure, and the others as ratios to it."""
    lines = [
        "| row | figure | contestant | median (min–max) | against the reference |",
        "| --- | --- | --- | --- | --- |",
    ]
    for outcome in run.outcomes:
        row = outcome.row
        for who in dict.fromkeys([*outcome.samples, *outcome.failed]):
            said = spread(outcome.spread(who, row.headline))
            ratio = (
                "reference" if who == row.reference else spread(outcome.ratio(who, row.headline)) if row.reference else "–"
            )
            if who in outcome.failed:
                ratio = "failed" + (f" in a later round; before {ratio}" if outcome.samples.get(who) else "")
            lines.append(f"| {row.name} | {row.headline} | {who} | {said} | {ratio} |")
    return lines


def short(run: Run) -> str:
    """What a terminal shows."""
    return "\n".join(["", *_aligned(ratios(run)), "", *_aligned(bars(run))])


def _aligned(table: list[str]) -> list[str]:
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for index, row in enumerate(table) if index != 1]
    widths = [min(60, max(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    return ["  ".join(cell[:60].ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def details(outcome: Outcome) -> list[str]:
    """All figures of a row."""
    row = outcome.row
    lines = [f"### `{row.name}`: {row.title}", ""]
    who = list(outcome.samples)
    figures = list(dict.fromkeys(name for one in who for sample in outcome.samples[one] for name in sample))
    if figures:
        lines += [f"| figure | {' | '.join(who)} |", f"| --- |{' --- |' * len(who)}"]
        for figure in figures:
            lines.append(f"| {figure} | {' | '.join(spread(outcome.spread(one, figure)) for one in who)} |")
        lines.append("")
    for name, why in outcome.failed.items():
        lines += [f"**{name} failed**: {' '.join(why.split())[:600]}", ""]
    return lines


def markdown(run: Run, why: Path) -> str:
    lines = ["# Results of the benchmark", "", *prose.opening(run), "", "## Bars", "", *prose.BARS, "", *bars(run), ""]
    lines += ["## What falls short", "", *shortfalls(run, why)]
    if any(outcome.row.name.startswith("growth") for outcome in run.outcomes):
        lines += ["## Growth", "", (why / "growth.md").read_text().strip(), ""]
    if any(outcome.row.name == "readers" for outcome in run.outcomes):
        lines += ["## What nodes read", "", (why / "reading.md").read_text().strip(), ""]
    lines += ["## Ratios", ""]
    lines += [f"![{title}](pictures/{name})\n" for name, title in pictures.names(run.outcomes)]
    lines += [*ratios(run), "", "## Rows", ""]
    lines += [text for outcome in run.outcomes for text in details(outcome)]
    lines += ["## How it was measured", "", *prose.method(run), "", "## Machine", ""]
    lines += [f"- {name}: {value}" for name, value in run.machine.facts.items()]
    lines += ["", "| program | version |", "| --- | --- |"]
    lines += [f"| {name} | {version} |" for name, version in run.machine.versions.items()]
    lines += [
        "",
        "## Configurations",
        "",
        "`$SCRATCH` is the run's own folder; ports are chosen anew at each start.",
        "",
    ]
    for name, text in sorted(run.configurations.items()):
        lines += [f"<details><summary>{name}</summary>", "", "```", text.rstrip(), "```", "", "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def write(run: Run, out: Path, why: Path) -> None:
    """Into `out`; what is known of shortfalls is in `why`."""
    out.mkdir(parents=True, exist_ok=True)
    pictures.draw(run.outcomes, out / "pictures")
    (out / "RESULTS.md").write_text(run.clean(markdown(run, why)))
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


def status(run: Run) -> int:
    """Fails where Causeway did: others may, and figures are not judged here."""
    broken = [outcome.row.name for outcome in run.outcomes if "causeway" in outcome.failed]
    return 1 if broken or not run.outcomes else 0
