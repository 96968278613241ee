"""Runs rows: contestants in turn, round after round, so that changes of the machine affect all of them alike."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from . import load
from .bed import Bed
from .callers import Figures, check_answer, wrk
from .contestant import Contestant
from .link import long_bed
from .process import Trouble
from .rows import CONTESTANTS, Row


@dataclass(frozen=True)
class Spread:
    """A figure over all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Outcome:
    """Results of a row: a list of figures, one for each round, by contestant; and the reasons why the others have
    none."""

    row: Row
    samples: dict[str, list[Figures]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def spread(self, contestant: str, figure: str) -> Spread | None:
        values = [sample[figure] for sample in self.samples.get(contestant, []) if figure in sample]
        return Spread.of(values) if values else None

    def ratio(self, contestant: str, figure: str, reference: str) -> Spread | None:
        """Returns each round's figure divided by the reference's of the same round."""
        against = self.samples.get(reference, [])
        pairs = zip(self.samples.get(contestant, []), against, strict=False)
        ratios = [mine[figure] / theirs[figure] for mine, theirs in pairs if figure in mine and theirs.get(figure)]
        return Spread.of(ratios) if ratios else None

    def plain(self) -> dict[str, Any]:
        """Returns it in the form for JSON."""
        figures = sorted({name for samples in self.samples.values() for sample in samples for name in sample})

        def table(find: Any) -> dict[str, Any]:
            found = {who: {figure: find(who, figure) for figure in figures} for who in self.samples}
            return {who: {name: asdict(one) for name, one in by.items() if one} for who, by in found.items()}

        return {
            "title": self.row.title,
            "shown": self.row.figures,
            "seconds": round(self.seconds, 1),
            "figures": table(self.spread),
            "ratios": {to: table(partial(self.ratio, reference=to)) for to in self.row.references if to in self.samples},
            "samples": self.samples,
            "failed": self.failed,
        }


def run_row(bed: Bed, row: Row, who: tuple[str, ...]) -> Outcome:
    """Runs all rounds of a row; a contestant that fails is left out from then on, with the reason."""
    outcome = Outcome(row)
    begin = time.monotonic()
    missing = [name for name in row.needs if name not in bed.tools.paths]
    if missing:
        reason = ", ".join(f"{name} is missing: {bed.tools.missing.get(name, 'not built')}" for name in missing)
        outcome.failed = dict.fromkeys(who, reason)
        return outcome
    try:
        with long_bed(bed, row.link) if row.link else nullcontext(bed) as place:
            _rounds(place, row, who, outcome)
    except Trouble as error:
        outcome.failed |= {name: str(error) for name in who if name not in outcome.failed}
    outcome.seconds = time.monotonic() - begin
    return outcome


def _rounds(bed: Bed, row: Row, who: tuple[str, ...], outcome: Outcome) -> None:
    standing: dict[str, Contestant] = {}
    try:
        if row.start == "together":
            for name in who:
                _guarded(outcome, name, lambda name=name: _stand(bed, row, name, standing))
        for turn in range(bed.pace.long_rounds if row.long else bed.pace.rounds):
            for name in _order(who, turn):
                if name not in outcome.failed:
                    _guarded(outcome, name, lambda name=name: _round(bed, row, name, standing, outcome))
    finally:
        for contestant in standing.values():
            contestant.stop()


def _order(who: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Returns the contestants in another order each round: none is always in one place, or behind the same one."""
    first = turn % len(who)
    order = who[first:] + who[:first]
    return order if turn % 2 == 0 else order[::-1]


def _stand(bed: Bed, row: Row, name: str, standing: dict[str, Contestant]) -> None:
    """Starts one and warms it up: the first requests dial connections that later requests use."""
    contestant = CONTESTANTS[name](name)
    standing[name] = contestant
    try:
        contestant.start(bed, bed.apps[row.app])
        check_answer(bed, contestant, row.app)
        _warm(bed, contestant)
    except Trouble as error:
        raise Trouble(f"{error} [{contestant.trouble()}]") from error


def _warm(bed: Bed, contestant: Contestant) -> None:
    if contestant.https is None:
        warmed = load.requests(bed, contestant, 16, bed.pace.warm)
    else:
        warmed = wrk(bed, contestant, 16, bed.pace.warm)
    if not warmed["requests_per_s"]:
        raise Trouble("no request was answered")


def _round(bed: Bed, row: Row, name: str, standing: dict[str, Contestant], outcome: Outcome) -> None:
    if row.start == "renewed":
        _stand(bed, row, name, standing)
    contestant = standing.get(name) or CONTESTANTS[name](name)
    try:
        if row.start == "fresh":
            contestant.start(bed, bed.apps[row.app])
        outcome.samples.setdefault(name, []).append(row.measure(bed, contestant))
    except Trouble as error:
        raise Trouble(f"{error} [{contestant.trouble()}]") from error
    finally:
        if row.start != "together":
            contestant.stop()


def _guarded(outcome: Outcome, name: str, act: Any) -> None:
    try:
        act()
    except (Trouble, OSError, KeyError, ValueError, ZeroDivisionError) as error:
        outcome.failed[name] = f"{type(error).__name__}: {error}" if not isinstance(error, Trouble) else str(error)
        print(f"bench: {outcome.row.name}: {name} failed: {outcome.failed[name]}", file=sys.stderr)
