"""Bars as SVG, written by hand: no library is worth installing for rectangles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .rounds import Outcome, Spread

COLOURS = {
    "haproxy": "#8a8f98",
    "causeway": "#1f6feb",
    "before": "#8b949e",
    "konnectivity": "#c2410c",
    "frp": "#15803d",
    "chisel": "#a16207",
    "rathole": "#7e22ce",
    "plain": "#8a8f98",
}
_LABELS, _WIDTH, _BAR, _GAP = 130, 700, 18, 6


@dataclass(frozen=True)
class Picture:
    """Ratios to each row's reference, a group of bars for each row."""

    file: str
    title: str
    rows: tuple[str, ...]


PICTURES = (
    Picture("requests.svg", "Requests/s against HAProxy straight (more is better)",
            ("http1-1", "http1-64", "http1-256", "http2-64", "connect-64", "connections")),
    Picture("transfers.svg", "MB/s against HAProxy straight (more is better)",
            ("down-1", "down-8", "up-1", "up-8", "connect-down", "connect-up", "upgrade-down", "upgrade-up")),
    Picture("neighbours.svg", "What 64 callers keep beside readers that do not read (1 is all)",
            ("stalled-1", "stalled-64", "slow-1")),
    Picture("growth.svg", "Requests/s of 64 callers of one node, by the number of other nodes registered",
            ("growth-0", "growth-100", "growth-1000", "growth-10000")),
    Picture("link.svg", "MB/s of one stream over 50 ms, at 50 and at 125 MB/s, against plain TCP (more is better)",
            ("link-50", "link-125")),
)  # fmt: skip


def names(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    """File and title of those that this run has figures for."""
    measured = {outcome.row.name for outcome in outcomes if any(outcome.samples.values())}
    return [(picture.file, picture.title) for picture in PICTURES if measured & set(picture.rows)]


def draw(outcomes: list[Outcome], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {outcome.row.name: outcome for outcome in outcomes}
    wanted = {file for file, _ in names(outcomes)}
    for picture in PICTURES:
        if picture.file in wanted:
            groups = [(name, _bars(by_name[name])) for name in picture.rows if name in by_name]
            (folder / picture.file).write_text(_svg(picture.title, [group for group in groups if group[1]]))


def _bars(outcome: Outcome) -> list[tuple[str, Spread]]:
    row = outcome.row
    # What is kept is a share already; what has no reference is shown as it is.
    plain = row.headline == "kept" or not row.reference
    found = (
        (who, outcome.spread(who, row.headline) if plain else outcome.ratio(who, row.headline)) for who in outcome.samples
    )
    return [(who, spread) for who, spread in found if spread is not None]


def _svg(title: str, groups: list[tuple[str, list[tuple[str, Spread]]]]) -> str:
    longest = max((spread.high for _, bars in groups for _, spread in bars), default=1.0) or 1.0
    body: list[str] = []
    top = 40
    for name, bars in groups:
        body.append(f'<text x="8" y="{top + 13}" font-weight="bold">{escape(name)}</text>')
        top += 20
        for who, spread in bars:
            body.extend(_bar(who, spread, top, longest))
            top += _BAR + _GAP
        top += 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 90}" height="{top + 8}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="8" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
            *body,
            "</svg>\n",
        ]
    )


def _bar(who: str, spread: Spread, top: int, longest: float) -> Iterable[str]:
    def at(value: float) -> float:
        return _LABELS + value / longest * (_WIDTH - _LABELS)

    middle = top + _BAR / 2
    yield f'<text x="{_LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(who)}</text>'
    yield (
        f'<rect x="{_LABELS}" y="{top}" width="{max(1.0, at(spread.median) - _LABELS):.1f}" height="{_BAR}" '
        f'fill="{COLOURS.get(who, "#444444")}"/>'
    )
    yield (
        f'<line x1="{at(spread.low):.1f}" x2="{at(spread.high):.1f}" y1="{middle}" y2="{middle}" '
        'stroke="#000000" stroke-width="1.5"/>'
    )
    said = f"{spread.median:,.0f}" if spread.median >= 100 else f"{spread.median:.2f}"
    yield f'<text x="{at(spread.high) + 6:.1f}" y="{middle + 4}">{said}</text>'
